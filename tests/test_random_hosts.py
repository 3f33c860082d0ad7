"""Hosts at random: engines and functions that join, die, come back and leave, whatever else happens to a trainer.

The same books as in ``test_random_trainers``: tokens as servers sent them under the weights that these really had, each
prompt settled once, group cohorts fixed, nothing trained too old. Besides, nothing is asked of what is dead. More
lives: ``make random``, or ``APRIL_RANDOM_LIVES=2000`` before pytest.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from host_lives import HostLife
from test_random_trainers import TimedLife
from trainer_player import TrainerPlayer

from april.core import commands as do
from april.core import events as ev
from april.core.event_pump import Observed
from april.core.run_times import SHARES, TrainerTime
from april.core.types import GenerationMode
from april.record.file import RunRecord
from april.record.recorder import Recorder
from april.record.replay import replay

LIVES = int(os.environ.get("APRIL_RANDOM_LIVES", "80"))


def live(number: int, mode: GenerationMode) -> HostLife:
    """One life, to its good end."""
    life = HostLife(number, mode)
    try:
        life.happen(300)
        life.end_well()
    except BaseException as error:
        error.add_note(f"life {number}, {mode}")
        raise
    return life


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_whatever_hosts_do_nothing_is_lost(mode: GenerationMode) -> None:
    """Every promise of the books, after every event, to the last prompt; and the lives are full of hosts."""
    seen: Counter[str] = Counter()
    for number in range(LIVES // 2):
        seen += live(number, mode).seen
    for what in (
        "host joined", "host came back", "host died", "host left", "joined during an update", "left during an update",
        "no engine is left", "late answer", "restarted", "evaluated", "function lost: started",
        "function lost: waiting", "function lost: between", "function lost: scoring", "function lost: finished",
    ):  # fmt: skip
        assert seen[what], f"no life had: {what}"


class Unrecorded:
    """A core as it is before a recorder observes it."""

    def __init__(self, core: Any) -> None:
        self._core, self.handle = core, core.handle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)


class RecordedLife(HostLife):
    """The events of its one process are in a file."""

    def new_process(self) -> None:
        super().new_process()
        core: Any = self.core
        self.recorder = Recorder(RunRecord(self.path), Unrecorded(core), lambda: 0.0)  # type: ignore[arg-type]
        core.handle = Observed(Unrecorded(core), [self.recorder]).handle

    path: Path


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_a_recorded_life_is_decided_again(mode: GenerationMode, tmp_path: Path) -> None:
    """Engines that join and leave and functions that are lost are in the record, with all that was decided on them."""
    events: Counter[str] = Counter()
    for number in (n for n in range(24) if not HostLife(n, mode).habits.crashes):
        RecordedLife.path = tmp_path / str(number)
        life = RecordedLife(number, mode)
        life.happen(100)
        life.recorder.close()
        run = replay(life.path)
        assert run.core.tokens == life.core.tokens
        assert list(run.core.engines.states) == list(life.core.engines.states)
        events += run.events
    assert min(events[what] for what in ("EnginesJoined", "EnginesLeft", "FunctionsLost")) >= 5


class TimedHostLife(TimedLife, HostLife):
    """The witness also counts the places that there were."""

    def new_process(self) -> None:
        super().new_process()
        self.places = 0

    def post(self, event: ev.Event) -> None:
        """Places come and go with engines."""
        super().post(event)
        most = self.settings.max_in_flight
        slots = {e.name: e.max_in_flight or most for host in self.hosts.values() for e in host.engines}
        if not self.depth:
            self.places = min(most, sum(slots[name] for name in self.servers))

    def passes(self, seconds: float) -> None:
        if self.holds is not None:
            self.counted["places"] += seconds * self.places
        super().passes(seconds)

    def on_Deliver(self, command: do.Deliver) -> None:
        """The account of the step against the one kept here."""
        found = self.times.delivered(self.now_s)
        for name in ("step_s", *TrainerTime):
            assert found[name] == pytest.approx(self.counted[name])
        if self.counted["places"]:
            assert found["engines_busy"] * self.counted["places"] == pytest.approx(self.counted["busy"])
            assert sum(found[name] for name in SHARES) == pytest.approx(1.0)
            assert all(-1e-9 <= found[name] <= 1.0 + 1e-9 for name in (*SHARES, "bubble"))
            self.seen["timed"] += 1
        self.counted.clear()
        TrainerPlayer.on_Deliver(self, command)


@pytest.mark.no_cover
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_shares_are_of_the_places_that_there_were(mode: GenerationMode) -> None:
    """While engines with few slots and with many join and leave, every second of every place is counted once."""
    seen: Counter[str] = Counter()
    for number in range(12):
        life = TimedHostLife(number, mode)
        life.happen(300)
        life.end_well()
        seen += life.seen
    assert min(seen["timed"], seen["host joined"], seen["host left"]) >= 12
