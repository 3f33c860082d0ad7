"""Lets Python's garbage collector run less often while an event loop of april runs.

A scheduler with thousands of samples in flight makes many objects that live long and form no reference cycles. With
Python's own thresholds, about a fifth of the loop's CPU time goes into looking for cycles among them.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (5_000, 2, 200_000)
"""Thresholds for ``gc.set_threshold`` while a loop runs. Those of Python 3.11 are 700, 10 and 10.

With the third one Python itself never collects old objects, which takes a second per few million objects."""
OLD_EVERY = 50
"""Old objects are collected again after this many times the time that their last collection took."""
_old_due_s = 0.0
_loops: list[object] = []
"""One entry for each loop that runs now."""
_before: list[tuple[int, int, int]] = []
"""Thresholds to restore when the last loop ends; empty if april has changed none."""


def collect_garbage() -> None:
    """Collect the objects that were made since the last collection, and sometimes all, if april's thresholds hold.

    Python counts the objects that were made minus those that were freed. While many requests end and as many begin,
    this number stays small and the number of young objects grows into millions, whose collection takes a second. Cycles
    that users' functions drop after they have grown old are found only among all objects.
    """
    global _old_due_s
    if not gc.isenabled() or gc.get_threshold() != THRESHOLDS:
        return
    began_s = time.monotonic()
    gc.collect(2 if began_s >= _old_due_s else 1)
    if began_s >= _old_due_s:
        now_s = time.monotonic()
        _old_due_s = now_s + OLD_EVERY * (now_s - began_s)


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
