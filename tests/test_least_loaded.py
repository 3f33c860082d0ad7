"""Where the next request goes, found without a look at every engine: as by a look at every engine."""

from __future__ import annotations

import random

import pytest

from april.core import engine_table
from april.core.engine_table import AFFINITY_SLACK, EngineGate, EngineHealth, EngineState, EngineTable
from april.core.settings import EngineLimits
from april.core.versions import FIRST_VERSION, PolicyVersion

NEXT = PolicyVersion(FIRST_VERSION.incarnation, FIRST_VERSION.n + 1)


def limits(rng: random.Random, number: int) -> EngineLimits:
    """Some engine, with room for a few requests."""
    return EngineLimits(f"e{number}", 100, rng.choice([None, 1, 2, 5]))


def looked_for(table: EngineTable, version: PolicyVersion, avoid: str, prefer: str) -> EngineState | None:
    """The rule, word for word, over all engines."""
    able = [s for s in table.states.values() if version in s.loaded and s.has_room]
    others = [s for s in able if s.limits.name != avoid] or able
    best = min(others, key=lambda s: s.in_flight, default=None)  # of equals the first
    if best is None or not prefer or prefer == avoid:
        return best
    liked = table.states[prefer]
    return liked if liked in able and liked.in_flight <= best.in_flight + AFFINITY_SLACK else best


def change(table: EngineTable, rng: random.Random, number: int) -> None:
    """Something happens to one engine, or one comes or goes."""
    state = rng.choice(list(table.states.values()))
    name = state.limits.name
    match rng.randrange(12):
        case 0:
            state.gate = rng.choice(list(EngineGate))
        case 1:
            state.health = rng.choice(list(EngineHealth))
        case 2:
            state.confirm(rng.choice([FIRST_VERSION, NEXT]))
        case 3:
            state.lose_weights()
        case 4:
            table.mark_well(name)
            state.gate = EngineGate.OPEN
        case 5:
            table.count_refusal(name, 1.0, state.in_flight)
        case 6:
            table.count_failure(name, at_once=True)
        case 7 if number % 7 == 0:
            table.join(limits(rng, 1000 + number)).confirm(NEXT)
        case 8 if number % 7 == 0 and not state.in_flight and len(table.states) > 1:
            table.leave(name)
            state.gate = EngineGate.OPEN  # nobody hears of it any more
        case 9 if state.in_flight:
            state.add(-1)
            table.count_end(name, state.in_flight)
        case _ if state.has_room:
            state.add(1)


@pytest.mark.parametrize("seed", range(40))
def test_the_engine_is_the_one_that_a_scan_finds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After every change, for every version, whatever is avoided and preferred, however often it tidies up."""
    monkeypatch.setattr(engine_table, "SPARE_ENTRIES", seed % 2 * engine_table.SPARE_ENTRIES)
    rng = random.Random(seed)
    table = EngineTable([limits(rng, i) for i in range(rng.choice([1, 2, 3, 70]))], FIRST_VERSION)
    found = set()
    for number in range(300):
        change(table, rng, number)
        assert all(s.load == (s.in_flight if s.loaded and s.has_room else None) for s in table.states.values())
        names = ["", *rng.choices(list(table.states), k=2)]
        for version in (FIRST_VERSION, NEXT):
            for avoid in names:
                for prefer in names:
                    best = table.pick(version, avoid, prefer)
                    assert best is looked_for(table, version, avoid, prefer)
                    found.add(best and best.limits.name)
    assert len(found) > 1


def test_a_request_looks_at_one_engine_of_a_thousand(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many have no room, and whichever has."""
    table = EngineTable([EngineLimits(f"e{i}", 100, 1) for i in range(1000)], FIRST_VERSION)
    looked_at: set[str] = set()
    loaded = EngineState.loaded

    def looks(state: EngineState) -> frozenset[PolicyVersion]:
        looked_at.add(state.limits.name)
        return loaded.__get__(state)  # type: ignore[attr-defined]

    def picked(avoid: str = "") -> EngineState | None:
        looked_at.clear()
        state = table.pick(FIRST_VERSION, avoid)
        assert looked_at == ({state.limits.name} if state is not None else set())
        return state

    monkeypatch.setattr(EngineState, "loaded", property(looks))
    order = []
    while (state := picked()) is not None:
        order.append(state.limits.name)
        state.add(1)
    assert order == [f"e{i}" for i in range(1000)]
    table.states["e700"].add(-1)
    assert picked() is picked(avoid="e700") is table.states["e700"]


def test_engines_that_come_and_go_leave_nothing_behind() -> None:
    """An engine that comes back every minute for months costs a request what it cost at first."""
    table = EngineTable([EngineLimits("stays", 100), EngineLimits("comes", 100)], FIRST_VERSION)
    for _ in range(1000):
        table.leave("comes")
        table.join(EngineLimits("comes", 100)).confirm(FIRST_VERSION)
        assert len(table._by_load._heap) <= 8 * len(table.states) + engine_table.SPARE_ENTRIES
