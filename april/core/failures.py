"""Failures: what becomes of a sample or group when something fails, gets too old, or is rejected.

Failed requests are tried again in ``generation``; when an engine that was busy is asked again: ``engine_recovery``.

Invariant: whatever is given up leaves by name, tokens and prompt alike; an attempt whose sample went on without it
drops its tokens for that name when it ends.
"""

from __future__ import annotations

from april.core import commands as do
from april.core.context import CoreContext
from april.core.tape import TokenTape
from april.core.timers import TimerKind
from april.core.types import AttemptFailure, AttemptState, DropReason, Group, GroupState, OnStale, Sample, SampleState

PAUSE_GROWTH = 8.0
LONGEST_PAUSE_S = 32.0


class Failures:
    """Trying again, beginning again, giving up."""

    def __init__(self, context: CoreContext) -> None:
        self._context = context
        self._failed_in_a_row = 0
        self._filtered_in_a_row = 0

    def group_completed(self) -> None:
        """A group was completed and accepted: failures before it were no endless row."""
        self._failed_in_a_row = self._filtered_in_a_row = 0

    # ---------------------------------------------------------------- one sample

    def fail(self, sample: Sample, error: str) -> None:
        """Try again what failed, the reward (after a pause) or the whole sample, until it has failed too often."""
        context = self._context
        sample.failures += 1
        context.counts(sample)["failed_samples"] += 1
        context.note(sample, f"failed: {error}")
        if sample.failures >= context.settings.max_attempt_failures or sample.evaluation is not None:
            self.cannot_go_on(sample, error)
        elif sample.state is not SampleState.SCORING:
            self.begin_again(sample, DropReason.FAILED)
        elif pause_s := self.pause_s(sample.failures):
            sample.retry = context.start_timer(TimerKind.RETRY, pause_s)
            context.retries[sample.retry] = sample
        else:
            self.ask_reward(sample)

    def cannot_go_on(self, sample: Sample, error: str, kind: AttemptFailure | None = None) -> None:
        """Its group is given up, or its evaluation ends. ``kind``: of the request to blame; None: a function is."""
        if sample.evaluation is None:
            self.give_up(sample.group, DropReason.FAILED, f"{sample.id}: {error}")
        else:
            sample.evaluation.fail(error, kind, sample if kind is None else None)

    def pause_s(self, failures: int) -> float:
        """Before the next try: what a function asks (a judge, a sandbox) may be well again by then."""
        return min(self._context.settings.retry_pause_s * PAUSE_GROWTH ** (failures - 1), LONGEST_PAUSE_S)

    def ask_reward(self, sample: Sample) -> None:
        """Ask for the reward of a sample that has returned; with group rewards, once all its siblings have."""
        context = self._context
        for sibling in sample.group.samples if context.settings.group_reward else (sample,):
            sibling.retry = None
        if not context.settings.group_reward:
            context.out.append(do.ScoreSample(sample))
        elif all(s.state in (SampleState.SCORING, SampleState.FINISHED) for s in sample.group.samples):
            context.out.append(do.ScoreGroup(sample.group))

    def begin_again(self, sample: Sample, reason: DropReason) -> None:
        """Drop the tokens of a sample and start it anew."""
        context = self._context
        self.leave(sample, reason)
        was_finished = sample.state is SampleState.FINISHED
        context.tokens.drop(sample.tape.generated, reason)
        sample.tape = TokenTape()
        sample.replay, sample.finish, sample.reward = None, None, 0.0
        sample.calls.clear()
        sample.restarts += 1
        context.to(sample, SampleState.NEW, f"begins again ({reason})")
        context.over_sampler.push(sample)
        if was_finished:
            self._reopen(sample.group)

    def _reopen(self, group: Group) -> None:
        """A finished sample of the group began again, so the group will be rewarded and judged once more."""
        context, settings = self._context, self._context.settings
        context.monitor.not_ready(group)
        if group.state is not GroupState.OPEN:
            context.to_group(group, GroupState.OPEN, "a sample began again")
        group.unfinished += 1
        if not (settings.group_reward or settings.has_filter):
            return
        for sample in group.samples:
            if sample.replay is not None and sample.state is SampleState.FINISHED:
                # what its function returned did not survive the restart: it runs again, answered from the tape
                group.unfinished += 1
                sample.finish = None
                context.to(sample, SampleState.NEW, "runs again for what it returns")
                context.over_sampler.push(sample)

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

    # ---------------------------------------------------------------- whole groups

    def give_up(self, group: Group, reason: DropReason, error: str) -> None:
        """Drop a whole group; it is replaced by the rules of the over-sampler."""
        context, settings = self._context, self._context.settings
        context.monitor.forget(group)
        context.buffer.remove(group)
        context.prompts.drop(1, reason)
        context.counters[f"groups_dropped_{reason}"] += 1
        context.out.append(do.ReportDrop(group, reason, error))
        for sample in group.samples:
            self.leave(sample, reason)
            context.tokens.drop(sample.tape.generated, reason)
            context.to(sample, SampleState.DROPPED, f"group dropped ({reason}): {error}")
        if reason is DropReason.FAILED:
            self._failed_in_a_row += 1
            if self._failed_in_a_row >= settings.max_failed_groups:
                context.failure = f"{self._failed_in_a_row} groups failed in a row, the last one: {error}"
                self._failed_in_a_row = 0
        elif reason is DropReason.FILTERED:
            self._filtered_in_a_row += 1
            if self._filtered_in_a_row >= settings.max_filtered_groups:
                context.failure = (
                    f"the filter rejected {self._filtered_in_a_row} groups in a row; are the prompts too easy or too "
                    "hard for the model? Otherwise raise max_filtered_groups"
                )
                self._filtered_in_a_row = 0

    def replace_too_old(self) -> None:
        """After a weight update: begin again or drop what exceeds max_staleness, where the policy says so."""
        context = self._context
        for sample in context.buffer.too_old():
            if sample.state is SampleState.DROPPED:
                continue  # with a sibling, a moment ago
            if context.settings.on_stale is OnStale.RESTART:
                self.begin_again(sample, DropReason.STALE)
            else:
                self.give_up(sample.group, DropReason.STALE, f"{sample.id} is older than max_staleness")
