"""One table of legal changes, one function that makes them, and a story that tells of each."""

from __future__ import annotations

import ast
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
from core_machine import CoreMachine, settings

from april.core import events as ev
from april.core.types import (
    LEGAL,
    AttemptState,
    CallState,
    EngineFinish,
    GroupState,
    SampleId,
    SampleState,
)
from april.errors import InvariantError

ENUMS: tuple[type[StrEnum], ...] = (SampleState, CallState, AttemptState, GroupState)
PACKAGE = Path(__file__).parent.parent / "april"


def running() -> CoreMachine:
    """One group of two samples that generate."""
    m = CoreMachine(settings(n=1, samples=2), lambda g, i: 20)
    m.post(ev.StepRequested())
    return m


def things(m: CoreMachine) -> dict[type[StrEnum], Any]:
    """One of each that has a state."""
    group = m.core.buffer.groups[0]
    call = group.samples[0].calls[0]
    return {SampleState: group.samples[0], CallState: call, AttemptState: call.attempt, GroupState: group}


def test_the_table_has_every_state_and_names_are_never_shared() -> None:
    """Each state has its row; a row leads to states of the same kind; no two kinds share a word."""
    states = [state for kind in ENUMS for state in kind]
    assert len(set(map(str, states))) == len(states)
    assert set(LEGAL) == set(states)
    for state, after in LEGAL.items():
        assert all(type(other) is type(state) for other in after)


def test_settled_samples_and_complete_calls_stay_what_they_are() -> None:
    """What was handed to the trainer, dropped or answered changes no more."""
    for state in (SampleState.LEASED, SampleState.DROPPED, CallState.DONE, AttemptState.ABANDONED):
        assert not LEGAL[state]


@pytest.mark.parametrize("kind", ENUMS, ids=lambda kind: kind.__name__)
def test_only_what_the_table_has_is_done(kind: type[StrEnum]) -> None:
    """Every pair of states: a legal change is made and told, any other raises with the story and changes nothing."""
    for before in kind:
        for after in kind:
            m = running()
            thing = things(m)[kind]
            thing.state = before
            if after in LEGAL[before]:
                m.core.context.to(thing, after, "as the test wants it")
                assert thing.state is after
                assert m.core.story(SampleId(0, 0)).endswith("as the test wants it")
            else:
                with pytest.raises(InvariantError, match=rf"cannot go from {before} to {after} \(no.*story of g0"):
                    m.core.context.to(thing, after, "no")
                assert thing.state is before


def test_nothing_else_assigns_a_state() -> None:
    """``thing.state = ...`` stands in one function of the package; constructors set the first state of their own."""
    found = []
    for path in sorted((PACKAGE / "core").glob("*.py")):
        for function in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(function, ast.FunctionDef):
                continue
            for node in ast.walk(function):
                if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    flat = [t for target in targets for t in (getattr(target, "elts", None) or [target])]
                    if any(isinstance(t, ast.Attribute) and t.attr == "state" for t in flat):
                        found.append((path.name, function.name))
            assert "setattr" not in {n.id for n in ast.walk(function) if isinstance(n, ast.Name)}, path.name
    assert found == [("context.py", "to"), ("types.py", "__init__"), ("types.py", "__init__")]


def test_every_change_of_a_sample_is_in_its_story() -> None:
    """From the start of its function to the batch: one line per change, those of its calls and its group included."""
    m = CoreMachine(settings(n=1, samples=1), lambda g, i: 20)
    m.post(ev.StepRequested())
    (first,) = m.in_flight
    m.tokens(first, 5)
    m.post(ev.AttemptStalled(first, 7.0))
    m.post(ev.AttemptEnded.of(m.in_flight.pop(first), EngineFinish.ABORT))
    m.abort_asked.clear()
    (second,) = m.in_flight
    m.end(second)
    assert [line.partition(": ")[2] for line in m.core.story(SampleId(0, 0)).splitlines()[1:]] == [
        "rollout function started",
        "asks for up to 1000 tokens",
        f"attempt {first} on e0 from token 0",
        "engine e0 is silent",
        "attempt failed: engine e0 was silent for 7 s",
        f"attempt {second} on e0 from token 5",
        "call complete (stop) at 20 tokens",
        "returned",
        "finished, reward 0",
        "complete",
        "leased in batch 0",
    ]


def test_a_sample_that_cannot_be_where_an_event_says_raises_with_its_story() -> None:
    """A second call at the same time is april's own mistake: refused with what the sample is doing."""
    m = running()
    with pytest.raises(InvariantError, match=r"g0.s0 called generate twice.*running \(in_flight\).*story of g0.s0"):
        m.core.handle(ev.CallMade(SampleId(0, 0), m.sampling))


def test_a_place_is_reserved_from_the_start_of_a_function_to_its_first_call() -> None:
    """It counts like a request in flight, is handed on with the first call, and no two are taken for one sample."""
    m = CoreMachine(settings(n=2, samples=2, max_in_flight=3), lambda g, i: 20, auto_call=False)
    m.post(ev.StepRequested())
    places = m.core.context.places
    assert len(places.reserved) == 3 == len(m.to_call)
    assert places.free == 0
    m.post(ev.CallMade(m.to_call.pop(0), m.sampling))
    assert (len(places.reserved), len(m.in_flight), places.free) == (2, 1, 0)
    m.post(ev.SampleFailed(m.to_call.pop(0), "boom"))  # it begins again, in the place that it had
    assert (len(places.reserved), len(m.in_flight), places.free) == (2, 1, 0)
