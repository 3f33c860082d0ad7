"""Epochs through the real driver over restarts from any checkpoint in any moment, whatever fails meanwhile.

Kept here, apart from april's books: the samples that the trainer still has after its restarts, every drop as it
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
from virtual_rollouts import EOS, VOCAB, RecordingEngine, Rollouts, on_virtual_time, prompt_ids

from april.config import settings as config
from april.core.batch import Batch, DeliveredSample
from april.core.ledger import Lengths
from april.core.tape import SegmentKind
from april.core.types import (
    DropReason,
    FinishReason,
    GenerationMode,
    Group,
    GroupState,
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
LIVES = int(os.environ.get("APRIL_RANDOM_LIVES", "40"))
LENGTHS = LognormalLengths(14, 0.7, 0.8, seed=11)
length = lru_cache(maxsize=None)(LENGTHS.sample)
DROP_GROUP, REPLACE, SHRINK = OnFailedSample
MODES = ["sync", "over-sampling", "portions", "refill-group", "refill-sample", "tail-batching"]

Key = tuple[int, int]
"""(epoch, position)"""


@pytest.fixture(autouse=True)
def anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core gets on with settings that april.Config refuses together; lives set their own pause before retries."""
    monkeypatch.setattr(config.Config, "_contradictions", lambda _: iter(()))
    monkeypatch.setattr(config, "RETRY_PAUSE_S", 0.0)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Tracebacks of all the rollouts that fail on purpose would cost more than the test."""
    with caplog.at_level(logging.CRITICAL, "april"):
        yield


# ---------------------------------------------------------------- the world


def luck(*key: int) -> int:
    """In [0, 1000), the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big") % 1000


def rejected(key: Key) -> bool:
    """30 % of the groups are rejected by the filter."""
    return luck(*key) < 300


def fate(key: Key, index: int) -> str:
    """What of this sample fails, if something does: 10 % for good, 4 % once."""
    chance = luck(*key, index, 7)
    return next((what for what, most in FATES.items() if chance < most), "")


FATES = {"early": 25, "late": 65, "reward": 100, "once": 140}


class CountingEngine(RecordingEngine):
    """Counts as it records; requests break off, and aborts get lost."""

    handed = 0
    faults = random.Random()

    def alter_chunk(self, request: Request, chunk: Chunk) -> Chunk:
        if self.faults.random() < 0.01:
            raise ConnectionError("reset")
        self.handed += len(chunk.tokens)
        return chunk

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        if self.faults.random() > 0.2:
            await asyncio.sleep(self.faults.random())
            await super().abort(attempt_ids)


class Kept(NamedTuple):
    """A checkpoint of the trainer: april's state in it, and what the world had seen of the history it keeps."""

    state: bytes
    trained: int
    drops: int
    tokens: int


