"""Links over calls of an actor, without Ray: on virtual time, with an actor whose calls take any time and may fail."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import pytest

from april.processes.actor_link import HEARTBEAT_S, CallingLink, ServedLink
from april.processes.link import Hello
from april.testing.virtual_clock import run_virtual


class Actor:
    """The core's end behind calls: each takes a while, and those that are made together overtake each other."""

    def __init__(self, served: ServedLink, seed: int = 0) -> None:
        self.served = served
        self.calls: list[str] = []
        self.dead = False
        self._random = random.Random(seed)

    async def _call(self, name: str, made: Callable[[], Any]) -> Any:
        self.calls.append(name)
        await asyncio.sleep(self._random.uniform(0.001, 0.1))
        if self.dead:
            raise OSError("the actor died")
        answer = made()
        if asyncio.iscoroutine(answer):
            answer = await answer
        if self.dead:
            raise OSError("the actor died")
        return answer

    def poll(self) -> Awaitable[Sequence[bytes] | None]:
        """A question for frames."""
        return self._call("poll", self.served.poll)

    def take(self, frames: Sequence[bytes]) -> Awaitable[bool]:
        """Frames of the other end."""
        return self._call("take", lambda: self.served.take(list(frames)))

    def leave(self) -> Awaitable[None]:
        """Its end."""
        return self._call("leave", lambda: self.served.lose("it has left"))


class End:
    """What one end was told."""

    def __init__(self, link: ServedLink | CallingLink) -> None:
        self.frames: list[bytes] = []
        self.lost: list[str] = []
        link.open(self.frames.append, self.lost.append)


def linked(program: Callable[[Actor, CallingLink], Coroutine[Any, Any, None]], seed: int = 0) -> None:
    """Run a test's program on virtual time, and close what it leaves open."""

    async def main() -> None:
        actor = Actor(ServedLink(Hello("rank", "1")), seed)
        calling = CallingLink(actor)
        await program(actor, calling)
        actor.served.close()
        calling.close()
        await asyncio.sleep(HEARTBEAT_S + 1.0)

    run_virtual(main())


@pytest.mark.parametrize("seed", range(20))
def test_frames_keep_their_order_both_ways(seed: int) -> None:
    """Each arrives once, whatever the calls take; what is sent meanwhile is one call."""

    async def program(actor: Actor, calling: CallingLink) -> None:
        chance = random.Random(seed)
        there, here = End(actor.served), End(calling)
        sent = [str(i).encode() for i in range(500)]
        for frame in sent:
            calling.send(frame)
            actor.served.send(frame)
            if chance.random() < 0.1:
                await asyncio.sleep(chance.uniform(0.0, 0.2))
        await asyncio.sleep(1.0)
        assert there.frames == here.frames == sent
        assert len(actor.calls) < 300
        assert there.lost == here.lost == []

    linked(program, seed)


def test_an_end_that_closes_sends_what_it_has_said() -> None:
    """The other end gets all of it, then hears of the end, once; nobody is called at the end that closed."""

    async def program(actor: Actor, calling: CallingLink) -> None:
        there, here = End(actor.served), End(calling)
        for frame in (b"a", b"b"):
            calling.send(frame)
        calling.close()
        actor.served.send(b"late")
        await asyncio.sleep(1.0)
        assert (there.frames, there.lost) == ([b"a", b"b"], ["it has left"])
        assert (here.frames, here.lost) == ([], [])

    linked(program)


def test_the_core_closes() -> None:
    """What it has said arrives, and what comes later is wanted by nobody."""

    async def program(actor: Actor, calling: CallingLink) -> None:
        there, here = End(actor.served), End(calling)
        await asyncio.sleep(0.5)
        actor.served.send(b"bye")
        actor.served.close()
        calling.send(b"late")
        await asyncio.sleep(1.0)
        assert here.frames == [b"bye"]
        assert here.lost == ["the core has closed the connection"]
        assert (there.frames, there.lost) == ([], [])

    linked(program)


def test_a_core_that_died_is_told_of_once() -> None:
    """Though both calls fail; nothing that is sent afterwards raises."""

    async def program(actor: Actor, calling: CallingLink) -> None:
        here = End(calling)
        calling.send(b"a")
        actor.dead = True
        await asyncio.sleep(HEARTBEAT_S + 1.0)
        calling.send(b"b")
        assert here.lost == ["the core's actor cannot be reached: OSError: the actor died"]

    linked(program)


def test_frames_that_came_before_anybody_listened() -> None:
    """They wait, in their order; an end that was lost meanwhile is told of behind them."""

    async def program(actor: Actor, calling: CallingLink) -> None:
        actor.served.take([b"a", b"b"])
        actor.served.lose("it died")
        there = End(actor.served)
        await asyncio.sleep(0.0)
        assert (there.frames, there.lost) == ([b"a", b"b"], ["it died"])

    linked(program)
