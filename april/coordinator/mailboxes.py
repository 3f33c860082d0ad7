"""Which rollout waits for which answer, and whether anybody still listens to it.

Each sample has one rollout at a time, known by its *life*; one that was given up keeps an old life, and hears nothing
any more but that.
"""

from __future__ import annotations

import asyncio
from collections import deque

from april.coordinator.messages import GivenUp, Message, Result, Settled
from april.core.types import SampleId


class Mailboxes:
    """Answers on their way to the rollouts of the held samples."""

    def __init__(self) -> None:
        self._lives: dict[SampleId, int] = {}
        self._answers: dict[SampleId, deque[Message]] = {}
        self._asked: dict[SampleId, tuple[bool, asyncio.Future[Message]]] = {}
        """(whether it waits for its start, who waits)"""
        self.late: dict[SampleId, Result] = {}
        """Results of requests that the core had stopped waiting for; the next attempt may begin with them."""

    def __len__(self) -> int:
        return len(self._asked)

    # ---------------------------------------------------------------- lives

    def new_life(self, sample: SampleId) -> int:
        """A rollout is to begin: what it says is heard, and no older one."""
        life = self._lives[sample] = self._lives.get(sample, 0) + 1
        return life

    def is_alive(self, sample: SampleId, life: int) -> bool:
        """Whether the rollout with this ``life`` is the one that the sample runs by."""
        return self._lives.get(sample) == life

    def give_up(self, sample: SampleId) -> None:
        """The sample goes on without its rollout: what that one is told or says from now on is void."""
        self._answers.pop(sample, None)
        if sample in self._lives:  # not settled by now
            self.new_life(sample)
        for_start, future = self._asked.get(sample, (True, None))
        if future is not None and not for_start:
            del self._asked[sample]
            _resolve(future, GivenUp())

    def settle(self, sample: SampleId) -> None:
        """The sample is delivered or dropped."""
        self._lives.pop(sample, None)
        self._answers.pop(sample, None)
        for_start, future = self._asked.pop(sample, (True, None))
        if future is not None:
            _resolve(future, Settled() if for_start else GivenUp())

    def stop(self, error: BaseException) -> None:
        """Nothing goes on: whoever waits is told why."""
        asked, self._asked = self._asked, {}
        for _, future in asked.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # who waited may be gone; its error is not asyncio's business

    # ---------------------------------------------------------------- answers

    async def answer(self, sample: SampleId, *, for_start: bool = False) -> Message:
        """The next one for the sample's rollout; waits until there is one."""
        ready = self._answers.get(sample)
        if ready:
            return ready.popleft()
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._asked[sample] = (for_start, future)
        return await future

    def say(self, sample: SampleId, answer: Message) -> None:
        """To whoever waits, or will ask."""
        _, future = self._asked.pop(sample, (False, None))
        if future is None or not _resolve(future, answer):
            self._answers.setdefault(sample, deque()).append(answer)

    def unsay(self, sample: SampleId) -> None:
        """What was said, and not heard, is out of date."""
        self._answers.pop(sample, None)


def _resolve(future: asyncio.Future[Message], answer: Message) -> bool:
    """False: whoever waited is gone."""
    if future.done():
        return False
    future.set_result(answer)
    return True
