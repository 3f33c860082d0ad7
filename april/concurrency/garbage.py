"""Lets Python's garbage collector run less often while an event loop of april runs.

A scheduler with thousands of samples in flight makes many objects that live long and form no reference cycles. With
Python's own thresholds, about a fifth of the loop's CPU time goes into looking for cycles among them.
"""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

THRESHOLDS = (5_000, 2, 200_000)
"""Thresholds for ``gc.set_threshold`` while a loop runs; Python 3.11's own are 700, 10 and 10. With the third, Python
itself never collects old objects, since such a collection stops the loop for a second per few million objects."""
GROWTH_BYTES = 1 << 30
"""Growth of the process, in bytes, after which old objects are collected. It must also be a quarter of the size, so
that large runs, in which such a collection takes a second, collect rarely. Samples of the run do not count."""
OLD_EVERY_S = 1800.0
"""Seconds after which old objects are collected in any case, because garbage may also hold GPU memory."""
_collect_old_at, _old_due_s = 0, 0.0
"""Size of the process without samples (bytes) and monotonic time (seconds) from which on old objects are collected."""
_most_held = 0
"""Largest memory of the run's samples since old objects were last collected, in bytes."""
_loops: list[object] = []
"""One entry for each loop that runs now."""
_before: list[tuple[int, int, int]] = []
"""Thresholds to restore when the last loop ends; empty if april has changed none."""


def collect_garbage(held_bytes: int = 0) -> None:
    """Collect young objects, and old ones if they are due; does nothing unless :func:`collecting_less` is in effect.

    Python itself collects young objects when enough more were made than freed. While as many requests begin as end,
    this difference stays small, and millions of young objects gather, whose collection takes a second. Reference cycles
    that users' functions drop late are found only when old objects are collected. The process may grow by the samples
    that the run holds without such a collection, which would find no garbage in them. ``held_bytes`` is their memory;
    its maximum counts, because a process seldom shrinks when objects are freed.
    """
    global _collect_old_at, _old_due_s, _most_held
    if not gc.isenabled() or gc.get_threshold() != THRESHOLDS:
        return
    now_s = time.monotonic()
    _most_held = max(_most_held, held_bytes)
    old = memory() - _most_held > _collect_old_at or now_s >= _old_due_s
    gc.collect(2 if old else 1)
    if old:
        _most_held = held_bytes
        left = max(0, memory() - held_bytes)
        _collect_old_at, _old_due_s = left + max(GROWTH_BYTES, left // 4), now_s + OLD_EVERY_S


def memory() -> int:
    """Return the resident memory of the process in bytes; 0 if unknown, so that only the time decides."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


@contextmanager
def collecting_less() -> Iterator[None]:
    """Raise the collector's thresholds inside the block; if blocks overlap, the last one to end restores them.

    A collector that is disabled, or that already runs less often, is left alone. So are thresholds that the program
    changes inside the block.
    """
    loop = object()
    first, *_ = found = gc.get_threshold()
    if not _loops and gc.isenabled() and 0 < first < THRESHOLDS[0]:
        _before.append(found)
        gc.set_threshold(*THRESHOLDS)
    _loops.append(loop)
    try:
        yield
    finally:
        _loops.remove(loop)
        _restore()


def _restore() -> None:
    if not _loops and _before:
        found = _before.pop()
        if gc.get_threshold() == THRESHOLDS:
            gc.set_threshold(*found)


def _restore_in_child() -> None:
    _loops.clear()  # their threads do not survive a fork
    _restore()


os.register_at_fork(after_in_child=_restore_in_child)
