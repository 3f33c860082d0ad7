"""What hosts are promised and what they promise: told once, told in order, told in time, and forgotten in the end."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from core_machine import settings
from host_sides import SAMPLING, HostSides, answered, function_at_work, requests, started, submitted

from april.core import commands as do
from april.core import events as ev
from april.core.tape import SegmentKind
from april.core.types import DropReason, EngineFinish, GenerationMode, Prompt, SampleState
from april.processes import messages as wire
from april.processes.messages import ProtocolError, ids_of, logprobs_of, packed
from april.processes.plain_values import of_plain_bytes, plain_bytes, why_not_plain

# -------------------------------------------------------------------- told twice


def test_tokens_that_are_told_twice_count_once() -> None:
    """A frame may come twice: what was told before is no news, and what follows still fits; so do ends."""
    sides, (attempt,) = requests()
    sides.brings(attempt, 4)
    sides.mirror.report()
    sides.up(times=2)
    (running,) = sides.core.attempts.values()
    assert running.tape.count == 4
    sides.ends(attempt, 2)
    sides.up(times=2)
    (batch,) = sides.batches
    assert batch.samples[0].tokens.tolist() == [10, 11, 12, 13, 14, 1]
    assert sides.core.tokens.observed == 6


def test_a_call_that_is_told_twice_is_made_once() -> None:
    """After its answer as well, when another call would be possible."""
    sides, sample = function_at_work()
    sides.mirror.post(ev.CallMade(sample.id, SAMPLING))
    frame = sides.up(times=2)
    (attempt,) = submitted(sides.down())
    sides.ends(attempt, 3)
    sides.up()
    sides.hear(sides.desk.receive(frame))
    assert not submitted(sides.down())
    assert len(sides.sample(attempt).chains[0].calls) == 1


# -------------------------------------------------------------------- told in order


def test_new_weights_are_told_before_the_requests_under_them() -> None:
    """A host checks the versions of what its engines bring: it knows the present one before it asks an engine."""
    sides, (attempt,) = requests()
    sides.ends(attempt)
    sides.up()
    sides.pump.post(ev.WeightsUpdated(sides.core.clock.current._replace(n=3), trained=0))
    sides.pump.post(ev.StepRequested())
    frame = sides.desk.take()
    assert frame is not None
    versions = [sides.mirror.current.n for item in sides.mirror.receive(frame) if isinstance(item, do.Submit)]
    assert versions == [3]


def test_what_came_under_two_versions_is_reported_in_parts() -> None:
    """Each report says the versions of its own tokens only; together they are those of the response."""
    sides, (attempt, *_) = requests(n=2, generation=GenerationMode.CONTINUOUS)
    sides.brings(attempt, 4)
    sides.mirror.report()
    sides.up()
    sides.brings(attempt, 2)
    sides.pump.post(ev.WeightsUpdated(sides.core.clock.current._replace(n=1)))
    sides.desk.say(wire.AskTapes(1))
    sides.down()
    sides.brings(attempt, 3)
    sides.mirror.report()
    sides.up()
    core = sides.core.attempts[attempt.id]
    assert core.tape.spans == attempt.tape.spans == [((0, 0), 6), ((0, 1), 3)]


# -------------------------------------------------------------------- what a host knows of a response


def test_a_sample_that_begins_again_has_no_tokens_on_its_host() -> None:
    """What the core has dropped is gone there as well, and the function's first request has the prompt alone."""
    sides, sample = function_at_work()
    answered(sides, sample, 5)
    sides.down()
    assert len(sample.chains[0].tape) == 5
    sides.mirror.post(ev.SampleFailed(sample.id, "raised"))
    sides.up()
    again = started(sides.down())
    assert again.id == sample.id
    assert len(again.chains[0].tape) == again.chains[0].seen == 0
    sides.mirror.post(ev.CallMade(again.id, SAMPLING))
    sides.up()
    (attempt,) = submitted(sides.down())
    assert attempt.token_ids.tolist() == [1, 2, 0]
    assert sides.core.tokens.dropped[DropReason.FAILED] == 5


