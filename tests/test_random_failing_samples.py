"""Samples that fail for good, over restarts at random: each prompt and each sample once, with the right baselines.

The real driver on virtual time. Rollout and reward functions fail for some samples however often they are tried,
requests break off, and the process ends in any moment; the next one may have other settings.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from seeds import seeds
from test_three_epochs import (
    CAP,
    EPOCHS,
    SAMPLES,
    CountingEngine,
    Kept,
    World,
    fails_once,
    length,
    luck,
    quiet,
    rejected,
)
from virtual_rollouts import EOS, VOCAB, on_virtual_time

from april.core.batch import Batch, DeliveredSample
from april.core.ledger import bucket_of
from april.core.types import DropReason, GenerationMode, OnDataEnd, OnFailedSample, Prompt, Refill
from april.driver.llm import LLM
from april.driver.rewards import Response
from april.engines.protocol import Chunk, Request
from april.engines.simulated.engine import synthetic_response
from april.errors import DataExhausted

__all__ = ["quiet"]  # a fixture

DROP_GROUP, REPLACE, SHRINK = OnFailedSample
PROMPTS = 10


def fails(prompt: Prompt, index: int) -> str:
    """What of this sample fails for good, if something does: 12 % of them."""
    chance = luck(prompt.epoch, prompt.position, index, 7)
    return "early" if chance < 30 else "late" if chance < 80 else "reward" if chance < 120 else ""


class FailingWorld(World):
    """What was trained is kept sample by sample."""

    trained: list[list[DeliveredSample]]  # type: ignore[assignment]

    def __init__(self, n: int, changes: dict[str, Any], *, together: bool) -> None:
        self.together = together
        """Groups are scored as a whole, which never fails for good."""
        self.asked: set[tuple[int, int]] = set()
        super().__init__(n, PROMPTS, OnDataEnd.SHORT, changes | ({"group_reward": self.rewards} if together else {}))

    def fails(self, prompt: Prompt, index: int) -> bool:
        """Whether something of this sample does, for good."""
        what = fails(prompt, index)
        return bool(what) and not (self.together and what == "reward")

    async def rollout(self, prompt: Prompt, llm: LLM) -> int:
        what, who = fails(prompt, llm.sample_id.index), (prompt.epoch, prompt.position, llm.sample_id.index)
        if what == "early":
            raise ValueError("the sandbox does not start")
        await llm.generate()
        if what == "late" or (fails_once(*who) and who not in self.failed):
            self.failed.add(who)
            raise ValueError("the sandbox is broken")
        return llm.sample_id.index

    async def rewards(self, prompt: Prompt, responses: Sequence[Response]) -> list[float]:
        """Of a group: its members, whatever has become of others; the judge is away now and then."""
        indices = [r.sample_id.index for r in responses]
        assert [r.output for r in responses] == indices == sorted(set(indices))
        assert len(indices) <= SAMPLES
        assert not any(self.fails(prompt, i) for i in indices)
        key = prompt.epoch, prompt.position
        if luck(*key, 8) < 300 and key not in self.asked:
            self.asked.add(key)
            raise ValueError("the judge was away")
        await asyncio.sleep(luck(*key, 9) / 100)
        return [float(len(r.tokens)) for r in responses]

    async def reward(self, prompt: Prompt, response: Response) -> float:
        if fails(prompt, response.sample_id.index) == "reward":
            raise ValueError("the judge was away")
        return float(len(response.tokens))

    def settled(self) -> list[tuple[int, int]]:
        """Prompts of which something is delivered, and those that were dropped; in the history that is kept."""
        delivered = {(s.prompt.epoch, s.prompt.position) for batch in self.trained for s in batch}
        return [*delivered, *(key for key, _ in self.drops)]

    def look_at(self, batch: Batch) -> None:
        """Every sample is what the engines made; its baseline is of others, and of samples that did not fail."""
        k = self.core.settings.quorum(SAMPLES)
        for s in batch.samples:
            whole = length(*s.id)
            tokens, _ = synthetic_response(s.prompt.token_ids, s.id, 0, min(whole, CAP), VOCAB, (EOS,))
            if whole <= CAP:
                tokens[-1] = EOS
            assert np.array_equal(s.tokens, tokens), s.id
            self.look_at_segments(s)
            assert not self.fails(s.prompt, s.id.index)
            assert s.reward == len(s.tokens)
            assert not any(self.fails(s.prompt, i) for i, _ in s.cohort)
            assert all(reward == min(length(s.id.group, i), CAP) for i, reward in s.cohort)
            assert 1 <= len(s.cohort) <= k
            others = [reward for i, reward in s.cohort if i != s.id.index][: len(s.cohort) - 1]
            assert s.baseline_rewards.tolist() == others
        self.check_books()

    def check_books(self) -> None:
        super().check_books()
        books = self.core.context.lengths
        buckets = Counter(bucket_of(len(s.tokens)) for batch in self.trained for s in batch)
        out = Counter(bucket_of(s.tape.generated) for batch in self.core.leased.values() for s in batch)
        assert +books.trained.buckets == buckets + out

    async def go_on(self, kept: Kept, **changes: Any) -> None:
        """The process ends; another one, perhaps with other settings, goes on from the checkpoint."""
        self.changes |= changes
        await self.restart(kept)


async def live(world: FailingWorld, rng: random.Random, *, changes: bool) -> int:
    """Train to the end of the data, with restarts from any checkpoint in any moment; returns how many."""
    kept, restarts = world.keep(0), 0

    def other() -> dict[str, Any]:
        policy = rng.choice(list(OnFailedSample))
        return {"on_failed_sample": policy, "min_group_size": rng.randint(1, SAMPLES)} if changes else {}

    while True:
        waiter = asyncio.create_task(world.driver.next_batch())
        if restarts < 12 and (not restarts or rng.random() < 0.5):
            await asyncio.sleep(rng.uniform(0, 60))
            kept = world.keep(len(world.trained)) if rng.random() < 0.8 else kept
            if not restarts or rng.random() < 0.6:  # in the middle of a step
                restarts += 1
                waiter.cancel()
                await asyncio.wait([waiter])
                await world.go_on(kept, **other())
                continue
        try:
            batch = await waiter
        except DataExhausted:
            return restarts
        world.look_at(batch)
        if restarts < 12 and rng.random() < 0.15:  # it was not trained on
            restarts += 1
            await world.go_on(kept, **other())
            continue
        world.trained.append(list(batch.samples))
        if rng.random() < 0.3:  # before the weight update
            kept = world.keep(len(world.trained))
        await world.driver.update_weights()


def check_history(world: FailingWorld, policy: OnFailedSample | None, *, filters: bool) -> None:
    """Each prompt once; with one policy all the time it is known which samples are delivered."""
    times = Counter(world.settled())
    everything = [(e, p) for e in range(EPOCHS) for p in range(PROMPTS)]
    assert times == dict.fromkeys(everything, 1)
    dropped = dict(world.drops)
    samples: dict[tuple[int, int], list[DeliveredSample]] = defaultdict(list)
    for batch in world.trained:
        for s in batch:
            samples[s.prompt.epoch, s.prompt.position].append(s)
    for (epoch, position), delivered in samples.items():
        indices = sorted(s.id.index for s in delivered)
        assert len(set(indices)) == len(indices) <= SAMPLES
        assert len({s.cohort for s in delivered}) == 1, "one prompt, one cohort, over batches and restarts"
        prompt = delivered[0].prompt
        good = [i for i in range(2 * SAMPLES) if not world.fails(prompt, i)]
        originals = [i for i in good if i < SAMPLES]
        assert not (filters and rejected(epoch, position))
        if policy is REPLACE:
            assert indices == good[:SAMPLES]
        elif policy is SHRINK:
            assert indices == originals
    for key, reason in dropped.items():
        prompt = Prompt(np.empty(0, np.int32), {}, *key)
        failing = sum(world.fails(prompt, i) for i in range(SAMPLES))
        if reason is DropReason.FILTERED:
            assert filters
            assert rejected(*key)
        elif policy is DROP_GROUP:
            assert failing
        elif policy is SHRINK:
            assert SAMPLES - failing < world.core.settings.min_group_size
        else:
            assert policy is None or sum(not world.fails(prompt, i) for i in range(2 * SAMPLES)) < SAMPLES


@pytest.mark.parametrize("seed", seeds(30))
@on_virtual_time
async def test_every_sample_is_trained_once_whatever_fails(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any policy, schedule and quorum, or a policy that changes; group rewards, filters, faults, restarts."""
    rng, faults = random.Random(seed), random.Random(seed)

    def breaks_off(engine: CountingEngine, request: Request, chunk: Chunk) -> Chunk:
        if faults.random() < 0.01:
            raise ConnectionError("reset")
        engine.handed += len(chunk.tokens)
        return chunk

    monkeypatch.setattr(CountingEngine, "alter", breaks_off)
    policy: OnFailedSample | None = [DROP_GROUP, REPLACE, SHRINK, None][seed % 4]
    n, filters = rng.choice([2, 3]), rng.random() < 0.3
    refill, together = rng.choice(list(Refill)), seed % 3 == 2
    changes: dict[str, Any] = {
        "on_failed_sample": policy or DROP_GROUP, "min_group_size": rng.randint(1, SAMPLES),
        "max_attempt_failures": 3, "max_failed_groups": 10**6, "max_filtered_groups": 10**6,
        "group_quorum": 1.0 if together else rng.choice([1.0, 0.75]), "over": rng.choice([n, 2 * n]), "refill": refill,
        "generation": rng.choice(list(GenerationMode)), "max_staleness": rng.choice([1, 2, 4]),
        "retry_pause_s": rng.choice([0.0, 4.0]), "max_in_flight": n * SAMPLES * rng.choice([1, 2]),
    }  # fmt: skip
    if not filters:
        monkeypatch.setattr(FailingWorld, "filter", None)

    world = FailingWorld(n, changes, together=together)
    restarts = await live(world, rng, changes=policy is None)
    assert restarts > 0
    check_history(world, policy, filters=filters)
    assert world.core.tokens.held == 0
    await world.rollouts.close()
