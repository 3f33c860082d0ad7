"""Several engines: who gets what, who is left alone, who must not be used; decided without clock and network."""

from __future__ import annotations

import math
from typing import Any

import pytest
from core_machine import EOS, CoreMachine, settings, timers

from april.core import commands as do
from april.core import events as ev
from april.core.engine_table import (
    AFFINITY_SLACK,
    FIRST_REST_S,
    LONGEST_REST_S,
    RESTS_BEFORE_QUARANTINE,
    EngineHealth,
)
from april.core.settings import EngineLimits
from april.core.types import Attempt, AttemptFailure, EngineFinish, Timer, TimerKind
from april.core.versions import PolicyVersion

TWO = (EngineLimits("a", 4096, None, (EOS,)), EngineLimits("b", 4096, None, (EOS,)))


def machine(n: int = 1, engines: tuple[EngineLimits, ...] = TWO, **changes: Any) -> CoreMachine:
    """A step has begun; responses have 20 tokens."""
    m = CoreMachine(settings(n=n, samples=1, **changes), lambda g, i: 20, engines=engines)
    m.post(ev.StepRequested())
    return m


def only(m: CoreMachine) -> Attempt:
    """The one attempt in flight."""
    (attempt,) = m.in_flight.values()
    return attempt


def fail(m: CoreMachine, attempt: Attempt, **how: Any) -> list[do.Command]:
    """Let an attempt break off."""
    del m.in_flight[attempt.id]
    return m.post(ev.AttemptFailed.of(attempt, "HTTP 503", **how))


def rests(commands: list[do.Command]) -> list[do.StartTimer]:
    """Timers of rests that were started."""
    return timers(commands, TimerKind.REST)


def probed(commands: list[do.Command]) -> list[str]:
    """Engines that are to be probed."""
    return [t.timer.engine for t in timers(commands, TimerKind.PROBE)]


# ---------------------------------------------------------------- busy and refusing engines


def test_a_busy_engine_is_left_alone_and_its_request_goes_elsewhere() -> None:
    """Nothing was begun, so nothing has failed: no quarantine, no failure of the sample; it rests as it asks."""
    m = machine()
    first = only(m)
    (timer,) = rests(fail(m, first, kind=AttemptFailure.BUSY, busy_s=7.0))
    assert timer.seconds == 7.0
    assert only(m).engine == "b"
    assert only(m).call.failures == 0
    state = m.core.engines.states["a"]
    assert (state.resting, state.quarantined, state.failures) == (True, False, 0)
    m.post(ev.TimerFired(timer.timer))
    assert not state.resting
    assert m.core.counters["busy_refusals"] == 1


def test_samples_wait_while_all_engines_rest_and_go_on_afterwards() -> None:
    """A sample is never given up because everybody is busy, however often; the rests grow to a minute."""
    m = machine(engines=TWO[:1], max_attempt_failures=1)
    seconds = []
    for _ in range(RESTS_BEFORE_QUARANTINE):
        (timer,) = rests(fail(m, only(m), kind=AttemptFailure.BUSY, busy_s=0.0))
        assert not m.in_flight
        seconds.append(timer.seconds)
        m.post(ev.TimerFired(timer.timer))
    assert seconds[:3] == [FIRST_REST_S, 2 * FIRST_REST_S, 4 * FIRST_REST_S]
    assert max(seconds) <= LONGEST_REST_S
    m.end(only(m).id)
    assert len(m.batches) == 1
    assert m.core.engines.states["a"].rests == 0
    m.check_ledger()


def test_an_engine_that_is_busy_for_ever_is_probed() -> None:
    """After many rests in a row a probe shall say whether it is well."""
    m = machine(engines=TWO[:1])
    for _ in range(RESTS_BEFORE_QUARANTINE):
        (timer,) = rests(fail(m, only(m), kind=AttemptFailure.BUSY, busy_s=0.0))
        m.post(ev.TimerFired(timer.timer))
    commands = fail(m, only(m), kind=AttemptFailure.BUSY, busy_s=0.0)
    assert probed(commands) == ["a"]
    assert m.core.engines.states["a"].quarantined
    m.post(ev.EngineReady("a"))
    m.end(only(m).id)
    assert len(m.batches) == 1


