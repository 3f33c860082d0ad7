"""Fault scripts declare in advance which faults hit fake engines, when, and how often; they are the same in every run.

Invariant: whether a fault hits depends on the script, the sample, the number of the attempt, tokens and time; never
on chance, attempt ids or the order of a set. A random script draws from a hash of (seed, sample, attempt number).
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from enum import StrEnum

from april.engines.protocol import EngineFinish, Request
from april.testing.records import conversation, is_evaluation


class FaultKind(StrEnum):
    """Kinds of faults; docs/testing.md says what each of them does, and how april reacts."""

    BREAK_OFF = "break_off"
    ENGINE_DIES = "engine_dies"
    STALL = "stall"
    EMPTY_CHUNKS = "empty_chunks"
    ABORT_IGNORED = "abort_ignored"
    ABORT_HANGS = "abort_hangs"
    ABORT_LATE = "abort_late"
    ABORT_MISSED = "abort_missed"
    ABORT_EMPTY = "abort_empty"
    NAN_LOGPROB = "nan_logprob"
    POSITIVE_LOGPROB = "positive_logprob"
    CLAMPED_LOGPROB = "clamped_logprob"
    UNKNOWN_TOKEN = "unknown_token"  # noqa: S105 - a token id, not a secret
    LENGTHS_DIFFER = "lengths_differ"
    TOO_MANY_TOKENS = "too_many_tokens"
    FUTURE_VERSION = "future_version"
    OLDER_VERSION = "older_version"
    EARLY_LENGTH = "early_length"
    EARLY_STOP = "early_stop"
    CHUNK_AFTER_FINISH = "chunk_after_finish"
    NO_FINISH = "no_finish"
    NO_ROWS = "no_rows"
    SHORT_ROWS = "short_rows"
    ABORT_NO_ROWS = "abort_no_rows"
    SICK_PROBE = "sick_probe"
    FAILED_UPDATE = "failed_update"


WRONG_CHUNKS = (
    FaultKind.NAN_LOGPROB,
    FaultKind.POSITIVE_LOGPROB,
    FaultKind.CLAMPED_LOGPROB,
    FaultKind.UNKNOWN_TOKEN,
    FaultKind.LENGTHS_DIFFER,
    FaultKind.TOO_MANY_TOKENS,
    FaultKind.FUTURE_VERSION,
    FaultKind.OLDER_VERSION,
)
"""Kinds that put an impossible value into a chunk."""
WRONG_ENDS = {FaultKind.EARLY_LENGTH: EngineFinish.LENGTH, FaultKind.EARLY_STOP: EngineFinish.STOP}
"""Kinds that end a response with an impossible finish."""
ROW_FAULTS = (FaultKind.NO_ROWS, FaultKind.SHORT_ROWS, FaultKind.ABORT_NO_ROWS)
"""Kinds for requests that ask for extras (per-token arrays)."""
AT_TOKENS = (
    FaultKind.BREAK_OFF, FaultKind.ENGINE_DIES, FaultKind.STALL, FaultKind.EMPTY_CHUNKS, *WRONG_CHUNKS, *WRONG_ENDS
)  # fmt: skip
"""Kinds that hit when ``after_tokens`` tokens were yielded."""
_ENGINE_FAULTS = frozenset({FaultKind.ENGINE_DIES, FaultKind.SICK_PROBE, FaultKind.FAILED_UPDATE})
_DEFAULT_SECONDS = {
    FaultKind.ENGINE_DIES: 10.0,
    FaultKind.STALL: math.inf,
    FaultKind.EMPTY_CHUNKS: math.inf,
    FaultKind.ABORT_HANGS: math.inf,
    FaultKind.ABORT_LATE: 5.0,
    FaultKind.ABORT_MISSED: 2.0,
}
ALL_FAULTS = tuple(FaultKind)
"""Every kind: those of STREAM_FAULTS and ROW_FAULTS, and those that hit whole engines."""
STREAM_FAULTS = tuple(kind for kind in FaultKind if kind not in (*_ENGINE_FAULTS, *ROW_FAULTS))
"""Kinds that april handles by itself: if they hit a few times, no call raises and no response changes."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Describes a fault: its kind, and when it hits.

    Attributes:
        kind: A :class:`FaultKind` or its name.
        engine: Name of the engine to hit; None means any engine.
        sample: (group, index) of the sample to hit; None means any sample.
        attempt: Number of the sample's attempt (request), counted from 1 over all engines; None means any attempt.
        after_tokens: Number of tokens of the attempt after which the fault hits; used by the :data:`AT_TOKENS` kinds.
        from_s, until_s: Period in which the fault may hit, in seconds since the engine was created, or since its first
            call if it was created without a running event loop.
        seconds: Duration; None means the default of the kind (engine_dies 10, abort_late 5, abort_missed 2, stall,
            empty_chunks and abort_hangs for ever).
        times: Number of times that the fault may hit.

    Raises:
        ValueError: a value is out of range or does not fit the kind.
    """

    kind: FaultKind
    engine: str | None = None
    sample: tuple[int, int] | None = None
    attempt: int | None = None
    after_tokens: int = 0
    from_s: float = 0.0
    until_s: float = math.inf
    seconds: float | None = None
    times: int = 1

    def __post_init__(self) -> None:
        if self.kind not in list(FaultKind):
            raise ValueError(f"there is no fault {self.kind!r}; choose from {', '.join(FaultKind)}")
        object.__setattr__(self, "kind", FaultKind(self.kind))
        if self.sample is not None and not (isinstance(self.sample, tuple) and len(self.sample) == 2):
            raise ValueError(f"fault {self.kind}: sample must be (group, index), got {self.sample!r}")
        if self.seconds is not None and self.kind not in _DEFAULT_SECONDS:
            raise ValueError(f"fault {self.kind} has no duration; leave seconds out")
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"fault {self.kind}: seconds must be positive, got {self.seconds}")
        least = 1 if self.kind is FaultKind.OLDER_VERSION else 0
        if self.after_tokens < least:
            raise ValueError(f"fault {self.kind}: after_tokens must be at least {least}, got {self.after_tokens}")
        if self.times < 1 or (self.attempt is not None and self.attempt < 1):
            raise ValueError(f"fault {self.kind}: times and attempt count from 1, got {self.times}, {self.attempt}")
        if not self.from_s < self.until_s:
            raise ValueError(f"fault {self.kind}: until_s={self.until_s} is not after from_s={self.from_s}")

    def __repr__(self) -> str:
        """Return the source code of the fault, without default values."""
        given = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self)[1:] if getattr(self, f.name) != f.default]
        return f"Fault({', '.join([repr(str(self.kind)), *given])})"

    @property
    def duration_s(self) -> float:
        """Duration in seconds: ``seconds``, or the default of the kind."""
        return self.seconds if self.seconds is not None else _DEFAULT_SECONDS.get(self.kind, math.inf)

    @property
    def by_time_alone(self) -> bool:
        """True if the fault hits the engine at ``from_s``, independently of requests."""
        return self.kind is FaultKind.ENGINE_DIES and (self.sample, self.attempt, self.after_tokens) == (None, None, 0)


@dataclass(frozen=True, slots=True)
class Fired:
    """A record of one hit of a fault."""

    fault: Fault
    engine: str
    at_s: float
    """Time in seconds on the engine's clock, as in :class:`Fault`."""
    sample: tuple[int, int] | None = None
    attempt: int | None = None
    """Number of the sample's attempt, from 1."""
    attempt_id: str = ""


