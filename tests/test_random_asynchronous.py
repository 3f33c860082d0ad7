"""Asynchronous trainers before the whole driver, at random: what tasks of theirs do at the same time, in any moment.

They fetch ahead, give a fetch up and ask again, ask twice at once, update twice at once, break an update off, evaluate
meanwhile, save in any moment, and are killed. Virtual time; each run is chosen by its number.
"""

from __future__ import annotations

import asyncio
import copy
import os
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from seeds import seeds

from april import Config
from april.core.batch import Batch
from april.core.types import GenerationMode, OnFailedSample, OnWeightUpdate
from april.errors import DataExhausted, RolloutError
from april.testing import FakeEngine, rollouts, run_virtual

PROMPTS, LOAD_S = 24, 3.0
LIVES = int(os.environ.get("APRIL_RANDOM_LIVES", "250"))
"""A fiftieth of these are run, as each life is long."""


def rejected(position: int) -> bool:
    """One group in five."""
    return position % 5 == 2


def fails(position: int, index: int) -> bool:
    """This sample's reward, whenever it is asked for."""
    return position % 6 == 4 and index == 1


def forget(task: asyncio.Task[Any]) -> None:
    """Who asked is killed, and hears nothing of it."""
    if not task.cancelled():
        task.exception()


@dataclass
class History:
    """What the trainer keeps: (prompt, index) of the samples that it has trained, and its group's cohort."""

    trained: list[tuple[int, int]] = field(default_factory=list)
    cohorts: dict[int, Any] = field(default_factory=dict)
    updates: int = 0


