"""The gate before a server: who may send a request now, and when nothing is on its way any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from april.errors import RequestRefused


class Admission:
    """Closed while weights change. Requests wait before it, and can be aborted there."""

    def __init__(self) -> None:
        self._open = True
        # attempts that wait -> True: go on, False: aborted before they were sent
        self._waiting: dict[str, asyncio.Future[bool]] = {}
        self._inside: set[str] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def __repr__(self) -> str:
        state = "open" if self._open else "closed"
        return f"<Admission {state}, {len(self._inside)} inside, {len(self._waiting)} waiting>"

    @property
    def inside(self) -> Collection[str]:
        """Attempts that were let in and have not ended."""
        return self._inside

    @asynccontextmanager
    async def request(self, attempt_id: str) -> AsyncIterator[bool]:
        """Inside for the time of one request; False: it was aborted while it waited, and must not be sent.

        Raises:
            RequestRefused: the id is in use; servers end both requests when one of them is aborted.
        """
        admitted = self.is_open or await self.wait(attempt_id)
        if not admitted:
            yield False
            return
        self.enter(attempt_id)
        try:
            yield True
        finally:
            self.leave(attempt_id)

    @property
    def is_open(self) -> bool:
        """Whether :meth:`enter` is allowed now, without a wait."""
        return self._open

    async def wait(self, attempt_id: str) -> bool:
        """Until it may enter; False: it was aborted while it waited, and must not be sent.

        Raises RequestRefused for an id that is in use.
        """
        self._require_new(attempt_id)
        while not self._open:
            turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            self._waiting[attempt_id] = turn
            try:
                if not await turn:
                    return False
            finally:
                self._waiting.pop(attempt_id, None)
        return True

    def enter(self, attempt_id: str) -> None:
        """Its request is sent now; raises RequestRefused for an id that is in use."""
        self._require_new(attempt_id)
        self._inside.add(attempt_id)
        self._idle.clear()

    def _require_new(self, attempt_id: str) -> None:
        if attempt_id in self._inside or attempt_id in self._waiting:
            raise RequestRefused(f"attempt {attempt_id} is in flight already: give every attempt an id of its own")

    def leave(self, attempt_id: str) -> None:
        """Its request has ended."""
        self._inside.discard(attempt_id)
        if not self._inside:
            self._idle.set()

    def abort(self, attempt_ids: Collection[str] | None) -> None:
        """End the wait of these attempts (None: of all); those inside are the server's affair."""
        self._end_waits(list(self._waiting) if attempt_ids is None else attempt_ids, admit=False)

    def close(self) -> None:
        """Nobody is let in any more."""
        self._open = False

    def open(self) -> None:
        """Let in who waits and who comes."""
        self._open = True
        self._end_waits(list(self._waiting), admit=True)

    async def until_idle(self) -> None:
        """Until nobody is inside."""
        await self._idle.wait()

    def _end_waits(self, attempt_ids: Collection[str], *, admit: bool) -> None:
        for attempt_id in attempt_ids:
            turn = self._waiting.get(attempt_id)
            if turn is not None and not turn.done():
                turn.set_result(admit)
