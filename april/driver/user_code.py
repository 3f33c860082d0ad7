"""Checks the user's functions before a run, and captures, classifies and describes what they return or raise.

Invariant: if a rollout or reward function raises, exits, cancels itself or calls april, at most its own sample ends.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

from april.concurrency.model_lock import refuse_while_held
from april.errors import AprilError, ConfigError, RolloutError, UsageError

T = TypeVar("T")

_inside: ContextVar[bool] = ContextVar("april_inside_user_code", default=False)


@contextmanager
def inside_user_code() -> Iterator[None]:
    """Mark the current context, and tasks started in it, as running a function that april waits for."""
    token = _inside.set(True)
    try:
        yield
    finally:
        with suppress(ValueError):  # a coroutine that was left running may be closed in another context
            _inside.reset(token)


def run_as_user_code(function: Callable[..., T], *args: Any) -> T:
    """Call a user's function in this thread; april then refuses calls from it that would wait for the function."""
    with inside_user_code():
        return function(*args)


def call_user_code(function: Callable[[], T]) -> T:
    """Call a function inside :func:`inside_user_code`, in a copy of the current context.

    Because only the copy is marked, a signal that interrupts the trainer's thread cannot leave it marked.
    """
    return copy_context().run(run_as_user_code, function)


def refuse_inside_user_code() -> None:
    """Raise RolloutError inside a function that april waits for.

    The caller, such as ``next_batch``, may itself wait for that function, which would deadlock.
    """
    refuse_while_held("next_batch, weight_update, evaluate and close")
    if _inside.get():
        raise RolloutError(
            "next_batch, weight_update, evaluate and close cannot be called inside a rollout or reward function, or a "
            "transfer, because they may wait for that very function; call them where the trainer runs"
        )


# ---------------------------------------------------------------- checks before a run


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether calling the function gives a coroutine.

    That is so if the function or its ``__call__`` is async, or if it is a partial of such a function.
    """
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def check_function(what: str, function: Any, parameters: Sequence[str]) -> None:
    """Raise ConfigError if a function cannot be called with these parameters; ``what`` names it in messages."""
    check_returns(what, function)
    try:
        # a decorator may change the arguments, so look at the wrapper, which is what april calls
        signature = inspect.signature(function, follow_wrapped=False)
        bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        signature = signature.replace(parameters=bare, return_annotation=signature.empty)
    except (TypeError, ValueError):
        return  # some builtins have no signature
    try:
        signature.bind(*parameters)
    except TypeError as error:
        given = ", ".join(parameters)
        raise ConfigError(
            f"{what} is called with ({given}), but {name_of(function)}{signature} does not accept that: {error}"
        ) from None


def check_returns(what: str, function: Any) -> None:
    """Raise ConfigError if ``function`` is not callable, or is a generator function; ``what`` names it in messages."""
    if not callable(function):
        raise ConfigError(f"{what} must be a function, got {type(function).__name__}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"{what}: {name_of(function)} is a generator (it has a yield); it must return its result")


PARAMETERS = {
    "rollout": ("prompt", "llm"), "reward": ("prompt", "response"), "group_reward": ("prompt", "responses"),
    "filter": ("prompt", "responses"),
}  # fmt: skip
"""Parameters with which each kind of function is called."""


def name_of(function: Callable[..., Any]) -> str:
    """Return the name under which the user knows a function; for a partial, the name of its function."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name)


def code_of(function: Callable[..., Any] | None) -> CodeType | None:
    """Return the code object of a function, without partials and decorators that set ``__wrapped__``."""
    while isinstance(function, functools.partial):
        function = function.func
    if function is None:
        return None
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None) or getattr(getattr(function, "__call__", None), "__code__", None)  # noqa: B004
    return code if isinstance(code, CodeType) else None


# ---------------------------------------------------------------- results and errors


class Outcome:
    """The return value or error of a function; a returned coroutine that is never taken is closed."""

    __slots__ = ("_value", "error")

    def __init__(self, value: Any, error: BaseException | None) -> None:
        self._value = value
        self.error = error

    @property
    def awaitable(self) -> bool:
        """True if the value must be awaited."""
        return inspect.isawaitable(self._value)

    def take(self) -> Any:
        """Return the value; from now on the caller is responsible for closing it."""
        value, self._value = self._value, None
        return value

    def close(self) -> None:
        """Close a returned coroutine that was not taken."""
        if inspect.iscoroutine(self._value):
            self._value.close()

    __del__ = close


def outcome_of(function: Callable[[], Any]) -> Outcome:
    """Call a plain function and return its value or error as an Outcome; nothing is raised."""
    try:
        return Outcome(function(), None)
    except BaseException as error:
        return Outcome(None, harmless(error))


def harmless(error: BaseException) -> BaseException:
    """Return the error; if Python or asyncio would treat it specially, wrapped in a RolloutError.

    KeyboardInterrupt, StopIteration and GeneratorExit are examples of such errors.
    """
    if isinstance(error, (Exception, SystemExit, asyncio.CancelledError)) and not isinstance(
        error, (StopIteration, StopAsyncIteration)
    ):
        return error
    wrapped = RolloutError(f"it raised {describe(error)}")
    wrapped.__cause__ = error
    return wrapped.with_traceback(error.__traceback__)


def own_cancellation(error: asyncio.CancelledError) -> RolloutError:
    """Raise a CancelledError again if the current task was cancelled; otherwise return a RolloutError for it."""
    task = asyncio.current_task()
    assert task is not None
    if task.cancelling():
        raise error
    return cancelled_inside()


def cancelled_inside() -> RolloutError:
    """Return the error for a function that raised CancelledError although nobody cancelled the function itself."""
    return RolloutError("something that it waited for was cancelled")


