"""Several engines: who gets what, who is left alone, who must not be used; decided without clock and network."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from core_machine import A, B, C, CoreMachine, asked, timers

from april.core import commands as do
from april.core import events as ev
from april.core.engine_table import (
    AFFINITY_SLACK,
    FAILURES_BEFORE_QUARANTINE,
    FIRST_REST_S,
    LONGEST_REST_S,
    RESTS_BEFORE_QUARANTINE,
    EngineHealth,
)
from april.core.types import Attempt, AttemptFailure, TimerKind
from april.core.versions import FIRST_VERSION

TWO = (A, B)
SERVERS = (replace(A, remote=True), replace(B, remote=True))


def busy(m: CoreMachine, attempt: Attempt | None = None, asked_s: float = 0.0) -> list[do.Command]:
    """An engine takes no requests for now."""
    return m.fail(attempt or m.only, "HTTP 503", kind=AttemptFailure.BUSY, busy_s=asked_s)


def rests(commands: list[do.Command]) -> list[do.StartTimer]:
    return timers(commands, TimerKind.REST)


def probed(commands: list[do.Command]) -> list[str]:
    return [t.timer.engine for t in timers(commands, TimerKind.PROBE)]


def paused(m: CoreMachine, tokens: int = 3) -> None:
    """All requests are cut, with so many tokens, and nothing starts."""
    for attempt_id in m.in_flight:
        m.tokens(attempt_id, tokens)
    m.post(ev.PauseRequested())
    m.finish_aborts()


# ---------------------------------------------------------------- busy and refusing engines


def test_a_busy_engine_is_left_alone_and_its_request_goes_elsewhere() -> None:
    """Nothing was begun, so nothing has failed: no quarantine, no failure of the sample; the first rest is told."""
    m = asked(engines=TWO)
    (timer,) = rests(busy(m, asked_s=7.0))
    assert (timer.seconds, m.only.engine, m.only.call.failures) == (7.0, "b", 0)
    assert timer.why == "engine a accepts no requests at the moment, and april sends it none for 7 s: HTTP 503"
    state = m.core.engines.states["a"]
    assert (state.resting, state.quarantined, state.failures) == (True, False, 0)
    m.fire(timer)
    assert not state.resting
    assert m.core.counters["busy_refusals"] == 1
    busy(m)
    assert rests(busy(m, asked_s=7.0))[0].why == ""  # once is enough for a server that is busy now and then


def test_samples_wait_while_all_engines_rest_and_go_on_afterwards() -> None:
    """A sample is never given up because everybody is busy, however often; the rests grow to a minute."""
    m = asked(max_attempt_failures=1)
    seconds = []
    for _ in range(RESTS_BEFORE_QUARANTINE):
        (timer,) = rests(busy(m))
        assert not m.in_flight
        seconds.append(timer.seconds)
        m.fire(timer)
    assert seconds[:3] == [FIRST_REST_S, 2 * FIRST_REST_S, 4 * FIRST_REST_S]
    assert max(seconds) <= LONGEST_REST_S
    m.finish(0)
    assert len(m.batches) == 1
    assert m.core.engines.states["a"].rests == 0
    m.check_ledger()


def test_an_engine_that_is_busy_for_ever_is_probed_and_is_an_outage() -> None:
    """After many rests in a row a probe shall say whether it is well; found well, and taking nothing, is an outage."""
    m = asked(outage_deadline_s=50.0)
    outages: list[do.StartTimer] = []
    for number in range(3 * RESTS_BEFORE_QUARANTINE):
        commands = busy(m)
        outages += timers(commands, TimerKind.OUTAGE)
        assert bool(probed(commands)) == ((number + 1) % (RESTS_BEFORE_QUARANTINE + 1) == 0)
        m.probed("a") if probed(commands) else m.fire(rests(commands)[0])
    assert [t.seconds for t in outages] == [50.0]  # nothing ends it meanwhile
    busy(m)
    m.fire(outages[0])
    assert "no engine with the current weights was healthy for 50 s" in m.errors[0]


@pytest.mark.parametrize(
    ("asked_s", "rests_s"),
    [(math.nan, FIRST_REST_S), (-math.inf, FIRST_REST_S), (-1.0, FIRST_REST_S), (9.0, 9.0), (60.0, 20.0),
     (math.inf, 20.0)],
)  # fmt: skip
def test_a_rest_that_an_engine_asks_for(asked_s: float, rests_s: float) -> None:
    """As long as it asks, within the deadline of an outage; what is no time says nothing."""
    assert [t.seconds for t in rests(busy(asked(outage_deadline_s=20.0), asked_s=asked_s))] == [rests_s]


def test_a_request_that_ends_ends_the_outage_of_a_busy_engine() -> None:
    """It takes requests again: neither the deadline of before nor a request that runs long ends the step."""
    m = asked(n=2, outage_deadline_s=50.0)
    state = m.core.engines.states["a"]
    state.rests = RESTS_BEFORE_QUARANTINE + 1
    commands = [c for x in list(m.in_flight.values()) for c in busy(m, x)]
    (outage,), (rest,) = timers(commands, TimerKind.OUTAGE), rests(commands)
    assert (outage.seconds, rest.seconds) == (50.0, LONGEST_REST_S)
    m.fire(rest)
    assert len(m.in_flight) == 1  # the cap is what it took, and not less than one
    m.fire(outage)
    assert not m.errors
    m.end(m.only.id)
    assert state.rests == 0
    m.end(m.only.id)
    assert len(m.batches) == 1


def test_a_burst_of_refusals_counts_once() -> None:
    """Many requests refused in the same moment are one rest, and the cap is what the engine did take."""
    m = asked(n=6)
    started = [t for a in list(m.in_flight.values())[2:] for t in rests(busy(m, a, 1.0))]
    state = m.core.engines.states["a"]
    assert (len(started), state.rests) == (1, 1)
    assert state.cap.value == 2 == state.in_flight


def test_a_refused_request_costs_its_group_at_once_and_not_the_engine() -> None:
    """The same request would be refused again: the prompt leaves as failed; a server that refuses all ends the step."""
    m = asked(max_failed_groups=3)
    m.tokens(m.only.id, 3)
    for failed in range(1, 4):
        assert not m.errors
        commands = m.fail(m.only, "HTTP 422", kind=AttemptFailure.REFUSED)
        (report,) = [c for c in commands if isinstance(c, do.ReportDrop)]
        assert "HTTP 422" in report.why
        assert m.prompts_dropped == {"failed": failed}
        assert not m.core.engines.states["a"].quarantined
    assert "HTTP 422" in m.errors[0]
    m.check_ledger()


def test_a_request_that_a_server_with_other_weights_refuses_costs_nothing() -> None:
    """It may have been started anew with another model: the right one is asked."""
    m = asked(engines=SERVERS)
    first = m.only
    m.probed("a", current=False)
    m.fail(first, kind=AttemptFailure.REFUSED)
    assert m.only.engine == "b"
    assert m.prompts_dropped == {}
    m.finish(0)
    assert len(m.batches) == 1


# ---------------------------------------------------------------- affinity


def test_after_a_weight_update_the_least_loaded_engine_goes_first() -> None:
    """Caches are empty then: who had the prefix does not matter."""
    m = asked(n=2, engines=(A, B, C))
    paused(m)
    for sample in m.core.buffer.samples():
        sample.chains[0].cached_on = "c"  # were it asked, both would go there
    m.update()
    m.post(ev.Resumed())
    assert sorted(x.engine for x in m.in_flight.values()) == ["a", "b"]


def test_what_an_engine_has_cached() -> None:
    """An attempt without a token leaves nothing, as it may never have begun; nor does an engine that starts anew."""
    m = asked(engines=SERVERS)
    sample, engines = m.only.sample, m.core.engines
    paused(m)
    engines.states["a"].rest_timer, engines.states["a"].health = 99, EngineHealth.RESTING
    m.post(ev.Resumed())
    assert m.only.engine == "b"
    paused(m, tokens=0)
    assert engines.cached_on(sample.chains[0].cached_on, sample.chains[0].cache_key) == "a"
    m.probed("a", current=False)
    m.probed("a", current=False)
    assert engines.cached_on(sample.chains[0].cached_on, sample.chains[0].cache_key) == ""


def test_affinity_has_its_price() -> None:
    """An engine that is much fuller than the least loaded one is not worth its cache."""
    engines = asked(engines=TWO).core.engines
    a, b = engines.states["a"], engines.states["b"]
    a.in_flight, b.in_flight = AFFINITY_SLACK, 0
    assert engines.pick(FIRST_VERSION, prefer="a") is a
    a.in_flight += 1
    assert engines.pick(FIRST_VERSION, prefer="a") is b
    a.in_flight = 0
    assert engines.pick(FIRST_VERSION, avoid="a", prefer="a") is b


# ---------------------------------------------------------------- engines with other weights


def test_failures_of_an_engine_itself_are_probed_once() -> None:
    """A failed pause, or nonsense several times in a row; asking again in quarantine starts no second probe."""
    m = asked(engines=TWO, max_attempt_failures=9)
    assert probed(m.update(unreachable="b")) == ["b"]
    assert probed(m.update(unreachable="b")) == []
    for number in range(1, FAILURES_BEFORE_QUARANTINE + 1):
        commands = m.fail(m.only, kind=AttemptFailure.CORRUPT)
        assert probed(commands) == ["a"] * (number == FAILURES_BEFORE_QUARANTINE)


# ---------------------------------------------------------------- caps from measured memory


def load(m: CoreMachine, kv_usage: float, running: int = 6, waiting: int = 4) -> None:
    """Engine a says how full it is."""
    values: dict[str, Any] = {"running": running, "waiting": waiting, "kv_usage": kv_usage, "preemptions": 0}
    m.post(ev.LoadReported(engine="a", **values))


def test_a_report_of_full_memory_lowers_what_goes_to_that_engine() -> None:
    """Requests that wait for a place are what over-sampling is for; those that wait for memory are too many."""
    m = asked(n=20, engines=TWO)
    state = m.core.engines.states["a"]
    assert state.in_flight == m.core.engines.states["b"].in_flight == 10
    for kv_usage in (0.1, 0.5):
        load(m, kv_usage)
        assert state.cap.value is None
    load(m, 0.99)
    assert (state.cap.value, m.core.counters["lowered_caps"]) == (5, 1)
    for attempt in [x for x in m.in_flight.values() if x.engine == "a"][:3]:
        m.tokens(attempt.id, 1)
        m.fail(attempt)
    m.probed("a")  # quarantined for the broken attempts; well again, it is still over its cap
    assert state.in_flight == 7
    assert not state.has_room


def test_a_batch_says_what_became_of_each_engine() -> None:
    """In flight when its step stopped, the cap and the memory where they are known, and what happened in the step."""
    m = asked(n=2, over=4, engines=SERVERS)
    m.update()
    load(m, 0.97, running=1, waiting=1)
    busy(m, next(x for x in m.in_flight.values() if x.engine == "b"), 1.0)
    m.probed("b", current=False)
    m.finish_aborts()
    m.probed("b", current=False)
    while not m.core.step or not m.core.step.stopping:
        m.end(next(i for i in m.in_flight if i not in m.abort_asked))
    m.finish_aborts()
    metrics = m.batches[0].metrics
    assert all(metrics[name] == 1.0 for name in ("busy_refusals", "stale_engines", "lowered_caps"))
    known = {"a": {"cap", "kv_usage"}, "b": {"cap"}}
    assert {name for name in metrics if name.startswith("engine/")} == {
        f"engine/{name}/{of}" for name in "ab" for of in known[name] | {"in_flight_at_stop", "waits_for_update"}
    }
    assert [metrics[f"engine/{name}/waits_for_update"] for name in "ab"] == [0.0, 1.0]
    assert metrics["engine/a/kv_usage"] == 0.97
    assert sum(metrics[f"engine/{name}/in_flight_at_stop"] for name in "ab") == metrics["in_flight_at_stop"]
