"""The engine table: the health, gate, weights and load of each engine, and which one gets the next request.

This is the one place that says which weights an engine has; ``weight_updates`` and ``engine_recovery`` change them.

An engine whose key-value memory is too small for its requests puts some of them back and prefills them again later,
which costs more than to wait. It says so: preemptions grow, or requests wait while the memory is full. Then its cap
goes down to what it really held; it goes up again by an eighth per report while there is room. An engine that refuses
requests gets a cap of what it took, which goes up by an eighth as well whenever a cap-full of them has ended.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from april.core.settings import EngineLimits
from april.core.types import OnWeightUpdate
from april.core.versions import PolicyVersion
from april.errors import InvariantError

RESUBMIT = OnWeightUpdate.RESUBMIT
FULL = 0.95
"""Share of the key-value memory from which on waiting requests wait for memory."""
ROOM = 0.85
"""Share below which there is room for more."""
LOSS_PER_BURST = 4
"""A burst of refusals leaves at least this part of what was tried: an engine that refuses everything has not said how
much it holds."""


class AdmissionCap:
    """The cap of one engine; ``ceiling`` is its configured or declared limit; None means no limit."""

    __slots__ = ("_by_refusal", "_ended", "_held", "_least", "_measured", "_preemptions", "ceiling", "value")

    def __init__(self, ceiling: int | None) -> None:
        self.ceiling = ceiling
        self.value = ceiling
        """Most requests at the same time; None means any number."""
        self._measured: int | None = None
        self._preemptions: int | None = None
        self._held = 0
        """Requests of april that it ran at the last report."""
        self._by_refusal = False
        """True when the measured cap is what the engine took when it refused more."""
        self._ended = 0
        """Requests that ended under such a cap since it changed."""
        self._least = 1
        """The lowest cap that the present burst of refusals may lead to."""

    @property
    def measured(self) -> int | None:
        """The measured cap, at least 1; None means that nothing speaks against the ceiling."""
        return self._measured

    @measured.setter
    def measured(self, measured: int | None) -> None:
        self._measured = measured
        self.value = min((most for most in (measured, self.ceiling) if most is not None), default=None)

    def admits(self, in_flight: int) -> bool:
        return self.value is None or in_flight < self.value

    def report(self, in_flight: int, running: int, waiting: int, kv_usage: float, preemptions: int) -> bool:
        """Take what the engine says of itself; True when the cap went down."""
        before, self._preemptions = self._preemptions, preemptions
        recently, self._held = self._held, min(in_flight, running)
        if not self._held:
            return False  # what was put back before it became idle says nothing of what it holds
        preempted = before is not None and preemptions > before
        if preempted or (waiting > 0 and kv_usage >= FULL):
            held = self._held
            if preempted and in_flight < recently:
                held = max(held, recently)  # it put back some of those that ran then, not of the few that are left
            # a sixteenth less than what it held: responses grow while they are decoded
            lower = max(1, held - max(1, held // 16))
            if self.measured is None or lower < self.measured:
                self.measured, self._by_refusal = lower, False
                return True
            return False
        if self.measured is not None and waiting == 0 and kv_usage < ROOM and in_flight >= self.measured:
            self._raise(self.measured)
        return False

    def refused(self, in_flight: int, *, again: bool = False) -> None:
        """The engine took no more than ``in_flight``; ``again``: in the same burst of refusals as before."""
        if not again:
            self._least = max(1, (in_flight + 1) // LOSS_PER_BURST)
        took = max(self._least, in_flight)
        self.measured = took if self.measured is None else min(took, self.measured)
        self._by_refusal, self._ended = True, 0

    def request_ended(self, in_flight: int) -> bool:
        """A request ended in order; returns whether the cap rose, as it does a cap-full after a refusal."""
        if self._by_refusal and self.measured is not None and in_flight + 1 >= self.measured:
            self._ended += 1
            if self._ended >= self.measured:
                self._raise(self.measured)
                return True
        return False

    def _raise(self, measured: int) -> None:
        self._ended = 0
        self.measured = measured + max(1, measured // 8)
        if self.ceiling is not None and self.measured >= self.ceiling:
            self.measured, self._by_refusal = None, False


SPARE = 64
"""Entries of the heap, beside eight for each engine, from which on void ones are thrown out."""
PLACES = 32
"""Bits of an engine's place in an entry of the heap."""


