"""Which rollout waits for which answer, and whether anybody still listens to it.

Each of a prompt's n rollouts is run again and again; the present run is known by its *life*, an older one hears nothing
any more but that it was given up.
"""

from __future__ import annotations

import asyncio
from collections import deque

from april.core.types import SampleId
from april.processes.coordinator.messages import GivenUp, Message, Result, Settled


class Mailboxes:
    """Answers on their way to rollouts, by (group, rollout)."""

    def __init__(self) -> None:
        self._lives: dict[SampleId, int] = {}
        self._answers: dict[SampleId, deque[Message]] = {}
        self._asked: dict[SampleId, tuple[bool, asyncio.Future[Message]]] = {}
        """(whether it waits for its start, who waits)"""
        self._over: BaseException | None = None
        """Why nobody is answered any more."""
        self.late: dict[SampleId, Result] = {}
        """Results of requests that the core had stopped waiting for; the next attempt may begin with them."""

    def __len__(self) -> int:
        return len(self._asked)

    # ---------------------------------------------------------------- lives

    def new_life(self, rollout: SampleId) -> int:
        """A rollout is to begin: what it says is heard, and no older one."""
        life = self._lives[rollout] = self._lives.get(rollout, 0) + 1
        return life

    def is_alive(self, rollout: SampleId, life: int) -> bool:
        """Whether this is its present run."""
        return self._lives.get(rollout) == life

    def give_up(self, rollout: SampleId) -> None:
        """The sample goes on without its rollout: what that one is told or says from now on is void."""
        self._answers.pop(rollout, None)
        if rollout in self._lives:  # not settled by now
            self.new_life(rollout)
        for_start, future = self._asked.get(rollout, (True, None))
        if future is not None and not for_start:
            del self._asked[rollout]
            _resolve(future, GivenUp())

    def settle(self, rollout: SampleId, *, dropped: bool = False) -> None:
        """The sample is delivered or dropped (``dropped``: it alone)."""
        self._lives.pop(rollout, None)
        self._answers.pop(rollout, None)
        for_start, future = self._asked.pop(rollout, (True, None))
        if future is not None:
            _resolve(future, Settled(dropped) if for_start else GivenUp())

    def stop(self, error: BaseException) -> None:
        """Nothing goes on: whoever waits, or will ask, is told why."""
        self._over = error
        asked, self._asked = self._asked, {}
        for _, future in asked.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # who waited may be gone; its error is not asyncio's business

    # ---------------------------------------------------------------- answers

    async def answer(self, rollout: SampleId, *, for_start: bool = False) -> Message:
        """The next one for it; waits until there is one. Raises what has ended it all."""
        ready = self._answers.get(rollout)
        if ready:
            return ready.popleft()
        if self._over is not None:
            raise self._over
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._asked[rollout] = (for_start, future)
        return await future

    def say(self, rollout: SampleId, answer: Message) -> None:
        """To whoever waits, or will ask."""
        _, future = self._asked.pop(rollout, (False, None))
        if future is None or not _resolve(future, answer):
            self._answers.setdefault(rollout, deque()).append(answer)

    def unsay(self, rollout: SampleId) -> None:
        """What was said, and not heard, is out of date."""
        self._answers.pop(rollout, None)


def _resolve(future: asyncio.Future[Message], answer: Message) -> bool:
    """False: whoever waited is gone."""
    if future.done():
        return False
    future.set_result(answer)
    return True
