"""A proxy before a server which, at one call of one route, does what a server or a network may do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from aiohttp import web

from tests.real_engines.recording_proxy import RecordingProxy


class Fault(StrEnum):
    """What goes wrong at a call."""

    KILLED = "killed"
    """The server's process is gone before the call reaches it."""
    HUNG = "hung"
    """The call never reaches the server, and is never answered."""
    STOPPED = "stopped"
    """All processes of the server stand still."""
    SLOW = "slow"
    """The call reaches it late; nothing is wrong."""
    ERROR = "500"
    """It is answered with 500, and does not reach the server."""
    SAYS_FAILED = "200 with failure"
    """The same with 200 and words of failure."""


SLOW_S = 1.0


@dataclass(slots=True)
class Plan:
    route: str
    fault: Fault
    skip: int = 0
    """Calls of this route that go through before."""
    lasts: bool = False
    """All further calls go wrong too."""
    act: Callable[[], None] = lambda: None
    """Does to the server's processes what the fault says."""


class FaultProxy(RecordingProxy):
    """Passes everything on but for the call of its ``plan``, which it carries out once, or from then on."""

    plan: Plan | None = None
    carried_out = False

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        plan = self.plan
        if plan is not None and request.method == "POST" and request.path == plan.route:
            plan.skip -= 1
            if plan.skip < 0:
                self.carried_out = True
                self.plan = plan if plan.lasts else None
                await request.read()
                plan.act()
                if plan.fault is Fault.ERROR:
                    return web.json_response({"error": {"message": "injected"}}, status=500)
                if plan.fault is Fault.SAYS_FAILED:
                    return web.json_response({"success": False, "message": "injected failure"})
                if plan.fault is Fault.HUNG:
                    await asyncio.Event().wait()
                if plan.fault is Fault.SLOW:
                    await asyncio.sleep(SLOW_S)
        return await super()._pass_on(request)