class LeastLoaded:
    """Engines that take a request: those with the fewest first, and of equals the one that has been here longest.

    A heap of entries (load, place), each in one number; one whose engine has left, or has another load by now, is void.
    """

    def __init__(self) -> None:
        self._heap: list[int] = []
        self._engines: dict[int, EngineState] = {}
        """By place."""
        self._joined = 0

    def __iter__(self) -> Iterator[EngineState]:
        return (engine for entry in sorted(set(self._heap)) if (engine := self._engine(entry)) is not None)

    def _engine(self, entry: int) -> EngineState | None:
        engine = self._engines.get(entry & (1 << PLACES) - 1)
        return engine if engine is not None and engine.load == entry >> PLACES else None

    @property
    def first(self) -> EngineState | None:
        """The first of them; None when no engine takes a request."""
        heap = self._heap
        while heap:
            if (engine := self._engine(heap[0])) is not None:
                return engine
            heapq.heappop(heap)
        return None

    def join(self, engine: EngineState) -> None:
        """Add an engine behind the present ones; it enters itself whenever its load changes."""
        self._joined += 1
        engine.order, engine.place = self, self._joined
        self._engines[engine.place] = engine
        engine.moved()

    def leave(self, engine: EngineState) -> None:
        """Take an engine out."""
        del self._engines[engine.place]
        engine.order = engine.load = None

    def enter(self, load: int, place: int) -> None:
        """The engine at this place has this load from now on."""
        heapq.heappush(self._heap, load << PLACES | place)
        if len(self._heap) > 8 * len(self._engines) + SPARE:
            self._heap = sorted(entry for entry in set(self._heap) if self._engine(entry) is not None)


FAILURES_BEFORE_QUARANTINE = 3
"""Answers in a row that cannot be true; one is an accident, three are an engine."""
AFFINITY_SLACK = 8
"""Requests by which the engine that has a sample's prefix cached may be fuller than the least loaded one: to prefill a
prefix again costs about as much as a few requests more slow an engine down."""
FIRST_REST_S = 0.5
LONGEST_REST_S = 60.0
RESTS_BEFORE_QUARANTINE = 8
"""Times in a row that an engine was busy, which is some two minutes; then a probe shall say whether it is well, and it
is no longer counted among the engines that can be used, until it takes a request."""
PROBE_INTERVAL_S = 1.0
"""Seconds between two health probes of a quarantined engine."""


class EngineHealth(StrEnum):
    """The health of an engine."""

    WELL = "well"
    RESTING = "resting"
    """The engine was busy, and gets no requests for a while."""
    QUARANTINED = "quarantined"
    """The engine failed, and gets no requests before a probe finds it well."""


class EngineGate(StrEnum):
    """The admission of an engine."""

    OPEN = "open"
    CLOSING = "closing"
    """The engine was asked to pause and has not answered: it may be paused or not."""
    CLOSED = "closed"
    OPENING = "opening"


class EngineWeights(StrEnum):
    """The weights of an engine, as far as they are known."""

    CONFIRMED = "confirmed"
    """The engine has the weights of the loaded versions."""
    LOADING = "loading"
    HALF = "half"
    """The weights may be torn, or those of an update that was not adopted: no label makes them those of a version."""
    UNKNOWN = "unknown"
    """The server was started anew, or somebody else has changed the weights."""


# names of the module: an enum's member costs 60 ns per use on Python 3.11, and these are used at every event
WELL, OPEN = EngineHealth.WELL, EngineGate.OPEN

_DECIDES = frozenset({"gate", "health", "in_flight", "loaded"})
"""Attributes that decide whether an engine takes a request, and before which others."""
_set = object.__setattr__
"""Sets an attribute without the detour of ``EngineState.__setattr__``; used at every request."""


