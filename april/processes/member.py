"""A rank: one link to the center, over which it makes its calls and hears their ends."""

from __future__ import annotations

import asyncio
import itertools
from functools import partial
from typing import Any

from april.driver.loop_thread import LoopThread, Reply
from april.driver.user_code import describe
from april.errors import LinkError, RankError
from april.processes import rank_messages as say
from april.processes.center import Center
from april.processes.link import RANK, Heartbeats, Hello, Link, close_all, connect, memory_links
from april.processes.ranks import MeetingPoint, Ranks

TRY_AGAIN_S = 0.2
"""The pause between two attempts to reach a center that does not listen yet."""


class Member:
    """The end of a link to the center. Messages of a call are kept until the call has ended here, so an interrupted
    wait loses none.

    Args:
        name: who is at the center, for messages.
        local: the center, if it is in this process.
    """

    def __init__(self, ranks: Ranks, name: str = "rank 0", local: Center | None = None) -> None:
        self._ranks, self._name, self._local = ranks, name, local
        self.first = 0
        """Number of its first call."""
        self._beats = Heartbeats[int](ranks.rank_deadline_s)
        self._link: Link | None = None
        self.broken: RankError | None = None
        """The reason for which the ranks do not go on together."""
        self.token = ""
        """That all ranks know."""
        self._gone: str | None = None
        """The reason for which the center cannot be asked any more."""
        self._come: dict[int, list[say.Step | say.Answer]] = {}
        """Messages of the calls that have not ended here."""
        self._parts: dict[tuple[int, bool], list[bytes]] = {}
        """What came ahead of an answer, or of what is shown."""
        self._made = (-1, "")
        """The last call."""
        self._ended = 0
        """Calls that have ended here."""
        self._waiting: list[tuple[int, int, Reply[say.Step | say.Answer]]] = []
        """The waits for messages: call, index, reply."""
        self._asked: dict[int, Reply[bytes]] = {}
        self._numbers = itertools.count()
        self._thread = LoopThread("april-ranks") if local is None else local.thread

    # ---------------------------------------------------------------- the trainer

    def open(self, point: MeetingPoint) -> None:
        """Connect to the center; raises RankError if it does not listen in time."""

        async def join_here() -> None:
            assert self._local is not None
            here, there = memory_links()
            self.join(here)
            self._local.join(self._ranks.rank, self._ranks.share, there)

        async def join() -> None:
            hello = Hello(RANK, f"{self._ranks.rank} {self._ranks.share}")
            loop = asyncio.get_running_loop()
            end = loop.time() + self._ranks.rank_timeout_s
            while True:
                try:
                    link = await connect(address, token, hello)
                    try:
                        async with asyncio.timeout(self._beats.deadline_s):
                            frames = await _first_frames(link)
                    except TimeoutError:
                        link.close()
                        raise LinkError(say.silence(self._beats.deadline_s)) from None
                    self.join(link)
                    for frame in frames:
                        self._frame(frame)
                    return
                except LinkError as error:
                    if point.listens or loop.time() > end:
                        raise RankError(f"{self._name} cannot be reached: {error}", (0,)) from None
                await asyncio.sleep(TRY_AGAIN_S)

        if self._local is not None:
            self._thread.run(join_here)
            return
        address, token = point.find()
        self.token = token
        self._thread.run(join)

    def arrive(self, call: int, what: str, arguments: bytes = b"") -> None:
        """Make a call; ``arguments``: of rank 0, where whoever carries it out has none of them."""
        self.raise_if_broken()

        def begin() -> None:
            if self._made[0] == call and self._made[1] != what:
                self._come.pop(call, None)  # it was for the call that was interrupted; the center says that they differ
            self._made = (call, what)
            self._send(say.Arrive(call, what, arguments))

        self._thread.call(begin)

    def next(self, call: int, index: int) -> say.Step | say.Answer:
        """The message number ``index`` of a call, when it is there; raises RankError."""

        def begin(reply: Reply[say.Step | say.Answer]) -> None:
            self._waiting.append((call, index, reply))
            self._look_up()

        return self._thread.wait_for(begin)

    def done(self, call: int, step: str, error: BaseException | None = None) -> None:
        """A step is carried out, or could not be, which ends the call for all; said twice it is heard once."""
        said = say.Done(call, step, "" if error is None else describe(error))
        self._thread.call(lambda: self._send(said))

    def end(self, call: int) -> None:
        """The call has ended here, and those before it."""

        def end() -> None:
            self._ended = call + 1
            for number in [n for n in self._come if n <= call]:
                del self._come[number]

        self._thread.call_later(end)

    def leave(self, call: int) -> None:
        """An interrupt has taken this rank out of a call."""
        self._thread.call_later(lambda: self._send(say.Leave(call)))

    def ask(self, method: str, *arguments: Any) -> bytes:
        """Return the center's answer to a look; raise its error, or RankError if it is gone."""

        def begin(reply: Reply[bytes]) -> None:
            number = next(self._numbers)
            if self._gone is not None:
                reply.give(None, RankError(self._gone, (0,)))
                return
            self._asked[number] = reply
            self._send(say.Ask(number, method, list(arguments)))

        return self._thread.wait_for(begin)

    def raise_if_broken(self) -> None:
        """RankError if the ranks do not go on together."""
        if self.broken is not None:
            raise RankError(str(self.broken), self.broken.ranks)

    def close(self, error: BaseException | None) -> None:
        """Leave; with the center, whose end tells the others, where that is in this process."""
        if self._local is not None:
            return
        end = partial(self._end, "" if error is None else describe(error))
        ended = False
        try:
            if self._thread.alive and self._thread.here:
                self._thread.run(end)
                ended = True
        finally:  # an interrupt ends only the wait
            self._thread.begin_to_stop(None if ended else end)
            self._thread.stop()

    # ---------------------------------------------------------------- on the loop

    def join(self, link: Link) -> None:
        """The center is there, on a link."""
        self._link = link
        self._beats.hear(0, self._now())
        link.open(self._frame, self._lost)
        self._tick()

    def _frame(self, frame: bytes) -> None:
        self._beats.hear(0, self._now())
        try:
            message = say.decode(frame)
        except LinkError as wrong:
            self._lost(str(wrong))
            return
        if isinstance(message, (say.Answer, say.Shown)) and self._parts:
            shown = isinstance(message, say.Shown)
            parts = self._parts.pop((message.number if isinstance(message, say.Shown) else message.call, shown), [])
            message.content = b"".join((*parts, message.content))
        match message:
            case say.Joined(call):
                self.first = call
            case say.Step(call) | say.Answer(call) if call >= self._ended:
                number, what = self._made
                # of the call that this one is made instead of: the center will say that they differ
                if call != number or message.what in ("", what):
                    self._come.setdefault(call, []).append(message)
            case say.Part(number, content, shown):
                self._parts.setdefault((number, shown), []).append(content)
            case say.Shown(number, content):
                asked = self._asked.pop(number)
                asked.give(content, None if message.error is None else say.error_of(message.error))
            case say.Broken(sentence, ranks):
                self._break(RankError(sentence, ranks))
            case say.Bye(""):
                self._break(RankError(f"{self._name} has closed its scheduler", (0,)))
        self._look_up()

    def _lost(self, why: str) -> None:
        if self._gone is not None:
            return
        self._gone = f"{self._name} is gone: {why}"
        self._break(RankError(self._gone, (0,)))
        asked, self._asked = self._asked, {}
        for reply in asked.values():
            reply.give(None, RankError(self._gone, (0,)))

    def _break(self, error: RankError) -> None:
        if self.broken is None:
            self.broken = error
        self._look_up()

    def _look_up(self) -> None:
        """Give each wait what has come; what has come before all broke still counts."""
        waiting, self._waiting = self._waiting, []
        for call, index, reply in waiting:
            come = self._come.get(call, [])
            if index < len(come):
                reply.give(come[index])
            elif self.broken is not None:
                reply.give(None, RankError(str(self.broken), self.broken.ranks))
            else:
                self._waiting.append((call, index, reply))

    def _tick(self) -> None:
        if self._gone is None:
            if self._beats.silent(self._now()):
                self._lost(say.silence(self._beats.deadline_s))
            self._send(say.Beat())
            asyncio.get_running_loop().call_later(self._beats.interval_s, self._tick)

    async def _end(self, sentence: str) -> None:
        self._send(say.Bye(sentence))
        self._gone = "this rank has closed its scheduler"
        if self._link is not None:
            await close_all([self._link])

    def _send(self, message: say.Message) -> None:
        if self._link is not None and self._gone is None:
            self._link.send(say.encode(message))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


async def _first_frames(link: Link) -> list[bytes]:
    """Return the first frames of the center to a rank that it takes; raise LinkError if it does not."""
    came: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    frames: list[bytes] = []

    def heard(frame: bytes) -> None:
        frames.append(frame)
        if not came.done():
            came.set_result(None)

    def lost(why: str) -> None:
        if not came.done():
            came.set_exception(LinkError(why))

    link.open(heard, lost)
    await came
    return frames
