"""The driver: executes the core's commands on an event loop and turns what happens into events.

What to do is decided in the core. It runs unchanged on a real loop and on a virtual clock. All methods must be called
on the loop that runs it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import asynccontextmanager
from contextvars import copy_context
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import numpy as np

from april.auto.auto_run import AutoRun
from april.core import commands as do
from april.core import events as ev
from april.core import snapshot
from april.core.batch import Batch
from april.core.event_pump import EventPump, Observer, RequestLog
from april.core.run_times import Fits, RunTimes, bottleneck
from april.core.sampling import LogprobKind, SamplingParams
from april.core.sealed import State, require_sealed, seal
from april.core.settings import CoreSettings, EngineLimits
from april.core.state import RolloutCore
from april.core.types import AttemptFailure, DropReason, Prompt
from april.core.versions import PolicyVersion
from april.driver.host_view import CoreView
from april.driver.limit import StepLimit
from april.driver.local_host import LocalHost, OtherHosts, limits_of
from april.driver.long_waits import LongWaits
from april.driver.prompt_source import DrawPatience, Position, PromptSource, RestOfPrompts, warn_of_equal_rollouts
from april.driver.rewards import EvaluationResult
from april.driver.sample_functions import RolloutSettings, UserFunctions
from april.driver.user_calls import marked
from april.driver.user_code import Outcome, describe
from april.driver.weight_update import OpenUpdates, Transfer, WeightUpdate, directory_for
from april.engines.http.weight_directories import is_adapter
from april.engines.protocol import Engine
from april.errors import (
    AprilError,
    CheckpointError,
    ConfigError,
    DataExhausted,
    EngineError,
    RequestRefused,
    RolloutError,
    SchedulerClosed,
    WireError,
)
from april.record.file import RunRecord
from april.record.recorder import Recorder
from april.record.standing import Waits

log = logging.getLogger("april")

T = TypeVar("T")
EvaluationEnd = do.EvaluationDone | do.EvaluationFailed
EVALUATION_ERRORS = {
    None: RolloutError, AttemptFailure.CORRUPT: WireError, AttemptFailure.REFUSED: RequestRefused,
    AttemptFailure.NO_TEXT: RolloutError,
}  # fmt: skip
"""The error that a failed evaluation raises, by the kind of failure; EngineError for all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverOptions:
    """Observers of a driver, and how it runs apart from what it decides."""

    check: bool = False
    """True if all of the core's books are cross-checked after every event."""
    draws_beside: bool = False
    """True if slow prompts are drawn in a thread, for which a virtual clock would not wait."""
    record: RunRecord | None = None
    config: Mapping[str, Any] | None = None
    """The configuration, for the record."""
    delivered: Callable[[Batch], None] | None = None
    """Called with each batch that is delivered."""
    blocked: Callable[[], tuple[float, str]] = lambda: (0.0, "")
    """The seconds for which functions have blocked the loop since the last call, and the one that did most."""
    fits: Fits | None = None


