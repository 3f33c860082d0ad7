"""Searches for better values of a run's ``auto`` settings, and applies them to the run.

The search simulates the run in another process, so the run does not wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

import msgspec

from april.auto.question import TuningAnswer, TuningQuestion
from april.auto.tuner import AutoTuner, Decision
from april.core import events as ev
from april.core.batch import Batch
from april.core.rollout_core import RolloutCore
from april.engines.simulated.fitted_cost import FittedCost
from april.errors import RolloutError

log = logging.getLogger("april")

ANSWER_TIMEOUT_S = 1800.0
"""Seconds after which a question without an answer is dropped; the next question is asked when it is due."""


class RunTuning:
    """Changes the ``auto`` settings of a run.

    Args:
        core: core of the run.
        costs: (name, fitted cost) pairs of the run's engines; iterated again for each question.
        post: function that passes an event to the core.
    """

    def __init__(
        self, core: RolloutCore, costs: Iterable[tuple[str, FittedCost]], post: Callable[[ev.Event], None]
    ) -> None:
        self._core, self._costs, self._post = core, costs, post
        self._tuner = AutoTuner(core)
        self._chooser = ChooserProcess()
        self._task: asyncio.Task[None] | None = None

    def add_batch(self, batch: Batch) -> Batch:
        """Return a delivered batch with the ``auto`` settings added to its metrics; start a search if one is due."""
        self._apply(self._tuner.add_batch(batch))
        if self._task is None and self._tuner.question_due:
            question = self._tuner.question(fitted for _, fitted in self._costs)
            if question is not None:
                self._task = asyncio.get_running_loop().create_task(self._ask(question))
        return replace(batch, metrics={**batch.metrics, **self._tuner.metrics()})

    async def _ask(self, question: TuningQuestion) -> None:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                answer = await self._chooser.ask(question)
        except Exception as error:
            why = str(error) or type(error).__name__
            log.warning("auto: %s stays, because the search for a better setting failed: %s", question.now, why)
            return
        finally:
            self._task = None
        self._apply(self._tuner.decide(question, answer))

    def _apply(self, decision: Decision | None) -> None:
        if decision is not None:
            log.info("auto: %s", decision.text)
            if decision.change is not None:
                self._post(decision.change)

    def close(self) -> None:
        """Stop asking and kill the process."""
        if self._task is not None:
            self._task.cancel()
        self._chooser.close()

    async def aclose(self) -> None:
        """Stop asking, kill the process, and wait until it has ended."""
        task = self._task
        self.close()
        if task is not None:
            await asyncio.wait([task])


class ChooserProcess:
    """Starts a simulation process for each question, one at a time; the process ends with its answer."""

    def __init__(self) -> None:
        self._process: Process | None = None

    async def ask(self, question: TuningQuestion) -> TuningAnswer:
        """Start a simulation process for the question, and return its answer.

        Raises:
            RolloutError: the process failed.
            OSError: the process could not be started.
            NotImplementedError: the event loop cannot start processes, such as a loop on virtual time.
        """
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "april.simulate.choose", stdin=PIPE, stdout=PIPE, stderr=PIPE
        )
        try:
            out, errors = await process.communicate(msgspec.json.encode(question))
        finally:
            self.close()
            if process.returncode is None:
                # close() has just killed the process; read its output to the end, so that the pipes close before the
                # event loop does
                await process.communicate()
        if process.returncode:
            last = errors.decode(errors="replace").strip().rpartition("\n")[2]
            raise RolloutError(f"the simulation has ended with {process.returncode}: {last[:300]}")
        return msgspec.json.decode(out, type=TuningAnswer)

    def close(self) -> None:
        """Kill the process if it runs."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