def test_a_function_that_begins_again_has_seen_nothing() -> None:
    """Its host died after three of nine tokens were answered: the core answers from the tape, call by call."""
    sides, sample = function_at_work()
    answered(sides, sample, 3)
    sides.down()
    tool = np.array([77], np.int32)
    conversation = np.concatenate((sample.group.prompt.token_ids, sample.chains[0].tape.tokens, tool))
    sides.mirror.post(ev.CallMade(sample.id, SAMPLING, conversation))
    sides.up()
    (attempt,) = submitted(sides.down())
    sides.brings(attempt, 5)
    sides.pump.post(ev.FunctionsLost([sample.id.group]))
    assert any(isinstance(c, do.Abort) for c in sides.down())
    sides.abort_all()
    sides.up()
    again = started(sides.down())
    assert (again.chains[0].seen, len(again.chains[0].tape)) == (0, 9)
    sides.mirror.post(ev.CallMade(again.id, SAMPLING))
    sides.up()
    (answer,) = (c for c in sides.down() if isinstance(c, do.CallCompleted))
    assert answer.call.sample.chains[0].seen == 3
    sides.mirror.post(ev.CallMade(again.id, SAMPLING, conversation))
    sides.up()
    (rest,) = (a for a in submitted(sides.down()) if a.id != attempt.id)
    assert rest.token_ids.tolist() == [*conversation.tolist(), *again.chains[0].tape.tokens[4:].tolist()]
    assert [s.kind for s in again.chains[0].tape.segments] == [
        SegmentKind.GENERATED, SegmentKind.ENVIRONMENT, SegmentKind.GENERATED,
    ]  # fmt: skip


def test_an_evaluation_numbers_its_prompts_from_0_on_hosts_too() -> None:
    """Engines and functions see the same key, and draw the same seeds, wherever a sample runs."""
    sides, (attempt,) = requests(max_in_flight=2)
    sides.ends(attempt)
    sides.up()
    for number in (1, 2):
        prompts = [Prompt(np.array([3, i], np.int32), {}, 0, i) for i in range(2)]
        sides.pump.post(
            ev.EvaluationRequested(evaluation=number, prompts=prompts, n_samples=1, sampling=SAMPLING, seed=number)
        )
        asked = submitted(sides.down())
        assert [a.sample.key for a in asked] == [(0, 0), (1, 0)]
        assert [a.sample.key for a in asked] == [sides.desk.attempts[a.id].sample.key for a in asked]
        for one in asked:
            sides.ends(one)
        sides.up()


@pytest.mark.parametrize("functions", [True, False])
@pytest.mark.parametrize("data", [{"answer": 42, "image": b"\0"}, {"environment": object()}], ids=["plain", "object"])
def test_the_data_of_a_prompt_go_where_functions_run(data: dict[str, Any], functions: bool) -> None:
    """A host that only generates gets tokens; what cannot travel at all does not cost a host."""
    sides = HostSides(settings(n=1, samples=1), functions=functions)
    sides.data = data
    sides.pump.post(ev.StepRequested())
    (command,) = sides.down()
    assert isinstance(command, (do.StartSample, do.Submit))
    sample = command.sample if isinstance(command, do.StartSample) else command.attempt.sample
    assert sample.group.prompt.data == (data if functions and "answer" in data else {})


# -------------------------------------------------------------------- ends


def test_tokens_that_a_host_has_brought_do_not_travel_back() -> None:
    """A response that goes on where it was begun needs its attempt's name only; elsewhere all of its tokens."""
    sides, (first, second) = requests(over=2)
    sides.ends(first, 2)
    sides.brings(second, 500)
    sides.up()
    sides.down()
    sides.abort_all()
    sides.up()
    before = sides.desk.bytes_out
    sides.pump.post(ev.StepRequested())
    (resumed,) = (a for a in submitted(sides.down()) if a.sample.id.group == 1)
    assert len(resumed.token_ids) == 3 + 500
    assert sides.desk.bytes_out - before < 600


def test_a_lost_host_costs_what_it_had_not_reported() -> None:
    """Its engines are broken, its attempts have failed with what was told; an end that comes later is nobody's."""
    sides, (one, two) = requests(samples=2)
    sides.brings(one, 4)
    sides.mirror.report()
    sides.up()
    sides.brings(two, 9)
    sides.hear(sides.desk.lost("killed"))
    assert not sides.core.attempts
    assert sides.core.engines.states["h/e0"].quarantined
    assert [len(sides.sample(a).chains[0].tape) for a in (one, two)] == [4, 0]
    sides.ends(one, 2)
    sides.up()
    assert sides.core.tokens.observed == sides.core.tokens.held == 4


