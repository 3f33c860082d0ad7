"""Weight updates as a plan in the core: whatever engines and trainers do, no token is of wrong weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from seeds import seeds
from update_player import Update, UpdatePlayer, play

from april.core import events as ev
from april.core.engine_table import EngineWeights
from april.core.types import OnWeightUpdate
from april.core.weight_updates import MACHINE_DIGITS

RESUBMIT, KEEP, RECOMPUTE = OnWeightUpdate
LIVES = {RESUBMIT: 120, KEEP: 60, RECOMPUTE: 60}
PARTS = 6
_seen: dict[OnWeightUpdate, Counter[str]] = {mode: Counter() for mode in OnWeightUpdate}


def some(mode: OnWeightUpdate, seeds: Iterable[int]) -> Counter[str]:
    """Lives of one to three engines; in some of them, weights are lost without a word."""
    silent = 2 if mode is RESUBMIT else 4
    return play(seeds, lambda n: UpdatePlayer(n, 1 + n % 3, silent=n % silent == silent - 1, in_flight=mode), 400)


@pytest.mark.parametrize("mode", list(OnWeightUpdate))
@pytest.mark.parametrize("block", seeds(PARTS))
def test_random_events(block: int, mode: OnWeightUpdate) -> None:
    """After every event the books agree; no request goes to an engine with other weights; every update ends.

    Where requests live through updates: none goes on under torn weights, or begins over keys of older ones.
    """
    _seen[mode] += some(mode, range(block, LIVES[mode], PARTS))


@pytest.mark.no_cover
@pytest.mark.parametrize("mode", [RESUBMIT, KEEP])
def test_random_events_reach_all_of_it(mode: OnWeightUpdate) -> None:
    """Each trouble has happened in each phase that it can happen in; requests end, or live on, in all ways."""
    phases = ("stopping", "pausing", "handing over", "loading", "resuming")
    if mode is RESUBMIT:
        wanted = {f"{call} {result}" for call in ("PauseEngine", "LoadEngine", "ResumeEngine")
                  for result in ("done", "refused", "busy", "unreachable")}  # fmt: skip
        wanted |= {f"cancelled while {phase}" for phase in ("it waits", *phases)}
        wanted |= {f"dies while {p}" for p in ("idle", "stopping", "handing over")}
        wanted |= {f"dies while {p} and is called" for p in ("pausing", "loading", "resuming", "idle")}
        wanted |= {"written over while it was loaded", "LoadEngine other content", "says yes and did not"}
        wanted.add("second update meanwhile")
    else:
        wanted = {"goes on over an update", "delivered over an update"}
        wanted |= {f"cancelled while {phase}" for phase in ("pausing", "recalling", "handing over", "loading")}
        wanted |= {f"ended: cancelled={c}, failed={f}" for c in (False, True) for f in (False, True)}
    wanted |= {"refused and torn", "transfer broken=True"}
    seen = set(_seen[mode])
    if not wanted <= seen:  # what other processes have played is not known here
        seen |= set(some(mode, range(LIVES[mode])))
    assert wanted <= seen, wanted - seen


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
