"""Rank 0's side: it listens for the other ranks, keeps the meeting, and tells everybody what has come of a call.

Everything lives on a loop of its own, which no function of the user's can hold up; rank 0's trainer asks it as the
other ranks ask over their links.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from april.driver.loop_thread import LoopThread, Reply
from april.driver.user_code import describe
from april.errors import LinkError, RankError
from april.processes import rank_messages as say
from april.processes.heartbeats import Heartbeats
from april.processes.link import STRANGERS, Link, Listener, SocketLink, close_all
from april.processes.meeting import Meeting
from april.processes.ranks import MeetingPoint, Ranks

log = logging.getLogger("april")

PURPOSE = "rank"
"""Of the connections."""


class Center:
    """See above.

    Args:
        look: answers what one rank wants to look at; called in a thread.
        broken: told once, on the loop, when the ranks do not go on together.
    """

    def __init__(
        self, ranks: Ranks, look: Callable[[str, list[object]], bytes], broken: Callable[[RankError], None]
    ) -> None:
        self._ranks = ranks
        self._look = look
        self._on_broken = broken
        self._meeting = Meeting(ranks.world_size, ranks.rank_timeout_s)
        self._beats = Heartbeats(ranks.rank_deadline_s)
        self.shares = [ranks.share] + [-1] * (ranks.world_size - 1)
        """The share that each rank gets, as it has said."""
        self._links: dict[int, Link] = {}
        self._waiting: Reply[None] | None = None
        """Rank 0's trainer, for the others."""
        self._told = self._closing = False
        self._gone = Reply[None]()
        """All others have closed, or are gone."""
        self._looks: set[asyncio.Task[None]] = set()
        self._listener: Listener | None = None
        self._thread = LoopThread("april-ranks")

    # ---------------------------------------------------------------- rank 0's trainer

    def open(self, point: MeetingPoint) -> None:
        """Listen, and say where; raises LinkError."""

        async def listen() -> str:
            # all ranks come at the same moment: when they hear where this is
            everybody = STRANGERS + self._ranks.world_size
            self._listener = Listener(point.token, self.accept, strangers=everybody)
            address = await self._listener.open(self._ranks.address)
            self._tick()
            return address

        if self._ranks.world_size > 1:
            address = ""
            try:
                address = self._thread.run(listen)
            finally:
                point.publish(address)

    def meet(self, call: int, what: str) -> None:
        """Make a call and wait until all ranks have; raises RankError."""
        meeting = self._meeting
        self._wait(lambda: meeting.arrive(0, call, what, self._now()) or meeting.began or call < meeting.call)

    def step(self, call: int, step: str, function: Callable[[], object], content: bytes = b"") -> None:
        """Have all ranks carry out ``step``, here as ``function``; raises what that raises, or RankError."""
        self._thread.call(lambda: self._open_step(call, step, content))
        function()
        meeting = self._meeting
        self._wait(lambda: meeting.done(0, call, step, "", self._now()) or meeting.step_failed is not None)

    def answer(self, call: int, contents: Sequence[bytes] | say.Told) -> bool:
        """The end of a call: what each rank gets, or the error for all; False: it has ended before."""
        return self._thread.call(lambda: self._answer(call, contents))

    def end(self, call: int) -> None:
        """The call has ended here; the answer has said so."""

    def leave(self, call: int) -> None:
        """An interrupt has taken rank 0 out of a call."""
        self._thread.call_later(lambda: self._meeting.leave(0, call, self._now()))

    @property
    def broken(self) -> RankError | None:
        """Why the ranks do not go on together."""
        return self._meeting.broken

    def raise_if_broken(self) -> None:
        """RankError if the ranks do not go on together."""
        if (broken := self.broken) is not None:
            raise RankError(str(broken), broken.ranks)

    def close(self, error: BaseException | None) -> None:
        """Leave: at once after an error, else when the others have closed, or are late."""
        ended = False
        try:
            if self._thread.alive and self._thread.here:
                self._thread.call(lambda: self._close(error))
                if error is None and self._meeting.broken is None:
                    self._gone.wait(self._ranks.rank_timeout_s)
                self._thread.run(self._end)
                ended = True
        finally:  # an interrupt ends only the wait
            self._thread.begin_to_stop(None if ended else self._end)
            self._thread.stop()

    def _wait(self, there: Callable[[], bool]) -> None:
        def begin(reply: Reply[None]) -> None:
            self._waiting = reply
            if there():
                self._go_on()
            self._spread_broken()

        self._thread.wait_for(begin)

    # ---------------------------------------------------------------- the other ranks

    def accept(self, link: SocketLink) -> None:
        """A rank has connected."""
        hello = link.hello
        words = hello.name.split() if hello is not None and hello.purpose == PURPOSE else []
        rank, share = map(int, words) if len(words) == 2 and all(w.isdecimal() for w in words) else (0, 0)
        if not 0 < rank < self._ranks.world_size:
            log.warning("a connection from %s was closed: it is no rank of this trainer", link.peer)
            link.close()
            return
        self.join(rank, share, link)

    def join(self, rank: int, share: int, link: Link) -> None:
        """A rank is there, on a link, and gets this share of each batch."""
        if rank in self._links:
            # early for the next scheduler, its goodbye on its way still; or two processes say that they are this rank
            log.warning("a connection as rank %d was closed: that rank is there already", rank)
            link.close()
            return
        if rank in self._meeting.closed or self._closing:
            link.close()  # it is early for the next scheduler
            return
        self._links[rank] = link
        self.shares[rank] = share
        self._beats.hear(rank, self._now())
        link.open(partial(self._frame, rank), partial(self._lost, rank))
        broken = self._meeting.broken
        self._send(rank, say.Beat() if broken is None else say.Broken(str(broken), broken.ranks))

    def _frame(self, rank: int, frame: bytes) -> None:
        now = self._now()
        self._beats.hear(rank, now)
        meeting = self._meeting
        try:
            message = say.decode(frame)
        except LinkError as wrong:
            self._lost(rank, str(wrong))
            return
        match message:
            case say.Beat():
                return
            case say.Ask():
                self._show(rank, message)
            case say.Arrive(call, what):
                if meeting.arrive(rank, call, what, now):
                    self._go_on()
            case say.Leave(call):
                meeting.leave(rank, call, now)
            case say.Done(call, step, error):
                if meeting.done(rank, call, step, error, now):
                    self._go_on()
            case say.Bye(error):
                self._links.pop(rank).close()
                self._beats.forget(rank)
                meeting.close(rank, error)
        self._spread_broken()

    def _lost(self, rank: int, why: str) -> None:
        self._links.pop(rank, None)
        self._beats.forget(rank)
        self._meeting.lost(rank, why)
        self._spread_broken()

    def _show(self, rank: int, asked: say.Ask) -> None:
        async def show() -> None:
            try:
                content = await asyncio.to_thread(self._look, asked.method, asked.arguments)
                if (link := self._links.get(rank)) is not None:
                    link.send(say.encode(say.Shown(asked.number, content)))
            except Exception as error:  # also what is too long: that is nobody's end, as a share would be
                self._send(rank, say.Shown(asked.number, error=say.told(error)))

        task = asyncio.get_running_loop().create_task(show())
        self._looks.add(task)
        task.add_done_callback(self._looks.discard)

    # ---------------------------------------------------------------- on the loop

    def _go_on(self) -> None:
        """Rank 0's trainer need not wait for the others any more."""
        if self._waiting is not None:
            self._waiting.give(None, self._meeting.step_failed)

    def _open_step(self, call: int, step: str, content: bytes) -> None:
        if self._meeting.broken is None:
            self._meeting.open_step(step)
            self._send_all(say.Step(call, step, content, self._meeting.what))

    def _answer(self, call: int, contents: Sequence[bytes] | say.Told) -> bool:
        if self._meeting.broken is not None or call != self._meeting.call:
            return False
        what = self._meeting.what
        self._meeting.end_call(self._now())
        for rank in list(self._links):
            if isinstance(contents, tuple):
                self._send(rank, say.Answer(call, error=contents, what=what))
            else:
                self._send(rank, say.Answer(call, contents[rank], what=what))
        return True

    def _tick(self) -> None:
        now = self._now()
        for rank in list(self._beats.silent(now)):
            link = self._links.get(rank)
            self._lost(rank, self._beats.sentence)
            if link is not None:
                link.close()
        self._meeting.tick(now)
        self._spread_broken()
        self._send_all(say.Beat())
        asyncio.get_running_loop().call_later(self._beats.interval_s, self._tick)

    def _spread_broken(self) -> None:
        if self._closing and not self._links:
            self._gone.give(None)
        broken = self._meeting.broken
        if broken is None:
            return
        if self._waiting is not None:
            self._waiting.give(None, RankError(str(broken), broken.ranks))
        if not self._told:
            self._told = True
            self._send_all(say.Broken(str(broken), broken.ranks))
            self._on_broken(broken)

    def _close(self, error: BaseException | None) -> None:
        self._closing = True
        self._meeting.close(0, "" if error is None else describe(error))
        self._spread_broken()
        self._send_all(say.Bye("" if error is None else describe(error)))

    async def _end(self) -> None:
        if self._listener is not None:
            await self._listener.close()
        links = list(self._links.values())
        self._links.clear()
        await close_all(links)

    def _send(self, rank: int, message: say.Message) -> None:
        link = self._links.get(rank)
        if link is None:
            return
        try:
            link.send(say.encode(message))
        except LinkError as error:  # a share that is too large
            self._meeting.lost(rank, str(error))
            self._spread_broken()

    def _send_all(self, message: say.Message) -> None:
        for rank in list(self._links):
            self._send(rank, message)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
