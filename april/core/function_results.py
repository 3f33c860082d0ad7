"""Handles the results and failures of the user's functions (rollout function, reward function, filter).

A failed sample is retried, replaced or dropped by ``SampleLifecycle`` (``retry_or_give_up``); ``function_bugs`` decides
whether the failure is a bug that would fail all samples; ``sample_calls`` handles functions whose process died.
"""

from __future__ import annotations

from collections.abc import Iterator

from april.core import commands as do
from april.core import events as ev
from april.core.context import CoreContext
from april.core.function_bugs import BugDetector, BugVerdict, FunctionKind
from april.core.group_completion import GroupCompletion
from april.core.row_rewards import RowReward
from april.core.sample_calls import SampleCalls
from april.core.sample_lifecycle import SampleLifecycle
from april.core.types import DropReason, Group, GroupState, Sample, SampleState, TimerKind
from april.core.value_checks import float32_reward, wrong_reward

# module-level names, as an enum member costs 60 ns per use on Python 3.11 and these are used at every event
RUNNING, SCORING = SampleState.RUNNING, SampleState.SCORING
FINISHED = SampleState.FINISHED
BEING_JUDGED = GroupState.BEING_JUDGED


class FunctionResults:
    """Handles the results and failures of rollout functions, reward functions and filters."""

    def __init__(
        self, context: CoreContext, groups: GroupCompletion, lifecycle: SampleLifecycle, calls: SampleCalls
    ) -> None:
        self._context = context
        self._groups = groups
        self._lifecycle = lifecycle
        self._calls = calls
        self._bugs = BugDetector(context.settings)

    def sample_returned(self, event: ev.SampleReturned) -> None:
        """Handle the return of a rollout function: ask for the reward, or finish the sample if there is none."""
        context = self._context
        sample = context.acting_sample(event.sample, "returned while it was waiting for tokens")
        if sample is None:
            return
        if sample.any_chain:
            self._calls.drop_unused_replay(sample)
        else:
            replay, sample.chains[0].replay = sample.chains[0].replay, None
            if len(sample.chains) > 1 or (replay is not None and replay.next_start is not None):
                self._calls.restart_diverged(sample)
                return
        if sample.finish is None:
            error = "the rollout function returned without awaiting a call of llm.generate"
            self._lifecycle.replace_or_drop(sample, f"{error}; write await llm.generate(...)")
            return
        context.change_state(sample, SCORING, "returned")
        if sample.group.evaluation is not None:
            sample.group.evaluation.running_functions -= 1
        else:
            self._bugs.record_success(FunctionKind.ROLLOUT)
        if context.settings.has_reward:
            self._lifecycle.ask_reward(sample)
        else:
            self._groups.finish_sample(sample)

    def sample_failed(self, event: ev.SampleFailed) -> bool:
        """Retry or give up after a rollout or reward function failed; return True if it fails for all samples."""
        sample = self._context.sample(event.sample)
        if sample is None:
            return False
        rollout = sample.state is RUNNING
        whole = self._context.settings.group_reward and not rollout
        function = FunctionKind.ROLLOUT if rollout else FunctionKind.REWARD
        kind, failed = event.kind * (sample.evaluation is None), sample.group.members if whole else [sample]
        verdict = self._bugs.record_failure(function, kind, failed, self._still_running(sample, whole=whole))
        waits = self._should_pause(verdict)
        if sample.state is not FINISHED:
            self._lifecycle.retry_or_give_up(sample, event.error, waits=waits)
        elif blamed := self._sample_awaiting_reward(sample):
            self._lifecycle.retry_or_give_up(blamed, event.error, waits=waits)
        else:
            self._context.counters["late_events"] += 1
        return verdict.certain

    def _still_running(self, sample: Sample, *, whole: bool) -> Iterator[Sample]:
        """Yield samples whose function still runs and has got at least as far as the failed function of ``sample``."""
        scored = (SCORING, FINISHED)
        if sample.state is RUNNING and sample.generated:
            return  # the function failed after it had received tokens; samples that wait for tokens are behind it
        for group in self._context.buffer.groups.values():
            if whole and not all(s.state in scored for s in group.members):
                continue  # the group's reward function has not been called yet
            for s in group.members:
                if s.state is sample.state and (s.state is SCORING or s.has_open_call):
                    yield s

    def _should_pause(self, verdict: BugVerdict) -> bool:
        """Return True if there should be a pause before the retry.

        A likely bug is retried at once while the held prompts are too few to make it certain.
        """
        return not verdict.likely or len(self._context.buffer.groups) >= self._bugs.groups

    def scored(self, event: ev.Scored) -> None:
        """Store the rewards of a group; if one of them is invalid, none is stored."""
        context = self._context
        group = context.group(event.group)
        if group is None:
            context.counters["late_events"] += event.group >= 0
            return
        awaited: list[tuple[Sample, float, tuple[RowReward, ...]]] = []
        more = event.row_rewards or [()] * len(event.rewards)
        for (index, reward), rows in zip(event.rewards, more, strict=True):
            blamed = self._sample_awaiting_reward(group.samples[index])
            if blamed is None:
                context.counters["late_events"] += 1
            elif wrong := wrong_reward(reward):
                self._lifecycle.retry_or_give_up(blamed, f"the reward is {wrong}")
                return
            else:
                awaited.append((group.samples[index], float32_reward(reward), rows))
        for sample, reward, rows in awaited:
            sample.reward, sample.row_rewards = reward, rows
        if awaited and group.evaluation is None:
            self._bugs.record_success(FunctionKind.REWARD)
        for sample, *_ in awaited:
            if sample.state is SCORING:
                self._groups.finish_sample(sample)

    def _sample_awaiting_reward(self, sample: Sample) -> Sample | None:
        """Return the sample whose reward is awaited: this one, or the sibling for which the group is scored again.

        None if no reward is awaited.
        """
        if sample.state is SCORING:
            return sample
        if sample.state is not FINISHED or not self._context.settings.group_reward:
            return None
        return next((s for s in sample.group.samples if s.state is SCORING), None)

    def retry_timer_fired(self, timer: int) -> None:
        """Call the reward function or filter whose pause before a retry has ended, if its result is still wanted."""
        context = self._context
        what = context.retries.pop(timer, None)
        if isinstance(what, Sample):
            if what.retry_timer == timer:
                self._lifecycle.ask_reward(what)
        elif what is not None:
            group, judgement = what
            if self._is_verdict_awaited(context.buffer.groups.get(group.id), judgement):
                context.out.append(do.JudgeGroup(group, judgement))

    def group_judged(self, event: ev.GroupJudged) -> bool:
        """Accept or drop a group after the filter; return True if the filter fails for all groups."""
        context = self._context
        group = context.buffer.groups.get(event.group)
        if group is None or not self._is_verdict_awaited(group, event.judgement):
            context.counters["late_events"] += 1
            return False
        if event.error is not None:
            verdict = self._bugs.record_failure(FunctionKind.FILTER, event.kind, group.first_finishers)
            group.filter_failures += 1
            context.note(group.samples[0], f"filter failed: {event.error}")
            if group.filter_failures >= context.settings.max_attempt_failures:
                self._lifecycle.drop_group(group, DropReason.FAILED, f"filter of group {group.id}: {event.error}")
            elif self._should_pause(verdict) and (pause_s := self._lifecycle.retry_pause_s(group.filter_failures)):
                context.change_group_state(group, BEING_JUDGED, f"the filter is called again in {pause_s:g} s")
                context.retries[context.start_timer(TimerKind.RETRY, pause_s)] = group, group.since
            else:
                self._groups.ask_filter(group)
            return verdict.certain
        self._bugs.record_success(FunctionKind.FILTER)
        if event.keep:
            self._groups.accept(group)
        else:
            self._lifecycle.drop_group(group, DropReason.FILTERED, "the filter rejected the group")
        return False

    def _is_verdict_awaited(self, group: Group | None, judgement: int) -> bool:
        """Return False if the group was dropped, or one of its samples began again, since the filter was asked."""
        return group is not None and group.state is BEING_JUDGED and group.since == judgement
