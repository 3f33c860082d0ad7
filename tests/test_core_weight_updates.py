"""Weight updates as a plan in the core: whatever engines and trainers do, no token is of wrong weights."""

from __future__ import annotations

from collections import Counter

import pytest
from seeds import seeds
from update_player import Update, UpdatePlayer

from april.core import events as ev
from april.core.engine_table import EngineWeights
from april.core.weight_updates import MACHINE_DIGITS

SEEDS = range(120)
_seen: Counter[str] = Counter()


def play(seed: int) -> UpdatePlayer:
    """A run of 400 random events, with everything checked after each, and its end."""
    player = UpdatePlayer(seed, engines=1 + seed % 3, silent=seed % 2 == 1)
    for _ in range(400):
        player.one_event()
    player.end_well()
    return player


@pytest.mark.parametrize("block", seeds(8))
def test_random_events(block: int) -> None:
    """After every event the books agree; no request goes to an engine with other weights; every update ends."""
    for seed in SEEDS[block::8]:
        try:
            _seen.update(play(seed).seen)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.no_cover
def test_random_events_reach_all_of_it() -> None:
    """Each trouble has happened in each phase that it can happen in."""
    if not _seen:
        for seed in SEEDS:
            _seen.update(play(seed).seen)
    wanted = {f"{call} {result}" for call in ("PauseEngine", "LoadEngine", "ResumeEngine")
              for result in ("done", "refused", "busy", "unreachable")}  # fmt: skip
    phases = ("it waits", "stopping", "pausing", "handing over", "loading", "resuming")
    wanted |= {f"cancelled while {phase}" for phase in phases}
    wanted |= {f"dies while {p}" for p in ("idle", "stopping", "handing over")}
    wanted |= {f"dies while {p} and is called" for p in ("pausing", "loading", "resuming", "idle")}
    wanted |= {"written over while it was loaded", "LoadEngine other content"}
    wanted |= {"says yes and did not", "refused and torn", "second update meanwhile", "transfer broken=True"}
    assert wanted <= set(_seen), wanted - set(_seen)


def quarantined(engines: int = 2) -> UpdatePlayer:
    """A player whose e0 has failed and is just being probed."""
    player = UpdatePlayer(0, engines)
    player.ask_batch()
    while not player.core.engines.states["e0"].quarantined:
        player.fail(next(a for a in player.in_flight.values() if a.engine == "e0"))
    player.probes.clear()
    player.post(ev.TimerFired(player.timers.pop()))
    assert [probe.engine for probe in player.probes] == ["e0"]
    return player


def test_an_answer_of_before_an_update_says_nothing_of_after() -> None:
    """A probe is sent, the engine gets new weights, and then it is heard that it had lost the old ones."""
    player = quarantined()
    old = player.probes.pop()
    player.ask_update(transfers=False)
    player.calm(lambda: not player.updates)
    assert player.failed is None
    player.post(ev.EngineProbed(engine="e0", probe=old.probe, answered=True, ok=True, current=False))
    assert [player.core.counters[name] for name in ("stale_engines", "late_events")] == [0, 0]
    assert player.core.engines.states["e0"].version == player.core.clock.current
    player.end_well()


@pytest.mark.parametrize("trainer_reads", ["", "one"])
def test_engines_that_found_different_weights_are_told_apart_by_the_trainer(trainer_reads: str) -> None:
    """One that cannot read what it loaded is believed only if the trainer's process says which of the two is right."""
    player = UpdatePlayer(0, 3)
    content = {"e0": "one", "e1": "two", "e2": ""}
    machine = "m" * MACHINE_DIGITS
    player.updates[1] = Update("/1", transfers=False)
    player.post(ev.UpdateRequested(update=1, path="/1", content=trainer_reads and trainer_reads + machine))
    for answers in (dict.fromkeys(content, ""), content):  # to the pause, to the load
        for name, found in answers.items():
            player.servers[name].open = False
            call, found = player.calls[name].call, found and found + machine
            player.post(ev.EngineCallEnded(name, call, ev.CallResult.DONE, "", found))
    states = player.core.engines.states
    confirmed = {name for name in states if states[name].weights is EngineWeights.CONFIRMED}
    assert confirmed == ({"e0", "e2"} if trainer_reads else set())
