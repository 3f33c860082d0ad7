"""What goes wrong with the control calls of a fake server: answers that say nothing, and restarts between two calls."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum

from aiohttp import web


class ControlFault(StrEnum):
    """What goes wrong with one call. All but the restarts are answers in place of the server's own."""

    HTML = "html"
    """Status 200 and a page, as a proxy answers."""
    NULL = "null"
    """Status 200 and ``null``."""
    EMPTY = "empty"
    """Status 200 and nothing."""
    ERROR = "error"
    """Status 200 and an error in JSON."""
    NO_SUCCESS = "no_success"
    """Status 200 and ``{"success": false}``."""
    ECHOED = "echoed"
    """Status 422, and a text that repeats the request, as FastAPI does it."""
    FAILS = "fails"
    """Status 500, and a text that repeats the request."""
    SILENT = "silent"
    """The call is obeyed, and no answer comes."""
    RESTARTS_BEFORE = "restarts_before"
    """The process dies just before the call, and a new one with the weights of the start takes it."""
    RESTARTS_AFTER = "restarts_after"
    """The process obeys, answers and dies; a new one with the weights of the start takes the next call."""


SAYS_NOTHING = (
    ControlFault.HTML, ControlFault.NULL, ControlFault.EMPTY, ControlFault.ERROR, ControlFault.NO_SUCCESS,
)  # fmt: skip
"""Status 200 without a word of success."""


@dataclass(slots=True, kw_only=True)
class PlannedControlFault:
    """``kind`` hits the calls of ``route`` after the next ``later``, ``times`` times; ``obeyed``: done all the same."""

    kind: ControlFault
    route: str
    times: int = 1
    later: int = 0
    obeyed: bool = False


async def wrong_answer(kind: ControlFault, request: web.Request) -> web.Response:
    """The answer in place of the server's own."""
    match kind:
        case ControlFault.HTML:
            return web.Response(text="<html><body>It works</body></html>", content_type="text/html")
        case ControlFault.NULL:
            return web.json_response(None)
        case ControlFault.ERROR:
            return web.json_response({"error": {"message": "worker died", "code": 500}})
        case ControlFault.NO_SUCCESS:
            return web.json_response({"success": False})
        case ControlFault.ECHOED:
            asked = json.loads(await request.read() or b"null")
            return web.json_response({"detail": [{"msg": "Field required", "input": asked}]}, status=422)
        case ControlFault.FAILS:
            asked = (await request.read()).decode()
            return web.json_response({"error": {"message": f"died while handling {asked}"}}, status=500)
        case _:
            return web.Response()
