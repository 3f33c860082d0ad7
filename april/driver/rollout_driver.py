"""Connects the scheduling core to engines and user functions: executes its commands and posts the results as events.

The core makes all decisions. The driver runs unchanged on a real event loop and on a loop with a virtual clock. Its
methods must all be called on the event loop on which it was created.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from msgspec import structs

from april.auto.run_tuning import RunTuning
from april.concurrency.garbage import collect_garbage
from april.core import commands as do
from april.core import events as ev
from april.core import snapshot
from april.core.batch import Batch
from april.core.event_pump import EventPump, Observer, RequestLog
from april.core.rollout_core import RolloutCore
from april.core.run_times import RunTimes, bottleneck
from april.core.sampling import LogprobKind, SamplingParams
from april.core.saved_state import SavedCore
from april.core.settings import CoreSettings
from april.core.state_checksum import State, seal, verify_checksum
from april.core.types import AttemptFailure, DropReason, FinishReason, Prompt, SampleId, SampleState
from april.core.versions import PolicyVersion
from april.core.whole_numbers import whole_number
from april.driver.command_executor import CommandExecutor, limits_of
from april.driver.long_waits import LongWaits
from april.driver.prompt_source import Position, PromptSource, RemainingPrompts, warn_of_equal_rollouts
from april.driver.rewards import EvaluationResult
from april.driver.sample_functions import RolloutSettings, UserFunctions
from april.driver.step_limit import EngineCosts
from april.driver.user_code import Outcome, describe, run_as_user_code
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
from april.record.run_status import WaitReason
from april.serialization.plain_values import plain, restored

log = logging.getLogger("april")

T = TypeVar("T")
EvaluationEnd = do.EvaluationDone | do.EvaluationFailed
QUICK_DRAW_S = 0.25
"""Maximum number of seconds for which the event loop blocks while a thread draws prompts. The waits of all draws share
this budget; once it is used up, the loop never blocks again."""
DRAW_ALLOWANCE_S = 0.005
"""Seconds that each draw adds to the budget QUICK_DRAW_S, which therefore lasts for a whole run of quick draws."""
MAX_WITHOUT_END = 16
"""Number of responses, from the start of the run, that must all lack an end-of-sequence token for a warning."""
HANDLED_PER_COLLECTION = 1000
"""Number of events and commands between two garbage collections of young objects. They create some 5,000 objects, which
a collection visits in a few milliseconds."""
EVALUATION_ERRORS = {
    None: RolloutError, AttemptFailure.CORRUPT: WireError, AttemptFailure.REFUSED: RequestRefused,
    AttemptFailure.NO_TEXT: RolloutError,
}  # fmt: skip
"""Type of the error that a failed evaluation raises, by the kind of failure; EngineError for all other kinds."""


class RolloutDriver:
    """Runs one scheduler core: sends its requests to the engines and calls the user's functions for it.

    Args:
        check: True if the core's whole state is cross-checked after every event.
        draw_in_thread: True if slow prompts are drawn in a thread; False on a virtual clock, which would not wait for
            the thread.
        config: Configuration that is written into the ``record``.
        delivered: Callback for each delivered batch.
        blocked: Callback that returns for how many seconds user functions have blocked the loop since the last call,
            and the name of the function that blocked it longest.
    """

    def __init__(
        self,
        settings: CoreSettings,
        rollouts: RolloutSettings,
        engines: Sequence[Engine],
        source: PromptSource,
        functions: UserFunctions,
        *,
        check: bool = False,
        draw_in_thread: bool = False,
        record: RunRecord | None = None,
        config: Mapping[str, Any] | None = None,
        delivered: Callable[[Batch], None] = lambda batch: None,
        blocked: Callable[[], tuple[float, str]] = lambda: (0.0, ""),
    ) -> None:
        first = [limits_of(engine) for engine in engines]
        self.core = RolloutCore(settings, first, check=check)
        self.now = asyncio.get_running_loop().time
        self._draw_in_thread, self._delivered, self._blocked = draw_in_thread, delivered, blocked
        self._times = RunTimes(self.core)
        self.requests = RequestLog(self.core, self.now)
        self.recorder = None if record is None else Recorder(record, self.core, self.now, self.requests, config)
        self._costs = EngineCosts(self.requests)
        self._auto = RunTuning(self.core, self._costs, self.post) if settings.auto else None
        follows = all(LogprobKind(e.logprob_kind).follows_temperature for e in first)
        self._settings = replace(rollouts, any_temperature=follows)
        self.sampling = rollouts.sampling
        self._source = source
        self._draw_patience_s = QUICK_DRAW_S
        self._drawing = False
        self._broken: AprilError | None = None
        self._loading = False
        self._ranks_compared = False
        self._without_end: int | None = 0
        """Number of delivered responses, as long as all of them have reached the length limit; None once a response was
        shorter, or a warning was logged."""
        self.handed_out: int | None = None
        """Number of the last batch that the trainer received; None before the first. The trainer's thread sets it by
        one assignment, which no signal can interrupt, and not by an event."""
        self._batch: asyncio.Future[Batch] | None = None
        """Future of the batch that the trainer has requested and not yet received."""
        self._pauses: list[asyncio.Future[None]] = []
        """Futures of callers that wait until no request of training is running."""
        self._outputs: dict[SampleId, Any] = {}
        """Return values of the rollout functions of delivered samples, kept while a saved state may need them."""
        self._pause_held = False
        """True from the trainer's call of :meth:`pause` until its call of :meth:`resume`."""
        self._evaluations: dict[int, asyncio.Future[EvaluationEnd]] = {}
        self._too_many_untrained: asyncio.Future[None] | None = None
        """Future that ends a blocking ``next_batch`` when no more batches can be delivered before a weight update."""
        self._context = copy_context()
        self._evaluation_numbers = itertools.count()
        self._pause_lock = asyncio.Lock()
        self._pause_call_lock = asyncio.Lock()
        self._pause_stack = AsyncExitStack()
        self._update_lock = asyncio.Lock()
        """Lock that makes calls request their weight updates one after another, in the order of the calls."""
        self._closing: asyncio.Task[None] | None = None
        self._leaving: dict[str, asyncio.Future[None]] = {}
        """Futures of callers that wait until an engine is removed, by engine name."""
        self.updates = OpenUpdates(self.post)
        self.executor = CommandExecutor(
            self.core, engines, functions, self._settings,
            post=self.post, failed=self.updates.failed, broke=self._stop_with_error,
        )  # fmt: skip
        # if stall_timeout_s is set, it ends stalled requests, so no warning is needed
        patience_s = {WaitReason.RESPONSES: None if rollouts.stall_timeout_s else rollouts.warn_after_s}
        tell = (lambda _: None) if self.recorder is None else self.recorder.record_status
        self.long_waits = LongWaits(self.core, self.now, rollouts.warn_after_s, patience_s, tell)
        observers: list[Observer] = [self.requests] if self.recorder is None else [self.recorder, self.requests]
        self._collect_at = HANDLED_PER_COLLECTION
        """Number of handled events and commands at which the objects that they made are collected."""
        self._pump = EventPump(self.core, {
            **self.executor.handlers,
            do.Continue: self._continue,
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
        waits = self.long_waits.current_wait
        return f"{self.core!r}{', ' if waits else ''}{waits}"

    # ---------------------------------------------------------------- for the scheduler

    async def next_batch(self) -> Batch:
        """Return the next batch. A cancelled call loses nothing: the next call gets the batch."""
        batch = await self.wait_batch()
        self.handed_out = batch.id
        return batch

    async def wait_batch(self, *, blocks: bool = False) -> Batch:
        """Return the next batch; until the caller sets ``handed_out``, further calls return the same batch again.

        While too many batches are untrained, this waits for a weight update. ``blocks`` says that the caller's thread
        is blocked and cannot make a weight update meanwhile; then this raises RolloutError instead of waiting.
        """
        self._raise_if_broken()
        self._forget_handed_out()
        there = self._batch is not None and self._batch.done()
        if blocks and not there:
            self._refuse_paused("next_batch")
            if self.core.train_first:
                raise RolloutError(self.core.leases.why_full())
        if self._batch is None:
            if self._loading:
                raise CheckpointError("a state is being loaded; ask for the batch after load_state_dict has returned")
            self._batch = asyncio.get_running_loop().create_future()
            self.post(ev.StepRequested())
        future = self._batch
        self._too_many_untrained = asyncio.get_running_loop().create_future()
        ends: list[asyncio.Future[Any]] = [future, self._too_many_untrained] if blocks else [future]
        # if this call is cancelled here, the next call gets the batch
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not future.done():
            raise RolloutError(self.core.leases.why_full())
        if future.exception() is not None and self._batch is future:
            self._batch = None
        batch = future.result()
        busy = "the engines to stop computing on the trainer's model"
        with self.long_waits.waiting_for("next_batch", busy):
            await self.executor.wait_until_engines_idle()
        return batch

    def _forget_handed_out(self) -> None:
        """Forget the last result if it is a batch that the trainer has, or an EngineError, which may be outdated."""
        future = self._batch
        if future is None or not future.done():
            return
        error = future.exception()
        if isinstance(error, EngineError) or (error is None and future.result().id == self.handed_out):
            self._batch = None

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Pause generation for training inside the block; only one block runs at a time."""
        async with self._pause_lock:
            self._raise_if_broken()
            future = asyncio.get_running_loop().create_future()
            self._pauses.append(future)
            self.post(ev.PauseRequested())
            try:
                await future
                yield
            finally:
                self.post(ev.Resumed())

    async def pause(self) -> None:
        """Pause generation for training until :meth:`resume`, and wait until no request runs; idempotent."""
        async with self._pause_call_lock:
            if self._pause_held:
                return
            self._pause_held = True
            try:
                await self._pause_stack.enter_async_context(self.paused())
            except BaseException:
                self._pause_held = False
                raise

    async def resume(self) -> None:
        """End the trainer's pause, if there is one."""
        async with self._pause_call_lock:
            self._pause_held = False
            await self._pause_stack.aclose()

    def _refuse_paused(self, call: str) -> None:
        if self._pause_held:
            raise RolloutError(f"{call} would wait forever, because generation is paused; call resume() first")

    async def evaluate(
        self, prompts: Sequence[Prompt], n_samples: int, sampling: SamplingParams, seed: int
    ) -> EvaluationResult:
        """Do the same as ``RolloutScheduler.evaluate``. A request that fails starts again with the same seed."""
        local, samples = self.executor, self.executor.samples
        self._refuse_paused("evaluate")
        if local.functions.reward is None and local.functions.group_reward is None:
            raise RolloutError("evaluate needs a reward function; give the scheduler reward= or group_reward=")
        await local.engine_control.probe_all()
        self._raise_if_broken()
        number = next(self._evaluation_numbers)
        end = self._evaluations[number] = asyncio.get_running_loop().create_future()
        # each call of a plain function needs a thread, so run no more calls than requests are allowed
        plain = local.rollout is not local.functions.rollout
        self.post(
            ev.EvaluationRequested(
                evaluation=number, prompts=prompts, n_samples=n_samples, sampling=sampling, seed=seed,
                functions_at_once=self.core.settings.max_in_flight if plain else None,
            )
        )  # fmt: skip
        try:
            ended = await asyncio.shield(end)
            groups = () if isinstance(ended, do.EvaluationFailed) else ended.groups
            responses = samples.evaluation_responses(groups)
        except asyncio.CancelledError:
            self.post(ev.EvaluationCancelled(number))
            await asyncio.wait([end])  # until its requests have ended, at most until the abort deadline
            await samples.wait_for_cancelled()
            raise
        finally:
            raised = samples.evaluation_errors.pop(number, None)
        if isinstance(ended, do.EvaluationFailed):
            await samples.wait_for_cancelled()
            error = EVALUATION_ERRORS.get(ended.kind, EngineError)
            raise error(ended.error) from (raised if error is RolloutError else None)
        if self._batch is None:  # no batch is requested, so the trainer may use its model now
            await self.executor.wait_until_engines_idle()
        return EvaluationResult(responses, np.array([[s.reward for s in g.samples] for g in ended.groups], np.float64))

    async def update_weights(
        self, path: str | None = None, transfer: Transfer | None = None, trained: int | None = None, *,
        label: int | None = None, update: WeightUpdate | None = None,
    ) -> PolicyVersion:  # fmt: skip
        """Pause the engines, await ``transfer``, load the new version, commit trained batches, and resume.

        Arguments and errors are those of ``RolloutScheduler.weight_update``. An update that is requested while another
        update runs starts after it. ``update`` is made by the trainer's thread, and replaces ``transfer``.
        """
        self._raise_if_broken()
        update = update or WeightUpdate(transfer)
        in_flight = self.core.settings.on_weight_update
        path = directory_for(self.executor.engines, path, written=update.transfers, in_flight=in_flight)
        if trained is not None:
            trained = self._delivered_batch("weight_update", trained)
        async with self._update_lock:
            content = await self._content_of(path)
            self._raise_if_broken()
            if trained is None:
                out = self._uncommitted()
                trained = min((b for b in out if b > self.core.updates.trained), default=max(out, default=None))
            adapter = path is not None and is_adapter(path)
            self.updates.begin(
                update, path=path, content=content, adapter=adapter, trained=trained, held=self._pause_held,
                version=self._labelled(label),
            )  # fmt: skip
        return await update.ended(self.updates)

    def _labelled(self, label: int | None) -> PolicyVersion | None:
        """Return the policy version with the trainer's number ``label``; raises ConfigError for an invalid number."""
        newest = self.core.updates.newest
        if label is None:
            return None
        if (number := whole_number(label)) is None or not newest < number < 2**31:
            raise ConfigError(
                f"weight_update: label must be a whole number above {newest}, the label of the previous weights, got "
                f"{label!r}"
            )
        return self.core.clock.current._replace(n=number)

    async def _content_of(self, path: str | None) -> str:
        return "" if path is None else await self.executor.engine_control.content_of(path)

    def commit(self, batch_id: int) -> None:
        """Commit this batch and all earlier batches, as trained, without a weight update."""
        self._raise_if_broken()
        last = self._delivered_batch("commit", batch_id)
        for out in self._uncommitted():
            if out <= last:
                self.post(ev.BatchCommitted(out))

    def record_report(self, batch_id: int, report: Mapping[str, float]) -> None:
        """Write the trainer's report on a batch to the record, if there is one."""
        if self.recorder is not None:
            self.recorder.record_report(batch_id, report)

    def lower_staleness(self, to: int | None) -> int:
        """Lower the staleness bound for prompts drawn from now on, and return it; ``to`` None lowers it by one."""
        self._raise_if_broken()
        now = self.core.leases.bound
        bound = now - 1 if to is None else whole_number(to)
        if bound is None or not 0 <= bound <= now:
            raise ConfigError(
                f"lower_staleness: bound must be between 0 and the current bound, {now}, got {to!r}; to raise it, "
                "change the configuration (max_staleness)"
            )
        self.post(ev.StalenessLowered(bound))
        if self.core.train_first and self._too_many_untrained is not None and not self._too_many_untrained.done():
            self._too_many_untrained.set_result(None)
        return bound

    def _delivered_batch(self, call: str, batch_id: int) -> int:
        """Return the number of a batch; raises ConfigError if the trainer never got this batch."""
        if (number := whole_number(batch_id)) is None:
            raise ConfigError(f"{call}: a batch is named by its number, batch.id; got {batch_id!r}")
        newest = -1 if self.handed_out is None else self.handed_out
        if not 0 <= number <= newest:
            there = f"the batches so far are 0 to {newest}" if newest >= 0 else "no batch was delivered yet"
            raise ConfigError(f"{call}: there is no batch {number}; {there}")
        return number

    def _uncommitted(self) -> list[int]:
        return [] if self.handed_out is None else [b for b in self.core.leased if b <= self.handed_out]

    # ---------------------------------------------------------------- engines that come and go

    def add_engine(self, engine: Engine) -> None:
        """Add an engine; it gets the current weights before requests, unless it started with them.

        Raises ConfigError if the name is taken, or if the engine lacks an ability that the run's samples rely on.
        """
        self._raise_if_broken()
        name, limits = engine.name, limits_of(engine)
        self.require_new(name)
        if (wrong := self.core.engines.unfit(limits)) is not None:
            raise ConfigError(f"add_engine: {wrong}")
        self.executor.add_engine(engine)
        self.post(ev.EnginesJoined([limits]))

    def require_new(self, name: str) -> None:
        """Raise ConfigError if there is an engine of this name."""
        if name in self.core.engines.states:
            raise ConfigError(f"add_engine: an engine {name} exists already; names must be unique")

    async def remove_engine(self, name: str, *, cut: bool) -> Engine:
        """Send an engine no more requests, wait until it has none, and return it without closing it.

        Raises ConfigError if there is no such engine.
        """
        self._raise_if_broken()
        engine = self.executor.engines.get(name)
        if engine is None:
            names = ", ".join(self.executor.engines) or "none"
            raise ConfigError(f"remove_engine: no engine is named {name}; the engines are {names}")
        gone = self._leaving.setdefault(name, asyncio.get_running_loop().create_future())
        self.post(ev.EngineLeaving(name, cut))
        await asyncio.shield(gone)
        return engine

    def _remove_idle_engines(self) -> None:
        """Remove the engines for which :meth:`remove_engine` waits and that have no requests any more."""
        for name in [name for name in self._leaving if not self.core.engines.states[name].in_flight]:
            gone = self._leaving.pop(name)
            self.post(ev.EnginesLeft([name]))
            del self.executor.engines[name]
            gone.set_result(None)

    # ---------------------------------------------------------------- data and restarts

    def extend(self, prompts: Iterable[Any]) -> None:
        """Append prompts to the source."""
        self._source.extend(prompts)
        self.post(ev.SourceExtended())

    def state_dict(self, trained_through: int | None) -> dict[str, Any]:
        """Return the core's state, the position in the prompts, the sampling, and outputs of rollout functions."""
        self._refuse_while_loading()
        return self._frozen(snapshot.Freezer(self.core), trained_through, {})()

    async def save(self, trained_through: int | None) -> State:
        """Return the same as :meth:`state_dict`, without blocking the loop for longer than a few milliseconds.

        References to the core's objects are collected bit by bit, between other callbacks; a thread makes the state.
        """
        self._refuse_while_loading()
        copies: OutputCopies = {}
        finished = list((self._outputs | self.executor.samples.outputs(of_finished=True)).items())
        for start in range(0, len(finished), OUTPUTS_AT_ONCE):
            copy_outputs(dict(finished[start : start + OUTPUTS_AT_ONCE]), copies)
            await asyncio.sleep(0)
        freezer = snapshot.Freezer(self.core)
        try:
            more = True
            while more:
                more = freezer.advance()
                await asyncio.sleep(0)
            self._refuse_while_loading()
            frozen = self._frozen(freezer, trained_through, copies)
        finally:
            freezer.close()
        state: State = await self.executor.worker_threads.call(frozen)
        return state

    def _refuse_while_loading(self) -> None:
        self._raise_if_broken()
        if self._loading:
            raise CheckpointError("a state is being loaded; call state_dict after load_state_dict has returned")

    def _frozen(
        self, freezer: snapshot.Freezer, trained_through: int | None, copies: OutputCopies
    ) -> Callable[[], State]:
        self.executor.streams.catch_up()
        core_state = freezer.finish(trained_through)
        outputs = copy_outputs(self._outputs | self.executor.samples.outputs(), copies)
        content = {"prompts": self._source.state_dict(), "sampling": sampling_out(self.sampling)}
        return partial(_make_state, core_state, content, self.core.settings, outputs)

    async def load_state_dict(
        self, state: dict[str, Any], path: str | None = None, transfer: Transfer | None = None, *,
        update: WeightUpdate | None = None,
    ) -> PolicyVersion:  # fmt: skip
        """Continue from a saved state, and load the weights of its checkpoint into the engines.

        Arguments and errors are those of :meth:`update_weights`; also raises CheckpointError.
        """
        update = update or WeightUpdate(transfer)
        path = directory_for(self.executor.engines, path, written=update.transfers, what="load_state_dict")
        core, prompts, sampling = parts_of(state)
        outputs = outputs_in(state.get("outputs", ()))
        self._refuse_paused("load_state_dict")
        async with self.paused():
            # load into a second core first, so that a refused state changes nothing; restore() moves the content later
            trial = RolloutCore(self.core.settings, [state.limits for state in self.core.engines.states.values()])
            loaded = snapshot.restore(trial, core)
            refuse_sampling(trial, sampling, self.sampling, allow_mismatch=self._settings.allow_mismatch)
            snapshot.require_fresh(self.core)
            if self._drawing:
                raise CheckpointError(
                    "this scheduler has already started to draw prompts; load the state into a new one"
                )
            self._loading = True
            try:
                again = "the prompts drawn before the restart, which are drawn again"
                with self.long_waits.waiting_for("load_state_dict", again):
                    rest = await self._rest_from(prompts)
                refuse_undrawn(trial, rest.position)
                log_changes(trial, loaded.saved)

                def restore() -> None:
                    self._source.continue_with(rest)
                    snapshot.move(loaded, self.core)
                    for sample in self.core.buffer.samples():
                        if sample.state is SampleState.FINISHED and sample.id in outputs:
                            self.executor.samples.restore_output(sample, outputs[sample.id])
                    if self.recorder is not None:
                        self.recorder.record_state(loaded.saved)

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

    async def _rest_from(self, prompts: dict[str, Any]) -> RemainingPrompts:
        """Skip the prompts that were drawn before a restart, in a thread if the source may be slow."""
        if not (self._draw_in_thread and self._source.is_slow):
            return self._source.remaining_after(prompts)
        threads, remaining_after = self.executor.worker_threads, self._source.remaining_after
        rest: RemainingPrompts = await threads.call(run_as_user_code, remaining_after, prompts)
        return rest

    async def close(self) -> None:
        """Stop all work; generated tokens stay in the core's state. A second call waits for the first."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._broken = self._broken or SchedulerClosed("the scheduler is closed")
        self._fail_waiting(self._broken)
        self.long_waits.close()
        if self._auto is not None:
            await self._auto.aclose()
        await self.executor.close()
        if self.recorder is not None:
            self.recorder.close()

    def post(self, event: ev.Event) -> None:
        """Pass one event to the core and execute the commands that it returns."""
        if self._broken is not None:
            return
        try:
            nested = self._pump.running
            self._pump.post(event)
            if not nested:  # the outermost call does this for nested events
                self._times.update(self.now())
                self.long_waits.update()
                self._remove_idle_engines()
                if self._pump.handled >= self._collect_at:
                    self._collect_at = self._pump.handled + HANDLED_PER_COLLECTION
                    collect_garbage(self.core.held_bytes)
                    self._costs.fit_again()
        except Exception as error:
            # the core's state may be inconsistent, so no later result could be trusted
            self._stop_with_error(error)

    def _stop_with_error(self, error: BaseException) -> None:
        """Stop after an unexpected error, and raise it in all waiting calls."""
        if self._broken is not None:
            return
        log.error("april stops", exc_info=error)
        if not isinstance(error, AprilError):
            cause, error = error, SchedulerClosed(f"april has stopped: {describe(error)}")
            error.__cause__ = cause
        self._broken = error
        self._fail_waiting(error)

    # ---------------------------------------------------------------- prompts and samples

    def _continue(self, command: do.Continue) -> None:
        asyncio.get_running_loop().call_soon(self.post, ev.Continued())

    def _draw(self, command: do.DrawPrompts) -> None:
        source, count = self._source, command.count
        if not (self._draw_in_thread and source.is_slow):
            self.post(ev.PromptsDrawn(*source.draw(count)))
            return

        quick = False

        def ended(outcome: Outcome) -> None:
            if quick:
                return
            self._drawing = False
            if outcome.error is not None:
                self._stop_with_error(outcome.error)
            else:
                self.post(ev.PromptsDrawn(*source.hand_over(outcome.take())))

        try:
            job = self.executor.worker_threads.run(self._context.copy(), run_as_user_code, (source.fetch, count), ended)
        except RolloutError as error:
            self.post(ev.PromptsDrawn([], exhausted=False, error=str(error)))
            return
        # wait for a quick draw here, before any other event, so that runs with quick draws are reproducible
        now = asyncio.get_running_loop().time
        began = now()
        quick = bool(wait([job], self._draw_patience_s).done) and job.result().error is None
        left_s = min(QUICK_DRAW_S, self._draw_patience_s + DRAW_ALLOWANCE_S - (now() - began))
        self._draw_patience_s = max(0.0, left_s) if quick and self._draw_patience_s else 0.0
        if quick:
            self.post(ev.PromptsDrawn(*source.hand_over(job.result().take())))
        else:
            self._drawing = True

    def _warn(self, command: do.Warn) -> None:
        log.warning("%s", command.message)

    def _report_drop(self, command: do.ReportDrop) -> None:
        # groups that the filter or max_staleness drops are expected; a failed group is not, so it gets a warning
        level = logging.WARNING if command.reason is DropReason.FAILED else logging.DEBUG
        group, prompt = command.group, command.group.prompt
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
        outputs = {name: output for name in samples if (output := self.executor.samples.output_of(name)) is not None}
        self.executor.samples.forget(samples)
        if outputs:
            for sample in batch.samples:  # changed in place, as copying thousands would block the loop
                object.__setattr__(sample, "output", outputs.get(sample.id))
        if self._outputs or outputs:
            out = {sample.id for others in self.core.leased.values() for sample in others}
            self._outputs = {name: output for name, output in self._outputs.items() if name in out} | outputs
        times = self._times.delivered(self.now())
        blocked_s, blocking = self._blocked()
        times |= {"loop_blocked_s": blocked_s}
        unasked = {"unasked_extras": float(self.executor.streams.unrequested_extras.total())}
        why = bottleneck(times, self.core.settings, blocking, first=self._times.batches == 1)
        metrics = {**batch.metrics, **times, **unasked}
        metrics |= self._costs.limit_metrics(metrics, self._times.places)
        batch = replace(batch, metrics=metrics, bottleneck=why)
        if self._auto is not None:
            batch = self._auto.add_batch(batch)
        if self.recorder is not None:
            self.recorder.record_batch(batch)
        self._delivered(batch)
        log.info("batch %d: %s", batch.id, why or "it was ready already")
        if batch.id == 0 and len(batch.group_sizes) < self.core.settings.rollout_batch_size:
            log.warning((
                "batch 0 has only %d of %d groups because the prompts have ended; to repeat them set epochs or "
                "on_data_end: wrap"
            ), len(batch.group_sizes), self.core.settings.rollout_batch_size)  # fmt: skip
        if self._without_end is not None:
            self._warn_without_ends(batch)
        if self._source.first is not None and not self._ranks_compared:
            self._ranks_compared = True
            warn_of_equal_rollouts(self.core.settings.run_seed, self._source.first)
        if self._batch is not None:
            self._batch.set_result(batch)

    def _warn_without_ends(self, batch: Batch) -> None:
        """Warn once if every response so far has max_response_len tokens: the model may use another EOS token."""
        assert self._without_end is not None
        most = self.core.settings.max_response_len
        unended = all(s.finish is FinishReason.LENGTH and len(s.tokens) >= most for s in batch.samples)
        seen = self._without_end + len(batch)
        self._without_end = seen if unended else None
        if unended and seen >= MAX_WITHOUT_END:
            log.warning(
                "all %d responses so far have max_response_len=%d tokens: none of them contains an end-of-sequence "
                "token (%s); if the model ends its turns with another token, add it to sampling.stop_token_ids "
                "(docs/rollouts.md)",
                seen, most, sorted(self.core.engines.eos_token_ids) or "unknown",
            )  # fmt: skip
            self._without_end = None

    def _end_of_data(self, command: do.EndOfData) -> None:
        what = "complete groups" if self.core.settings.whole_groups else "finished responses"
        rest = (
            f"{what} that wait for more prompts: {command.kept}; add prompts with extend(), or set on_data_end: short"
            if command.kept
            else "every prompt is delivered or dropped"
        )
        if dropped := {str(reason): count for reason, count in self.core.prompts.dropped.items() if count}:
            rest += f" (dropped so far: {dropped})"
        some = self.core.context.groups_drawn > 0
        ended = "the prompt source has ended" if some else "prompts= contains no prompts"
        self._fail_batch(DataExhausted(f"{ended}; {rest}"))

    def _fail(self, command: do.Fail) -> None:
        error = (EngineError if command.weights else RolloutError)(command.error)
        error.__cause__ = self.executor.samples.cause_of(command.error)
        self._fail_batch(error)

    def _paused(self, command: do.Paused) -> None:
        waiting, self._pauses = self._pauses, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def _evaluation_ended(self, command: EvaluationEnd) -> None:
        future = self._evaluations.pop(command.evaluation)
        if not future.done():
            future.set_result(command)

    def _fail_batch(self, error: BaseException) -> None:
        future = self._batch
        if future is not None and not future.done():
            future.set_exception(error)
            future.exception()  # without a waiter, asyncio would log the error

    def _fail_waiting(self, error: BaseException) -> None:
        self._fail_batch(error)
        self.updates.fail(error)
        futures: list[asyncio.Future[Any]] = [*self._pauses, *self._evaluations.values(), *self._leaving.values()]
        for future in futures:
            if not future.done():
                future.set_exception(error)
                future.exception()

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise SchedulerClosed(f"the scheduler has stopped: {self._broken}") from self._broken


# ---------------------------------------------------------------- checks of a saved state, besides those of the core

KIND = "rollouts"
"""Name of this kind of saved state."""
ALWAYS_REFUSED = {"stop", "stop_token_ids"}
"""Sampling settings that must not change if the state holds tokens, as these may already contain the new stops."""


def parts_of(state: Any) -> tuple[State, State, State]:
    """Return the core snapshot, the position in the prompts, and the sampling of a state; raises CheckpointError."""
    verify_checksum(KIND, state)
    parts = [state.get(name) for name in ("core", "prompts", "sampling")]
    if not all(isinstance(part, dict) for part in parts):
        raise CheckpointError("the state is damaged: a part of it is missing")
    return parts[0], parts[1], parts[2]


def _make_state(
    core_state: Callable[[], State], content: State, settings: CoreSettings, outputs: Mapping[SampleId, Any]
) -> State:
    core = core_state()
    found = outputs_out(settings, core, outputs)
    return seal(KIND, {"core": core, **content, **({"outputs": found} if found else {})})


OutputCopies = dict[SampleId, tuple[Any, list[Any]]]
"""Return value of each sample's rollout function, with a list of its copy (empty if it has no plain form)."""
OUTPUTS_AT_ONCE = 256
"""Number of return values that are copied in one iteration of the event loop."""


def copy_outputs(outputs: Mapping[SampleId, Any], copies: OutputCopies) -> dict[SampleId, Any]:
    """Return copies of the rollout functions' return values as plain values, without those that have no plain form.

    ``copies`` holds earlier copies, which are used again; new copies are added to it.
    """
    for name, output in outputs.items():
        if name not in copies or copies[name][0] is not output:
            copy: list[Any] = []
            with suppress(Exception):  # objects of the user raise errors of their own
                copy.append(plain(output))
            copies[name] = output, copy
    return {name: copy for name in outputs for copy in copies[name][1]}


def outputs_out(settings: CoreSettings, core: State, outputs: Mapping[SampleId, Any]) -> list[Any]:
    """Return ``[group, index, value]`` for each sample saved as finished; its rollout function returned ``value``.

    Values that cannot be serialised are left out. ``april.core.snapshot`` decides which samples are saved as finished.
    """
    again = settings.group_reward or settings.has_filter
    return [
        [*name, outputs[name]]
        for group in (*core["ready"], *(() if again else core["waiting"]))
        for index, sample in enumerate(group["samples"])
        if sample.get("finished") and (name := SampleId(group["id"], index)) in outputs
    ]


def outputs_in(outputs: Any) -> dict[SampleId, Any]:
    """Read the return values that :func:`outputs_out` wrote; raises CheckpointError."""
    try:
        return {SampleId(group, index): restored(value) for group, index, value in outputs}
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the state is damaged: the functions' results cannot be read: {error}") from error


def sampling_out(sampling: SamplingParams) -> dict[str, Any]:
    """Return the configured sampling as plain values for a saved state."""
    values = {name: value for name, value in structs.asdict(sampling).items() if name not in ("max_tokens", "seed")}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def refuse_sampling(core: RolloutCore, saved: Any, sampling: SamplingParams, *, allow_mismatch: bool) -> None:
    """Refuse a state whose tokens were sampled with other settings, as all tokens of a batch must share them.

    Raises:
        CheckpointError: the settings differ and the restored ``core`` holds tokens. ``allow_mismatch`` permits another
            temperature, top_p and min_tokens.
    """
    now = sampling_out(sampling)
    if not isinstance(saved, dict) or saved.keys() != now.keys():
        raise CheckpointError("the state is damaged: its sampling parameters are missing")
    held = core.tokens.held
    for name, value in now.items():
        if saved[name] != value and held and not (allow_mismatch and name not in ALWAYS_REFUSED):
            raise CheckpointError(
                f"the state holds {held} tokens that were sampled with {name}={saved[name]}, but the configuration has "
                f"{value}; set sampling.{name} as it was"
                + ("" if name in ALWAYS_REFUSED else ", or allow_mismatch: true if your trainer accounts for it")
            )


def refuse_undrawn(core: RolloutCore, saved: Position) -> None:
    """Raise CheckpointError if ``core`` holds a prompt twice, or a prompt that was not drawn before ``saved``."""
    names = [(group.prompt.epoch, group.prompt.position) for group in core.buffer]
    if len(set(names)) < len(names) or any(name >= (saved.epoch, saved.position) for name in names):
        raise CheckpointError(
            f"the state is damaged: it holds a prompt twice, or one that was not drawn before prompt {saved.position} "
            f"of epoch {saved.epoch}"
        )


def log_changes(core: RolloutCore, state: SavedCore) -> None:
    """Log the settings that differ from those in the saved state."""
    if changes := snapshot.changed_settings(core, state):
        said = "; ".join(f"{name} was {saved}, now {now}" for name, (saved, now) in changes.items())
        log.info("the run continues from the state under other settings: %s", said)
