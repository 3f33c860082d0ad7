"""Ctrl-C at every place of every call of all ranks, on rank 0 or on another one: nothing is lost, and nobody waits."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from interrupting import interrupt, with_a_signal
from rank_threads import PATIENCE_S, engine, names_of, run_ranks

import april
from april.processes.rank_scheduler import RankScheduler

CONFIG = april.Config(rollout_batch_size=1, n_samples_per_prompt=2, max_response_len=9)
Made = Callable[[RankScheduler], Any]


def again_until_done(call: Callable[[], Any], culprit: int, tries: int = 3) -> Any:
    """A transfer that was interrupted is told, with the rank's name, and made again by all."""
    for _ in range(tries):
        try:
            return call()
        except april.RankError as error:
            if (str(error), error.ranks) != (f"the transfer of rank {culprit} raised KeyboardInterrupt", (culprit,)):
                raise
    raise AssertionError("the ranks do not come together again")


def interrupted_everywhere(made: Made, culprit: int, world_size: int = 2) -> tuple[list[list[Any]], int]:
    """What each rank's calls returned, one for each place at which the culprit's was interrupted; and how many were."""
    together = threading.Barrier(world_size, timeout=PATIENCE_S)
    seen = {"last": False, "interrupts": 0}

    def at_its_place(place: int, call: Callable[[], Any]) -> Any:
        try:
            result, reached = with_a_signal(place, interrupt, call)
        except KeyboardInterrupt:
            seen["interrupts"] += 1
            return again_until_done(call, culprit)
        seen["last"] = not reached
        return result

    def program(rollouts: RankScheduler, rank: int) -> Any:
        returned, call = [], partial(made, rollouts)
        for place in itertools.count():
            result = at_its_place(place, call) if rank == culprit else again_until_done(call, culprit)
            returned.append(result)
            together.wait()
            if isinstance(result, april.Batch):
                rollouts.commit(result.id)
            if seen["last"]:
                break
            together.wait()
        return returned

    prompts = ([3 + i % 7, 2] for i in itertools.count())
    outcomes = run_ranks(program, world_size, config=CONFIG, prompts=prompts)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes, seen["interrupts"]


@pytest.mark.parametrize("culprit", [0, 1])
def test_next_batch(culprit: int) -> None:
    """The interrupted call's batch is the answer of the next one, on all ranks, and comes once."""
    outcomes, interrupts = interrupted_everywhere(lambda rollouts: rollouts.next_batch(), culprit)
    assert interrupts > 20
    for place, shares in enumerate(zip(*outcomes, strict=True)):
        assert [share.id for share in shares] == [place] * 2
        assert sorted(name for share in shares for name in names_of(share)) == [(place, 0), (place, 1)]


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("way", ["in place", "transfer"])
def test_weight_update(way: str, culprit: int) -> None:
    """It lands once, on all ranks."""
    arguments: dict[str, Any] = {"transfer": lambda: None} if way == "transfer" else {}
    outcomes, interrupts = interrupted_everywhere(lambda rollouts: rollouts.weight_update(**arguments), culprit)
    assert interrupts > 20
    for place, versions in enumerate(zip(*outcomes, strict=True)):
        assert versions == ((0, place + 1),) * 2


@pytest.mark.parametrize("culprit", [0, 1])
def test_evaluate(culprit: int) -> None:
    """Whole on all ranks."""
    outcomes, interrupts = interrupted_everywhere(lambda rollouts: rollouts.evaluate([[5, 6]], seed=1), culprit)
    assert interrupts > 20
    tokens = [[r.responses[0][0].tokens.tolist() for r in results] for results in outcomes]
    assert tokens[0] == tokens[1] == [tokens[0][0]] * len(tokens[0])


@pytest.mark.parametrize("culprit", [0, 1])
def test_close(culprit: int) -> None:
    """Closed again, as the end of the ``with`` block does, it ends; the other rank's close does not wait for long.

    At every fifth place: each costs two schedulers.
    """
    interrupts = 0
    for place in itertools.count(culprit, 5):
        reached, interrupted, threads = closed_at(place, culprit)
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), thread
        interrupts += interrupted
        if not reached:
            break
    assert interrupts > 20


def closed_at(place: int, culprit: int) -> tuple[bool, bool, set[threading.Thread]]:
    """Whether there was such a place, whether the interrupt came out of the close, and the threads of all ranks."""
    seen = {"reached": True, "interrupted": False}

    def program(rollouts: RankScheduler, rank: int) -> None:
        rollouts.next_batch()
        if rank == culprit:
            try:
                _, seen["reached"] = with_a_signal(place, interrupt, rollouts.close)
            except KeyboardInterrupt:
                seen["interrupted"] = True

    before = set(threading.enumerate())
    assert run_ranks(program, config=CONFIG, engines=lambda _: [engine()]) == [None, None]
    return seen["reached"], seen["interrupted"], set(threading.enumerate()) - before
