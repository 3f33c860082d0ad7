"""Engines that join, leave and come back while the core runs: who gets requests, with which weights, and who waits."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from core_machine import EOS, A, B, C, CoreMachine, asked, settings, timers
from update_player import Server, UpdatePlayer, limits_of, play

from april.core import commands as do
from april.core import events as ev
from april.core.engine_table import EngineTable, EngineWeights
from april.core.run_times import RunTimes
from april.core.settings import EngineLimits
from april.core.types import AttemptFailure, OnWeightUpdate, Timer, TimerKind
from april.core.versions import FIRST_VERSION, PolicyVersion
from april.core.weight_updates import Phase
from april.errors import InvariantError

SMALL = replace(A, max_in_flight=1)
REMOTE = replace(B, remote=True)


def machine(n: int = 1, engines: tuple[EngineLimits, ...] = (A,), **changes: Any) -> CoreMachine:
    """A step has begun; responses have 20 tokens."""
    return asked(20, engines, n=n, **changes)


def requested(m: CoreMachine, update: int = 1, path: str | None = "/1", **how: Any) -> list[do.Command]:
    """A weight update is asked for, and all requests have ended; the commands since."""
    commands = m.post(ev.UpdateRequested(update=update, path=None if how else path, **how))
    while m.abort_asked:
        commands += m.end(min(m.abort_asked), 0)
    return commands


def engines_in_use(m: CoreMachine) -> list[str]:
    return sorted(a.engine for a in m.in_flight.values())


def answer(m: CoreMachine, commands: list[do.Command], result: ev.CallResult = ev.CallResult.DONE) -> list[do.Command]:
    """Every call among these commands ends so; what follows from that."""
    calls = [c for c in commands if isinstance(c, (do.PauseEngine, do.LoadEngine, do.ResumeEngine))]
    assert calls, "nobody was called"
    read = {c.call: c.path or "" for c in calls if isinstance(c, do.LoadEngine)}
    ends = (ev.EngineCallEnded(c.engine, c.call, result, "no", read.get(c.call, "")) for c in calls)
    return [more for end in ends for more in m.post(end)]


def found(m: CoreMachine, name: str, commands: list[do.Command]) -> list[do.Command]:
    """The probe among these commands finds an engine well; what follows from that."""
    probe = next(c.probe for c in commands if isinstance(c, do.ProbeEngine) and c.engine == name)
    return m.post(ev.EngineProbed(engine=name, probe=probe, answered=True, ok=True, current=True))


def joined(m: CoreMachine, limits: EngineLimits) -> list[do.Command]:
    """An engine joins and is found well; what follows from that."""
    return found(m, limits.name, m.post(ev.EnginesJoined([limits])))


def warnings(commands: list[do.Command]) -> list[str]:
    return [c.message for c in commands if isinstance(c, do.Warn)]


def load_of(commands: list[do.Command]) -> do.LoadEngine:
    """The one engine that is given weights."""
    (load,) = [c for c in commands if isinstance(c, do.LoadEngine)]
    return load


def updated(m: CoreMachine, path: str | None) -> None:
    """One weight update, whose number is that of the version."""
    commands = requested(m, m.core.clock.current.n + 1, path)
    while m.core.updates.running:
        commands = answer(m, commands)


# ---------------------------------------------------------------- who may join


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_context": 4095}, "a context of 4095 tokens, but 4096 are needed"),
        ({"vocab_size": 99}, "a vocabulary of 99 tokens, but 100 are needed"),
        ({"eos_token_ids": (EOS, 7)}, "the end-of-sequence tokens [1, 7], but those of the other engines are [1]"),
        ({"logprob_kind": "raw"}, "log-probabilities of kind raw, but those of the other engines are temperature"),
        ({"in_flight_updates": ()}, "no support for on_weight_update: keep"),
        ({"attachments": ()}, "no support for prompts with image"),
        ({"extras": ()}, "no experts to return with its tokens"),
    ],
)
def test_an_engine_that_has_less_than_was_promised_cannot_join(changes: dict[str, Any], says: str) -> None:
    """Prompts were let in and budgets given for what the first engines have in common."""
    keep = OnWeightUpdate.KEEP
    able = {"vocab_size": 100, "in_flight_updates": (keep,), "attachments": ("image",), "extras": ("experts",)}
    engines = [replace(A, **able), replace(B, **able | {"vocab_size": 200}, max_context=8192)]
    table = EngineTable(engines, FIRST_VERSION, keep, ("image",), ("experts",))
    assert table.unfit(replace(C, **able)) is None
    assert table.unfit(replace(C, **able | changes)) == f"engine c cannot join: it has {says}"


def test_an_engine_that_has_more_joins_and_promises_stay() -> None:
    """A larger context and fewer end tokens change nothing for samples, also when the others have left."""
    table = EngineTable([replace(A, eos_token_ids=(1, 2), logprob_kind="raw")], FIRST_VERSION)
    joins = replace(B, max_context=8192, logprob_kind="raw")
    assert table.unfit(joins) is None
    table.join(joins)
    table.leave("a")
    promised = table.max_context, table.vocab_size, table.eos_token_ids, table.logprob_kind
    assert promised == (4096, 2**31 - 1, frozenset((1, 2)), "raw")
    mixed = EngineTable([A, replace(B, logprob_kind="raw")], FIRST_VERSION)
    assert mixed.unfit(replace(C, logprob_kind="processed")) is None  # batches say so already


# ---------------------------------------------------------------- with which weights


def test_an_engine_that_comes_anew_has_nothing_cached() -> None:
    """Its life is another one, even under the same version and name."""
    m = machine(engines=(A, B))
    engines, life = m.core.engines, m.core.engines.states["a"].cache_key
    assert engines.cached_on("a", life) == "a"
    m.end(m.only.id)
    m.post(ev.EnginesLeft(["a"]))
    assert engines.cached_on("a", life) == ""
    m.post(ev.EnginesJoined([A]))
    assert engines.states["a"].version == FIRST_VERSION
    assert engines.cached_on("a", life) == ""


def test_torn_weights_stay_torn_when_their_engine_comes_anew() -> None:
    """Its server may be the same: no label makes the weights of the start out of what a broken load has left."""
    m = machine(n=2, engines=(A, B))
    commands = answer(m, answer(m, requested(m)), ev.CallResult.UNREACHABLE)  # nobody knows what they have of it
    answer(m, commands)
    assert (m.core.clock.current, m.core.updates.half_updated) == (FIRST_VERSION, None)
    m.post(ev.EnginesLeft(["b"]))
    for limits in (A, B):
        assert m.core.engines.state_of(limits.name).weights is EngineWeights.HALF
        assert "waits for the next weight update" in warnings(joined(m, limits))[0]
        assert m.core.engines.states[limits.name].weights is EngineWeights.HALF


def waits_for_the_next_update(m: CoreMachine, limits: EngineLimits) -> None:
    """It joins, is well, and gets neither a label nor requests, until an update gives it weights."""
    commands = joined(m, limits)
    assert not any(isinstance(c, (do.PauseEngine, do.LoadEngine, do.Submit)) for c in commands)
    assert "waits for the next weight update" in warnings(commands)[0]
    updated(m, "/next")
    assert m.core.engines.states[limits.name].loaded == {m.core.clock.current}


@pytest.mark.parametrize("comes_as", [B, C], ids=["its name", "another name"])
@pytest.mark.parametrize("adopted_before", [False, True])
def test_weights_of_an_update_that_failed_are_not_taken_for_the_old_ones(
    comes_as: EngineLimits, adopted_before: bool
) -> None:
    """An engine had loaded them when it left: it is given those of the present version, or waits for an update."""
    m = machine(n=2, engines=(A, B))
    if adopted_before:
        updated(m, "/present")
    version = m.core.clock.current
    loads = {c.engine: c for c in answer(m, requested(m, 9, "/failed")) if isinstance(c, do.LoadEngine)}
    m.post(ev.EngineCallEnded("b", loads["b"].call, ev.CallResult.DONE))
    m.post(ev.EnginesLeft(["b"]))
    answer(m, m.post(ev.EngineCallEnded("a", loads["a"].call, ev.CallResult.UNREACHABLE, "no")))
    assert (m.core.clock.current, m.core.updates.running) == (version, False)
    if adopted_before:
        load = load_of(answer(m, joined(m, comes_as)))
        assert (load.version, load.path) == (version, "/present")
    else:
        waits_for_the_next_update(m, comes_as)


@pytest.mark.parametrize("error", ["no route", None], ids=["broken off", "not adopted"])
@pytest.mark.parametrize("comes_as", [B, C], ids=["its name", "another name"])
def test_a_transfer_may_have_reached_an_engine_that_is_away(comes_as: EngineLimits, error: str | None) -> None:
    """It left while the trainer handed over, and comes when that has failed: no label makes old weights of the new."""
    m = machine(n=2, engines=(A, REMOTE))
    answer(m, requested(m, transfers=True))
    m.post(ev.EnginesLeft(["b"]))
    commands = m.post(ev.HandedOver(1, error))
    commands = answer(m, commands, ev.CallResult.DONE if error else ev.CallResult.REFUSED)
    while m.core.updates.running:
        commands = answer(m, commands)
    assert m.core.clock.current == FIRST_VERSION
    waits_for_the_next_update(m, replace(comes_as, remote=True))


@pytest.mark.parametrize("kind", ["remote", "own_weights"])
def test_a_transfer_that_breaks_off_tears_all_weights_but_the_trainers(kind: str) -> None:
    """Behind a server, or in a process of the trainer's (vLLM): no request goes to them before another update."""
    m = machine(engines=(replace(A, **{kind: True}),))
    answer(m, requested(m, transfers=True))
    answer(m, m.post(ev.HandedOver(1, "no route")))
    assert m.core.engines.states["a"].weights is EngineWeights.HALF
    assert m.core.updates.half_updated is not None
    assert not m.in_flight
    updated(m, None)
    assert m.core.engines.states["a"].loaded == {m.core.clock.current}


