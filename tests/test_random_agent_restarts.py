"""Random lives of agents whose scheduler is killed in any moment; another one loads the last checkpoint.

Agents ask side by side, begin anew, go on with what was said earlier, ask the same twice, and leave without having
heard everything. Engines break off, are deaf to aborts, join and leave. The oracle knows what each function of the
history that is kept has asked and heard, what every engine of every process handed over, and which batches the trainer
still has. Each process's record is decided again. More lives: ``APRIL_RANDOM_LIVES=1000`` before pytest.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from memory_doors import MemoryDoor, MemoryDoors, Row, door_of, rows_of
from seeds import seeds
from test_random_extras import NAMES, made_again

import april
from april.core.batch import Batch, DeliveredSample
from april.core.tape import SegmentKind
from april.record.replay import replay
from april.scheduler import RolloutScheduler
from april.testing import FakeEngine, FaultScript, rollouts, run_virtual
from april.testing.same_loop import Rollouts

LIVES = int(os.environ.get("APRIL_RANDOM_LIVES", "16"))
PROMPTS, RESTARTS = 6, 6
FAULTS = ("break_off", "abort_late", "abort_hangs", "abort_ignored", "abort_missed")


async def agent(door: MemoryDoor, start: list[int], chance: random.Random) -> None:
    """A few rounds of requests; the same for the same ``chance``, whatever becomes of its scheduler."""
    said = [list(start)]
    for turn in range(chance.randint(1, 4)):
        what = chance.choice(["on", "on", "other", "side by side", "twins", "summary", "gone"])
        last, tool, limit = said[-1], [600 + turn] * chance.randint(0, 3), chance.choice([3, 30])
        requests = {
            "on": [[*last, *tool]],
            "other": [[700 + turn, 701]],
            "side by side": [[*last, *tool], [710 + turn], [*start, 720 + turn], [*chance.choice(said), 730]],
            "twins": [[*last, *tool], [*last, *tool]],
            "summary": [[*start, 740 + turn]],
            "gone": [[*chance.choice(said), 750]],
        }[what]
        heard = what != "gone"
        answers = await asyncio.gather(*(door.ask(ids, heard=heard, max_tokens=limit) for ids in requests))
        if heard:
            said += [answer.conversation.tolist() for answer in answers]
    if chance.random() < 0.2:
        asyncio.ensure_future(door.ask([760], heard=False))  # noqa: RUF006  # nobody waits for it
        await asyncio.sleep(chance.choice([0.0, 2.0]))


def length_of(request: Any) -> int:
    group, index = request.sample_key
    return 3 + (7 * group + 11 * index) % 17


def row(sample: DeliveredSample) -> Row:
    return sample.prompt.token_ids.tolist(), sample.tokens.tolist(), sample.loss_mask.tolist()


def rows_in(response: Any) -> list[Any]:
    """As the trainer's functions see them."""
    return [(c.prompt_ids, c.tokens, c.loss_mask) for c in response.conversations]


def worth_of(rows: list[Any]) -> float:
    """The reward of these rows: all conversations count."""
    return float(sum(3 * int(sum(p)) + int(sum(t)) + 5 * int(sum(m)) for p, t, m in rows) % 97)


class Kept(NamedTuple):
    """A checkpoint: april's state in it, and what was true of the history that it keeps."""

    state: bytes
    trained: int
    told: dict[Any, list[Row]]