def test_an_engine_that_is_busy_for_ever_is_an_outage() -> None:
    """Probes find it well, and it takes nothing: the step ends with a reason, as without any engine."""
    m = machine(engines=TWO[:1], outage_deadline_s=50.0)
    outages: list[Timer] = []
    for _ in range(3 * RESTS_BEFORE_QUARANTINE):
        commands = fail(m, only(m), kind=AttemptFailure.BUSY, busy_s=0.0)
        outages += [t.timer for t in timers(commands, TimerKind.OUTAGE) if t.seconds == 50.0]
        if probed(commands):
            m.post(ev.EngineReady("a"))
        else:
            m.post(ev.TimerFired(rests(commands)[0].timer))
    assert len(outages) == 1  # nothing ends it meanwhile
    fail(m, only(m), kind=AttemptFailure.BUSY, busy_s=0.0)
    m.post(ev.TimerFired(outages[0]))
    assert "no engine with the current weights has been well for 50 s" in m.errors[0]


@pytest.mark.parametrize(
    ("asked_s", "rests_s"),
    [(math.nan, FIRST_REST_S), (-math.inf, FIRST_REST_S), (-1.0, FIRST_REST_S), (9.0, 9.0), (60.0, 20.0),
     (math.inf, 20.0)],
)  # fmt: skip
def test_a_rest_that_an_engine_asks_for(asked_s: float, rests_s: float) -> None:
    """As long as it asks, within the deadline of an outage; what is no time says nothing."""
    m = machine(engines=TWO[:1], outage_deadline_s=20.0)
    assert [t.seconds for t in rests(fail(m, only(m), kind=AttemptFailure.BUSY, busy_s=asked_s))] == [rests_s]


def test_a_request_that_ends_ends_the_outage_of_a_busy_engine() -> None:
    """It takes requests again: neither the deadline of before nor a request that runs long ends the step."""
    m = machine(n=2, engines=TWO[:1], outage_deadline_s=50.0)
    state = m.core.engines.states["a"]
    state.rests = RESTS_BEFORE_QUARANTINE + 1
    commands = [c for x in list(m.in_flight.values()) for c in fail(m, x, kind=AttemptFailure.BUSY, busy_s=0.0)]
    (outage,), (rest,) = timers(commands, TimerKind.OUTAGE), rests(commands)
    assert (outage.seconds, rest.seconds) == (50.0, LONGEST_REST_S)
    m.post(ev.TimerFired(rest.timer))
    assert len(m.in_flight) == 1  # the cap is what it took, and not less than one
    m.post(ev.TimerFired(outage.timer))
    assert not m.errors
    m.end(only(m).id)
    assert state.rests == 0
    m.end(only(m).id)
    assert len(m.batches) == 1


def test_the_first_rest_of_an_engine_is_told() -> None:
    """Once: a server that is busy now and then is not worth a line each time."""
    m = machine(engines=TWO[:1])
    (first,) = rests(fail(m, only(m), kind=AttemptFailure.BUSY, busy_s=7.0))
    assert first.why == "engine a takes no requests for now and is left alone for 7 s: HTTP 503"
    m.post(ev.TimerFired(first.timer))
    (again,) = rests(fail(m, only(m), kind=AttemptFailure.BUSY, busy_s=7.0))
    assert again.why == ""


def test_a_request_that_a_server_with_other_weights_refuses_costs_nothing() -> None:
    """It may have been started anew with another model: the right one is asked."""
    m = machine(n=1)
    first = only(m)
    m.post(ev.EngineStale("a"))
    fail(m, first, kind=AttemptFailure.REFUSED)
    assert only(m).engine == "b"
    assert m.core.prompts.as_dict()["dropped"] == {}
    m.end(only(m).id)
    assert len(m.batches) == 1


def test_a_burst_of_refusals_counts_once() -> None:
    """Many requests refused in the same moment are one rest, and the cap is what the engine did take."""
    m = machine(n=6, engines=TWO[:1])
    attempts = list(m.in_flight.values())
    timers = [t for a in attempts[2:] for t in rests(fail(m, a, kind=AttemptFailure.BUSY, busy_s=1.0))]
    state = m.core.engines.states["a"]
    assert len(timers) == 1
    assert state.rests == 1
    assert state.cap.value == 2 == state.in_flight


def test_a_refused_request_costs_its_group_at_once_and_not_the_engine() -> None:
    """The same request would be refused again: the prompt leaves as failed, with what the server says."""
    m = machine(max_failed_groups=100)
    m.tokens(only(m).id, 3)
    commands = fail(m, only(m), kind=AttemptFailure.REFUSED)
    (report,) = [c for c in commands if isinstance(c, do.ReportDrop)]
    assert "HTTP 503" in report.why
    assert m.core.prompts.as_dict()["dropped"] == {"failed": 1}
    assert not m.core.engines.states["a"].quarantined
    m.check_ledger()


