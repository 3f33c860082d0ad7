"""The over-sampler decides how much should be in flight now, and what goes next.

Carry goes before new prompts and older groups before younger ones: the queue is ordered by (urgent, group
number, sample index), and groups are numbered as drawn.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from april.core.attempt_book import Places
from april.core.events import SourceExtended
from april.core.settings import CoreSettings
from april.core.types import NO_DEADLINE, GenerateCall, Refill, Sample


class OverSampler:
    """Queue of the calls and of the samples to be started that wait for a place; the rules for drawing prompts."""

    def __init__(self, settings: CoreSettings) -> None:
        self.settings = settings
        self._batch, self._per_group = settings.target, settings.units_per_group
        self._calls: list[tuple[bool, int, int, int, Sample | GenerateCall]] = []
        self._starts: list[tuple[bool, int, int, int, Sample | GenerateCall]] = []
        self._tickets = 0
        self.waiting = 0
        """Samples and calls in the queue (void entries left out)."""
        self.asked = 0
        """Prompts asked for and not answered yet."""
        self.bound = NO_DEADLINE
        """The bound on the staleness of those, where it was lowered before they were asked for."""
        self.exhausted = False
        self.held_back = False
        """More prompts would have been drawn, had the buffer room for them."""

    def push(self, work: Sample | GenerateCall) -> None:
        """Queue a sample that is NEW, or a call that is QUEUED."""
        sample, heap = (work, self._starts) if isinstance(work, Sample) else (work.sample, self._calls)
        self._tickets += 1
        work.ticket = self._tickets
        self.waiting += 1
        heapq.heappush(heap, (not sample.urgent, sample.id.group, sample.id.index, work.ticket, work))

    def forget(self, work: Sample | GenerateCall) -> None:
        """Take something out of the queue, if it is there; its entry becomes void."""
        if work.ticket:
            work.ticket = 0
            self.waiting -= 1

    def again(self, work: Sample | GenerateCall) -> None:
        """Something in the queue has become urgent."""
        self.forget(work)
        self.push(work)

    def extended(self, event: SourceExtended) -> None:
        """There are prompts again."""
        self.exhausted = False

    def first(self, places: Places) -> Sample | GenerateCall | None:
        """Return what goes next, if there is a place for it; it stays in the queue.

        A function that may not start yet is not waited for: calls behind it go before it.
        """
        calls, starts = self._calls, self._starts
        for heap in (calls, starts):
            while heap and heap[0][-1].ticket != heap[0][-2]:
                heapq.heappop(heap)
        call = calls[0][-1] if calls and places.free > 0 else None
        if starts and not (call is not None and calls[0] < starts[0]):
            work = starts[0][-1]
            if places.to_start(evaluation=starts[0][1] < 0) > 0:
                return work
        return call

    def prompts_to_draw(
        self, *, ready: int, in_work: int, free_places: int, step_start: bool, fits: Callable[[], int],
        room: Callable[[], int],
    ) -> int:  # fmt: skip
        """Return how many prompts to take from the source now.

        ``ready``: complete units that wait for delivery; ``in_work``: units that are not complete; ``free_places``:
        samples that could start in addition to those in flight and in the queue; ``fits`` and ``room``: how many
        prompts the buffer takes of what the step cannot do without, and beyond it.
        """
        if self.exhausted or self.asked:
            return 0
        s, units = self.settings, self._per_group
        missing = max(-(-(self._batch - ready - in_work) // units), 0)
        missing = min(missing, fits()) if missing else 0
        if s.refill is Refill.SAMPLE:
            # a place that nobody waits for is filled by a new group, whatever the number of groups
            wanted = max(-(-free_places // s.n_samples_per_prompt), 0)
        elif s.refill is Refill.GROUP:
            wanted = s.groups_wanted - in_work // units
        elif step_start:
            wanted = s.groups_wanted - (ready + in_work) // units
        elif s.over_sampling_batch_size < s.rollout_batch_size:
            # inside a step only what is needed to reach N, in portions
            portion = s.over_sampling_batch_size
            wanted = -(-missing // portion) * portion
        else:
            # groups were given up and N cannot be reached any more: one at a time would cost a response's time each
            wanted = s.groups_wanted - (ready + in_work) // units if missing else 0
        self.held_back = False
        if wanted <= missing:
            return missing
        granted = max(missing, min(wanted, room()))
        self.held_back = granted < wanted
        return granted
