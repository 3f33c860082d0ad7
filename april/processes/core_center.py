"""Where the ranks meet, in the core's actor: april's ``Center`` without a rank of its own.

One thread, the conductor, carries out what the ranks have come together for. A rank whose process died may come back:
it is told where it goes on, and is answered from the journal until it is where the others are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from april.errors import LinkError, RankError
from april.processes import rank_messages as say
from april.processes.center import Center
from april.processes.journal import EndedCall, Journal
from april.processes.link import Link
from april.processes.rank_scheduler import TRANSFER
from april.processes.ranks import Ranks
from april.processes.returning_meeting import ReturningMeeting


class CoreCenter(Center):
    """See above.

    Args:
        ranks: how many there are, and how long they wait.
        look: answers what one rank wants to look at; called in a thread.
        broken: told once, on the loop, when the ranks do not go on together.
    """

    def __init__(
        self, ranks: Ranks, look: Callable[[str, list[object]], bytes], broken: Callable[[RankError], None]
    ) -> None:
        super().__init__(ranks, look, broken)
        self.shares = list(range(ranks.world_size))
        self._meeting: ReturningMeeting = ReturningMeeting(ranks.world_size, ranks.rank_timeout_s)
        self._journal = Journal()
        self._arguments = b""
        """Of the call that is made now, as rank 0 has given them."""
        self._stepped: set[int] = set()
        """Who was told of the step that is carried out."""
        self.loop = self._thread.call(self._started)

    # ---------------------------------------------------------------- the conductor

    def next_call(self) -> tuple[int, bytes]:
        """Number and arguments of a call, once all ranks have made it; raises RankError."""
        self._wait(lambda: self._meeting.began)
        return self._thread.call(lambda: (self._meeting.call, self._arguments))

    def transfer(self, call: int) -> None:
        """Have all ranks hand their weights over; raises RankError if one could not."""
        self._thread.call(partial(self._open_step, call, TRANSFER, b""))
        self._wait(lambda: self._meeting.step is None)

    def ended(
        self, call: int, contents: Sequence[bytes] | say.Told, *, batch: int | None = None, out: Sequence[int] = ()
    ) -> None:
        """The end of a call: what each rank gets, or the error for all.

        ``batch``: the one that it has delivered; ``out``: those that are delivered and not trained.
        """

        def answer_of(rank: int) -> say.Answer:
            return say.Answer(call, error=contents) if isinstance(contents, tuple) else say.Answer(call, contents[rank])

        def end() -> None:
            what = self._meeting.what
            if self._answer(call, contents):
                self._journal.ended(EndedCall(what, answer_of, batch), out)

        self._thread.call(end)

    def say_goodbye(self) -> None:
        """The run is over, for whoever is still there; on the loop."""
        self._send_all(say.Bye())
        for link in self._links.values():
            link.close()
        self._links.clear()

    def shut(self) -> None:
        """End the loop, and the conductor: whatever it waits for there raises SchedulerClosed."""
        self._thread.stop()

    # ---------------------------------------------------------------- the ranks, on the loop

    def enter(self, rank: int, link: Link) -> int:
        """A rank is there, on a link; returns the number of its first call."""
        if (before := self._links.get(rank)) is not None:
            before.send(say.encode(say.Broken(f"rank {rank} has attached anew, and is not here any more", (rank,))))
            before.close()
            self._lost(rank, "it was started anew")
        self._meeting.back(rank)
        self.join(rank, rank, link)
        return self._journal.begins

    def _frame(self, rank: int, frame: bytes) -> None:
        try:
            message = say.decode(frame)
        except LinkError:
            message = None  # which is said where all others are read
        if isinstance(message, say.Arrive) and self._arrives(rank, message):
            self._beats.hear(rank, self._now())
        else:
            super()._frame(rank, frame)

    def _arrives(self, rank: int, message: say.Arrive) -> bool:
        """Whether that call has ended already: then its end is told again."""
        call = message.call
        if (ended := self._journal.find(call)) is not None:
            if ended.what == message.what:
                self._send(rank, ended.answer_of(rank))
            else:
                sentence = (
                    f"rank {rank} was started anew and makes another call than all ranks have made there: "
                    f"{message.what} in place of {ended.what}"
                )
                self._send(rank, say.Answer(call, error=say.told(RankError(sentence))))
            return True
        if rank == 0 and call == self._meeting.call and not self._meeting.began:
            self._arguments = message.arguments
        step = self._meeting.step
        if step is not None and call == self._meeting.call and rank not in self._stepped:
            self._stepped.add(rank)
            self._send(rank, say.Step(call, step))
        return False

    def _open_step(self, call: int, step: str, content: bytes) -> None:
        self._stepped = set(self._links)
        super()._open_step(call, step, content)

    def _lost(self, rank: int, why: str) -> None:
        self._links.pop(rank, None)
        self._beats.forget(rank)
        if self._meeting.miss(rank, why, self._now()):
            self._go_on()
        self._spread_broken()

    def _started(self) -> asyncio.AbstractEventLoop:
        self._tick()
        return asyncio.get_running_loop()