def test_refusals_in_a_row_end_the_step() -> None:
    """A server that refuses everything is a mistake in the settings: the trainer is told with the server's words."""
    m = machine(max_failed_groups=3)
    for _ in range(3):
        fail(m, only(m), kind=AttemptFailure.REFUSED)
    assert m.errors
    assert "HTTP 503" in m.errors[0]


# ---------------------------------------------------------------- affinity


def test_a_sample_goes_back_to_its_cached_prefix_while_the_weights_stay() -> None:
    """After a pause for an evaluation it continues where its keys and values are, though that engine is fuller."""
    m = machine(n=5)
    of_a = [x for x in m.in_flight.values() if x.engine == "a"]
    for attempt in list(m.in_flight.values()):
        m.tokens(attempt.id, 3)
    m.post(ev.PauseRequested())
    m.finish_aborts()
    before = {x.sample.id: x.engine for x in of_a}
    m.post(ev.Resumed())
    assert {x.sample.id: x.engine for x in m.in_flight.values() if x.engine == "a"} == before


def test_after_a_weight_update_the_least_loaded_engine_goes_first() -> None:
    """Caches are empty then: who had the prefix does not matter."""
    m = machine(n=2, engines=(*TWO, EngineLimits("c", 4096, None, (EOS,))))
    for attempt in list(m.in_flight.values()):
        m.tokens(attempt.id, 3)
    m.post(ev.PauseRequested())
    m.finish_aborts()
    for sample in m.core.buffer.samples():
        sample.cached_on = "c"  # were it asked, both would go there
    m.post(ev.WeightsUpdated(PolicyVersion(0, 1)))
    m.post(ev.Resumed())
    assert sorted(x.engine for x in m.in_flight.values()) == ["a", "b"]


def test_an_attempt_without_a_token_leaves_nothing_in_a_cache() -> None:
    """It may never have reached its engine: what an earlier one left elsewhere is better."""
    m = machine(n=1)
    m.tokens(only(m).id, 3)
    sample = only(m).sample
    m.post(ev.PauseRequested())
    m.finish_aborts()
    m.core.engines.states["a"].health = EngineHealth.RESTING
    m.core.engines.states["a"].rest = 99
    m.post(ev.Resumed())
    assert only(m).engine == "b"
    m.post(ev.PauseRequested())
    m.finish_aborts()
    assert sample.cached_on == "a"


def test_an_engine_that_was_started_anew_has_nothing_cached() -> None:
    """Given the present weights again it is the same version, and another cache."""
    m = machine(n=1, engines=TWO)
    m.tokens(only(m).id, 3)
    sample = only(m).sample
    m.post(ev.PauseRequested())
    m.finish_aborts()
    engines = m.core.engines
    assert engines.cached_on(sample.cached_on, sample.cached_under) == "a"
    m.post(ev.EngineStale("a"))
    m.post(ev.EngineReady("a", PolicyVersion(0, 0)))
    assert engines.cached_on(sample.cached_on, sample.cached_under) == ""


def test_affinity_has_its_price() -> None:
    """An engine that is much fuller than the least loaded one is not worth its cache."""
    engines = machine().core.engines
    a, b = engines.states["a"], engines.states["b"]
    a.in_flight, b.in_flight = AFFINITY_SLACK, 0
    assert engines.pick(PolicyVersion(0, 0), prefer="a") is a
    a.in_flight += 1
    assert engines.pick(PolicyVersion(0, 0), prefer="a") is b
    a.in_flight = 0
    assert engines.pick(PolicyVersion(0, 0), avoid="a", prefer="a") is b


# ---------------------------------------------------------------- engines with other weights


def test_an_engine_that_was_started_anew_gets_nothing_until_it_confirms_the_version() -> None:
    """Its weights are not known; being well is not enough."""
    m = machine(n=1)
    m.post(ev.EngineStale("b"))
    m.post(ev.EngineFailed("b"))
    m.post(ev.EngineReady("b"))
    fail(m, only(m))
    assert not m.in_flight  # a is quarantined, b has other weights
    m.post(ev.EngineReady("b", PolicyVersion(0, 0)))
    assert only(m).engine == "b"


def test_a_stale_engine_comes_back_with_the_next_weight_update() -> None:
    """Where nobody knows how to give it the present weights."""
    m = machine(n=1)
    m.post(ev.EngineStale("a"))
    m.end(only(m).id)
    assert only(m).engine == "b"
    m.end(only(m).id)
    m.update()
    m.post(ev.StepRequested())
    assert only(m).engine == "a"


