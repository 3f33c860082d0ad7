"""Records tokens with their log-probabilities and policy versions, in packed arrays called tapes.

A ``TokenTape`` holds the response of one chain (conversation); an ``AttemptTape`` collects the tokens of one attempt
(engine request) while it runs. Extras are further arrays that an engine returns, with one row per token (see
:mod:`april.core.attachments`).

Invariants of a ``TokenTape``: ``len(tokens) == len(logprobs) == sum(segment.count)``, segments are contiguous from 0,
and the versions of generated segments never decrease.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from april.core.attachments import NO_EXTRAS, Extras, first_rows, rows_of
from april.core.versions import PolicyVersion

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]

NO_TOKENS: Int32 = np.empty(0, np.int32)
NO_LOGPROBS: Float32 = np.empty(0, np.float32)


class SegmentKind(StrEnum):
    """Origins of a segment's tokens."""

    GENERATED = "generated"
    """The policy sampled the tokens; they carry loss."""
    ENVIRONMENT = "environment"
    """A tool or an environment wrote the tokens; they carry no loss and have log-probability 0."""


# a module-level name, as an enum member costs 60 ns per use on Python 3.11 and this one is used at every event
GENERATED = SegmentKind.GENERATED


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, start + count) of a response, from one attempt and one policy version or from the environment."""

    start: int
    count: int
    version: PolicyVersion
    kind: SegmentKind
    attempt_id: str
    engine: str
    temperature: float
    over: PolicyVersion | None = None
    """Version of the oldest KV-cache entries from which the tokens were sampled, if the cache was kept through a weight
    update; None if all entries are of the segment's own version."""
    constrained: bool = False
    """True if a grammar decided which tokens could be sampled. The log-probabilities are then of the kind ``processed``
    (only allowed tokens have a probability above 0), whatever kind the engine returns otherwise."""


def versions_of(segments: Sequence[Segment]) -> Int32:
    """Return the policy version of each token as int32 [T, 2]: (number of restarts, number of weight updates)."""
    if not segments:
        return np.empty((0, 2), np.int32)
    return np.repeat(np.array([s.version for s in segments], np.int32), [s.count for s in segments], axis=0)


class AttemptCounts(NamedTuple):
    """Counts the tokens of an attempt; events carry these counts, and the tokens themselves stay on the tape."""

    spans: tuple[tuple[PolicyVersion, int], ...] = ()
    """Versions of the tokens that belong to the response, run-length encoded as (version, count)."""
    ends: bool = False
    """True if the last of these tokens ends the response: EOS, a stop token, or the end of a stop string."""
    after_stop: int = 0
    """Number of tokens after a stop string, to be dropped."""
    unknown: int = 0
    """Number of last tokens whose version the engine never named, to be dropped."""
    bare: int = 0
    """Number of tokens without the requested extras, to be dropped."""
    cached: int | None = None
    """Number of input tokens that the engine found in its cache; None if it does not say."""

    @property
    def tokens(self) -> int:
        """Number of tokens that belong to the response."""
        spans = self.spans
        return spans[0][1] if len(spans) == 1 else sum([count for _, count in spans])


NO_COUNTS = AttemptCounts()
UNPACKED_CHUNKS = 48
"""Number of chunks above which an attempt's chunks are packed into one array; every 256 tokens allow one more chunk."""


