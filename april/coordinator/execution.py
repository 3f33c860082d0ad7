"""The core run behind the coordinator: what has happened goes in, what it wants goes to whoever waits for it."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Sequence

from april.coordinator.mailboxes import Mailboxes
from april.coordinator.messages import Go, Order, Start
from april.coordinator.results import delivery, done, take
from april.core import commands as do
from april.core import events as ev
from april.core.bottleneck import bottleneck
from april.core.event_pump import EventPump
from april.core.run_times import RunTimes
from april.core.settings import CoreSettings, EngineLimits
from april.core.state import RolloutCore
from april.core.types import AttemptState, DropReason, EngineFinish, Group, Prompt, SampleId
from april.driver.user_code import describe
from april.errors import RolloutError

log = logging.getLogger("april")

IGNORED: tuple[type[do.Command], ...] = (
    do.ScoreGroup, do.EndOfData,
    do.PauseEngine, do.LoadEngine, do.ResumeEngine, do.HandOver, do.Restore, do.UpdateEnded, do.Warn,
    do.EvaluationDone, do.EvaluationFailed,
)  # fmt: skip
"""Commands that never come: the trainer updates its servers and evaluates by itself, and its data never end."""


class Execution:
    """See :class:`april.coordinator.coordinator.Coordinator` for the arguments."""

    def __init__(
        self, settings: CoreSettings, limits: EngineLimits, filter_name: str, accepts: Callable[[str], bool] | None, *,
        check: bool,
    ) -> None:  # fmt: skip
        self.core = RolloutCore(settings, [limits], check=check)
        self.mailboxes = Mailboxes()
        self.groups: dict[str, Group] = {}
        """Held prompts by uid."""
        self.scores: dict[SampleId, tuple[float | None, float | None]] = {}
        """Reward, and value of the filter's metric, of samples that have returned."""
        self.dropped: set[str] = set()
        """Prompts that were given up, and whose rollouts have not all ended."""
        self.last_batch: int | None = None
        self.failed: BaseException | None = None
        self._filter_name, self._accepts = filter_name, accepts
        self._runs_on = False
        """A request may be at a server that nobody waits for."""
        self._orders: list[Order] = []
        self._ordered = asyncio.Event()
        self._pump = EventPump(self.core, {
            do.StartSample: self._start_sample,
            do.Submit: self._submit,
            do.CallCompleted: lambda c: self.mailboxes.say(c.call.sample.id, done(c.call)),
            do.CancelSample: self._cancel,
            do.ScoreSample: self._score,
            do.JudgeGroup: lambda c: self._pump.post(self._verdict(c.group, c.judgement)),
            do.DrawPrompts: lambda c: self._order("draw", c.count),
            do.Abort: self._abort,
            do.Fence: self._fence,
            do.StartTimer: self._start_timer,
            do.ProbeEngine: lambda c: self._pump.post(ev.EngineReady(c.engine)),  # the trainer mends its servers
            do.ReportDrop: self._report_drop,
            do.Deliver: self._deliver,
            do.Paused: self._paused,
            do.Fail: lambda c: self._order("fail", c.error),
        }, ignored=IGNORED)  # fmt: skip
        self._times = RunTimes(self.core)

    # ---------------------------------------------------------------- what has happened

    def begin(self, label: int) -> None:
        """A batch is asked for, under the weights that the trainer calls ``label``.

        Raises:
            RolloutError: as :meth:`update`; or too many batches are not trained.
        """
        self.raise_if_failed()
        if self.core.step is None or label != self.core.clock.current.n:
            self.update(label)
        if self.core.train_first:
            raise RolloutError(self.core.leases.why_full())
        self.post(ev.StepRequested())

    def update(self, label: int) -> None:
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
        self.post(ev.WeightsUpdated(current._replace(n=label), trained=self.last_batch))

    def resume(self, label: int) -> None:
        """Generation goes on after a pause, under the weights that the trainer calls ``label``."""
        if label != self.core.clock.current.n:
            self.update(label)
        self.post(ev.Resumed())

    def close(self) -> None:
        """Nobody carries out orders any more."""
        self._order("closed")

    def draw(self, prompts: Sequence[Prompt]) -> None:
        """Prompts for an order to draw."""
        first = self.core.context.groups_drawn
        self.post(ev.PromptsDrawn(prompts, exhausted=False))
        self.know(range(first, first + len(prompts)))

    def post(self, event: ev.Event) -> None:
        """Anything else. Raises what ends the core with it, and RolloutError if it has ended before."""
        self.raise_if_failed()
        try:
            self._pump.post(event)
        except BaseException as error:
            self.failed = error
            self._ordered.set()
            self.mailboxes.stop(self._stopped(error))
            raise
        finally:
            self._times.look(_now())

    def raise_if_failed(self) -> None:
        """RolloutError once the core has ended: nothing that it would say could be trusted."""
        if self.failed is not None:
            raise self._stopped(self.failed)

    def _stopped(self, failed: BaseException) -> RolloutError:
        error = RolloutError(f"april has stopped: {describe(failed)}")
        error.__cause__ = failed
        return error

    async def orders(self) -> list[Order]:
        """Those since the last call; waits until there is one. Raises what has ended the core."""
        while not self._orders and self.failed is None:
            self._ordered.clear()
            await self._ordered.wait()
        if self.failed is not None:
            raise self.failed
        orders, self._orders = self._orders, []
        return orders

    # ---------------------------------------------------------------- what the core wants

    def know(self, groups: Iterable[int]) -> None:
        """Groups, by number, that can be asked for by uid from now on."""
        for number in groups:
            group = self.core.buffer.groups.get(number)
            if group is not None:
                self.groups[str(group.prompt.data["uid"])] = group

    def _start_sample(self, command: do.StartSample) -> None:
        sample = command.sample.id
        self.mailboxes.say(sample, Start(self.mailboxes.new_life(sample)))

    def _cancel(self, command: do.CancelSample) -> None:
        self.mailboxes.give_up(command.sample.id)
        self._drop_late(command.sample.id)

    def _score(self, command: do.ScoreSample) -> None:
        sample = command.sample.id
        self._pump.post(ev.Scored(sample.group, [(sample.index, self.scores[sample][0] or 0.0)]))

    def _abort(self, command: do.Abort) -> None:
        # servers end all requests or none; a single one that nobody wants runs on, and is waited for by nobody
        asked = (self.core.attempts[i] for i in command.attempt_ids if i in self.core.attempts)
        unwanted = [a.id for a in asked if a.state is AttemptState.ABANDONED]
        for attempt_id in unwanted:
            self._pump.post(ev.AttemptEnded(attempt_id, EngineFinish.ABORT))
        self._runs_on = not command.everything and (self._runs_on or bool(unwanted))
        if command.everything:
            self._order("abort")

    def _fence(self, command: do.Fence) -> None:
        """A request whose result comes after all is taken then."""
        for attempt_id in command.attempt_ids:
            self._pump.post(ev.AttemptEnded(attempt_id, EngineFinish.ABORT, fenced=True))

    def _report_drop(self, command: do.ReportDrop) -> None:
        self.dropped.add(str(command.group.prompt.data["uid"]))
        self._order("dropped", str(command.reason), command.why)
        self._retire(command.group)

    def _start_timer(self, command: do.StartTimer) -> None:
        def passed() -> None:
            if self.failed is None:
                self.post(ev.TimerFired(command.timer))

        asyncio.get_running_loop().call_later(command.seconds, passed)

    def _order(self, *order: object) -> None:
        self._orders.append(order)
        self._ordered.set()

    def _submit(self, command: do.Submit) -> None:
        attempt = command.attempt
        late = self.mailboxes.late.get(attempt.sample.id)
        if late is not None and late.offset == len(attempt.token_ids):
            del self.mailboxes.late[attempt.sample.id]
            self._pump.post(take(attempt, late, self.core.clock.current))
            return
        self._drop_late(attempt.sample.id)
        self.mailboxes.say(attempt.sample.id, Go(attempt.token_ids, attempt.sampling.max_tokens))

    def _verdict(self, group: Group, judgement: int) -> ev.Event:
        keep, error = False, None
        try:
            keep = self._differs(group) if self._accepts is None else self._accepts(str(group.prompt.data["uid"]))
        except Exception as raised:  # the user's; asked again, and then the group is dropped by its name
            error = describe(raised)
        return ev.GroupJudged(group=group.id, judgement=judgement, keep=keep, error=error)

    def _differs(self, group: Group) -> bool:
        """Whether its samples have different values of the filter's metric."""
        values = [self.scores[s.id][1] for s in group.samples]
        known = [v for v in values if v is not None and math.isfinite(v)]
        if len(known) < len(values):
            raise RolloutError(f"{self._filter_name} is not a number of every sample")
        return len(known) < 2 or min(known) < max(known)

    def _deliver(self, command: do.Deliver) -> None:
        batch = command.batch
        if self.core.step is None:
            self._end_what_runs_on()
        times = self._times.delivered(_now())
        log.info("batch %d: %s", batch.id, bottleneck(times, self.core.settings) or "it was there already")
        told = delivery(batch, times)
        self.last_batch = batch.id
        for uid in told.uids:
            self._retire(self.groups[uid])
        self._order("deliver", told)

    def _paused(self, command: do.Paused) -> None:
        self._end_what_runs_on()
        self._order("paused")

    def _end_what_runs_on(self) -> None:
        if self._runs_on:
            self._order("abort")
            self._runs_on = False

    def _drop_late(self, sample: SampleId) -> None:
        late = self.mailboxes.late.pop(sample, None)
        if late is not None and len(late.tokens):
            self._pump.post(ev.TokensUnused(len(late.tokens), DropReason.LATE))

    def _retire(self, group: Group) -> None:
        """A group was settled."""
        self.groups.pop(str(group.prompt.data["uid"]), None)
        for sample in group.samples:
            self._drop_late(sample.id)
            self.scores.pop(sample.id, None)
            self.mailboxes.settle(sample.id)


def _now() -> float:
    return asyncio.get_running_loop().time()