class World:
    """A trainer whose process ends now and then, and everything it saw."""

    def __init__(self, prompts: int, changes: dict[str, Any], *, filters: bool, together: bool) -> None:
        self.prompts, self.changes = prompts, changes
        self.filters, self.together = filters, together
        """Together: groups are scored as a whole, which never fails for good."""
        self.end: OnDataEnd = changes["on_data_end"]
        self.trained: list[list[DeliveredSample]] = []
        self.drops: list[tuple[Key, DropReason]] = []
        self.records: list[dict[str, list[Chunk]]] = []
        """chunks by attempt, of every engine there ever was"""
        self.failed: set[tuple[int, ...]] = set()
        """Of what fails once, what has done so"""
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
        self.records += [e.yielded for e in self.engines]
        scoring = {"group_reward": self.rewards} if self.together else {"reward": self.reward}
        self.rollouts = Rollouts(
            length, samples=SAMPLES, engines=self.engines, prompts=self.prompts, rollout=self.rollout,
            filter=self.filter if self.filters else None, epochs=1 if self.end is OnDataEnd.WRAP else EPOCHS,
            max_response_len=CAP, **scoring, **self.changes,
        )  # fmt: skip
        self.driver, self.core = self.rollouts.driver, self.rollouts.core
        give_up = self.core.lifecycle.drop_group

        def recorded(group: Group, reason: DropReason, error: str) -> None:
            self.drops.append(((group.prompt.epoch, group.prompt.position), reason))
            give_up(group, reason, error)

        self.core.lifecycle.drop_group = recorded  # type: ignore[method-assign]

    def fails(self, key: Key, index: int) -> bool:
        """Whether something of this sample does, for good."""
        return fate(key, index) in ("early", "late") + ("reward",) * (not self.together)

    def once(self, *who: int) -> bool:
        """True the first time."""
        first = who not in self.failed
        self.failed.add(who)
        return first

    async def rollout(self, prompt: Prompt, llm: LLM) -> int:
        key, index = (prompt.epoch, prompt.position), llm.sample_id.index
        what = fate(key, index)
        if what == "early" or (what == "once" and index % 2 and self.once(*key, index)):
            raise ValueError("the sandbox does not start")
        await llm.generate()
        if what == "late" or (what == "once" and self.once(*key, index)):
            raise ValueError("the sandbox is broken")
        return index

    async def rewards(self, prompt: Prompt, responses: Sequence[Response]) -> list[float]:
        """Of a group: its members, whatever has become of others; the judge is away now and then."""
        key, indices = (prompt.epoch, prompt.position), [r.sample_id.index for r in responses]
        assert [r.output for r in responses] == indices == sorted(set(indices))
        assert len(indices) <= SAMPLES
        assert not any(self.fails(key, i) for i in indices)
        if luck(*key, 8) < 300 and self.once(*key):
            raise ConnectionError("the judge was away")  # which is no bug, even if it is so for the first groups
        await asyncio.sleep(luck(*key, 9) / 100)
        return [float(len(r.tokens)) for r in responses]

    async def reward(self, prompt: Prompt, response: Response) -> float:
        if fate((prompt.epoch, prompt.position), response.sample_id.index) == "reward":
            raise ValueError("the judge was away")
        return float(len(response.tokens))

    async def filter(self, prompt: Prompt, responses: Sequence[Response]) -> bool:
        assert [r.reward for r in responses] == [len(r.tokens) for r in responses]
        return not rejected((prompt.epoch, prompt.position))

    # ------------------------------------------------------------ the trainer's side

    def keep(self) -> Kept:
        """A checkpoint of weights that were trained on all batches so far, as bytes."""
        state = msgspec.msgpack.encode(self.driver.state_dict(len(self.trained) - 1))
        return Kept(state, len(self.trained), len(self.drops), self.tokens)

    async def restart(self, kept: Kept, **changes: Any) -> None:
        """The process ends; another one, perhaps with other settings, goes on from the checkpoint."""
        await self.rollouts.close()
        self.seen["restarts"] += 1
        self.seen["forgotten batches"] += len(self.trained) - kept.trained
        del self.trained[kept.trained :], self.drops[kept.drops :]
        self.tokens_before = kept.tokens
        self.changes |= changes
        self.start()
        version = await self.driver.load_state_dict(msgspec.msgpack.decode(kept.state))
        assert version == self.core.clock.current
        self.seen["tokens kept over a restart"] += self.core.tokens.held
        self.check_books()

    # ------------------------------------------------------------ checks

    def look_at(self, batch: Batch) -> None:
        """Every sample is the uncut synthetic response, chunk for chunk what the engines made; the books are exact.

        Its baseline is of others, and of samples that did not fail.
        """
        assert batch.id == len(self.trained)
        settings = self.core.settings
        for s in batch.samples:
            key, whole = (s.prompt.epoch, s.prompt.position), length(*s.id)
            tokens, logprobs = synthetic_response(s.prompt.token_ids, s.id, 0, min(whole, CAP), VOCAB, (EOS,))
            if whole <= CAP:
                tokens[-1] = EOS
            assert s.finish is (FinishReason.STOP if whole <= CAP else FinishReason.LENGTH)
            assert np.array_equal(s.tokens, tokens), s.id
            assert np.array_equal(s.logprobs, logprobs), s.id
            assert np.array_equal(s.prompt.token_ids, prompt_ids(s.prompt.position))
            self.look_at_segments(s)
            assert s.reward == len(s.tokens)
            assert not any(self.fails(key, i) for i, _ in (*s.cohort, (s.id.index, 0.0)))
            assert all(reward == min(length(s.id.group, i), CAP) for i, reward in s.cohort)
            assert 1 <= len(s.cohort) <= settings.quorum(SAMPLES)
            others = [reward for i, reward in s.cohort if i != s.id.index][: len(s.cohort) - 1]
            assert s.baseline_rewards.tolist() == others
            bounded = settings.on_stale is OnStale.FINISH or settings.tail_batching
            assert not bounded or s.staleness <= settings.max_staleness
            self.seen["resumed samples"] += s.attempts > 1
            self.seen["samples of two lives"] += len({g.version.incarnation for g in s.segments}) > 1
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
        core, books, prompts = self.core, self.core.tokens, self.core.prompts
        assert core.observed_tokens() == self.tokens
        assert books.observed == books.delivered + books.held + sum(books.dropped.values())
        assert prompts.observed == prompts.delivered + prompts.held + sum(prompts.dropped.values())
        assert +prompts.dropped == Counter(reason for _, reason in self.drops)
        lengths = [len(s.tokens) for batch in self.trained for s in batch]
        lengths += [s.chains[0].tape.generated for batch in core.leased.values() for s in batch]
        assert core.context.lengths.trained == Lengths(len(lengths), sum(lengths))
        core.validate()

    def settled(self) -> list[Key]:
        """Prompts of which something was delivered, and those that were dropped; in the history that is kept."""
        delivered = {(s.prompt.epoch, s.prompt.position) for batch in self.trained for s in batch}
        return [*delivered, *(key for key, _ in self.drops)]


