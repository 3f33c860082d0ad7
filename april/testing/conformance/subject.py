"""The engine under test with its equipment, which goes into the suite; verdicts and a report, which come out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from april.core.attachments import Placed
from april.core.versions import FIRST_VERSION, PolicyVersion
from april.engines.protocol import Engine, Float32, Request


class Broken(Exception):
    """The promise is broken; the message says how."""


class NotOffered(Exception):
    """The engine declares that it does not promise this."""


class NotTested(Exception):
    """The equipment to test this is not there."""


Reference = Callable[[list[int], list[int]], Float32]
"""(prompt ids, response ids [T]) -> logits float32 [T, V] at the positions that predict the response, of a full forward
pass in fp32. The suite computes from it what the engine's declared kind of log-probability must be."""


class Answer(Protocol):
    """The answer that was sent for one request."""

    @property
    def tokens(self) -> Sequence[int]:
        """In order."""
        ...

    @property
    def closed_early(self) -> bool:
        """True if the client hung up before the answer was complete."""
        ...


class Witness(Protocol):
    """A witness of what left the server, independent of the engine's client: :class:`~april.testing.RecordingProxy`."""

    def answers(self, request: Request) -> Sequence[Answer]:
        """Answers to this request; if requests have no names on the wire, to all that look the same there."""
        ...


Seen = Callable[[Request, list[int]], Float32]
"""The same of a request with attachments, which stand in its tokens: (request, response ids [T]) -> logits [T, V]."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A set of weights. ``path`` None means that there is no directory that the engine could load."""

    path: str | None = None
    reference: Reference | None = None
    seen: Seen | None = None


@dataclass(frozen=True, slots=True)
class Shown:
    """A prompt and what is attached to it, at its places among the tokens."""

    token_ids: Sequence[int]
    attached: Sequence[Placed]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The engine under test. Everything but ``open`` is optional; what is missing leaves promises ``not tested``.

    The server, if there is one, is the suite's alone while it runs: it is paused, gets weights, and is asked whether
    anything runs on it.
    """

    open: Callable[[], Awaitable[Engine]]
    """A new engine object, on the running loop; the suite closes it."""
    name: str = ""
    """Column of the matrix; default: the engine's name."""
    version: str = ""
    """Version of the engine's software."""
    prompts: Sequence[Sequence[int]] = ((5, 6, 7, 8), (9, 10, 11), (12, 13, 14, 15, 16))
    """Token ids that the model knows; no end-of-text among them."""
    ending_prompts: Sequence[Sequence[int]] = ()
    """Prompts whose responses soon end by themselves; default: ``prompts``, and some patience."""
    long_tokens: int = 300
    """Tokens of a response that runs long enough to be caught in the middle; with its prompt within the context."""
    greedy_repeats: bool = True
    """Greedy decoding gives the same tokens whatever runs beside it, as in fp32; else such promises are not tested."""
    now: Weights = Weights()
    """The weights that the engine has when it is opened; the suite leaves it with them."""
    other: Weights | None = None
    """Others, to be loaded from disk and back."""
    shown: Sequence[Shown] = ()
    """Prompts with attachments, two or more; the first two have the same tokens and other attachments."""
    adapters: Sequence[Weights] = ()
    """Two adapters (LoRA) for ``now``: directories, and the model with each of them as reference."""
    first_version: PolicyVersion = FIRST_VERSION
    """The version that a new engine object puts on its tokens."""
    tolerance: float = 1e-4
    """Largest difference of log-probabilities to the reference, in nats."""
    tokenizer: Any = None
    """With ``decode``, for stop strings."""
    wire: Witness | None = None
    """The witness between engine and server."""
    made: Callable[[], Awaitable[float]] | None = None
    """Tokens that the server has generated since its start, by its own count."""
    second: Callable[[], Awaitable[Engine]] | None = None
    """Another engine with the same weights, for the failover."""
    kill: Callable[[], Awaitable[None]] | None = None
    """Kills the server; the last check uses it."""
    in_flight: int = 80
    """Requests at the same time in the checks with many; the bursts have 300."""
    aborts: int = 1000
    """Aborted requests in the count of lost tokens."""
    gives_up: Mapping[str, str] = field(default_factory=dict)
    """Promises that the engine's own documentation gives up: name of the check -> the sentence that says why."""
    patience_s: float = 60.0
    """Longest wait for anything to happen; an engine that hangs fails after it."""


Figures = dict[str, float | int | str]
"""Named numbers of a check, in the order in which they are shown."""


class Outcome(StrEnum):
    """The outcome of one promise."""

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
    """The reason, where it is broken, not offered or not tested."""
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
    """Version of the engine's software, as the subject says it."""
    capabilities: dict[str, str] = {}
    """The engine's capabilities in words; the first block of the matrix."""
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
