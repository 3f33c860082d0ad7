"""Executes the commands of the scheduling core: calls the engines and the user's functions in this process.

The results go back to the core as events; ``april.core.commands`` names the events that follow each command.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextvars import copy_context
from typing import Any

from april.core import commands as do
from april.core import events as ev
from april.core.rollout_core import RolloutCore
from april.core.settings import EngineLimits
from april.driver.attempt_streams import AttemptStreams
from april.driver.engine_control import EngineControl
from april.driver.llm import as_coroutine
from april.driver.loop_throttle import LoopThrottle
from april.driver.sample_functions import RolloutSettings, SampleFunctions, UserFunctions
from april.driver.user_calls import Timeouts, UserCalls, WorkerThreads
from april.engines.protocol import AbortMeans, Engine, FirstWeights, SharesModel, TellsUnused

log = logging.getLogger("april")

CLOSE_PATIENCE_S = 10.0
"""Maximum seconds that closing waits for cancelled functions and streams."""


class CommandExecutor:
    """Runs the engines and user functions of one scheduler; must be created and used on its event loop.

    Args:
        failed: Callback for a failed engine call, with its number and error; called before the call's event is posted.
        broke: Callback for an unexpected error of a background task.
    """

    def __init__(
        self,
        core: RolloutCore,
        engines: Sequence[Engine],
        functions: UserFunctions,
        settings: RolloutSettings,
        *,
        post: Callable[[ev.Event], None],
        failed: Callable[[int, BaseException], None],
        broke: Callable[[BaseException], None],
    ) -> None:
        self.engines: dict[str, Engine] = {}
        self._post = post
        for engine in engines:
            self.add_engine(engine)
        self._core = core
        self._broke = broke
        self._tasks: set[asyncio.Task[None]] = set()
        self._context = copy_context()
        self.worker_threads = WorkerThreads()
        self.functions = functions
        self.rollout = as_coroutine(functions.rollout, self.worker_threads)
        throttle = LoopThrottle()
        self._user_calls = UserCalls(
            Timeouts(settings.function_timeout_s, settings.warn_after_s), self.worker_threads, self.spawn, throttle
        )
        self.samples = samples = SampleFunctions(core, functions, self.rollout, settings, self._user_calls, post)
        stall_timeouts = Timeouts(settings.stall_timeout_s)
        self.streams = streams = AttemptStreams(
            self.engines, core, post, self.spawn, functions.detokenizer, stall_timeouts, throttle
        )
        self.engine_control = calls = EngineControl(
            self.engines, post, self.spawn, failed, self.worker_threads, streams
        )
        self.handlers: dict[type[do.Command], Callable[[Any], None]] = {
            do.StartSample: samples.start,
            do.Submit: streams.submit,
            do.Abort: streams.abort,
            do.CallCompleted: samples.call_completed,
            do.ScoreSample: samples.score,
            do.ScoreGroup: samples.score,
            do.JudgeGroup: samples.judge_group,
            do.CancelSample: samples.cancel,
            do.Fence: streams.fence,
            do.ProbeEngine: calls.probe,
            do.PauseEngine: calls.pause,
            do.LoadEngine: calls.load,
            do.ResumeEngine: calls.resume,
        }

    def add_engine(self, engine: Engine) -> None:
        """Add an engine; its reports of unused tokens are posted as events."""
        self.engines[engine.name] = engine
        if isinstance(engine, TellsUnused):
            engine.unused = lambda count, reason: self._post(ev.TokensUnused(count, reason))

    async def wait_until_engines_idle(self) -> None:
        """Wait until no engine computes with the trainer's model, as requests may outlive their closed streams."""
        for engine in list(self.engines.values()):
            if engine.capabilities.shares_weights and isinstance(engine, SharesModel):
                await engine.quiet()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a background task, in its own copy of the context, so that samples do not share context variables."""
        task = asyncio.get_running_loop().create_task(coroutine, context=self._context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broke(error)

    async def close(self) -> None:
        """Cancel all functions and requests, and close the engines; what does not end in time is left running."""
        self.samples.close()  # first, so that llm.generate also fails in functions that swallow their cancellation
        tasks = list(self._tasks)
        plain_calls = self._user_calls.close()
        ends: list[asyncio.Future[None]] = [*tasks, *plain_calls]
        for task in tasks:
            task.cancel()
        if ends:
            _, stubborn = await asyncio.wait(ends, timeout=CLOSE_PATIENCE_S)
            if stubborn:
                names = sorted(e.get_name() if isinstance(e, asyncio.Task) else plain_calls[e] for e in stubborn)
                more = f", as are {len(names) - 1} more functions" if names[1:] else ""
                log.error("%s did not end within %g s and is left running%s", names[0], CLOSE_PATIENCE_S, more)
        self.worker_threads.close()
        self.samples.clear()
        self.streams.clear()
        await self.engine_control.close(self._core.settings.abort_deadline_s)


def limits_of(engine: Engine) -> EngineLimits:
    """Convert the engine's capabilities to the EngineLimits that the core works with."""
    c = engine.capabilities
    return EngineLimits(
        engine.name, c.max_context, c.max_in_flight, c.eos_token_ids, c.logprob_kind.value, c.vocab_size,
        unverified=not c.verifies_weights, first_unverified=c.first_weights is FirstWeights.UNVERIFIED,
        written=c.first_weights is FirstWeights.OTHERS, remote=c.remote,
        own_weights=c.own_weights, in_flight_updates=c.in_flight_updates, streams=c.streams,
        stop_strings=c.stop_strings, attachments=c.attachments, extras=c.extras,
        cuts_single_requests=c.abort_means is not AbortMeans.PAUSE,
    )  # fmt: skip
