"""Functions that die with their host begin again elsewhere, answered from the tape; test_core_lives loses some, too."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from core_machine import EOS, A, B, CoreMachine, asked, settings, timers

from april.core import commands as do
from april.core import events as ev
from april.core.sampling import SamplingParams
from april.core.types import (
    EngineFinish,
    FinishReason,
    GroupState,
    RecordedCall,
    SampleId,
    SampleState,
    TimerKind,
)

Key = tuple[int, int]
FIRST_CALL = 6
"""Tokens of the first call of a function that makes two."""


class Hosts(CoreMachine):
    """Functions of ``turns`` calls that die with their host; whatever is asked of one that is dead is an error.

    A reward counts how often it was given; ``verdicts``: groups that the filter is asked about.
    """

    def __init__(self, *args: Any, turns: int = 1, **options: Any) -> None:
        self.turns = turns
        self.functions: dict[Key, int] = {}
        """Calls that each has made, of those that are alive."""
        self.started: Counter[Key] = Counter()
        self.verdicts: list[tuple[int, int]] = []
        self.wants_score: list[Any] = []
        super().__init__(*args, **options)

    def _execute(self, command: do.Command) -> None:
        match command:
            case do.StartSample(sample):
                key = tuple(sample.id)
                assert key not in self.functions, "started twice"
                self.functions[key] = 0
                self.started[key] += 1
                self.commands.append(command)
                if self.auto_call:
                    self.call(sample.id)
            case do.CallCompleted(call):
                self.commands.append(command)
                key = tuple(call.sample.id)
                assert key in self.functions, "an answer to a function that is dead"
                if self.functions[key] < self.turns:
                    self.call(call.sample.id)
                else:
                    self._pump.post(ev.SampleReturned(call.sample.id))
            case do.CancelSample(sample):
                self.commands.append(command)
                self.functions.pop(tuple(sample.id), None)
            case do.ScoreSample(sample):
                assert tuple(sample.id) in self.functions, "what was returned is gone"
                self.wants_score.append([sample.id])
                super()._execute(command)
            case do.ScoreGroup(group):
                assert all(tuple(s.id) in self.functions for s in group.members), "what was returned is gone"
                self.commands.append(command)
                self.wants_score.append([s.id for s in group.members])
            case do.JudgeGroup(group, judgement):
                assert all(tuple(s.id) in self.functions for s in group.first), "what was returned is gone"
                self.commands.append(command)
                self.verdicts.append((group.id, judgement))
            case _:
                super()._execute(command)

    def call(self, sample_id: SampleId) -> None:
        """A function asks for tokens."""
        self.functions[tuple(sample_id)] += 1
        last = self.functions[tuple(sample_id)] == self.turns
        self._pump.post(ev.CallMade(sample_id, SamplingParams(max_tokens=1000 if last else FIRST_CALL)))

    def lose(self, *groups: int, died: bool = False) -> list[do.Command]:
        """The host of these groups is gone; ``died``: perhaps of what ran there."""
        self.functions = {key: calls for key, calls in self.functions.items() if key[0] not in groups}
        return self.post(ev.FunctionsLost(groups, died=died))


def machine(**changes: Any) -> Hosts:
    """A step has begun; responses have 20 tokens."""
    return asked(20, (A, B), Hosts, **changes)


def expected(length: int = 20) -> list[int]:
    """The tokens of a whole response."""
    return [*range(10, 10 + length - 1), EOS]


def only_batch(m: Hosts) -> list[list[int]]:
    """Tokens of the one batch that was delivered; the books balance."""
    (batch,) = m.batches
    m.check_ledger()
    assert m.dropped == {}
    return [s.tokens.tolist() for s in batch.samples]


# ---------------------------------------------------------------- functions that run


def test_a_request_at_a_living_engine_is_ended_and_its_tokens_are_kept() -> None:
    """Then the function begins again, and its call goes on behind them."""
    m = machine()
    attempt = m.attempt(0).id
    m.tokens(attempt, 5)
    commands = m.lose(0)
    assert [type(c) for c in commands if not isinstance(c, do.StartTimer)] == [do.Abort]
    assert m.sample(0).state is SampleState.RUNNING
    commands = m.end(attempt, 2)
    assert [type(c) for c in commands] == [do.StartSample, do.Submit]
    (again,) = m.in_flight.values()
    assert again.token_ids.tolist() == [5, 6, *range(10, 17)]
    m.end(again.id)
    assert only_batch(m) == [expected()]
    assert m.batches[0].metrics["lost_functions"] == 1.0
    assert m.batches[0].metrics["resumed_attempts"] == 1.0


def test_a_function_that_has_asked_for_nothing_gives_its_place_back() -> None:
    """And takes it again when it is started anew."""
    m = machine(auto_call=False, max_in_flight=1)
    assert m.core.context.places.to_start() == 0
    assert [type(c) for c in m.lose(0)] == [do.StartSample]
    assert m.core.context.places.to_start() == 0
    assert m.sample(0).chains[0].replay is None
    m.call(m.sample(0).id)
    m.finish(0)
    assert only_batch(m) == [expected()]


@pytest.mark.parametrize("end", ["eos", "stop string", "length", "eos of an engine that breaks off"])
def test_a_call_that_is_complete_when_its_attempt_ends_is_answered_from_the_tape(end: str) -> None:
    """Nothing is generated behind its last token, whatever has ended it; a stop string only the driver knows of."""
    m = machine(max_response_len=1000)
    attempt_id = m.attempt(0).id
    m.lose(0)
    if end == "length":
        m.length = lambda g, i: 2000
    m.tokens(attempt_id, 7 if end == "stop string" else 1000)
    attempt = m.in_flight.pop(attempt_id)
    attempt.tape.stopped = end == "stop string"
    if "breaks off" in end:
        m.post(ev.AttemptFailed.of(attempt, "reset"))
    else:
        m.post(ev.AttemptEnded.of(attempt, EngineFinish.ABORT))
    assert not m.in_flight
    assert m.started[0, 0] == 2
    assert m.core.counters["attempts"] == 1
    (sample,) = m.batches[0].samples
    assert sample.finish == (FinishReason.LENGTH if end == "length" else FinishReason.STOP)
    assert len(sample.tokens) == {"stop string": 7, "length": 1000}.get(end, 20)


def test_a_replay_that_is_lost_in_the_middle_is_remembered_whole() -> None:
    """What was answered again, and what was still to be."""
    m = machine(turns=9, auto_call=False)
    sample = m.sample(0)
    m.call(sample.id)
    for _ in range(2):
        m.finish(0)  # it asks again at once
    attempt = m.attempt(0).id
    m.lose(0)
    m.end(attempt, 3)
    for answered in (0, 1, 2):
        assert sample.chains[0].replay is not None
        calls = [RecordedCall(0, 6, FinishReason.LENGTH), RecordedCall(6, 12, FinishReason.LENGTH)]
        assert list(sample.chains[0].replay.calls) == calls
        assert sample.chains[0].replay.open_start == 12
        for _ in range(answered):
            m.core.handle(ev.CallMade(sample.id, SamplingParams(max_tokens=FIRST_CALL)))
        assert len(sample.chains[0].replay.calls) == 2 - answered
        m.lose(0)
    m.turns = 3
    m.call(sample.id)
    m.finish(0)
    assert only_batch(m) == [expected()]


def test_the_same_loss_told_twice_is_one_loss() -> None:
    """Nothing is started twice and nothing counted twice; groups that are settled are missed by nobody."""
    m = machine()
    attempt = m.attempt(0).id
    assert [type(c) for c in m.lose(0)] == [do.Abort, do.StartTimer]
    assert m.lose(0, 7, -(1 << 40)) == []
    m.end(attempt, 2)
    m.finish(0)
    assert m.started[0, 0] == 2
    assert only_batch(m) == [expected()]
    assert m.core.counters["lost_functions"] == 1
    assert m.lose(0) == []


# ---------------------------------------------------------------- functions that have returned


def test_a_pause_before_the_next_try_of_a_reward_is_void() -> None:
    """It was that of a function that is dead: no reward is asked for before the next one has returned."""
    m = machine(auto_score=False, retry_pause_s=4.0)
    m.finish(0)
    (retry,) = timers(m.post(ev.SampleFailed(m.sample(0).id, "judge away")), TimerKind.RETRY)
    m.auto_call = False
    m.lose(0)
    assert m.post(ev.TimerFired(retry.timer)) == []
    m.call(m.sample(0).id)
    assert len(m.wants_score) == 2
    m.score(m.sample(0).id)
    assert only_batch(m) == [expected()]


def test_with_group_rewards_finished_samples_run_again_for_what_they_return() -> None:
    """The reward of the group sees the returns of all: a sibling that begins again makes all run again."""
    m = machine(samples=2, group_reward=True)
    for _ in range(2):
        m.end(min(m.in_flight))
    assert len(m.wants_score) == 1
    m.lose(0)
    assert (m.started[0, 0], m.started[0, 1], len(m.wants_score)) == (2, 2, 2)
    m.post(ev.Scored(0, [(0, 1.0), (1, 2.0)]))
    assert [s.reward for s in m.batches[0].samples] == [1.0, 2.0]
    assert only_batch(m) == [expected()] * 2


@pytest.mark.parametrize("judged", [True, False])
def test_with_a_filter_the_verdict_is_asked_for_anew(judged: bool) -> None:
    """Of what the functions return when they have run again; a verdict of before is void, and no token is made anew."""
    m = machine(samples=2, has_filter=True)
    m.finish((0, 0))
    if judged:
        m.finish((0, 1))
    before, m.verdicts = m.verdicts, []
    assert len(before) == judged
    waits = [] if judged else [m.attempt(0, 1).id]
    m.lose(0)
    for attempt in waits:
        m.end(attempt)
    (new,) = m.verdicts
    for group, judgement in before:
        m.post(ev.GroupJudged(group=group, judgement=judgement, keep=False))
    assert m.core.buffer.groups[0].state is GroupState.JUDGED
    m.post(ev.GroupJudged(group=0, judgement=new[1], keep=True))
    assert m.core.counters["attempts"] == 2
    assert only_batch(m) == [expected()] * 2
    assert m.core.context.lengths.generated.samples == 2


def test_with_a_quorum_the_cohort_stays_and_stragglers_begin_again() -> None:
    """A group that counts is not judged again: what the baselines are made of is fixed, and nobody is in two."""
    m = machine(samples=4, group_quorum=0.75, has_filter=True)
    m.finish((0, 0), (0, 1), (0, 2))
    m.post(ev.GroupJudged(group=0, judgement=m.verdicts[0][1], keep=True))
    cohort = m.core.buffer.groups[0].cohort
    attempt = m.attempt(0, 3).id
    m.tokens(attempt, 5)
    m.lose(0)
    m.end(attempt, 1)
    m.finish((0, 3))
    assert m.started == {(0, 0): 1, (0, 1): 1, (0, 2): 1, (0, 3): 2}
    assert len(m.verdicts) == 1
    (batch,) = m.batches
    assert [s.cohort for s in batch.samples] == [cohort] * 4
    assert [index for index, _ in cohort] == [0, 1, 2]
    m.check_ledger()


# ---------------------------------------------------------------- evaluations


def evaluated(losses: tuple[int, ...]) -> tuple[Hosts, list[Any], set[Any]]:
    """An evaluation of two prompts with functions of two calls, one of them at a time, beside training.

    ``losses``: requests in whose middle their host dies. Its responses, and with which seed each of their tokens came.
    """
    m = machine(turns=2)
    m.evaluate(2, functions_at_once=1, seed=3)
    m.finish_aborts()
    seeds, step = set(), 0
    while theirs := [a for a in m.in_flight.values() if a.sample.evaluation is not None]:
        (attempt,), step = theirs, step + 1
        seeds.add((attempt.sample.key, len(attempt.token_ids), attempt.sampling.seed))
        m.tokens(attempt.id, 4)
        if step in losses:
            m.lose(attempt.sample.id.group)
        m.end(attempt.id, 1 if step in losses else 1000)
    (done,) = [c for c in m.commands if isinstance(c, do.EvaluationDone)]
    return m, [(g.samples[0].chains[0].tape.tokens.tolist(), g.samples[0].reward) for g in done.groups], seeds


def test_an_evaluation_begins_again_and_answers_as_if_nothing_had_died() -> None:
    """The same tokens by the same seeds; never more of its functions than it may run; training hears nothing of it."""
    _, *undisturbed = evaluated(())
    m, *disturbed = evaluated((2, 5))
    assert disturbed == undisturbed
    assert [tokens for tokens, _ in undisturbed[0]] == [expected()] * 2
    assert m.core.counters["lost_functions"] == 0
    for _ in range(2):
        m.finish(0)
    assert m.batches[0].samples[0].tokens.tolist() == expected()
    assert m.dropped == {}


def test_an_evaluation_begins_again_with_what_was_returned_to_a_dead_host() -> None:
    """And with what was finished there: what its functions return is its answer, and nobody has that."""
    m = Hosts(settings(n=1, samples=1, max_in_flight=4), 20, engines=(A, B), auto_score=False)
    m.evaluate(2, n_samples=2, seed=3)
    samples = [a.sample for a in m.in_flight.values()]
    for sample in samples[:3]:
        m.end(m.attempt(*sample.id).id)
    for sample in samples[:2]:
        m.score(sample.id)
    assert samples[0].group.state is GroupState.READY
    running = m.attempt(*samples[3].id).id
    m.lose(samples[0].id.group, samples[3].id.group)
    assert len(m.in_flight) == 4  # the one of before has its place until it ends
    m.end(running, 1)
    for sample in samples:
        assert (sample.state, len(sample.chains[0].tape)) == (SampleState.RUNNING, 0)
        m.end(m.attempt(*sample.id).id)
        m.score(sample.id)
    (done,) = [c for c in m.commands if isinstance(c, do.EvaluationDone)]
    assert [s.chains[0].tape.tokens.tolist() for g in done.groups for s in g.samples] == [expected()] * 4
    assert set(m.started.values()) == {2}


# ---------------------------------------------------------------- functions of which hosts die


@pytest.mark.parametrize("reward", [False, True])
def test_a_function_whose_host_always_dies_fails_in_the_end(reward: bool) -> None:
    """As one that raises at every try, be it a rollout or a reward: it does not kill one host after the other."""
    m = machine(auto_call=reward, auto_score=False, max_attempt_failures=3, over=1)
    if reward:
        m.finish(0)
    for _ in range(2):
        m.lose(0, died=True)
        assert m.sample(0).state is (SampleState.SCORING if reward else SampleState.RUNNING)
    commands = m.lose(0, died=True)
    (drop,) = (c for c in commands if isinstance(c, do.ReportDrop))
    assert "3 hosts in a row died while its functions ran there" in drop.why
    assert [c.sample.id for c in commands if isinstance(c, do.StartSample)] == [(1, 0)]
    m.core.validate()


@pytest.mark.parametrize("why", ["it waits for an answer", "the hosts have left"])
def test_functions_that_hosts_did_not_die_of_go_on(why: str) -> None:
    """What waits for a response does nothing; and nobody dies of a goodbye."""
    m = machine(auto_call=why == "it waits for an answer", max_attempt_failures=2)
    for _ in range(4):
        m.lose(0, died=why == "it waits for an answer")
        m.finish_aborts()
    assert m.sample(0).state is SampleState.RUNNING
    m.core.validate()


class Thinking(Hosts):
    """Functions that have their answer and compute, until the test lets them ask again."""

    def _execute(self, command: do.Command) -> None:
        if not isinstance(command, do.CallCompleted):
            super()._execute(command)


def test_a_function_that_gets_further_from_host_to_host_goes_on() -> None:
    """It does not kill them: as long as tokens come between, nothing is counted."""
    m = asked(60, (A, B), Thinking, turns=9, max_attempt_failures=2)
    for calls in range(1, 6):
        m.end(m.attempt(0).id, FIRST_CALL)
        assert len(m.sample(0).chains[0].tape) == calls * FIRST_CALL
        m.lose(0, died=True)
        assert m.sample(0).chains[0].open_call is None
        m.functions[0, 0] = 0
        m.call(m.sample(0).id)
        while not m.in_flight:  # what it was answered before comes from the tape
            m.functions[0, 0] = 0
            m.call(m.sample(0).id)
    m.core.validate()


def test_an_evaluation_of_which_hosts_die_ends() -> None:
    """It names the prompt, and says what has happened."""
    m = machine(max_attempt_failures=2)
    m.auto_call = False
    m.evaluate()
    m.finish_aborts()
    (group,) = {key[0] for key in m.functions} - {0}
    assert not [c for c in m.lose(group, died=True) if isinstance(c, do.EvaluationFailed)]
    (failed,) = (c for c in m.lose(group, died=True) if isinstance(c, do.EvaluationFailed))
    assert "2 hosts in a row died" in failed.error
