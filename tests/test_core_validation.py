"""validate() finds every kind of contradiction: each book is falsified once, and must be called out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import pytest
from core_machine import CoreMachine, settings

from april.core import events as ev
from april.core.types import (
    CallState,
    DropReason,
    GenerateCall,
    Group,
    GroupState,
    Replay,
    SampleId,
    SampleState,
)
from april.errors import InvariantError


def machine() -> CoreMachine:
    """Group 0 is complete (surplus), group 1 has a finished and a running sample, group 2 waits for a place."""
    m = CoreMachine(settings(n=2, samples=2, over=3, max_in_flight=4), lambda g, i: 4 if (g, i) != (1, 1) else 40)
    m.post(ev.StepRequested())
    for key in [(0, 0), (0, 1), (1, 0)]:
        m.end(next(a.id for a in m.in_flight.values() if a.sample.id == key))
    m.core.validate()
    return m


def sample(m: CoreMachine, group: int, index: int):
    """One held sample."""
    return m.core.buffer.groups[group].samples[index]


def set_state(group: int, index: int, state: SampleState) -> Callable[[CoreMachine], None]:
    """Falsify one sample's state."""
    return lambda m: setattr(sample(m, group, index), "state", state)


def set_call(m: CoreMachine, group: int, index: int, **wrong: object) -> None:
    """Falsify a sample's first call."""
    for name, value in wrong.items():
        setattr(sample(m, group, index).calls[0], name, value)


def two_attempts(m: CoreMachine) -> None:
    first, *others = m.core.attempts.values()
    others[0].call = first.call


def too_long(m: CoreMachine) -> None:
    tape = sample(m, 1, 0).tape
    for _ in range(400):
        tape.add_environment(tape.tokens[:3], m.core.clock.current)


def surplus_attempt(m: CoreMachine) -> None:
    (attempt,) = [a for a in m.core.attempts.values() if a.sample.id == (1, 1)]
    nobody = Group(99, attempt.sample.group.prompt, 1).samples[0]
    call = GenerateCall(nobody, attempt.sampling, 0)
    m.core.attempts["x" * 32] = replace(attempt, id="x" * 32, call=call)


def judged(m: CoreMachine) -> None:
    group = m.core.buffer.groups[0]
    group.state = GroupState.JUDGED


FALSIFIED: dict[str, tuple[Callable[[CoreMachine], None], str]] = {
    "two attempts": (two_attempts, "more than one attempt"),
    "unfinished": (lambda m: setattr(m.core.buffer.groups[1], "unfinished", 2), "has 1 unfinished"),
    "not ready": (lambda m: setattr(m.core.buffer.groups[0], "state", GroupState.OPEN), "neither ready nor judged"),
    "broken tape": (lambda m: sample(m, 1, 0).tape.segments.clear(), "segments cover 0 of 4"),
    "settled": (set_state(1, 1, SampleState.LEASED), "settled and still held"),
    "no attempt": (lambda m: set_call(m, 1, 1, state=CallState.QUEUED), "in flight without an attempt"),
    "outside the queue": (lambda m: setattr(sample(m, 1, 1), "ticket", 9), "outside the queue"),
    "call": (set_state(1, 1, SampleState.SCORING), "it has calls and does not run"),
    "judged too early": (lambda m: setattr(m.core.buffer.groups[1], "state", GroupState.JUDGED), "or it is too early"),
    "no filter": (judged, "a filter that does not exist"),
    "replay": (lambda m: setattr(sample(m, 1, 1), "replay", Replay(deque(), None)), "is replayed and is beyond"),
    "calls": (lambda m: set_call(m, 1, 0, start=3, end=5), r"call \[3, 5\) after"),
    "no result": (lambda m: set_call(m, 1, 0, finish=None), "a complete one without its result"),
    "calls end": (lambda m: sample(m, 1, 0).calls.clear(), "finished, but its calls end at 0 of 4"),
    "opened": (lambda m: set_call(m, 1, 1, start=9), r"call \[9, ...\) after token 0 of 0"),
    "surplus attempt": (surplus_attempt, "belongs to <Sample g99.s0 new"),
    "cap": (lambda m: vars(m.core.context.places).update(total=0, most=0), "more than max_in_flight"),
    "too long": (too_long, "longer than max_response_len"),
    "engine load": (lambda m: setattr(m.core.engines.states["e0"], "in_flight", 9), "counts 9 in flight"),
    "places": (lambda m: m.core.context.places.reserved.add(SampleId(1, 0)), "places are reserved for"),
    "queue length": (lambda m: setattr(m.core.over_sampler, "waiting", 7), "7 in the queue"),
    "ready list": (lambda m: m.core.monitor._ready.clear(), "the ready list is not"),
    "aborts": (lambda m: m.core.aborts._pending.update(dict.fromkeys("abcdefgh")), "8 aborts pending"),
    "held tokens": (lambda m: setattr(m.core.tokens, "held", 3), "3 tokens held, a recount finds 12"),
    "held prompts": (lambda m: setattr(m.core.prompts, "held", 9), "9 prompts held"),
    "lost tokens": (lambda m: setattr(m.core.tokens, "observed", 99), "tokens were lost or made up"),
    "lost prompts": (lambda m: m.core.prompts.dropped.update([DropReason.FAILED]), "prompts were lost or made up"),
}


@pytest.mark.parametrize("what", FALSIFIED)
def test_validate_finds_what_was_falsified(what: str) -> None:
    """A book that is wrong is found, with words that say which."""
    m = machine()
    falsify, words = FALSIFIED[what]
    falsify(m)

    with pytest.raises(InvariantError, match=words):
        m.core.validate()
