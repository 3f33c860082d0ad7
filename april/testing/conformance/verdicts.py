"""What a run of the suite says: one verdict per promise, and the report of one engine."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

Figures = dict[str, float | int | str]
"""Named numbers of a check, in the order in which they are shown."""


class Outcome(StrEnum):
    """What became of one promise."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_OFFERED = "not offered"
    """The engine says that it cannot; its sentence is in the verdict."""
    NOT_TESTED = "not tested"
    """The subject lacks the equipment; the verdict says which."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one check."""

    check: str
    promise: str
    outcome: Outcome
    detail: str = ""
    """What is wrong, not offered or missing; empty for a plain pass."""
    figures: Figures = {}
    wall_s: float = 0.0
    cpu_s: float = 0.0
    """CPU seconds of this process; a server's own are not in it."""

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
                          for name, value in self.figures.items())  # fmt: skip
        return ": ".join(filter(None, [self.check, str(self.outcome), self.detail])) + (f" ({shown})" if shown else "")


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All verdicts on one engine."""

    engine: str
    version: str = ""
    """Of the engine's software, as the subject says it."""
    capabilities: dict[str, str] = {}
    """What the engine says of itself, in words; the first block of the matrix."""
    notes: tuple[str, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    wall_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def failed(self) -> tuple[Verdict, ...]:
        """Verdicts that make the engine unfit."""
        return tuple(v for v in self.verdicts if v.outcome is Outcome.FAILED)

    def verdict(self, check: str) -> Verdict:
        """The verdict of one check by its name; KeyError if it was not run."""
        for verdict in self.verdicts:
            if verdict.check == check:
                return verdict
        raise KeyError(check)

    def json(self) -> bytes:
        """As JSON; :meth:`from_json` reads it back."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)

    @classmethod
    def from_json(cls, data: bytes | str) -> Report:
        """A report that was written by :meth:`json`."""
        return msgspec.json.decode(data, type=cls)

    def table(self) -> Any:
        """A ``rich`` table; needs the ``cli`` extra."""
        from rich.markup import escape
        from rich.table import Table

        colours = {Outcome.PASSED: "green", Outcome.FAILED: "bold red"}
        table = Table(title=escape(f"{self.engine} {self.version}".strip()), title_justify="left")
        for column in ("promise", "verdict", "figures"):
            table.add_column(column, overflow="fold")
        for v in self.verdicts:
            colour = colours.get(v.outcome, "yellow")
            figures = ", ".join(f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
                                for name, value in v.figures.items())  # fmt: skip
            said = "; ".join(filter(None, [v.detail, figures]))
            table.add_row(escape(v.check), f"[{colour}]{v.outcome}[/]", escape(said))
        return table
