"""The driver on virtual time: what is delivered, when, and what survives pauses, cancellation and weight updates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from virtual_rollouts import RecordingEngine, Rollouts, now, on_virtual_time, table

from april.core import events as ev
from april.core.types import CallState, DropReason, Prompt, Refill, SampleId
from april.core.versions import PolicyVersion
from april.driver.rewards import Response
from april.engines.protocol import Chunk, EngineFinish, Health, Request
from april.engines.simulated.response_lengths import LognormalLengths
from april.errors import RolloutError, SchedulerClosed

pytestmark = on_virtual_time

LENGTHS = LognormalLengths(30, 0.6, 0.6, seed=3)


# ---------------------------------------------------------------- what is delivered


@pytest.mark.parametrize("refill", list(Refill))
@pytest.mark.parametrize("interval", [None, 4.0])
async def test_batches_hold_exactly_what_the_engines_made(refill: Refill, interval: float | None) -> None:
    """Over many steps, cut and resumed on two engines, every sample is its uncut sequence with exact provenance."""
    engines = [RecordingEngine(LENGTHS.sample, f"e{i}", stream_interval_s=interval) for i in range(2)]
    rollouts = Rollouts(LENGTHS.sample, n=3, samples=4, over=5, engines=engines, refill=refill, max_response_len=120)
    batches = [await rollouts.step() for _ in range(8)]

    assert [b.version for b in batches] == [PolicyVersion(0, i) for i in range(8)]
    assert [b.id for b in batches] == list(range(8))
    samples = [s for b in batches for s in b.samples]
    assert len(samples) == len({s.id for s in samples}) == 8 * 12
    resumed = [s for s in samples if s.attempts > 1]
    assert len(resumed) > 10
    assert any(len({g.engine for g in s.segments}) == 2 for s in resumed)
    assert max(s.staleness for s in samples) >= 2
    for batch in batches:
        old = sum(int((s.versions[:, 1] < batch.version.n).sum()) for s in batch.samples)
        assert batch.off_policy_share == old / sum(len(s.tokens) for s in batch.samples)
        assert batch.metrics["staleness_max"] == max(s.staleness for s in batch.samples)
        assert 0 <= batch.metrics["bubble"] <= 1
        assert [s.reward for s in batch.samples] == [float(s.tokens[0] + len(s.tokens) / 1024) for s in batch.samples]


async def test_versions_over_weight_updates() -> None:
    """Tokens carry the version of the weights that made them; a resumed request sends the prompt and all tokens so far,
    with the budget that is left and another seed."""
    rollouts = Rollouts(table({(0, 0): 25}, 10), n=1, over=2, max_response_len=40)  # group 0 takes three steps
    await rollouts.step()
    await rollouts.step()
    batch = await rollouts.step()

    (sample,) = batch.samples
    assert sample.id == (0, 0)
    assert [(s.version.n, s.count) for s in sample.segments] == [(0, 10), (1, 10), (2, 5)]
    assert sample.versions.tolist() == [[0, 0]] * 10 + [[0, 1]] * 10 + [[0, 2]] * 5
    assert sample.staleness == 2
    assert batch.off_policy_share == 20 / 25
    assert rollouts.engines[0].engine._version == PolicyVersion(0, 3)
    first, second, third = (r for r in rollouts.engines[0].requests.values() if r.sample_key == (0, 0))
    assert [len(r.token_ids) - 3 for r in (first, second, third)] == [0, 10, 20]
    assert [r.response_offset for r in (first, second, third)] == [0, 10, 20]
    assert third.token_ids[: len(second.token_ids)].tolist() == second.token_ids.tolist()
    assert [r.sampling.max_tokens for r in (first, second, third)] == [40, 30, 20]
    assert len({r.sampling.seed for r in (first, second, third)}) == 3


# ---------------------------------------------------------------- rewards beside generation


@pytest.mark.parametrize("which", ["reward", "filter"])
async def test_slow_functions_overlap_generation(which: str) -> None:
    """While a reward or a verdict is awaited, others generate; a step does not wait for one that it can do without."""

    async def think(place: str, sample_id: SampleId) -> None:
        await asyncio.sleep({0: 20.0, 1: 500.0}.get(sample_id.group, 0.0) if place == which else 0.0)

    async def reward(prompt: Prompt, response: Response) -> float:
        await think("reward", response.sample_id)
        return 1.0

    async def judge(prompt: Prompt, responses: list[Response]) -> bool:
        await think("filter", responses[0].sample_id)
        return True

    rollouts = Rollouts(table({(0, 0): 5, (1, 0): 3, (2, 0): 90}), n=1, over=3, reward=reward, filter=judge)
    batch = await rollouts.step()
    assert now() == pytest.approx(5 + 20, abs=1e-6)
    assert batch.samples[0].id == (0, 0)
    # the straggler went on during the 20 s, and was stopped at once when they were over
    assert len(rollouts.sample(2, 0).chains[0].tape) == 25
    assert rollouts.core.monitor.ready == 0

    await asyncio.sleep(1000)  # the trainer trains; what group 1 waits for arrives meanwhile
    assert rollouts.core.monitor.ready == 1
    batch = await rollouts.step()
    assert now() == pytest.approx(1025, abs=1e-6)  # surplus: delivered without waiting
    assert batch.samples[0].id == (1, 0)


async def test_group_rewards_are_one_call_per_group() -> None:
    """group_reward gets the n responses in order, once, when the last has returned."""
    calls: list[tuple[float, int, list[int]]] = []

    async def group_reward(prompt: Prompt, responses: list[Response]) -> list[float]:
        calls.append((now(), responses[0].sample_id.group, [len(r.tokens) for r in responses]))
        await asyncio.sleep(2)
        return [r.sample_id.group * 10.0 + r.sample_id.index for r in responses]

    lengths = {(0, 0): 4, (0, 1): 9, (0, 2): 6, (1, 0): 30}
    rollouts = Rollouts(table(lengths), n=2, samples=3, group_reward=group_reward)
    batch = await rollouts.step()
    assert [(round(t, 6), g, n) for t, g, n in calls] == [(9, 0, [4, 9, 6]), (30, 1, [30, 5, 5])]
    assert batch.rewards.tolist() == [0.0, 1.0, 2.0, 10.0, 11.0, 12.0]


async def test_an_error_that_nobody_expected_reaches_the_trainer(caplog: pytest.LogCaptureFixture) -> None:
    """A mistake in april itself must not leave the trainer waiting for ever: it is told, with the cause."""

    rollouts = Rollouts(table({}), n=1)

    def explode(command: Any) -> None:
        raise ZeroDivisionError("a bug")

    pump = rollouts.driver._pump
    pump._executors = dict.fromkeys(pump._executors, explode)
    with pytest.raises(SchedulerClosed, match="ZeroDivisionError: a bug") as caught:
        await rollouts.driver.next_batch()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    await rollouts.close()
    assert "april stops" in caplog.text


# ----------------------------------------------------------------
# Engines that lie, break off, hang or ignore aborts: tokens that were seen are kept, nothing wrong is delivered.


class BreaksOff(RecordingEngine):
    """Streams token by token and raises after ``after`` tokens, the first ``times`` attempts; None: it simply ends."""

    error: type[BaseException] | None = ConnectionError

    def __init__(self, *args: Any, after: int, times: int, **options: Any) -> None:
        super().__init__(*args, stream_interval_s=1.0, **options)
        self.after, self.times = after, times

    def over(self, request: Request) -> bool:
        over = self.times > 0 and sum(len(c.tokens) for c in self.yielded[request.attempt_id]) >= self.after
        self.times -= over
        return over

    def alter_chunk(self, request: Request, chunk: Chunk) -> Chunk:
        if self.error is not None and self.over(request):
            raise self.error("connection reset")
        return chunk

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        async for chunk in super().generate(request):
            yield chunk
            if self.error is None and self.over(request):
                return


@pytest.mark.parametrize("error", [ConnectionError, asyncio.CancelledError, None])
async def test_a_stream_that_breaks_off_is_resumed_elsewhere(error: type[BaseException] | None) -> None:
    """Tokens before the break are kept and continued, not generated again; a cancellation inside the engine is a break,
    and so is a stream that simply stops, without saying why."""
    lengths = table({}, 20)
    engines = [BreaksOff(lengths, "bad", after=4, times=1), RecordingEngine(lengths, "good")]
    engines[0].error = error  # type: ignore[attr-defined]
    rollouts = Rollouts(lengths, n=1, engines=engines)
    batch = await rollouts.step()
    (sample,) = batch.samples
    assert sample.attempts == 2
    assert sample.segments[0].count >= 4
    assert sum(s.count for s in sample.segments) == 20 == sum(e.tokens for e in engines)
    assert batch.metrics["failed_attempts"] == 1
    assert not rollouts.dropped


async def test_an_engine_that_always_fails_is_quarantined_and_the_sample_named() -> None:
    """Three failures in a row close the engine; a sample that gets no token from it is dropped with its story."""
    lengths = table({}, 20)
    engine = BreaksOff(lengths, after=0, times=10_000)
    rollouts = Rollouts(lengths, n=1, engines=[engine])
    with pytest.raises(RolloutError, match=r"8 groups failed in a row.*g7\.s0.*engine e0: ConnectionError"):
        await rollouts.driver.next_batch()
    rollouts.check_ledger()
    assert rollouts.core.prompts.dropped == {DropReason.FAILED: 8}
    assert "group dropped (failed)" in rollouts.core.story((0, 0))  # type: ignore[arg-type]
    engine.times = 0
    await rollouts.step()


# ---------------------------------------------------------------- numbers that cannot be true


def nan_logprob(chunk: Chunk) -> Chunk:
    return replace(chunk, logprobs=np.where(np.arange(len(chunk.logprobs)) == 1, np.nan, chunk.logprobs).astype("f4"))


WRONG: dict[str, tuple[Callable[[Chunk], Chunk], str]] = {
    "nan": (nan_logprob, "log-probability nan"),
    "too many": (
        lambda c: replace(c, tokens=np.tile(c.tokens, 300), logprobs=np.tile(c.logprobs, 300)),
        "left of the budget",
    ),
    "future": (lambda c: replace(c, version=PolicyVersion(0, 9)), "policy version 0.9"),
    "unknown id": (lambda c: replace(c, tokens=c.tokens + 1000), " is outside the vocabulary of 1000"),
    "list": (lambda c: replace(c, tokens=c.tokens.tolist()), "flat array of int32"),
}
"""Of each kind of check one; ``test_wire_checks.py`` has all."""



@pytest.mark.parametrize("kind", list(WRONG))
async def test_wrong_numbers_are_rejected_and_never_delivered(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """The attempt's tokens are dropped as corrupt, the sample goes on from what it had, the batch is right."""
    wrong, message = WRONG[kind]

    class Liar(RecordingEngine):
        lies = 0

        def alter_chunk(self, request: Request, chunk: Chunk) -> Chunk:
            if self.lies < 2 and len(chunk.tokens) > 1 and len(request.token_ids) > 3:
                self.lies += 1
                return wrong(chunk)
            return chunk

    lengths = table({(0, 0): 30}, 8)
    engine = Liar(lengths)
    rollouts = Rollouts(lengths, n=1, over=2, engines=[engine], max_response_len=1000)
    await rollouts.step()  # group 0 has 8 good tokens now
    held = len(rollouts.sample(0, 0).chains[0].tape)
    assert held == 8
    delivered: list[Any] = []
    while not any(s.id == (0, 0) for s in delivered):
        delivered += (await rollouts.step()).samples
    assert engine.lies == 2
    lied = [len(c.tokens) for r, cs in engine.yielded.items() for c in cs if engine.requests[r].response_offset]
    assert rollouts.dropped == {DropReason.CORRUPT: lied[0] + lied[1]}
    sample = delivered[-1]
    assert sample.segments[0].count == 8
    assert message in rollouts.core.story(sample.id)
    await rollouts.close()
    assert message in caplog.text