def test_an_update_that_wrote_nothing_changes_nothing_for_those_that_join() -> None:
    """It was cancelled in time: engines have the weights of their start, which a label names."""
    m = machine(n=2, engines=(A, B))
    m.post(ev.UpdateRequested(update=1, path="/1"))
    m.post(ev.UpdateCancelled(1))
    m.finish_aborts()
    load = load_of(answer(m, joined(m, C)))
    assert (load.version, load.path) == (FIRST_VERSION, None)


def outage_words(m: CoreMachine) -> str:
    """What the trainer is told when the deadline of an outage is over."""
    m.fire(timers(m.commands, TimerKind.OUTAGE)[-1])
    (error,) = m.errors
    return error.removeprefix("no engine with the current weights was healthy for 50 s; april keeps all responses: ")


def test_when_all_wait_for_the_next_update_the_outage_says_so() -> None:
    """Nothing is to be mended there: a weight update is what helps."""
    m = machine(outage_deadline_s=50.0)
    answer(m, answer(m, answer(m, requested(m)), ev.CallResult.UNREACHABLE))
    found(m, "a", m.fire(timers(m.commands, TimerKind.PROBE)[-1]))
    assert outage_words(m) == "call weight_update, for which a waits, and ask for the batch again"


def test_an_engine_that_comes_with_the_weights_of_an_earlier_run_waits_for_an_update() -> None:
    """The others began with those of this run; what a server has that was written to is of no version."""
    m = machine(n=2)
    m.post(ev.EnginesJoined([replace(REMOTE, written=True)]))
    m.probed("b")
    assert not m.core.engines.states["b"].loaded
    assert engines_in_use(m) == ["a", "a"]
    updated(m, "/1")
    assert m.core.engines.states["b"].version == m.core.clock.current


