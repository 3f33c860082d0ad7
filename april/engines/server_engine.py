"""What engines before a server have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from april.engines.admission import Admission
from april.errors import EngineError

ABORT_RESEND_S = 1.0
"""While a pause waits for attempts to end; the server may not have known them yet."""
PAUSE_DEADLINE_S = 25.0
"""Below the 30 s after which the driver gives an engine up that does not pause, so that the reason is heard."""


class ServerEngine:
    """Base of engines whose requests pass a gate."""

    _abort_again_s = ABORT_RESEND_S

    def __init__(self) -> None:
        self._admission = Admission()

    @property
    def name(self) -> str:
        """Short unique label."""
        raise NotImplementedError

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        """Ask for the end of these attempts (None: of all)."""
        raise NotImplementedError

    async def pause(self) -> None:
        """Close admission and end what is inside, asking again until it has ended; a call that fails is made again.

        The server itself is not paused: nothing of ours is inside any more, and to every probe a paused server is dead.

        Raises:
            EngineError: requests have not ended in PAUSE_DEADLINE_S.
        """
        self._admission.close()
        failure: EngineError | None = None
        try:
            async with asyncio.timeout(PAUSE_DEADLINE_S):
                while self._admission.inside:
                    try:
                        await self.abort(None)
                    except EngineError as error:
                        failure = error  # requests of a server that died end by themselves
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._abort_again_s):
                            await self._admission.until_idle()
        except TimeoutError:
            raise EngineError(
                f"engine {self.name} has not ended {len(self._admission.inside)} aborted requests in "
                f"{PAUSE_DEADLINE_S:g} s; is it paused by somebody else?"
            ) from failure

    async def resume(self) -> None:
        """Let requests in again."""
        self._admission.open()
