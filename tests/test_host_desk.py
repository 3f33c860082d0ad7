"""What travels between the core's process and a host: exactly what the other side does not know, each thing once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from core_machine import settings
from host_sides import SAMPLING, HostSides

from april.core import commands as do
from april.core import events as ev
from april.core.tape import SegmentKind
from april.core.types import EngineFinish, SampleState
from april.processes import messages as wire
from april.processes.messages import ProtocolError


def test_a_step_over_the_wire_delivers_what_the_host_generated() -> None:
    """Tokens, log-probabilities and versions arrive as they were made; what is cut goes on where it stood."""
    sides = HostSides(settings(n=1, samples=1, over=2, has_reward=False))
    sides.pump.post(ev.StepRequested())
    first, second = (c.attempt for c in sides.down() if isinstance(c, do.Submit))
    assert first.token_ids.tolist() == [1, 2, 0]
    sides.ends(first, 3)
    sides.brings(second, 2)
    sides.up()
    (stop,) = sides.down()
    assert isinstance(stop, do.Abort)
    assert (stop.engine, stop.attempt_ids) == ("h/e0", (second.id,))
    sides.abort_all()
    sides.up()

    (batch,) = sides.batches
    (sample,) = batch.samples
    assert sample.tokens.tolist()[:2] == [10, 11]
    assert sample.logprobs.tolist() == pytest.approx([-0.5, -0.5, -0.1])
    assert [s.engine for s in sample.segments] == ["h/e0"]

    sides.pump.post(ev.WeightsUpdated(sides.core.clock.current._replace(n=1), trained=0))
    sides.pump.post(ev.StepRequested())
    resumed = next(c.attempt for c in sides.down() if isinstance(c, do.Submit) and c.attempt.sample.id.group == 1)
    assert resumed.token_ids.tolist() == [1, 2, 1, 10, 11]
    assert sides.mirror.current.n == 1


def test_tokens_that_a_host_has_brought_do_not_travel_back() -> None:
    """A response that goes on where it was begun needs its attempt's name only; elsewhere all of its tokens."""
    sides = HostSides(settings(n=1, samples=1, over=2, has_reward=False))
    sides.pump.post(ev.StepRequested())
    first, second = (c.attempt for c in sides.down() if isinstance(c, do.Submit))
    sides.ends(first, 2)
    sides.brings(second, 500)
    sides.up()
    sides.down()
    sides.abort_all()
    sides.up()
    before = sides.desk.bytes_out
    sides.pump.post(ev.StepRequested())
    resumed = next(c.attempt for c in sides.down() if isinstance(c, do.Submit) and c.attempt.sample.id.group == 1)
    assert len(resumed.token_ids) == 3 + 500
    assert sides.desk.bytes_out - before < 600


def test_what_runs_is_reported_on_request_and_only_once() -> None:
    """Tapes on request: a state has what running requests have so far; their ends bring the rest."""
    sides = HostSides(settings(n=1, samples=1, has_reward=False))
    sides.pump.post(ev.StepRequested())
    (submit,) = sides.down()
    assert isinstance(submit, do.Submit)
    sides.brings(submit.attempt, 5)
    sides.desk.say(wire.AskTapes(7))
    sides.down()
    assert sides.asked == [wire.AskTapes(7)]
    sides.mirror.report()
    sides.mirror.say(wire.TapesSent(7))
    sides.up()
    assert sides.desk.tapes_sent == 7
    (attempt,) = sides.core.attempts.values()
    assert attempt.tape.count == 5

    sides.ends(submit.attempt, 2)
    sides.up()
    (batch,) = sides.batches
    assert len(batch.samples[0].tokens) == 7
    assert sides.core.tokens.delivered == 7


def test_a_lost_host_costs_what_it_had_not_reported() -> None:
    """Its engines are broken, its attempts have failed with what was told; an end that comes later is nobody's."""
    sides = HostSides(settings(n=1, samples=2, has_reward=False))
    sides.pump.post(ev.StepRequested())
    one, two = (c.attempt for c in sides.down() if isinstance(c, do.Submit))
    sides.brings(one, 4)
    sides.mirror.report()
    sides.up()
    sides.brings(two, 9)
    sides.hear(sides.desk.lost("killed"))

    assert not sides.core.attempts
    assert sides.core.engines.states["h/e0"].quarantined
    assert [len(sides.sample(a).tape) for a in (one, two)] == [4, 0]
    assert sides.core.tokens.observed == sides.core.tokens.held == 4
    sides.ends(one, 2)
    sides.up()
    assert sides.core.tokens.observed == 4


