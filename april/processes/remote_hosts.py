"""The hosts of a scheduler on its loop: who joins, what they say, what they are told, and who is missed.

What follows from any of it is decided in ``roster.py`` and in the core.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from april.config.settings import Config
from april.core import commands as do
from april.core import events as ev
from april.core.settings import EngineLimits
from april.core.state import RolloutCore
from april.core.types import Group, SampleId
from april.driver.llm import single_turn
from april.driver.local_host import LocalHost
from april.errors import ConfigError, LinkError
from april.processes.desk import HostDesk
from april.processes.joining import BEATS, Guest, guest_of, welcome_of, why_not
from april.processes.link import Link, Listener, SocketLink, bound, close_all, told_address
from april.processes.messages import AskQuiet, AskTapes, Goodbye, Now, ProtocolError, Refusal, encode
from april.processes.roster import Roster
from april.server_text import said

log = logging.getLogger("april")

HOST = "host"
"""Purpose of a connection that a host makes."""
SILENT_BEATS = 2
"""Heartbeats that a host may miss before another one gets its name."""
MOST_CUT_OFF = 2
"""Times that one process is cut off for what cannot be true: once may be an accident, and it comes back."""
TAPES_S = 10.0
"""How long a state waits for what running requests of hosts have brought."""


class HostDoor:
    """Links of hosts for a scheduler, which somebody else has made, on the scheduler's loop: give it each by
    :meth:`accept`.

    Args:
        deadline_s: a host that has said nothing for so long is lost.
        first_s: how long a scheduler without engines of its own waits for the first ones.
    """

    def __init__(self, *, deadline_s: float = 30.0, first_s: float = 600.0) -> None:
        for name, value in (("deadline_s", deadline_s), ("first_s", first_s)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise ConfigError(f"{name}: expected seconds above 0, got {value!r}")
        self.deadline_s = deadline_s
        self.first_s = first_s
        self.where = "the scheduler"
        """For messages."""
        self._accepted: Callable[[Link], None] | None = None
        self._early: list[Link] = []

    def begin(self, config: Config, *, tokenizer: bool) -> RemoteHosts:
        """The hosts of a scheduler with this configuration, which may have a tokenizer; called once, on its loop.

        Raises ConfigError if it is another scheduler's.
        """
        return RemoteHosts(config, self, tokenizer=tokenizer)

    def open(self, accepted: Callable[[Link], None]) -> None:
        """From now on ``accepted`` gets the links."""
        if self._accepted is not None:
            raise ConfigError("hosts: this is another scheduler's already; make one for each")
        self._accepted = accepted
        for link in self._early:
            accepted(link)
        self._early.clear()

    def accept(self, link: Link) -> None:
        """A host's link."""
        if self._accepted is None:
            self._early.append(link)
        else:
            self._accepted(link)

    async def close(self) -> None:
        """No host comes in any more."""


class HostListener(HostDoor):
    """Hosts join over TCP, if they have the token.

    Args:
        token: 64 hexadecimal digits, as ``secrets.token_hex(32)`` makes them. Whoever has it can join: it is never sent
            and never logged; what is said is not encrypted.
        address: "host:port"; port 0: any free one, see :attr:`address`. The default is for this machine only.
        deadline_s: a host that has said nothing for so long is lost.
        first_s: how long a scheduler without engines of its own waits for the first ones.

    Raises:
        ConfigError: an argument has a wrong form.
        LinkError: the address cannot be listened at.
    """

    def __init__(
        self, token: str, address: str = "127.0.0.1:0", *, deadline_s: float = 30.0, first_s: float = 600.0
    ) -> None:
        super().__init__(deadline_s=deadline_s, first_s=first_s)
        self._listener = Listener(token, self._joined)
        self._socket = bound(address)
        self.address = self.where = told_address(self._socket.getsockname())
        """Where it listens, with the port."""
        self._opening: asyncio.Task[str] | None = None

    def __repr__(self) -> str:
        return f"<HostListener at {self.address}>"

    def open(self, accepted: Callable[[Link], None]) -> None:
        """See :class:`HostDoor`."""
        super().open(accepted)
        self._opening = asyncio.get_running_loop().create_task(self._listener.open(self._socket))

    def _joined(self, link: SocketLink) -> None:
        assert link.hello is not None
        if link.hello.purpose == HOST:
            self.accept(link)
        else:
            log.warning("a connection from %s was refused: it is no host's", link.peer)
            link.close()

    def discard(self) -> None:
        """There is no scheduler for it after all."""
        self._socket.close()

    async def close(self) -> None:
        """See :class:`HostDoor`."""
        if self._opening is not None:
            await asyncio.wait([self._opening])  # the end of the loop may have cancelled it
            await self._listener.close()
        self._socket.close()


