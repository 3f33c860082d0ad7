"""Ctrl-C at every place of every call of all ranks, on rank 0 or on another one: nothing is lost, and nobody waits."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from interrupting import interrupt, with_a_signal
from rank_threads import PATIENCE_S, Taking, engine, names_of, run_ranks

import april
from april.processes.rank_scheduler import RankScheduler

CONFIG = april.Config(rollout_batch_size=1, n_samples_per_prompt=2, max_response_len=9)
WAYS = ["in place", "transfer", "weights"]
Made = Callable[[RankScheduler], Any]


def again_until_done(call: Callable[[], Any], culprit: int, tries: int = 3) -> Any:
    """A step that was interrupted is told, with the rank's name, and the call is made again by all."""
    for _ in range(tries):
        try:
            return call()
        except april.RankError as error:
            told = rf"the (transfer|\w+ of (a bucket of )?the weights) of rank {culprit} raised KeyboardInterrupt"
            if not re.fullmatch(told, str(error)) or error.ranks != (culprit,):
                raise
    raise AssertionError("the ranks do not come together again")


def interrupted_everywhere(made: Made, culprit: int, **options: Any) -> tuple[list[list[Any]], int]:
    """What each rank's calls returned, one for each place at which the culprit's was interrupted; and how many were."""
    together = threading.Barrier(2, timeout=PATIENCE_S)
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
    outcomes = run_ranks(program, config=CONFIG, prompts=prompts, **options)
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
@pytest.mark.parametrize("arguments", [{}, {"transfer": lambda: None}, {"weights": {"w": torch.ones(2)}}], ids=WAYS)
def test_weight_update(arguments: dict[str, Any], culprit: int) -> None:
    """It lands once, on all ranks."""
    options = {"engines": lambda rank: None if rank else [Taking()]} if "weights" in arguments else {}
    outcomes, interrupts = interrupted_everywhere(
        lambda rollouts: rollouts.weight_update(**arguments), culprit, **options
    )
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
