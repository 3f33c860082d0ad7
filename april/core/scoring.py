"""Scoring: from a returned rollout function to a reward, and what the filter says of groups."""

from __future__ import annotations

from collections.abc import Iterator

from april.core import commands as do
from april.core import events as ev
from april.core.completion import Completion
from april.core.context import CoreContext
from april.core.failures import Failures
from april.core.generation import Generation
from april.core.mistakes import Function, Mistake
from april.core.numbers import held_reward, wrong_reward
from april.core.timers import TimerKind
from april.core.types import DropReason, Group, GroupState, Sample, SampleState


class Scoring:
    """Rewards and verdicts; generation of other samples goes on meanwhile."""

    def __init__(
        self, context: CoreContext, completion: Completion, failures: Failures, generation: Generation
    ) -> None:
        self._context = context
        self._completion = completion
        self._failures = failures
        self._generation = generation

    def sample_returned(self, event: ev.SampleReturned) -> None:
        """A rollout function has returned."""
        context = self._context
        sample = context.free_to_act(event.sample, "returned while it was waiting for tokens")
        if sample is None:
            return
        replay, sample.replay = sample.replay, None
        if replay is not None and (replay.calls or replay.open_start is not None):
            self._generation.diverged(sample)
            return
        if sample.finish is None:
            error = "the rollout function returned without a call of llm.generate; await at least one"
            self._failures.cannot_go_on(sample, error)
            return
        context.to(sample, SampleState.SCORING, "returned")
        if sample.group.evaluation is not None:
            sample.group.evaluation.functions -= 1
        else:
            context.mistakes.worked(Function.ROLLOUT)
        if context.settings.has_reward:
            self._failures.ask_reward(sample)
        else:
            self._completion.finished(sample)

    def sample_failed(self, event: ev.SampleFailed) -> bool:
        """A rollout or reward function raised, hung, or returned what cannot be; whether it would for all samples."""
        sample = self._context.sample(event.sample)
        if sample is None:
            return False
        rollout = sample.state is SampleState.RUNNING
        whole = self._context.settings.group_reward and not rollout
        function, kind = Function.ROLLOUT if rollout else Function.REWARD, event.kind * (sample.evaluation is None)
        mistake = self._context.mistakes.made(
            function, kind, sample.group.members if whole else [sample], self._got_as_far(sample, whole=whole)
        )
        waits = self._waits(mistake)
        if sample.state is not SampleState.FINISHED:
            self._failures.fail(sample, event.error, waits=waits)
        elif blamed := self._whose_reward_is_awaited(sample):
            self._failures.fail(blamed, event.error, waits=waits)
        else:
            self._context.counters["late_events"] += 1
        return mistake.sure

    def _got_as_far(self, sample: Sample, *, whole: bool) -> Iterator[Sample]:
        """Others whose function is at work where that of ``sample`` has failed, or further."""
        scored = (SampleState.SCORING, SampleState.FINISHED)
        if sample.state is SampleState.RUNNING and sample.tape.generated:
            return  # the others still generate
        for group in self._context.buffer.groups.values():
            if whole and not all(s.state in scored for s in group.members):
                continue  # it is not asked for yet
            for s in group.members:
                if s.state is sample.state and (s.state is SampleState.SCORING or s.open_call is not None):
                    yield s

    def _waits(self, mistake: Mistake) -> bool:
        """Before the next try; not where too few prompts are in work to be sure of a mistake."""
        return not mistake.likely or len(self._context.buffer.groups) >= self._context.mistakes.groups

    def scored(self, event: ev.Scored) -> None:
        """Rewards have come in: all of them count, or none."""
        context = self._context
        group = context.group(event.group)
        if group is None:
            context.counters["late_events"] += event.group >= 0
            return
        awaited: list[tuple[Sample, float]] = []
        for index, reward in event.rewards:
            blamed = self._whose_reward_is_awaited(group.samples[index])
            if blamed is None:
                context.counters["late_events"] += 1
            elif wrong := wrong_reward(reward):
                self._failures.fail(blamed, f"the reward is {wrong}")
                return
            else:
                awaited.append((group.samples[index], held_reward(reward)))
        for sample, reward in awaited:
            sample.reward = reward
        if awaited and group.evaluation is None:
            context.mistakes.worked(Function.REWARD)
        for sample, _ in awaited:
            if sample.state is SampleState.SCORING:
                self._completion.finished(sample)

    def _whose_reward_is_awaited(self, sample: Sample) -> Sample | None:
        """The sample itself; if it is finished and scored with its group, the sibling for which all are scored anew."""
        if sample.state is SampleState.SCORING:
            return sample
        if sample.state is not SampleState.FINISHED or not self._context.settings.group_reward:
            return None
        return next((s for s in sample.group.samples if s.state is SampleState.SCORING), None)

    def ask_again(self, timer: int) -> None:
        """A pause after a failure is over: ask once more what is still wanted."""
        context = self._context
        what = context.retries.pop(timer, None)
        if isinstance(what, Sample):
            if what.retry == timer:
                self._failures.ask_reward(what)
        elif what is not None:
            group, judgement = what
            if self._is_awaited(context.buffer.groups.get(group.id), judgement):
                context.out.append(do.JudgeGroup(group, judgement))

    def _is_awaited(self, group: Group | None, judgement: int) -> bool:
        """Whether this verdict is; not if the group was dropped, or a sample of it began again, after it was asked."""
        return group is not None and group.state is GroupState.JUDGED and group.since == judgement

    def group_judged(self, event: ev.GroupJudged) -> bool:
        """The filter has spoken, or failed to; whether it would for all groups."""
        context = self._context
        group = context.buffer.groups.get(event.group)
        if group is None or not self._is_awaited(group, event.judgement):
            context.counters["late_events"] += 1
            return False
        if event.error is not None:
            mistake = context.mistakes.made(Function.FILTER, event.kind, group.first)
            group.filter_failures += 1
            context.note(group.samples[0], f"filter failed: {event.error}")
            if group.filter_failures >= context.settings.max_attempt_failures:
                self._failures.give_up(group, DropReason.FAILED, f"filter of group {group.id}: {event.error}")
            elif self._waits(mistake) and (pause_s := self._failures.pause_s(group.filter_failures)):
                context.to_group(group, GroupState.JUDGED, f"the filter is asked again in {pause_s:g} s")
                context.retries[context.start_timer(TimerKind.RETRY, pause_s)] = group, group.since
            else:
                self._completion.ask_filter(group)
            return mistake.sure
        context.mistakes.worked(Function.FILTER)
        if event.keep:
            self._completion.accept(group)
        else:
            self._failures.give_up(group, DropReason.FILTERED, "the filter rejected it")
        return False
