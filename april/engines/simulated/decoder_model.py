"""A discrete-event model of an engine with continuous batching: it computes times and token counts, no token ids.

Every active sequence gains one token per decode step. The duration of a step follows from the batch and the KV at its
start (``DecodeCost``). Between two steps, in this order:

* Finished sequences leave.
* While the KV cache has no room for one more token per sequence, the youngest sequence is preempted: its KV is dropped,
  and it returns to the head of the queue and is prefilled again later.
* Requests are admitted first come, first served, as slots and KV allow. Their prefill delays the next step.

A request added or aborted during a step changes the batch from the next step on; an aborted sequence gets no token of
the step in progress.

Invariant: only whole steps yield tokens, and token counts equal those of a loop over single steps. The model itself
does not loop: it computes the time of the next change of the batch by a formula. All active sequences gain tokens at
the same time, so a heap ordered by last step gives the next to end. Only ``abort(None)`` visits all sequences.

Not modelled: prompt KV shared by the samples of a group, the token that a real prefill yields, CPU time per request.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from april.engines.simulated.decode_cost import DecodeCost


class Finished(NamedTuple):
    """A request that has received all its tokens, and the time of the last one (seconds)."""

    request_id: str
    at_s: float


@dataclass(slots=True)
class DecoderCounters:
    """Totals since the decoder was created.

    Attributes:
        decode_steps: Whole decode steps.
        busy_slot_steps: Sequences that gained a token, summed over decode steps.
        slot_steps: Slots (``max_running``), summed over decode steps.
        prefill_tokens: Tokens prefilled; a preempted sequence counts again when it is prefilled again.
        generated_tokens: Response tokens.
        requests: Requests added.
        aborts: Requests aborted.
        preemptions: Times that a sequence lost its KV to make room.
        busy_time_s: Seconds spent in steps and prefill.
        busy_slot_time_s: Seconds in which slots were occupied, summed over slots.
    """

    decode_steps: int = 0
    busy_slot_steps: int = 0
    slot_steps: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    requests: int = 0
    aborts: int = 0
    preemptions: int = 0
    busy_time_s: float = 0.0
    busy_slot_time_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request; at step s it has ``kv_offset + s`` resident tokens and ``last_step - s`` tokens to come."""

    request_id: str
    prefix_tokens: int
    new_tokens: int
    generated: int = 0
    """Tokens generated so far; kept up to date only while waiting."""
    kv_offset: int = 0
    last_step: int = -1
    """Step at which the sequence ends; -1 while not running."""


