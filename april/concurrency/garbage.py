"""Lets Python's garbage collector run less often while an event loop of april runs.

A scheduler with thousands of samples in flight makes many objects that live long and form no reference cycles. With
Python's own thresholds, about a fifth of the loop's CPU time goes into looking for cycles among them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (5_000, 2, 200_000)
"""Thresholds for ``gc.set_threshold`` while a loop runs. Those of Python 3.11 are 700, 10 and 10.

The third one makes collections of all objects rare, which take a second per few million objects."""
_loops: list[object] = []
"""One entry for each loop that runs now."""
_before: list[tuple[int, int, int]] = []
"""Thresholds to restore when the last loop ends; empty if april has changed none."""


def collect_young_objects() -> None:
    """Collect the objects that were made since the last collection, if april's thresholds are in force.

    Python counts the objects that were made minus those that were freed. While many requests end and as many begin,
    this number stays small and the number of young objects grows into millions, whose collection takes a second.
    """
    if gc.isenabled() and gc.get_threshold() == THRESHOLDS:
        gc.collect(1)


@contextmanager
def collecting_less() -> Iterator[None]:
    """Raise the collector's thresholds inside the block; the last of several blocks restores them.

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
        if not _loops and _before:
            found = _before.pop()
            if gc.get_threshold() == THRESHOLDS:
                gc.set_threshold(*found)