def _joined(chunks: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return the chunks as one read-only array over a ``bytes`` object, so that saved states can share it uncopied."""
    return np.frombuffer(content_of(chunks), chunks[0].dtype)


def content_of(arrays: Iterable[NDArray[Any]]) -> bytes:
    """Return the bytes of contiguous arrays, one after the other."""
    return b"".join(arrays)  # type: ignore[arg-type]  # arrays are buffers


def first_of(spans: Sequence[tuple[PolicyVersion, int]], count: int) -> list[tuple[PolicyVersion, int]]:
    """Return the run-length versions of the first ``count`` tokens."""
    first = []
    for version, tokens in spans:
        if count > 0:
            first.append((version, min(tokens, count)))
        count -= tokens
    return first


@dataclass(slots=True, eq=False, repr=False)
class AttemptTape:
    """Collects the chunks of one attempt as they arrive; packs them now and then, as small arrays waste memory."""

    _tokens: list[Int32] = field(default_factory=list)
    _logprobs: list[Float32] = field(default_factory=list)
    spans: list[tuple[PolicyVersion, int]] = field(default_factory=list)
    """Versions of the tokens, run-length encoded as (version, count)."""
    count: int = 0
    """Number of tokens that belong to the response."""
    stopped: bool = False
    """True if the last token completes a stop string, so that no further token may be appended."""
    after_stop: int = 0
    """Number of tokens that arrived after the stop string, to be dropped."""
    unsure: int = 0
    """Number of last tokens whose version is only a guess; the engine names it when the request ends."""
    unknown: int = 0
    """Number of tokens that were removed because the engine never named their version."""
    needs_rows: bool = False
    """True if extras were requested; if the engine then returns none, the tokens are removed when the request ends."""
    extras: Extras = NO_EXTRAS
    """One row per token: first for the earlier tokens of the conversation whose rows were still missing, then for the
    ``count`` tokens of this attempt."""
    bare: int = 0
    """Number of tokens that were removed for lack of extras."""
    cached: int | None = None
    """Number of the request's input tokens that the engine found in its cache; None if it has not said so."""

    @property
    def parsed(self) -> int:
        """Number of all tokens received."""
        return self.count + self.after_stop + self.unknown + self.bare

    @property
    def last_token(self) -> int:
        """The last appended token; there must be one."""
        return int(self._tokens[-1][-1])

    def append(self, tokens: Int32, logprobs: Float32, version: PolicyVersion, *, sure: bool = True) -> None:
        """Append a checked chunk: tokens (int32) sampled under ``version``, with as many log-probabilities (float32).

        After a chunk whose version is not ``sure``, the versions of all later chunks are unsure, too.
        """
        count = len(tokens)
        if count == 0:
            return
        chunks, spans = self._tokens, self.spans
        chunks.append(tokens)
        self._logprobs.append(logprobs)
        if spans and (last := spans[-1])[0] == version:
            spans[-1] = (version, last[1] + count)
            if len(chunks) > UNPACKED_CHUNKS + self.count // 256:  # each array takes 160 bytes more than its tokens
                packed_tokens, packed_logprobs, _ = self.packed()
                self._tokens, self._logprobs = [packed_tokens], [packed_logprobs]
        else:
            spans.append((version, count))
        self.count += count
        if self.unsure or not sure:
            self.unsure += count

    def set_versions(self, spans: Sequence[tuple[PolicyVersion, int]]) -> None:
        """Set the versions of all tokens to those that the engine named; versions beyond the last token are ignored."""
        self.spans, self.unsure = first_of(spans, self.count), 0

    def set_extras(self, extras: Extras, missing: int) -> None:
        """Store the first ``missing`` rows, which belong to earlier tokens, and one row per token of the attempt.

        Rows of tokens after a stop string are left out.
        """
        self.extras = first_rows(extras, missing + self.count)

    def drop_unnamed(self) -> None:
        """Remove the tokens whose version the engine has not named; without the requested extras, remove all."""
        if self.needs_rows and not self.extras:
            self.bare = self.parsed
            self._tokens, self._logprobs, self.spans, self.count, self.stopped = [], [], [], 0, False
            self.unsure = self.after_stop = self.unknown = 0
        if not self.unsure:
            return
        (tokens, logprobs, spans), kept = self.packed(), self.count - self.unsure
        self._tokens, self._logprobs = ([tokens[:kept]], [logprobs[:kept]]) if kept else ([], [])
        self.unknown += self.unsure + self.after_stop
        self.extras = first_rows(self.extras, rows_of(self.extras) - self.unsure)
        self.spans, self.count, self.stopped = first_of(spans, kept), kept, False
        self.unsure = self.after_stop = 0

    def sure(self) -> AttemptTape:
        """Return a copy without the tokens that still lack extras or a sure version; the tape itself if none does."""
        if not (self.unsure or (self.needs_rows and not self.extras)):
            return self
        copy = replace(self)
        copy.drop_unnamed()
        return copy

    def packed(self) -> tuple[Int32, Float32, list[tuple[PolicyVersion, int]]]:
        """Return everything so far as (tokens [T], logprobs [T], [(version, count)])."""
        if len(self._tokens) == 1:
            return self._tokens[0], self._logprobs[0], self.spans
        if not self._tokens:
            return NO_TOKENS, NO_LOGPROBS, []
        return _joined(self._tokens), _joined(self._logprobs), self.spans

    @property
    def chunks(self) -> tuple[list[Int32], list[Float32]]:
        """Tokens and log-probabilities as they are stored, each as a list of arrays."""
        return self._tokens, self._logprobs

    @classmethod
    def of_frozen(
        cls, tokens: list[Int32], logprobs: list[Float32], spans: list[tuple[PolicyVersion, int]], count: int,
        *others: Any,
    ) -> AttemptTape:  # fmt: skip
        """Make a tape from what :data:`frozen_fields` returned, without tokens that the original got since then.

        Both tapes share their lists. The original only appends to these lists or replaces them by new ones, so the
        first ``count`` tokens in them do not change.
        """
        chunks = _first_chunks(tokens, count), _first_chunks(logprobs, count)
        return cls(chunks[0], chunks[1], first_of(spans, count), count, *others)


frozen_fields = attrgetter(*AttemptTape.__dataclass_fields__)
"""Takes a snapshot of an attempt's tape in constant time, as arguments of :meth:`AttemptTape.of_frozen`."""


def _first_chunks(chunks: list[NDArray[Any]], count: int) -> list[NDArray[Any]]:
    first = []
    for chunk in chunks:
        if count <= 0:
            break
        first.append(chunk)
        count -= len(chunk)
    return first


@dataclass(slots=True, eq=False, repr=False)
class TokenTape:
    """Holds the response of one chain: tokens int32 [T], logprobs float32 [T], and segments."""

    tokens: Int32 = field(default_factory=lambda: NO_TOKENS)
    logprobs: Float32 = field(default_factory=lambda: NO_LOGPROBS)
    segments: list[Segment] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def generated(self) -> int:
        """Number of tokens sampled by the policy (without environment tokens)."""
        return sum([s.count for s in self.segments if s.kind is GENERATED])

    @property
    def oldest_version(self) -> PolicyVersion | None:
        """Version of the oldest generated token; None without generated tokens."""
        for segment in self.segments:
            if segment.kind is GENERATED:
                return segment.version
        return None

    @property
    def newest_version(self) -> PolicyVersion | None:
        """Version of the newest generated token; None without generated tokens."""
        for segment in reversed(self.segments):
            if segment.kind is GENERATED:
                return segment.version
        return None

    def add_attempt(
        self, attempt: AttemptTape, attempt_id: str, engine: str, temperature: float,
        over: PolicyVersion | None = None, *, constrained: bool = False,
    ) -> None:  # fmt: skip
        """Append the tokens of an attempt; raises ValueError if their versions go backwards.

        ``over`` is the version of the attempt's oldest KV-cache entries, if the cache was kept through weight updates.
        ``constrained`` means that the attempt had a grammar.
        """
        tokens, logprobs, spans = attempt.packed()
        self.add_segments(spans, attempt_id, engine, temperature, over, constrained=constrained)
        self._extend(tokens, logprobs)

    def add_segments(
        self, spans: Sequence[tuple[PolicyVersion, int]], attempt_id: str, engine: str, temperature: float,
        over: PolicyVersion | None, *, constrained: bool = False,
    ) -> None:  # fmt: skip
        """Append the segments of an attempt whose tokens have these versions, but not the tokens themselves."""
        newest = self.newest_version
        start = len(self.tokens)
        for version, count in spans:
            if newest is not None and version < newest:
                raise ValueError(f"version {version} after {newest}: versions of one sample never decrease")
            kept = over if over is not None and over < version else None
            self.segments.append(
                Segment(start, count, version, GENERATED, attempt_id, engine, temperature, kept, constrained)
            )
            start += count
            newest = version

    def add_environment(self, tokens: Int32, version: PolicyVersion) -> None:
        """Append tokens that the policy did not generate, such as tool results."""
        if len(tokens) == 0:
            return
        self.segments.append(Segment(len(self.tokens), len(tokens), version, SegmentKind.ENVIRONMENT, "", "", 0.0))
        self._extend(tokens, np.zeros(len(tokens), np.float32))

    def cut(self, end: int) -> int:
        """Remove all tokens but the first ``end``; return how many of the removed tokens were generated."""
        before, self.segments = self.generated, [
            structs.replace(s, count=min(s.count, end - s.start)) for s in self.segments if s.start < end
        ]
        self.tokens, self.logprobs = self.tokens[:end], self.logprobs[:end]
        return before - self.generated

    def loss_mask(self) -> NDArray[np.uint8]:
        """Return uint8 [T], 1 for generated tokens and 0 for environment tokens."""
        mask = np.empty(len(self.tokens), np.uint8)
        mask.fill(1)
        for segment in self.segments:
            if segment.kind is SegmentKind.ENVIRONMENT:
                mask[segment.start : segment.start + segment.count] = 0
        return mask

    def check(self) -> str | None:
        """Describe what is wrong with this tape; None if it is consistent."""
        if len(self.tokens) != len(self.logprobs):
            return f"{len(self.tokens)} tokens but {len(self.logprobs)} log-probabilities"
        position, newest = 0, None
        for segment in self.segments:
            if segment.start != position or segment.count < 1:
                return f"segment at {segment.start} (+{segment.count}) is not contiguous at {position}"
            position += segment.count
            if segment.kind is GENERATED:
                if newest is not None and segment.version < newest:
                    return f"version {segment.version} after {newest}"
                newest = segment.version
        if position != len(self.tokens):
            return f"segments cover {position} of {len(self.tokens)} tokens"
        return None

    def _extend(self, tokens: Int32, logprobs: Float32) -> None:
        if len(self.tokens) == 0:
            self.tokens, self.logprobs = tokens, logprobs
        else:
            self.tokens, self.logprobs = _joined((self.tokens, tokens)), _joined((self.logprobs, logprobs))
