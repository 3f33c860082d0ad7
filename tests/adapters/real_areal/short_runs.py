"""Trainings of the unmodified package, each a process group of its own, which is ended with all that it started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny_areal

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]


@dataclass
class Seen:
    """What :mod:`one_training` saw, and what it wrote."""

    output: str
    steps: list[dict[str, Any]]
    server: dict[str, Any]
    drawn: int
    """Batches that were taken from the data."""
    ledgers: dict[str, dict[str, Any]]

    @property
    def prompts(self) -> list[int]:
        return [prompt for step in self.steps for prompt in step["prompts"]]

    def total(self, name: str) -> int:
        """Over all steps."""
        return sum(step[name] for step in self.steps)

    def largest(self, name: str) -> float:
        """Over all steps."""
        return max(float(step[name]) for step in self.steps)

    def check_books(self) -> None:
        """The ledger closes, and is what the trainer saw; no weights came while the server worked."""
        prompts, tokens = self.ledgers["prompts"], self.ledgers["tokens"]
        assert balanced(prompts)
        assert balanced(tokens)
        assert prompts["delivered"] == len(self.prompts)
        assert tokens["delivered"] == self.total("tokens")
        assert len(set(self.prompts)) == len(self.prompts)
        assert self.server["violations"] == []

    def report(self, name: str) -> None:
        rows = [span for step in self.steps for span in step["spans"]]
        print(
            f"\n{name}: {len(self.steps)} optimizer steps, {self.server['aborted']} requests cut, "
            f"{sum(span > 1 for span in rows)} responses of several weights among {len(rows)} trained, up to "
            f"{max(rows)} in a row; {self.total('older')} of {self.total('tokens')} tokens of older weights; "
            f"log-probabilities differ from those of their own weights by at most {self.largest('own'):.1e} (of the "
            f"next ones: {self.largest('other'):.1e}), from the trainer's by {self.largest('present'):.1e} where those "
            f"are present (older: {self.largest('trainer_older'):.1e})"
        )


@contextmanager
def group(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process group, which is ended with all that it started: AReaL's servers and pools of processes outlive it."""
    process = subprocess.Popen(command, start_new_session=True, **options)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(directory: Path, *words: str) -> Seen:
    """A process with these words on its command line; an earlier one's checkpoint in ``directory`` is gone on from."""
    command = [sys.executable, str(HERE / "one_training.py"), str(directory), *words]
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(HERE))), "OMP_NUM_THREADS": "1"}
    log = directory / "log"
    with log.open("w") as file, group(command, cwd=directory, env=env, stdout=file, stderr=file) as process:
        status = process.wait(300)
    output = log.read_text(errors="replace")
    assert status == 0, output[-6000:]
    (found,) = [line for line in output.splitlines() if line.startswith("SEEN ")]
    return Seen(output, **json.loads(found.removeprefix("SEEN ")))


def balanced(book: dict[str, Any]) -> bool:
    """Everything that came in is somewhere."""
    return bool(book["observed"] == book["delivered"] + book["held"] + sum(book["dropped"].values()))


def gaps(prompts: list[int], drawn: int) -> set[int]:
    """Of the prompts that were drawn, those that were never trained."""
    return set(range(drawn * tiny_areal.GROUPS)) - set(prompts)
