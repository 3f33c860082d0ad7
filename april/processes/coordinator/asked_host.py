"""The host of a trainer's own workers: they ask what to do, and say what came of it.

It carries out the same commands as the other hosts of a core (``april.driver.local_host``), by answers
to whoever asks; what it reports are the same events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from april.core import commands as do
from april.core import events as ev
from april.core.batch import Batch
from april.core.numbers import held_reward, wrong_reward
from april.core.state import RolloutCore
from april.core.types import AttemptState, DropReason, EngineFinish, Group, Sample, SampleId, SampleState
from april.driver.user_code import describe
from april.errors import RolloutError
from april.processes.coordinator.mailboxes import Mailboxes
from april.processes.coordinator.messages import Go, Rollout, Start
from april.processes.coordinator.results import done, take


class AskedHost:
    """See :class:`april.processes.coordinator.coordinator.Coordinator` for the filter's arguments.

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
        self.mailboxes.say(rollout, Go(attempt.token_ids, attempt.sampling.max_tokens))

    def _verdict(self, group: Group, judgement: int) -> ev.Event:
        keep, error = False, None
        try:
            keep = self._differs(group) if self._accepts is None else self._accepts(str(group.prompt.data["uid"]))
        except Exception as raised:  # the user's; asked again, and then the group is dropped by its name
            error = describe(raised)
        return ev.GroupJudged(group=group.id, judgement=judgement, keep=keep, error=error)

    def _differs(self, group: Group) -> bool:
        """Whether its samples have different values of the filter's metric."""
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
