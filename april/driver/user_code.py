"""The border to the user's functions: which kinds there are, and what may come back from them.

Invariant: nothing that a rollout or reward function does (raise, exit, be cancelled from inside, call back) ends
anything but its own sample.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from types import CodeType
from typing import Any, TypeVar

from april.errors import AprilError, ConfigError, RolloutError
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
    """Whether a call gives a coroutine: async functions, objects with an async ``__call__``, partials of both."""
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


def name_of(function: Callable[..., Any]) -> str:
    """What a user would call it."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name)


def code_of(function: Callable[..., Any] | None) -> CodeType | None:
    """Where it is defined, below partials and decorators that tell."""
    while isinstance(function, functools.partial):
        function = function.func
    if function is None:
        return None
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None) or getattr(getattr(function, "__call__", None), "__code__", None)  # noqa: B004
    return code if isinstance(code, CodeType) else None


# ---------------------------------------------------------------- what comes back


class Outcome:
    """What a function returned or raised; a coroutine that nobody fetches is closed with it."""

    __slots__ = ("_value", "error")

    def __init__(self, value: Any, error: BaseException | None) -> None:
        self._value = value
        self.error = error

    @property
    def awaitable(self) -> bool:
        """Whether the value is still to be awaited."""
        return inspect.isawaitable(self._value)

    def take(self) -> Any:
        """The value, which is the caller's from now on."""
        value, self._value = self._value, None
        return value

    def close(self) -> None:
        """Nobody will take it."""
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
    """What a CancelledError means when nobody cancelled this task: something inside was. Raised again otherwise."""
    task = asyncio.current_task()
    assert task is not None
    if task.cancelling():
        raise error
    return cancelled_inside()


def cancelled_inside() -> RolloutError:
    """Nobody cancelled the function, so it was something inside of it."""
    return RolloutError("something that it waited for was cancelled")


def message_of(error: BaseException) -> str:
    """What an error says, as text that UTF-8 can carry: names of files may have halves of characters."""
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