async def test_versions_that_go_back_are_rejected() -> None:
    """No token is older than the weights that its engine had confirmed, in new samples either; they are corrupt."""

    class Old(RecordingEngine):
        def alter_chunk(self, request: Request, chunk: Chunk) -> Chunk:
            if not self.old:
                return chunk
            self.said += len(chunk.tokens)
            return replace(chunk, version=PolicyVersion(0, 0))

        old, said = False, 0

    lengths = table({(0, 0): 30}, 8)
    engine = Old(lengths)
    rollouts = Rollouts(lengths, n=1, over=2, engines=[engine])
    await rollouts.step()
    await rollouts.step()
    engine.old = True
    waiter = asyncio.create_task(rollouts.driver.next_batch())
    await asyncio.sleep(15)
    engine.old = False
    rollouts.check(await waiter)
    assert rollouts.dropped == {DropReason.CORRUPT: engine.said}
    assert engine.said > 8  # both samples'


async def test_an_unasked_abort_keeps_its_tokens() -> None:
    """Somebody else aborts at the engine: the sample is a partial and goes on at once."""
    rollouts = Rollouts(table({}, 20), n=1)
    waiter = asyncio.create_task(rollouts.driver.next_batch())
    await asyncio.sleep(7.5)
    await rollouts.engines[0].engine.abort()
    batch = await waiter
    rollouts.check(batch)
    assert [s.count for s in batch.samples[0].segments] == [7, 13]
    assert batch.metrics["failed_attempts"] == 0


