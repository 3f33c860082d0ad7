"""The engines and functions of this process, and whatever runs with them: what carries out the core's commands.

Each command is answered with the events that ``april.core.commands`` names, in whatever order they come about.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextvars import copy_context
from typing import Any, Protocol

from april.config.settings import Config
from april.core import commands as do
from april.core import events as ev
from april.core.sampling import SamplingParams
from april.core.settings import EngineLimits
from april.core.state import RolloutCore
from april.core.types import Group, SampleId
from april.driver.attempt_streams import AttemptStreams
from april.driver.engine_control import EngineControl
from april.driver.host_view import HostView
from april.driver.llm import as_coroutine
from april.driver.sample_functions import RolloutSettings, SampleFunctions, UserFunctions
from april.driver.user_calls import TimeLimits, UserCalls, WorkerThreads
from april.engines.protocol import Capabilities, Engine, SharesModel

log = logging.getLogger("april")

CLOSE_PATIENCE_S = 10.0
"""The longest wait of the end for cancelled functions and streams."""


class LocalHost:
    """The engines and functions of this process; made and used on the loop that runs them.

    Args:
        view: what it knows of the core.
        post: takes the events.
        failed: told what a call of an engine has raised, by the call's number, before its event is posted.
        broke: told of an error that nobody expected.
        prefix: what stands before the names of its engines in the core.
    """

    def __init__(
        self,
        view: HostView,
        engines: Sequence[Engine],
        functions: UserFunctions,
        settings: RolloutSettings,
        *,
        post: Callable[[ev.Event], None],
        failed: Callable[[int, BaseException], None],
        broke: Callable[[BaseException], None],
        prefix: str = "",
    ) -> None:
        self.engines = {prefix + e.name: e for e in engines}
        self._sharing = [e for e in engines if e.capabilities.shares_weights and isinstance(e, SharesModel)]
        self._view = view
        self._broke = broke
        self._tasks: set[asyncio.Task[None]] = set()
        self._context = copy_context()
        self.worker_threads = WorkerThreads()
        self.functions = functions
        self.rollout = as_coroutine(functions.rollout, self.worker_threads)
        self._user_calls = UserCalls(
            TimeLimits(settings.function_timeout_s, settings.warn_after_s), self.worker_threads, self._spawn
        )
        self.samples = samples = SampleFunctions(view, functions, self.rollout, settings, self._user_calls, post)
        self.streams = streams = AttemptStreams(
            self.engines, view, post, self._spawn, functions.detokenizer, settings.stall_timeout_s
        )
        self.engine_control = calls = EngineControl(
            self.engines, post, self._spawn, failed, self.worker_threads, streams.silent
        )
        self.executors: dict[type[do.Command], Callable[[Any], None]] = {
            do.StartSample: samples.start,
            do.Submit: streams.submit,
            do.Abort: streams.abort,
            do.CallCompleted: samples.call_completed,
            do.ScoreSample: samples.score_sample,
            do.ScoreGroup: samples.score_group,
            do.JudgeGroup: samples.judge_group,
            do.CancelSample: samples.cancel,
            do.Fence: streams.fence,
            do.ProbeEngine: calls.probe,
            do.PauseEngine: calls.pause,
            do.LoadEngine: calls.load,
            do.ResumeEngine: calls.resume,
        }

    @property
    def plain_rollout(self) -> bool:
        """True if the rollout function runs in a thread of its own, one per sample."""
        return self.rollout is not self.functions.rollout

    async def quiet(self) -> None:
        """Until no engine here computes on the trainer's model any more: a request that was fenced may still do so."""
        for engine in self._sharing:
            await engine.quiet()

    # ---------------------------------------------------------------- what runs in the background

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run until done or ended, in a context that no other sample's function has touched."""
        task = asyncio.get_running_loop().create_task(coroutine, context=self._context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broke(error)

    async def end(self) -> None:
        """End all that runs. Functions and requests that do not end in time are left behind; the engines stay."""
        self.samples.shut_doors()  # who waits for an answer there would not end
        tasks = list(self._tasks)
        plain = self._user_calls.close()
        ends: list[asyncio.Future[None]] = [*tasks, *plain]
        for task in tasks:
            task.cancel()
        if ends:
            _, stubborn = await asyncio.wait(ends, timeout=CLOSE_PATIENCE_S)
            if stubborn:
                names = sorted(e.get_name() if isinstance(e, asyncio.Task) else plain[e] for e in stubborn)
                more = f", and so are {len(names) - 1} more" if names[1:] else ""
                log.error("%s did not end within %g s and is left behind%s", names[0], CLOSE_PATIENCE_S, more)
        self.worker_threads.close()
        self.samples.clear()
        self.streams.clear()

    async def close(self) -> None:
        """End all that runs, and close the engines."""
        await self.end()
        await self.engine_control.close(self._view.abort_deadline_s)


def limits_of(engine: Engine) -> EngineLimits:
    """Return what the core must know of an engine."""
    return limits_from(engine.name, engine.capabilities)


def limits_from(name: str, c: Capabilities) -> EngineLimits:
    """Return what the core must know of an engine that may be elsewhere."""
    return EngineLimits(
        name, c.max_context, c.max_in_flight, c.eos_token_ids, c.logprob_kind.value, c.vocab_size,
        unverified=not c.verifies_weights, remote=c.remote,
        own_weights=c.own_weights, in_flight_updates=c.in_flight_updates, attachments=c.attachments, extras=c.extras,
    )  # fmt: skip


class OtherHosts(Protocol):
    """All of them, those that come later included."""

    @property
    def first_engines(self) -> Sequence[EngineLimits]:
        """With which a core begins."""

    @property
    def servers(self) -> list[str]:
        """Engines that do not read the trainer's own model."""

    def attach(
        self,
        core: RolloutCore,
        local: LocalHost,
        post: Callable[[ev.Event], None],
        failed: Callable[[int, BaseException], None],
    ) -> Mapping[type[do.Command], Callable[[Any], None]]:
        """Take the core to which they belong from now on; return what carries out commands, there or in the ``local``
        host.

        ``post`` and ``failed`` are those of the local one.
        """

    def delivered(self, samples: Iterable[SampleId]) -> None:
        """Note that these samples are in a batch."""

    def settled(self, group: Group) -> None:
        """Nothing is left to do for it."""

    def evaluated(self, evaluation: int) -> None:
        """An evaluation is over."""

    async def quiet(self) -> None:
        """Until none of their engines computes on the trainer's model any more."""

    async def catch_up(self) -> None:
        """Until the tapes have what running requests had brought when this was called."""

    async def probed(self) -> None:
        """Until each of their engines that was asked how it is has answered."""

    async def close(self) -> None:
        """Tell them that it is over."""

    async def first(self) -> None:
        """Wait until one has brought engines; raises ConfigError if none does in time."""


class Hosts(Protocol):
    """A place where processes with engines and functions of their own come in, such as :class:`april.HostListener`."""

    def begin(
        self, config: Config, *, tokenizer: bool, sampling: SamplingParams | None = None,
        attachments: Sequence[str] = (),
    ) -> OtherHosts:  # fmt: skip
        """The hosts of a scheduler with this configuration, which may have a tokenizer; called once, on its loop.

        ``sampling`` of its calls, if it is not that of the configuration; ``attachments``: kinds that its prompts may
        have. Raises ConfigError if it is another scheduler's.
        """
