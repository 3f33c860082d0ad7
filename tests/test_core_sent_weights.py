"""Weights that april sends itself, in the core: who got them, who goes on with the old ones, and who has none."""

from __future__ import annotations

from dataclasses import replace

from core_machine import A, B, C, CoreMachine
from test_core_engines_come_and_go import answer, joined, machine, requested, updated, warnings

from april.core import commands as do
from april.core import events as ev
from april.core.engine_table import EngineWeights
from april.core.versions import PolicyVersion

ONE, TWO = replace(A, remote=True), replace(B, remote=True)
V1 = PolicyVersion(0, 1)


def sends(m: CoreMachine, update: int = 1) -> list[do.Command]:
    """april is about to send; returns the commands with HandOver."""
    return answer(m, requested(m, update, transfers=True, sends=True))


def ends(m: CoreMachine, commands: list[do.Command]) -> do.UpdateEnded:
    """All further calls of the update are done; its end."""
    while m.core.updates.running:
        commands = answer(m, commands)
    return next(c for c in commands if isinstance(c, do.UpdateEnded))


def test_the_engines_that_are_paused_are_named() -> None:
    """One that did not pause is not sent to, and is left out."""
    m = machine(n=2, engines=(ONE, TWO))
    commands = requested(m, transfers=True, sends=True)
    pauses = {c.engine: c for c in commands if isinstance(c, do.PauseEngine)}
    m.post(ev.EngineCallEnded("b", pauses["b"].call, ev.CallResult.UNREACHABLE, "gone"))
    commands = m.post(ev.EngineCallEnded("a", pauses["a"].call, ev.CallResult.DONE))
    assert [c.engines for c in commands if isinstance(c, do.HandOver)] == [("a",)]


def test_all_are_torn() -> None:
    """Nothing is generated before an update has reached them, and who waits for a batch is told why."""
    m = machine(engines=(ONE,))
    sends(m)
    ends(m, m.post(ev.HandedOver(1, "tensor x did not arrive", (ev.TransferFailure("a", "broke", True),))))
    assert "tensor x did not arrive" in str(m.core.updates.broken)
    assert not m.in_flight
    updated(m, "/2")
    assert m.core.updates.broken is None


def test_one_of_two_refuses_to_be_named_as_the_new_version() -> None:
    """Its cache could not be emptied, say: it alone is left out, since the other one has the weights."""
    m = machine(n=2, engines=(ONE, TWO))
    sends(m)
    loads = {c.engine: c for c in m.post(ev.HandedOver(1, None, ())) if isinstance(c, do.LoadEngine)}
    m.post(ev.EngineCallEnded("a", loads["a"].call, ev.CallResult.DONE))
    commands = m.post(ev.EngineCallEnded("b", loads["b"].call, ev.CallResult.REFUSED, "its cache stays"))
    assert warnings(commands)[0] == "engine b is left out of the weight update: its cache stays"
    assert ends(m, commands).failed is None
    assert m.core.clock.current == V1
    assert m.core.engines.states["b"].weights is EngineWeights.HALF


def test_who_comes_in_the_middle_of_a_transfer_that_tears() -> None:
    """It may be one that was written to, under another name: no label makes old weights of what it has."""
    m = machine(n=2, engines=(ONE, TWO))
    sends(m)
    m.post(ev.EnginesLeft(["b"]))
    m.post(ev.EnginesJoined([replace(C, remote=True)]))
    fates = (ev.TransferFailure("a", "broke", True), ev.TransferFailure("b", "broke", True))
    ends(m, m.post(ev.HandedOver(1, "broke", fates)))
    assert m.core.engines.states["c"].weights is EngineWeights.HALF


def test_who_was_paused_for_the_present_weights_is_not_given_a_name_for_them() -> None:
    """An update by a transfer came while it was paused: nobody can give it those weights, so it waits for the next."""
    m = machine(n=2, engines=(ONE,))
    updated(m, "/1")
    commands = joined(m, TWO)
    (pause,) = [c for c in commands if isinstance(c, do.PauseEngine)]
    commands = requested(m, 2, transfers=True)
    commands = answer(m, [c for c in commands if isinstance(c, do.PauseEngine) and c.engine == "a"])
    end = ends(m, m.post(ev.HandedOver(2)))
    assert end.failed is None
    commands = m.post(ev.EngineCallEnded("b", pause.call, ev.CallResult.DONE))
    assert not [c for c in commands if isinstance(c, do.LoadEngine)]
    assert "waits for the next weight update" in warnings(answer(m, commands))[0]
    assert m.core.engines.states["b"].loaded == frozenset()