# ---------------------------------------------------------------- aborts


class IgnoresAborts(RecordingEngine):
    """Does nothing for the first ``ignored`` aborts; sick probes raise, and are sick ``sick`` times."""

    def __init__(self, *args: Any, ignored: int, sick: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)
        self.ignored, self.sick = ignored, sick
        self.probes: list[float] = []

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        if len(self.aborts) >= self.ignored:
            await super().abort(attempt_ids)
        else:
            self.aborts.append((now(), None if attempt_ids is None else tuple(attempt_ids)))

    async def health(self) -> Health:
        self.probes.append(now())
        if len(self.probes) <= self.sick:
            if len(self.probes) % 2:
                raise TimeoutError("no answer")
            return Health(ok=False)
        return await super().health()


async def test_an_abort_is_asked_again_until_the_attempt_ends() -> None:
    """An acknowledged abort that did nothing is sent again every abort_resend_s; nothing is lost, nobody fenced."""
    lengths = table({(1, 0): 400})
    engine = IgnoresAborts(lengths, ignored=3)
    rollouts = Rollouts(lengths, n=1, over=2, engines=[engine], abort_resend_s=2.0, abort_deadline_s=20.0)
    batch = await rollouts.step()
    assert [round(t, 3) for t, _ in engine.aborts] == [5, 7, 9, 11]
    assert now() == pytest.approx(11, abs=0.01)
    assert len(rollouts.sample(1, 0).chains[0].tape) == 11
    assert batch.metrics["fenced_attempts"] == 0