@pytest.mark.parametrize("end", [ev.AttemptEnded, ev.AttemptFailed])
def test_tokens_of_weights_that_nobody_knows_are_dropped(end: type[ev.AttemptEnded]) -> None:
    """A request that runs on an engine which turns out to be stale is ended, and its sample goes on without it."""
    m = machine(n=1)
    first = only(m)
    m.tokens(first.id, 3)
    m.post(ev.PauseRequested())
    m.finish_aborts()
    m.post(ev.Resumed())
    second = only(m)
    m.tokens(second.id, 4)
    m.post(ev.EngineStale(second.engine))
    assert m.abort_asked == {second.id}
    del m.in_flight[second.id]
    m.post(end.of(second, EngineFinish.STOP))
    assert m.core.tokens.as_dict()["dropped"] == {"unknown_weights": 4}
    third = only(m)
    assert third.engine != second.engine
    assert len(third.token_ids) == 2 + 3
    m.end(third.id)
    m.check_ledger()
    assert m.batches[0].samples[0].tokens.tolist() == [*range(10, 29), EOS]


def test_an_engine_that_failed_outside_of_any_attempt_is_probed_once() -> None:
    """A pause that failed is a failure of the engine; asking again while it is quarantined starts no second probe."""
    m = machine()
    commands = m.post(ev.EngineFailed("b"))
    assert probed(commands) == ["b"]
    assert len(commands) == 1
    assert m.post(ev.EngineFailed("b")) == []


# ---------------------------------------------------------------- caps from measured memory


def test_a_report_of_full_memory_lowers_what_goes_to_that_engine() -> None:
    """Places left are not filled on an engine that cannot hold them; the other one takes more."""
    m = machine(n=20)
    for name in ("a", "b"):
        assert m.core.engines.states[name].in_flight == 10
    m.post(ev.LoadReported(engine="a", running=6, waiting=4, kv_usage=0.99, preemptions=0))
    assert m.core.engines.states["a"].cap.value == 5
    assert m.core.counters["lowered_caps"] == 1
    for attempt in [x for x in m.in_flight.values() if x.engine == "a"][:3]:
        m.tokens(attempt.id, 1)
        fail(m, attempt)
    # quarantined for the broken attempts; well again, it is still over its cap
    m.post(ev.EngineReady("a"))
    assert m.core.engines.states["a"].in_flight == 7
    assert not m.core.engines.states["a"].has_room


@pytest.mark.parametrize("kv_usage", [0.1, 0.5])
def test_a_full_engine_with_memory_to_spare_is_left_full(kv_usage: float) -> None:
    """Requests that wait for a place, not for memory, are the whole point of over-sampling."""
    m = machine(n=20)
    m.post(ev.LoadReported(engine="a", running=5, waiting=5, kv_usage=kv_usage, preemptions=0))
    assert m.core.engines.states["a"].cap.value is None


# ---------------------------------------------------------------- metrics


def test_a_batch_says_what_became_of_each_engine() -> None:
    """In flight when its step stopped, the cap and the memory where they are known, and what happened in the step."""
    m = machine(n=2, over=4)
    m.post(ev.LoadReported(engine="a", running=1, waiting=1, kv_usage=0.97, preemptions=0))
    busy = next(x for x in m.in_flight.values() if x.engine == "b")
    fail(m, busy, kind=AttemptFailure.BUSY, busy_s=1.0)
    m.post(ev.EngineStale("b"))
    while not m.core.step or not m.core.step.stopping:
        m.end(next(i for i in m.in_flight if i not in m.abort_asked))
    m.finish_aborts()
    metrics = m.batches[0].metrics
    assert {name: metrics[name] for name in ("busy_refusals", "stale_engines", "lowered_caps")} == {
        "busy_refusals": 1.0, "stale_engines": 1.0, "lowered_caps": 1.0,
    }  # fmt: skip
    of_engines = {name for name in metrics if name.startswith("engine/")}
    assert of_engines == {
        "engine/a/in_flight_at_stop", "engine/a/cap", "engine/a/kv_usage", "engine/b/in_flight_at_stop", "engine/b/cap",
        "engine/a/waits_for_update", "engine/b/waits_for_update",
    }  # fmt: skip
    assert [metrics[f"engine/{name}/waits_for_update"] for name in ("a", "b")] == [0.0, 1.0]
    assert metrics["engine/a/kv_usage"] == 0.97
    by_engine = [metrics[f"engine/{name}/in_flight_at_stop"] for name in ("a", "b")]
    assert sum(by_engine) == metrics["in_flight_at_stop"]
