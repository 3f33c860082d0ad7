"""Failures: what becomes of a sample or group when something fails, gets too old, or is rejected.

Failed requests are tried again in ``generation``; when an engine that was busy is asked again: ``engine_recovery``.

Invariant: whatever is given up leaves by name, tokens and prompt alike; an attempt whose sample went on without it
drops its tokens for that name when it ends.
"""

from __future__ import annotations

from april.core import commands as do
from april.core.completion import Completion
from april.core.context import CoreContext
from april.core.tape import TokenTape
from april.core.timers import TimerKind
from april.core.types import (
    MOST_SAMPLES,
    AttemptFailure,
    AttemptState,
    DropReason,
    Group,
    GroupState,
    OnFailedSample,
    OnStale,
    Sample,
    SampleId,
    SampleState,
)

PAUSE_GROWTH = 8.0
LONGEST_PAUSE_S = 32.0


class Failures:
    """Trying again, beginning again, giving up."""

    def __init__(self, context: CoreContext, completion: Completion) -> None:
        self._context = context
        self._completion = completion

    # ---------------------------------------------------------------- one sample

    def fail(self, sample: Sample, error: str, *, waits: bool = True) -> None:
        """Try again what failed, the reward (after a pause, if it ``waits``) or the whole sample; not for ever."""
        context = self._context
        sample.failures += 1
        context.counts(sample)["failed_samples"] += 1
        context.note(sample, f"failed: {error}")
        if sample.failures >= context.settings.max_attempt_failures or sample.evaluation is not None:
            self.cannot_go_on(sample, error)
        elif sample.state is not SampleState.SCORING:
            self.begin_again(sample, DropReason.FAILED)
        elif waits and (pause_s := self.pause_s(sample.failures)):
            sample.retry = context.start_timer(TimerKind.RETRY, pause_s)
            context.retries[sample.retry] = sample
        else:
            self.ask_reward(sample)

    def cannot_go_on(self, sample: Sample, error: str, kind: AttemptFailure | None = None) -> None:
        """It is given up, or its group, or its evaluation. ``kind``: of the request to blame; None: a function is."""
        if sample.evaluation is not None:
            sample.evaluation.fail(error, kind, sample if kind is None else None)
            return
        group, settings, error = sample.group, self._context.settings, f"{sample.id}: {error}"
        policy, n = settings.on_failed_sample, settings.n_samples_per_prompt
        # with group rewards it is the group that cannot be scored; one that counts goes on without its stragglers
        of_all = settings.group_reward and sample.state is SampleState.SCORING
        counts = group.state is not GroupState.OPEN
        if policy is OnFailedSample.REPLACE and not of_all and len(group.samples) < MOST_SAMPLES * n:
            self._replace(sample, error)
        elif counts or (policy is OnFailedSample.SHRINK and not of_all and group.held > settings.min_group_size):
            self.give_up_sample(sample, DropReason.FAILED, error)
        else:
            self.give_up(group, DropReason.FAILED, error)

    def _replace(self, sample: Sample, error: str) -> None:
        """A fresh sample joins the group before the one that failed leaves it."""
        context, group = self._context, sample.group
        fresh = Sample(SampleId(group.id, len(group.samples)), group)
        fresh.urgent = sample.urgent
        context.urgent += [fresh] * sample.urgent
        group.samples.append(fresh)
        group.unfinished += 1
        context.buffer.changes(group, 1)
        context.counters["replaced_samples"] += 1
        context.note(fresh, f"takes the place of {sample.id}")
        context.over_sampler.push(fresh)
        self.give_up_sample(sample, DropReason.FAILED, error)

    def pause_s(self, failures: int) -> float:
        """Before the next try: what a function asks (a judge, a sandbox) may be well again by then."""
        return min(self._context.settings.retry_pause_s * PAUSE_GROWTH ** (failures - 1), LONGEST_PAUSE_S)

    def ask_reward(self, sample: Sample) -> None:
        """Ask for the reward of a sample that has returned; with group rewards, once all its siblings have."""
        if self._context.settings.group_reward:
            self._ask_group_reward(sample.group)
        else:
            sample.retry = None
            self._context.out.append(do.ScoreSample(sample))

    def _ask_group_reward(self, group: Group) -> None:
        """If all that is left of it has returned, and not all of that has its reward."""
        members = group.members
        for sample in members:
            sample.retry = None
        states = {sample.state for sample in members}
        if SampleState.SCORING in states and states <= {SampleState.SCORING, SampleState.FINISHED}:
            self._context.out.append(do.ScoreGroup(group))

    def begin_again(self, sample: Sample, reason: DropReason) -> None:
        """Drop the tokens of a sample and start it anew."""
        context = self._context
        was_finished = sample.state is SampleState.FINISHED
        self._lose(sample, reason)
        if was_finished:
            self._completion.unfinished(sample)
        sample.tape = TokenTape()
        sample.replay, sample.finish, sample.reward = None, None, 0.0
        sample.calls.clear()
        sample.restarts += 1
        context.to(sample, SampleState.NEW, f"begins again ({reason})")
        context.over_sampler.push(sample)
        if was_finished:
            self._completion.reopen(sample.group)

    def _lose(self, sample: Sample, reason: DropReason) -> None:
        """Whatever it does ends, and its tokens are dropped."""
        context, generated, call = self._context, sample.tape.generated, sample.open_call
        if sample.state in (SampleState.SCORING, SampleState.FINISHED):
            context.lengths.drop(generated, reason, counted=sample.state is SampleState.FINISHED)
        elif generated or (call is not None and call.attempt is not None):
            context.lengths.unfinished[reason] += 1
        self.leave(sample, reason)
        context.tokens.drop(generated, reason)

    def leave(self, sample: Sample, reason: DropReason) -> None:
        """Take a sample out of wherever it is waiting or generating, and end its rollout function."""
        context, call = self._context, sample.open_call
        sample.retry = None
        context.over_sampler.forget(sample)
        context.places.give_back(sample)
        if call is not None:
            context.over_sampler.forget(call)
            sample.calls.remove(call)
            if call.attempt is not None:
                call.attempt.lost_for = reason
                context.to(call.attempt, AttemptState.ABANDONED, f"attempt abandoned ({reason})")
                context.stop([call.attempt])
        if sample.state is not SampleState.NEW:
            context.out.append(do.CancelSample(sample))

    def give_up_sample(self, sample: Sample, reason: DropReason, error: str) -> None:
        """Drop one sample; its group goes on with the others, if there are any or some are delivered."""
        context, group = self._context, sample.group
        if group.held == 1 and not group.delivered:
            self.give_up(group, reason, error)
            return
        context.counters[f"samples_dropped_{reason}"] += 1
        if sample.state is SampleState.FINISHED:
            self._completion.unfinished(sample)
        group.unfinished -= 1
        size = group.delivered + group.held - 1
        group.quorum = min(group.quorum, size)
        if reason is DropReason.FAILED:
            context.out.append(do.Warn(f"{error}; it is given up, and its group goes on with {size} samples"))
        self._drop(sample, reason, f"dropped ({reason}): {error}")
        if context.settings.group_reward:
            self._ask_group_reward(group)  # the others may have waited for this one
        if group.held:
            self._completion.advance(group)

    def _drop(self, sample: Sample, reason: DropReason, why: str) -> None:
        context = self._context
        context.monitor.forget(sample)
        self._lose(sample, reason)
        context.to(sample, SampleState.DROPPED, why)
        self.sample_left(sample.group, reason)

    def sample_left(self, group: Group, reason: DropReason | None = None) -> None:
        """One was delivered, or given up for ``reason``; a prompt of which any was delivered is delivered."""
        context = self._context
        context.buffer.changes(group, -1)
        if group.held:
            return
        context.buffer.remove(group)
        if reason is None or group.delivered:
            context.prompts.deliver(1)
        else:
            context.prompts.drop(1, reason)

    # ---------------------------------------------------------------- whole groups

    def give_up(self, group: Group, reason: DropReason, error: str) -> None:
        """Drop a whole group; it is replaced by the rules of the over-sampler."""
        context, settings, done = self._context, self._context.settings, self._completion
        context.monitor.forget(group)
        context.counters[f"groups_dropped_{reason}"] += 1
        context.out.append(do.ReportDrop(group, reason, error))
        for sample in group.members:
            self._drop(sample, reason, f"group dropped ({reason}): {error}")
        if reason is DropReason.FAILED:
            done.failed_in_a_row += 1
            if done.failed_in_a_row >= settings.max_failed_groups:
                context.failure = f"{done.failed_in_a_row} groups failed in a row, the last one: {error}"
                done.failed_in_a_row = 0
        elif reason is DropReason.FILTERED:
            done.filtered_in_a_row += 1
            if done.filtered_in_a_row >= settings.max_filtered_groups:
                context.failure = (
                    f"the filter rejected {done.filtered_in_a_row} groups in a row; are the prompts too easy or too "
                    "hard for the model? Otherwise raise max_filtered_groups"
                )
                done.filtered_in_a_row = 0

    def replace_too_old(self) -> None:
        """After a weight update: begin again or drop what exceeds max_staleness, where the policy says so."""
        context = self._context
        for sample in context.buffer.too_old():
            if sample.state is SampleState.DROPPED:
                continue  # with a sibling, a moment ago
            why = f"{sample.id} is older than max_staleness"
            if context.settings.on_stale is OnStale.RESTART:
                self.begin_again(sample, DropReason.STALE)
            elif sample.group.state is GroupState.READY and not context.settings.whole_groups:
                self.give_up_sample(sample, DropReason.STALE, why)
            else:
                self.give_up(sample.group, DropReason.STALE, why)
