"""What a server says in place of an answer, as the error that it means."""

from __future__ import annotations

from typing import Any

import msgspec

from april.engines.http_client import error_text, failure_of
from april.errors import EngineError, WireError


def failure_said(payload: bytes, who: str) -> EngineError:
    """The error of an event or answer that has no tokens; ``who`` begins the message.

    Its code, where it has one, decides as a status would; a WireError if it is no error of any known shape.
    """
    try:
        said: Any = msgspec.json.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        said = None
    error = said.get("error") if isinstance(said, dict) else None
    if error is None and (not isinstance(said, dict) or said.get("message") is None):
        return WireError(f"{who}: the server's answer has neither tokens nor an error ({len(payload)} bytes)")
    code = (error if isinstance(error, dict) else said).get("code")
    if code == "context_length_exceeded":
        code = 400
    return failure_of(code if isinstance(code, int) else 500, f"{who}: the server says: {error_text(payload)}")