async def test_an_abort_that_is_never_obeyed_is_fenced() -> None:
    """After abort_deadline_s: tokens seen are kept; the engine rests until a probe finds it well, then works again."""
    lengths = table({(1, 0): 400})
    engine = IgnoresAborts(lengths, ignored=10**6, sick=4, stream_interval_s=3.0)
    rollouts = Rollouts(lengths, n=1, over=2, engines=[engine], abort_resend_s=1.0, abort_deadline_s=10.0)
    batch = await rollouts.step()
    assert now() == pytest.approx(5 + 10, abs=0.01)
    assert len(engine.aborts) == 10
    assert batch.metrics["fenced_attempts"] == 1
    # streamed every 3 s: what came until the fence is kept and counted
    assert len(rollouts.sample(1, 0).chains[0].tape) == engine.tokens_of((1, 0))[0] > 10
    assert rollouts.core.engines.states["e0"].quarantined
    assert engine.open_streams == 0

    engine.ignored = 0
    batch = await rollouts.step()
    assert len(engine.probes) == 5  # raised, sick, raised, sick, well
    assert engine.probes[0] == pytest.approx(16, abs=0.01)
    assert not rollouts.core.engines.states["e0"].quarantined
    assert now() == pytest.approx(20 + 5, abs=0.1)  # group 2 begins when the engine is well
    for _ in range(3):
        await rollouts.step()


