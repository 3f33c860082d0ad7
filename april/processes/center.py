"""The center of a group of ranks: it keeps their meeting, carries out what they have come together for, and answers.

Every rank, rank 0 as well, is a :class:`april.processes.member.Member` at the other end of a link. The meeting lives on
a loop of its own, which no function of the user's can hold up; one thread, the conductor, makes the scheduler's calls.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from april.core.batch import Batch
from april.driver.loop_thread import LoopThread, Reply
from april.driver.user_code import describe
from april.errors import LinkError, RankError, SchedulerClosed
from april.processes import rank_messages as say
from april.processes.link import RANK, STRANGERS, Heartbeats, Link, Listener, SocketLink, close_all
from april.processes.meeting import EndedCall, Journal, Meeting
from april.processes.ranks import Ranks

log = logging.getLogger("april")


class OnAll(Protocol):
    """Has every rank carry out a step of the call that is made; raises RankError if one could not."""

    def __call__(self, step: str, content: bytes = b"") -> None: ...


class Conducted(Protocol):
    """The scheduler, as the center uses it in threads of its own."""

    def carry_out(self, asked: Any, on_all: OnAll, shares: Sequence[int]) -> tuple[Any, Sequence[bytes]]:
        """Make a call; ``asked``: what rank 0 has come with, ``shares``: which share each rank gets.

        Returns what it returns, and what each rank gets.
        """

    def look(self, method: str, arguments: list[Any]) -> bytes:
        """Answer what one rank wants to know."""

    @property
    def batches_out(self) -> list[int]:
        """Numbers of the batches that are delivered and not trained."""


class Center:
    """The center of a group of ranks.

    Args:
        ranks: how many there are, and how long they wait.
        name: who has the scheduler, for messages.
        returns: ranks that are lost may come back, and are answered again what they have missed. If not, rank 0 is in
            this process, and its end is the center's.
    """

    def __init__(self, ranks: Ranks, *, name: str = "rank 0", returns: bool = False) -> None:
        self._ranks, self._name, self._returns = ranks, name, returns
        self._meeting = Meeting(ranks.world_size, ranks.rank_timeout_s, returns=returns)
        self._journal = Journal()
        self._beats = Heartbeats[int](ranks.rank_deadline_s)
        self.shares = [-1] * ranks.world_size
        """The share that each rank gets, as it has said."""
        self.asked: Any = None
        """The call as rank 0 gives it: bytes; or where rank 0 is in this process, what it sets here before it comes."""
        self._scheduler: Conducted | Exception | None = None
        self.outcome: tuple[Any, Exception | None] = None, None
        """The result or the error of the last call, for a rank in this process."""
        self._stepped: set[int] = set()
        """The ranks that were told of the step that is carried out."""
        self._links: dict[int, Link] = {}
        self._waiting: Reply[None] | None = None
        """The conductor."""
        self._told = self._closing = False
        self._gone = Reply[None]()
        """All have closed, or are gone."""
        self._looks: set[asyncio.Task[None]] = set()
        self._listener: Listener | None = None
        self.thread = LoopThread("april-ranks")
        self.thread.call(self._tick)
        self.conductor = threading.Thread(target=self._conduct, name="april-conductor", daemon=True)

    # ---------------------------------------------------------------- its owner

    def listen(self, token: str) -> str:
        """Listen for ranks; returns where, and raises LinkError."""

        async def listen() -> str:
            # all ranks come at the same moment: when they hear where this is
            self._listener = Listener(token, self.accept, strangers=STRANGERS + self._ranks.world_size)
            return await self._listener.open(self._ranks.address)

        return self.thread.run(listen)

    def begin(self, scheduler: Conducted | Exception) -> None:
        """The scheduler is there, or what went wrong; calls are carried out from now on."""
        self._scheduler = scheduler
        self.conductor.start()

    def close(self, error: BaseException | None = None, *, wait: bool = False) -> None:
        """End, after the ``error`` of rank 0 if there is one; ``wait``: once all ranks have closed, or are late."""
        ended = False
        try:
            if self.thread.alive and self.thread.here:
                self.thread.call(partial(self._close, "" if error is None else describe(error)))
                if wait and self._meeting.broken is None:
                    self._gone.wait(self._ranks.rank_timeout_s)
                self.thread.run(self._end)
                ended = True
        finally:  # an interrupt ends only the wait
            self.thread.begin_to_stop(None if ended else self._end)
            self.thread.stop()

    # ---------------------------------------------------------------- the conductor

    def _conduct(self) -> None:
        """Carry out call after call, until the ranks do not go on together, or the center is closed."""
        with suppress(RankError, SchedulerClosed):
            while True:
                self._wait(lambda: self._meeting.began)
                self._carry_out(*self.thread.call(lambda: (self._meeting.call, self._meeting.what, self.asked)))

    def _carry_out(self, call: int, what: str, asked: Any) -> None:
        result: Any = None
        contents: Sequence[bytes] | say.Told
        try:
            result, contents = self._there().carry_out(asked, partial(self._step, call), self.shares)
            self.outcome = result, None
        except Exception as error:
            contents = say.told(error, self._name)
            self.outcome = None, error
        out = self._there().batches_out if self._returns else ()
        batch = result.id if isinstance(result, Batch) else None

        def answer_of(rank: int) -> say.Answer:
            if isinstance(contents, tuple):
                return say.Answer(call, error=contents, what=what)
            return say.Answer(call, contents[rank], what=what)

        def end() -> None:
            if self._meeting.broken is None or self._meeting.step_failed is not None:
                self._meeting.end_call(self._now())
                if self._returns:
                    self._journal.ended(EndedCall(what, answer_of, batch), out)
                for rank in list(self._links):
                    self._send(rank, answer_of(rank))
            self._spread_broken()

        self.thread.call(end)

    def _there(self) -> Conducted:
        if isinstance(self._scheduler, Exception):
            raise self._scheduler
        if self._scheduler is None:
            raise SchedulerClosed(f"{self._name} has no scheduler (yet)")
        return self._scheduler

    def _step(self, call: int, step: str, content: bytes = b"") -> None:
        def begin() -> None:
            if self._meeting.broken is None:
                self._meeting.open_step(step)
                self._stepped = set(self._links)
                self._send_all(say.Step(call, step, content, self._meeting.what))

        self.thread.call(begin)
        self._wait(lambda: self._meeting.step is None)

    def _wait(self, there: Callable[[], bool]) -> None:
        def begin(reply: Reply[None]) -> None:
            self._waiting = reply
            if there():
                self._go_on()
            self._spread_broken()

        self.thread.wait_for(begin)

    # ---------------------------------------------------------------- the ranks, on the loop

    def accept(self, link: SocketLink) -> None:
        """Take somebody who has connected, if it is a rank."""
        words = link.hello.name.split() if link.hello.purpose == RANK else []
        rank, share = map(int, words) if len(words) == 2 and all(w.isdecimal() for w in words) else (-1, 0)
        if not 0 <= rank < self._ranks.world_size:
            log.warning("a connection from %s was closed: it is no rank of this trainer", link.peer)
            link.close()
        else:
            self.join(rank, share, link)

    def join(self, rank: int, share: int, link: Link) -> None:
        """A rank is there, on a link, and gets this share of each batch."""
        if self._returns:
            if (before := self._links.get(rank)) is not None:
                self._send(rank, say.Broken(f"rank {rank} has attached anew, and is not here any more", (rank,)))
                before.close()
                self._lost(rank, before, "it was started anew")
            self._meeting.back(rank)
        elif rank in self._links:
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
        link.open(partial(self._frame, rank, link), partial(self._lost, rank, link))
        self._send(rank, say.Joined(self._journal.begins))
        if (broken := self._meeting.broken) is not None:
            self._send(rank, say.Broken(str(broken), broken.ranks))

    def _frame(self, rank: int, link: Link, frame: bytes) -> None:
        if self._links.get(rank) is not link:
            return
        now = self._now()
        self._beats.hear(rank, now)
        meeting = self._meeting
        try:
            message = say.decode(frame)
        except LinkError as wrong:
            self._lost(rank, link, str(wrong))
            return
        match message:
            case say.Beat():
                return
            case say.Ask():
                self._show(rank, message)
            case say.Arrive():
                self._arrive(rank, message, now)
            case say.Leave(call):
                meeting.leave(rank, call)
            case say.Done(call, step, error):
                if meeting.done(rank, call, step, error, now):
                    self._go_on()
            case say.Bye(error):
                self._links.pop(rank).close()
                self._beats.forget(rank)
                meeting.close(rank, error)
        self._spread_broken()

    def _arrive(self, rank: int, message: say.Arrive, now: float) -> None:
        call, meeting = message.call, self._meeting
        if (ended := self._journal.find(call)) is not None:  # it is told again how that call has ended
            if ended.what == message.what:
                self._send(rank, ended.answer_of(rank))
            else:
                sentence = (
                    f"rank {rank} was started anew and makes another call than all ranks have made there: "
                    f"{message.what} in place of {ended.what}"
                )
                self._send(rank, say.Answer(call, error=say.told(RankError(sentence))))
            return
        if rank == 0 and self._returns and call == meeting.call and not meeting.began:
            self.asked = message.arguments
        if meeting.step is not None and call == meeting.call and rank not in self._stepped:
            self._stepped.add(rank)
            self._send(rank, say.Step(call, meeting.step, what=meeting.what))
        if meeting.arrive(rank, call, message.what, now):
            self._go_on()

    def _lost(self, rank: int, link: Link, why: str) -> None:
        if self._links.get(rank) is link:
            del self._links[rank]
            self._beats.forget(rank)
            if self._meeting.lost(rank, why, self._now()):
                self._go_on()
            self._spread_broken()

    def _show(self, rank: int, asked: say.Ask) -> None:
        async def show() -> None:
            try:
                content = await asyncio.to_thread(self._there().look, asked.method, asked.arguments)
                if (link := self._links.get(rank)) is not None:
                    for frame in say.frames(say.Shown(asked.number, content)):
                        link.send(frame)
            except Exception as error:  # also what is too long: that is nobody's end, as a share would be
                self._send(rank, say.Shown(asked.number, error=say.told(error, self._name)))

        task = asyncio.get_running_loop().create_task(show())
        self._looks.add(task)
        task.add_done_callback(self._looks.discard)

    # ---------------------------------------------------------------- on the loop

    def _go_on(self) -> None:
        """The conductor need not wait for the ranks any more."""
        if self._waiting is not None:
            self._waiting.give(None, self._meeting.step_failed)

    def _tick(self) -> None:
        now = self._now()
        for rank in self._beats.silent(now):
            link = self._links[rank]
            self._lost(rank, link, say.silence(self._ranks.rank_deadline_s))
            link.close()
        self._meeting.tick(now)
        self._spread_broken()
        self._send_all(say.Beat())
        asyncio.get_running_loop().call_later(self._beats.interval_s, self._tick)

    def _spread_broken(self) -> None:
        if self._closing and not self._links:
            self._gone.give(None)
        broken = self._meeting.broken
        if broken is None or (self._meeting.step_failed is not None and not self._closing):
            return  # a call that has failed in a step ends first
        if self._waiting is not None:
            self._waiting.give(None, RankError(str(broken), broken.ranks))
        if not self._told:
            self._told = True
            if self._returns:
                log.warning("the ranks do not go on together: %s", broken)
            self._send_all(say.Broken(str(broken), broken.ranks))

    def _close(self, sentence: str) -> None:
        self._closing = True
        if not self._returns:
            self._links.pop(0, None)
            self._beats.forget(0)
            self._meeting.close(0, sentence)
        self._spread_broken()
        self._send_all(say.Bye(sentence))

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
            for frame in say.frames(message):
                link.send(frame)
        except LinkError as error:  # a share that is too large
            if self._meeting.lost(rank, str(error), self._now()):
                self._go_on()
            self._spread_broken()

    def _send_all(self, message: say.Message) -> None:
        for rank in list(self._links):
            self._send(rank, message)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
