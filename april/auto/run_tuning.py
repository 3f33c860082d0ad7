"""Searches for better values of those settings of a run that are ``auto``, and applies them.

The search simulates the run in another process, so the run does not wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

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
"""Maximum number of seconds for an answer; after that the question is dropped, and the next question follows when it
is due."""


COMMAND = ("-m", "april.simulate.choose")


class Chooser(Protocol):
    """Finds better settings for a run."""

    async def ask(self, question: TuningQuestion) -> TuningAnswer:
        """Return the answer to a question; if this raises, the settings stay as they are."""

    def close(self) -> None:
        """Stop working on the current question."""


class RunTuning:
    """Changes the ``auto`` settings of a run.

    Args:
        core: core of the run.
        costs: (name, fitted cost) pairs of its engines, read anew for each question.
        post: function that passes an event to the core.
        chooser: object that answers the questions; None means a simulation in another process.
    """

    def __init__(
        self, core: RolloutCore, costs: Iterable[tuple[str, FittedCost]], post: Callable[[ev.Event], None],
        chooser: Chooser | None = None,
    ) -> None:  # fmt: skip
        self._core, self._costs, self._post = core, costs, post
        self._tuner = AutoTuner(core)
        self._chooser = chooser or ChooserProcess()
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
            question.check(answer)
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
        """Do the same as :meth:`close`, and wait until the process has ended."""
        task = self._task
        self.close()
        if task is not None:
            await asyncio.wait([task])


class ChooserProcess:
    """Starts a simulation process for each question, one at a time; the process ends with its answer."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._warned = False

    async def ask(self, question: TuningQuestion) -> TuningAnswer:
        """Return the answer. Raises RolloutError if the process failed, OSError if it could not be started.

        An event loop without support for subprocesses, such as a loop on virtual time, is blocked until the answer
        comes.
        """
        try:
            process = self._process = await asyncio.create_subprocess_exec(
                sys.executable, *COMMAND, stdin=PIPE, stdout=PIPE, stderr=PIPE
            )
        except NotImplementedError:
            if not self._warned:
                self._warned = True
                log.warning(
                    "auto: this event loop cannot wait for the process that searches for better settings, so it stops "
                    "during each search, for half a minute or more; in tests set values instead of auto"
                )
            return _ask_blocking(question)
        try:
            out, errors = await process.communicate(msgspec.json.encode(question))
        finally:
            self.close()
            if process.returncode is None:
                # close() has just killed the process; read its output to the end, so that the pipes close before the
                # event loop does
                await process.communicate()
        return _parse_answer(process.returncode, out, errors)

    def close(self) -> None:
        """Kill the process if it runs."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()


def _ask_blocking(question: TuningQuestion) -> TuningAnswer:
    command = (sys.executable, *COMMAND)
    done = subprocess.run(command, input=msgspec.json.encode(question), capture_output=True, check=False)  # noqa: S603
    return _parse_answer(done.returncode, done.stdout, done.stderr)


def _parse_answer(code: int | None, out: bytes, errors: bytes) -> TuningAnswer:
    if code:
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise RolloutError(f"the simulation has ended with {code}: {last[:300]}")
    return msgspec.json.decode(out, type=TuningAnswer)
