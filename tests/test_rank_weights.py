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

BROKEN = ((1, 0), (1, 2), (0, 1))
"""A rank, and the tensor at which its iterable breaks off."""
SAME_NAMES = "every rank must give the same names, shapes and dtypes"


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

    def is_in(self, engine: Taking, times: int = 1) -> bool:
        """Whether an engine was given all whole tensors, so many times."""
        return len(engine.weights) == times and all(
            found.keys() == self.whole.keys() and all(torch.equal(found[name], self.whole[name]) for name in found)
            for found in engine.weights
        )


def update_with(weights: Callable[[], Any]) -> Callable[[RankScheduler, int], PolicyVersion]:
    """A batch, and an update with the weights that each rank makes."""

    def program(rollouts: RankScheduler, rank: int) -> PolicyVersion:
        rollouts.next_batch()
        return rollouts.weight_update(weights=weights())

    return program


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
    assert spread.is_in(taking, 2)
    assert len(spread.gathered) == 3 * 2 * 5


def test_ranks_may_overwrite_what_they_have_yielded() -> None:
    """Every rank's iterable fills one buffer again and again; the engine of rank 0 gets what was yielded."""
    taking = Taking()

    def one_buffer() -> Iterator[tuple[str, torch.Tensor]]:
        buffer = torch.empty(4)
        for number in range(5):
            yield f"t{number}", buffer.fill_(number)

    run_ranks(update_with(one_buffer), engines=lambda rank: None if rank else [taking])
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
    assert all(map(spread.is_in, taking))


def broken_at(pairs: Sequence[Any], number: int) -> Iterator[Any]:
    for place, pair in enumerate(pairs):
        if place == number:
            raise RuntimeError("the exporter broke")
        yield pair


@pytest.mark.parametrize(
    ("wrong", "weights", "words"),
    [
        *((rank, lambda spread, n=n: broken_at(spread.pieces(), n), "exporter broke") for rank, n in BROKEN),
        (1, lambda spread: spread.pieces()[::-1], SAME_NAMES),
        (1, lambda spread: spread.pieces()[:-1], SAME_NAMES),
        (1, lambda spread: spread.pieces(lambda name: f"model.{name}"), SAME_NAMES),
        (1, lambda spread: [*spread.pieces(), ("more", torch.ones(1))], SAME_NAMES),
        (1, lambda spread: {"w": 1.0}, "w is a float, not a tensor of torch"),
        (0, lambda spread: {"w": 1.0}, "w is a float, not a tensor of torch"),
    ],
)
def test_a_rank_with_wrong_weights_ends_all(wrong: int, weights: Callable[[Spread], Any], words: str) -> None:
    """An iterable that breaks off, other tensors than those of rank 0, no tensors: the rank is named to the others
    before one of them enters a collective, which would hang."""
    spread, taking = Spread(2), Taking()

    def program(rollouts: RankScheduler, rank: int) -> Any:
        rollouts.next_batch()
        rollouts.weight_update(weights=weights(spread) if rank == wrong else spread.pieces())

    outcomes = run_ranks(program, engines=lambda rank: None if rank else [taking])
    assert words in str(outcomes[wrong])
    assert f"rank {wrong}" in str(raised(outcomes[1 - wrong]))
    assert words in str(outcomes[1 - wrong])
    assert not taking.weights
    assert not spread.gathered


def test_an_engine_that_fails_fails_the_update_of_all_ranks() -> None:
    """With its name and the tensor; whatever the others have drawn, no rank is left in a step."""
    spread = Spread(2)
    outcomes = run_ranks(update_with(spread.pieces), engines=lambda rank: None if rank else [Taking(fails_at="t0")])
    for outcome in outcomes:
        assert isinstance(outcome, EngineError)
        assert "engine e failed to receive tensors t0 to t4: its memory is full" in str(outcome)


def test_one_rank_is_a_rank_like_any_other() -> None:
    """A trainer that was started alone sends what it has."""
    spread, taking = Spread(1), Taking()
    run_ranks(update_with(lambda: dict(spread.pieces())), 1, engines=lambda rank: [taking])
    assert spread.is_in(taking)


def test_engines_of_other_ranks_that_do_not_read_the_trainers_model_are_sent_the_weights() -> None:
    """As the engines of rank 0 are."""
    taking = [Taking(), Taking()]
    run_ranks(update_with(lambda: {"w": torch.full((3,), 7.0)}), engines=lambda rank: [taking[rank]])
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
    assert spread.is_in(taking)