def test_a_call_on_a_host_gets_its_answer_and_adds_to_the_conversation() -> None:
    """A function of several turns on a host: what it adds travels up, what its calls brought is there already."""
    sides = HostSides(settings(n=1, samples=1), functions=True)
    sides.pump.post(ev.StepRequested())
    (start,) = sides.down()
    assert isinstance(start, do.StartSample)
    sides.mirror.post(ev.CallMade(start.sample.id, SAMPLING))
    sides.up()
    (submit,) = sides.down()
    assert isinstance(submit, do.Submit)
    sides.ends(submit.attempt, 3)
    sides.up()
    (answer,) = sides.down()
    assert isinstance(answer, do.CallCompleted)
    mine = answer.call.sample
    assert mine.tape.tokens.tolist() == sides.sample(submit.attempt).tape.tokens.tolist()
    conversation = np.concatenate((mine.group.prompt.token_ids, mine.tape.tokens, np.array([77, 78], np.int32)))
    sides.mirror.post(ev.CallMade(mine.id, SAMPLING, conversation))
    sides.up()
    (submit,) = sides.down()
    assert isinstance(submit, do.Submit)
    assert submit.attempt.token_ids.tolist() == conversation.tolist()
    assert [s.kind for s in mine.tape.segments] == [SegmentKind.GENERATED, SegmentKind.ENVIRONMENT]
    sides.ends(submit.attempt, 2)
    sides.up()
    (answer,) = sides.down()
    sides.mirror.post(ev.SampleReturned(mine.id))
    sides.up()
    (score,) = sides.down()
    assert isinstance(score, do.ScoreSample)
    assert score.sample.tape.tokens.tolist() == sides.sample(submit.attempt).tape.tokens.tolist()
    sides.mirror.post(ev.Scored(0, [(0, 2.5)]))
    sides.up()
    (batch,) = sides.batches
    assert batch.samples[0].reward == 2.5
    assert batch.samples[0].loss_mask.tolist() == [1, 1, 1, 0, 0, 1, 1]


def test_what_a_function_says_after_its_run_was_given_up_counts_for_nothing() -> None:
    """A sample that began again has a new run; the old one's return and failure change nothing."""
    sides = HostSides(settings(n=1, samples=1), functions=True)
    sides.pump.post(ev.StepRequested())
    (start,) = sides.down()
    assert isinstance(start, do.StartSample)
    sides.mirror.post(ev.SampleFailed(start.sample.id, "raised"))
    late = wire.encode([wire.Raised(0, 0, 1, "late", ""), wire.Returned(0, 0, 1)])
    sides.up()
    assert any(isinstance(c, do.StartSample) for c in sides.down())
    sides.hear(sides.desk.receive(late))
    group = sides.core.context.group(0)
    assert group is not None
    assert group.samples[0].state is SampleState.RUNNING
    assert group.samples[0].failures == 1


