"""Asks in a process of its own, and waits for the answer without holding up anything."""

from __future__ import annotations

import asyncio
import subprocess
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
        """The answer; raises RolloutError with what went wrong there, OSError if there can be no process.

        A loop that cannot wait for a process, as one on virtual time, stands still until the answer is there.
        """
        try:
            process = self._process = await asyncio.create_subprocess_exec(
                sys.executable, *COMMAND, stdin=PIPE, stdout=PIPE, stderr=PIPE
            )
        except NotImplementedError:
            return _ask_and_wait(question)
        try:
            said, wrong = await process.communicate(question.encode())
        finally:
            self.close()
            if process.returncode is None:  # killed; its pipes must not outlive the loop
                await process.communicate()
        return _answer(process.returncode, said, wrong)

    def close(self) -> None:
        """End it."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()


def _ask_and_wait(question: Question) -> Answer:
    command = (sys.executable, *COMMAND)
    done = subprocess.run(command, input=question.encode(), capture_output=True, check=False)  # noqa: S603
    return _answer(done.returncode, done.stdout, done.stderr)


def _answer(code: int | None, said: bytes, wrong: bytes) -> Answer:
    if code:
        last = wrong.decode(errors="replace").strip().rpartition("\n")[2]
        raise RolloutError(f"the simulation has ended with {code}: {last[:300]}")
    return Answer.decode(said)
