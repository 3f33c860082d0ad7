"""The engine under test, and the equipment that some promises need to be tested."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from april.core.versions import FIRST_VERSION, PolicyVersion
from april.engines.protocol import Engine, Float32, Request

Reference = Callable[[list[int], list[int]], Float32]
"""(prompt ids, response ids [T]) -> logits float32 [T, V] at the positions that predict the response, of a full forward
pass in fp32. The suite computes from it what the engine's declared kind of log-probability must be."""


class Answer(Protocol):
    """What was sent for one request."""

    @property
    def tokens(self) -> Sequence[int]:
        """In order."""
        ...

    @property
    def closed_early(self) -> bool:
        """Whether the client hung up before the answer was complete."""
        ...


class Witness(Protocol):
    """Who saw what left the server, independently of the engine's client: :class:`~april.testing.RecordingProxy`."""

    def answers(self, request: Request) -> Sequence[Answer]:
        """Answers to this request; if requests have no names on the wire, to all that look the same there."""
        ...


@dataclass(frozen=True, slots=True)
class Weights:
    """One set of weights. ``path`` None: there is no directory that the engine could load."""

    path: str | None = None
    reference: Reference | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What the suite is run on. Everything but ``open`` is optional; what is missing leaves promises ``not tested``.

    The server, if there is one, is the suite's alone while it runs: it is paused, gets weights, and is asked whether
    anything runs on it.
    """

    open: Callable[[], Awaitable[Engine]]
    """A new engine object, on the running loop; the suite closes it."""
    name: str = ""
    """Column of the matrix; default: the engine's name."""
    version: str = ""
    """Of the engine's software."""
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
    first_version: PolicyVersion = FIRST_VERSION
    """The version that a new engine object puts on its tokens."""
    tolerance: float = 1e-4
    """Largest difference of log-probabilities to the reference, in nats."""
    tokenizer: Any = None
    """With ``decode``, for stop strings."""
    wire: Witness | None = None
    """Between engine and server."""
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
