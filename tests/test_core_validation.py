"""States: one table of legal changes, one function that makes them, and a check that finds books that are wrong."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from typing import Any

import pytest
from core_machine import CoreMachine, asked
from msgspec import structs

from april.core.types import (
    LEGAL_TRANSITIONS,
    AttemptState,
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

ENUMS: tuple[type[StrEnum], ...] = (SampleState, CallState, AttemptState, GroupState)


@pytest.mark.parametrize("kind", ENUMS, ids=lambda kind: kind.__name__)
def test_only_what_the_table_has_is_done(kind: type[StrEnum]) -> None:
    """Every pair of states: a legal change is made and told, any other raises with the story and changes nothing."""
    for before in kind:
        for after in kind:
            m = asked(samples=2)
            call = m.sample(0).chains[0].calls[0]
            things = {SampleState: m.sample(0), CallState: call, AttemptState: call.attempt}
            thing: Any = things.get(kind, m.sample(0).group)
            thing.state = before
            if after in LEGAL_TRANSITIONS[before]:
                m.core.context.change_state(thing, after, "as the test wants it")
                assert thing.state is after
                assert m.core.story(SampleId(0, 0)).endswith("as the test wants it")
            else:
                with pytest.raises(InvariantError, match=rf"cannot go from {before} to {after} \(no.*story of g0"):
                    m.core.context.change_state(thing, after, "no")
                assert thing.state is before


# ---------------------------------------------------------------- books that are wrong


def two_attempts(m: CoreMachine) -> None:
    first, *others = m.core.attempts.values()
    others[0].call = first.call


def too_long(m: CoreMachine) -> None:
    tape = m.sample(1, 0).chains[0].tape
    for _ in range(400):
        tape.add_environment(tape.tokens[:3], m.core.clock.current)


def surplus_attempt(m: CoreMachine) -> None:
    attempt = m.attempt(1, 1)
    nobody = Group(99, attempt.sample.group.prompt, 1).samples[0]
    call = GenerateCall(nobody.chains[0], attempt.request.sampling, 0)
    request = structs.replace(attempt.request, attempt_id="x" * 32)
    m.core.attempts["x" * 32] = replace(attempt, request=request, call=call)


def put(path: str, **wrong: object) -> Callable[[CoreMachine], None]:
    """Falsify what stands there: of the core, or of sample, first chain or first call ``group.index``."""

    def falsify(m: CoreMachine) -> None:
        kind, _, where = path.partition(" ")
        thing: Any = m.core
        if kind in ("sample", "chain", "call"):
            thing = m.sample(*map(int, where.split(".")))
            thing = thing if kind == "sample" else thing.chains[0]
            thing = thing.calls[0] if kind == "call" else thing
        elif kind == "group":
            thing = m.core.buffer.groups[int(where)]
        else:
            for name in kind.split("."):
                thing = thing[name] if isinstance(thing, dict) else getattr(thing, name)
        for name, value in wrong.items():
            setattr(thing, name, value)

    return falsify


FALSIFIED: dict[str, tuple[Callable[[CoreMachine], Any], str]] = {
    "two attempts": (two_attempts, "more than one attempt"),
    "unfinished": (put("group 1", unfinished=2), "has 1 unfinished"),
    "not ready": (put("group 0", state=GroupState.OPEN), "neither ready nor judged"),
    "broken tape": (lambda m: m.sample(1, 0).chains[0].tape.segments.clear(), "segments cover 0 of 4"),
    "settled": (put("sample 1.1", state=SampleState.LEASED), "settled but still held"),
    "no attempt": (put("call 1.1", state=CallState.QUEUED), r"(?s)without an attempt.*story of g1.s1.*<RolloutCore"),
    "outside the queue": (put("sample 1.1", ticket=9), "outside the queue"),
    "call": (put("sample 1.1", state=SampleState.SCORING), "it has calls but does not run"),
    "judged too early": (put("group 1", state=GroupState.BEING_JUDGED), "or it is either of these too early"),
    "no filter": (put("group 0", state=GroupState.BEING_JUDGED), "a filter that does not exist"),
    "replay": (put("chain 1.1", replay=Replay(deque(), None)), "is replayed, but its tokens are beyond"),
    "calls": (put("call 1.0", start=3, end=5), r"call \[3, 5\) after"),
    "no result": (put("call 1.0", finish=None), "a complete one without its result"),
    "calls end": (lambda m: m.sample(1, 0).chains[0].calls.clear(), "finished, but its calls end at 0 of 4"),
    "opened": (put("call 1.1", start=9), r"call \[9, ...\) after token 0 of 0"),
    "surplus attempt": (surplus_attempt, "belongs to <Sample g99.s0 new"),
    "cap": (put("context.places", total=0, max_taken=0), "more requests are in flight than max_in_flight"),
    "too long": (too_long, "longer than max_response_len"),
    "engine load": (put("engines.states.a", in_flight=9), "counts 9 requests in flight"),
    "places": (lambda m: m.core.context.places.reserved.add(SampleId(1, 0)), "places are reserved for"),
    "queue length": (put("over_sampler.training", waiting=7), "7 in the queue"),
    "places of evaluations": (put("context.places", reserved_by_evaluations=1), "evaluations reserve 1 places"),
    "ready list": (lambda m: m.core.monitor._ready.clear(), "the ready list is not"),
    "aborts": (lambda m: m.core.aborts._pending.update(dict.fromkeys("abcdefgh")), "8 aborts pending"),
    "held tokens": (put("tokens", held=3), "3 tokens held, but a recount finds 12"),
    "held prompts": (put("prompts", held=9), "9 prompts held"),
    "lost tokens": (put("tokens", observed=99), "tokens do not add up"),
    "lost prompts": (lambda m: m.core.prompts.dropped.update([DropReason.FAILED]), "prompts do not add up"),
}


@pytest.mark.parametrize("what", FALSIFIED)
def test_validate_finds_what_was_falsified(what: str) -> None:
    """A book that is wrong is found, with words that say which; the error tells the story of the sample."""
    # group 0 is complete (surplus), group 1 has a finished and a running sample, group 2 waits for a place
    m = asked(lambda g, i: 4 if (g, i) != (1, 1) else 40, n=2, samples=2, over=3, max_in_flight=4)
    m.finish((0, 0), (0, 1), (1, 0))
    m.core.validate()
    falsify, words = FALSIFIED[what]
    falsify(m)
    with pytest.raises(InvariantError, match=words):
        m.core.validate()
