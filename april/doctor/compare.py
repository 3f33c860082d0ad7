"""Servers against each other: what they must have in common to be one pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from april.doctor.findings import Finding, Level
from april.engines.kinds.offers import Offer


def compared(offers: Mapping[str, Offer]) -> list[Finding]:
    """What several servers (by address) must have in common and do not, and what they had better have."""
    found: list[Finding] = []
    for what, of, level, advice, promise in _COMMON:
        said = {url: of(offer) for url, offer in offers.items() if of(offer) is not None}
        if len(set(said.values())) > 1:
            given = ", ".join(f"{value} ({url})" for url, value in said.items())
            found.append(Finding("several", level, f"the servers differ in their {what}: {given}", advice, promise))
    return found


_SAME_MODEL = "serve the same model everywhere"
_COMMON: tuple[tuple[str, Callable[[Offer], Any], Level, str, str], ...] = (
    ("vocabulary", lambda o: o.capabilities.vocab_size, Level.MISSING, _SAME_MODEL, ""),
    (
        "model", lambda o: o.model, Level.LIMITED, f"{_SAME_MODEL}; if only the names differ, all is well",
        "all servers have the same weights before the first update",
    ),
    (
        "EOS ids", lambda o: o.capabilities.eos_token_ids, Level.LIMITED, _SAME_MODEL,
        "a response ends in the same way at every server",
    ),
    ("context", lambda o: o.capabilities.max_context, Level.REMARK, "april keeps to the shortest", ""),
    ("weight version", lambda o: o.weight_version, Level.REMARK, "april's first weight update makes them equal", ""),
    (
        "log-probabilities", lambda o: o.capabilities.logprob_kind, Level.LIMITED, "start all with the same flags",
        "log-probabilities are of one kind",
    ),
    (
        "software version", lambda o: o.version, Level.LIMITED,
        "run the same everywhere, or a response that goes on at another server may differ in its last digits",
        "all servers compute the same to the last digit",
    ),
)  # fmt: skip
"""Subject, where it is, what a difference means, what to do, and what april does not promise then."""
