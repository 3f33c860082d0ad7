"""What a server says in place of an answer, as the error that it means."""

from __future__ import annotations

import re
from typing import Any

from april.engines.http.server_json import NotJson, read_json
from april.errors import EngineBusy, EngineError, RequestRefused, WireError
from april.server_text import said

_AT_REST = re.compile(r"\bis (?:paused|asleep|sleeping)\b", re.IGNORECASE)
"""How servers say, with a status that blames the request, that they take none for now (TensorRT-LLM: 400)."""

_ADAPTER_GONE = re.compile(r"\bLoRA (?:adapters are not loaded|is not enabled)\b")
"""How SGLang says, with such a status, that the adapter which it had at the start is not there."""


def failure_of(status: int, text: str, retry_after_s: float | None = None) -> EngineError:
    """The error that a status means; all but 400, 413 and 422 are about the server: other requests meet it too."""
    if status in (429, 503) or (status in (400, 500) and _AT_REST.search(text)):
        return EngineBusy(text, retry_after_s)
    refused = status in (400, 413, 422) and not _ADAPTER_GONE.search(text)
    return RequestRefused(text) if refused else EngineError(text)


def failure_said(payload: bytes, who: str) -> EngineError:
    """The error of an event or answer that has no tokens; ``who`` begins the message.

    Its code, where it has one, decides as a status would; a WireError if it is no error of any known shape.
    """
    try:
        answer: Any = read_json(payload)
    except NotJson:
        answer = None
    error = answer.get("error") if isinstance(answer, dict) else None
    if error is None and (not isinstance(answer, dict) or answer.get("message") is None):
        return WireError(f"{who}: the server's answer has neither tokens nor an error ({len(payload)} bytes)")
    code = (error if isinstance(error, dict) else answer).get("code")
    if code == "context_length_exceeded":
        code = 400
    return failure_of(code if isinstance(code, int) else 500, f"{who}: the server says: {error_text(payload)}")


def error_text(body: bytes) -> str:
    """What an error answer says, out of the shapes that servers use, as :func:`said` shows it."""
    try:
        value: Any = read_json(body)
    except NotJson:
        value = body
    for _ in range(3):
        inner = next((value[key] for key in ("error", "message", "detail") if value.get(key)), None) if isinstance(
            value, dict
        ) else None
        if inner is None:
            break
        value = inner
    return said(value) or "nothing"
