"""The clockwork of the simulated engine against a loop over single tokens."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from april.engines.simulated.decode_cost import DecodeCost, roofline
from april.engines.simulated.decoder_model import Finished, SimulatedDecoder
from april.engines.simulated.response_lengths import LognormalLengths


class SingleStepDecoder:
    """Brute-force reference: one step after the other, everything counted anew each time."""

    def __init__(self, cost: DecodeCost, slots: int, reserve: int) -> None:
        self.cost, self.slots, self.reserve = cost, slots, reserve
        self.now, self.paused = 0.0, False
        self.step_end: float | None = None
        self.running: list[dict[str, Any]] = []
        self.waiting: list[dict[str, Any]] = []
        self.steps = self.prefilled = self.generated = self.aborts = self.preemptions = 0
        self.busy = self.busy_slots = 0.0

    def kv(self) -> int:
        return sum(s["prefix"] + s["made"] for s in self.running)

    def add(self, name: str, prefix: int, new: int) -> None:
        self.waiting.append({"name": name, "prefix": prefix, "new": new, "made": 0})

    def abort(self, names: list[str]) -> dict[str, int]:
        gone = [s for s in self.running + self.waiting if s["name"] in names]
        self.running = [s for s in self.running if s not in gone]
        self.waiting = [s for s in self.waiting if s not in gone]
        self.aborts += len(gone)
        return {s["name"]: s["made"] for s in gone}

    def _pass_time(self, to: float) -> None:
        if self.step_end is not None:
            self.busy += to - self.now
            self.busy_slots += (to - self.now) * len(self.running)
        self.now = to

    def _start_step(self) -> bool:
        cap = self.cost.kv_capacity_tokens or 10**9
        while self.kv() + len(self.running) > cap:
            self.waiting.insert(0, self.running.pop())
            self.preemptions += 1
        prefill = 0
        while self.waiting and len(self.running) < self.slots:
            tokens = self.waiting[0]["prefix"] + self.waiting[0]["made"]
            if self.running and self.kv() + tokens + self.reserve * (len(self.running) + 1) > cap:
                break
            self.running.append(self.waiting.pop(0))
            prefill += tokens
        if not self.running:
            return False
        self.prefilled += prefill
        step = self.cost.base_s + self.cost.per_sequence_s * len(self.running) + self.cost.per_kv_token_s * self.kv()
        self.step_end = self.now + prefill * self.cost.per_prefill_token_s + step
        return True

    def advance(self, to: float) -> list[Finished]:
        finished: list[Finished] = []
        while self.now < to:
            if self.step_end is None and (self.paused or not self._start_step()):
                break
            assert self.step_end is not None
            if self.step_end > to:
                break
            self._pass_time(self.step_end)
            self.step_end = None
            self.steps += 1
            self.generated += len(self.running)
            for sequence in self.running:
                sequence["made"] += 1
            finished += [Finished(s["name"], self.now) for s in self.running if s["made"] == s["new"]]
            self.running = [s for s in self.running if s["made"] < s["new"]]
        self._pass_time(to)
        return finished


# Costs and times are multiples of 2^-8, so that sums of floats are exact and can be compared with ==.
exact_costs = st.builds(
    DecodeCost,
    base_s=st.sampled_from([0.25, 1.0]),
    per_sequence_s=st.sampled_from([0.0, 0.125]),
    per_kv_token_s=st.sampled_from([0.0, 2.0**-8, 2.0**-5]),
    per_prefill_token_s=st.sampled_from([0.0, 2.0**-4]),
    kv_capacity_tokens=st.one_of(st.none(), st.integers(45, 80)),
)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.tuples(st.integers(0, 20), st.integers(1, 25)), min_size=1, max_size=5)),
        st.tuples(st.just("wait"), st.one_of(st.integers(1, 64 * 20), st.integers(1, 20).map(lambda s: 64 * s))),
        st.tuples(st.just("next"), st.integers(1, 4)),
        st.tuples(st.just("abort"), st.lists(st.integers(1, 8), min_size=1, max_size=3)),
        st.tuples(st.just("pause")),
        st.tuples(st.just("resume")),
    ),
    min_size=12,
    max_size=30,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(exact_costs, st.integers(1, 8), st.integers(1, 4), operations)
def test_jumping_equals_single_steps(cost: DecodeCost, slots: int, reserve: int, ops: list[tuple[Any, ...]]) -> None:
    """Ends, token counts and counters equal those of a loop over steps, with prefill, aborts, pauses and preemption."""
    decoder, reference = SimulatedDecoder(cost, slots, 0.0, reserve), SingleStepDecoder(cost, slots, reserve)
    added = 0

    def advance(to: float) -> None:
        assert decoder.advance(to) == reference.advance(to)
        compare(decoder, reference)

    def jump() -> None:
        due = decoder.next_event_time()
        if due < math.inf:
            assert due > decoder.now
            advance(due)
            advance(math.ceil(due * 64) / 64)

    for op, *args in ops:
        if op == "add":
            for prefix, new in args[0]:
                decoder.add(f"r{added}", prefix, new)
                reference.add(f"r{added}", prefix, new)
                added += 1
        elif op == "wait":
            advance(decoder.now + args[0] / 64)
        elif op == "next":
            for _ in range(args[0]):
                jump()
        elif op == "abort":
            names = [f"r{added - back}" for back in args[0]]
            assert decoder.abort(names) == reference.abort(names)
        else:
            getattr(decoder, op)()
            reference.paused = op == "pause"
        compare(decoder, reference)

    decoder.resume()
    reference.paused = False
    hops = 0
    while decoder.running or decoder.waiting:
        jump()
        hops += 1
        assert hops < 10_000
    assert decoder.counters().requests == added


def compare(decoder: SimulatedDecoder, reference: SingleStepDecoder) -> None:
    """Every number that both know."""
    counters = decoder.counters()
    assert decoder.now == reference.now
    assert (decoder.running, decoder.waiting) == (len(reference.running), len(reference.waiting))
    assert decoder.kv_tokens == reference.kv()
    assert decoder.stopped == (reference.step_end is None)
    for sequence in reference.running + reference.waiting:
        assert decoder.tokens_of(sequence["name"]) == sequence["made"]
    assert counters.decode_steps == reference.steps
    assert counters.slot_steps == reference.steps * reference.slots
    assert counters.generated_tokens == counters.busy_slot_steps == reference.generated
    assert counters.prefill_tokens == reference.prefilled
    assert (counters.aborts, counters.preemptions) == (reference.aborts, reference.preemptions)
    assert counters.busy_time_s == pytest.approx(reference.busy)
    assert counters.busy_slot_time_s == pytest.approx(reference.busy_slots)


def test_jumping_equals_single_steps_with_real_costs() -> None:
    """With the cost of a real model, refilled from a queue, ends come in the same order at the same time (1e-9)."""
    cost = replace(roofline("qwen3-8b", "h100"), kv_capacity_tokens=12_000)
    decoder, reference = SimulatedDecoder(cost, 16, 0.0, 8), SingleStepDecoder(cost, 16, 8)
    lengths = LognormalLengths(500, 0.4, 0.8, cap=4000, seed=2).group(0, 100)
    for index, length in enumerate(lengths):
        for each in (decoder, reference):
            each.add(str(index), 100, int(length))

    ours, theirs = decoder.advance(1e5), reference.advance(1e5)

    assert [f.request_id for f in ours] == [f.request_id for f in theirs]
    assert [f.at_s for f in ours] == pytest.approx([f.at_s for f in theirs], rel=1e-9)
    assert decoder.counters().preemptions == reference.preemptions > 0
    assert decoder.counters().decode_steps == reference.steps


def lines_run(requests: int, slots: int, length: int) -> int:
    """Lines of Python that the clockwork executes to serve ``requests`` with ``slots`` in flight, refilled."""
    decoder = SimulatedDecoder(DecodeCost(1e-3, 1e-6, 1e-9, 1e-6, 10**9), slots)
    lines = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal lines
        lines += event == "line" and "april" in frame.f_code.co_filename
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for index in range(requests):
            decoder.add(str(index), 10, length + index * 37 % length)
        while decoder.running or decoder.waiting:
            decoder.advance(decoder.next_event_time())
    finally:
        sys.settrace(before)
    return lines


def test_work_depends_on_events_not_on_tokens() -> None:
    """Responses a thousand times longer take no more work: time jumps."""
    assert lines_run(300, slots=16, length=60_000) < 1.3 * lines_run(300, slots=16, length=60)


def test_work_per_event_does_not_grow_with_the_number_in_flight() -> None:
    """Sixteen times as many in flight, the same work per request: nothing is scanned."""
    assert lines_run(2000, slots=512, length=5000) < 1.1 * lines_run(2000, slots=32, length=5000)


def test_stale_heap_entries_are_swept() -> None:
    """Aborting for ever does not make the clockwork grow."""
    decoder = SimulatedDecoder(DecodeCost(1.0, 0.0, 0.0), 8)
    decoder.add("stays", 1, 10**6)
    for number in range(2000):
        decoder.add(f"goes{number}", 1, 10**7)
        decoder.advance(decoder.now + 1.5)
        decoder.abort([f"goes{number}"])

    assert len(decoder._ends) < 200
    assert decoder.advance(2e6) == [Finished("stays", 1e6)]


def test_impossible_requests_are_refused_by_the_clockwork() -> None:
    """What can never fit, no slots, and time that goes back."""
    decoder = SimulatedDecoder(DecodeCost(1.0, 0.0, 0.0, 0.0, 100), 2)
    decoder.add("a", 50, 50)

    with pytest.raises(ValueError, match="the engine has 100"):
        decoder.add("b", 51, 50)
    with pytest.raises(ValueError, match="at least 1"):
        SimulatedDecoder(DecodeCost(1.0, 0.0, 0.0), 0)
    decoder.advance(3.0)
    with pytest.raises(ValueError, match="cannot go back"):
        decoder.advance(2.0)
    with pytest.raises(KeyError):
        decoder.tokens_of("b")
    assert "a" in decoder
    assert "1/2 running, 0 waiting, 53 of 100 KV tokens" in repr(decoder)