class Trainer:
    def __init__(self, seed: int, mode: GenerationMode) -> None:
        self.rng = rng = random.Random(seed)
        n, self.bound = rng.choice([1, 2, 4]), rng.choice([1, 2, 4])
        self.ahead = rng.randint(0, self.bound)
        self.slow = rng.choice([1.0, 60.0])
        self.train_s = rng.choice([0.0, 20.0, 100.0])
        self.samples, share = rng.choice([(2, 1.0), (4, 0.75), (8, 0.5)])
        self.policy = rng.choice([OnFailedSample.SHRINK, OnFailedSample.REPLACE])
        self.config = Config(
            rollout_batch_size=n, n_samples_per_prompt=self.samples, max_in_flight=rng.choice([3, 8]), generation=mode,
            group_quorum=share, on_failed_sample=self.policy,
            on_weight_update=rng.choice(list(OnWeightUpdate)) if mode is GenerationMode.CONTINUOUS else "resubmit",
            max_staleness=self.bound, max_response_len=300, engine={"kind": "simulated"}, refill="sample",
        )  # fmt: skip
        self.history = History()
        self.saved: tuple[Any, History] | None = None
        self.seen: Counter[str] = Counter()

    def length(self, request: Any) -> int:
        """Heavy tails."""
        group, index = request.sample_key
        return max(1, min(400, int(random.Random(group * 64 + index).lognormvariate(3.0, 1.2))))

    async def reward(self, prompt: Any, response: Any) -> float:
        """Now and then a slow one."""
        if fails(prompt.position, response.sample_id.index):
            raise ValueError("the judge cannot read this")
        await asyncio.sleep(self.slow if response.sample_id.group % 4 == 3 else 0.5)
        return float(prompt.position)

    # ---------------------------------------------------------------- one process

    async def process(self, life_s: float) -> bool:
        """Go on from what was saved last, for so long; True when the data has ended."""
        engines = [FakeEngine(name, lengths=self.length, max_running=8, weight_update_s=LOAD_S) for name in "ab"]
        async with rollouts(
            self.config, engines=engines, prompts=[[1, 2 + i] for i in range(PROMPTS)], reward=self.reward,
            filter=lambda prompt, responses: not rejected(prompt.position),
        ) as run:  # fmt: skip
            if self.saved is None:
                self.history = History()
            else:
                state, kept = self.saved
                await run.load_state_dict(state)
                self.history = copy.deepcopy(kept)
            self.run, self.waiting, self.last = run, [], None
            asking = asyncio.Lock()
            tasks = [asyncio.create_task(self.train(asking)), asyncio.create_task(self.disturb(asking))]
            done, _ = await asyncio.wait(tasks, timeout=life_s, return_when=asyncio.FIRST_COMPLETED)
            ended = tasks[0] in done
            for task in tasks:
                task.cancel()
            for task in tasks:
                with suppress(asyncio.CancelledError):
                    await task
            run.validate()
            assert not any(engine.violations for engine in engines)
            if ended and not run.version.incarnation:
                run.audit()  # a batch that nobody has fetched, or an older process, would be missing
            return ended

    async def train(self, asking: asyncio.Lock) -> None:
        rng, fetching = self.rng, None
        try:
            while True:
                while len(self.waiting) <= self.ahead:
                    try:
                        self.waiting.append(await self.fetch(asking))
                    except DataExhausted:
                        if not self.waiting:
                            return
                        break
                fetching = asyncio.create_task(self.fetch(asking)) if len(self.waiting) <= self.bound else None
                await self.train_on(self.waiting[0])
                if fetching is not None and rng.random() < 0.3 and not fetching.done():
                    fetching.cancel()  # nothing is lost: the next call gets its batch
                    await asyncio.wait([fetching])
                    self.seen["fetch given up"] += 1
                if fetching is not None and not fetching.cancelled():
                    with suppress(DataExhausted):
                        self.waiting.append(await fetching)
        finally:
            if fetching is not None:
                fetching.add_done_callback(forget)
                fetching.cancel()

    async def fetch(self, asking: asyncio.Lock) -> Batch:
        async with asking:
            batch = await self.run.next_batch()
        assert self.last is None or batch.id == self.last + 1
        self.last = batch.id
        assert all(sample.loss_mask.all() for sample in batch.samples)
        return batch

    async def train_on(self, batch: Batch) -> None:
        """How old its tokens are is counted by the weights that are there now."""
        now = self.run.version.n
        assert batch.trained_at.n >= now
        oldest = max(now - segment.version.n for sample in batch.samples for segment in sample.segments)
        assert 0 <= oldest <= self.bound
        await asyncio.sleep(self.train_s * self.rng.random())
        if self.rng.random() < 0.2:  # killed in the middle of it, it shall find itself before or after it
            self.keep(None)
        while True:
            update = asyncio.create_task(self.run.weight_update(trained=batch.id))
            update.add_done_callback(forget)
            if self.rng.random() < 0.3:
                await asyncio.sleep(self.rng.uniform(0, 2 * LOAD_S))
                update.cancel()
                await asyncio.sleep(2 * LOAD_S)  # it goes on to its end if an engine loads already
                self.seen[f"update broken off, had an effect={self.run.version.n > now}"] += 1
            await asyncio.wait([update])
            if self.run.version.n > now:
                break
            assert update.cancelled()
        assert self.run.version.n == now + 1
        self.waiting.remove(batch)
        for sample in batch.samples:
            self.history.trained.append((sample.prompt.position, sample.id.index))
            assert self.history.cohorts.setdefault(sample.prompt.position, sample.cohort) == sample.cohort
        self.history.updates += 1
        if self.rng.random() < 0.4:
            self.keep(batch.id)

    def keep(self, trained_through: int | None) -> None:
        self.seen["saved"] += 1
        self.saved = self.run.state_dict(trained_through), copy.deepcopy(self.history)
        assert self.saved[0]["core"]["version"][1] == self.history.updates

    async def disturb(self, asking: asyncio.Lock) -> None:
        while True:
            await asyncio.sleep(self.rng.uniform(0, 60))
            what = self.rng.choice(["evaluate", "ask twice", "look", "evaluate and give up"])
            self.seen[what] += 1
            if what == "evaluate":
                assert (await self.evaluate()).rewards.tolist() == [[0.0], [1.0]]
            elif what == "evaluate and give up":
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self.evaluate(), self.rng.uniform(0, 5))
            elif what == "ask twice":
                if asking.locked():
                    with pytest.raises(RolloutError, match="another call waits for the same batch"):
                        await self.run.next_batch()
            else:
                self.run.state_dict()
                self.run.validate()

    async def evaluate(self) -> Any:
        """Two prompts under the present weights."""
        return await self.run.evaluate([[7, 8], [7, 9]], max_tokens=40)


async def live(trainer: Trainer) -> None:
    """Process after process, until every prompt is settled."""
    for _ in range(12):
        if await trainer.process(trainer.rng.choice([30.0, 120.0, 500.0])):
            return
        trainer.seen["killed"] += 1
    assert await trainer.process(1e6)


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("seed", seeds(LIVES // 50))
def test_every_prompt_is_trained_once_whatever_tasks_do(seed: int, mode: GenerationMode) -> None:
    """In the history that is kept: each sample once, those that fail replaced or left out, none too old, one cohort."""
    trainer = Trainer(seed, mode)
    run_virtual(live(trainer), limit_s=1e7)
    n, replaces = trainer.samples, trainer.policy is OnFailedSample.REPLACE
    expected = [
        (i, n if replaces else None) if fails(i, k) else (i, k)
        for i in range(PROMPTS) if not rejected(i) for k in range(n)
    ]  # fmt: skip
    assert sorted(trainer.history.trained) == sorted(key for key in expected if key[1] is not None)
    assert trainer.seen["killed"]
