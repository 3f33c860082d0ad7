"""The border to the user's functions: how they are called, and what may come back from them.

Invariant: nothing that a rollout or reward function does (raise, exit, be cancelled from inside, call back) ends
anything but its own sample.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from april.errors import RolloutError

_inside: ContextVar[bool] = ContextVar("april_inside_user_code", default=False)


@contextmanager
def inside_user_code() -> Iterator[None]:
    """Marks the calling context, and threads started from it, as a rollout or reward function."""
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)


def refuse_inside_user_code() -> None:
    """Raise RolloutError in a rollout or reward function: what it asks for may wait for this very function."""
    if _inside.get():
        raise RolloutError(
            "next_batch, weight_update, evaluate and close cannot be called inside a rollout or reward function: "
            "they may wait for that very function; call them where the trainer runs"
        )


async def call_user(function: Callable[..., Any], *args: Any) -> Any:
    """Call a user's reward function: a coroutine function on this loop, a plain one in a thread."""
    with inside_user_code():
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
            return await function(*args)
        result = (await asyncio.to_thread(_in_thread, function, *args)).take()
        return await result if inspect.isawaitable(result) else result


class _Answer:
    """What a plain function returned; a coroutine that nobody fetches (close came first) is closed with it."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def take(self) -> Any:
        value, self._value = self._value, None
        return value

    def __del__(self) -> None:
        if inspect.iscoroutine(self._value):
            self._value.close()


def _in_thread(function: Callable[..., Any], *args: Any) -> _Answer:
    try:
        return _Answer(function(*args))
    except StopIteration as error:
        # asyncio cannot hand it over: whoever waits for the thread would wait for ever
        raise RolloutError(f"it raised {describe(error)}") from error


def own_cancellation(error: asyncio.CancelledError) -> RolloutError:
    """What a CancelledError means when nobody cancelled this task: something inside was. Raised again otherwise."""
    task = asyncio.current_task()
    assert task is not None
    if task.cancelling():
        raise error
    return RolloutError("something that it waited for was cancelled")


def describe(error: BaseException) -> str:
    """Type and message of an error, in one line."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