# ---------------------------------------------------------------- engines that leave


def test_nothing_goes_to_an_engine_that_left_and_nobody_waits_for_its_answers() -> None:
    """Its timers, probes and calls are void; a sample goes on where it was not."""
    m = machine(n=2, engines=(A, REMOTE), max_attempt_failures=9)
    theirs = next(a for a in m.in_flight.values() if a.engine == "b")
    m.tokens(theirs.id, 5)
    (probe,) = timers(m.fail(theirs), TimerKind.PROBE)
    number = next(c.probe for c in m.fire(probe) if isinstance(c, do.ProbeEngine))
    assert m.post(ev.EnginesLeft(["b"])) == []
    assert set(engines_in_use(m)) == {"a"}
    for late in (
        ev.EngineProbed(engine="b", probe=number, answered=True, ok=True, current=True),
        ev.EngineCallEnded("b", 1, ev.CallResult.DONE),
        ev.TimerFired(probe.timer),
        ev.TimerFired(Timer(TimerKind.REST, 1, "b")),
    ):
        assert m.post(late) == []
    m.finish(0, 1)
    assert "engine/b/in_flight_at_stop" not in m.batches[0].metrics
    m.check_ledger()


@pytest.mark.parametrize("cut", [False, True])
def test_an_engine_that_is_to_leave_gets_no_more_requests(cut: bool) -> None:
    """What it has ends by itself, or is cut and goes on elsewhere with its tokens; then it leaves."""
    m = machine(n=4, engines=(A, B), samples=1)
    theirs = [a for a in m.in_flight.values() if a.engine == "b"]
    assert theirs
    for attempt in theirs:
        m.tokens(attempt.id, 5)
    m.post(ev.EngineLeaving("b", cut))
    assert set(m.abort_asked) == ({a.id for a in theirs} if cut else set())
    for attempt in theirs:
        m.end(attempt.id, 0) if cut else m.fail(attempt)
    assert set(engines_in_use(m)) == {"a"}
    assert sorted(len(a.request.token_ids) for a in m.in_flight.values())[-len(theirs) :] == [2 + 5] * len(theirs)
    m.core.validate()
    m.post(ev.EnginesLeft(["b"]))
    m.post(ev.EnginesJoined([B]))
    assert not m.core.engines.states["b"].leaving


