"""The core run behind the coordinator: what has happened goes in, what it wants goes to whoever waits for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from april.auto.auto_run import AutoRun
from april.core import commands as do
from april.core import events as ev
from april.core.event_pump import EventPump, RequestLog
from april.core.run_times import RunTimes, bottleneck
from april.core.settings import CoreSettings, EngineLimits
from april.core.state import RolloutCore
from april.core.types import Prompt
from april.driver.limit import StepLimit
from april.driver.long_waits import WARN_AFTER_S, LongWaits
from april.driver.user_code import describe
from april.errors import RolloutError, SchedulerClosed
from april.processes.coordinator.asked_host import AskedHost
from april.processes.coordinator.messages import Order
from april.processes.coordinator.results import delivery
from april.record.standing import Waits

log = logging.getLogger("april")

SILENT_S = 1800.0
"""In which rollouts may say nothing, before a warning."""
IGNORED: tuple[type[do.Command], ...] = (
    do.ScoreGroup, do.EndOfData,
    do.PauseEngine, do.LoadEngine, do.ResumeEngine, do.HandOver, do.Restore, do.UpdateEnded, do.Warn,
    do.EvaluationDone, do.EvaluationFailed,
)  # fmt: skip
"""Commands that never come: the trainer updates its servers and evaluates by itself, and its data never end."""


class Execution:
    """See :class:`april.processes.coordinator.coordinator.Coordinator` for the arguments."""

    def __init__(
        self, settings: CoreSettings, limits: EngineLimits, filter_name: str, accepts: Callable[[str], bool] | None, *,
        check: bool,
    ) -> None:  # fmt: skip
        self.core = RolloutCore(settings, [limits], check=check)
        self.host = host = AskedHost(
            self.core, lambda event: self._pump.post(event), lambda: self._order("abort"), filter_name, accepts
        )
        self.dropped: set[str] = set()
        """Prompts that were given up, and whose rollouts have not all ended."""
        self.last_batch: int | None = None
        self.failed: BaseException | None = None
        self._orders: list[Order] = []
        self._ordered = asyncio.Event()
        requests = RequestLog(self.core, _now)
        self._limit = StepLimit(requests)
        self._auto = AutoRun(self.core, self._limit.costs, lambda event: self.post(event)) if settings.auto else None
        self._pump = EventPump(requests, {
            **host.executors,
            do.DrawPrompts: lambda c: self._order("draw", c.count),
            do.StartTimer: self._start_timer,
            do.ReportDrop: self._report_drop,
            do.Deliver: self._deliver,
            do.Paused: self._paused,
            do.Fail: lambda c: self._order("fail", c.error),
        }, ignored=IGNORED)  # fmt: skip
        self._times = RunTimes(self.core)
        # what a rollout has made is heard of at its end, and one whose worker has died says nothing
        silent_s = {Waits.RESPONSES: SILENT_S, Waits.FUNCTIONS: SILENT_S}
        self.long_waits = LongWaits(self.core, _now, WARN_AFTER_S, silent_s)

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
        """Nobody carries out orders any more: who waits for an answer, or asks for one, is told so."""
        if self._auto is not None:
            self._auto.close()
        self.long_waits.close()
        self._order("closed")
        self.host.mailboxes.stop(SchedulerClosed("the coordinator is closed: the run is over"))

    def draw(self, prompts: Sequence[Prompt]) -> None:
        """Prompts for an order to draw."""
        first = self.core.context.groups_drawn
        self.post(ev.PromptsDrawn(prompts, exhausted=False))
        self.host.know(range(first, first + len(prompts)))

    def post(self, event: ev.Event) -> None:
        """Anything else. Raises what ends the core with it, and RolloutError if it has ended before."""
        self.raise_if_failed()
        try:
            self._pump.post(event)
        except BaseException as error:
            self.failed = error
            self._ordered.set()
            self.host.mailboxes.stop(self._stopped(error))
            raise
        finally:
            self._times.look(_now())
            self.long_waits.look()

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

    def _report_drop(self, command: do.ReportDrop) -> None:
        self.dropped.add(str(command.group.prompt.data["uid"]))
        self._order("dropped", str(command.reason), command.why)
        self.host.retire(command.group)

    def _start_timer(self, command: do.StartTimer) -> None:
        def passed() -> None:
            if self.failed is None:
                self.post(ev.TimerFired(command.timer))

        asyncio.get_running_loop().call_later(command.seconds, passed)

    def _order(self, *order: object) -> None:
        self._orders.append(order)
        self._ordered.set()

    def _deliver(self, command: do.Deliver) -> None:
        batch = command.batch
        if self.core.step is None:
            self.host.end_what_runs_on()
        times = self._times.delivered(_now())
        log.info("batch %d: %s", batch.id, bottleneck(times, self.core.settings) or "it was there already")
        metrics = {**batch.metrics, **times}
        batch = replace(batch, metrics=metrics | self._limit.metrics(metrics, self._times.places))
        if self._auto is not None:
            batch = self._auto.delivered(batch)
        rollouts, settled = self.host.delivered(batch)
        self.last_batch = batch.id
        self._order("deliver", delivery(batch, rollouts, settled))

    def _paused(self, command: do.Paused) -> None:
        self.host.end_what_runs_on()
        self._order("paused")


def _now() -> float:
    return asyncio.get_running_loop().time()
