"""A run whose settings are ``auto``: questions are answered beside it, and it goes on meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from april.auto.auto_work import AutoWork, Decision
from april.auto.process import ChooserProcess
from april.auto.question import Answer, Question
from april.core import events as ev
from april.core.batch import Batch
from april.core.state import RolloutCore
from april.engines.simulated.fitted_cost import FittedCost

log = logging.getLogger("april")

PATIENCE_S = 1800.0
"""For an answer; then the question is given up, and the next one comes in its time."""


class Chooser(Protocol):
    """Answers questions."""

    async def ask(self, question: Question) -> Answer:
        """Whatever it raises leaves everything as it is."""

    def close(self) -> None:
        """No answer is wanted any more."""


class AutoRun:
    """Changes how much is in work.

    Args:
        core: some of whose settings are ``auto``.
        costs: of its engines.
        post: gives the core an event.
        chooser: None: the simulation, in a process of its own.
    """

    def __init__(
        self, core: RolloutCore, costs: Iterable[tuple[str, FittedCost]], post: Callable[[ev.Event], None],
        chooser: Chooser | None = None,
    ) -> None:  # fmt: skip
        self._core, self._costs, self._post = core, costs, post
        self._work = AutoWork(core)
        self._chooser = chooser or ChooserProcess()
        self._task: asyncio.Task[None] | None = None

    def delivered(self, batch: Batch) -> Batch:
        """The batch, with how much is in work among its metrics; a question is asked if it is time for one."""
        self._decided(self._work.delivered(batch))
        if self._task is None and self._work.asks:
            question = self._work.question(fitted for _, fitted in self._costs)
            if question is not None:
                self._task = asyncio.get_running_loop().create_task(self._ask(question))
        return replace(batch, metrics={**batch.metrics, **self._work.metrics()})

    async def _ask(self, question: Question) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                answer = await self._chooser.ask(question)
            question.check(answer)
        except Exception as error:
            why = str(error) or type(error).__name__
            log.warning("auto: %s stays, as nothing better could be looked for: %s", question.now, why)
            return
        finally:
            self._task = None
        self._decided(self._work.answered(question, answer))

    def _decided(self, decision: Decision | None) -> None:
        if decision is not None:
            log.info("auto: %s", decision.said)
            if decision.change is not None:
                self._post(decision.change)

    def close(self) -> None:
        """Nothing is asked any more."""
        if self._task is not None:
            self._task.cancel()
        self._chooser.close()

    async def closed(self) -> None:
        """Nothing is asked any more, and no process is left."""
        task = self._task
        self.close()
        if task is not None:
            await asyncio.wait([task])
