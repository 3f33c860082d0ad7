"""Weight updates that somebody waits for: the trainer's part of each, and how it ended.

What follows from how a call ended is decided in ``april.core.weight_updates``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from april.core import commands as do
from april.core import events as ev
from april.core.versions import PolicyVersion
from april.driver.user_code import describe
from april.errors import EngineError


@dataclass(slots=True, kw_only=True)
class PendingUpdate:
    """A weight update that somebody waits for."""

    number: int
    handing_over: asyncio.Future[None]
    ended: asyncio.Future[PolicyVersion]
    restore: Callable[[], None]


class PendingUpdates:
    """All of them; ``post`` takes events."""

    def __init__(self, post: Callable[[ev.Event], None]) -> None:
        self._post = post
        self._updates: dict[int, PendingUpdate] = {}
        self._errors: dict[int, BaseException] = {}
        """By call of an engine (0: the transfer), for whoever waits for an update."""
        self._last_update = 0

    def begin(self, restore: Callable[[], None] = lambda: None, **request: Any) -> PendingUpdate:
        """Ask the core for an update (``request``: fields of UpdateRequested), whose end is to be waited for."""
        loop = asyncio.get_running_loop()
        self._last_update += 1
        number = self._last_update
        update = self._updates[number] = PendingUpdate(
            number=number, handing_over=loop.create_future(), ended=loop.create_future(), restore=restore
        )
        self._post(ev.UpdateRequested(update=number, **request))
        return update

    async def end(self, update: PendingUpdate, transfer: Callable[[], Awaitable[None]] | None) -> PolicyVersion:
        """Wait for the end of an update; the version then.

        ``transfer`` runs in the task of the caller, which may be cancelled there; what the engines are doing then is
        carried to its end first.

        Raises whatever ``transfer`` or a call of an engine raises.
        """
        number = update.number
        cancelled: asyncio.CancelledError | None = None
        while not update.ended.done():
            try:
                if transfer is not None and update.handing_over.done():
                    begun, transfer = transfer, None
                    await self._hand_over(number, begun)
                else:
                    waits: list[asyncio.Future[Any]] = [update.ended]
                    waits += [] if transfer is None else [update.handing_over]
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError as cancellation:
                cancelled, transfer = cancellation, None
                self._post(ev.UpdateCancelled(number))
        version = update.ended.result()
        if cancelled is not None:
            raise cancelled
        return version

    async def _hand_over(self, number: int, transfer: Callable[[], Awaitable[None]]) -> None:
        try:
            await transfer()
        except BaseException as error:
            self._errors[0] = error
            why = describe(error)
            if isinstance(error, asyncio.CancelledError):
                why = str(error) or "interrupted"
            self._post(ev.HandedOver(number, why))
        else:
            self._post(ev.HandedOver(number))

    def hand_over(self, command: do.HandOver) -> None:
        """The engines are paused for the transfer."""
        self._updates[command.update].handing_over.set_result(None)

    def restore(self, command: do.Restore) -> None:
        """The saved state goes into the core now."""
        self._updates[command.update].restore()
        self._post(ev.Restored(command.update))

    def update_ended(self, command: do.UpdateEnded) -> None:
        """Whoever waits for it goes on."""
        update = self._updates.pop(command.update)
        if not update.ended.done() and command.failed is not None:
            raised = EngineError(command.why) if command.why else self._errors[command.failed]
            update.ended.set_exception(raised)
        elif not update.ended.done():
            update.ended.set_result(command.version)
        if not self._updates:
            self._errors.clear()

    def failed(self, call: int, error: BaseException) -> None:
        """A call of an engine has raised this."""
        if self._updates:
            self._errors[call] = error

    def fail(self, error: BaseException) -> None:
        """Nothing goes on; whoever waits is told."""
        for update in self._updates.values():
            if not update.ended.done():
                update.ended.set_exception(error)
                update.ended.exception()
