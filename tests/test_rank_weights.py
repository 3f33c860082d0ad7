"""Weights that are spread over ranks go to engines: all ranks put them together, rank 0 sends, one that fails is named.

Ranks are threads; a parameter of two pieces is put together by a wait for the other rank, as a collective waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from rank_threads import PATIENCE_S, Taking, raised, run_ranks

from april.core.versions import PolicyVersion
from april.errors import EngineError
from april.processes.rank_scheduler import RankScheduler


class Spread:
    """Tensors of which every rank has a piece; putting one together waits for all ranks."""

    def __init__(self, world_size: int, count: int = 5) -> None:
        self.whole = {f"t{i}": torch.arange(6.0) + 10 * i for i in range(count)}
        self._all = threading.Barrier(world_size, timeout=PATIENCE_S)
        self.gathered: list[str] = []

    def pieces(self, rename: Callable[[str], str] = str) -> list[tuple[str, torch.Tensor]]:
        return [(rename(name), self._piece(name, whole)) for name, whole in self.whole.items()]

    def _piece(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        def full_tensor() -> torch.Tensor:
            self._all.wait()
            self.gathered.append(name)
            return whole

        piece = torch.zeros_like(whole)
        piece.full_tensor = full_tensor  # type: ignore[attr-defined]
        piece.detach = lambda: piece  # type: ignore[method-assign]
        return piece


def test_the_ranks_send_what_is_spread_over_them() -> None:
    """Every rank takes part in every gathering, in one order; the engine of rank 0 has whole weights, twice."""
    spread, taking = Spread(3), Taking()

    def program(rollouts: RankScheduler, rank: int) -> Any:
        versions = []
        for _ in range(2):
            rollouts.next_batch()
            versions.append(rollouts.weight_update(weights=spread.pieces()))
        return versions

    outcomes = run_ranks(program, 3, engines=lambda rank: None if rank else [taking])
    assert outcomes == [[PolicyVersion(0, 1), PolicyVersion(0, 2)]] * 3
    assert len(taking.weights) == 2
    for found in taking.weights:
        assert found.keys() == spread.whole.keys()
        assert all(torch.equal(found[name], spread.whole[name]) for name in found)
    assert len(spread.gathered) == 3 * 2 * 5


def test_ranks_may_overwrite_what_they_have_yielded() -> None:
    """Every rank's iterable fills one buffer again and again; the engine of rank 0 gets what was yielded."""
    taking = Taking()

    def one_buffer() -> Iterator[tuple[str, torch.Tensor]]:
        buffer = torch.empty(4)
        for number in range(5):
            yield f"t{number}", buffer.fill_(number)

    def program(rollouts: RankScheduler, rank: int) -> Any:
        rollouts.next_batch()
        return rollouts.weight_update(weights=one_buffer())

    assert run_ranks(program, 2, engines=lambda rank: None if rank else [taking]) == [PolicyVersion(0, 1)] * 2
    (found,) = taking.weights
    assert {name: tensor.tolist() for name, tensor in found.items()} == {f"t{i}": [i] * 4 for i in range(5)}


def test_engines_of_other_ranks_with_models_of_their_own_get_the_weights_there() -> None:
    """What has been put together on every rank needs no sending."""
    spread = Spread(2)
    taking = [Taking(), Taking()]
    for one in taking:
        one._capabilities = replace(one.capabilities, shares_weights=True, remote=False)

    def program(rollouts: RankScheduler, rank: int) -> Any:
        rollouts.next_batch()
        rollouts.weight_update(weights=spread.pieces())
        return len(rollouts.next_batch())

    assert run_ranks(program, 2, engines=lambda rank: [taking[rank]]) == [3, 3]
    for one in taking:
        (found,) = one.weights
        assert all(torch.equal(found[name], spread.whole[name]) for name in spread.whole)


def failing(weights: Callable[[int], Any], world_size: int = 2, taking: Taking | None = None) -> tuple[Any, Taking]:
    """What an update with these weights raises on each rank, and the engine; a batch has come before and comes after
    where the ranks go on."""
    there = taking or Taking()

    def program(rollouts: RankScheduler, rank: int) -> Any:
        rollouts.next_batch()
        rollouts.weight_update(weights=weights(rank))

    return run_ranks(program, world_size, engines=lambda rank: None if rank else [there]), there


def broken_at(pairs: Sequence[Any], number: int) -> Iterator[Any]:
    for place, pair in enumerate(pairs):
        if place == number:
            raise RuntimeError("the exporter broke")
        yield pair