def test_what_a_function_says_after_its_run_was_given_up_counts_for_nothing() -> None:
    """A sample that began again has a new run; the old one's return and failure change nothing."""
    sides, sample = function_at_work()
    sides.mirror.post(ev.SampleFailed(sample.id, "raised"))
    sides.up()
    started(sides.down())
    sides.hear(sides.desk.receive(wire.encode([wire.Raised(0, 0, 1, "late", ""), wire.Returned(0, 0, 1)])))
    group = sides.core.context.group(0)
    assert group is not None
    assert (group.samples[0].state, group.samples[0].failures) == (SampleState.RUNNING, 1)


def test_an_evaluation_is_over_when_its_last_request_has_ended() -> None:
    """Also one whose function was lost meanwhile: the weight update that follows finds nothing in flight."""
    sides, (attempt,) = requests(max_in_flight=4)
    sides.ends(attempt)
    sides.up()
    prompts = [Prompt(np.array([3, 4], np.int32), {}, 0, 0)]
    sides.pump.post(ev.EvaluationRequested(evaluation=1, prompts=prompts, n_samples=1, sampling=SAMPLING, seed=1))
    (old,) = submitted(sides.down())
    sides.pump.post(ev.FunctionsLost([old.sample.id.group]))
    (new,) = submitted(sides.down())
    assert new.id != old.id
    sides.ends(new)
    sides.up()
    assert not any(isinstance(c, do.EvaluationDone) for c in sides.others)
    sides.pump.post(ev.UpdateRequested(update=1, path="weights", trained=0))
    assert not any(isinstance(c, do.PauseEngine) for c in sides.down())
    sides.mirror.post(ev.AttemptEnded.of(old, EngineFinish.ABORT))
    sides.up()
    assert any(isinstance(c, do.EvaluationDone) for c in sides.others)
    assert any(isinstance(c, do.PauseEngine) for c in sides.down())


def test_a_fenced_request_is_told_as_one() -> None:
    """Its engine did not end it in time: the core deals with the engine, not only with the request."""
    sides, (attempt,) = requests()
    sides.desk.execute(do.Fence("h/e0", (attempt.id,)))
    (fence,) = sides.down()
    assert isinstance(fence, do.Fence)
    assert fence.engine == "h/e0"
    sides.brings(attempt, 2)
    sides.mirror.post(ev.AttemptEnded.of(attempt, EngineFinish.ABORT, fenced=True))
    frame = sides.mirror.take()
    assert frame is not None
    (event,) = sides.desk.receive(frame)
    assert isinstance(event, ev.AttemptEnded)
    assert event.fenced
    assert event.counts.spans == ((sides.core.clock.current, 2),)
    assert not sides.desk.fenced


def test_a_lost_host_ends_the_calls_of_its_engines() -> None:
    """Nobody waits for who is gone, and each call is answered once; the error is the engine's, with the host in it."""
    sides, (attempt,) = requests()
    sides.ends(attempt)
    sides.up()
    sides.pump.post(ev.UpdateRequested(update=1, path="weights", trained=0))
    (call,) = (c for c in sides.down() if isinstance(c, (do.PauseEngine, do.LoadEngine)))
    assert call.engine == "h/e0"
    sides.desk.execute(do.ProbeEngine("h/e0", 5))
    events = list(sides.desk.lost("killed"))
    assert [e.call for e in events if isinstance(e, ev.EngineCallEnded)] == [call.call]
    assert [(e.probe, e.answered) for e in events if isinstance(e, ev.EngineProbed)] == [(5, False)]
    assert not [e for e in sides.desk.lost("killed") if isinstance(e, (ev.EngineProbed, ev.EngineCallEnded))]
    assert str(sides.errors[call.call]) == "host h is gone: killed"
    sides.hear(iter(events))
    sides.core.validate()


def test_what_a_directory_holds_is_told_both_ways_and_is_a_hash() -> None:
    """A host loads what it is to find there and says what it has found; text that is no hash cuts it off."""
    sides, (attempt,) = requests()
    sides.ends(attempt)
    sides.up()
    sides.pump.post(ev.UpdateRequested(update=1, path="weights", trained=0))
    (pause,) = (c for c in sides.down() if isinstance(c, do.PauseEngine))
    sides.mirror.post(ev.EngineCallEnded("h/e0", pause.call, ev.CallResult.DONE))
    sides.up()
    (load,) = (c for c in sides.down() if isinstance(c, do.LoadEngine))
    assert load.contents == ()
    for lie in ("\x1b[31m", "0" * 65):
        said = wire.Happened(ev.EngineCallEnded("h/e0", load.call, ev.CallResult.DONE, "", lie))
        with pytest.raises(ProtocolError, match="the content of a directory is told as"):
            list(sides.desk.receive(wire.encode([said])))
    sides.mirror.post(ev.EngineCallEnded("h/e0", load.call, ev.CallResult.DONE, "", "a1b2"))
    sides.up()
    assert sides.core.updates.contents == ("a1b2",)
    sides.desk.execute(
        do.LoadEngine(engine="h/e0", call=9, within_s=1.0, version=(0, 1), path="weights", contents=("a1b2",))
    )
    (again,) = (c for c in sides.down() if isinstance(c, do.LoadEngine))
    assert again.contents == ("a1b2",)