@dataclass(slots=True)
class AttemptFaults:
    """The faults that may hit one attempt; created for the engine when the attempt begins."""

    sample: tuple[int, int] | None = None
    attempt: int | None = None
    attempt_id: str = ""
    faults: list[Fault] = field(default_factory=list)


class FaultScript:
    """A script of faults for one or several engines; ``fired`` lists the faults that have hit.

    Requests of evaluations are hit only by the death of an engine, and not counted as attempts.

    A script counts its hits, so create a new script for every run.
    """

    def __init__(self, *faults: Fault) -> None:
        for fault in faults:
            if not isinstance(fault, Fault):
                raise TypeError(f"FaultScript takes faults one by one, FaultScript(Fault(...), ...), got {fault!r}")
        self.faults = faults
        self.fired: list[Fired] = []
        """Faults that have hit, in order."""
        self._left = {id(fault): fault.times for fault in faults}
        self._drawn: list[Fault] = []
        """Faults drawn by a random script, kept so that Python does not reuse their id()."""
        self._attempts: Counter[bytes] = Counter()
        self._calls: Counter[str] = Counter()
        self._seed: int | None = None
        self._rate = 0.0
        self._kinds: tuple[FaultKind, ...] = ()

    @classmethod
    def random(cls, seed: int, rate: float = 0.1, kinds: Iterable[FaultKind | str] = STREAM_FAULTS) -> FaultScript:
        """Create a random mix of faults that is the same for the same seed.

        A share ``rate`` of all attempts gets one fault, with each of ``kinds`` equally likely. With sick_probe or
        failed_update, a share ``rate`` of the health probes or weight updates fails. Faults hit after 0 to 11 tokens
        and last 0.25 to 16 s. Prints the call that makes the same script, so that a failed test shows the seed.

        Raises:
            ValueError: ``rate`` outside [0, 1], or an unknown kind.
        """
        if not 0.0 <= rate <= 1.0:
            raise ValueError(f"rate must be in [0, 1], got {rate}")
        script = cls()
        script._seed, script._rate, script._kinds = seed, rate, tuple(FaultKind(kind) for kind in kinds)
        print(f"april.testing: {script!r}")
        return script

    def __repr__(self) -> str:
        if self._seed is None:
            return f"FaultScript({', '.join(map(repr, self.faults))})"
        names = "" if self._kinds == STREAM_FAULTS else f", kinds={[str(kind) for kind in self._kinds]}"
        return f"FaultScript.random(seed={self._seed}, rate={self._rate}{names})"

    @property
    def unfired(self) -> list[Fault]:
        """Declared faults that may still hit; should be empty at the end of a test."""
        return [fault for fault in self.faults if self._left[id(fault)]]

    def count(self, kind: FaultKind | str) -> int:
        """Return the number of faults of this kind that have hit."""
        return sum(fired.fault.kind is FaultKind(kind) for fired in self.fired)

    # ---------------------------------------------------------------- for engines

    def attempt(self, engine: str, request: Request) -> AttemptFaults:
        """Count a new attempt at ``engine`` and return the faults that may hit it."""
        if is_evaluation(request.attempt_id):
            return AttemptFaults(request.sample_key, 0, request.attempt_id, [])
        label = repr(request.sample_key).encode() if request.sample_key is not None else conversation(request).tobytes()
        self._attempts[label] += 1
        number = self._attempts[label]
        faults = [
            fault
            for fault in self.faults
            if fault.engine in (None, engine)
            and fault.sample in (None, request.sample_key)
            and fault.attempt in (None, number)
            and not fault.by_time_alone
        ]
        drawn = self._draw(label, number)
        if drawn is not None:
            faults.append(drawn)
        return AttemptFaults(request.sample_key, number, request.attempt_id, faults)

    def hits(self, fault: Fault, engine: str, now_s: float, attempt: AttemptFaults | None = None) -> bool:
        """Return True if a matching fault hits now, and record it."""
        # a fault that was drawn at random has no entry before its first hit
        left = self._left.setdefault(id(fault), fault.times)
        if not left or not fault.from_s <= now_s < fault.until_s:
            return False
        self._left[id(fault)] = left - 1
        of = attempt or AttemptFaults()
        self.fired.append(Fired(fault, engine, now_s, of.sample, of.attempt, of.attempt_id))
        return True

    def call_fails(self, kind: FaultKind, engine: str, now_s: float) -> bool:
        """Return True if this call of an engine's method (a probe, a weight update) fails."""
        for fault in self.faults:
            if fault.kind is kind and fault.engine in (None, engine) and self.hits(fault, engine, now_s):
                return True
        self._calls[f"{kind}/{engine}"] += 1
        if self._seed is None or kind not in self._kinds:
            return False
        if self._chance(f"{kind}/{engine}/{self._calls[f'{kind}/{engine}']}".encode(), "call") >= self._rate:
            return False
        fault = Fault(kind, engine=engine)
        self._drawn.append(fault)
        return self.hits(fault, engine, now_s)

    # ---------------------------------------------------------------- random scripts

    def _draw(self, label: bytes, number: int) -> Fault | None:
        """Draw the fault of the ``number``-th attempt of a sample; None if it has none."""
        kinds = [kind for kind in self._kinds if kind not in (FaultKind.SICK_PROBE, FaultKind.FAILED_UPDATE)]
        what = label + b"#%d" % number
        if self._seed is None or not kinds or self._chance(what, "hit") >= self._rate:
            return None
        kind = kinds[int(self._chance(what, "kind") * len(kinds))]
        least = 1 if kind in (FaultKind.OLDER_VERSION, FaultKind.ENGINE_DIES) else 0
        after = least + int(self._chance(what, "tokens") * (12 - least)) if kind in AT_TOKENS else 0
        seconds = 0.25 * 2 ** int(self._chance(what, "seconds") * 7) if kind in _DEFAULT_SECONDS else None
        fault = Fault(kind, after_tokens=after, seconds=seconds)
        self._drawn.append(fault)
        return fault

    def _chance(self, what: bytes, purpose: str) -> float:
        """Return a number in [0, 1) that depends only on the seed and the arguments."""
        digest = hashlib.blake2b(what, digest_size=8, key=f"{self._seed}/{purpose}".encode()).digest()
        return int.from_bytes(digest, "big") / 2.0**64
