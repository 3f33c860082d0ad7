"""The host of a trainer's own workers, which ask what to do.

It carries out the same commands as other hosts, by answers to whoever waits for them, and reports the same events. Each
of a prompt's n rollouts is run again and again; the present run is known by its *life*, and an older one hears nothing
any more but that it was given up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from april.core import commands as do
from april.core import events as ev
from april.core.attachments import first_rows
from april.core.batch import Batch
from april.core.numbers import held_reward, wrong_reward
from april.core.state import RolloutCore
from april.core.tape import SegmentKind
from april.core.types import (
    Attempt,
    AttemptFailure,
    AttemptState,
    DropReason,
    EngineFinish,
    FinishReason,
    GenerateCall,
    Group,
    Sample,
    SampleId,
    SampleState,
)
from april.core.versions import PolicyVersion
from april.corrections.advantages import first_others_of
from april.driver.user_code import describe
from april.driver.wire_checks import AnswerChecks
from april.engines.protocol import Chunk
from april.errors import EngineError, RolloutError, WireError
from april.processes.coordinator.messages import (
    Delivery,
    Done,
    GivenUp,
    Go,
    Message,
    Result,
    Rollout,
    Settled,
    Span,
    Start,
)


class Mailboxes:
    """Answers on their way to rollouts, by (group, rollout)."""

    def __init__(self) -> None:
        self._lives: dict[SampleId, int] = {}
        self._answers: dict[SampleId, deque[Message]] = {}
        self._asked: dict[SampleId, tuple[bool, asyncio.Future[Message]]] = {}
        """(whether it waits for its start, who waits)"""
        self._over: BaseException | None = None
        """The error that everybody is answered with."""
        self.late: dict[SampleId, Result] = {}
        """Results of requests that the core had stopped waiting for; the next attempt may begin with them."""

    def __len__(self) -> int:
        return len(self._asked)

    # ---------------------------------------------------------------- lives

    def new_life(self, rollout: SampleId) -> int:
        """A rollout is to begin: what it says is heard, and no older one."""
        life = self._lives[rollout] = self._lives.get(rollout, 0) + 1
        return life

    def is_alive(self, rollout: SampleId, life: int) -> bool:
        """Return whether this is its present run."""
        return self._lives.get(rollout) == life

    def give_up(self, rollout: SampleId) -> None:
        """The sample goes on without its rollout: what that one is told or says from now on is void."""
        self._answers.pop(rollout, None)
        if rollout in self._lives:  # not settled by now
            self.new_life(rollout)
        for_start, future = self._asked.get(rollout, (True, None))
        if future is not None and not for_start:
            del self._asked[rollout]
            _resolve(future, GivenUp())

    def settle(self, rollout: SampleId, *, dropped: bool = False) -> None:
        """The sample is delivered or dropped (``dropped``: it alone)."""
        self._lives.pop(rollout, None)
        self._answers.pop(rollout, None)
        for_start, future = self._asked.pop(rollout, (True, None))
        if future is not None:
            _resolve(future, Settled(dropped) if for_start else GivenUp())

    def stop(self, error: BaseException) -> None:
        """Nothing goes on: whoever waits, or will ask, is told why."""
        self._over = error
        asked, self._asked = self._asked, {}
        for _, future in asked.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # who waited may be gone; its error is not asyncio's business

    # ---------------------------------------------------------------- answers

    async def answer(self, rollout: SampleId, *, for_start: bool = False) -> Message:
        """The next one for it; waits until there is one. Raises what has ended it all."""
        ready = self._answers.get(rollout)
        if ready:
            return ready.popleft()
        if self._over is not None:
            raise self._over
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._asked[rollout] = (for_start, future)
        return await future

    def say(self, rollout: SampleId, answer: Message) -> None:
        """Tell whoever waits, or will ask."""
        _, future = self._asked.pop(rollout, (False, None))
        if future is None or not _resolve(future, answer):
            self._answers.setdefault(rollout, deque()).append(answer)

    def unsay(self, rollout: SampleId) -> None:
        """Take back what was said and not heard: it is out of date."""
        self._answers.pop(rollout, None)


def _resolve(future: asyncio.Future[Message], answer: Message) -> bool:
    """False: whoever waited is gone."""
    if future.done():
        return False
    future.set_result(answer)
    return True


ANY_TOKEN = 2**31 - 1


def take(attempt: Attempt, result: Result, current: PolicyVersion) -> ev.Event:
    """A server's result becomes the attempt's, if it can be true; what happened, for the core.

    Without a label, the ``current`` weights wrote it.
    """
    incarnation = current.incarnation if result.incarnation is None else result.incarnation
    version = current if result.label is None else PolicyVersion(incarnation, result.label)
    full = len(result.tokens) >= attempt.sampling.max_tokens
    whole = EngineFinish.LENGTH if full else EngineFinish.STOP
    finish = EngineFinish.ABORT if result.aborted else whole
    checks = AnswerChecks(
        attempt, vocab_size=ANY_TOKEN, max_context=ANY_TOKEN, oldest=attempt.call.chain.tape.newest_version,
        eos_token_ids=() if result.ends_anywhere else attempt.end_ids.union(result.stop_token_ids),
        held=attempt.call.chain.extras,
    )  # fmt: skip
    checks.aborted = result.aborted
    try:
        if result.offset != len(attempt.token_ids):
            raise WireError(f"an answer to {result.offset} tokens came where {len(attempt.token_ids)} were sent")
        chunk = Chunk(result.tokens, result.logprobs, version, finish, extras=result.extras)
        checks.piece(chunk, current)
        checks.end(chunk)
    except EngineError as error:
        return ev.AttemptFailed(
            attempt_id=attempt.id, error=str(error), kind=AttemptFailure.CORRUPT, rejected=len(result.tokens)
        )
    attempt.tape.append(result.tokens, result.logprobs, version)
    if attempt.extras and result.extras:
        attempt.tape.give_rows(result.extras, attempt.missing_rows)
    attempt.tape.cut_unsaid()
    return ev.AttemptEnded.of(attempt, finish)


def done(complete: GenerateCall) -> Done:
    """Return the result of a complete call."""
    sample, call = complete.sample, complete.result
    assert call is not None
    tape = sample.chains[0].tape
    spans: list[Span] = []
    for s in tape.segments:
        if s.kind is not SegmentKind.GENERATED or s.start >= call.end:
            continue
        end = min(s.start + s.count, call.end)
        if spans and spans[-1][1] == s.start and spans[-1][2:] == tuple(s.version):
            spans[-1] = (spans[-1][0], end, *s.version)
        else:
            spans.append((s.start, end, *s.version))
    part = slice(call.start, call.end)
    by_length = call.finish is FinishReason.LENGTH
    return Done(
        tokens=tape.tokens[part],
        logprobs=tape.logprobs[part],
        spans=tuple(spans),
        resumes=sample.resumes,
        by_length=by_length,
        extras=first_rows(sample.chains[0].extras, len(sample.chains[0].prompt) + call.end - 1),
    )


def delivery(batch: Batch, rollouts: Sequence[Rollout], settled: Iterable[str]) -> Delivery:
    """A batch as the trainer is told of it; it has the trajectories itself.

    ``rollouts``: that made its samples. ``settled``: prompts that it ends.
    """
    masked: dict[Rollout, np.ndarray[tuple[int], np.dtype[np.uint8]]] = {}
    for sample, rollout in zip(batch.samples, rollouts, strict=True):
        written = sum(s.count for s in sample.segments if s.kind is SegmentKind.GENERATED)
        if int(np.count_nonzero(sample.loss_mask)) < written:
            masked[rollout] = sample.loss_mask
    metrics = {k: v for k, v in batch.metrics.items() if not k.startswith(("response_len", "reward_"))}
    return Delivery(
        batch=batch.id,
        rollouts=tuple(rollouts),
        settled=tuple(settled),
        metrics=metrics,
        masked=masked,
        rewards=batch.rewards,
        baseline_rewards=first_others_of(batch.sample_indices, [s.cohort for s in batch.samples]),
    )


class AskedHost:
    """The host of a trainer's own workers, which ask; the filter's arguments are the coordinator's.

    Args:
        core: read, never changed.
        post: takes the events.
        end_all: asked for the end of all requests: servers end all of them or none.
    """

    def __init__(
        self, core: RolloutCore, post: Callable[[ev.Event], None], end_all: Callable[[], None], filter_name: str,
        accepts: Callable[[str], bool] | None,
    ) -> None:  # fmt: skip
        self._core = core
        self._post = post
        self._end_all = end_all
        self._filter_name, self._accepts = filter_name, accepts
        self.mailboxes = Mailboxes()
        self.groups: dict[str, Group] = {}
        """Held prompts by uid."""
        self.scores: dict[SampleId, tuple[float | None, float | None]] = {}
        """Reward, and value of the filter's metric, of samples that have returned."""
        self.stand_ins: dict[SampleId, int] = {}
        """Which of its prompt's rollouts runs a sample that took the place of another."""
        self._runs: dict[SampleId, int] = {}
        """The way back: index of the sample that a rollout runs now, by (group, rollout)."""
        self.ended: list[str] = []
        """Prompts that a sample dropped alone was the last of, since the last batch."""
        self._runs_on = False
        """A request may be at a server that nobody waits for."""
        self.executors: dict[type[do.Command], Callable[[Any], None]] = {
            do.StartSample: self._start_sample,
            do.Submit: self._submit,
            do.CallCompleted: lambda c: self.mailboxes.say(self.rollout_of(c.call.sample.id), done(c.call)),
            do.CancelSample: self._cancel,
            do.ScoreSample: self._score,
            do.JudgeGroup: lambda c: self._post(self._verdict(c.group, c.judgement)),
            do.Abort: self._abort,
            do.Fence: self._fence,
            do.ProbeEngine: lambda c: self._post(ev.EngineReady(c.engine)),  # the trainer mends its servers
        }

    # ---------------------------------------------------------------- rollouts and their samples

    def rollout_of(self, sample: SampleId) -> SampleId:
        """(group, rollout) that runs a sample."""
        return SampleId(sample.group, self.stand_ins.get(sample, sample.index))

    def sample_of(self, uid: str, index: int) -> Sample | None:
        """The sample that rollout ``index`` of a held prompt runs, or has run last; None: the prompt is settled."""
        group = self.groups.get(uid)
        return None if group is None else group.samples[self._runs.get(SampleId(group.id, index), index)]

    def runs_for(self, sample: SampleId, index: int) -> None:
        """Rollout ``index`` of its prompt runs a sample that took the place of another."""
        self.stand_ins[sample] = index
        self._runs[SampleId(sample.group, index)] = sample.index

    def _given_up(self, sample: Sample) -> None:
        """A sample alone was dropped: its rollout goes on with the one that takes its place, if there is one."""
        group, rollout = sample.group, self.rollout_of(sample.id)
        self.scores.pop(sample.id, None)
        more = group.samples[self._core.settings.n_samples_per_prompt :]
        fresh = next((s for s in more if s.id not in self.stand_ins), None)
        if fresh is not None:
            self.runs_for(fresh.id, rollout.index)
            return
        self.mailboxes.settle(rollout, dropped=True)
        if not group.held:
            self.ended.append(str(group.prompt.data["uid"]))
            self.retire(group)

    # ---------------------------------------------------------------- what the core wants

    def know(self, groups: Iterable[int]) -> None:
        """Groups, by number, that can be asked for by uid from now on."""
        for number in groups:
            group = self._core.buffer.groups.get(number)
            if group is not None:
                self.groups[str(group.prompt.data["uid"])] = group

    def _start_sample(self, command: do.StartSample) -> None:
        rollout = self.rollout_of(command.sample.id)
        self.mailboxes.say(rollout, Start(self.mailboxes.new_life(rollout)))

    def _cancel(self, command: do.CancelSample) -> None:
        sample = command.sample
        rollout = self.rollout_of(sample.id)
        self.mailboxes.give_up(rollout)
        self._drop_late(rollout)
        if sample.state is SampleState.DROPPED and str(sample.group.prompt.data["uid"]) in self.groups:
            self._given_up(sample)

    def _score(self, command: do.ScoreSample) -> None:
        sample = command.sample.id
        self._post(ev.Scored(sample.group, [(sample.index, self.scores[sample][0] or 0.0)]))

    def _abort(self, command: do.Abort) -> None:
        # servers end all requests or none; a single one that nobody wants runs on, and is waited for by nobody
        asked = (self._core.attempts[i] for i in command.attempt_ids if i in self._core.attempts)
        unwanted = [a.id for a in asked if a.state is AttemptState.ABANDONED]
        for attempt_id in unwanted:
            self._post(ev.AttemptEnded(attempt_id, EngineFinish.ABORT))
        self._runs_on = not command.everything and (self._runs_on or bool(unwanted))
        if command.everything:
            self._end_all()

    def _fence(self, command: do.Fence) -> None:
        """A request whose result comes after all is taken then."""
        for attempt_id in command.attempt_ids:
            self._post(ev.AttemptEnded(attempt_id, EngineFinish.ABORT, fenced=True))

    def _submit(self, command: do.Submit) -> None:
        attempt = command.attempt
        rollout = self.rollout_of(attempt.sample.id)
        late = self.mailboxes.late.get(rollout)
        if late is not None and late.offset == len(attempt.token_ids):
            del self.mailboxes.late[rollout]
            self._post(take(attempt, late, self._core.clock.current))
            return
        self._drop_late(rollout)
        self.mailboxes.say(rollout, Go(attempt.token_ids, attempt.sampling.max_tokens, attempt.extras_from))

    def _verdict(self, group: Group, judgement: int) -> ev.Event:
        keep, error = False, None
        try:
            keep = self._differs(group) if self._accepts is None else self._accepts(str(group.prompt.data["uid"]))
        except Exception as raised:  # the user's; asked again, and then the group is dropped by its name
            error = describe(raised)
        return ev.GroupJudged(group=group.id, judgement=judgement, keep=keep, error=error)

    def _differs(self, group: Group) -> bool:
        """Return whether its samples have different values of the filter's metric."""
        values = [self.scores[s.id][1] for s in group.first]
        known = [v for v in values if v is not None and wrong_reward(v) is None]
        if len(known) < len(values):
            raise RolloutError(f"{self._filter_name} is not a number of every sample")
        return len(known) < 2 or len(set(map(held_reward, known))) > 1

    # ---------------------------------------------------------------- what is settled

    def delivered(self, batch: Batch) -> tuple[list[Rollout], list[str]]:
        """The rollouts of a batch's samples, and the prompts of which nothing is held any more since the last one."""
        rollouts = [(str(s.prompt.data["uid"]), self.rollout_of(s.id).index) for s in batch.samples]
        for sample in batch.samples:
            self._settle(sample.id)
        groups = {uid: self.groups[uid] for uid, _ in rollouts}
        settled = [uid for uid, group in groups.items() if not group.held]
        for uid in settled:
            self.retire(groups[uid])
        settled += self.ended
        self.ended = []
        return rollouts, settled

    def end_what_runs_on(self) -> None:
        if self._runs_on:
            self._end_all()
            self._runs_on = False

    def _drop_late(self, rollout: SampleId) -> None:
        late = self.mailboxes.late.pop(rollout, None)
        if late is not None and len(late.tokens):
            self._post(ev.TokensUnused(len(late.tokens), DropReason.LATE))

    def retire(self, group: Group) -> None:
        """A group was settled."""
        self.groups.pop(str(group.prompt.data["uid"]), None)
        for sample in group.samples:
            self._settle(sample.id)
            self._runs.pop(sample.id, None)
        for sample in group.samples:
            self.stand_ins.pop(sample.id, None)

    def _settle(self, sample: SampleId) -> None:
        rollout = self.rollout_of(sample)
        self._drop_late(rollout)
        self.scores.pop(sample, None)
        self.mailboxes.settle(rollout)
