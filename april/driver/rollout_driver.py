"""The driver: executes the core's commands on an event loop and turns what happens into events.

It decides nothing. It runs unchanged on a real loop and on a virtual clock. All methods must be called on
the loop that runs it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from april.core import commands as do
from april.core import events as ev
from april.core.batch import Batch
from april.core.sampling import SamplingParams
from april.core.settings import CoreSettings, EngineLimits
from april.core.state import RolloutCore
from april.core.tape import Int32
from april.core.types import Attempt, Sample, SampleId
from april.core.versions import PolicyVersion
from april.driver.busy_time import BusyTime
from april.driver.llm import LLM, Completion, RolloutFunction, completion_of
from april.driver.prompt_source import PromptSource
from april.driver.rewards import call_user, checked_reward, checked_rewards, response_of
from april.driver.wire_checks import check_chunk
from april.engines.protocol import Engine, EngineFinish, Request
from april.errors import AprilError, DataExhausted, EngineError, RolloutError, SchedulerClosed, WireError

log = logging.getLogger("april")

PROBE_INTERVAL_S = 1.0
"""Between two health probes of a quarantined engine."""


@dataclass(slots=True)
class _Runner:
    """The rollout function of one sample, and what it waits for."""

    sample: Sample
    task: asyncio.Task[None] | None = None
    call: asyncio.Future[Completion] | None = None
    output: Any = None


@dataclass(slots=True)
class _Stream:
    """One attempt at an engine."""

    attempt: Attempt
    task: asyncio.Task[None] | None = None
    sent: bool = False
    aborted: bool = False


@dataclass(frozen=True, slots=True)
class UserFunctions:
    """What the user brings."""

    rollout: RolloutFunction
    reward: Callable[..., Any] | None = None
    group_reward: Callable[..., Any] | None = None


@dataclass(slots=True)
class _Waiting:
    """Futures that the outside waits on."""

    batch: asyncio.Future[Batch] | None = None
    paused: list[asyncio.Future[None]] = field(default_factory=list)


class RolloutDriver:
    """One core, its engines and the user's functions."""

    def __init__(
        self,
        settings: CoreSettings,
        sampling: SamplingParams,
        engines: Sequence[Engine],
        source: PromptSource,
        functions: UserFunctions,
        *,
        check: bool = False,
    ) -> None:
        self.engines = {e.name: e for e in engines}
        self.core = RolloutCore(settings, [limits_of(e) for e in engines], check=check)
        self.sampling = sampling
        self.functions = functions
        self._source = source
        self._runners: dict[SampleId, _Runner] = {}
        self._streams: dict[str, _Stream] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._events: deque[ev.Event] = deque()
        self._draining = False
        self._broken: BaseException | None = None
        self._waiting = _Waiting()
        self._exclusive = asyncio.Lock()
        slots = sum(e.capabilities.max_in_flight or settings.max_in_flight for e in engines)
        self._busy = BusyTime(min(settings.max_in_flight, slots))
        self._execute: dict[type, Callable[[Any], None]] = {
            do.DrawPrompts: self._draw,
            do.StartSample: self._start_sample,
            do.Submit: self._submit,
            do.Abort: self._abort,
            do.CallCompleted: self._call_completed,
            do.ScoreSample: self._score_sample,
            do.ScoreGroup: self._score_group,
            do.CancelSample: self._cancel_sample,
            do.StartTimer: self._start_timer,
            do.Fence: self._fence,
            do.ProbeEngine: self._probe,
            do.Deliver: self._deliver,
            do.EndOfData: self._end_of_data,
            do.Paused: self._paused,
            do.Fail: self._fail,
        }

    # ---------------------------------------------------------------- for the scheduler

    async def next_batch(self) -> Batch:
        """The next batch. A call that was cancelled loses nothing: the next one gets its batch."""
        self._raise_if_broken()
        if self._waiting.batch is None:
            loop = asyncio.get_running_loop()
            self._waiting.batch = loop.create_future()
            self._busy.step_started(loop.time())
            self.post(ev.StepRequested())
        future = self._waiting.batch
        try:
            return await asyncio.shield(future)
        finally:
            if future.done() and self._waiting.batch is future:
                self._waiting.batch = None

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Nothing generates for training inside; one holder at a time."""
        async with self._exclusive:
            self._raise_if_broken()
            future = asyncio.get_running_loop().create_future()
            self._waiting.paused.append(future)
            self.post(ev.PauseRequested())
            try:
                await future
                yield
            finally:
                self.post(ev.Resumed())

    @asynccontextmanager
    async def writing_weights(self) -> AsyncIterator[PolicyVersion]:
        """The engines are idle inside, and have the yielded version afterwards (unless the body raises)."""
        async with self.paused():
            current = self.core.clock.current
            version = PolicyVersion(current.incarnation, current.n + 1)
            await asyncio.gather(*(e.pause() for e in self.engines.values()))
            try:
                yield version
                for batch_id in list(self.core.leased):
                    self.post(ev.BatchCommitted(batch_id))
                self.post(ev.WeightsUpdated(version))
            finally:
                await asyncio.gather(*(e.resume() for e in self.engines.values()))

    async def close(self) -> None:
        """End everything; what was generated stays in the core's books."""
        self._broken = self._broken or SchedulerClosed("the scheduler is closed")
        tasks = [r.task for r in self._runners.values()] + [s.task for s in self._streams.values()]
        tasks += list(self._background)
        live = [t for t in tasks if t is not None and not t.done()]
        for task in live:
            task.cancel()
        await asyncio.gather(*live, return_exceptions=True)
        self._runners.clear()
        self._streams.clear()
        self._fail_waiting(self._broken)
        await asyncio.gather(*(e.close() for e in self.engines.values()))

    def post(self, event: ev.Event) -> None:
        """Give one event to the core and do what it says."""
        if self._broken is not None:
            return
        self._events.append(event)
        if self._draining:
            return
        self._draining = True
        try:
            while self._events:
                for command in self.core.handle(self._events.popleft()):
                    self._execute[type(command)](command)
        except AprilError as error:
            # the books do not balance: nothing that follows could be trusted
            log.exception("april stops")
            self._broken = error
            self._fail_waiting(error)
        finally:
            self._draining = False

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run in the background until done or closed."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # ---------------------------------------------------------------- prompts and samples

    def _draw(self, command: do.DrawPrompts) -> None:
        self.post(ev.PromptsDrawn(*self._source.draw(command.count)))

    def _start_sample(self, command: do.StartSample) -> None:
        runner = _Runner(command.sample)
        self._runners[command.sample.id] = runner
        runner.task = asyncio.get_running_loop().create_task(self._run_sample(runner))

    async def _run_sample(self, runner: _Runner) -> None:
        sample = runner.sample

        async def generate(sampling: SamplingParams, token_ids: Int32 | None) -> Completion:
            runner.call = asyncio.get_running_loop().create_future()
            if self._is_current(runner):
                self.post(ev.CallMade(sample.id, sampling, token_ids))
            return await runner.call

        event: ev.Event
        try:
            runner.output = await self.functions.rollout(
                sample.group.prompt, LLM(sample.id, self.sampling, generate)
            )
            event = ev.SampleReturned(sample.id)
        except Exception as error:
            log.warning("rollout function failed for %s", sample.id, exc_info=error)
            event = ev.SampleFailed(sample.id, f"the rollout function raised {describe(error)}")
        if self._is_current(runner):
            self.post(event)

    def _is_current(self, runner: _Runner) -> bool:
        return self._runners.get(runner.sample.id) is runner

    def _call_completed(self, command: do.CallCompleted) -> None:
        call = self._runners[command.sample.id].call
        assert call is not None
        if not call.done():
            call.set_result(completion_of(command.sample, command.start))

    def _cancel_sample(self, command: do.CancelSample) -> None:
        runner = self._runners.pop(command.sample.id, None)
        if runner is not None and runner.task is not None:
            runner.task.cancel()

    # ---------------------------------------------------------------- rewards

    def _score_sample(self, command: do.ScoreSample) -> None:
        runner = self._runners[command.sample.id]
        runner.task = asyncio.get_running_loop().create_task(self._run_reward([runner]))

    def _score_group(self, command: do.ScoreGroup) -> None:
        runners = [self._runners[s.id] for s in command.group.samples]
        task = asyncio.get_running_loop().create_task(self._run_reward(runners))
        for runner in runners:
            runner.task = task

    async def _run_reward(self, runners: list[_Runner]) -> None:
        samples = [r.sample for r in runners]
        prompt = samples[0].group.prompt
        responses = [response_of(r.sample, r.output) for r in runners]
        event: ev.Event
        try:
            if self.functions.group_reward is not None:
                values = await call_user(self.functions.group_reward, prompt, responses)
                rewards = checked_rewards(values, [s.id for s in samples])
            else:
                assert self.functions.reward is not None
                rewards = [checked_reward(await call_user(self.functions.reward, prompt, responses[0]), samples[0].id)]
            event = ev.Scored(samples[0].id.group, [(s.id.index, r) for s, r in zip(samples, rewards, strict=True)])
        except Exception as error:
            log.warning("reward failed for %s", samples[0].id, exc_info=error)
            event = ev.SampleFailed(samples[0].id, f"the reward function failed: {describe(error)}")
        if all(self._is_current(r) for r in runners):
            self.post(event)

    # ---------------------------------------------------------------- attempts

    def _submit(self, command: do.Submit) -> None:
        stream = _Stream(command.attempt)
        self._streams[command.attempt.id] = stream
        loop = asyncio.get_running_loop()
        self._busy.change(+1, loop.time())
        stream.task = loop.create_task(self._run_attempt(stream))

    async def _run_attempt(self, stream: _Stream) -> None:
        attempt = stream.attempt
        event: ev.Event
        try:
            event = ev.AttemptEnded(attempt.id, "abort" if stream.aborted else await self._read(stream))
        except _Rejected as rejected:
            event = ev.AttemptFailed(attempt.id, rejected.error, corrupt=True, rejected=rejected.tokens)
        except Exception as error:
            log.warning("attempt %s of %s broke off", attempt.id, attempt.sample.id, exc_info=error)
            event = ev.AttemptFailed(attempt.id, f"engine {attempt.engine}: {describe(error)}")
        if self._streams.pop(attempt.id, None) is stream:
            self._busy.change(-1, asyncio.get_running_loop().time())
            self.post(event)

    async def _read(self, stream: _Stream) -> str:
        """Append the stream's chunks to the attempt's tape; returns why it ended."""
        attempt = stream.attempt
        engine = self.engines[attempt.engine]
        vocab_size, budget = engine.capabilities.vocab_size, attempt.sampling.max_tokens
        request = Request(
            attempt.id,
            attempt.token_ids,
            attempt.sampling,
            priority=0 if attempt.urgent else 1,
            sample_key=attempt.sample.id,
            response_offset=len(attempt.sample.tape),
        )
        stream.sent = True
        finish: EngineFinish | None = None
        async with aclosing(engine.generate(request)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                try:
                    check_chunk(chunk, vocab_size, budget - attempt.tape.count)
                except WireError as error:
                    raise _Rejected(f"engine {attempt.engine}: {error}", len(chunk.tokens)) from None
                attempt.tape.append(chunk.tokens, chunk.logprobs, chunk.version)
                finish = chunk.finish
        if finish is None:
            raise EngineError("the stream ended without a finish reason")
        if finish is EngineFinish.STOP and attempt.tape.count == 0:
            raise EngineError("the engine reports a stop token and sent no token")
        return str(finish)

    def _abort(self, command: do.Abort) -> None:
        sent = False
        for attempt_id in command.attempt_ids:
            stream = self._streams.get(attempt_id)
            if stream is not None:
                stream.aborted = True
                sent |= stream.sent
        if sent:
            ids = None if command.everything else command.attempt_ids
            self.spawn(self._ask_abort(self.engines[command.engine], ids))

    async def _ask_abort(self, engine: Engine, attempt_ids: tuple[str, ...] | None) -> None:
        try:
            await engine.abort(attempt_ids)
        except Exception as error:
            # the core asks again until every attempt has ended
            log.warning("abort on engine %s failed: %s", engine.name, describe(error))

    def _fence(self, command: do.Fence) -> None:
        for attempt_id in command.attempt_ids:
            stream = self._streams.pop(attempt_id, None)
            if stream is not None and stream.task is not None:
                self._busy.change(-1, asyncio.get_running_loop().time())
                stream.task.cancel()

    def _start_timer(self, command: do.StartTimer) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(command.seconds, lambda: self.post(ev.TimerFired(command.timer)))

    def _probe(self, command: do.ProbeEngine) -> None:
        self.spawn(self._probe_until_well(command.engine))

    async def _probe_until_well(self, name: str) -> None:
        log.warning("engine %s is quarantined until a probe finds it well", name)
        while True:
            await asyncio.sleep(PROBE_INTERVAL_S)
            health = await self.engines[name].health()
            if health.ok:
                self.post(ev.EngineReady(name))
                return

    # ---------------------------------------------------------------- results

    def _deliver(self, command: do.Deliver) -> None:
        batch = command.batch
        for sample in batch.samples:
            self._runners.pop(sample.id, None)
        times = self._busy.step_ended(asyncio.get_running_loop().time())
        batch = Batch(batch.id, batch.version, batch.samples, batch.group_sizes, {**batch.metrics, **times})
        self.core.leased[batch.id] = batch
        if self._waiting.batch is not None:
            self._waiting.batch.set_result(batch)

    def _end_of_data(self, command: do.EndOfData) -> None:
        self._fail_batch(DataExhausted("the prompt source has ended and every prompt is settled"))

    def _fail(self, command: do.Fail) -> None:
        self._fail_batch(RolloutError(command.error))

    def _paused(self, command: do.Paused) -> None:
        waiting, self._waiting.paused = self._waiting.paused, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def _fail_batch(self, error: BaseException) -> None:
        future = self._waiting.batch
        if future is not None and not future.done():
            future.set_exception(error)
            future.exception()  # a waiter may have gone; its error is not asyncio's business

    def _fail_waiting(self, error: BaseException) -> None:
        self._fail_batch(error)
        for future in self._waiting.paused:
            if not future.done():
                future.set_exception(error)

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise SchedulerClosed(f"the scheduler has stopped: {self._broken}") from self._broken


class _Rejected(Exception):
    """A chunk that cannot be true, with the tokens it had."""

    def __init__(self, error: str, tokens: int) -> None:
        super().__init__(error)
        self.error = error
        self.tokens = tokens


def limits_of(engine: Engine) -> EngineLimits:
    """What the core must know of an engine."""
    c = engine.capabilities
    return EngineLimits(engine.name, c.max_context, c.max_in_flight, c.eos_token_ids)


def describe(error: BaseException) -> str:
    """Type and message of an error, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