@pytest.mark.parametrize(("rank", "number"), [(1, 0), (1, 2), (0, 1)])
def test_a_rank_that_cannot_go_through_its_weights_ends_all(rank: int, number: int) -> None:
    """Nobody waits in a collective for it: it is named to the others before one is entered."""
    spread = Spread(2)
    outcomes, taking = failing(lambda r: broken_at(spread.pieces(), number if r == rank else 99))
    assert f"rank {rank}" in str(raised(outcomes[1 - rank]))
    assert all("the exporter broke" in str(outcome) for outcome in outcomes)
    assert not taking.weights
    assert rank == 0 or not spread.gathered


@pytest.mark.parametrize(
    "other",
    [
        lambda spread: spread.pieces()[::-1],
        lambda spread: spread.pieces()[:-1],
        lambda spread: spread.pieces(lambda name: f"model.{name}"),
        lambda spread: [*spread.pieces(), ("more", torch.ones(1))],
    ],
)
def test_ranks_that_would_gather_different_tensors_are_told(other: Callable[[Spread], Any]) -> None:
    """Another order, another count, other names: found by a comparison, and not by a collective that hangs."""
    spread = Spread(2)
    outcomes, taking = failing(lambda rank: other(spread) if rank else spread.pieces())
    assert "every rank must give the same names, shapes and dtypes" in str(outcomes[1])
    assert "rank 1" in str(raised(outcomes[0]))
    assert not taking.weights
    assert not spread.gathered


@pytest.mark.parametrize("wrong", [0, 1])
def test_what_is_no_weights_on_one_rank_is_refused_for_all(wrong: int) -> None:
    """Before anything is paused."""
    spread = Spread(2)
    outcomes, taking = failing(lambda rank: {"w": 1.0} if rank == wrong else spread.pieces())
    assert "w is a float, not a tensor of torch" in str(outcomes[wrong])
    assert "w is a float" in str(raised(outcomes[1 - wrong]))
    assert not taking.weights


def test_an_engine_that_fails_fails_the_update_of_all_ranks() -> None:
    """With its name and the tensor; whatever the others have drawn, no rank is left in a step."""
    spread, taking = Spread(2), Taking(fails_at="t0")
    outcomes, _ = failing(lambda rank: spread.pieces(), taking=taking)
    for outcome in outcomes:
        assert isinstance(outcome, EngineError)
        assert "engine e failed to receive tensors t0 to t4: its memory is full" in str(outcome)


def test_one_rank_is_a_rank_like_any_other() -> None:
    """A trainer that was started alone sends what it has."""
    spread, taking = Spread(1), Taking()

    def program(rollouts: RankScheduler, rank: int) -> Any:
        rollouts.next_batch()
        return rollouts.weight_update(weights=dict(spread.pieces()))

    assert run_ranks(program, 1, engines=lambda rank: [taking]) == [PolicyVersion(0, 1)]
    assert len(taking.weights) == 1


def test_engines_of_other_ranks_that_do_not_read_the_trainers_model_are_sent_the_weights() -> None:
    """As the engines of rank 0 are."""
    taking = [Taking(), Taking()]

    def program(rollouts: RankScheduler, rank: int) -> Any:
        rollouts.next_batch()
        return rollouts.weight_update(weights={"w": torch.full((3,), 7.0)})

    assert run_ranks(program, 2, engines=lambda rank: [taking[rank]]) == [PolicyVersion(0, 1)] * 2
    assert [[found["w"].tolist() for found in one.weights] for one in taking] == [[[7.0] * 3]] * 2


def test_a_state_is_loaded_with_weights_of_all_ranks() -> None:
    """After a restart the engine has those of the checkpoint, under its version."""
    saved: list[dict[str, Any]] = []

    def before(rollouts: RankScheduler, rank: int) -> None:
        rollouts.next_batch()
        rollouts.weight_update(weights=spread.pieces())
        if rank == 0:
            saved.append(rollouts.state_dict())

    def after(rollouts: RankScheduler, rank: int) -> Any:
        return rollouts.load_state_dict({} if rank else saved[0], weights=spread.pieces())

    spread = Spread(2)
    assert run_ranks(before, 2, engines=lambda rank: None if rank else [Taking()]) == [None, None]
    taking = Taking()
    assert run_ranks(after, 2, engines=lambda rank: None if rank else [taking]) == [PolicyVersion(1, 1)] * 2
    (found,) = taking.weights
    assert all(torch.equal(found[name], spread.whole[name]) for name in spread.whole)