class RolloutDriver:
    """Drives one core with its engines and the user's functions."""

    def __init__(
        self,
        settings: CoreSettings,
        rollouts: RolloutSettings,
        engines: Sequence[Engine],
        source: PromptSource,
        functions: UserFunctions,
        hosts: OtherHosts | None = None,
        options: DriverOptions = DriverOptions(),  # frozen
    ) -> None:
        first = [*map(limits_of, engines), *(() if hosts is None else hosts.first_engines)]
        self.core = RolloutCore(settings, first, check=options.check)
        self.now = asyncio.get_running_loop().time
        self._options = options
        self._times = RunTimes(self.core)
        self.requests = RequestLog(self.core, self.now)
        self.recorder = (
            None
            if options.record is None
            else Recorder(options.record, self.core, self.now, self.requests, options.config)
        )
        self._limit = StepLimit(self.requests)
        self._auto = AutoRun(self.core, self._limit.costs, self.post) if settings.auto else None
        self._settings = replace(
            rollouts, vocab_size=self.core.engines.vocab_size,
            any_temperature=all(LogprobKind(e.logprob_kind).follows_temperature for e in first),
        )  # fmt: skip
        self.sampling = rollouts.sampling
        self._source = source
        self._patience = DrawPatience()
        self._drawing = False
        self._broken: AprilError | None = None
        self._loading = False
        self._ranks_told = False
        self.handed_out: int | None = None
        """Number of the batch that the trainer was handed last. Its thread sets this, in the one step that no signal
        can interrupt, and nobody is told: whoever wants to know what the trainer has looks here."""
        self._batch: asyncio.Future[Batch] | None = None
        """The batch that was asked for and is not handed out."""
        self._pauses: list[asyncio.Future[None]] = []
        """The futures of those who wait until nothing generates."""
        self._evaluations: dict[int, asyncio.Future[EvaluationEnd]] = {}
        self._full: asyncio.Future[None] | None = None
        """Ends the wait of a trainer that cannot train meanwhile: so many batches are out now that none can come."""
        self._context = copy_context()
        self._evaluation_numbers = itertools.count()
        self._exclusive = asyncio.Lock()
        self._asking = asyncio.Lock()
        """Held until an update is asked for: they come in the order of their calls."""
        self._closing: asyncio.Task[None] | None = None
        self.updates = OpenUpdates(self.post)
        self.local = LocalHost(
            CoreView(self.core), engines, functions, self._settings,
            post=self.post, failed=self.updates.failed, broke=self._break,
        )  # fmt: skip
        # requests that are silent have a limit of their own; functions are warned of one by one, where they run
        patience_s = {
            Waits.RESPONSES: None if rollouts.stall_timeout_s else rollouts.warn_after_s,
            Waits.FUNCTIONS: None if hosts is None else rollouts.warn_after_s,
        }
        tell = (lambda _: None) if self.recorder is None else self.recorder.stand
        self.long_waits = LongWaits(self.core, self.now, rollouts.warn_after_s, patience_s, tell)
        self.hosts = hosts
        executors: Mapping[type[do.Command], Callable[[Any], None]] = self.local.executors
        if hosts is not None:
            executors = hosts.attach(self.core, self.local, self.post, self.updates.failed)
        observers: list[Observer] = [self.requests] if self.recorder is None else [self.recorder, self.requests]
        self._pump = EventPump(self.core, {
            **executors,
            do.DrawPrompts: self._draw,
            do.ReportDrop: self._report_drop,
            do.StartTimer: self._start_timer,
            do.HandOver: self.updates.transfer_now,
            do.Restore: self.updates.restore,
            do.UpdateEnded: self.updates.end,
            do.Warn: self._warn,
            do.Deliver: self._deliver,
            do.EndOfData: self._end_of_data,
            do.EvaluationDone: self._evaluation_ended,
            do.EvaluationFailed: self._evaluation_ended,
            do.Paused: self._paused,
            do.Fail: self._fail,
        }, observers=observers)  # fmt: skip

    def __repr__(self) -> str:
        waits = self.long_waits.standing
        return f"{self.core!r}{', ' if waits else ''}{waits}"

    # ---------------------------------------------------------------- for the scheduler

    async def next_batch(self) -> Batch:
        """The next batch. A call that was cancelled loses nothing: the next one gets its batch."""
        batch = await self.wait_batch()
        self.handed_out = batch.id
        return batch

    async def wait_batch(self, *, blocks: bool = False) -> Batch:
        """The next batch; it stays the next one until it is ``handed_out``, as it may get lost on its way.

        While too many batches are out it waits for a weight update; a caller that ``blocks`` could not make one.
        """
        self._raise_if_broken()
        self._note_handed_out()
        there = self._batch is not None and self._batch.done()
        if blocks and self.core.train_first and not there:
            raise RolloutError(self.core.leases.why_full())
        if self._batch is None:
            if self._loading:
                raise CheckpointError("a state is being loaded; ask for the batch when load_state_dict has returned")
            self._batch = asyncio.get_running_loop().create_future()
            self.post(ev.StepRequested())
        future = self._batch
        self._full = asyncio.get_running_loop().create_future()
        ends: list[asyncio.Future[Any]] = [future, self._full] if blocks else [future]
        # cancelled here, the result, there or not yet, is for the next call
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not future.done():
            raise RolloutError(self.core.leases.why_full())
        if future.exception() is not None and self._batch is future:
            self._batch = None
        batch = future.result()
        with self.long_waits.on("next_batch", "engines to end what they still compute on the trainer's model"):
            await self.quiet()
        return batch

    def _note_handed_out(self) -> None:
        """Forget a batch that the trainer has, and an error of weights, which may not hold any more."""
        future = self._batch
        if future is None or not future.done():
            return
        error = future.exception()
        if isinstance(error, EngineError) or (error is None and future.result().id == self.handed_out):
            self._batch = None

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Nothing generates for training inside; one holder at a time."""
        async with self._exclusive:
            self._raise_if_broken()
            future = asyncio.get_running_loop().create_future()
            self._pauses.append(future)
            self.post(ev.PauseRequested())
            try:
                await future
                yield
            finally:
                self.post(ev.Resumed())

    async def evaluate(
        self, prompts: Sequence[Prompt], n_samples: int, sampling: SamplingParams, seed: int
    ) -> EvaluationResult:
        """Generate ``n_samples`` responses to each prompt and score them by the training's reward function.

        Training's requests end first, stepwise; no carry and no count of training is touched.

        Raises:
            RolloutError: no reward function, or a rollout or reward failed; the prompt is named.
            EngineError: no engine is left; a request that breaks off begins again on another one, with the same seed.
        """
        local, samples = self.local, self.local.samples
        if local.functions.reward is None and local.functions.group_reward is None:
            raise RolloutError("evaluate needs a reward function; give the scheduler reward= or group_reward=")
        await self.ask_engines()
        self._raise_if_broken()
        number = next(self._evaluation_numbers)
        end = self._evaluations[number] = asyncio.get_running_loop().create_future()
        plain = local.plain_rollout  # a thread each is dear: no more than can generate
        self.post(
            ev.EvaluationRequested(
                evaluation=number, prompts=prompts, n_samples=n_samples, sampling=sampling, seed=seed,
                functions_at_once=self.core.settings.max_in_flight if plain else None,
            )
        )  # fmt: skip
        try:
            ended = await asyncio.shield(end)
            groups = () if isinstance(ended, do.EvaluationFailed) else ended.groups
            responses = samples.evaluated(number, groups)
        except asyncio.CancelledError:
            self.post(ev.EvaluationCancelled(number))
            await asyncio.wait([end])  # its requests end, within the deadline for aborts
            await samples.cleaned_up()
            raise
        finally:
            raised = samples.raised.pop(number, None)
            samples.elsewhere.pop(number, None)
        if isinstance(ended, do.EvaluationFailed):
            await samples.cleaned_up()
            error = EVALUATION_ERRORS.get(ended.kind, EngineError)
            raise error(ended.error) from (raised if error is RolloutError else None)
        if self._batch is None:  # no batch is being made: the trainer has its model again
            await self.quiet()
        return EvaluationResult(responses, np.array([[s.reward for s in g.samples] for g in ended.groups], np.float64))

    async def update_weights(
        self, path: str | None = None, transfer: Transfer | None = None, trained: int | None = None, *,
        update: WeightUpdate | None = None,
    ) -> PolicyVersion:  # fmt: skip
        """Pause the engines, await ``transfer``, give them the next version, commit what was trained, go on.

        An update that is asked for while another one runs comes after it.

        Args:
            trained: the last batch that these weights were trained on. None means the oldest one that is out, of those
                that no update commits which was asked for before, if there are such.
            update: the update itself, where a thread of the trainer has made it; in place of ``transfer``.

        Raises ConfigError, before anything happens, if servers would get nothing or there is no such batch; and
        whatever the transfer or an engine raises: the version stays then. See ``april.core.weight_updates``.
        """
        self._raise_if_broken()
        update = update or WeightUpdate(transfer)
        path = directory_for(
            self._here(), self._servers(), path, written=update.transfers,
            in_flight=self.core.settings.on_weight_update,
        )  # fmt: skip
        self._out("weight_update", trained)
        async with self._asking:
            content = await self._content_of(path)
            self._raise_if_broken()
            if trained is None:
                out = self._out("weight_update", trained)
                trained = min((b for b in out if b > self.core.updates.trained), default=max(out, default=None))
            adapter = path is not None and is_adapter(path)
            self.updates.begin(update, path=path, content=content, adapter=adapter, trained=trained)
        return await update.ended(self.updates)

    async def _content_of(self, path: str | None) -> str:
        return "" if path is None else await self.local.engine_control.content_of(path)

    def commit(self, batch_id: int) -> None:
        """Commit this batch and those before it: no weight update follows from them."""
        self._raise_if_broken()
        for out in self._out("commit", batch_id):
            if out <= batch_id:
                self.post(ev.BatchCommitted(out))

    def lower_staleness(self, to: int | None) -> int:
        """Draw further prompts to be trained within ``to`` weight updates, by default one less than before."""
        self._raise_if_broken()
        now = self.core.leases.bound
        bound = now - 1 if to is None else to
        if isinstance(bound, bool) or not isinstance(bound, int) or not 0 <= bound <= now:
            raise ConfigError(
                f"lower_staleness: the bound is {now} and can be lowered to 0 at least, got {bound!r}; a higher one is "
                "a matter of the configuration (max_staleness)"
            )
        self.post(ev.StalenessLowered(bound))
        if self.core.train_first and self._full is not None and not self._full.done():
            self._full.set_result(None)
        return bound

    def _out(self, call: str, named: int | None) -> list[int]:
        """The batches that the trainer has; raises ConfigError if ``named`` is none of them or of those before."""
        if named is not None and (isinstance(named, bool) or not isinstance(named, int)):
            raise ConfigError(f"{call}: a batch is named by its number, batch.id; got {named!r}")
        newest = -1 if self.handed_out is None else self.handed_out
        if named is not None and not 0 <= named <= newest:
            there = f"the batches so far are 0 to {newest}" if newest >= 0 else "there was no batch yet"
            raise ConfigError(f"{call}: there is no batch {named}; {there}")
        return [b for b in self.core.leased if b <= newest]

    async def quiet(self) -> None:
        """Wait until nothing computes on the trainer's model: an attempt that was fenced may still do so."""
        await self.local.quiet()
        if self.hosts is not None:
            await self.hosts.quiet()

    async def ask_engines(self) -> None:
        """Wait until all servers have answered a probe."""
        await self.local.engine_control.ask_all()
        if self.hosts is not None:
            await self.hosts.probed()

    async def caught_up(self) -> None:
        """Wait until the books have the tokens of other hosts' running requests; a state is whole without them, too."""
        if self.hosts is not None:
            await self.hosts.catch_up()

    def _here(self) -> list[Engine]:
        return list(self.local.engines.values())

    def _servers(self) -> list[str]:
        """The engines that do not read the trainer's own model."""
        here = [name for name, engine in self.local.engines.items() if engine.capabilities.remote]
        return here if self.hosts is None else here + self.hosts.servers

    def _present_engines(self) -> list[EngineLimits]:
        return [state.limits for state in self.core.engines.states.values()]

    # ---------------------------------------------------------------- data and restarts

    def extend(self, prompts: Iterable[Any]) -> None:
        """Add prompts after those there are."""
        self._source.extend(prompts)
        self.post(ev.SourceExtended())

    def state_dict(self, trained_through: int | None) -> dict[str, Any]:
        """The core's state and the position in the prompts."""
        self._raise_if_broken()
        if self._loading:
            raise CheckpointError("a state is being loaded; take one when load_state_dict has returned")
        self.local.streams.catch_up()
        core, prompts = snapshot.take(self.core, trained_through), self._source.state_dict()
        return seal(KIND, {"core": core, "prompts": prompts, "sampling": sampling_out(self.sampling)})

    async def load_state_dict(
        self, state: dict[str, Any], path: str | None = None, transfer: Transfer | None = None, *,
        update: WeightUpdate | None = None,
    ) -> PolicyVersion:  # fmt: skip
        """Go on from a state, under the first version of a new incarnation, whose weights the engines are given.

        Arguments and errors are those of :meth:`update_weights`, and CheckpointError.
        """
        update = update or WeightUpdate(transfer)
        path = directory_for(
            self._here(), self._servers(), path, written=update.transfers, what="load_state_dict"
        )
        core, prompts, sampling = parts_of(state)
        async with self.paused():
            # tried out first: a state that is refused leaves everything as it is
            trial = RolloutCore(self.core.settings, self._present_engines())
            snapshot.restore(trial, core)
            refuse_sampling(trial, sampling, self.sampling, allow_mismatch=self._settings.allow_mismatch)
            snapshot.require_fresh(self.core)
            if self._drawing:
                raise CheckpointError("prompts are being drawn for this scheduler; load the state into a new one")
            self._loading = True
            try:
                with self.long_waits.on("load_state_dict", "the prompts drawn before, which are gone through again"):
                    rest = await self._rest_from(prompts)
                refuse_undrawn(trial, rest.stand)
                log_changes(trial, core)

                def restore() -> None:
                    self._source.go_on_with(rest)
                    snapshot.restore(self.core, core)
                    if self.recorder is not None:
                        self.recorder.restored(core)

                update.restore = restore
                content = await self._content_of(path)
                self._raise_if_broken()
                self.updates.begin(
                    update, path=path, content=content, adapter=path is not None and is_adapter(path),
                    version=trial.clock.current, restores=True,
                )  # fmt: skip
                await update.ended(self.updates)
            finally:
                self._loading = False
        return self.core.clock.current

    async def _rest_from(self, prompts: dict[str, Any]) -> RestOfPrompts:
        """Pass over the prompts drawn before a restart, in a thread where they may be slow."""
        if not (self._options.draws_beside and self._source.is_slow):
            return self._source.rest_from(prompts)
        rest: RestOfPrompts = await self.local.worker_threads.call(marked, self._source.rest_from, prompts)
        return rest

    async def close(self) -> None:
        """End everything; what was generated stays in the core's books. Who calls it again waits for the same end."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._broken = self._broken or SchedulerClosed("the scheduler is closed")
        self._fail_waiting(self._broken)
        self.long_waits.close()
        if self._auto is not None:
            await self._auto.closed()
        if self.hosts is not None:
            await self.hosts.close()
        await self.local.close()
        if self.recorder is not None:
            self.recorder.close()

    def post(self, event: ev.Event) -> None:
        """Give one event to the core and carry out its commands."""
        if self._broken is not None:
            return
        try:
            follows = self._pump.runs
            self._pump.post(event)
            if not follows:  # what follows from another event is looked at with it
                self._times.look(self.now())
                self.long_waits.look()
        except Exception as error:
            # the books do not balance: nothing that follows could be trusted
            self._break(error)

    def _break(self, error: BaseException) -> None:
        """Stop after an unexpected error, and give it to everybody who waits."""
        if self._broken is not None:
            return
        log.error("april stops", exc_info=error)
        if not isinstance(error, AprilError):
            cause, error = error, SchedulerClosed(f"april has stopped: {describe(error)}")
            error.__cause__ = cause
        self._broken = error
        self._fail_waiting(error)

    # ---------------------------------------------------------------- prompts and samples

    def _draw(self, command: do.DrawPrompts) -> None:
        source, count = self._source, command.count
        if not (self._options.draws_beside and source.is_slow):
            self.post(ev.PromptsDrawn(*source.draw(count)))
            return

        quick = False

        def ended(outcome: Outcome) -> None:
            """Take what the thread has drawn."""
            if quick:
                return
            self._drawing = False
            if outcome.error is not None:
                self._break(outcome.error)
            else:
                self.post(ev.PromptsDrawn(*source.hand_over(outcome.take())))

        try:
            job = self.local.worker_threads.run(self._context.copy(), marked, (source.fetch, count), ended)
        except RolloutError as error:
            self.post(ev.PromptsDrawn([], exhausted=False, error=str(error)))
            return
        # quick prompts come before anything else happens, so that runs with them repeat exactly
        now = asyncio.get_running_loop().time
        began = now()
        quick = bool(wait([job], self._patience.left_s).done) and job.result().error is None
        self._patience.waited(now() - began, found=quick)
        if quick:
            self.post(ev.PromptsDrawn(*source.hand_over(job.result().take())))
        else:
            self._drawing = True

    def _warn(self, command: do.Warn) -> None:
        log.warning("%s", command.message)

    def _report_drop(self, command: do.ReportDrop) -> None:
        # rejections and staleness are policies at work, failures are for people to see
        level = logging.WARNING if command.reason is DropReason.FAILED else logging.DEBUG
        group, prompt = command.group, command.group.prompt
        if self.hosts is not None:
            self.hosts.settled(group)
        named = f"group {group.id} (prompt {prompt.position} of epoch {prompt.epoch})"
        log.log(level, "%s is dropped as %s and replaced: %s", named, command.reason, command.why)

    def _start_timer(self, command: do.StartTimer) -> None:
        loop = asyncio.get_running_loop()
        if command.why:
            log.warning("%s", command.why)

        def fired() -> None:
            self.post(ev.TimerFired(command.timer))

        loop.call_later(command.seconds, fired)

    # ---------------------------------------------------------------- results

    def _deliver(self, command: do.Deliver) -> None:
        batch = command.batch
        samples = [sample.id for sample in batch.samples]
        self.local.samples.forget(samples)
        if self.hosts is not None:
            self.hosts.delivered(samples)
        times = self._times.delivered(self.now())
        blocked_s, blocking = self._options.blocked()
        times |= {"loop_blocked_s": blocked_s}
        why = bottleneck(times, self.core.settings, self._options.fits, blocking, first=self._times.batches == 1)
        metrics = {**batch.metrics, **times}
        metrics |= self._limit.metrics(metrics, self._times.places)
        batch = replace(batch, metrics=metrics, bottleneck=why)
        if self._auto is not None:
            batch = self._auto.delivered(batch)
        if self.recorder is not None:
            self.recorder.delivered(batch)
        if self._options.delivered is not None:
            self._options.delivered(batch)
        log.info("batch %d: %s", batch.id, why or "it was there already")
        if batch.id == 0 and len(batch.group_sizes) < self.core.settings.rollout_batch_size:
            log.warning("batch 0 has %d of %d groups, as there are no more prompts; to repeat them set epochs or "
                        "on_data_end: wrap", len(batch.group_sizes), self.core.settings.rollout_batch_size)  # fmt: skip
        if self._source.first is not None and not self._ranks_told:
            self._ranks_told = True
            warn_of_equal_rollouts(self.core.settings.run_seed, self._source.first)
        if self._batch is not None:
            self._batch.set_result(batch)

    def _end_of_data(self, command: do.EndOfData) -> None:
        what = "complete groups" if self.core.settings.whole_groups else "finished responses"
        rest = (
            f"{what} that wait for more prompts: {command.kept}; give those to extend(), or set on_data_end: short"
            if command.kept
            else "every prompt is settled"
        )
        if dropped := {str(reason): count for reason, count in self.core.prompts.dropped.items() if count}:
            rest += f" (dropped so far: {dropped})"
        some = self.core.context.groups_drawn > 0
        ended = "the prompt source has ended" if some else "there are no prompts: prompts= gave none"
        self._fail_batch(DataExhausted(f"{ended}; {rest}"))

    def _fail(self, command: do.Fail) -> None:
        error = (EngineError if command.weights else RolloutError)(command.error)
        error.__cause__ = self.local.samples.cause_of(command.error)
        self._fail_batch(error)

    def _paused(self, command: do.Paused) -> None:
        waiting, self._pauses = self._pauses, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def _evaluation_ended(self, command: EvaluationEnd) -> None:
        if self.hosts is not None:
            self.hosts.evaluated(command.evaluation)
        future = self._evaluations.pop(command.evaluation)
        if not future.done():
            future.set_result(command)

    def _fail_batch(self, error: BaseException) -> None:
        future = self._batch
        if future is not None and not future.done():
            future.set_exception(error)
            future.exception()  # a waiter may have gone; its error is not asyncio's business

    def _fail_waiting(self, error: BaseException) -> None:
        self._fail_batch(error)
        self.updates.fail(error)
        futures: list[asyncio.Future[Any]] = [*self._pauses, *self._evaluations.values()]
        for future in futures:
            if not future.done():
                future.set_exception(error)
                future.exception()

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise SchedulerClosed(f"the scheduler has stopped: {self._broken}") from self._broken


# ---------------------------------------------------------------- what a state must be, beside the checks of the core

KIND = "rollouts"
"""The kind of state that a scheduler saves."""
ALWAYS_REFUSED = {"stop", "stop_token_ids"}
"""Settings that must not change, as held tokens may contain such stops in their middle."""


def parts_of(state: Any) -> tuple[State, State, State]:
    """The snapshot of the core, the position in the prompts and the sampling of a state; raises CheckpointError."""
    require_sealed(KIND, state)
    parts = [state.get(name) for name in ("core", "prompts", "sampling")]
    if not all(isinstance(part, dict) for part in parts):
        raise CheckpointError("the state is damaged: a part of it is missing")
    return parts[0], parts[1], parts[2]


def sampling_out(sampling: SamplingParams) -> dict[str, Any]:
    """The configured sampling for a state."""
    values = {name: value for name, value in asdict(sampling).items() if name not in ("max_tokens", "seed")}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def refuse_sampling(core: RolloutCore, saved: Any, sampling: SamplingParams, *, allow_mismatch: bool) -> None:
    """Other sampling than before cannot go on from tokens that were sampled by it: one batch has one way of sampling.

    Raises:
        CheckpointError: they differ and ``core``, which was restored, holds tokens; ``allow_mismatch`` allows for
            temperature, top_p and min_tokens.
    """
    now = sampling_out(sampling)
    if not isinstance(saved, dict) or saved.keys() != now.keys():
        raise CheckpointError("the state is damaged: it does not say how it was sampled")
    held = core.tokens.held
    for name, value in now.items():
        if saved[name] != value and held and not (allow_mismatch and name not in ALWAYS_REFUSED):
            raise CheckpointError(
                f"the state holds {held} tokens that were sampled with {name}={saved[name]}, the configuration has "
                f"{value}; set sampling.{name} as it was"
                + ("" if name in ALWAYS_REFUSED else ", or allow_mismatch: true if your trainer accounts for it")
            )


def refuse_undrawn(core: RolloutCore, stand: Position) -> None:
    """Raise CheckpointError if ``core`` holds a prompt twice, or one that was not drawn."""
    names = [(group.prompt.epoch, group.prompt.position) for group in core.buffer]
    if len(set(names)) < len(names) or any(name >= (stand.epoch, stand.position) for name in names):
        raise CheckpointError(
            f"the state is damaged: it holds prompts that were not drawn before prompt {stand.position} of epoch "
            f"{stand.epoch}, or one of them twice"
        )


def log_changes(core: RolloutCore, state: dict[str, Any]) -> None:
    """Log the settings that differ from those of the state."""
    if changes := snapshot.changed_settings(core, state):
        said = "; ".join(f"{name} was {saved}, now {now}" for name, (saved, now) in changes.items())
        log.info("the state goes on under other settings: %s", said)
