"""Decides whether a sample that failed or is too old is retried, restarted, replaced or dropped, alone or as a group.

The settings ``max_attempt_failures`` and ``on_failed_sample`` decide this; ``function_results``, ``sample_calls`` and
``attempt_results`` report the failures. Invariant: tokens and prompts are dropped only for a named reason.
"""

from __future__ import annotations

from april.core import commands as do
from april.core.context import CoreContext
from april.core.group_completion import GroupCompletion
from april.core.types import (
    MAX_SAMPLES_FACTOR,
    AttemptFailure,
    AttemptState,
    DropReason,
    GenerateCall,
    Group,
    GroupState,
    OnFailedSample,
    OnStale,
    Sample,
    SampleId,
    SampleState,
    TimerKind,
)

# module-level names, as an enum member costs 60 ns per use on Python 3.11 and these are used at every event
ABANDONED = AttemptState.ABANDONED
NEW, SCORING = SampleState.NEW, SampleState.SCORING
FINISHED, DROPPED = SampleState.FINISHED, SampleState.DROPPED
OPEN, READY = GroupState.OPEN, GroupState.READY
PAUSE_GROWTH = 8.0
LONGEST_PAUSE_S = 32.0


class SampleLifecycle:
    """Retries, restarts, replaces and drops samples, and drops groups."""

    def __init__(self, context: CoreContext, groups: GroupCompletion) -> None:
        self._context = context
        self._groups = groups

    def retry_or_give_up(self, sample: Sample, error: str, *, waits: bool = True) -> None:
        """Call the failed reward or rollout function again; give up after ``max_attempt_failures`` failures.

        If ``waits`` is True, a reward function is called again only after a pause.
        """
        context = self._context
        sample.failures += 1
        context.counts(sample)["failed_samples"] += 1
        context.note(sample, f"failed: {error}")
        if sample.failures >= context.settings.max_attempt_failures or sample.evaluation is not None:
            self.replace_or_drop(sample, error)
        elif sample.state is not SCORING:
            self.restart(sample, DropReason.FAILED)
        elif waits and (pause_s := self.retry_pause_s(sample.failures)):
            sample.retry_timer = context.start_timer(TimerKind.RETRY, pause_s)
            context.retries[sample.retry_timer] = sample
        else:
            self.ask_reward(sample)

    def retry_pause_s(self, failures: int) -> float:
        """Return the seconds until the next retry, in which a service that the function calls may recover."""
        return min(self._context.settings.retry_pause_s * PAUSE_GROWTH ** (failures - 1), LONGEST_PAUSE_S)

    def ask_reward(self, sample: Sample) -> None:
        """Ask for the reward of a sample whose function has returned; a group reward waits for all samples."""
        if self._context.settings.group_reward:
            self._ask_group_reward(sample.group)
        else:
            sample.retry_timer = None
            self._context.out.append(do.ScoreSample(sample))

    def _ask_group_reward(self, group: Group) -> None:
        """Ask for the group's reward if the functions of all held samples have returned and a reward is missing."""
        members = group.members
        for sample in members:
            sample.retry_timer = None
        states = {sample.state for sample in members}
        if SCORING in states and states <= {SCORING, FINISHED}:
            self._context.out.append(do.ScoreGroup(group))

    def replace_or_drop(self, sample: Sample, error: str, kind: AttemptFailure | None = None) -> None:
        """Replace the sample, or give up the sample, its group or its evaluation, as the settings say.

        ``kind`` tells how the engine request failed; None if one of the user's functions failed.
        """
        if sample.evaluation is not None:
            sample.evaluation.fail(error, kind, sample if kind is None else None)
            return
        group, settings, error = sample.group, self._context.settings, f"{sample.id}: {error}"
        policy, n = settings.on_failed_sample, settings.n_samples_per_prompt
        # a failed group reward concerns the whole group; an accepted group continues without its late samples
        of_all = settings.group_reward and sample.state is SCORING
        counts = group.state is not OPEN
        if policy is OnFailedSample.REPLACE and not of_all and len(group.samples) < MAX_SAMPLES_FACTOR * n:
            self._replace(sample, error)
        elif counts or (policy is OnFailedSample.SHRINK and not of_all and group.held > settings.min_group_size):
            self.drop_sample(sample, DropReason.FAILED, error)
        else:
            self.drop_group(group, DropReason.FAILED, error)

    def _replace(self, sample: Sample, error: str) -> None:
        """Add a new sample to the group, then give up the failed sample."""
        context, group = self._context, sample.group
        fresh = Sample(SampleId(group.id, len(group.samples)), group)
        fresh.urgent = sample.urgent
        if sample.urgent and id(group) not in context.urgent:
            context.urgent[id(fresh)] = fresh
        group.samples.append(fresh)
        group.unfinished += 1
        context.buffer.change_held_count(group, 1)
        context.counters["replaced_samples"] += 1
        context.note(fresh, f"replaces {sample.id}")
        context.over_sampler.push(fresh)
        self.drop_sample(sample, DropReason.FAILED, error)

    def restart(self, sample: Sample, reason: DropReason) -> None:
        """Drop the tokens of a sample and start its rollout function again."""
        context = self._context
        was_finished = sample.state is FINISHED
        self._stop_and_drop_tokens(sample, reason)
        if was_finished:
            self._groups.unfinish_sample(sample)
        sample.clear()
        sample.reward = 0.0
        sample.restarts += 1
        context.change_state(sample, NEW, f"starts again ({reason})")
        context.over_sampler.push(sample)
        if was_finished:
            self._groups.reopen(sample.group)

    def put_aside(self, group: Group) -> None:
        """Drop all tokens of a group and keep its prompt, which begins (again) in a later round (tail batching)."""
        context, members = self._context, group.members
        begun = group.put_aside or any(sample.state is not NEW or sample.attempts for sample in members)
        for sample in members:
            if sample.state is not NEW or sample.replayed:
                self.restart(sample, DropReason.PUT_ASIDE)
            context.over_sampler.forget(sample)
        context.buffer.put_aside(group, begun=begun)
        context.counters["groups_put_aside"] += begun

    def _stop_and_drop_tokens(self, sample: Sample, reason: DropReason) -> None:
        """Stop the sample's function and requests, and drop its tokens."""
        context, generated = self._context, sample.generated
        if sample.state in (SCORING, FINISHED):
            context.lengths.drop(generated, reason, counted=sample.state is FINISHED)
        elif generated or any(call.attempt is not None for call in sample.open_calls):
            context.lengths.unfinished[reason] += 1
        self.stop(sample, reason)
        context.tokens.drop(generated, reason)

    def stop(self, sample: Sample, reason: DropReason) -> None:
        """Remove a sample from the queue, end its requests and cancel its rollout function."""
        context = self._context
        sample.retry_timer = None
        context.over_sampler.forget(sample)
        context.places.release(sample)
        for call in sample.open_calls:
            context.over_sampler.forget(call)
            call.chain.calls.remove(call)
            self.abandon(call, reason)
        if sample.state is not NEW:
            context.out.append(do.CancelSample(sample))

    def abandon(self, call: GenerateCall, reason: DropReason) -> None:
        """Ask the engine to end the call's attempt, if there is one; its tokens will be dropped for ``reason``."""
        if call.attempt is not None:
            call.attempt.drop_reason = reason
            self._context.change_state(call.attempt, ABANDONED, f"attempt abandoned ({reason})")
            self._context.stop([call.attempt])

    def drop_sample(self, sample: Sample, reason: DropReason, error: str) -> None:
        """Drop one sample and continue with the rest of its group.

        The group is dropped if this was its last sample and no other was delivered.
        """
        context, group = self._context, sample.group
        if group.held == 1 and not group.delivered:
            self.drop_group(group, reason, error)
            return
        context.counters[f"samples_dropped_{reason}"] += 1
        if sample.state is FINISHED:
            self._groups.unfinish_sample(sample)
        group.unfinished -= 1
        size = group.delivered + group.held - 1
        group.quorum = min(group.quorum, size)
        if reason is DropReason.FAILED:
            context.out.append(do.Warn(f"{error}; the sample is given up, and its group continues with {size} samples"))
        self._drop(sample, reason, f"dropped ({reason}): {error}")
        if context.settings.group_reward:
            self._ask_group_reward(group)  # the group may have waited only for this sample
        if group.held:
            self._groups.advance(group)

    def _drop(self, sample: Sample, reason: DropReason, why: str) -> None:
        context = self._context
        context.monitor.forget(sample)
        self._stop_and_drop_tokens(sample, reason)
        context.change_state(sample, DROPPED, why)
        sample.release_tokens()
        self.settle_sample(sample.group, reason)

    def settle_sample(self, group: Group, reason: DropReason | None = None) -> None:
        """Count a sample that was delivered (``reason`` None) or dropped; after the last sample, count the prompt.

        A prompt counts as delivered if at least one of its samples was delivered.
        """
        context = self._context
        context.buffer.change_held_count(group, -1)
        if group.held:
            return
        context.buffer.remove(group)
        if reason is None or group.delivered:
            context.prompts.deliver(1)
        else:
            context.prompts.drop(1, reason)

    def drop_group(self, group: Group, reason: DropReason, error: str) -> None:
        """Drop a whole group; the over-sampler decides whether a new prompt replaces it."""
        context, groups, settings = self._context, self._groups, self._context.settings
        context.monitor.forget(group)
        context.counters[f"groups_dropped_{reason}"] += 1
        context.out.append(do.ReportDrop(group, reason, error))
        for sample in group.members:
            self._drop(sample, reason, f"group dropped ({reason}): {error}")
        if reason is DropReason.FAILED:
            groups.failed_in_a_row += 1
            if groups.failed_in_a_row >= settings.max_failed_groups:
                context.failure = f"{groups.failed_in_a_row} groups failed in a row; the last error is: {error}"
                groups.failed_in_a_row = 0
        elif reason is DropReason.FILTERED:
            groups.filtered_in_a_row += 1
            if groups.filtered_in_a_row >= settings.max_filtered_groups:
                context.failure = (
                    f"the filter rejected {groups.filtered_in_a_row} groups in a row; check whether the prompts are "
                    "too easy or too hard for the model, or raise max_filtered_groups"
                )
                groups.filtered_in_a_row = 0

    def restart_or_drop_stale(self) -> None:
        """Restart or drop samples older than max_staleness, if ``on_stale`` is restart or drop.

        Other values act at delivery; all uses of ``on_stale`` are listed in :class:`~april.core.types.OnStale`.
        """
        context = self._context
        for sample in context.buffer.too_old():
            if sample.state is DROPPED:
                continue  # dropped with its group earlier in this loop
            why = f"{sample.id} is older than max_staleness"
            if context.settings.on_stale is OnStale.RESTART:
                self.restart(sample, DropReason.STALE)
            elif sample.group.state is READY and not context.settings.whole_groups:
                self.drop_sample(sample, DropReason.STALE, why)
            else:
                self.drop_group(sample.group, DropReason.STALE, why)
