"""Random lives of 2 to 4 ranks, with real sockets and one fault each: what every rank is told, and that all end.

Before the fault all ranks have the same calls, the same versions, and shares that make up each batch once. A fault that
ends all gives every other rank a RankError that names the culprit; after any other one all come to the end of the data.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from rank_threads import cut, engine, run_ranks

import april
from april.processes.rank_scheduler import RankScheduler

ENDS = ("raise", "cut", "differ", "leave", "late")
FAULTS = (*ENDS, "none", "transfer", "interrupt", "evaluate")
STEPS = 4


@dataclass
class Life:
    """One life; all of it follows from the seed."""

    seed: int
    seen: list[list[Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        chance = random.Random(self.seed)
        self.size, self.fault, self.at = chance.randint(2, 4), chance.choice(FAULTS), chance.randrange(STEPS + 1)
        self.culprit = chance.randrange(self.size)
        self.by_transfer = [chance.random() < 0.5 for _ in range(STEPS)]
        self.looks = [[chance.random() < 0.3 for _ in range(STEPS)] for _ in range(self.size)]
        self.seen = [[] for _ in range(self.size)]
        self.all_generate = chance.random() < 0.5

    def run(self) -> list[Any]:
        """What came of each rank."""
        timeouts = {"rank_timeout_s": 1.0 if self.fault == "late" else 30.0}
        engines = {"engines": lambda rank: [engine()]} if self.all_generate else {}
        return run_ranks(self.live, self.size, reward=lambda prompt, response: 1.0, timeouts=timeouts, **engines)

    def live(self, rollouts: RankScheduler, rank: int) -> str:
        for step in range(STEPS):
            mine = rank == self.culprit and step == self.at
            if mine and self.fault == "raise":
                raise ValueError("mine")
            if mine and self.fault == "cut":
                cut(rollouts)
            if mine and self.fault == "leave":
                return "left"
            if mine and self.fault == "late":
                rollouts._client.thread.run(lambda: until_broken(rollouts))
            if mine and self.fault == "differ":
                rollouts.commit(0)
            batch = rollouts.next_batch()
            self.seen[rank].append((batch.id, [s.id for s in batch.samples]))
            if self.looks[rank][step]:
                assert rollouts.ledger()["tokens"].balanced
                assert rollouts.state_dict()
            self.seen[rank].append(self.update(rollouts, mine, self.by_transfer[step], batch.id))
            if self.fault == "evaluate" and step == self.at:
                result = rollouts.evaluate([[1, 2]], seed=3)
                self.seen[rank].append(result.responses[0][0].tokens.tolist())
        with pytest.raises(april.DataExhausted):
            rollouts.next_batch()
        return "end"

    def update(self, rollouts: RankScheduler, mine: bool, by_transfer: bool, batch: int) -> april.PolicyVersion:
        """An update whose transfer may fail on the culprit, and is made again by all."""
        fails = [mine and self.fault in ("transfer", "interrupt")]

        def transfer() -> None:
            if fails.pop() if fails else False:
                raise OSError("disk") if self.fault == "transfer" else KeyboardInterrupt

        while True:
            try:
                return rollouts.weight_update(transfer=transfer if by_transfer else None, trained=batch)
            except (OSError, KeyboardInterrupt):
                assert mine
            except april.RankError as error:
                if self.fault not in ("transfer", "interrupt") or error.ranks != (self.culprit,):
                    raise

    def judge(self, outcomes: list[Any]) -> None:
        ends = self.fault in ENDS and self.at < STEPS
        for rank, outcome in enumerate(outcomes):
            if ends and rank != self.culprit:
                assert isinstance(outcome, april.RankError), (rank, outcome)
                assert self.culprit in outcome.ranks
            elif not ends:
                assert outcome == "end", (rank, outcome)
        for things in zip(*self.seen, strict=False):
            if isinstance(things[0], tuple) and isinstance(things[0][1], list):
                samples = [sample for _, share in things for sample in share]
                assert len({number for number, _ in things}) == 1
                assert len(samples) == len(set(samples)) == 6
            else:
                assert all(thing == things[0] for thing in things)
        assert max(map(len, self.seen)) - min(map(len, self.seen)) <= 2


async def until_broken(rollouts: RankScheduler) -> None:
    """As long as the others wait."""
    while rollouts._client.group_error is None:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("seed", range(24))
def test_random_ranks(seed: int) -> None:
    """Nothing is lost, told twice or waited for without an end, whatever happens to one of them."""
    life = Life(seed)
    life.judge(life.run())
