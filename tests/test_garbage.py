"""The garbage collector runs less often while a scheduler is open, and as before once it is closed."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator

import pytest
from real_schedulers import config, scheduler

from april.concurrency import garbage
from april.concurrency.garbage import THRESHOLDS, collect_garbage, collecting_less

OWN = (900, 9, 8)


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    """Thresholds that a program could have chosen; those of the test run come back."""
    before = gc.get_threshold()
    gc.set_threshold(*OWN)
    yield
    gc.enable()
    gc.set_threshold(*before)


def test_the_last_of_several_blocks_restores_the_thresholds() -> None:
    """Two schedulers of one process may be open at a time, in any order."""
    first, second = collecting_less(), collecting_less()
    first.__enter__()
    second.__enter__()
    assert gc.get_threshold() == THRESHOLDS
    first.__exit__(None, None, None)
    assert gc.get_threshold() == THRESHOLDS
    second.__exit__(None, None, None)
    assert gc.get_threshold() == OWN


def test_what_the_program_decides_counts() -> None:
    """A disabled or rarer collector is left alone, and so are thresholds set while a block runs."""
    with collecting_less():
        gc.set_threshold(*OWN)
    assert gc.get_threshold() == OWN
    for rarer in ((100_000, 5, 5), (0, 5, 5)):
        gc.set_threshold(*rarer)
        with collecting_less():
            assert gc.get_threshold() == rarer
    gc.set_threshold(*OWN)
    gc.disable()
    with collecting_less():
        assert gc.get_threshold() == OWN


def test_young_objects_are_collected_only_under_the_thresholds_of_april() -> None:
    """A program that has a policy of its own, or has switched the collector off, keeps it."""

    def collects() -> bool:
        gc.collect()
        found: list[list[int]] = [[] for _ in range(500)]
        collect_garbage()
        return gc.get_count()[0] < len(found)

    assert not collects()
    with collecting_less():
        assert collects()
        gc.disable()
        assert not collects()


class Environment:
    """Refers to itself, as an object whose parts know it does."""

    def __init__(self) -> None:
        self.me = self


@pytest.mark.parametrize("what", ["memory", "time"])
def test_cycles_that_are_dropped_after_they_have_grown_old_are_found(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a run of weeks would keep whatever a rollout function had held in a cycle; only when the process has grown
    since the last time, or long after it.
    """
    size, now_s = 8 * garbage.GROWTH_BYTES, 100.0
    monkeypatch.setattr(garbage, "memory", lambda: size)
    monkeypatch.setattr(garbage.time, "monotonic", lambda: now_s)
    with collecting_less():
        gc.collect()
        monkeypatch.setattr(garbage, "_old_due_s", 0.0)
        collect_garbage()
        environment = Environment()
        gc.collect()
        there = weakref.ref(environment)
        del environment
        for growth, seconds in ((1, 1.0), (2 * garbage.GROWTH_BYTES - 1, garbage.OLD_EVERY_S - 2.0)):
            size, now_s = size + growth, now_s + seconds
            collect_garbage()
            assert there() is not None
        size += garbage.GROWTH_BYTES
        for held in (garbage.GROWTH_BYTES, 0):  # the run's samples take more memory, and their end frees none
            collect_garbage(held)
            assert there() is not None
        size, now_s = (size + 1, now_s) if what == "memory" else (size, now_s + 1.0)
        collect_garbage()
        assert there() is None


def test_a_forked_process_has_the_thresholds_of_its_program() -> None:
    """No loop of april runs in it, such as a worker that loads data: nothing there would collect old objects."""
    with collecting_less():
        child = os.fork()
        if not child:
            os._exit(gc.get_threshold() != OWN)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert gc.get_threshold() == THRESHOLDS


@pytest.mark.parametrize("relax_gc", [True, False])
def test_a_scheduler_relaxes_the_collector_unless_it_is_told_not_to(relax_gc: bool) -> None:
    """From its construction until it is closed."""
    with scheduler(config=config(relax_gc=relax_gc)):
        assert (gc.get_threshold() == THRESHOLDS) is relax_gc
    assert gc.get_threshold() == OWN