@dataclass(slots=True, kw_only=True)
class EngineState:
    """An engine as the core sees it."""

    order: LeastLoaded | None = field(default=None, repr=False, compare=False)
    """The order in which it is looked for; None once it has left."""
    place: int = 0
    load: int | None = None
    """Requests with which it stands in ``order``; None means that it takes none."""
    limits: EngineLimits
    cap: AdmissionCap
    loaded_before: frozenset[PolicyVersion] = frozenset()
    """Versions before a load that is running or was refused: the engine may have them still, if it says so."""
    weights: EngineWeights = EngineWeights.CONFIRMED
    call: int = 0
    """Number of the call (pause, load, resume) that runs; 0 means none."""
    probe: int = 0
    """Number of the probe whose answer counts; 0 means none."""
    rest: int = 0
    """Timer of its rest; 0 means none."""
    probe_timer: int = 0
    """Timer of the next probe, also while it works; 0 means none."""
    not_given: PolicyVersion | None = None
    """Version whose directory holds other weights by now: it waits for a later one."""
    taken_back: bool = False
    """The engine came back with other weights, and is given the present ones outside of any update."""
    failures: int = 0
    rests: int = 0
    """In a row, without a request that ended in order between them."""
    losses: int = 0
    """Times that it was found without its weights, and so without its cache."""
    has_rested: bool = False
    """At some time of the run."""
    kv_usage: float | None = None
    """Share of its key-value memory in use, as it said last; None before its first report."""

    loaded: frozenset[PolicyVersion] = frozenset()
    """Versions that the engine has confirmed; empty while its weights are not known."""
    gate: EngineGate = OPEN
    health: EngineHealth = WELL
    in_flight: int = 0
    """Requests, those of evaluations among them."""

    def __setattr__(self, name: str, value: object) -> None:
        _set(self, name, value)
        if name in _DECIDES and self.order is not None:
            self.moved()

    def moved(self) -> None:
        """Stand under another load in ``order``, if what decides about it has changed."""
        load: int | None = None
        if self.health is WELL and self.gate is OPEN and self.loaded:
            load, most = self.in_flight, self.cap.value
            if most is not None and load >= most:
                load = None
        if load != self.load and self.order is not None:
            _set(self, "load", load)
            if load is not None:
                self.order.enter(load, self.place)

    def add(self, requests: int) -> None:
        """Change the number of requests in flight."""
        _set(self, "in_flight", self.in_flight + requests)
        self.moved()

    @property
    def version(self) -> PolicyVersion | None:
        """The newest version that it has confirmed; None while its weights are not known."""
        return max(self.loaded, default=None)

    @property
    def quarantined(self) -> bool:
        return self.health is EngineHealth.QUARANTINED

    @property
    def resting(self) -> bool:
        return self.health is EngineHealth.RESTING

    @property
    def life(self) -> tuple[PolicyVersion | None, int]:
        """A value that changes when the engine's cache becomes worthless."""
        return self.version, self.losses

    @property
    def has_room(self) -> bool:
        if self.health is not WELL or self.gate is not OPEN:
            return False
        return (most := self.cap.value) is None or self.in_flight < most

    def waits(self, version: PolicyVersion) -> bool:
        """Return whether the engine is well and only the next weight update will give it weights."""
        return not self.quarantined and version not in self.loaded

    def confirm(self, version: PolicyVersion) -> None:
        """The engine says that it has these weights, whole."""
        self.loaded, self.loaded_before, self.weights = frozenset((version,)), frozenset(), EngineWeights.CONFIRMED

    def still_has_them(self) -> None:
        """A load was refused, or never began: it says that it has what it had."""
        if self.loaded_before:
            self.loaded, self.loaded_before, self.weights = self.loaded_before, frozenset(), EngineWeights.CONFIRMED

    def lose(self, weights: EngineWeights = EngineWeights.UNKNOWN) -> None:
        """The engine has lost the weights that it was given, and what was cached under them."""
        self.loaded, self.loaded_before, self.weights = frozenset(), frozenset(), weights
        self.losses += 1

    def check(self) -> str | None:
        """Describe a contradiction; None means that there is none."""
        if bool(self.loaded) != (self.weights is EngineWeights.CONFIRMED):
            return f"its weights are {self.weights}, and of versions {set(self.loaded)}"
        if self.resting and not self.rest:
            return "it rests without an end"
        if self.taken_back and not self.quarantined:
            return "it is given the present weights, and is not quarantined"
        if self.load != (self.in_flight if self.loaded and self.has_room else None):
            return f"it is looked for with {self.load} requests, and has {self.in_flight}"
        return None


