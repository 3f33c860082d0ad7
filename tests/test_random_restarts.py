"""Epochs through the real driver over restarts: at full size, and from any checkpoint in any moment with faults.

Kept here, apart from april's books: the batches that the trainer still has after its restarts, every drop as it
happens, and every chunk that any engine of any life of the process handed over.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from seeds import seeds
from virtual_rollouts import EOS, VOCAB, RecordingEngine, Rollouts, on_virtual_time, prompt_ids, virtual

from april.core.batch import Batch, DeliveredSample
from april.core.ledger import bucket_of
from april.core.tape import SegmentKind
from april.core.types import (
    DropReason,
    FinishReason,
    GenerationMode,
    Group,
    OnDataEnd,
    OnFailedSample,
    OnStale,
    Prompt,
    Refill,
)
from april.driver.llm import LLM
from april.driver.rewards import Response
from april.engines.protocol import Chunk, Request
from april.engines.simulated.engine import synthetic_response
from april.engines.simulated.response_lengths import LognormalLengths
from april.errors import DataExhausted

SAMPLES, EPOCHS, CAP = 4, 3, 150
LONG = "APRIL_RANDOM_LIVES" in os.environ
"""``make random`` has more prompts and all combinations."""
LENGTHS = LognormalLengths(14, 0.7, 0.8, seed=11)
length = lru_cache(maxsize=None)(LENGTHS.sample)

Key = tuple[int, int]
"""(epoch, position)"""


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Tracebacks of all the rollouts that fail on purpose would cost more than the test."""
    with caplog.at_level(logging.CRITICAL, "april"):
        yield


# ---------------------------------------------------------------- the world


def luck(*key: int) -> int:
    """In [0, 1000), the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big") % 1000


def rejected(epoch: int, position: int) -> bool:
    """30 % of the groups are rejected by the filter."""
    return luck(epoch, position) < 300


def fails_for_good(epoch: int, position: int, index: int) -> bool:
    """1 % of the rollouts fail however often they are tried."""
    return luck(epoch, position, index) < 10


def fails_once(epoch: int, position: int, index: int) -> bool:
    """4 % of the rollouts fail the first time."""
    return 10 <= luck(epoch, position, index) < 50


def group_fails(epoch: int, position: int) -> bool:
    """Whether it has a sample that fails for good."""
    return any(fails_for_good(epoch, position, i) for i in range(SAMPLES))


class CountingEngine(RecordingEngine):
    """Counts as it records."""

    handed = 0

    def alter(self, request: Request, chunk: Chunk) -> Chunk:
        self.handed += len(chunk.tokens)
        return chunk


class Kept(NamedTuple):
    """A checkpoint of the trainer: april's state in it, and what the world had seen of the history it keeps."""

    state: bytes
    trained: int
    drops: int
    tokens: int


