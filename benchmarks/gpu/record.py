"""The report: one JSON that is written after every measurement, so that a run which is cut off keeps what it has."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NO_TIME = "no time was left"


class Deadline:
    """A share of the run's time, in seconds from now."""

    def __init__(self, seconds: float) -> None:
        self._ends = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Never negative."""
        return max(0.0, self._ends - time.monotonic())

    @property
    def over(self) -> bool:
        """Nothing more is to be begun."""
        return self.left_s == 0.0


class Record:
    """Args:
        directory: of the report; made if it is not there.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / "gpu.json"
        self.data: dict[str, Any] = {"finished": False, "shapes": {}, "errors": []}
        self._begun = time.monotonic()
        self.write()

    def write(self) -> None:
        """All of it, in one move: a reader never sees half a file."""
        self.data["elapsed_s"] = round(time.monotonic() - self._begun, 1)
        beside = self.path.with_suffix(".part")
        beside.write_text(json.dumps(self.data, indent=1) + "\n", "utf-8")
        os.replace(beside, self.path)

    @staticmethod
    def say(line: str) -> None:
        """What goes on, at once, wherever it is written to."""
        print(line, flush=True)

    def part(
        self, name: str, deadline: Deadline, into: dict[str, Any], key: str, work: Callable[[dict[str, Any]], None]
    ) -> None:
        """A part of the run, whose figures ``work`` puts into ``into[key]``.

        One that fails is written down with what it had, and the next begins; one for which no time is left is not
        begun.
        """
        figures = into[key] = {}
        if deadline.over:
            figures["skipped"] = NO_TIME
            self.say(f"{name}: {NO_TIME}")
            self.write()
            return
        began = time.monotonic()
        try:
            work(figures)
        except Exception as error:
            figures["error"] = f"{type(error).__name__}: {error}"
            self.data["errors"].append(f"{name}: {figures['error']}")
            self.say(self.data["errors"][-1])
        figures["seconds"] = round(time.monotonic() - began, 1)
        self.write()
