"""Decides how many prompts to draw, and which queued work goes next: a new sample or a call of ``llm.generate``.

Training and evaluations have a queue each. Urgent work goes first, then the work of older groups (a group is a prompt
with its samples), so that work carried over from earlier steps goes before new prompts. Without
refill, ``RolloutCore._fill`` draws prompts at the start of a step, and later only to replace dropped groups.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from april.core.events import SourceExtended
from april.core.places import Places
from april.core.settings import CoreSettings
from april.core.types import NO_DEADLINE, GenerateCall, Refill, Sample


class WorkQueue:
    """Queues calls of ``llm.generate``, and samples whose rollout function is to be started."""

    def __init__(self) -> None:
        self.calls: list[tuple[bool, int, int, int, Sample | GenerateCall]] = []
        self.starts: list[tuple[bool, int, int, int, Sample | GenerateCall]] = []
        self.waiting = 0
        """Number of queued samples and calls, without void heap entries."""
        self.calls_waiting = 0
        """Number of queued calls, which ``waiting`` includes."""

    def first(self, places: Places, *, evaluation: bool) -> Sample | GenerateCall | None:
        """Return the sample or call that goes next, without removing it; None if there is none or no place is free.

        A place is a slot for a request in flight. While no rollout function may start, the first call goes next.
        """
        calls, starts = self.calls, self.starts
        for heap in (calls, starts):
            while heap and heap[0][-1].ticket != heap[0][-2]:
                heapq.heappop(heap)
        call = calls[0][-1] if calls and (places.free_for_evaluations if evaluation else places.free) > 0 else None
        first = starts and not (call is not None and calls[0] < starts[0])
        if first and places.startable(evaluation=evaluation) > 0:
            return starts[0][-1]
        return call


class OverSampler:
    """Queues the calls and the samples to be started, and applies the rules for drawing prompts."""

    def __init__(self, settings: CoreSettings) -> None:
        self.settings = settings
        self._batch, self._per_group = settings.target, settings.units_per_group
        self.training, self.evaluations = WorkQueue(), WorkQueue()
        self._tickets = 0
        self.requested = 0
        """Number of prompts that were requested from the source and have not arrived."""
        self.granted = 0
        """Number of prompts to request next, once the ``requested`` prompts have arrived."""
        self.bound = NO_DEADLINE
        """Limit on the staleness of the requested prompts if the run has lowered max_staleness; else NO_DEADLINE."""
        self.exhausted = False
        self.held_back = False
        """True if more prompts would have been drawn, but the buffer had no room."""

    @property
    def waiting(self) -> int:
        return self.training.waiting + self.evaluations.waiting

    def push(self, work: Sample | GenerateCall) -> None:
        """Queue a sample in the state NEW, or a call in the state QUEUED."""
        sample = work if isinstance(work, Sample) else work.sample
        queue = self.training if sample.evaluation is None else self.evaluations
        heap = queue.starts if work is sample else queue.calls
        self._tickets += 1
        work.ticket = self._tickets
        queue.waiting += 1
        queue.calls_waiting += work is not sample
        heapq.heappush(heap, (not sample.urgent, sample.id.group, sample.id.index, work.ticket, work))

    def forget(self, work: Sample | GenerateCall) -> None:
        """Remove a sample or call from the queue, if it is there; its heap entry becomes void."""
        if work.ticket:
            work.ticket = 0
            sample = work if isinstance(work, Sample) else work.sample
            queue = self.training if sample.evaluation is None else self.evaluations
            queue.waiting -= 1
            queue.calls_waiting -= work is not sample

    def extended(self, event: SourceExtended) -> None:
        """Allow drawing again after the source of prompts got more of them."""
        self.exhausted = False

    def first(self, places: Places, *, training: bool = True) -> Sample | GenerateCall | None:
        """Return the next sample or call of both queues, as :meth:`WorkQueue.first` does for one queue.

        Evaluations go before training until they have their share of the requests in flight, and after that they go
        last. ``training`` is False if training may start nothing now.
        """
        evaluation = None
        if self.evaluations.waiting:
            evaluation = self.evaluations.first(places, evaluation=True)
            if evaluation is not None and not (training and places.evaluations_have_their_share):
                return evaluation
        work = self.training.first(places, evaluation=False) if training and self.training.waiting else None
        return evaluation if work is None else work

    def prompts_to_draw(
        self, *, ready: int, in_work: int, free_places: int, step_start: bool, only_missing: bool,
        fits: Callable[[], int], room: Callable[[], int],
    ) -> int:  # fmt: skip
        """Return how many prompts to draw from the source now.

        ``ready`` and ``in_work`` are the numbers of complete and incomplete units (a unit is a group or, with a group
        quorum below 1, a sample). ``free_places`` is the number of samples that could start in addition to all samples
        in flight or queued. With ``only_missing``, only the prompts that the batch lacks are drawn. ``fits`` returns
        the limit on these, and ``room`` the limit if more are wanted.
        """
        if self.exhausted or self.requested:
            return 0
        s, units = self.settings, self._per_group
        missing = max(-(-(self._batch - ready - in_work) // units), 0)
        missing = min(missing, fits()) if missing else 0
        if only_missing:
            wanted = missing
        elif s.refill is Refill.SAMPLE:
            # new groups fill all places for which no work is queued, however many groups are in progress
            wanted = max(-(-free_places // s.n_samples_per_prompt), 0)
        elif s.refill is Refill.GROUP:
            wanted = s.groups_wanted - in_work // units
        elif step_start:
            wanted = s.groups_wanted - (ready + in_work) // units
        elif s.over_sampling_batch_size < s.rollout_batch_size:
            # within a step, draw only as many portions of over_sampling_batch_size as the batch still needs
            portion = s.over_sampling_batch_size
            wanted = -(-missing // portion) * portion
        else:
            # dropped groups left too few for the batch: refill, as replacing them one after another would take long
            wanted = s.groups_wanted - (ready + in_work) // units if missing else 0
        self.held_back = False
        if wanted <= missing:
            return missing
        granted = max(missing, min(wanted, room()))
        self.held_back = granted < wanted
        return granted
