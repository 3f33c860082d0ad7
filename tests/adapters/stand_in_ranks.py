"""The ranks of a trainer as threads of this process, with collectives of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from rank_threads import OnePlace, Store, beside

import april


class Alone(Exception):
    """Another rank has left."""


class Meeting:
    """Where all ranks come to say something, and hear what the others have said."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.store = Store()
        self._said: list[dict[int, Any]] = []
        """By round, then by rank."""
        self._rounds = [0] * ranks
        self._left = False
        self._changed = threading.Condition()

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """What each rank has brought, in the order of the ranks."""
        with self._changed:
            number = self._rounds[rank]
            self._rounds[rank] += 1
            if number == len(self._said):
                self._said.append({})
            said = self._said[number]
            said[rank] = value
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._left or len(said) == self.ranks, timeout=30)
            if len(said) < self.ranks:
                raise Alone
            return [said[other] for other in range(self.ranks)]

    def leave(self) -> None:
        """For good, by an error: nobody waits for anybody any more."""
        with self._changed:
            self._left = True
            self._changed.notify_all()


class RankAccelerator:
    """As much of accelerate's Accelerator as the adapter uses."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting = meeting
        self.process_index, self.num_processes, self.is_main_process = rank, meeting.ranks, rank == 0
        self.device = torch.device("cpu:0")

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.meeting.exchange(self.process_index, tensor))

    def wait_for_everyone(self) -> None:
        self.meeting.exchange(self.process_index, None)

    def pad_across_processes(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        widest = max(other.size(dim) for other in self.meeting.exchange(self.process_index, tensor))
        return torch.nn.functional.pad(tensor, (0, widest - tensor.size(dim)))

    def unwrap_model(self, model: Any) -> Any:
        return model


def on_all_ranks(count: int, work: Callable[[int, Meeting], Any]) -> list[Any]:
    """What ``work(rank, meeting)`` returns on each; of errors, one that is no consequence of another."""
    meeting = Meeting(count)
    if count == 1:
        return [work(0, meeting)]

    def run(rank: int) -> Any:
        try:
            return work(rank, meeting)
        finally:
            meeting.leave()

    outcomes = beside(*(partial(run, rank) for rank in range(count)))
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    for error in sorted(errors, key=lambda error: isinstance(error, (Alone, april.RankError))):
        raise error
    return outcomes


def in_threads(monkeypatch: pytest.MonkeyPatch, *, alone: Callable[..., Any] | None = None) -> None:
    """Ranks of TRL meet through a store of their own, where torch has one for the processes of a trainer.

    ``alone`` makes the scheduler of a single rank.
    """

    def scheduler_of(trainer: Any, config: april.Config, address: None, **arguments: Any) -> Any:
        ranks = trainer.accelerator
        if alone is not None and ranks.num_processes == 1:
            return alone(trainer, config, address, **arguments)
        place = OnePlace(
            rank=ranks.process_index, world_size=ranks.num_processes, address="127.0.0.1:0", store=ranks.meeting.store
        )
        return april.RankScheduler(config, ranks=place, **arguments)

    monkeypatch.setattr("april.adapters.trl.trainer.scheduler_of", scheduler_of)
