"""Input of the conformance suite (engine under test, reference models, prompts), and its output (verdicts, reports)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from april.core.attachments import Placed
from april.engines.protocol import AbortMeans, Engine, EngineFinish, Float32, Int32, Request


class Broken(Exception):
    """Raised if the engine breaks a promise; the message says how."""


class NotOffered(Exception):
    """Raised if the engine declares that it does not make this promise."""


class NotTested(Exception):
    """Raised if a check cannot be made: the subject lacks something for it, or requests ended too early."""


Reference = Callable[[list[int], list[int]], Float32]
"""Function (prompt ids, response ids [T]) -> logits float32 [T, V] at the positions that predict the response, from
a full forward pass in fp32. The suite converts the logits to log-probabilities of the kind that the engine declares."""


Seen = Callable[[Request, list[int]], Float32]
"""Function (request with attachments, response ids [T]) -> logits [T, V], otherwise like :data:`Reference`."""


ClientTokens = tuple[Request, Int32, EngineFinish | None]
"""A request, the tokens that the client received for it, and how the request ended (None if it has not)."""
Figures = dict[str, float | int | str]
"""Named numbers of a check, in the order in which they are shown."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A set of model weights, with functions that compute reference logits under these weights."""

    path: str | None = None
    """Directory from which the weights can be loaded, if any."""
    reference: Reference | None = None
    seen: Seen | None = None


@dataclass(frozen=True, slots=True)
class Shown:
    """A prompt with attachments and their positions in its tokens."""

    token_ids: Sequence[int]
    attached: Sequence[Placed]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The engine under test, and optional things that some checks need; without these, a check is ``not tested``.

    The suite must be the only user of the engine's server, because it pauses the server and loads other weights.
    """

    open: Callable[[], Awaitable[Engine]]
    """Function that returns a new engine object on the running loop; the suite closes it."""
    name: str = ""
    """Name of the engine in the report."""
    version: str = ""
    """Version of the engine's software."""
    prompts: Sequence[Sequence[int]] = ((5, 6, 7, 8), (9, 10, 11), (12, 13, 14, 15, 16))
    """Prompts as token ids in the model's vocabulary, without EOS."""
    ending_prompts: Sequence[Sequence[int]] = ()
    """Prompts whose responses soon end in EOS; if empty, ``prompts`` are used, which may take longer."""
    long_tokens: int = 300
    """Number of tokens of a response that is long enough to be aborted midway; it must fit into the context."""
    greedy_repeats: bool = True
    """Whether greedy decoding gives the same tokens in any batch, as in fp32; if not, some checks are not tested."""
    now: Weights = Weights()
    """Weights of the engine when it is opened; the suite restores them at the end."""
    other: Weights | None = None
    """Other weights, which the suite loads from disk for some checks."""
    shown: Sequence[Shown] = ()
    """Two or more prompts with attachments; the first two have equal tokens, but different attachments."""
    adapters: Sequence[Weights] = ()
    """Two LoRA adapters for ``now``; their ``reference`` computes the logits of the model with the adapter."""
    tolerance: float = 1e-4
    """Largest difference of log-probabilities from the reference, in nats."""
    compare_with_wire: Callable[[Sequence[ClientTokens], AbortMeans], Figures] | None = None
    """Function that compares the clients' tokens with those that a recorder between engine and server has seen, and
    raises :class:`Broken` if tokens were lost."""
    kill: Callable[[], Awaitable[None]] | None = None
    """Function that kills the server; the last check uses it."""
    in_flight: int = 80
    """Number of concurrent requests in the check ``cut_and_resume``."""
    aborts: int = 1000
    """Number of requests that are aborted in the check ``thousand_aborts``."""
    gives_up: Mapping[str, str] = field(default_factory=dict)
    """Reason for each promise that the engine's documentation excludes, by the name of the check."""
    patience_s: float = 60.0
    """Longest wait for a single event, in seconds; an engine that takes longer fails the check."""


class Outcome(StrEnum):
    """Outcome of a check."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_OFFERED = "not offered"
    """The engine declares that it lacks the ability; the verdict quotes its reason."""
    NOT_TESTED = "not tested"
    """The check could not be made; the verdict says what is missing."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one check, with its details."""

    check: str
    promise: str
    outcome: Outcome
    detail: str = ""
    """Reason if the promise is broken, not offered or not tested."""
    figures: Figures = {}
    wall_s: float = 0.0

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
                          for name, value in self.figures.items())  # fmt: skip
        return ": ".join(filter(None, [self.check, str(self.outcome), self.detail])) + (f" ({shown})" if shown else "")


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All verdicts on one engine."""

    engine: str
    version: str = ""
    """Version of the engine's software, as given in the subject."""
    verdicts: tuple[Verdict, ...] = ()

    @property
    def failed(self) -> tuple[Verdict, ...]:
        """Verdicts of failed checks; an engine with a failed check is unfit."""
        return tuple(v for v in self.verdicts if v.outcome is Outcome.FAILED)

    def verdict(self, check: str) -> Verdict:
        """Return the verdict of the check with this name; raises KeyError if the check was not run."""
        for verdict in self.verdicts:
            if verdict.check == check:
                return verdict
        raise KeyError(check)