class Life:
    """One trainer's life, chosen by a seed; ``seen`` counts what happened in it."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed, self.luck = seed, random.Random(seed)
        luck = self.luck
        n, self.samples = luck.randint(1, 3), luck.choice([1, 2, 4])
        self.config = april.Config(
            rollout_batch_size=n, n_samples_per_prompt=self.samples, over_sampling_batch_size=n * luck.choice([1, 2]),
            max_response_len=400, max_in_flight=luck.choice([2, 8, 24]),
            refill=luck.choice(["none", "group", "sample"]), generation=luck.choice(["stepwise", "continuous"]),
            max_staleness=luck.choice([1, 3]), group_quorum=luck.choice([1.0, 0.75]) if self.samples == 4 else 1.0,
            extras=luck.choice([(), NAMES]), max_attempt_failures=99, max_failed_groups=99, outage_deadline_s=1e9,
            abort_deadline_s=6.0, on_data_end="short", engine={"kind": "simulated"},
        )  # fmt: skip
        self.raises = luck.choice([0.0, 0.05])
        self.folder = folder
        self.engines: list[FakeEngine] = []
        """Of all processes."""
        self.batches: list[Batch] = []
        """That the trainer has trained and not lost."""
        self.told: dict[Any, list[Row]] = {}
        """What each sample's function has asked and heard, made into rows."""
        self.kept: Kept | None = None
        self.restarts = 0
        self.seen: Counter[str] = Counter()
        self.begin()

    # ---------------------------------------------------------------- the trainer's functions

    async def rollout(self, prompt: Any, llm: april.LLM) -> None:
        """An agent, which always asks at least once and hears the answer."""
        key = llm.sample_id
        door, chance = door_of(llm), random.Random(f"{self.seed} {key}")
        await door.ask(prompt.token_ids if chance.random() < 0.7 else [555, 556])
        await agent(door, prompt.token_ids.tolist(), chance)
        if self.luck.random() < self.raises:
            raise OSError("worse luck")
        if prompt.token_ids.tolist() != [5, 6]:  # an evaluation has samples of the same names
            self.told[key] = rows_of(door.events)
            self.seen["rows"] += len(self.told[key])
            self.seen["unheard"] += door.asked - len(door.heard)

    async def reward(self, prompt: Any, response: Any) -> float:
        """Raises now and then: the sample begins again."""
        await asyncio.sleep(self.luck.random())
        if self.luck.random() < self.raises:
            raise ValueError("bad luck")
        return worth_of(rows_in(response))

    # ---------------------------------------------------------------- its processes

    def engine(self) -> FakeEngine:
        """A new one, under a new name."""
        number = len(self.engines)
        faults = FaultScript.random(1000 * self.seed + number, 0.1, FAULTS)
        self.engines.append(
            FakeEngine(f"e{number}", lengths=length_of, chunk_tokens=1, faults=faults, extras=self.config.extras)
        )
        return self.engines[-1]

    def begin(self) -> None:
        """Every process writes a record of its own; of four lives, one checks april's books after every event."""
        self.record = self.folder / f"{self.seed}-{self.restarts}"
        self.run: Rollouts = rollouts(
            self.config, engines=[self.engine(), self.engine()], record=self.record, check=self.seed % 4 == 0,
            prompts=[{"token_ids": [1, 2, i + 3], "i": i} for i in range(PROMPTS)], rollout=self.rollout,
            reward=self.reward,
        )  # fmt: skip

    async def closed(self) -> None:
        """The process is gone; what its record says is decided again in the same way."""
        core = self.run._driver.core
        await self.run.close()
        again = replay(self.record)
        assert again.core.tokens == core.tokens
        assert again.core.prompts == core.prompts

    def keep(self) -> None:
        """A checkpoint of weights that were trained on all batches so far."""
        state = self.run.state_dict(self.batches[-1].id if self.batches else -1)
        self.kept = Kept(msgspec.msgpack.encode(state), len(self.batches), dict(self.told))

    async def restart(self, kept: Kept) -> None:
        """The process ends, and another one goes on from the checkpoint."""
        self.restarts += 1
        self.seen["restarts"] += 1
        self.seen["forgotten batches"] += len(self.batches) - kept.trained
        await self.closed()
        del self.batches[kept.trained :]
        self.told = dict(kept.told)
        self.begin()
        await self.run.load_state_dict(msgspec.msgpack.decode(kept.state), "weights")
        self.seen["tokens over a restart"] += self.run.ledger()["tokens"].held

    async def step(self) -> None:
        """A batch that is trained, unless the process ends before."""
        luck = self.luck
        while True:
            waiter = asyncio.ensure_future(self.run.next_batch())
            if self.restarts < RESTARTS and luck.random() < 0.5:
                await asyncio.wait([waiter], timeout=luck.uniform(0.0, 25.0))
                if self.kept is None or luck.random() < 0.7:
                    self.keep()
                if self.kept is not None and luck.random() < 0.6:
                    waiter.cancel()
                    await asyncio.wait([waiter])
                    await self.restart(self.kept)
                    continue
            batch = await waiter
            if luck.random() < 0.2:  # it is out, and comes again after a restart
                self.keep()
            self.batches.append(batch)
            if luck.random() < 0.2:
                self.keep()
            await self.run.weight_update("weights")
            if self.restarts < RESTARTS and self.kept is not None and luck.random() < 0.1:
                await self.restart(self.kept)
                continue
            return

    async def unrest(self) -> None:
        while True:
            await asyncio.sleep(self.luck.uniform(0.5, 12.0))
            scheduler, names = self.run.scheduler, [engine.name for engine in self.run.engines]
            with contextlib.suppress(april.ConfigError, april.SchedulerClosed):  # the process may end meanwhile
                if len(names) < 4 and self.luck.random() < 0.5:
                    await scheduler.aadd_engine(self.engine())
                elif len(names) > 1:
                    await scheduler.aremove_engine(self.luck.choice(names), cut=self.luck.random() < 0.5)
                    self.seen["engines left"] += 1

    async def evaluate(self) -> None:
        """It fails by a function that raises, and by nothing else."""
        with contextlib.suppress(april.RolloutError) if self.raises else contextlib.nullcontext():
            result = await self.run.evaluate([{"token_ids": [5, 6]}] * 2, n_samples=2)
            assert result.rewards.tolist() == [[worth_of(rows_in(r)) for r in row] for row in result.responses]

    async def live(self) -> None:
        """Until every prompt is settled; the books agree then."""
        unrest = asyncio.create_task(self.unrest())
        try:
            while True:
                await asyncio.sleep(self.luck.uniform(0.0, 6.0))
                if self.luck.random() < 0.1:
                    await self.evaluate()
                try:
                    await self.step()
                except april.DataExhausted:
                    break
            self.check()
        finally:
            unrest.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await unrest
            await self.closed()

    # ---------------------------------------------------------------- the oracle

    def check(self) -> None:
        """Every prompt once, every token accounted for; in the history that is kept, each is delivered once."""
        self.run.validate()
        trained = Counter(i for b in self.batches for _, i in {(s.id, s.prompt.data["i"]) for s in b.samples})
        assert trained == Counter(dict.fromkeys(range(PROMPTS), self.samples))
        rows = [row for batch in self.batches for row in batch.samples]
        assert len({(row.id, row.chain) for row in rows}) == len(rows)
        tokens = self.run.ledger()["tokens"]
        assert tokens.held == 0
        assert tokens.observed == tokens.delivered + sum(tokens.dropped.values())
        generated = sum(s.count for row in rows for s in row.segments if s.kind is SegmentKind.GENERATED)
        assert tokens.delivered == generated
        for batch in self.batches:
            self.check_batch(batch)
        assert not any(engine.violations for engine in self.engines)
        self.seen["samples of two lives"] += len(
            {row.id for row in rows if len({s.version.incarnation for s in row.segments}) > 1}
        )

    def check_batch(self, batch: Batch) -> None:
        """Rows are what the functions have asked and heard, and have the reward of all of them; each token was made by
        the attempt, and under the weights, that its segment names, and has the extras of it.
        """
        made: defaultdict[str, list[Any]] = defaultdict(list)
        for engine in self.engines:
            for attempt_id, record in engine.attempts.items():
                versions = map(tuple, record.versions.tolist())
                made[attempt_id] += zip(record.tokens.tolist(), record.logprobs.tolist(), versions, strict=True)
        used: Counter[str] = Counter()
        for sample in batch.samples:
            assert sample.staleness <= self.config.max_staleness
            versions = map(tuple, sample.versions.tolist())
            told = list(zip(sample.tokens.tolist(), sample.logprobs.tolist(), versions, strict=True))
            for s in sample.segments:
                if s.kind is SegmentKind.GENERATED:
                    first, used[s.attempt_id] = used[s.attempt_id], used[s.attempt_id] + s.count
                    part = told[s.start : s.start + s.count]
                    assert made[s.attempt_id][first : first + s.count] == part, (sample.id, s)
                    assert {version for *_, version in part} == {s.version}
            assert sample.extras.keys() == set(self.config.extras)
            for name, extras in sample.extras.items():
                assert np.array_equal(extras, made_again(sample, name)), sample.id
        for key in {s.id for s in batch.samples}:
            rows = sorted(row(s) for s in batch.samples if s.id == key)
            assert rows == self.told[key], key
            assert {s.reward for s in batch.samples if s.id == key} == {worth_of(rows)}


@pytest.mark.parametrize("seed", seeds(LIVES))
def test_what_an_agent_heard_is_trained_once_whenever_its_scheduler_is_killed(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows are what the kept history's functions asked and heard; tokens are those of the engines, each once."""
    monkeypatch.setattr(RolloutScheduler, "_gateway_type", MemoryDoors)  # agents ask at doors of this process

    async def program() -> Counter[str]:
        life = Life(seed, tmp_path)
        await life.live()
        return life.seen

    seen = run_virtual(program())
    assert seen["rows"]
    assert "april stops" not in caplog.text
