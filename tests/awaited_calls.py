"""A call of a user's function as april makes it, waited for by a test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from april.driver.user_calls import UserCalls
from april.driver.user_code import harmless


async def awaited(calls: UserCalls, function: Callable[..., Any], *args: Any, where: object) -> Any:
    """The answer; raises what the function raises. If this is cancelled, so is the call."""
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def answered(value: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(harmless(error))

    call = calls.begin(function, args, where, answered)
    try:
        return await future
    except asyncio.CancelledError:
        call.cancel()
        raise