# ---------------------------------------------------------------- a life


async def live(world: World, rng: random.Random, *, changes: bool) -> None:
    """Train until the data has ended, or every prompt of the epochs is settled, with restarts on the way."""
    kept, most = world.keep(), 12
    policies = {"on_failed_sample": list(OnFailedSample), "min_group_size": range(1, SAMPLES + 1)}

    async def restart() -> None:
        await world.restart(kept, **{name: rng.choice(list(some)) for name, some in policies.items() if changes})

    def over() -> bool:
        return world.end is OnDataEnd.WRAP and sum(e < EPOCHS for e, _ in world.settled()) == EPOCHS * world.prompts

    while not over():
        left = most - world.seen["restarts"]
        waiter = asyncio.create_task(world.driver.next_batch())
        if not world.seen["restarts"] or rng.random() < 0.35:
            await asyncio.sleep(rng.uniform(0, 60))
            kept = world.keep() if rng.random() < 0.8 else kept
            if not world.seen["restarts"] or (left > 0 and rng.random() < 0.5):  # in the middle of a step
                waiter.cancel()
                await asyncio.wait([waiter])
                await restart()
                continue
        try:
            batch = await waiter
        except DataExhausted:
            return
        world.look_at(batch)
        what = rng.random()
        if left > 0 and what < 0.15:  # it was not trained on, and comes again
            fresh = rng.random() < 0.5
            kept = world.keep() if fresh else kept
            alone = not any(group.state is GroupState.READY for group in world.core.buffer.groups.values())
            await restart()
            if fresh and not changes:
                assert {s.id.group for s in batch.samples} <= world.core.buffer.groups.keys()
                again = await world.driver.next_batch()
                if alone:  # else an older group, which was ready later, goes before some of the batch
                    assert [s.id for s in again.samples] == [s.id for s in batch.samples]
                batch = again
                world.look_at(batch)
            else:
                continue
        world.trained.append(list(batch.samples))
        if what < 0.4:  # before the weight update
            kept = world.keep()
        if left <= 0 or what > 0.1:
            await world.driver.update_weights()
        if left > 0 and (what < 0.2 or what > 0.9):  # the latter from an older checkpoint
            await restart()


def check_fates(world: World, policy: OnFailedSample | None) -> None:
    """Each prompt once, for the reason that it must be; with one policy all the time it is known of which samples."""
    settings = world.core.settings
    samples: dict[Key, list[DeliveredSample]] = defaultdict(list)
    for batch in world.trained:
        for s in batch:
            samples[s.prompt.epoch, s.prompt.position].append(s)
    times = Counter(world.settled())
    assert set(times.values()) == {1}
    held = {(g.prompt.epoch, g.prompt.position) for g in world.core.buffer if world.end is OnDataEnd.WAIT}
    missing = {(e, p) for e in range(EPOCHS) for p in range(world.prompts)} - set(times)
    assert missing == held - set(times)
    for key, delivered in samples.items():
        indices = sorted(s.id.index for s in delivered)
        assert len(set(indices)) == len(indices) <= SAMPLES
        assert len({s.cohort for s in delivered}) == 1, "one prompt, one cohort, over batches and restarts"
        good = [i for i in range(2 * SAMPLES) if not world.fails(key, i)]
        assert not (world.filters and rejected(key))
        if settings.on_stale is OnStale.DROP or policy is None:
            continue
        if policy is REPLACE:
            assert indices == good[:SAMPLES]
        elif policy is SHRINK or settings.whole_groups:
            assert indices == [i for i in good if i < SAMPLES]
            assert policy is SHRINK or len(indices) == SAMPLES
    for key, reason in world.drops:
        failing = sum(world.fails(key, i) for i in range(SAMPLES))
        if reason is DropReason.STALE:
            assert settings.on_stale is OnStale.DROP
        elif reason is DropReason.FILTERED:
            assert world.filters
            assert rejected(key)
        elif policy is DROP_GROUP:
            assert failing
        elif policy is SHRINK:
            assert SAMPLES - failing < settings.min_group_size
        else:
            assert policy is None or sum(not world.fails(key, i) for i in range(2 * SAMPLES)) < SAMPLES