def message_of(error: BaseException) -> str:
    """Return the message of an error as text that UTF-8 can encode, as file names in it may have surrogates."""
    try:
        return str(error).encode("utf-8", "backslashreplace").decode()
    except Exception:  # raised by the user's ``__str__``
        return "its message cannot be read"


def describe(error: BaseException) -> str:
    """Return the type and message of an error in one line; for april's own errors, only the message."""
    message = " ".join(message_of(error).split())
    if message and isinstance(error, AprilError):
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


_APRIL_DIR = str(Path(__file__).parent.parent) + os.sep
_STDLIB = tuple(place + os.sep for place in filter(None, map(sysconfig.get_path, ("stdlib", "platstdlib"))))
_SITES = "site-packages", "dist-packages"
MOST_CAUSES = 16
"""Maximum number of chained causes of an error that are examined; needed because an error can be its own cause."""


def is_user_file(file: str) -> bool:
    """Return whether a source file is the user's: neither april's nor an installed library's."""
    return not is_april_file(file) and not is_library_file(file)


def is_april_file(file: str) -> bool:
    """Return whether a source file is april's own."""
    return file.startswith(_APRIL_DIR)


@functools.lru_cache(4096)
def is_library_file(file: str) -> bool:
    """Return whether a file belongs to Python or an installed distribution; editable installs are the user's."""
    return file.startswith(("<", *_STDLIB)) or any(site in Path(file).parts for site in _SITES)


def file_of(frame: FrameType) -> str:
    """Return the file of a frame's code; for generated code, such as ``__init__`` of a dataclass, the module's file."""
    file = frame.f_code.co_filename
    if not file.startswith("<") or file.startswith("<frozen"):
        return file
    main = frame.f_globals.get("__name__") == "__main__"  # a notebook, or python -c
    return str(frame.f_globals.get("__file__") or ("__main__" if main else file))


def place_of(error: BaseException, function: Callable[..., Any] | None = None) -> str:
    """Return where the user's code raised an error, such as ``line 7 of rewards.py``.

    If the traceback has no line of the user's code, this is the last line of a library; without such a line, the line
    where ``function`` is defined; otherwise empty.
    """
    if isinstance(error, RemoteFunctionError):
        return ""
    place, library, trace = "", "", error.__traceback__
    while trace is not None:
        file, line = file_of(trace.tb_frame), trace.tb_lineno
        here = f"line {line} of {Path(trace.tb_frame.f_code.co_filename).name}"
        if is_user_file(file):
            place = here
        elif not is_april_file(file):
            library = here
        trace = trace.tb_next
    if (found := place or library) or (code := code_of(function)) is None:
        return found
    return f"line {code.co_firstlineno} of {Path(code.co_filename).name}"


def describe_with_place(error: BaseException, place: str) -> str:
    """Return the text of an error with its place in parentheses."""
    said = f"{describe(error)} ({place})" if place else describe(error)
    if isinstance(error, ValueError) and "main thread" in str(error):  # from signal.signal, or a library that uses it
        said += (
            "; plain functions run in threads, where signals do not work: set function_timeout_s, or use the alarm in "
            "a process of its own"
        )
    return said


class FunctionLost(RolloutError):
    """Raised when the process that ran a function has died.

    A lost rollout function is started again; calls that it had completed then get their recorded answers.
    """


class RemoteFunctionError(RolloutError):
    """Raised for a function that failed in another process; ``kind`` is what :func:`kind_of` returned there."""

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


def kind_of(error: BaseException, place: str) -> str:
    """Return type and line of an error that a retry would raise again, or "" for an error that may be temporary.

    Only Python's builtin errors and april's UsageError count as permanent. Errors of libraries and users, and errors
    raised because of them, may stand for a server that is temporarily unreachable, such as a judge.
    """
    if isinstance(error, RemoteFunctionError):
        return error.kind
    if isinstance(error.__cause__, (StopIteration, StopAsyncIteration)):  # wrapped by harmless()
        error = error.__cause__
    mistaken = isinstance(error, (UsageError, TypeError, AttributeError, NameError, ImportError, NotImplementedError))
    return f"{type(error).__name__}, {place}" if mistaken or not _may_pass(error) else ""


def _may_pass(error: BaseException, deep: int = MOST_CAUSES) -> bool:
    """Return whether an error may be temporary: by its type, or that of a cause or of an error in its group."""
    if isinstance(error, (OSError, EOFError, MemoryError)) or type(error).__module__ != "builtins":
        return True
    if isinstance(error, BaseExceptionGroup):
        return any(_may_pass(member, deep) for member in error.exceptions)
    own_bug = isinstance(error, (LookupError, ArithmeticError, AssertionError))  # even if another error came before
    context = None if own_bug or error.__suppress_context__ else error.__context__
    before = error.__cause__ or context
    return before is not None and deep > 0 and _may_pass(before, deep - 1)


log = logging.getLogger("april")


class FailureLog:
    """Logs failures, with a traceback for the first error of each type and line."""

    def __init__(self) -> None:
        self._seen: set[tuple[object, ...]] = set()

    def warn(self, error: BaseException, what: str, *where: object, text: str = "", once: bool = False) -> None:
        """Log the message ``what % where``, followed by ``text`` or, if that is empty, the error.

        ``once`` logs only the first error of each type and line.
        """
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        kind = (type(error), *((trace.tb_frame.f_code, trace.tb_lineno) if trace is not None else (what,)))
        first = kind not in self._seen
        self._seen.add(kind)
        if isinstance(error, (UsageError, RemoteFunctionError)):  # the traceback has only april's frames
            trace = None
        if first or not once:
            traced = error if first and trace is not None else None
            log.warning(f"{what}: %s", *where, text or describe(error), exc_info=traced)
