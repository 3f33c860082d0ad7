"""Servers against each other: what they must have in common to be one pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from april.doctor.findings import Finding, Level
from april.engines.http.server_probe import ServerFacts
from april.server_text import said


def compared(servers: Mapping[str, ServerFacts]) -> list[Finding]:
    """What several servers (by address) must have in common and do not, and what they had better have."""
    found: list[Finding] = []
    for what, of, level, advice, promise in _COMMON:
        values = {url: of(facts) for url, facts in servers.items() if of(facts) not in (None, "")}
        if len(set(values.values())) > 1:
            given = ", ".join(f"{said(value)} ({url})" for url, value in values.items())
            found.append(Finding("several", level, f"the servers differ in their {what}: {given}", advice, promise))
    return found


_SAME_MODEL = "serve the same model everywhere"
_COMMON: tuple[tuple[str, Callable[[ServerFacts], Any], Level, str, str], ...] = (
    ("vocabulary", lambda s: s.capabilities.vocab_size, Level.MISSING, _SAME_MODEL, ""),
    (
        "model", lambda s: s.model, Level.LIMITED, f"{_SAME_MODEL}; if only the names differ, all is well",
        "all servers have the same weights before the first update",
    ),
    (
        "EOS ids", lambda s: s.capabilities.eos_token_ids, Level.LIMITED, _SAME_MODEL,
        "a response ends in the same way at every server",
    ),
    ("context", lambda s: s.capabilities.max_context, Level.REMARK, "april keeps to the shortest", ""),
    ("weight version", lambda s: s.label, Level.REMARK, "april's first weight update makes them equal", ""),
    (
        "log-probabilities", lambda s: s.capabilities.logprob_kind, Level.LIMITED, "start all with the same flags",
        "log-probabilities are of one kind",
    ),
    (
        "software version", lambda s: s.software, Level.LIMITED,
        "run the same everywhere, or a response that goes on at another server may differ in its last digits",
        "all servers compute the same to the last digit",
    ),
)  # fmt: skip
"""Subject, where it is, what a difference means, what to do, and what april does not promise then."""