# -------------------------------------------------------------------- nothing stays


def test_nobody_remembers_what_is_delivered() -> None:
    """A long run has as much in its desks and hosts as is undelivered."""
    sides, sample = function_at_work()
    answered(sides, sample, 3)
    sides.down()
    sides.mirror.post(ev.SampleReturned(sample.id))
    sides.up()
    sides.down()
    sides.mirror.post(ev.Scored(0, [(0, 1.0)]))
    sides.up()
    assert sides.batches
    sides.down()
    desk, mirror = sides.desk, sides.mirror
    for known in (
        desk._groups, desk._known, desk.attempts, desk._judged,
        mirror._groups, mirror._attempts, mirror._reported, mirror._brought, mirror._runs, mirror._turns,
    ):  # fmt: skip
        assert not known


def test_a_group_that_is_settled_ends_what_runs_for_it_on_its_host() -> None:
    """The function of a sample that nobody waits for is cancelled there, and says nothing any more."""
    sides, sample = function_at_work()
    items = list(sides.mirror.receive(wire.encode([wire.Forget(0)])))
    assert items == [do.CancelSample(sample), (sample.id,)]
    sides.mirror.post(ev.SampleFailed(sample.id, "cancelled"))
    assert sides.mirror.take() is None


# -------------------------------------------------------------------- what users give

CYCLE: list[Any] = []
CYCLE.append(CYCLE)
ODD = {
    "a tuple": ({"pair": [(1, 2)]}, r"data\['pair'\]\[0\] is a tuple"),
    "a set": ({"x": {1}}, r"data\['x'\] is a set"),
    "an array": ({"x": np.zeros(2)}, r"data\['x'\] is a ndarray"),
    "a number of numpy's": ({"x": np.int64(3)}, r"data\['x'\] is a int64"),
    "a key": ({3: "x"}, "the key 3, which is no string"),
    "a deeper key": ({"x": {(1, 2): 3}}, r"data\['x'\] has a key of type tuple"),
    "a large number": ({"x": 1 << 70}, r"data\['x'\] is a number of more than 64 bits"),
    "a large key": (
        {"x": [{"deep": {1 << 70: 1}}]},
        r"the key 118\d+ of data\['x'\]\[0\]\['deep'\] is a number of more",
    ),
    "half a character": ({"x": "caf\udce9"}, r"data\['x'\] is text with half a character"),
    "half a character of a key": ({"x": {"\ud800": 1}}, r"the key '\\ud800' of data\['x'\] is text with half"),
    "a cycle": ({"x": CYCLE}, r"data\['x'\]\[0\].* \.\.\. has more than 100 levels"),
    "an enum": ({"x": EngineFinish.STOP}, r"data\['x'\] is a EngineFinish"),
}


@pytest.mark.parametrize(("data", "why"), ODD.values(), ids=ODD)
def test_data_that_would_arrive_as_another_thing_does_not_travel(data: dict[str, Any], why: str) -> None:
    """A function on a host sees what it would see in the scheduler's process, or runs there; and the user reads why."""
    assert re.search(why, str(why_not_plain(data)))


@pytest.mark.parametrize("data", [{}, {"a": [1, -2.5, None, True, "\u20ac", b"\xff"], "b": {"c": {1: float("inf")}}}])
def test_plain_data_travels_as_it_is(data: dict[str, Any]) -> None:
    """Numbers, strings, bytes, lists and mappings."""
    assert why_not_plain(data) is None
    assert of_plain_bytes(plain_bytes(data)) == data


# -------------------------------------------------------------------- arrays


@pytest.mark.parametrize(("read", "dtype"), [(ids_of, np.int32), (logprobs_of, np.float32)])
def test_arrays_arrive_as_they_were_and_may_be_written_to(read: Any, dtype: Any) -> None:
    """A trainer may change its batch in place."""
    array = np.array([0, 1, -2, 7], dtype)
    there = read(packed(array))
    assert there.dtype == dtype
    assert there.tolist() == array.tolist()
    there[0] = 5