def schedule(n: int, mode: str) -> dict[str, Any]:
    return {
        "sync": {"over": n},
        "over-sampling": {"over": 2 * n},
        "portions": {"over": max(1, n // 3)},
        "refill-group": {"over": 2 * n, "refill": Refill.GROUP},
        "refill-sample": {"refill": Refill.SAMPLE, "max_in_flight": n * SAMPLES * 5 // 4},
        "tail-batching": {
            "over": n + max(1, n // 2), "partial_rollout": False, "max_staleness": 0, "on_stale": OnStale.RESTART,
            "generation": GenerationMode.STEPWISE,
        },
    }[mode]


async def a_life(seed: int, n: int, prompts: int, mode: str = "") -> World:
    """Any schedule, staleness policy, quorum, end of data and policy of failures, or one that changes."""
    rng = random.Random(seed)
    CountingEngine.faults = random.Random(seed)
    policy: OnFailedSample | None = [DROP_GROUP, REPLACE, SHRINK, None][seed % 4]
    together, filters = seed % 3 == 2, rng.random() < 0.4
    mode = mode or ("tail-batching" if seed % 7 == 6 else MODES[seed % 5])
    quorum = 1.0 if together or mode == "tail-batching" else rng.choice([1.0, 0.75])
    changes: dict[str, Any] = {
        "n": n, "max_attempt_failures": 3, "max_failed_groups": 10**6, "max_filtered_groups": 10**6,
        "on_failed_sample": policy or DROP_GROUP, "min_group_size": rng.randint(1, SAMPLES), "group_quorum": quorum,
        "on_stale": rng.choice(list(OnStale)), "max_staleness": rng.choice([1, 2, 4]),
        "generation": rng.choice(list(GenerationMode)), "retry_pause_s": rng.choice([0.0, 4.0]),
        "on_data_end": rng.choice(list(OnDataEnd)) if quorum == 1.0 else OnDataEnd.SHORT,
        "check": n < 10 and rng.random() < 0.5, **schedule(n, mode),
    }  # fmt: skip
    config.RETRY_PAUSE_S = changes.pop("retry_pause_s")
    world = World(prompts, changes, filters=filters, together=together)
    await live(world, rng, changes=policy is None)
    check_fates(world, policy)
    assert world.core.tokens.held == 0 or world.end is not OnDataEnd.SHORT
    await world.rollouts.close()
    return world


@pytest.mark.parametrize("seed", seeds(LIVES))
@on_virtual_time
async def test_every_sample_is_trained_once_whatever_fails(seed: int) -> None:
    """Exactly once per epoch, tokens as the engines made them; failures, filters, lost aborts, restarts."""
    world = await a_life(seed, *[(2, 7), (2, 10), (3, 12), (5, 20)][seed // 5 % 4])
    assert world.seen["restarts"]


@pytest.mark.no_cover
@pytest.mark.parametrize(("seed", "mode"), [(1200, "sync"), *((1000 + i, m) for i, m in enumerate(MODES) if i)])
@on_virtual_time
async def test_epochs_of_many_prompts(seed: int, mode: str) -> None:
    """Every schedule with batches of 24 prompts, where more than one batch is under way."""
    world = await a_life(seed, 24, 100, mode)
    assert world.seen["resumed samples"] > (25 if mode != "tail-batching" else 0)
    assert world.seen["samples of two lives"] > 10
    assert world.seen["forgotten batches"]
    assert world.seen["tokens kept over a restart"] > 0
