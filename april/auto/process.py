"""Asks in a process of its own, and waits for the answer without holding up anything."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress

from april.auto.question import Answer, Question
from april.errors import RolloutError

COMMAND = ("-m", "april.simulate.choose")


class ChooserProcess:
    """One question at a time; each has a process of its own, which ends with its answer."""

    def __init__(self) -> None:
        self._process: Process | None = None

    async def ask(self, question: Question) -> Answer:
        """The answer; raises RolloutError with what went wrong there, OSError if there can be no process."""
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable, *COMMAND, stdin=PIPE, stdout=PIPE, stderr=PIPE
        )
        try:
            said, wrong = await process.communicate(question.encode())
        finally:
            self.close()
            if process.returncode is None:  # killed; its pipes must not outlive the loop
                await process.communicate()
        if process.returncode:
            last = wrong.decode(errors="replace").strip().rpartition("\n")[2]
            raise RolloutError(f"the simulation has ended with {process.returncode}: {last[:300]}")
        return Answer.decode(said)

    def close(self) -> None:
        """End it."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
