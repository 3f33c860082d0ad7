"""The garbage collector runs less often while a scheduler is open, and as before once it is closed."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from real_schedulers import config, scheduler

from april.concurrency.garbage import THRESHOLDS, collect_young_objects, collecting_less

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
        collect_young_objects()
        return gc.get_count()[0] < len(found)

    assert not collects()
    with collecting_less():
        assert collects()
        gc.disable()
        assert not collects()


@pytest.mark.parametrize("relax_gc", [True, False])
def test_a_scheduler_relaxes_the_collector_unless_it_is_told_not_to(relax_gc: bool) -> None:
    """From its construction until it is closed."""
    with scheduler(config=config(relax_gc=relax_gc)):
        assert (gc.get_threshold() == THRESHOLDS) is relax_gc
    assert gc.get_threshold() == OWN
