"""The coordinator: april's core behind questions. Rollouts ask it from wherever they run, and so does the trainer.

Each of a prompt's n rollouts asks the coordinator one thing at a time and waits for the answer. Rollout i runs sample
i, and if that is given up, the one that takes its place.
Invariant: everything a rollout says carries the life that it was started with; one whose sample went on without it is
told so and changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from april.auto.auto_run import AutoRun
from april.core import commands as do
from april.core import events as ev
from april.core import snapshot
from april.core.attachments import Placed
from april.core.event_pump import EventPump, RequestLog
from april.core.run_times import RunTimes, bottleneck
from april.core.sampling import SamplingParams
from april.core.settings import CoreSettings, EngineLimits
from april.core.state import RolloutCore
from april.core.tape import Int32
from april.core.types import SETTLED, DropReason, Prompt, Sample, SampleId, SampleState
from april.driver.limit import StepLimit
from april.driver.long_waits import WARN_AFTER_S, LongWaits
from april.driver.user_code import describe
from april.errors import CheckpointError, RolloutError, SchedulerClosed
from april.one_row import why_not_one_row
from april.processes.coordinator.asked_host import AskedHost, delivery, take
from april.processes.coordinator.messages import GivenUp, Message, Order, Result, Settled
from april.record.standing import Waits

log = logging.getLogger("april")

SILENT_S = 1800.0
"""The time in which rollouts may say nothing, before a warning."""
IGNORED: tuple[type[do.Command], ...] = (
    do.ScoreGroup, do.EndOfData,
    do.PauseEngine, do.LoadEngine, do.ResumeEngine, do.HandOver, do.Restore, do.UpdateEnded, do.Warn,
    do.EvaluationDone, do.EvaluationFailed,
)  # fmt: skip
"""Commands that never come: the trainer updates its servers and evaluates by itself, and its data never end."""


class Coordinator:
    """A run's core behind questions.

    Args:
        settings: of the core.
        limits: of all servers together.
        filter_name: of what groups must not have the same value of for all their samples, in messages.
        accepts: says instead whether the group of a prompt is kept; for a coordinator in the trainer's own process.
        check: cross-check the core's books after every event.
    """

    def __init__(
        self, settings: CoreSettings, limits: EngineLimits, filter_name: str = "the filter's value",
        accepts: Callable[[str], bool] | None = None, *, check: bool = False,
    ) -> None:  # fmt: skip
        # its workers send what comes with a prompt; whether the servers give rows is the trainer's to set
        limits = replace(limits, attachments=settings.attachments, extras=settings.extras)
        self.core = RolloutCore(settings, [limits], check=check)
        self.host = host = AskedHost(
            self.core, lambda event: self._pump.post(event), lambda: self._order("abort"), filter_name, accepts
        )
        self._dropped: set[str] = set()
        """Prompts that were given up, and whose rollouts have not all ended."""
        self._last_batch: int | None = None
        self._broken: BaseException | None = None
        """The error that has ended the core."""
        self._orders: list[Order] = []
        self._ordered = asyncio.Event()
        requests = RequestLog(self.core, _now)
        self._limit = StepLimit(requests)
        self._auto = AutoRun(self.core, self._limit.costs, lambda event: self._post(event)) if settings.auto else None
        self._pump = EventPump(self.core, {
            **host.executors,
            do.DrawPrompts: lambda c: self._order("draw", c.count),
            do.StartTimer: self._start_timer,
            do.ReportDrop: self._report_drop,
            do.Deliver: self._deliver,
            do.Paused: self._paused,
            do.Fail: lambda c: self._order("fail", c.error),
        }, IGNORED, [requests])  # fmt: skip
        self._times = RunTimes(self.core)
        # what a rollout has made is heard of at its end, and one whose worker has died says nothing
        silent_s = {Waits.RESPONSES: SILENT_S, Waits.FUNCTIONS: SILENT_S}
        self._long_waits = LongWaits(self.core, _now, WARN_AFTER_S, silent_s)
        self._position = 0
        self._validated: deque[str] = deque()
        self._validates = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Coordinator {self.core!r} waiting={len(self.host.mailboxes)}>"

    # ---------------------------------------------------------------- the trainer asks

    async def begin(self, label: int) -> None:
        """The trainer wants a batch, under the weights that it calls ``label``; stepwise, it has trained on the last.

        Raises:
            RolloutError: with continuous generation, the weights have changed without a pause; or too many batches are
                not trained.
        """
        self._raise_if_failed()
        if self.core.step is None or label != self.core.clock.current.n:
            self._update(label)
        if self.core.train_first:
            raise RolloutError(self.core.leases.why_full())
        self._post(ev.StepRequested())

    async def pause(self) -> None:
        """End what is at the servers, and begin nothing: the order ``paused`` says when. Weights may change then."""
        self._post(ev.PauseRequested())

    async def resume(self, label: int) -> None:
        """Go on under the weights that the trainer calls ``label``; if they are new, it has trained on all batches."""
        if label != self.core.clock.current.n:
            self._update(label)
        self._post(ev.Resumed())

    async def close(self) -> None:
        """The order ``closed`` ends whoever carries out orders; whoever waits for an answer is told."""
        if self._auto is not None:
            self._auto.close()
        self._long_waits.close()
        self._order("closed")
        self.host.mailboxes.stop(SchedulerClosed("the coordinator is closed: the run is over"))

    async def orders(self) -> list[Order]:
        """Return what the trainer is to do, in order; wait until there is something.

        Raises:
            InvariantError: april's books do not balance.
        """
        while not self._orders and self._broken is None:
            self._ordered.clear()
            await self._ordered.wait()
        if self._broken is not None:
            raise self._broken
        orders, self._orders = self._orders, []
        return orders

    async def drawn(self, uids: list[str]) -> None:
        """Prompts for an order to draw; their rollouts are started when the trainer has dispatched them."""
        # rollouts make the token ids; they come with the first call
        first, self._position = self._position, self._position + len(uids)
        empty = np.empty(0, np.int32)
        drawn = self.core.context.groups_drawn
        prompts = [Prompt(empty, {"uid": uid}, 0, first + i) for i, uid in enumerate(uids)]
        self._post(ev.PromptsDrawn(prompts, exhausted=False))
        self.host.know(range(drawn, drawn + len(prompts)))

    async def closed(self, uid: str) -> bool:
        """Return whether this prompt, whose rollouts have all ended, was dropped."""
        if uid in self._dropped:
            self._dropped.discard(uid)
            return True
        return False

    async def validated(self, uid: str) -> None:
        """All rollouts of a prompt of the validation set have ended."""
        self._validated.append(uid)
        self._validates.set()

    async def validation(self, count: int) -> list[str]:
        """The next ``count`` prompts of the validation set that are complete; waits until there are so many."""
        while len(self._validated) < count:
            self._validates.clear()
            await self._validates.wait()
        return [self._validated.popleft() for _ in range(count)]

    async def story(self, uid: str, index: int) -> str:
        """Return what happened to one held sample, one line per transition."""
        sample = self.host.sample_of(uid, index)
        return f"no prompt {uid} is held" if sample is None else self.core.story(sample.id)

    async def ledgers(self) -> dict[str, dict[str, object]]:
        """Return where every token and every prompt went."""
        return {"tokens": self.core.tokens.as_dict(), "prompts": self.core.prompts.as_dict()}

    # ---------------------------------------------------------------- rollouts ask

    async def start(self, uid: str, index: int) -> Message:
        """Start, when the core wants the sample of this rollout (again), or Settled."""
        sample = self.host.sample_of(uid, index)
        if sample is None:
            return Settled()
        if sample.state in SETTLED:
            return Settled(dropped=sample.state is SampleState.DROPPED)
        return await self._answer(sample.id, for_start=True)

    async def call(
        self, uid: str, index: int, life: int, token_ids: Int32, sampling: SamplingParams,
        attached: tuple[Placed, ...] = (),
    ) -> Message:  # fmt: skip
        """A rollout wants its conversation, int32 [T], with what is attached to it, continued: Go, Done or GivenUp."""
        sample = self._alive(uid, index, life)
        if sample is None:
            return GivenUp()
        if self._left_a_call(sample):
            return GivenUp()
        self._post(ev.CallMade(sample.id, sampling, np.asarray(token_ids, np.int32), attached=attached))
        return await self._answer(sample.id)

    async def ended(self, uid: str, index: int, life: int, result: Result) -> Message:
        """Take the result of a Go; return the next Go, Done or GivenUp."""
        if result.unused is not None:
            self._post(ev.TokensUnused(*result.unused))
        sample = self._alive(uid, index, life)
        if sample is None:
            self._late(result)
            return GivenUp()
        rollout = self.host.rollout_of(sample.id)
        self.host.mailboxes.unsay(rollout)
        attempt = sample.chains[0].open_call.attempt if sample.chains[0].open_call is not None else None
        if attempt is not None:
            self._post(take(attempt, result, self.core.clock.current))
        elif result.label is None:
            self._late(result)  # nobody knows by which weights
        else:
            self.host.mailboxes.late[rollout] = result
        return await self._answer(sample.id)

    async def broke(self, uid: str, index: int, life: int, error: str) -> Message:
        """The request of a Go failed: the next Go, or GivenUp."""
        sample = self._alive(uid, index, life)
        if sample is None:
            return GivenUp()
        attempt = sample.chains[0].open_call.attempt if sample.chains[0].open_call is not None else None
        if attempt is not None:
            self.host.mailboxes.unsay(self.host.rollout_of(sample.id))
            self._post(ev.AttemptFailed(attempt_id=attempt.id, error=error))
        return await self._answer(sample.id)

    async def returned(self, uid: str, index: int, life: int, reward: float | None, value: float | None) -> None:
        """A rollout has returned, and its trajectory is stored; ``value`` is that of the filter's metric."""
        sample = self._alive(uid, index, life)
        if sample is None or self._left_a_call(sample):
            return
        if reward is None and self.core.settings.has_reward:
            self._post(ev.SampleFailed(sample.id, "it has no reward"))
            return
        self.host.scores[sample.id] = (reward, value)
        self._post(ev.SampleReturned(sample.id))

    async def failed(self, uid: str, index: int, life: int, error: str, kind: str = "") -> None:
        """A rollout, or its reward, raised; ``kind`` as in SampleFailed."""
        sample = self._alive(uid, index, life)
        if sample is not None:
            self._post(ev.SampleFailed(sample.id, error, kind))

    def _left_a_call(self, sample: Sample) -> bool:
        """Return whether its rollout goes on though a call is unfinished (a timeout of its own); it has failed then."""
        if sample.state is SampleState.RUNNING and sample.chains[0].open_call is None:
            return False
        self._post(ev.SampleFailed(sample.id, "it went on while a call of generate was unfinished"))
        return True

    def _late(self, result: Result) -> None:
        if len(result.tokens):
            self._post(ev.TokensUnused(len(result.tokens), DropReason.LATE))

    def _alive(self, uid: str, index: int, life: int) -> Sample | None:
        """The sample of a rollout, if this ``life`` is its present one."""
        sample = self.host.sample_of(uid, index)
        alive = sample is not None and self.host.mailboxes.is_alive(self.host.rollout_of(sample.id), life)
        return sample if alive else None

    async def _answer(self, sample: SampleId, *, for_start: bool = False) -> Message:
        """Return what its rollout is told next; it may have another sample by then."""
        self._raise_if_failed()
        rollout = self.host.rollout_of(sample)
        return await self.host.mailboxes.answer(rollout, for_start=for_start)

    # ---------------------------------------------------------------- the core

    def _update(self, label: int) -> None:
        """The servers have the weights that the trainer calls ``label``; all batches so far are trained on.

        Raises:
            RolloutError: they are others than those under which requests are at the servers.
        """
        current = self.core.clock.current
        if self.core.attempts and label != current.n:
            raise RolloutError(
                f"the weights went from {current.n} to {label} while requests were at the servers, so nobody knows "
                "which weights wrote their tokens; pause before the weights change, and resume after it"
            )
        self._post(ev.WeightsUpdated(current._replace(n=label), trained=self._last_batch))

    def _post(self, event: ev.Event) -> None:
        """Hand an event to the core. Raises what ends the core with it, and RolloutError if it has ended before."""
        self._raise_if_failed()
        try:
            self._pump.post(event)
        except BaseException as error:
            self._broken = error
            self._ordered.set()
            self.host.mailboxes.stop(self._stopped(error))
            raise
        finally:
            self._times.look(_now())
            self._long_waits.look()

    def _raise_if_failed(self) -> None:
        """RolloutError once the core has ended: nothing that it would say could be trusted."""
        if self._broken is not None:
            raise self._stopped(self._broken)

    def _stopped(self, failed: BaseException) -> RolloutError:
        error = RolloutError(f"april has stopped: {describe(failed)}")
        error.__cause__ = failed
        return error

    def _report_drop(self, command: do.ReportDrop) -> None:
        self._dropped.add(str(command.group.prompt.data["uid"]))
        self._order("dropped", str(command.reason), command.why)
        self.host.retire(command.group)

    def _start_timer(self, command: do.StartTimer) -> None:
        def passed() -> None:
            if self._broken is None:
                self._post(ev.TimerFired(command.timer))

        asyncio.get_running_loop().call_later(command.seconds, passed)

    def _order(self, *order: object) -> None:
        self._orders.append(order)
        self._ordered.set()

    def _deliver(self, command: do.Deliver) -> None:
        batch = command.batch
        if self.core.step is None:
            self.host.end_what_runs_on()
        if why := why_not_one_row(batch, "the trainer"):
            self._order("fail", why)
            return
        times = self._times.delivered(_now())
        said = bottleneck(times, self.core.settings, first=self._times.batches == 1)
        log.info("batch %d: %s", batch.id, said or "it was there already")
        metrics = {**batch.metrics, **times}
        batch = replace(batch, metrics=metrics | self._limit.metrics(metrics, self._times.places))
        if self._auto is not None:
            batch = self._auto.delivered(batch)
        rollouts, settled = self.host.delivered(batch)
        self._last_batch = batch.id
        self._order("deliver", delivery(batch, rollouts, settled))

    def _paused(self, command: do.Paused) -> None:
        self.host.end_what_runs_on()
        self._order("paused")

    # ---------------------------------------------------------------- checkpoints

    async def state(self) -> dict[str, Any]:
        """Everything that is not in the batches delivered so far, as plain data.

        Raises:
            RolloutError: april has stopped; its books could not be trusted.
        """
        self._raise_if_failed()
        late = self.host.mailboxes.late
        return {
            "position": self._position,
            "rollouts": snapshot.take(self.core, self._last_batch),
            "late": [_plain(i, r, self.core.clock.current.incarnation) for i, r in late.items()],
            "dropped": sorted({*self._dropped, *self.host.ended}),
            "stand_ins": [[*sample, rollout] for sample, rollout in self.host.stand_ins.items()],
        }

    async def restore(self, state: dict[str, Any], stored: dict[str, list[int]]) -> list[str]:
        """Go on from a saved state; the prompts whose rollouts are to be started, oldest first: all that are held.

        ``stored``: rollouts of each held prompt whose trajectory is in the trainer's checkpoint. Trajectories are saved
        a moment before april's state: a sample that was finished in between runs again, answered from its tape.

        Raises:
            CheckpointError: not such a state, or prompts of it are not in the trainer's checkpoint.
        """
        rollouts = state["rollouts"]
        groups = [*rollouts["ready"], *rollouts["waiting"]]
        missing = [g["data"]["uid"] for g in groups if g["data"]["uid"] not in stored]
        if missing:
            raise CheckpointError(
                f"{len(missing)} prompts of april's state (the first is {missing[0]}) are not in the trainer's "
                "checkpoint: the two do not belong together"
            )
        try:
            stand_ins = {SampleId(group, index): rollout for group, index, rollout in state.get("stand_ins", ())}
            unstored = []
            for group in groups:
                there = stored[group["data"]["uid"]]
                for index, sample in enumerate(group["samples"]):
                    rollout = stand_ins.get(SampleId(group["id"], index), index)
                    if sample.get("finished") and rollout not in there:
                        sample["finished"] = False
                        unstored.append(group["id"])
            if self.core.settings.whole_groups:
                again = [g for g in rollouts["ready"] if g["id"] in unstored]
                rollouts["ready"] = [g for g in rollouts["ready"] if g["id"] not in unstored]
                rollouts["waiting"] = [*rollouts["waiting"], *again]
            late = dict(_result(*saved) for saved in state["late"])
        except (TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"the state is damaged: {type(error).__name__}: {error}") from error
        snapshot.restore(self.core, rollouts)
        self._position = state["position"]
        self.host.know(g.id for g in self.core.buffer)
        for stand_in, rollout in stand_ins.items():
            if stand_in.group in self.core.buffer.groups:
                self.host.runs_for(stand_in, rollout)
        self.host.mailboxes.late.update(late)
        return [str(g.prompt.data["uid"]) for g in sorted(self.core.buffer, key=lambda g: g.id)]

    async def held(self) -> dict[str, list[int]]:
        """The prompts that are held, each with its rollouts whose sample is neither delivered nor dropped."""
        return {
            uid: sorted(self.host.rollout_of(sample.id).index for sample in group.members)
            for uid, group in self.host.groups.items()
        }


def _plain(sample: SampleId, r: Result, incarnation: int) -> list[Any]:
    """A late result for a checkpoint."""
    of = incarnation if r.incarnation is None else r.incarnation
    rest = [list(r.stop_token_ids), r.ends_anywhere, snapshot.rows_out(r.extras)]
    return [*sample, r.offset, r.tokens.tolist(), r.logprobs.tolist(), r.label, r.aborted, of, *rest]


def _result(
    group: int, index: int, offset: int, tokens: list[int], logprobs: list[float], label: int, aborted: bool, of: int,
    stop_token_ids: Sequence[int] = (), ends_anywhere: bool = True, extras: Any = None,
) -> tuple[SampleId, Result]:  # fmt: skip
    made = Result(
        offset=offset,
        tokens=np.array(tokens, np.int32),
        logprobs=np.array(logprobs, np.float32),
        label=label,
        aborted=aborted,
        incarnation=of,
        stop_token_ids=tuple(stop_token_ids),
        ends_anywhere=ends_anywhere,
        extras={name: snapshot.rows_in(rows) for name, rows in (extras or {}).items()},
    )
    return SampleId(group, index), made


def _now() -> float:
    return asyncio.get_running_loop().time()
