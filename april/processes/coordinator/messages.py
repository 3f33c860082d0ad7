"""Answers of the coordinator; plain, so that they travel between processes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from april.core.attachments import NO_EXTRAS, Extras
from april.core.tape import Float32, Int32
from april.core.types import DropReason

Span = tuple[int, int, int, int]
"""(start, end, incarnation, n): tokens [start, end) of a conversation, written by one version of the weights."""


@dataclass(frozen=True, slots=True)
class Start:
    """Run the rollout of this sample. ``life`` goes with everything that it says from now on."""

    life: int


@dataclass(frozen=True, slots=True)
class Go:
    """Send this to a server: ``token_ids`` int32 [T], for at most ``max_tokens`` more."""

    token_ids: Int32
    max_tokens: int
    extras_from: int = 0
    """The first row that is wanted with the tokens, where any are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The call is complete: its ``tokens`` int32 [k] and ``logprobs`` float32 [k], from however many requests.

    ``spans`` are those of the conversation so far; tokens that the policy did not write are in none. ``extras`` are
    the rows of the conversation so far, one for each token but its last.
    """

    tokens: Int32
    logprobs: Float32
    spans: tuple[Span, ...]
    resumes: int
    by_length: bool
    extras: Extras = field(default_factory=lambda: NO_EXTRAS)


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The sample goes on without this rollout, or not at all."""


@dataclass(frozen=True, slots=True)
class Settled:
    """The rollout's sample was delivered or dropped, and none takes its place."""

    dropped: bool = False
    """The sample alone was dropped; what is stored of it goes. What a whole group that was dropped has stored, goes
    with its prompt.
    """


Rollout = tuple[str, int]
"""(uid, i): rollout i of the n of a prompt. It runs sample i, and whichever takes the place of one that it has run."""
Message = Start | Go | Done | GivenUp | Settled


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A server's result for a request that was sent with ``offset`` tokens.

    ``label`` is the trainer's number of the weights (None: the server does not say). ``aborted``: it was cut off.
    ``incarnation``: of the weights, where the request is of an earlier process than the present one. ``unused``: so
    many tokens came besides, and why they are not among ``tokens``; counted on arrival.
    """

    offset: int
    tokens: Int32
    logprobs: Float32
    label: int | None
    aborted: bool
    incarnation: int | None = None
    unused: tuple[int, DropReason] | None = None
    stop_token_ids: tuple[int, ...] = ()
    """Stop tokens of the request: they end it, as EOS does."""
    ends_anywhere: bool = False
    """True if its last token says nothing: it had stop strings, say, or the server's own limit ended it."""
    extras: Extras = field(default_factory=lambda: NO_EXTRAS)
    """Rows of the conversation, from its first token on, or, where the coordinator has it, from ``Go.extras_from``."""

    def rows_from(self, start: int) -> Result:
        """The same without the rows before ``start``."""
        return replace(self, extras={name: rows[start:] for name, rows in self.extras.items()}) if start else self


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A batch of B samples."""

    batch: int
    rollouts: tuple[Rollout, ...]
    """The rollouts of its samples, group by group, oldest completion first."""
    settled: tuple[str, ...]
    """Prompts of which nothing is held any more since the last batch; its own, unless groups are delivered in parts."""
    metrics: dict[str, float]
    masked: dict[Rollout, Any]
    """Loss mask uint8 [T] over the conversation, where the core took the loss off a token."""
    rewards: Float32
    """float32 [B]"""
    baseline_rewards: NDArray[np.float64]
    """float64 [B, K], of what each baseline is made, NaN on the right (as ``april.group_advantages`` takes it)"""

    @property
    def uids(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(uid for uid, _ in self.rollouts))


Order = tuple[Any, ...]
"""An order for the trainer: ("draw", count), ("abort",), ("dropped", reason, why), ("deliver", Delivery), ("fail",
error), ("paused",) or ("closed",).
"""