class EngineTable:
    """All engines, in the order of the configuration, then as they came.

    Prompts and samples are promised what the first engines have in common; later ones come and go and have no less.

    Args:
        engines: at least one.
        version: of the policy; they have it, unless an earlier run has written their weights.
        in_flight: what requests in flight must be able to do at a weight update.
        attachments, extras: what requests have, and what is wanted with their tokens.
    """

    def __init__(
        self, engines: Sequence[EngineLimits], version: PolicyVersion, in_flight: OnWeightUpdate = RESUBMIT,
        attachments: Sequence[str] = (), extras: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self._in_flight, self._attachments, self._extras = in_flight, attachments, extras
        self.states = {e.name: EngineState(limits=e, cap=AdmissionCap(e.max_in_flight)) for e in engines}
        self._by_load = LeastLoaded()
        for state in self.states.values():
            if state.limits.written:
                state.lose(EngineWeights.HALF)
            else:
                state.confirm(version)
            self._by_load.join(state)
        self.left: dict[str, EngineState] = {}
        """As they were when they left; what they were asked for is void."""
        self.turnover = 0
        """Grows when one joins or leaves."""
        self.max_context = min(e.max_context for e in engines)
        self.vocab_size = min(e.vocab_size for e in engines)
        self.eos_token_ids = frozenset(i for e in engines for i in e.eos_token_ids)
        kinds = {e.logprob_kind for e in engines}
        self.logprob_kind = kinds.pop() if len(kinds) == 1 else "mixed"

    def ends_of(self, engine: str) -> frozenset[int]:
        """The end-of-sequence tokens of an engine; of one that is gone, those on which all present ones agree."""
        if engine in self.states:
            return frozenset(self.states[engine].limits.eos_token_ids)
        return self.eos_token_ids.intersection(*(s.limits.eos_token_ids for s in self.states.values()))

    # ---------------------------------------------------------------- engines that come and go

    def unfit(self, engine: EngineLimits) -> str | None:
        """Say why an engine has less than samples were promised, and so cannot join; None means that it can."""
        has, name = "", f"engine {engine.name}"
        if engine.max_context < self.max_context:
            has = f"a context of {engine.max_context} tokens, and {self.max_context} are needed"
        elif engine.vocab_size < self.vocab_size:
            has = f"a vocabulary of {engine.vocab_size} tokens, and {self.vocab_size} are needed"
        elif not self.eos_token_ids.issuperset(engine.eos_token_ids):
            theirs = sorted(self.eos_token_ids)
            has = f"the end-of-sequence tokens {sorted(engine.eos_token_ids)}, and those of the others are {theirs}"
        elif self._in_flight not in (RESUBMIT, *engine.in_flight_updates):
            has = f"no way to do on_weight_update: {self._in_flight}"
        elif lacks := [*set(self._attachments).difference(engine.attachments)]:
            has = f"no way to take prompts with {', '.join(sorted(lacks))} attached"
        elif lacks := [*set(self._extras).difference(engine.extras)]:
            has = f"no {', '.join(sorted(lacks))} to give with its tokens"
        elif self.logprob_kind not in ("mixed", engine.logprob_kind):
            has = f"log-probabilities of kind {engine.logprob_kind}, and those of the others are {self.logprob_kind}"
        return f"{name} cannot join: it has {has}" if has else None

    def join(self, engine: EngineLimits) -> EngineState:
        """A new engine, or one that comes anew; which weights it has is not known.

        Raises:
            InvariantError: it is unfit, or is here already.
        """
        if wrong := self.unfit(engine):
            raise InvariantError(wrong)
        if engine.name in self.states:
            raise InvariantError(f"two engines have the name {engine.name}")
        before = self.left.pop(engine.name, None)
        state = EngineState(limits=engine, cap=AdmissionCap(engine.max_in_flight), weights=EngineWeights.UNKNOWN)
        if before is not None:
            state.losses = before.losses + 1
            if before.gate is not OPEN:  # its server may be the same, and paused still
                state.gate = EngineGate.CLOSED
        self.states[engine.name] = state
        self._by_load.join(state)
        self.turnover += 1
        return state

    def leave(self, name: str) -> None:
        """An engine is here no longer; raises InvariantError if it has requests in flight."""
        state = self.states[name]
        if state.in_flight:
            raise InvariantError(f"engine {name} has left with {state.in_flight} requests in flight")
        self.left[name] = self.states.pop(name)
        self._by_load.leave(state)
        state.call = state.probe = state.rest = state.probe_timer = 0
        state.taken_back = False
        self.turnover += 1

    def state_of(self, name: str) -> EngineState:
        """That of an engine that is here, or was: whatever is still said of one that left is void."""
        return self.states.get(name) or self.left[name]

    # ---------------------------------------------------------------- where the next request goes

    def pick(self, version: PolicyVersion, avoid: str = "", prefer: str = "") -> EngineState | None:
        """The least loaded engine that confirmed ``version`` and has room.

        ``avoid`` only if no other has; ``prefer`` if it is not much fuller than that one.
        """
        best = self._by_load.first
        if best is not None and (best.limits.name == avoid or version not in best.loaded):
            best = None
            for state in self._by_load:
                if version in state.loaded:
                    if state.limits.name != avoid:
                        best = state
                        break
                    best = state  # unless another one follows
        if best is None or not prefer or prefer == avoid:
            return best
        liked = self.states[prefer]
        near = liked.in_flight <= best.in_flight + AFFINITY_SLACK
        return liked if near and version in liked.loaded and liked.has_room else best

    def cached_on(self, name: str, life: tuple[PolicyVersion | None, int] | None) -> str:
        """The engine that has a prefix cached since ``life``; empty if it no longer has it."""
        state = self.states.get(name)
        return name if state is not None and state.life == life else ""

    def usable(self, version: PolicyVersion) -> bool:
        """Return whether some engine is well, has confirmed ``version`` and is not busy for ever."""
        return any(
            version in s.loaded and not s.quarantined and s.rests <= RESTS_BEFORE_QUARANTINE
            for s in self.states.values()
        )

    def remedy(self, version: PolicyVersion) -> str:
        """Say what to do where no engine is usable."""
        if not self.states:
            return "all have left, so let a host bring some"
        well = [name for name, state in self.states.items() if state.waits(version)]
        if not well:
            return f"mend one of {', '.join(self.states)}"
        return f"call weight_update, for which {', '.join(well)} {'wait' if well[1:] else 'waits'},"

    def in_flight(self) -> dict[str, int]:
        """Attempts per engine."""
        return {name: s.in_flight for name, s in self.states.items()}

    def metrics(self, in_flight: dict[str, int], version: PolicyVersion) -> dict[str, float]:
        """The metrics of each engine as far as they are known; ``in_flight`` is counted when the step stopped."""
        out: dict[str, float] = {}
        for name, state in self.states.items():
            out[f"engine/{name}/in_flight_at_stop"] = float(in_flight.get(name, 0))
            if (cap := state.cap.value) is not None:
                out[f"engine/{name}/cap"] = float(cap)
            if state.limits.unverified:
                out[f"engine/{name}/unverified_weights"] = 1.0
            out[f"engine/{name}/waits_for_update"] = float(state.waits(version))
            if state.kv_usage is not None:
                out[f"engine/{name}/kv_usage"] = state.kv_usage
        return out

    def failed(self, name: str, *, at_once: bool) -> float | None:
        """Count a failure; quarantines it ``at_once``, or after several in a row. Seconds until it is to be probed.

        None means that it is not quarantined, or was already.
        """
        state = self.states[name]
        state.failures += 1
        if state.quarantined or not (at_once or state.failures >= FAILURES_BEFORE_QUARANTINE):
            return None
        state.health = EngineHealth.QUARANTINED
        return PROBE_INTERVAL_S

    def well(self, name: str) -> None:
        """A probe, or a new load of weights, found it well; whether it takes requests, only a request can tell."""
        state = self.states[name]
        state.health, state.failures = EngineHealth.RESTING if state.rest else EngineHealth.WELL, 0

    def ended(self, name: str, in_flight: int) -> None:
        """The engine ended a request in order, and has ``in_flight`` more of april's."""
        state = self.states[name]
        if state.failures or state.rests:
            state.failures = state.rests = 0
        if state.cap.request_ended(in_flight):
            state.moved()

    def busy(self, name: str, asked_s: float, in_flight: int) -> float | None:
        """The engine refused a request for now, with ``in_flight`` others of april's there; returns seconds of rest.

        None means that it is at rest already, or was busy so often that a probe shall say whether it is well.
        """
        state = self.states[name]
        alone = state.health is not EngineHealth.WELL
        state.cap.refused(in_flight, again=alone)
        state.moved()
        if alone:
            return None
        state.rests += 1
        if state.rests % (RESTS_BEFORE_QUARANTINE + 1) == 0:
            return None
        grown = FIRST_REST_S * 2.0 ** min(state.rests - 1, RESTS_BEFORE_QUARANTINE)
        return min(max(asked_s, grown), LONGEST_REST_S)