class RemoteHosts:
    """See above; must be used on the loop.

    Args:
        config: of the scheduler.
        door: where hosts come in.
        tokenizer: whether the scheduler has one.
    """

    def __init__(self, config: Config, door: HostDoor, *, tokenizer: bool) -> None:
        self._config = config
        self._door = door
        self._tokenizer = tokenizer
        self._guests: dict[HostDesk, Guest] = {}
        """Those that have joined."""
        self._waiting: list[Guest] = []
        """Before there is a core."""
        self._first: list[Guest] = []
        """Whose engines the core began with."""
        self._rivals: dict[str, tuple[Guest, float]] = {}
        """By name: one that wants to be the host that is here already, and since when."""
        self._cut_off: Counter[str] = Counter()
        """By a host's life: how often it has said what cannot be true."""
        self._came: asyncio.Future[None] | None = None
        self._core: RolloutCore | None = None
        self._roster: Roster | None = None
        self._collected: set[HostDesk] = set()
        self._asked = 0
        self._watchers: set[asyncio.Future[None]] = set()
        """Told whenever a host has said something or is gone."""
        self._timer: asyncio.TimerHandle | None = None
        self._looked_s: float | None = None
        """When it was last looked who is silent."""
        self._closed = False
        door.open(self._came_in)

    def __repr__(self) -> str:
        return f"<RemoteHosts {sorted(guest.name for guest in self._guests.values())}>"

    @property
    def desks(self) -> list[HostDesk]:
        """Of those that have joined; they count frames, messages and bytes."""
        return list(self._guests)

    # ---------------------------------------------------------------- for the driver

    @property
    def first_engines(self) -> list[EngineLimits]:
        """See OtherHosts."""
        return [limits for guest in self._first for limits in guest.limits]

    @property
    def servers(self) -> list[str]:
        """See OtherHosts."""
        return [name for g in self._guests.values() for name, c in g.engines.items() if not c.shares_weights]

    async def first(self) -> None:
        """Until a host has brought engines; raises ConfigError after ``first_s`` of the door."""
        log.info("there is no engine yet; hosts can join at %s", self._door.where)
        self._came = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._door.first_s):
                while not any(guest.engines for guest in self._waiting):
                    await asyncio.shield(self._came)
                    self._came = asyncio.get_running_loop().create_future()
        except TimeoutError:
            raise ConfigError(
                f"engines: no host has brought any within {self._door.first_s:g} s; start them at {self._door.where}, "
                "or give the scheduler engines of its own"
            ) from None
        finally:
            self._came = None
        guest = next(guest for guest in self._waiting if guest.engines)
        self._waiting.remove(guest)
        self._first = [guest]

    def attach(
        self,
        core: RolloutCore,
        local: LocalHost,
        post: Callable[[ev.Event], None],
        failed: Callable[[int, BaseException], None],
    ) -> Mapping[type[do.Command], Callable[[Any], None]]:
        """See OtherHosts."""
        self._core, self._post, self._failed = core, post, failed
        self._returned, self._detokenizer = local.samples.returned_elsewhere, local.functions.detokenizer
        self._roster = Roster(
            core, local.executors, functions_run=local.functions.rollout is not single_turn,
            post=post, failed=failed, collected=self._collect,
        )  # fmt: skip
        loop = asyncio.get_running_loop()
        # the driver that calls this is not made yet, and would do what follows from them
        for guest in self._first:
            loop.call_soon(self._admit, guest, True)
        for guest in self._waiting:
            loop.call_soon(self._admit, guest)
        self._waiting = []
        self._look_around()
        return self._roster.executors

    def delivered(self, samples: Iterable[SampleId]) -> None:
        """See OtherHosts."""
        assert self._roster is not None
        self._roster.delivered(samples)

    def settled(self, group: Group) -> None:
        """See OtherHosts."""
        assert self._roster is not None
        self._roster.settled(group)

    def evaluated(self, evaluation: int) -> None:
        """See OtherHosts."""
        assert self._roster is not None
        self._roster.evaluated(evaluation)

    async def quiet(self) -> None:
        """See OtherHosts."""
        sharing = [d for d, g in self._guests.items() if any(c.shares_weights for c in g.engines.values())]
        self._asked += 1
        number = self._asked
        for desk in sharing:
            desk.say(AskQuiet(number))
            self._collect(desk)
        await self._until(lambda: all(d.quieted >= number or d not in self._guests for d in sharing))

    async def catch_up(self) -> None:
        """See OtherHosts; what a host does not tell in time is told with the ends of its requests."""
        desks = list(self._guests)
        self._asked += 1
        number = self._asked
        for desk in desks:
            desk.say(AskTapes(number))
            self._collect(desk)
        try:
            async with asyncio.timeout(TAPES_S):
                await self._until(lambda: all(d.tapes_sent >= number or d not in self._guests for d in desks))
        except TimeoutError:
            late = sorted(d.name for d in desks if d.tapes_sent < number and d in self._guests)
            log.warning("hosts %s have not told what runs there; the state is without it", ", ".join(late))

    async def probed(self) -> None:
        """See OtherHosts."""
        core = self._core
        assert core is not None
        asked = [name for g in self._guests.values() for name in g.engines]
        await self._until(lambda: not any(s.probe for n in asked if (s := core.engines.states.get(n)) is not None))

    async def close(self) -> None:
        """See OtherHosts."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for desk, guest in list(self._guests.items()):
            desk.say(Goodbye("the scheduler is closed"))
            self._send(desk, guest)
        rivals = (guest for guest, _ in self._rivals.values())
        links = [guest.link for guest in (*self._guests.values(), *self._waiting, *self._first, *rivals)]
        self._guests.clear()
        await close_all(links)
        self._tell_watchers()
        await self._door.close()

    # ---------------------------------------------------------------- hosts that come

    def _came_in(self, link: Link) -> None:
        def first_frame(frame: bytes) -> None:
            timer.cancel()
            try:
                self._meet(guest_of(link, frame))
            except ProtocolError as error:
                self._refuse(link, str(error))

        def silent() -> None:
            log.warning("a host has connected and said nothing; it is closed")
            link.close()

        timer = asyncio.get_running_loop().call_later(self._door.deadline_s, silent)
        link.open(first_frame, lambda _: timer.cancel())

    def _meet(self, guest: Guest) -> None:
        link = guest.link
        if (why := self._why_not(guest)) is not None:
            self._refuse(link, why)
        elif self._roster is not None:
            self._admit(guest)
        else:
            self._waiting.append(guest)
            link.open(lambda _: None, lambda _: self._left_early(guest))
            if self._came is not None and not self._came.done():
                self._came.set_result(None)

    def _left_early(self, guest: Guest) -> None:
        if guest in self._waiting:
            self._waiting.remove(guest)

    def _refuse(self, link: Link, why: str) -> None:
        log.warning("a host was refused: %s", said(why))
        link.send(encode([Refusal(why)]))
        link.close()

    def _why_not(self, guest: Guest) -> str | None:
        """Why a host cannot join, or None."""
        if self._closed:
            return "the scheduler is closed"
        if (times := self._cut_off[guest.joined.life]) >= MOST_CUT_OFF:
            return f"host {guest.name} was cut off {times} times for what cannot be true: start its process anew"
        if (why := next(why_not(guest, self._config, self._core, tokenizer=self._tokenizer), None)) is not None:
            return why
        return None if self._roster is None else self._roster.why_not(guest.engines)

    def _admit(self, guest: Guest, known: bool = False) -> None:
        core, roster = self._core, self._roster
        assert core is not None
        assert roster is not None
        if not known and (why := self._why_not(guest)) is not None:
            self._refuse(guest.link, why)
            return
        before = next((g for g in self._guests.values() if g.name == guest.name), None)
        if before is not None and before.joined.life != guest.joined.life:
            self._doubt(before, guest)
            return
        welcome = welcome_of(guest.name, core, self._config, self._door.deadline_s)
        for old, earlier in list(self._guests.items()):
            if earlier is before:  # it has given that connection up
                before.link.close()
                del self._guests[old]
        desk = HostDesk(
            core, guest.name, guest.limits, functions=guest.joined.functions, failed=self._failed,
            returned=self._returned, detokenizer=self._detokenizer,
        )  # fmt: skip
        self._guests[desk] = guest
        guest.link.send(encode([welcome]))
        log.info("host %s has joined with %d engines", guest.name, len(guest.engines))
        for event in roster.join(desk, self._now(), known=known):
            self._post(event)
        guest.link.open(lambda frame: self._heard(desk, frame), lambda why: self._lost(desk, why))

    # ---------------------------------------------------------------- two of one name

    def _doubt(self, before: Guest, guest: Guest) -> None:
        """Another process joins under the name of one that is here: which is it, if that one has died unnoticed?"""
        if guest.name in self._rivals:
            self._refuse(guest.link, f"a host {guest.name} is about to join already, from {before.link.peer}")
            return
        self._rivals[guest.name] = guest, self._now()
        guest.link.open(lambda _: None, lambda _: self._withdraw(guest))

    def _withdraw(self, guest: Guest) -> None:
        if self._rivals.get(guest.name, (None,))[0] is guest:
            del self._rivals[guest.name]

    def _lives(self, before: Guest) -> None:
        """It has said something: whoever wanted its name is another one."""
        guest, _ = self._rivals.pop(before.name)
        self._refuse(
            guest.link,
            f"there is a host {before.name} already, at {before.link.peer}, and it lives; this one is at "
            f"{guest.link.peer}: give each a name of its own",
        )

    def _make_room(self) -> None:
        """Whoever has been silent since another one came under its name has died."""
        for name, (guest, since) in list(self._rivals.items()):
            if self._now() - since < SILENT_BEATS * self._door.deadline_s / BEATS:
                continue
            for desk, before in list(self._guests.items()):
                if before.name == name:
                    desk.say(Goodbye(f"another host has joined as {name}, from {guest.link.peer}"))
                    self._send(desk, before)
                    before.link.close()
                    self._lost(desk, f"it is silent, and another host has joined as {name}")

    # ---------------------------------------------------------------- what they say, and are told

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _heard(self, desk: HostDesk, frame: bytes) -> None:
        guest = self._guests.get(desk)
        if guest is None:
            return
        assert self._roster is not None
        self._roster.heard(desk, self._now())
        if guest.name in self._rivals:
            self._lives(guest)
        try:
            for event in desk.receive(frame):
                self._post(event)
        except ProtocolError as error:
            self._cut_off[guest.joined.life] += 1
            guest.link.close()
            self._lost(desk, str(error))
            return
        if desk.leaves is not None:
            guest.link.close()
            self._lost(desk, desk.leaves, for_good=True)
        self._tell_watchers()

    def _lost(self, desk: HostDesk, why: str, *, for_good: bool = False) -> None:
        guest = self._guests.pop(desk, None)
        if guest is None or self._closed:
            return
        assert self._roster is not None
        level = logging.INFO if for_good and desk.idle else logging.WARNING
        log.log(level, "host %s is %s: %s", guest.name, "gone" if for_good else "lost", said(why))
        for event in self._roster.lost(desk, why, for_good=for_good):
            self._post(event)
        self._tell_watchers()
        if guest.name in self._rivals:
            self._admit(self._rivals.pop(guest.name)[0])

    def _collect(self, desk: HostDesk) -> None:
        """It has something to send, at the end of this turn of the loop."""
        if not self._collected:
            asyncio.get_running_loop().call_soon(self._flush)
        self._collected.add(desk)

    def _flush(self) -> None:
        collected, self._collected = self._collected, set()
        for desk in collected:
            if (guest := self._guests.get(desk)) is not None:
                self._send(desk, guest)

    def _send(self, desk: HostDesk, guest: Guest) -> None:
        try:
            if (frame := desk.take()) is not None:
                guest.link.send(frame)
        except LinkError as error:
            guest.link.close()
            self._lost(desk, str(error))

    def _look_around(self) -> None:
        """Who has been silent for too long is lost; all others hear that this side lives."""
        assert self._roster is not None
        assert self._core is not None
        deadline_s, now = self._door.deadline_s, self._now()
        if self._looked_s is not None and now - self._looked_s > deadline_s / 2:
            self._roster.begin_anew(now)
            self._rivals = {name: (guest, now) for name, (guest, _) in self._rivals.items()}
        self._looked_s = now
        for desk, why in self._roster.overdue(now, deadline_s).items():
            if desk in self._guests:
                self._guests[desk].link.close()
                self._lost(desk, why)
        self._make_room()
        for desk in self._guests:
            desk.say(Now(self._core.clock.current))
            self._collect(desk)
        self._timer = asyncio.get_running_loop().call_later(deadline_s / BEATS, self._look_around)

    async def _until(self, done: Callable[[], bool]) -> None:
        while not (done() or self._closed):
            watcher = asyncio.get_running_loop().create_future()
            self._watchers.add(watcher)
            try:
                await watcher
            finally:
                self._watchers.discard(watcher)

    def _tell_watchers(self) -> None:
        for watcher in self._watchers:
            if not watcher.done():
                watcher.set_result(None)

