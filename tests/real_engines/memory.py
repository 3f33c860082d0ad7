"""The most memory that this process had at a time, by Linux's own mark, which nothing short escapes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(slots=True)
class Grown:
    """Bytes by which the peak in a block was above its beginning."""

    bytes: int = 0


@contextmanager
def peak_growth() -> Iterator[Grown]:
    """Measure a block; what is freed in it, or was unused at its beginning, counts for it."""
    gc.collect()
    _CLEAR.write_text("5")  # the mark falls to what is there now
    before, grown = _kilobytes("VmRSS"), Grown()
    try:
        yield grown
    finally:
        grown.bytes = (_kilobytes("VmHWM") - before) * 1024


def _kilobytes(field: str) -> int:
    (line,) = [line for line in _STATUS.read_text().splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1])
