"""Decides when a group is complete: enough of its samples are finished, and the filter has accepted the group.

``CoreSettings.group_quorum`` sets how many finished samples are enough.
"""

from __future__ import annotations

from april.core import commands as do
from april.core.attachments import NO_EXTRAS
from april.core.context import CoreContext
from april.core.types import Group, GroupState, Sample, SampleState

# module-level names, as an enum member costs 60 ns per use on Python 3.11 and these are used at every event
NEW = SampleState.NEW
FINISHED = SampleState.FINISHED
OPEN, BEING_JUDGED, READY = GroupState.OPEN, GroupState.BEING_JUDGED, GroupState.READY


class GroupCompletion:
    """Finishes samples, and makes groups deliverable once they are complete and accepted."""

    def __init__(self, context: CoreContext) -> None:
        self._context = context
        self.failed_in_a_row = 0
        """Number of groups dropped for failures since a group was last accepted."""
        self.filtered_in_a_row = 0
        """Number of groups that the filter rejected since a group was last accepted."""

    def finish_sample(self, sample: Sample) -> None:
        """Mark a sample as finished, now that it has its reward."""
        group = sample.group
        sample.retry_timer = None
        self._context.change_state(sample, FINISHED, f"finished, reward {sample.reward:g}")
        group.unfinished -= 1
        group.finishers.append(sample.id.index)
        if group.evaluation is None:
            self._context.lengths.generated.add(sample.generated)
        if group.state is OPEN:
            self.advance(group)
        elif group.state is READY:
            self._make_deliverable(sample)

    def advance(self, group: Group) -> None:
        """If enough samples of an open group are finished, accept the group or ask the filter about it."""
        if group.state is not OPEN or not group.complete:
            return
        if group.evaluation is not None:
            self._context.change_group_state(group, READY, "complete")
            group.evaluation.unfinished -= 1
        elif self._context.settings.has_filter:
            self.ask_filter(group)
        else:
            self.accept(group)

    def ask_filter(self, group: Group) -> None:
        self._context.change_group_state(group, BEING_JUDGED, "the filter is called")
        self._context.out.append(do.JudgeGroup(group, group.since))

    def accept(self, group: Group) -> None:
        """Make the group deliverable and fix its cohort, the rewards from which baselines are computed."""
        self._context.change_group_state(group, READY, "complete")
        self.failed_in_a_row = self.filtered_in_a_row = 0
        group.fix_cohort()
        if self._context.settings.whole_groups:
            self._context.monitor.accept(group)
        else:
            for index in group.finishers:
                self._make_deliverable(group.samples[index])

    def _make_deliverable(self, sample: Sample) -> None:
        """Make a single finished sample deliverable (group quorum below 1)."""
        sample.since = self._context.event_number
        self._context.monitor.accept(sample)

    def unfinish_sample(self, sample: Sample) -> None:
        """Undo the bookkeeping of a finished sample that begins again or is given up."""
        self._context.monitor.not_ready(sample)
        sample.group.finishers.remove(sample.id.index)
        sample.group.unfinished += 1

    def reopen(self, group: Group) -> None:
        """Open a group again because one of its finished samples began again.

        A group that was accepted by a quorum of its samples stays accepted: its cohort is fixed.
        """
        context, settings = self._context, self._context.settings
        if group.state is READY and not settings.whole_groups:
            return
        context.monitor.not_ready(group)
        group.cohort, group.cohort_values = (), NO_EXTRAS
        if group.state is not OPEN:
            context.change_group_state(group, OPEN, "a sample began again")
        self.rerun_for_return_values(group)
        self.advance(group)

    def rerun_for_return_values(self, group: Group) -> None:
        """Run finished functions again if their return values were lost and a group reward or the filter needs them.

        The calls that these functions repeat get the recorded tokens; nothing is generated again. A group that is
        already accepted needs no return values.
        """
        context, settings = self._context, self._context.settings
        if group.state is READY or not (settings.group_reward or settings.has_filter):
            return
        for sample in group.samples:
            if sample.replayed and sample.state is FINISHED:
                self.unfinish_sample(sample)
                context.lengths.generated.add(sample.generated, -1)  # it is added again when it finishes again
                sample.finish = None
                context.change_state(sample, NEW, "runs again because its result was lost")
                context.over_sampler.push(sample)
        if group.state is not OPEN:
            context.change_group_state(group, OPEN, "the samples for the filter are lost")
