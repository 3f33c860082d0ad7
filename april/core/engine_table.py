"""Holds each engine's health, gate (open or paused), weights and load, and picks the engine of the next request.

Within the core, only this table says which weights an engine has; ``weight_updates`` and ``engine_recovery`` update it.
The engine clients check by themselves whether a server still has the weights that it was given
(``engines/http/server_process.py``).

An engine whose key-value memory is too small for its requests preempts some of them and prefills them again later,
which costs more than waiting. Its load reports show this: preemptions grow, or requests wait while the memory is full.
Its cap (the maximum number of concurrent requests) is then lowered to about the number that fitted, and raised by an
eighth per report while there is room. An engine that refuses requests is capped at the number that it accepted; this
cap is raised by an eighth whenever as many requests have ended as it allows at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from april.core.attachments import Rows
from april.core.settings import EngineLimits
from april.core.types import OnWeightUpdate
from april.core.versions import PolicyVersion
from april.errors import InvariantError

RESUBMIT = OnWeightUpdate.RESUBMIT
FULL_MEMORY = 0.95
"""Used share of the key-value memory at or above which waiting requests are taken to wait for memory."""
SPARE_MEMORY = 0.85
"""Used share of the key-value memory below which there is room for more requests."""
LOSS_PER_BURST = 4
"""Largest factor by which a burst of refusals (a refusal, and more while the engine rests) lowers a cap. There is a
limit because an engine that refuses everything for a while does not show how many requests it can hold."""


class AdmissionCap:
    """Limits the requests at one engine; ``ceiling`` is its configured or declared limit (None means no limit)."""

    __slots__ = ("_by_refusal", "_ended", "_held", "_least", "_measured", "_preemptions", "ceiling", "value")

    def __init__(self, ceiling: int | None) -> None:
        self.ceiling = ceiling
        self.value = ceiling
        """Maximum number of concurrent requests; None means any number."""
        self._measured: int | None = None
        self._preemptions: int | None = None
        self._held = 0
        """Number of april's requests that the engine was running at its last report."""
        self._by_refusal = False
        """True if the measured cap comes from a refusal; False if it comes from load reports."""
        self._ended = 0
        """Number of requests that have ended since the cap last changed; counted only for a cap from a refusal."""
        self._least = 1
        """Lowest cap that the present burst of refusals may set."""

    @property
    def measured(self) -> int | None:
        """Cap measured from reports or refusals, at least 1; None while only the ceiling applies."""
        return self._measured

    @measured.setter
    def measured(self, measured: int | None) -> None:
        self._measured = measured
        self.value = min((most for most in (measured, self.ceiling) if most is not None), default=None)

    def report(self, in_flight: int, running: int, waiting: int, kv_usage: float, preemptions: int) -> bool:
        """Adjust the cap to a load report of the engine; return True if the cap was lowered."""
        before, self._preemptions = self._preemptions, preemptions
        recently, self._held = self._held, min(in_flight, running)
        if not self._held:
            return False  # the engine runs none of april's requests, so preemptions do not show how many it can hold
        preempted = before is not None and preemptions > before
        if preempted or (waiting > 0 and kv_usage >= FULL_MEMORY):
            held = self._held
            if preempted and in_flight < recently:
                # requests that have ended since the last report were still running when others were preempted
                held = max(held, recently)
            # a sixteenth fewer requests than the engine held, because responses grow while they are decoded
            lower = max(1, held - max(1, held // 16))
            if self.measured is None or lower < self.measured:
                self.measured, self._by_refusal = lower, False
                return True
            return False
        if self.measured is not None and waiting == 0 and kv_usage < SPARE_MEMORY and in_flight >= self.measured:
            self._raise(self.measured)
        return False

    def refused(self, in_flight: int, *, again: bool = False) -> None:
        """Lower the cap after the engine refused a request while it had ``in_flight`` others.

        ``again`` means that the refusal belongs to the same burst as the previous refusal.
        """
        if not again:
            self._least = max(1, (in_flight + 1) // LOSS_PER_BURST)
        took = max(self._least, in_flight)
        self.measured = took if self.measured is None else min(took, self.measured)
        self._by_refusal, self._ended = True, 0

    def request_ended(self, in_flight: int) -> bool:
        """Count a request that ended normally; return True if that raised a cap that a refusal had set."""
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


SPARE_ENTRIES = 64
"""Void heap entries are removed once there are more entries than this number plus eight per engine."""
PLACE_BITS = 32
"""Number of low bits of a heap entry that hold the engine's place, its number in the order of joining."""


class LeastLoaded:
    """A queue of the engines that accept requests: fewest requests first, then the engine that joined first.

    It is a heap of (load, place) entries, each packed into one integer. An entry is void if its engine has left or has
    another load now.
    """

    def __init__(self) -> None:
        self._heap: list[int] = []
        self._engines: dict[int, EngineState] = {}
        """Engines by place."""
        self._joined = 0

    def __iter__(self) -> Iterator[EngineState]:
        return (engine for entry in sorted(set(self._heap)) if (engine := self._engine(entry)) is not None)

    def _engine(self, entry: int) -> EngineState | None:
        engine = self._engines.get(entry & (1 << PLACE_BITS) - 1)
        return engine if engine is not None and engine.load == entry >> PLACE_BITS else None

    @property
    def first(self) -> EngineState | None:
        """The engine with the fewest requests; None if no engine accepts a request."""
        heap = self._heap
        while heap:
            if (engine := self._engine(heap[0])) is not None:
                return engine
            heapq.heappop(heap)
        return None

    def join(self, engine: EngineState) -> None:
        """Add an engine after the present engines; from now on it calls :meth:`push` whenever its load changes."""
        self._joined += 1
        engine.queue, engine.place = self, self._joined
        self._engines[engine.place] = engine
        engine.update_load()

    def leave(self, engine: EngineState) -> None:
        del self._engines[engine.place]
        engine.queue = engine.load = None

    def push(self, load: int, place: int) -> None:
        heapq.heappush(self._heap, load << PLACE_BITS | place)
        if len(self._heap) > 8 * len(self._engines) + SPARE_ENTRIES:
            self._heap = sorted(entry for entry in set(self._heap) if self._engine(entry) is not None)


FAILURES_BEFORE_QUARANTINE = 3
"""Number of corrupt answers in a row that quarantine an engine; a single one may be an accident."""
AFFINITY_SLACK = 8
"""The engine that has a sample's prefix cached is preferred if it has at most this many requests more than the least
loaded engine: prefilling a prefix again costs about as much as the slowdown by a few more requests."""
FIRST_REST_S = 0.5
LONGEST_REST_S = 60.0
RESTS_BEFORE_QUARANTINE = 8
"""Number of rests in a row (about two minutes in all) after which the next refusal quarantines a busy engine. That
engine counts as usable again only once one of its requests has ended normally."""
PROBE_INTERVAL_S = 1.0
"""Seconds between two health probes of a quarantined engine."""


class EngineHealth(StrEnum):
    """Health states of an engine."""

    WELL = "well"
    RESTING = "resting"
    """The engine was busy and gets no requests for a while."""
    QUARANTINED = "quarantined"
    """The engine failed and gets no requests until a probe finds it healthy."""


class EngineGate(StrEnum):
    """States of an engine's gate: whether it admits requests or is paused."""

    OPEN = "open"
    CLOSING = "closing"
    """The engine was asked to pause and has not answered yet; it may or may not be paused."""
    CLOSED = "closed"
    OPENING = "opening"


class EngineWeights(StrEnum):
    """What april knows about an engine's weights."""

    CONFIRMED = "confirmed"
    """The engine has confirmed that it has the versions in ``EngineState.loaded``."""
    LOADING = "loading"
    HALF = "half"
    """The weights may be incomplete, or of a failed update or an earlier run; they must be loaded before use."""
    UNKNOWN = "unknown"
    """The server was restarted, or someone else changed its weights."""


# module-level names, as an enum member costs 60 ns per use on Python 3.11 and these are used at every event
WELL, OPEN = EngineHealth.WELL, EngineGate.OPEN

_ADMISSION_FIELDS = frozenset({"gate", "health", "in_flight", "leaving", "loaded"})
"""Attributes of an engine that decide whether it accepts requests, and how early it is picked."""
_set = object.__setattr__
"""Sets an attribute without calling ``EngineState.__setattr__``, which is slower; used at every request."""


@dataclass(slots=True, kw_only=True)
class EngineState:
    """The state of one engine as the core knows it."""

    queue: LeastLoaded | None = field(default=None, repr=False, compare=False)
    """Queue from which engines are picked; None once the engine has left."""
    place: int = 0
    load: int | None = None
    """Number of requests by which the engine is sorted in ``queue``; None if it accepts no requests."""
    limits: EngineLimits
    cap: AdmissionCap
    loaded_before: frozenset[PolicyVersion] = frozenset()
    """Versions that the engine had before it was told to load others; it may still have them if that load fails."""
    weights: EngineWeights = EngineWeights.CONFIRMED
    open_call: int = 0
    """Id of the running call (pause, load or resume); 0 if no call runs."""
    open_probe: int = 0
    """Id of the probe whose answer is awaited; 0 if no answer is awaited."""
    rest_timer: int = 0
    """Id of the timer that ends the engine's rest; 0 if it does not rest."""
    probe_timer: int = 0
    """Id of the timer for the next probe; 0 if no timer runs. Servers are also probed while they work."""
    unloadable_version: PolicyVersion | None = None
    """Version that the engine could not load, because the version's directory now holds other weights; the engine waits
    for a later version. None if there is none."""
    recovering: bool = False
    """True while an engine that came back with other weights loads the present weights, outside of any update."""
    failures: int = 0
    rests: int = 0
    """Number of rests since a request last ended normally."""
    leaving: bool = False
    """True if the engine gets no more requests because it is about to leave."""
    losses: int = 0
    """Number of times that the engine lost its weights, and with them its prefix cache."""
    has_rested: bool = False
    """True if the engine has rested before; only its first rest is reported to the user."""
    kv_usage: float | None = None
    """Used share of the key-value memory in the engine's last load report; None before the first report."""

    loaded: frozenset[PolicyVersion] = frozenset()
    """Versions that the engine has confirmed; empty while its weights are unknown."""
    gate: EngineGate = OPEN
    health: EngineHealth = WELL
    in_flight: int = 0
    """Number of requests in flight, including evaluations."""

    def __setattr__(self, name: str, value: object) -> None:
        _set(self, name, value)
        if name in _ADMISSION_FIELDS and self.queue is not None:
            self.update_load()

    def update_load(self) -> None:
        """Update the engine's load in ``queue`` after a change of its state."""
        load: int | None = None
        if self.health is WELL and self.gate is OPEN and self.loaded and not self.leaving:
            load, most = self.in_flight, self.cap.value
            if most is not None and load >= most:
                load = None
        if load != self.load and self.queue is not None:
            _set(self, "load", load)
            if load is not None:
                self.queue.push(load, self.place)

    def add(self, requests: int) -> None:
        """Change the number of requests in flight."""
        _set(self, "in_flight", self.in_flight + requests)
        self.update_load()

    @property
    def version(self) -> PolicyVersion | None:
        """Newest version that the engine has confirmed; None while its weights are unknown."""
        return max(self.loaded, default=None)

    @property
    def quarantined(self) -> bool:
        return self.health is EngineHealth.QUARANTINED

    @property
    def resting(self) -> bool:
        return self.health is EngineHealth.RESTING

    @property
    def cache_key(self) -> tuple[PolicyVersion | None, int]:
        """Key that changes whenever the engine's prefix cache becomes useless."""
        return self.version, self.losses

    @property
    def has_room(self) -> bool:
        if self.health is not WELL or self.gate is not OPEN or self.leaving:
            return False
        return (most := self.cap.value) is None or self.in_flight < most

    @property
    def may_make_room(self) -> bool:
        """True if room can be made: the engine accepts requests, apart from its cap, and can end a single one."""
        well = self.health is WELL and self.gate is OPEN and not self.leaving
        return well and bool(self.loaded) and self.limits.cuts_single_requests

    def awaits_update(self, version: PolicyVersion) -> bool:
        """Return True if a healthy engine lacks the weights of ``version`` and so waits for the next weight update."""
        return not self.quarantined and version not in self.loaded

    def confirm(self, version: PolicyVersion) -> None:
        """Record the engine's report that it has the complete weights of ``version``."""
        self.loaded, self.loaded_before, self.weights = frozenset((version,)), frozenset(), EngineWeights.CONFIRMED

    def confirm_previous(self) -> None:
        """Record that the engine still has its previous weights, because a load was refused or never began."""
        if self.loaded_before:
            self.loaded, self.loaded_before, self.weights = self.loaded_before, frozenset(), EngineWeights.CONFIRMED

    def lose_weights(self, weights: EngineWeights = EngineWeights.UNKNOWN) -> None:
        """Record that the engine lost its weights and with them its prefix cache."""
        self.loaded, self.loaded_before, self.weights = frozenset(), frozenset(), weights
        self.losses += 1

    def contradiction(self) -> str | None:
        """Describe a contradiction in the engine's state; None if there is none."""
        if bool(self.loaded) != (self.weights is EngineWeights.CONFIRMED):
            return f"its weights are {self.weights}, but it has those of versions {set(self.loaded)}"
        if self.resting and not self.rest_timer:
            return "it rests without an end"
        if self.recovering and not self.quarantined:
            return "it gets the current weights but is not quarantined"
        if self.load != (self.in_flight if self.loaded and self.has_room else None):
            return f"the index of free engines has it with {self.load} requests, but it has {self.in_flight}"
        return None


class EngineTable:
    """Holds the state of all engines: first those of the configuration, then others in the order of joining.

    Samples rely on what the first engines have in common (context, vocabulary, ...); engines that join need as much.

    Args:
        engines: limits of the first engines, at least one.
        version: policy version of the first engines, except for engines whose weights an earlier run may have written.
        in_flight: what every engine must be able to do with running requests at a weight update.
        attachments, extras: kinds of attachments, and names of per-token arrays, that every engine must support.
    """

    def __init__(
        self, engines: Sequence[EngineLimits], version: PolicyVersion, in_flight: OnWeightUpdate = RESUBMIT,
        attachments: Sequence[str] = (), extras: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self._in_flight, self._attachments, self._extras, self._first = in_flight, attachments, extras, version
        self.states = {e.name: EngineState(limits=e, cap=AdmissionCap(e.max_in_flight)) for e in engines}
        self._by_load = LeastLoaded()
        for state in self.states.values():
            if state.limits.written:
                state.lose_weights(EngineWeights.HALF)
            else:
                state.confirm(version)
            self._by_load.join(state)
        self.left: dict[str, EngineState] = {}
        """Last states of engines that have left, by name; answers to their open calls are ignored."""
        self.turnover = 0
        """Counter that grows when an engine joins or leaves."""
        self.row_layout: dict[str, Rows] = {}
        """Row shape and number type of each per-token array (extras) as first received in this run, kept as an empty
        array; all later rows must match."""
        self.max_context = min(e.max_context for e in engines)
        self.vocab_size = min(e.vocab_size for e in engines)
        self.eos_token_ids = frozenset(i for e in engines for i in e.eos_token_ids)
        kinds = {e.logprob_kind for e in engines}
        self.logprob_kind = kinds.pop() if len(kinds) == 1 else "mixed"

    # ---------------------------------------------------------------- joining and leaving engines

    def unfit(self, engine: EngineLimits) -> str | None:
        """Return why the engine cannot join (it lacks something that samples rely on); None if it can join."""
        has, name = "", f"engine {engine.name}"
        if engine.max_context < self.max_context:
            has = f"a context of {engine.max_context} tokens, but {self.max_context} are needed"
        elif engine.vocab_size < self.vocab_size:
            has = f"a vocabulary of {engine.vocab_size} tokens, but {self.vocab_size} are needed"
        elif not self.eos_token_ids.issuperset(engine.eos_token_ids):
            has = (
                f"the end-of-sequence tokens {sorted(engine.eos_token_ids)}, but those of the other engines are "
                f"{sorted(self.eos_token_ids)}"
            )
        elif self._in_flight not in (RESUBMIT, *engine.in_flight_updates):
            has = f"no support for on_weight_update: {self._in_flight}"
        elif lacks := [*set(self._attachments).difference(engine.attachments)]:
            has = f"no support for prompts with {', '.join(sorted(lacks))}"
        elif lacks := [*set(self._extras).difference(engine.extras)]:
            has = f"no {', '.join(sorted(lacks))} to return with its tokens"
        elif self.logprob_kind not in ("mixed", engine.logprob_kind):
            has = (
                f"log-probabilities of kind {engine.logprob_kind}, but those of the other engines are "
                f"{self.logprob_kind}"
            )
        return f"{name} cannot join: it has {has}" if has else None

    def join(self, engine: EngineLimits) -> EngineState:
        """Add an engine, new or returning, whose weights are unknown; :meth:`unfit` must have returned None for it."""
        before = self.left.pop(engine.name, None)
        state = EngineState(limits=engine, cap=AdmissionCap(engine.max_in_flight), weights=EngineWeights.UNKNOWN)
        if before is not None:
            state.losses = before.losses + 1
            if before.gate is not OPEN:  # it may be the same server, and still paused
                state.gate = EngineGate.CLOSED
        self.states[engine.name] = state
        self._by_load.join(state)
        self.turnover += 1
        return state

    def leave(self, name: str) -> None:
        """Remove an engine; raises InvariantError if it has requests in flight."""
        state = self.states[name]
        if state.in_flight:
            raise InvariantError(f"engine {name} has left with {state.in_flight} requests in flight")
        self.left[name] = self.states.pop(name)
        self._by_load.leave(state)
        state.open_call = state.open_probe = state.rest_timer = state.probe_timer = 0
        state.recovering = False
        self.turnover += 1

    def state_of(self, name: str) -> EngineState:
        """Return the state of an engine that is present or has left; changes to an engine that left have no effect."""
        return self.states.get(name) or self.left[name]

    # ---------------------------------------------------------------- picking an engine

    def pick(self, version: PolicyVersion, avoid: str = "", prefer: str = "") -> EngineState | None:
        """Return the least loaded engine that has confirmed ``version`` and has room, or None.

        The engine named ``avoid`` is returned only if there is no other; the engine named ``prefer`` is returned if it
        has at most ``AFFINITY_SLACK`` requests more than the least loaded engine.
        """
        best = self._by_load.first
        if best is not None and (best.limits.name == avoid or version not in best.loaded):
            best = None
            for state in self._by_load:
                if version in state.loaded:
                    if state.limits.name != avoid:
                        best = state
                        break
                    best = state  # the engine to avoid, unless another one follows
        if best is None or not prefer or prefer == avoid:
            return best
        liked = self.states[prefer]
        near = liked.in_flight <= best.in_flight + AFFINITY_SLACK
        return liked if near and version in liked.loaded and liked.has_room else best

    def cached_on(self, name: str, cache_key: tuple[PolicyVersion | None, int] | None) -> str:
        """Return ``name`` if that engine still has the prefix cache of ``cache_key``; otherwise an empty string."""
        state = self.states.get(name)
        return name if state is not None and state.cache_key == cache_key else ""

    def usable(self, version: PolicyVersion) -> bool:
        """Return True if some engine has confirmed ``version``, is not quarantined and was not busy for too long."""
        return any(
            version in s.loaded and not s.quarantined and not s.leaving and s.rests <= RESTS_BEFORE_QUARANTINE
            for s in self.states.values()
        )

    def remedy(self, version: PolicyVersion) -> str:
        """Return advice for the user when no engine is usable, as a clause for an error message."""
        if not self.states:
            return "all engines have left, so add some"
        well = [name for name, state in self.states.items() if state.awaits_update(version)]
        if not well:
            return f"repair one of {', '.join(self.states)}"
        return f"call weight_update, for which {', '.join(well)} {'wait' if well[1:] else 'waits'},"

    def in_flight(self) -> dict[str, int]:
        return {name: s.in_flight for name, s in self.states.items()}

    def metrics(self, in_flight: dict[str, int], version: PolicyVersion) -> dict[str, float]:
        """Return the known metrics of each engine; ``in_flight`` is its number of requests when the step stopped."""
        out: dict[str, float] = {}
        for name, state in self.states.items():
            out[f"engine/{name}/in_flight_at_stop"] = float(in_flight.get(name, 0))
            if (cap := state.cap.value) is not None:
                out[f"engine/{name}/cap"] = float(cap)
            if state.limits.unverified or (state.limits.first_unverified and version == self._first):
                out[f"engine/{name}/unverified_weights"] = 1.0
            out[f"engine/{name}/waits_for_update"] = float(state.awaits_update(version))
            if state.kv_usage is not None:
                out[f"engine/{name}/kv_usage"] = state.kv_usage
        return out

    def count_failure(self, name: str, *, at_once: bool) -> float | None:
        """Count a failure and quarantine the engine, ``at_once`` or after several failures in a row.

        Returns the seconds until the first probe; None if the engine is not quarantined, or was quarantined before.
        """
        state = self.states[name]
        state.failures += 1
        if state.quarantined or not (at_once or state.failures >= FAILURES_BEFORE_QUARANTINE):
            return None
        state.health = EngineHealth.QUARANTINED
        return PROBE_INTERVAL_S

    def mark_well(self, name: str) -> None:
        """Mark an engine as healthy after a probe or load; an engine that rests because it was busy goes on resting."""
        state = self.states[name]
        state.health, state.failures = EngineHealth.RESTING if state.rest_timer else EngineHealth.WELL, 0

    def count_end(self, name: str, in_flight: int) -> None:
        """Count a request that the engine ended normally; ``in_flight`` other requests of april's are still running."""
        state = self.states[name]
        if state.failures or state.rests:
            state.failures = state.rests = 0
        if state.cap.request_ended(in_flight):
            state.update_load()

    def count_refusal(self, name: str, asked_s: float, in_flight: int) -> float | None:
        """Handle a refusal by a busy engine that has ``in_flight`` other requests of april's.

        Returns the seconds for which the engine rests; None if it already rests, or must be probed after too many
        rests in a row.
        """
        state = self.states[name]
        alone = state.health is not EngineHealth.WELL
        state.cap.refused(in_flight, again=alone)
        state.update_load()
        if alone:
            return None
        state.rests += 1
        if state.rests % (RESTS_BEFORE_QUARANTINE + 1) == 0:
            return None
        grown = FIRST_REST_S * 2.0 ** min(state.rests - 1, RESTS_BEFORE_QUARANTINE)
        return min(max(asked_s, grown), LONGEST_REST_S)
