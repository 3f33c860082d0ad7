"""Completion: from a finished sample to one that can be delivered: quorum, the filter's verdict, what counts.

Whether a batch is there is decided in ``completion_monitor``.
"""

from __future__ import annotations

from april.core import commands as do
from april.core.context import CoreContext
from april.core.types import Group, GroupState, Sample, SampleState

# names of the module: an enum's member costs 60 ns per use on Python 3.11, and these are used at every event
OPEN, READY = GroupState.OPEN, GroupState.READY


class Completion:
    """Groups become complete, and may cease to be while they are held."""

    def __init__(self, context: CoreContext) -> None:
        self._context = context
        self.failed_in_a_row = 0
        """Groups dropped for failures since the last one that counted."""
        self.filtered_in_a_row = 0
        """The same of groups that the filter rejected."""

    def finished(self, sample: Sample) -> None:
        """A sample has its reward."""
        group = sample.group
        sample.retry = None
        self._context.to(sample, SampleState.FINISHED, f"finished, reward {sample.reward:g}")
        group.unfinished -= 1
        group.finishers.append(sample.id.index)
        if group.evaluation is None:
            self._context.lengths.generated.add(sample.tape.generated)
        if group.state is OPEN:
            self.advance(group)
        elif group.state is READY:
            self._count(sample)

    def advance(self, group: Group) -> None:
        """If the quorum of an open group is finished: it counts, if the filter has nothing against it."""
        if group.state is not OPEN or not group.complete:
            return
        if group.evaluation is not None:
            self._context.to_group(group, READY, "complete")
            group.evaluation.unfinished -= 1
        elif self._context.settings.has_filter:
            self.ask_filter(group)
        else:
            self.accept(group)

    def ask_filter(self, group: Group) -> None:
        """Also once more, after it failed."""
        self._context.to_group(group, GroupState.JUDGED, "the filter is asked")
        self._context.out.append(do.JudgeGroup(group, group.since))

    def accept(self, group: Group) -> None:
        """It counts; its cohort is fixed from now on."""
        self._context.to_group(group, READY, "complete")
        self.failed_in_a_row = self.filtered_in_a_row = 0
        group.cohort = group.rewarded
        if self._context.settings.whole_groups:
            self._context.monitor.accept(group)
        else:
            for index in group.finishers:
                self._count(group.samples[index])

    def _count(self, sample: Sample) -> None:
        """With a quorum: it can be delivered from now on."""
        sample.since = self._context.event_number
        self._context.monitor.accept(sample)

    def unfinished(self, sample: Sample) -> None:
        """A finished sample begins again, or is given up."""
        self._context.monitor.not_ready(sample)
        sample.group.finishers.remove(sample.id.index)
        sample.group.unfinished += 1

    def reopen(self, group: Group) -> None:
        """A finished sample of it began again; with a quorum that changes nothing once its cohort is fixed."""
        context, settings = self._context, self._context.settings
        if group.state is READY and not settings.whole_groups:
            return
        context.monitor.not_ready(group)
        group.cohort = ()
        if group.state is not OPEN:
            context.to_group(group, OPEN, "a sample began again")
        self.run_again(group)
        self.advance(group)

    def run_again(self, group: Group) -> None:
        """Of a group that does not count: functions whose return a group reward or the filter is to see, and nobody
        has since their process died; they are answered from the tape."""
        context, settings = self._context, self._context.settings
        if group.state is READY or not (settings.group_reward or settings.has_filter):
            return
        for sample in group.samples:
            if sample.replay is not None and sample.state is SampleState.FINISHED:
                self.unfinished(sample)
                context.lengths.generated.add(sample.tape.generated, -1)  # until it is finished once more
                sample.finish = None
                context.to(sample, SampleState.NEW, "runs again for what it returns")
                context.over_sampler.push(sample)
        if group.state is not OPEN:
            context.to_group(group, OPEN, "what the filter was to see is lost")