NONE = {"reward": False, "group_reward": False, "filter": False, "tokenizer": False}
LIES = {
    "tokens from the middle": lambda i: wire.Came(i, 3, bytes(4), bytes(4), (((0, 0), 1),)),
    "tokens outside of the vocabulary": lambda i: wire.Came(i, 0, b"\xff\xff\xff\xff", bytes(4), (((0, 0), 1),)),
    "a version that never was": lambda i: wire.Came(i, 0, bytes(4), bytes(4), (((0, 9), 1),)),
    "spans that are not the tokens": lambda i: wire.Came(i, 0, bytes(8), bytes(8), (((0, 0), 1),)),
    "half a token": lambda i: wire.Came(i, 0, bytes(3), bytes(3), (((0, 0), 1),)),
    "more than the budget": lambda i: wire.Came(i, 0, bytes(4004), bytes(4004), (((0, 0), 1001),)),
    "an end that is none": lambda i: wire.Ended(i, "tired"),
    "a second welcome": lambda i: wire.Joined(protocol=2, name="h", life="1", engines=(), functions=True, **NONE),
    "a call that nobody can make": lambda i: wire.Failed(i, "", "broke_off", -1, 0.0),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_what_cannot_be_true_cuts_the_host_off(lie: object) -> None:
    """A broken host never reaches the core: it is refused by a sentence with its name in it."""
    sides = HostSides(settings(n=1, samples=1, has_reward=False))
    sides.pump.post(ev.StepRequested())
    sides.down()
    (attempt_id,) = sides.core.attempts
    with pytest.raises(ProtocolError):
        sides.hear(sides.desk.receive(wire.encode([lie(attempt_id)])))  # type: ignore[operator]
    sides.hear(sides.desk.lost("it lied"))
    assert sides.core.tokens.observed == 0
    assert not sides.core.attempts


def test_an_end_that_comes_twice_counts_once() -> None:
    """Whoever tells of an attempt that has ended is not heard."""
    sides = HostSides(settings(n=1, samples=2, has_reward=False))
    sides.pump.post(ev.StepRequested())
    one, _ = (c.attempt for c in sides.down() if isinstance(c, do.Submit))
    sides.ends(one, 2, EngineFinish.STOP)
    frame = sides.mirror.take()
    assert frame is not None
    sides.hear(sides.desk.receive(frame))
    sides.hear(sides.desk.receive(frame))
    assert sides.core.tokens.observed == 2
    sides.core.validate()


@pytest.mark.parametrize("noise", [b"", b"\xc1", b"GET / HTTP/1.1\r\n", wire.encode([])[:0] + b"\x91\x93\x05\x01\x02"])
def test_a_frame_that_cannot_be_read_is_refused(noise: bytes) -> None:
    """Noise is a ProtocolError on both sides."""
    sides = HostSides()
    with pytest.raises(ProtocolError):
        list(sides.desk.receive(noise))
    with pytest.raises(ProtocolError):
        list(sides.mirror.receive(noise))


def test_rewards_of_other_samples_than_were_asked_for_cut_the_host_off() -> None:
    """A host that leaves a sample out, or adds one, would let it wait for ever."""
    sides = HostSides(settings(n=1, samples=1), functions=True)
    sides.pump.post(ev.StepRequested())
    (start,) = sides.down()
    assert isinstance(start, do.StartSample)
    sides.mirror.post(ev.CallMade(start.sample.id, SAMPLING))
    sides.up()
    (submit,) = sides.down()
    assert isinstance(submit, do.Submit)
    sides.ends(submit.attempt, 2)
    sides.up()
    sides.down()
    sides.mirror.post(ev.SampleReturned(start.sample.id))
    sides.up()
    (score,) = sides.down()
    assert isinstance(score, do.ScoreSample)
    with pytest.raises(ProtocolError, match="asked for those of"):
        sides.hear(sides.desk.receive(wire.encode([wire.Rewards(0, 0, 2, ())])))
    assert not sides.batches


def test_a_call_of_a_cancelled_run_is_not_passed_on() -> None:
    """What a function still does after its sample was given up is nobody's."""
    sides = HostSides(settings(n=1, samples=1), functions=True)
    sides.pump.post(ev.StepRequested())
    (start,) = sides.down()
    assert isinstance(start, do.StartSample)
    sides.mirror._runs.clear()
    sides.mirror.post(ev.CallMade(start.sample.id, SAMPLING))
    assert sides.mirror.take() is None


def test_a_probe_of_a_lost_host_is_answered_once() -> None:
    """Not answered; and not again."""
    sides = HostSides(settings(n=1, samples=1, has_reward=False))
    sides.desk.execute(do.ProbeEngine("h/e0", 5))
    answers = [e for e in sides.desk.lost("gone") if isinstance(e, ev.EngineProbed)]
    assert [(e.probe, e.answered) for e in answers] == [(5, False)]
    assert not [e for e in sides.desk.lost("gone") if isinstance(e, ev.EngineProbed)]


@pytest.mark.parametrize("shares", [False, True], ids=["server", "model"])
def test_a_report_of_written_weights_ends_a_wait_if_it_can_be_true(shares: bool) -> None:
    """Alone, without a request that it broke: whoever waits is told which host said it, and what to do. A host whose
    engines have weights of their own cannot know it, and is cut off.
    """
    sides = HostSides(settings(n=1, samples=1, has_reward=False))
    sides.desk.engines = {name: replace(limits, remote=not shares) for name, limits in sides.desk.engines.items()}
    sides.pump.post(ev.StepRequested())
    sides.down()
    sides.mirror.post(ev.WeightsWritten("somebody wrote"))
    if shares:
        sides.up()
        (submit,) = (c for c in sides.down() if isinstance(c, do.Abort))
        assert submit.engine == "h/e0"
        assert do.Fail("host h: somebody wrote; call weight_update before the next batch", True) in sides.others
    else:
        with pytest.raises(ProtocolError, match="host h says that weights were written which none of its engines"):
            sides.up()
