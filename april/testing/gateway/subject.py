"""A gateway under test: how a session begins, how trouble is made behind it, what would be trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, ClassVar, Self

import numpy as np

from april.core.tape import Float32
from april.testing.conformance.subject import Broken as Broken
from april.testing.conformance.subject import NotOffered as NotOffered


@dataclass(frozen=True, slots=True)
class Door:
    """The address of a session, up to and with ``/v1``, its key, and the subject's own name for it."""

    base_url: str
    api_key: str
    id: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A sequence of tokens that would be trained.

    ``versions`` are those of the weights by token, None where the gateway does not know; ``mask`` is 1 for what the
    policy has written. Rows with the same ``sample`` share one reward.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    mask: Sequence[int]
    versions: Sequence[Any] | None = None
    sample: Any = None
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """A session that has ended: its rows, and by reason the number of generated tokens that are in none."""

    rows: Sequence[Row]
    dropped: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A request in the engine's own record: the tokens it was given, and what it has handed over for them."""

    context: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[Any]


class Subject:
    """A gateway with the scripted model behind it; one object serves one promise.

    Override what it can do: everything but ``open`` is optional, and what is missing is ``not offered``. An async
    context manager: it is ready inside.
    """

    name: ClassVar[str] = ""
    version: ClassVar[str] = ""
    dialects: ClassVar[Sequence[str]] = ("chat",)
    """Those it speaks: chat, text, messages, responses; one that has messages first."""
    keep_alive_s: ClassVar[float | None] = None
    """The longest silence of an answer that takes long; None means that it promises none."""
    patience_s: ClassVar[float] = 20.0
    """The longest wait for anything to happen."""
    outage_s: ClassVar[float] = 0.0
    """How long the engine refuses: beyond the first refusal, which is enough where nothing is timed."""
    tools: ClassVar[bool] = True
    """Whether clients may bring tools."""
    tolerance: ClassVar[float] = 1e-5
    """The largest difference, in nats, between a log-probability and the same computed again."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the gateway and the engine behind it."""

    # ---------------------------------------------------------------- sessions

    async def open(self, max_tokens: int | None = None) -> Door:
        """A new session; ``max_tokens`` bounds its answers, where that is the trainer's to say and not the client's."""
        raise NotImplementedError

    async def end(self, door: Door, reward: float = 1.0) -> Ended:
        """The session is over; returns what would be trained of it."""
        raise NotOffered("it does not say what would be trained")

    async def fail(self, door: Door) -> None:
        """Nothing of the session can be answered any more, also of what runs."""
        raise NotOffered("no way to fail what runs was given")

    # ---------------------------------------------------------------- the engine behind it

    async def record(self, door: Door) -> Sequence[Attempt]:
        """The engine's own record of a session's requests, in order."""
        raise NotOffered("there is no record of the engine's")

    def recompute(self, row: Row) -> Float32:
        """The log-probabilities of a row's tokens, each under the weights of its version; any for others."""
        raise NotOffered("log-probabilities cannot be computed again")

    async def hold(self) -> None:
        """From now on no answer to ``#long`` goes further than its first tokens."""
        raise NotOffered("its engine cannot be held in the middle of an answer")

    async def held(self) -> int:
        """Requests that stand still after their first tokens."""
        raise NotOffered("its engine cannot be held in the middle of an answer")

    async def release(self) -> None:
        """Undo :meth:`hold`."""
        raise NotOffered("its engine cannot be held in the middle of an answer")

    async def abort(self) -> None:
        """The engine ends all running requests, with what they have, as for a weight update."""
        raise NotOffered("no way to abort requests behind it was given")

    async def unavailable(self) -> None:
        """The engine refuses everything, as a paused server (503)."""
        raise NotOffered("no way to make the engine refuse was given")

    async def refused(self) -> int:
        """Requests that the engine has refused so far."""
        raise NotOffered("no way to make the engine refuse was given")

    async def available(self) -> None:
        """Undo :meth:`unavailable`."""
        raise NotOffered("no way to make the engine refuse was given")

    async def kill(self) -> None:
        """The engine dies under its running requests; it, or another, is there again soon."""
        raise NotOffered("no way to kill the engine was given")

    async def update(self) -> None:
        """The engine gets new weights; what runs goes on under them."""
        raise NotOffered("no way to update weights was given")

    async def restart(self, door: Door) -> Door:
        """The gateway ends, its clients' connections with it, and begins again with what it had saved; returns the
        session's address then.
        """
        raise NotOffered("it cannot be restarted")


def farthest(found: Sequence[float], computed: Float32) -> float:
    """The largest difference between log-probabilities and those computed, float32 [T]; infinite beside no number."""
    differences = np.abs(np.asarray(found, np.float32) - computed)
    return float(differences.max(initial=0.0)) if np.isfinite(differences).all() else float("inf")