def test_an_engine_does_not_leave_with_requests_in_flight() -> None:
    """They would belong to nobody; nor does one come anew over them."""
    m = machine(engines=(A, B))
    for event in (ev.EnginesLeft(["a"]), ev.EnginesJoined([A])):
        with pytest.raises(InvariantError, match="engine a has left with 1 requests in flight"):
            m.core.handle(event)
    m.core.validate()


def test_when_all_have_left_the_deadline_of_an_outage_holds() -> None:
    """The step fails with a reason and keeps everything; an engine that joins ends the outage."""
    m = machine(outage_deadline_s=50.0)
    m.tokens(m.only.id, 5)
    m.fail(m.only)
    m.post(ev.EnginesLeft(["a"]))
    assert outage_words(m) == "all engines have left, so add some and ask for the batch again"
    m.errors.clear()
    m.post(ev.EnginesJoined([B]))
    m.ask()
    assert (m.only.engine, len(m.only.request.token_ids)) == ("b", 2 + 5)
    m.finish(0)
    assert len(m.batches) == 1
    m.check_ledger()


@pytest.mark.parametrize("comes", [True, False])
def test_an_evaluation_waits_for_engines_that_may_join_and_not_for_ever(comes: bool) -> None:
    """Where all have left others may come; after the deadline of an outage it ends with a reason."""
    m = CoreMachine(settings(n=1, samples=1, outage_deadline_s=50.0), 9, engines=(A,))
    m.post(ev.EnginesLeft(["a"]))
    (outage,) = timers(m.evaluate(), TimerKind.OUTAGE)
    if comes:
        m.post(ev.EnginesJoined([B]))
    m.fire(outage)
    for attempt in list(m.in_flight):
        m.end(attempt)
    (end,) = [c for c in m.commands if isinstance(c, (do.EvaluationDone, do.EvaluationFailed))]
    if comes:
        assert isinstance(end, do.EvaluationDone)
    else:
        assert end == do.EvaluationFailed(1, "all engines have left", AttemptFailure.BROKE_OFF)


@pytest.mark.parametrize("phase", [Phase.PAUSING, Phase.LOADING])
def test_engines_that_leave_together_are_asked_for_nothing_more(phase: Phase) -> None:
    """The first of them does not make the update go on to the second."""
    m = machine(n=2, engines=(A, B, C))
    commands = requested(m)
    while m.core.updates.phase is not phase:
        commands = answer(m, commands)
    (theirs,) = [c for c in commands if getattr(c, "engine", "") == "c"]
    m.post(ev.EngineCallEnded("c", theirs.call, ev.CallResult.DONE))  # type: ignore[union-attr]
    more = m.post(ev.EnginesLeft(["a", "b"]))
    assert {c.engine for c in more if not isinstance(c, do.UpdateEnded)} == {"c"}  # type: ignore[union-attr]
    while m.core.updates.running:
        more = answer(m, more)
    assert m.core.clock.current == PolicyVersion(0, 1)


def test_an_update_without_any_engine_is_for_those_that_join() -> None:
    """The policy goes on; who joins gets it from its directory."""
    m = CoreMachine(settings(n=1, samples=1), 20, engines=(A,))
    m.post(ev.EnginesLeft(["a"]))
    m.post(ev.UpdateRequested(update=1, path="/1", content="1"))
    assert (m.core.clock.current, m.core.updates.running) == (PolicyVersion(0, 1), False)
    load = load_of(answer(m, joined(m, B)))
    assert (load.path, load.contents) == ("/1", ("1",))