async def test_a_hanging_abort_call_and_a_hanging_probe_are_bounded() -> None:
    """engine.abort or engine.health that never returns delays the step to the deadline and no further."""

    class Hangs(RecordingEngine):
        hung = True

        async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
            await (asyncio.sleep(10**6) if self.hung else super().abort(attempt_ids))

        async def health(self) -> Health:
            hung, self.hung = self.hung, False
            await asyncio.sleep(10**6 if hung else 0)
            return await super().health()

    lengths = table({(1, 0): 400})
    rollouts = Rollouts(lengths, n=1, over=2, engines=[Hangs(lengths)], abort_deadline_s=4.0)
    await rollouts.step()
    assert now() == pytest.approx(5 + 4, abs=0.01)
    await rollouts.step()
    assert now() < 9 + 1 + 10 + 1 + 5 + 1


async def test_an_abort_of_everything_hits_nothing_that_is_sent_later() -> None:
    """A slow "abort all" is still on its way when the next step begins: its requests wait for it, none is cut."""

    class Slow(RecordingEngine):
        async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
            assert attempt_ids is None
            await super().abort(None)
            await asyncio.sleep(0.7)  # the answer is late, and so is the deed on another server of the engine
            await super().abort(None)

    lengths = table({(1, 0): 30}, 6)
    rollouts = Rollouts(lengths, n=1, over=2, engines=[Slow(lengths)])
    await rollouts.step()
    batch = await rollouts.step()
    assert batch.metrics["attempts"] == 2
    assert batch.metrics["aborted_attempts"] == 1  # the straggler at the end of this step
    assert [len(c) for c in rollouts.engines[0].yielded.values()] == [1] * 4


async def test_an_attempt_that_is_aborted_before_it_was_sent_is_never_sent() -> None:
    """A pause in the very turn of the loop in which a request was submitted: the engine never hears of it."""
    programs: list[Rollouts] = []

    async def rollout(prompt: Prompt, llm: Any) -> None:
        (rollouts,) = programs
        if llm.sample_id == (1, 0) and not rollouts.core.paused and now() == 0:
            assert len(rollouts.core.attempts) == 1  # that of group 0, whose stream has not begun
            rollouts.driver.post(ev.PauseRequested())
        await llm.generate()

    rollouts = Rollouts(table({}, 5), n=2, rollout=rollout)
    programs.append(rollouts)
    waiter = asyncio.create_task(rollouts.driver.next_batch())
    await asyncio.sleep(50)
    engine = rollouts.engines[0]
    assert rollouts.core.paused
    assert not engine.requests
    assert not engine.aborts
    assert not rollouts.core.attempts
    rollouts.driver.post(ev.Resumed())
    batch = await waiter
    rollouts.check(batch)
    assert len(engine.requests) == 2


async def test_chunks_after_a_fence_change_nothing() -> None:
    """A stream that ignores its cancellation and goes on yielding writes into nobody's tape."""

    class Undead(RecordingEngine):
        async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
            try:
                async for chunk in super().generate(request):
                    yield chunk
            except asyncio.CancelledError:
                for _ in range(3):
                    yield Chunk(np.array([5], np.int32), np.array([-1], np.float32), PolicyVersion(0, 0))
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(3)
                yield Chunk(np.array([5], np.int32), np.array([-1], np.float32), PolicyVersion(0, 0), EngineFinish.STOP)

        async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
            return None

    lengths = table({(1, 0): 40}, 5)
    engine = Undead(lengths, stream_interval_s=2.0)
    rollouts = Rollouts(lengths, n=1, over=2, engines=[engine], abort_deadline_s=4.0)
    waiter = asyncio.create_task(rollouts.driver.next_batch())
    await asyncio.sleep(4)
    fenced = next(a for a in rollouts.core.attempts.values() if a.sample.id == (1, 0))
    await waiter
    await rollouts.driver.update_weights()
    held = rollouts.sample(1, 0).chains[0].tape.tokens.tolist()
    assert fenced.tape.count == len(held)
    await asyncio.sleep(20)
    assert fenced.tape.count == len(held)
    assert len(rollouts.driver.executor.streams) == 0
    assert rollouts.sample(1, 0).chains[0].tape.tokens.tolist() == held
    rollouts.check_ledger()
    assert rollouts.sample(1, 0).chains[0].open_call.state is CallState.QUEUED
    while any(g.id == 1 for g in rollouts.core.buffer):
        await rollouts.step()
