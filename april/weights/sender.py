"""One transfer of weights to engines: who gets them, in which phase, within which limits, and what came of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from april.engines.protocol import Engine

BUCKET_BYTES = 256 << 20
"""Bytes of tensors that are on their way at a time; a larger tensor goes alone."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """An engine that did not get the weights."""

    why: str
    """One sentence that names engine, phase and tensor."""
    torn: bool
    """It may have a part of them, and is of no version now; if not, it has what it had."""


@dataclass(slots=True)
class Sent:
    """The end of a transfer: engines that were left out, by name; all others have all the weights."""

    left_out: dict[str, LeftOut] = field(default_factory=dict)


class WeightSender:
    """Sends weights to ``engines``, as ``weight_update(weights=...)`` does, in the thread that calls :meth:`send`."""

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self._engines = engines