# ---------------------------------------------------------------- at random, with updates


class ComingAndGoing(UpdatePlayer):
    """Engines come, come anew and leave in every phase of updates, drawn from a generator of their own."""

    def __init__(self, seed: int, engines: int, in_flight: OnWeightUpdate) -> None:
        super().__init__(seed, engines, in_flight=in_flight)
        self.luck = random.Random(f"come and go {seed}")
        self.away: dict[str, Server] = {}

    def _execute(self, command: do.Command) -> None:
        if isinstance(command, do.UpdateEnded) and command.failed is None:
            update = self.updates[command.update]
            if not (update.cancelled or update.loads):  # its engines have all left
                self.contents[command.version], update.loads = update.weights, 1
                self.seen["adopted without an engine"] += 1
        super()._execute(command)

    def one_event(self) -> None:
        """One comes or goes, or something else happens."""
        if self.luck.random() < 0.1:
            self.luck.choice([self.comes, self.comes_anew, self.leaves])()
        else:
            super().one_event()

    def comes(self) -> None:
        """A new one, or one that was here before, whose server has gone on or is a new one."""
        name = self.luck.choice([*sorted(self.away), f"e{9 + len(self.seen)}"])
        if name not in self.servers:
            self._joins(name, self.away.pop(name, Server()))

    def comes_anew(self) -> None:
        """It was away for a moment."""
        name = self.luck.choice(sorted(self.servers))
        self._breaks_off(name)
        self._joins(name, self.servers[name])

    def leaves(self) -> None:
        """For good, or not; one always stays."""
        if len(self.servers) > 1:
            name = self.luck.choice(sorted(self.servers))
            self._breaks_off(name)
            self.away[name] = self.servers.pop(name)
            self.seen[f"leaves while {self.core.updates.phase}"] += 1
            self.post(ev.EnginesLeft([name]))

    def _breaks_off(self, name: str) -> None:
        for attempt in [a for a in self.in_flight.values() if a.engine == name]:
            del self.in_flight[attempt.id]
            self.abort_asked.discard(attempt.id)
            self.post(ev.AttemptFailed.of(attempt, "it is gone"))
        self.calls.pop(name, None)
        self.probes = [p for p in self.probes if p.engine != name]

    def _joins(self, name: str, before: Server) -> None:
        self.servers[name] = server = before if self.luck.random() < 0.5 else Server()
        server.alive, server.lost = True, False  # nobody has told its new client what it should have
        self.seen[f"joins while {self.core.updates.phase}"] += 1
        self.post(ev.EnginesJoined([limits_of(name)]))


def test_at_random_no_request_goes_to_an_engine_with_other_weights() -> None:
    """In every phase of an update; all updates end, and in the end all engines have the present weights."""
    modes = list(OnWeightUpdate)
    seen = play(range(90), lambda seed: ComingAndGoing(seed, 1 + seed % 3, modes[seed // 3 % 3]), 300)
    phases = set(Phase) - {Phase.RESTORING, Phase.CHECKING}
    wanted = {f"{what} while {phase}" for what in ("joins", "leaves") for phase in phases}
    wanted.add("adopted without an engine")
    assert wanted <= set(seen), wanted - set(seen)


# ---------------------------------------------------------------- where the time went


def test_places_are_counted_as_long_as_they_were_there() -> None:
    """Two places for 10 s, five for 10 s, three for 20 s: one of them was busy all the time."""
    m = CoreMachine(settings(n=1, samples=1, max_in_flight=9), 20, engines=(replace(A, max_in_flight=2),))
    times = RunTimes(m.core)
    m.ask()
    times.update(0.0)
    m.post(ev.EnginesJoined([replace(B, max_in_flight=3)]))
    times.update(10.0)
    assert m.only.engine == "a"
    m.tokens(m.only.id, 5)
    m.fail(m.only, "busy", kind=AttemptFailure.BUSY)
    m.post(ev.EnginesLeft(["a"]))
    times.update(20.0)
    assert times.places == 3
    shares = times.delivered(40.0)
    assert shares["engines_busy"] == pytest.approx(40 / (2 * 10 + 5 * 10 + 3 * 20))
    assert sum(value for name, value in shares.items() if name.startswith("idle_")) == pytest.approx(90 / 130)
    assert shares["bubble"] == pytest.approx(90 / 130)
    assert times.delivered(50.0)["engines_busy"] == pytest.approx(1 / 3)
