"""What exporters have in common: a face of three methods, and the names that metrics have there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from april.export.texts import SampleText

PREFIX = "april/"


@runtime_checkable
class Exporter(Protocol):
    """Takes the metrics of batches to where they are looked at; anything with these methods is one."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """The metrics of one batch, under their own names; ``step`` is its number."""
        ...

    def log_texts(self, texts: Sequence[SampleText], step: int) -> None:
        """A few of its responses; where there is no place for text, nothing."""
        ...

    def close(self) -> None:
        """Nothing more comes; what the exporter has opened is closed."""
        ...


def named(metrics: Mapping[str, float]) -> dict[str, float]:
    """With april's prefix, so that they stand together."""
    return {PREFIX + name: float(value) for name, value in metrics.items()}