class World:
    """A trainer whose process ends now and then, and everything it saw."""

    def __init__(self, n: int, prompts: int, end: OnDataEnd, changes: dict[str, Any]) -> None:
        self.n, self.prompts, self.end, self.changes = n, prompts, end, changes
        self.trained: list[list[Key]] = []
        """prompts of each batch"""
        self.drops: list[tuple[Key, DropReason]] = []
        self.records: list[dict[str, list[Chunk]]] = []
        """chunks by attempt, of every engine there ever was"""
        self.failed: set[tuple[int, int, int]] = set()
        self.tokens_before = 0
        """handed over in earlier lives, as far as their history is kept"""
        self.seen: Counter[str] = Counter()
        self.start()

    def start(self) -> None:
        """A new process: new engines, a new driver, the same prompts."""
        self.engines = [
            CountingEngine(length, "e0", max_running=60, check_prefix=False),
            CountingEngine(length, "e1", max_running=60, check_prefix=False, stream_interval_s=8.0),
        ]
        self.records += [e.handed_over for e in self.engines]
        self.rollouts = Rollouts(
            length, n=self.n, samples=SAMPLES, engines=self.engines, prompts=self.prompts, rollout=self.rollout,
            reward=self.reward, filter=self.filter, epochs=None if self.end is OnDataEnd.WRAP else EPOCHS,
            max_response_len=CAP, on_data_end=self.end, run_id=len(self.records), **self.changes,
        )  # fmt: skip
        self.driver, self.core = self.rollouts.driver, self.rollouts.core
        failures = self.core.lives
        give_up = failures.give_up

        def recorded(group: Group, reason: DropReason, error: str) -> None:
            self.drops.append(((group.prompt.epoch, group.prompt.position), reason))
            give_up(group, reason, error)

        failures.give_up = recorded  # type: ignore[method-assign]

    async def rollout(self, prompt: Prompt, llm: LLM) -> None:
        who = (prompt.epoch, prompt.position, llm.sample_id.index)
        if fails_once(*who) and who not in self.failed:
            self.failed.add(who)
            if prompt.position % 2:
                await llm.generate()
            raise ValueError("the tool was away")
        await llm.generate()
        if fails_for_good(*who):
            raise ValueError("the sandbox is broken")

    async def reward(self, prompt: Prompt, response: Response) -> float:
        return float(len(response.tokens))

    async def filter(self, prompt: Prompt, responses: Sequence[Response]) -> bool:
        assert [r.reward for r in responses] == [len(r.tokens) for r in responses]
        return not rejected(prompt.epoch, prompt.position)

    # ------------------------------------------------------------ the trainer's side

    async def train(self, batch: Batch) -> None:
        """Check the batch, write it into the history, update the weights."""
        assert batch.id == len(self.trained)
        self.look_at(batch)
        self.trained.append(keys_of(batch))
        await self.driver.update_weights()

    def keep(self, trained: int) -> Kept:
        """A checkpoint of weights that were trained on the first ``trained`` batches, as bytes."""
        state = msgspec.msgpack.encode(self.driver.state_dict(trained - 1))
        return Kept(state, trained, len(self.drops), self.tokens)

    async def restart(self, kept: Kept) -> None:
        """The process ends; another one goes on from the checkpoint."""
        await self.rollouts.close()
        self.seen["forgotten batches"] += len(self.trained) - kept.trained
        del self.trained[kept.trained :], self.drops[kept.drops :]
        self.tokens_before = kept.tokens
        self.start()
        version = await self.driver.load_state_dict(msgspec.msgpack.decode(kept.state))
        assert version == self.core.clock.current
        self.seen["tokens kept over a restart"] += self.core.tokens.held
        self.check_books()

    # ------------------------------------------------------------ checks

    def look_at(self, batch: Batch) -> None:
        """Every sample is the uncut synthetic response, chunk for chunk what the engines made; the books are exact."""
        for s in batch.samples:
            whole = length(*s.id)
            tokens, logprobs = synthetic_response(s.prompt.token_ids, s.id, 0, min(whole, CAP), VOCAB, (EOS,))
            if whole <= CAP:
                tokens[-1] = EOS
            assert s.finish is (FinishReason.STOP if whole <= CAP else FinishReason.LENGTH)
            assert np.array_equal(s.tokens, tokens), s.id
            assert np.array_equal(s.logprobs, logprobs), s.id
            assert np.array_equal(s.prompt.token_ids, prompt_ids(s.prompt.position))
            self.look_at_segments(s)
            self.seen["samples"] += 1
            self.seen["resumed samples"] += s.attempts > 1
            self.seen["samples of two lives"] += len({g.version.incarnation for g in s.segments}) > 1
        assert batch.group_sizes == (SAMPLES,) * (len(batch) // SAMPLES)
        if self.core.settings.on_stale is OnStale.FINISH:
            assert max(s.staleness for s in batch.samples) <= self.core.settings.max_staleness
        self.check_books()

    def look_at_segments(self, sample: DeliveredSample) -> None:
        used: dict[str, int] = defaultdict(int)
        for g in sample.segments:
            assert g.kind is SegmentKind.GENERATED
            chunks = next(record[g.attempt_id] for record in self.records if g.attempt_id in record)
            made = np.concatenate([c.tokens for c in chunks])
            versions = np.repeat([c.version for c in chunks], [len(c.tokens) for c in chunks], axis=0)
            first = used[g.attempt_id]
            end = used[g.attempt_id] = first + g.count
            assert np.array_equal(made[first:end], sample.tokens[g.start : g.start + g.count])
            assert (versions[first:end] == g.version).all()

    @property
    def tokens(self) -> int:
        """Handed over by engines in the history that is kept."""
        return self.tokens_before + sum(e.handed for e in self.engines)

    def check_books(self) -> None:
        books, prompts = self.core.tokens, self.core.prompts
        assert books.observed + sum(a.tape.count for a in self.core.attempts.values()) == self.tokens
        assert books.observed == books.delivered + books.held + sum(books.dropped.values())
        assert prompts.observed == prompts.delivered + prompts.held + sum(prompts.dropped.values())
        assert +prompts.dropped == Counter(reason for _, reason in self.drops)
        self.core.validate()

    def settled(self) -> list[Key]:
        """Every prompt that was delivered or dropped in the kept history."""
        return [key for batch in self.trained for key in batch] + [key for key, _ in self.drops]


def keys_of(batch: Batch) -> list[Key]:
    return [(s.prompt.epoch, s.prompt.position) for s in batch.samples[::SAMPLES]]


# ---------------------------------------------------------------- the run


async def three_epochs(world: World) -> None:
    total = EPOCHS * world.prompts

    def part() -> float:
        return len(world.settled()) / total

    # killed once in the middle of a step, two batches after the last checkpoint
    while part() < 0.35:
        await world.train(await world.driver.next_batch())
    waiter = asyncio.create_task(world.driver.next_batch())
    for _ in range(12):
        await asyncio.sleep(2)
        if any(a.tape.count for a in world.core.attempts.values()):
            world.seen["kept in flight"] = 1
            break
        if waiter.done():  # surplus was enough for it
            await world.train(await waiter)
            waiter = asyncio.create_task(world.driver.next_batch())
    kept = world.keep(len(world.trained))
    await world.train(await waiter)
    await world.train(await world.driver.next_batch())
    await world.restart(kept)

    # and once with a batch that was delivered, and not trained on
    while part() < 0.7:
        await world.train(await world.driver.next_batch())
    batch = await world.driver.next_batch()
    world.look_at(batch)
    await world.restart(world.keep(len(world.trained)))
    again = await world.driver.next_batch()
    assert keys_of(again) == keys_of(batch)
    await world.train(again)

    if world.end is OnDataEnd.WRAP:
        while len({key for key in world.settled() if key[0] < EPOCHS}) < total:
            await world.train(await world.driver.next_batch())
        return
    await until_the_end(world)
    if world.end is OnDataEnd.WAIT:
        held = [(g.prompt.epoch, g.prompt.position) for g in world.core.buffer]
        assert len(held) == world.core.monitor.ready < world.n
        assert sorted(world.settled() + held) == [(e, p) for e in range(EPOCHS) for p in range(world.prompts)]
        world.driver.extend(prompt_ids(world.prompts + i) for i in range(4 * world.n))
        await until_the_end(world)


async def until_the_end(world: World) -> None:
    sizes = []
    while True:
        try:
            batch = await world.driver.next_batch()
        except DataExhausted:
            break
        sizes.append(len(batch.group_sizes))
        await world.train(batch)
    assert all(size == world.n for size in sizes[:-1])
    assert world.end is OnDataEnd.SHORT or sizes[-1:] in ([], [world.n])
    assert world.core.prompts.held == (0 if world.end is OnDataEnd.SHORT else world.core.monitor.ready)


def check_history(world: World) -> None:
    """Each prompt of each epoch is in the kept history exactly once, for the reason that it must be."""
    delivered = [key for batch in world.trained for key in batch]
    dropped = dict(world.drops)
    times = Counter(world.settled())
    everything = [(e, p) for e in range(EPOCHS) for p in range(world.prompts)]
    assert all(times[key] == 1 for key in everything)
    assert max(times.values()) == 1
    for key in delivered:
        assert not rejected(*key)
        assert not group_fails(*key)
    for key, reason in dropped.items():
        if reason is DropReason.FAILED:
            assert group_fails(*key)
        elif reason is DropReason.FILTERED:
            assert rejected(*key)
            assert not group_fails(*key)
        else:
            assert reason is DropReason.STALE
            assert world.core.settings.on_stale is OnStale.DROP
    if world.core.settings.on_stale is not OnStale.DROP:
        assert {k for k in everything if k in dropped} == {k for k in everything if rejected(*k) or group_fails(*k)}


def settings_of(n: int, mode: str) -> dict[str, Any]:
    """The schedules, with N = ``n``."""
    return {
        "sync": {"over": n},
        "over-sampling": {"over": 2 * n},
        "portions": {"over": max(1, n // 3)},
        "refill-group": {"over": 2 * n, "refill": Refill.GROUP},
        "refill-sample": {"refill": Refill.SAMPLE, "max_in_flight": n * SAMPLES * 5 // 4},
    }[mode]


MODES = ["sync", "over-sampling", "portions", "refill-group", "refill-sample"]


def run(n: int, prompts: int, mode: str, stale: OnStale, end: OnDataEnd, *, check: bool = False) -> World:
    worlds: list[World] = []

    async def program() -> None:
        changes = {**settings_of(n, mode), "on_stale": stale, "max_staleness": 2, "check": check}
        world = World(n, prompts, end, changes)
        worlds.append(world)
        await three_epochs(world)
        check_history(world)
        await world.rollouts.close()

    virtual(program)
    return worlds[0]


@pytest.mark.parametrize(
    ("mode", "stale", "end"),
    [
        ("sync", OnStale.FINISH, OnDataEnd.SHORT),
        ("over-sampling", OnStale.FINISH, OnDataEnd.WAIT),
        ("portions", OnStale.MASK, OnDataEnd.WRAP),
        ("refill-group", OnStale.DROP, OnDataEnd.SHORT),
        ("refill-sample", OnStale.RESTART, OnDataEnd.SHORT),
    ],
)
def test_three_epochs_of_many_prompts(mode: str, stale: OnStale, end: OnDataEnd) -> None:
    """Every schedule at full size: each prompt is settled exactly once per epoch, and the books are exact."""
    prompts = 1000 if LONG else 250
    world = run(24, prompts, mode, stale, end)
    assert world.seen["kept in flight"]
    assert world.seen["resumed samples"] > prompts / 10
    assert world.seen["samples of two lives"] > 10
    assert world.seen["forgotten batches"] >= 2
    reasons = Counter(reason for (epoch, _), reason in world.drops if epoch < EPOCHS)
    if stale is not OnStale.DROP:
        assert reasons[DropReason.FILTERED] > 0.8 * prompts
        assert reasons[DropReason.FAILED] > 0.08 * prompts


def combinations() -> list[tuple[str, OnStale, OnDataEnd]]:
    """Return 20 combinations with every pair of schedule, policy and end of data; all 60 where runs are long."""
    ends = list(OnDataEnd)
    return [
        (mode, stale, end)
        for i, mode in enumerate(MODES)
        for j, stale in enumerate(OnStale)
        for end in (ends if LONG else [ends[(i + j) % len(ends)]])
    ]


@pytest.mark.parametrize(("mode", "stale", "end"), combinations())
def test_every_mode(mode: str, stale: OnStale, end: OnDataEnd) -> None:
    """The same in combinations of schedule, staleness policy and end of data, at 30 prompts an epoch."""
    world = run(6, 30, mode, stale, end, check=stale is OnStale.RESTART)
    assert world.seen["tokens kept over a restart"] > 0
    assert world.seen["forgotten batches"] >= 2




async def live(world: World, rng: random.Random) -> None:
    """Train until every prompt of the epochs is settled, or the data has ended, with restarts on the way."""
    kept, restarts = world.keep(0), 8
    wanted = EPOCHS * world.prompts
    while len({key for key in world.settled() if key[0] < EPOCHS}) < wanted:
        waiter = asyncio.create_task(world.driver.next_batch())
        if rng.random() < 0.35:
            await asyncio.sleep(rng.uniform(0, 60))
            kept = world.keep(len(world.trained))
            if restarts and rng.random() < 0.5:  # in the middle of a step
                restarts -= 1
                waiter.cancel()
                await asyncio.wait([waiter])
                await world.restart(kept)
                continue
        try:
            batch = await waiter
        except DataExhausted:
            return
        assert batch.id == len(world.trained)
        world.look_at(batch)
        luck = rng.random()
        if luck > 0.1:
            world.trained.append(keys_of(batch))
        if luck < 0.2:  # before the weight update; below 0.1 the batch was not trained on
            kept = world.keep(len(world.trained))
            if restarts:
                restarts -= 1
                await world.restart(kept)
                continue
        if luck > 0.1:
            await world.driver.update_weights()
        else:
            await world.restart(kept)
        if restarts and rng.random() < 0.1:  # from an older checkpoint
            restarts -= 1
            await world.restart(kept)


STEPWISE, CONTINUOUS = GenerationMode


@pytest.mark.parametrize(
    ("generation", "seed"), [*seeds(24, STEPWISE), *seeds(10, CONTINUOUS)]
)
@on_virtual_time
async def test_every_prompt_is_settled_once_whatever_happens(
    generation: GenerationMode, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any schedule and policy, many restarts, faults: exactly once per epoch, tokens as the engines made them."""
    rng, faults = random.Random(seed), random.Random(seed)

    def breaks_off(engine: CountingEngine, request: Request, chunk: Chunk) -> Chunk:
        if faults.random() < 0.02:
            raise ConnectionError("reset")
        engine.handed += len(chunk.tokens)
        return chunk

    async def gets_lost(engine: CountingEngine, attempt_ids: Sequence[str] | None = None) -> None:
        if faults.random() < 0.2:
            return
        await asyncio.sleep(faults.random())
        await RecordingEngine.abort(engine, attempt_ids)

    monkeypatch.setattr(CountingEngine, "alter", breaks_off)
    monkeypatch.setattr(CountingEngine, "abort", gets_lost)
    n, prompts = rng.choice([2, 3, 5]), rng.choice([7, 12, 20])
    mode, stale, end = MODES[seed % len(MODES)], rng.choice(list(OnStale)), rng.choice(list(OnDataEnd))

    changes = {**settings_of(n, mode), "on_stale": stale, "max_staleness": rng.choice([1, 2, 4]), "check": True}
    changes["generation"] = generation
    world = World(n, prompts, end, changes)
    await live(world, rng)
    held = [(g.prompt.epoch, g.prompt.position) for g in world.core.buffer]
    times = Counter(world.settled())
    assert max(times.values()) == 1
    if end is not OnDataEnd.WAIT:
        held = []
    missing = {(e, p) for e in range(EPOCHS) for p in range(prompts)} - set(times)
    assert missing == {key for key in held if key[0] < EPOCHS}
    await world.rollouts.close()



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


async def live_with_failures(world: FailingWorld, rng: random.Random, *, changes: bool) -> int:
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


def check_samples(world: FailingWorld, policy: OnFailedSample | None, *, filters: bool) -> None:
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
    restarts = await live_with_failures(world, rng, changes=policy is None)
    assert restarts > 0
    check_samples(world, policy, filters=filters)
    assert world.core.tokens.held == 0
    await world.rollouts.close()
