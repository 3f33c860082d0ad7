"""The border to the user's functions: which kinds there are, and what may come back from them.

Invariant: nothing that a rollout or reward function does (raise, exit, be cancelled from inside, call back) ends
anything but its own sample.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar

from april.errors import AprilError, ConfigError, RolloutError, UsageError
from april.model_turns import refuse_while_held

T = TypeVar("T")

_inside: ContextVar[bool] = ContextVar("april_inside_user_code", default=False)


@contextmanager
def inside_user_code() -> Iterator[None]:
    """Marks the calling context, and the tasks started from it, as a function that april waits for."""
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)


def call_user_code(function: Callable[[], T]) -> T:
    """:func:`inside_user_code` in the trainer's thread: a signal there cannot leave the mark behind."""

    def marked() -> T:
        _inside.set(True)
        return function()

    return copy_context().run(marked)


def refuse_inside_user_code() -> None:
    """Raise RolloutError in a function that april waits for: what it asks for may wait for this very function."""
    refuse_while_held("next_batch, weight_update, evaluate and close")
    if _inside.get():
        raise RolloutError(
            "next_batch, weight_update, evaluate and close cannot be called inside a rollout or reward function, or a "
            "transfer: they may wait for that very function; call them where the trainer runs"
        )


# ---------------------------------------------------------------- before anything runs


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a call gives a coroutine: an async function or ``__call__``, or a partial of one."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def check_function(what: str, function: Any, parameters: Sequence[str]) -> None:
    """Raise ConfigError for what cannot be called with these parameters, where that can be known beforehand."""
    if not callable(function):
        raise ConfigError(f"{what} must be a function, got {type(function).__name__}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"{what}: {name_of(function)} is a generator (it has a yield); it must return its result")
    try:
        # a decorator may add or take arguments: what counts is what is called
        signature = inspect.signature(function, follow_wrapped=False)
        bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        signature = signature.replace(parameters=bare, return_annotation=signature.empty)
    except (TypeError, ValueError):
        return  # some builtins do not tell
    try:
        signature.bind(*parameters)
    except TypeError as error:
        given = ", ".join(parameters)
        raise ConfigError(
            f"{what} is called with ({given}), which {name_of(function)}{signature} does not take: {error}"
        ) from None


PARAMETERS = {
    "rollout": ("prompt", "llm"), "reward": ("prompt", "response"), "group_reward": ("prompt", "responses"),
    "filter": ("prompt", "responses"),
}  # fmt: skip
"""The arguments of each kind of function."""


def check_signatures(**functions: Any) -> None:
    """Raise ConfigError for functions that cannot be called as their kind is; None stands for one that is not given."""
    for kind, function in functions.items():
        if function is not None:
            check_function(kind, function, PARAMETERS[kind])


def name_of(function: Callable[..., Any]) -> str:
    """The name that a user knows a function by."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name)


def code_of(function: Callable[..., Any] | None) -> CodeType | None:
    """The code of a function, below partials and decorators that name what they wrap."""
    while isinstance(function, functools.partial):
        function = function.func
    if function is None:
        return None
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None) or getattr(getattr(function, "__call__", None), "__code__", None)  # noqa: B004
    return code if isinstance(code, CodeType) else None


# ---------------------------------------------------------------- what comes back


class Outcome:
    """The value or error of a function; a coroutine that nobody takes is closed with it."""

    __slots__ = ("_value", "error")

    def __init__(self, value: Any, error: BaseException | None) -> None:
        self._value = value
        self.error = error

    @property
    def awaitable(self) -> bool:
        """True if the value is still to be awaited."""
        return inspect.isawaitable(self._value)

    def take(self) -> Any:
        """The value, which is the caller's from now on."""
        value, self._value = self._value, None
        return value

    def close(self) -> None:
        """Close a coroutine that nobody has taken."""
        if inspect.iscoroutine(self._value):
            self._value.close()

    __del__ = close


def outcome_of(function: Callable[[], Any]) -> Outcome:
    """Call a plain function; whatever it raises is its outcome."""
    try:
        return Outcome(function(), None)
    except BaseException as error:
        return Outcome(None, harmless(error))


def harmless(error: BaseException) -> BaseException:
    """The error itself, or a RolloutError for those that mean something else to whoever would wait for it."""
    if isinstance(error, (Exception, SystemExit, asyncio.CancelledError)) and not isinstance(
        error, (StopIteration, StopAsyncIteration)
    ):
        return error
    wrapped = RolloutError(f"it raised {describe(error)}")
    wrapped.__cause__ = error
    return wrapped.with_traceback(error.__traceback__)


def own_cancellation(error: asyncio.CancelledError) -> RolloutError:
    """Turn a CancelledError into a RolloutError if this task was not cancelled; else raise it again."""
    task = asyncio.current_task()
    assert task is not None
    if task.cancelling():
        raise error
    return cancelled_inside()


def cancelled_inside() -> RolloutError:
    """The error for a function in which something was cancelled, but not the function itself."""
    return RolloutError("something that it waited for was cancelled")


def message_of(error: BaseException) -> str:
    """The message of an error, as text that UTF-8 can carry: names of files may have halves of characters."""
    try:
        return str(error).encode("utf-8", "backslashreplace").decode()
    except Exception:  # of the user's own ``__str__``
        return "its message cannot be read"


def describe(error: BaseException) -> str:
    """Type and message of an error, in one line; april's own messages need no type."""
    message = " ".join(message_of(error).split())
    if message and isinstance(error, AprilError):
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


_HOUSE = str(Path(__file__).parent.parent) + os.sep
_PLACES = filter(None, map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")))
_LIBRARIES = tuple(place + os.sep for place in _PLACES)
MOST_CAUSES = 16
"""The most causes of an error that are looked at; some errors are their own cause."""


def is_users(file: str) -> bool:
    """Return whether code is the user's: neither april's nor an installed library's."""
    return not file.startswith((_HOUSE, "<frozen", *_LIBRARIES))


def is_aprils_coroutine(code: CodeType) -> bool:
    """Return whether code is that of a coroutine of april's, such as ``llm.chat``."""
    return bool(code.co_flags & inspect.CO_COROUTINE) and code.co_filename.startswith(_HOUSE)


def place_of(error: BaseException, function: Callable[..., Any] | None = None) -> str:
    """``line 7 of rewards.py``: where the user's code raised it, or else where ``function`` is; or nothing."""
    place, library, trace = "", "", error.__traceback__
    while trace is not None:
        file, line = trace.tb_frame.f_code.co_filename, trace.tb_lineno
        here = f"line {line} of {Path(file).name}"
        if is_users(file):
            place = here
        elif not file.startswith(_HOUSE):
            library = here
        trace = trace.tb_next
    if (found := place or library) or (code := code_of(function)) is None:
        return found
    return f"line {code.co_firstlineno} of {Path(code.co_filename).name}"


def describe_with_place(error: BaseException, place: str) -> str:
    """The text of an error with its place."""
    said = f"{describe(error)} ({place})" if place else describe(error)
    if isinstance(error, ValueError) and "main thread" in str(error):  # signal.signal, and what is built on it
        said += (
            "; plain functions run in threads, which have no signals: set function_timeout_s, or let what needs an "
            "alarm run in a process of its own"
        )
    return said


def kind_of(error: BaseException, place: str) -> str:
    """Type and place of a failure that no other try mends; empty for what may pass, as an outage of a judge does.

    Only Python's own errors and april's refusals: classes of libraries and users may stand for a server that is away,
    and so may what is raised because of them.
    """
    if isinstance(error.__cause__, (StopIteration, StopAsyncIteration)):  # as which they cannot be passed on
        error = error.__cause__
    mistaken = isinstance(error, (UsageError, TypeError, AttributeError, NameError, ImportError, NotImplementedError))
    return f"{type(error).__name__}, {place}" if mistaken or not _passes(error) else ""


def _passes(error: BaseException, deep: int = MOST_CAUSES) -> bool:
    """Return whether an error, its cause or any error of a group may pass."""
    if isinstance(error, (OSError, EOFError, MemoryError)) or type(error).__module__ != "builtins":
        return True
    if isinstance(error, BaseExceptionGroup):
        return any(_passes(member, deep) for member in error.exceptions)
    by_hand = not isinstance(error, (LookupError, ArithmeticError, AssertionError))
    context = error.__context__ if by_hand and not error.__suppress_context__ else None
    before = error.__cause__ or context
    return before is not None and deep > 0 and _passes(before, deep - 1)


log = logging.getLogger("april")


class FailureLog:
    """Warns of failures. Of one kind are failures of the same type that were raised in the same line."""

    def __init__(self) -> None:
        self._seen: set[tuple[object, ...]] = set()

    def warn(self, error: BaseException, what: str, *where: object, told: str = "", once: bool = False) -> None:
        """``what % where``, and what is wrong, in the words ``told``; ``once``: the first of its kind only."""
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        kind = (type(error), *((trace.tb_frame.f_code, trace.tb_lineno) if trace is not None else (what,)))
        first = kind not in self._seen
        self._seen.add(kind)
        if isinstance(error, UsageError):  # its sentence says all; what follows would be april's own lines
            trace = None
        if first or not once:
            traced = error if first and trace is not None else None
            log.warning(f"{what}: %s", *where, told or describe(error), exc_info=traced)