class SimulatedDecoder:
    """Simulates continuous batching on a clock that the caller moves; times are absolute seconds and never decrease.

    ``next_event_time`` says when to call ``advance``. A step that could start at time t starts only when the clock
    moves past t, so that it includes all requests that are added at t. Until then, ``next_event_time`` is the smallest
    float above t.

    Args:
        cost: Cost of steps and prefill, and capacity of the KV cache.
        max_running: Number of decode slots.
        start_s: Time at which the clock begins.
        admission_reserve: Number of KV tokens that stay free per running sequence when a request is admitted (>= 1).
            Larger values mean fewer preemptions, but fewer running sequences. With the roofline of Qwen3-4B on an H100
            (128 and 256 slots), throughput was within 0.7 % of the best for 64 to 256, up to 5 % less for 1 and 1024.
    """

    def __init__(self, cost: DecodeCost, max_running: int, start_s: float = 0.0, admission_reserve: int = 128) -> None:
        if max_running < 1 or admission_reserve < 1:
            raise ValueError(f"max_running {max_running} and admission_reserve {admission_reserve} must be at least 1")
        self._cost = cost
        self._capacity = cost.kv_capacity_tokens
        self._max_running = max_running
        self._reserve = admission_reserve
        self._now = start_s
        self._paused = False
        self._waiting: OrderedDict[str, _Sequence] = OrderedDict()  # in order of arrival
        self._running: OrderedDict[str, _Sequence] = OrderedDict()  # in order of arrival, before those in _waiting
        self._ends: list[tuple[int, int, _Sequence]] = []  # heap of (last_step, tie, sequence); may hold stale entries
        self._tie_breaker = 0
        # A stretch is a run of steps with the same batch; the anchor is the step boundary at which it begins.
        self._steps = 0  # whole steps up to the anchor
        self._kv_offsets = 0  # sum of kv_offset over _running; KV at the anchor is _kv_offsets + len(_running) * _steps
        self._stepping = False
        self._first_end = 0.0  # time at which the first step of the stretch ends
        self._target = 0  # steps from the anchor until a sequence ends or the KV cache is full
        self._done = 0  # whole steps from the anchor to _now
        self._counters = DecoderCounters()
        self._accounted_to = start_s
        self._next: float | None = None  # cache of next_event_time

    # -- the present state -------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Time of the last ``advance``."""
        return self._now

    @property
    def running(self) -> int:
        """Number of sequences in decode slots."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of requests in the queue, preempted ones included."""
        return len(self._waiting)

    @property
    def kv_tokens(self) -> int:
        """Number of tokens resident in the KV cache."""
        return self._kv_offsets + len(self._running) * (self._steps + self._done)

    @property
    def stopped(self) -> bool:
        """True if no step is in progress."""
        return not self._stepping

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._running or request_id in self._waiting

    def __repr__(self) -> str:
        state = "paused" if self._paused else "stepping" if self._stepping else "stopped"
        return (
            f"<SimulatedDecoder {state} at {self._now:.6f} s: {self.running}/{self._max_running} running, "
            f"{self.waiting} waiting, {self.kv_tokens} of {self._capacity} KV tokens>"
        )

    def tokens_of(self, request_id: str) -> int:
        """Return the tokens generated so far for a running or waiting request; KeyError for any other."""
        sequence = self._running.get(request_id)
        return self._waiting[request_id].generated if sequence is None else self._generated(sequence)

    def counters(self) -> DecoderCounters:
        """Return a copy of the totals, exact at ``now``."""
        self._account()
        steps, tokens = self._done, self._done * len(self._running)
        total = self._counters
        return replace(
            total,
            decode_steps=total.decode_steps + steps,
            busy_slot_steps=total.busy_slot_steps + tokens,
            slot_steps=total.slot_steps + steps * self._max_running,
            generated_tokens=total.generated_tokens + tokens,
        )

    # -- requests and pauses -----------------------------------------------------------------------------------------

    def add(self, request_id: str, prefix_tokens: int, new_tokens: int) -> None:
        """Queue a request at ``now``: prefill ``prefix_tokens``, then generate exactly ``new_tokens`` (>= 1) tokens.

        ``request_id`` is the id of no other request in flight. Raises ValueError if the request could never fit into
        the KV cache.
        """
        if self._capacity is not None and prefix_tokens + new_tokens > self._capacity:
            raise ValueError(
                f"request {request_id!r} needs {prefix_tokens} + {new_tokens} tokens of KV cache, but the engine has "
                f"{self._capacity}; shorten it or give the engine more KV cache"
            )
        self._waiting[request_id] = _Sequence(request_id, prefix_tokens, new_tokens)
        self._counters.requests += 1
        self._next = None

    def abort(self, request_ids: Iterable[str] | None = None) -> dict[str, int]:
        """Remove requests (None means all) at ``now``; return the generated tokens of each known id."""
        ids = [*self._running, *self._waiting] if request_ids is None else request_ids
        removed: dict[str, int] = {}
        stopped: list[_Sequence] = []
        for request_id in ids:
            sequence = self._waiting.pop(request_id, None)
            if sequence is None:
                sequence = self._running.get(request_id)
                if sequence is None or request_id in removed:
                    continue
                removed[request_id] = self._generated(sequence)
                stopped.append(sequence)
            else:
                removed[request_id] = sequence.generated
        if stopped:
            self._leave_mid_stretch(stopped)
        self._counters.aborts += len(removed)
        self._next = None
        return removed

    def pause(self) -> None:
        """Start no further step. The step in progress ends as planned, and ``stopped`` is True from then on."""
        self._paused = True
        self._next = None

    def resume(self) -> None:
        """Undo ``pause``: the queue and the running sequences continue where they were."""
        self._paused = False
        self._next = None

    # -- time --------------------------------------------------------------------------------------------------------

    def next_event_time(self) -> float:
        """Return the time of the next event if nothing is added or aborted; inf when idle or paused between steps."""
        if self._next is None:
            if self._stepping:
                self._next = self._end_of(self._next_change())
            elif self._paused or not (self._running or self._waiting):
                self._next = math.inf
            else:
                self._next = math.nextafter(self._now, math.inf)
        return self._next

    def advance(self, to_time: float) -> list[Finished]:
        """Move the clock to ``to_time``; return the requests that ended until then, sorted by end time, then arrival.

        Raises:
            ValueError: ``to_time`` lies before ``now``.
        """
        if to_time <= self._now:
            if to_time < self._now:
                raise ValueError(f"time cannot go back from {self._now} to {to_time}")
            return []
        finished: list[Finished] = []
        while True:
            if not self._stepping and not self._start_stretch():
                break
            change = self._next_change()
            at = self._end_of(change)
            if at > to_time:
                # If a step ends exactly at to_time, requests that are added at that time can join the next step.
                self._done = self._steps_at(to_time)
                if self._done and self._end_of(self._done) == to_time:
                    self._end_stretch(self._done, to_time, finished)
                break
            self._end_stretch(change, at, finished)
            if at == to_time:
                break
        self._now = to_time
        self._next = None
        return finished

    def _start_stretch(self) -> bool:
        """Preempt, admit, and begin a step at ``now``; return False if paused or if there is nothing to do."""
        if self._paused:
            return False
        running, waiting, capacity = self._running, self._waiting, self._capacity
        steps, n = self._steps, len(self._running)
        kv = self._kv_offsets + n * steps
        if capacity is not None:
            while kv + n > capacity:
                request_id, youngest = running.popitem(last=True)
                youngest.generated = self._generated(youngest)
                youngest.last_step = -1
                waiting[request_id] = youngest
                waiting.move_to_end(request_id, last=False)
                self._kv_offsets -= youngest.kv_offset
                kv -= youngest.kv_offset + steps
                n -= 1
                self._counters.preemptions += 1
        prefill = 0
        while waiting and n < self._max_running:
            sequence = next(iter(waiting.values()))
            resident = sequence.prefix_tokens + sequence.generated
            if capacity is not None and n and kv + resident + self._reserve * (n + 1) > capacity:
                break
            del waiting[sequence.request_id]
            running[sequence.request_id] = sequence
            sequence.kv_offset = resident - steps
            sequence.last_step = steps + sequence.new_tokens - sequence.generated
            self._tie_breaker += 1
            heappush(self._ends, (sequence.last_step, self._tie_breaker, sequence))
            self._kv_offsets += sequence.kv_offset
            kv += resident
            prefill += resident
            n += 1
        if n == 0:
            return False
        self._account()
        self._counters.prefill_tokens += prefill
        self._stepping = True
        self._first_end = self._now + self._cost.prefill_s(prefill) + self._cost.step_s(n, kv)
        self._done = 0
        self._set_target()
        return True

    def _set_target(self) -> None:
        """Set the number of steps from the anchor until a sequence ends or the KV cache is full."""
        ends, n = self._ends, len(self._running)
        if n == 0:
            ends.clear()
            self._target = 1
            return
        if len(ends) > 2 * n + 64:  # most entries are stale: aborted or preempted sequences
            self._ends = ends = [entry for entry in ends if entry[0] == entry[2].last_step]
            heapify(ends)
        while ends[0][0] != ends[0][2].last_step:
            heappop(ends)
        self._target = ends[0][0] - self._steps
        if self._capacity is not None:
            kv = self._kv_offsets + n * self._steps
            self._target = min(self._target, (self._capacity - kv) // n)

    def _next_change(self) -> int:
        """Return the number of steps from the anchor to the next change of the batch, admissions included."""
        following = self._done + 1
        if self._paused:
            return following
        n = len(self._running)
        if self._waiting and n < self._max_running and following < self._target:
            if self._capacity is None or n == 0:
                return following
            head = next(iter(self._waiting.values()))
            kv = self._kv_offsets + n * (self._steps + following)
            if kv + head.prefix_tokens + head.generated + self._reserve * (n + 1) <= self._capacity:
                return following
        return self._target

    def _end_stretch(self, steps: int, at: float, finished: list[Finished]) -> None:
        """End the stretch ``steps`` steps after the anchor, at time ``at``, and remove the finished sequences."""
        self._now = at
        self._move_anchor(steps)
        self._stepping = False
        ends, done = self._ends, self._steps
        while ends and ends[0][0] <= done:
            last_step, _, sequence = heappop(ends)
            if last_step == sequence.last_step:
                self._remove(sequence)
                finished.append(Finished(sequence.request_id, at))

    def _leave_mid_stretch(self, sequences: list[_Sequence]) -> None:
        """Remove running sequences at ``now``; the step in progress keeps its end time."""
        current_end = self._end_of(self._done + 1) if self._stepping else 0.0
        self._move_anchor(self._done)
        for sequence in sequences:
            self._remove(sequence)
        if self._stepping:
            self._first_end = current_end
            self._set_target()

    def _remove(self, sequence: _Sequence) -> None:
        del self._running[sequence.request_id]
        self._kv_offsets -= sequence.kv_offset
        sequence.last_step = -1

    def _generated(self, sequence: _Sequence) -> int:
        return sequence.new_tokens - (sequence.last_step - self._steps - self._done)

    def _move_anchor(self, steps: int) -> None:
        """Move the anchor forward by ``steps`` steps of the present batch, and count them."""
        self._account()
        n = len(self._running)
        total = self._counters
        total.decode_steps += steps
        total.slot_steps += steps * self._max_running
        total.busy_slot_steps += steps * n
        total.generated_tokens += steps * n
        self._steps += steps
        self._done = 0

    def _account(self) -> None:
        """Add the time since the last change of the batch to the busy times."""
        if self._stepping:
            passed = self._now - self._accounted_to
            self._counters.busy_time_s += passed
            self._counters.busy_slot_time_s += passed * len(self._running)
        self._accounted_to = self._now

    def _end_of(self, step: int) -> float:
        """Return the time at which the ``step``-th step (1, 2, ...) since the anchor ends."""
        n = len(self._running)
        if step == 1:
            return self._first_end
        return self._first_end + self._cost.steps_s(step - 1, n, self._kv_offsets + n * (self._steps + 1))

    def _steps_at(self, time: float) -> int:
        """Return the number of steps since the anchor that have ended at ``time``, exactly as by ``_end_of``."""
        if time < self._first_end:
            return 0
        n = len(self._running)
        kv = self._kv_offsets + n * (self._steps + 1)
        steps = 1 + self._cost.steps_within(time - self._first_end, n, kv)
        while self._end_of(steps) > time:
            steps -= 1
        while self._end_of(steps + 1) <= time:
            steps += 1
        return steps
