"""The hosts of a scheduler: where they come in, who may join, where each command goes, and what the end of one means.

A host is known by its name. Invariant: a command for an engine whose host is gone is answered
here, at once, as an engine that does not answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import msgspec

from april.config.engine_fit import why_unfit
from april.config.settings import Config
from april.core import commands as do
from april.core import events as ev
from april.core.sampling import LogprobKind, SamplingParams
from april.core.settings import EngineLimits
from april.core.state import RolloutCore
from april.core.types import SETTLED, EngineFinish, Group, SampleId
from april.driver.llm import single_turn
from april.driver.local_host import LocalHost, limits_from
from april.engines.protocol import Capabilities
from april.errors import ConfigError, EngineUnreachable, LinkError
from april.processes.desk import HostDesk
from april.processes.link import BEATS, HOST, Heartbeats, Link, Listener, SocketLink, bound, close_all, told_address
from april.processes.messages import (
    PROTOCOL,
    AskQuiet,
    AskTapes,
    Goodbye,
    Joined,
    Now,
    ProtocolError,
    Refusal,
    Welcome,
    decode_from_host,
    encode,
)
from april.processes.plain_values import why_not_plain
from april.server_text import clean


@dataclass(slots=True, eq=False)
class Guest:
    """A connection of a host that wants to join, or has joined."""

    link: Link
    joined: Joined
    engines: Mapping[str, Capabilities]
    """Capabilities of its engines, by their names in the core."""
    desk: HostDesk = field(init=False)
    """The core's half of it, once it has joined."""

    @property
    def name(self) -> str:
        """The host's own name."""
        return self.joined.name

    @property
    def limits(self) -> list[EngineLimits]:
        """The limits of its engines, for the core."""
        written = {f"{self.name}/{card.name}" for card in self.joined.engines if card.written}
        return [replace(limits_from(n, c), written=n in written) for n, c in self.engines.items()]


# -------------------------------------------------------------------- the core's process


def guest_of(link: Link, frame: bytes) -> Guest:
    """Return who has sent this first frame; raise ProtocolError."""
    messages = decode_from_host(frame)
    joined = messages[0] if len(messages) == 1 else None
    if not isinstance(joined, Joined):
        raise ProtocolError("it does not say who it is")
    if joined.protocol != PROTOCOL:
        raise ProtocolError(f"host {joined.name} is of another version of april; install the same on both sides")
    known = {f.name for f in fields(Capabilities)}
    try:
        engines = {
            f"{joined.name}/{card.name}": msgspec.convert(
                {k: v for k, v in card.capabilities.items() if k in known}, Capabilities
            )
            for card in joined.engines
        }
    except msgspec.ValidationError as error:
        raise ProtocolError(f"host {joined.name}: an engine's capabilities cannot be read: {error}") from None
    return Guest(link, joined, engines)


def why_not(
    guest: Guest, config: Config, core: RolloutCore | None, *, tokenizer: bool, attachments: Sequence[str] = ()
) -> Iterator[str]:
    """Yield what stands against a host, in sentences; without a ``core`` (yet) only what is known of it.

    ``tokenizer``: whether the scheduler has one. ``attachments``: kinds that prompts may have.
    """
    joined, name = guest.joined, f"host {guest.name}"
    if not joined.name or "/" in joined.name or not joined.name.isprintable():
        yield f"host {joined.name!r}: its name must be printable, and without a slash"
    if not guest.engines and not joined.functions:
        yield f"{name} has neither engines nor functions"
    if len(guest.engines) < len(joined.engines):
        yield f"{name}: names of engines must be unique, got {[card.name for card in joined.engines]}"
    if tokenizer and not joined.tokenizer:
        yield f"{name} needs a tokenizer, as the scheduler has one"
    yield from why_unfit(config, guest.engines, attachments)
    if core is None:
        return
    for limits in guest.limits:
        if (why := core.engines.unfit(limits)) is not None:
            yield why
    if joined.functions:
        s = core.settings
        here = (s.has_reward and not s.group_reward, s.group_reward, s.has_filter)
        there = (joined.reward, joined.group_reward, joined.filter)
        for function, mine, theirs in zip(("reward", "group_reward", "filter"), here, there, strict=True):
            if mine != theirs:
                has, lacks = ("the scheduler", "it") if mine else ("it", "the scheduler")
                yield f"{name}: {has} has a function {function}, and {lacks} has none; give both the same"


def welcome_of(
    name: str, core: RolloutCore, config: Config, deadline_s: float, sampling: SamplingParams | None = None
) -> Welcome:
    """Return what a host that joins is told; ``sampling``: if it is not the configuration's as it stands there."""
    s, table = core.settings, core.engines
    return Welcome(
        name=name,
        version=core.clock.current,
        eos_token_ids=tuple(sorted(table.eos_token_ids)),
        vocab_size=table.vocab_size,
        max_context=table.max_context,
        max_response_len=s.max_response_len,
        abort_resend_s=s.abort_resend_s,
        abort_deadline_s=s.abort_deadline_s,
        deadline_s=deadline_s,
        sampling=config.sampling_params() if sampling is None else sampling,
        any_temperature=all(LogprobKind(e.limits.logprob_kind).follows_temperature for e in table.states.values()),
        allow_mismatch=config.allow_mismatch,
        function_timeout_s=config.function_timeout_s,
        warn_after_s=config.warned_after_s,
        stall_timeout_s=config.stall_timeout_s,
    )


log = logging.getLogger("april")

HERE = ""
"""Name of the host in the core's own process."""

SILENT_BEATS = 2
"""Heartbeats that a host may miss before another one gets its name."""
MOST_CUT_OFF = 2
"""Times that one process is cut off for what cannot be true: once may be an accident, and it comes back."""
TAPES_S = 10.0
"""The longest wait of a state for what running requests of hosts have brought."""


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
        """The address, for messages."""
        self._accepted: Callable[[Link], None] | None = None
        self._early: list[Link] = []

    def begin(
        self,
        config: Config,
        *,
        tokenizer: bool,
        sampling: SamplingParams | None = None,
        attachments: Sequence[str] = (),
    ) -> RemoteHosts:
        """The hosts of a scheduler with this configuration, which may have a tokenizer; called once, on its loop.

        ``sampling`` of its calls, if it is not that of the configuration; ``attachments``: kinds that its prompts may
        have. Raises ConfigError if it is another scheduler's.
        """
        return RemoteHosts(config, self, tokenizer=tokenizer, sampling=sampling, attachments=attachments)

    def open(self, accepted: Callable[[Link], None]) -> None:
        """Give all links to ``accepted`` from now on."""
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
        """The address, with the port."""
        self._opening: asyncio.Task[str] | None = None

    def __repr__(self) -> str:
        return f"<HostListener at {self.address}>"

    def open(self, accepted: Callable[[Link], None]) -> None:
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
        if self._opening is not None:
            await asyncio.wait([self._opening])  # the end of the loop may have cancelled it
            await self._listener.close()
        self._socket.close()


class RemoteHosts:
    """The hosts of a scheduler, on its loop: who is here, where each command goes, and what the end of a host means.

    Args:
        config: of the scheduler.
        door: where hosts come in.
        tokenizer: whether the scheduler has one.
        sampling: of the scheduler's calls; None: that of its configuration.
        attachments: kinds that its prompts may have.
    """

    def __init__(
        self, config: Config, door: HostDoor, *, tokenizer: bool, sampling: SamplingParams | None = None,
        attachments: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self._config = config
        self._door = door
        self._tokenizer, self._sampling, self._attachments = tokenizer, sampling, attachments
        self._guests: dict[str, Guest] = {}
        """The hosts that have joined, by name."""
        self._waiting: list[Guest] = []
        """Before there is a core."""
        self._first: list[Guest] = []
        """The hosts whose engines the core began with."""
        self._rivals: dict[str, tuple[Guest, float]] = {}
        """Another process that joins under the name of a host that is here, and since when."""
        self._cut_off: Counter[str] = Counter()
        """Times that a host's life has said what cannot be true."""
        self._came: asyncio.Future[None] | None = None
        self._core: RolloutCore | None = None
        self._beats = Heartbeats[Guest](door.deadline_s)
        self._owners: dict[str, Guest | None] = {}
        """The hosts of all engines that were ever brought; None means that the host is gone."""
        self._homes: dict[int, str] = {}
        """The hosts that run the functions of each group."""
        self._groups: dict[int, Group] = {}
        """The groups that other hosts have heard of."""
        self._at_home: Counter[str] = Counter()
        self._warned = False
        self._collected: dict[Guest, None] = {}
        self._asked = 0
        self._watchers: set[asyncio.Future[None]] = set()
        """Told whenever a host has said something or is gone."""
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        door.open(self._came_in)

    def __repr__(self) -> str:
        return f"<RemoteHosts {sorted(self._guests)}>"

    @property
    def desks(self) -> list[HostDesk]:
        """The connections of hosts that have joined; they count frames, messages and bytes."""
        return [guest.desk for guest in self._guests.values()]

    # ---------------------------------------------------------------- for the driver

    @property
    def first_engines(self) -> list[EngineLimits]:
        return [limits for guest in self._first for limits in guest.limits]

    @property
    def servers(self) -> list[str]:
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
        self._core, self._post, self._failed, self._local = core, post, failed, local.executors
        self._returned, self._detokenizer = local.samples.returned_elsewhere, local.functions.detokenizer
        functions_run = local.functions.rollout is not single_turn
        loop = asyncio.get_running_loop()
        # the driver that calls this is not made yet, and would do what follows from them
        for guest in self._first:
            loop.call_soon(self._admit, guest, True)
        for guest in self._waiting:
            loop.call_soon(self._admit, guest)
        self._waiting = []
        self._look_around()
        by_sample = self._for_sample if functions_run else self._here
        return {
            do.StartSample: by_sample,
            do.CallCompleted: self._for_call if functions_run else self._here,
            do.CancelSample: self._cancel,
            do.ScoreSample: self._for_sample,
            do.ScoreGroup: self._for_group,
            do.JudgeGroup: self._for_group,
            do.Submit: self._submit,
            do.Abort: self._for_engine,
            do.Fence: self._for_engine,
            do.ProbeEngine: self._for_engine,
            do.PauseEngine: self._for_engine,
            do.LoadEngine: self._for_engine,
            do.ResumeEngine: self._for_engine,
        }

    async def quiet(self) -> None:
        sharing = [g for g in self._guests.values() if any(c.shares_weights for c in g.engines.values())]
        number = self._ask(sharing, AskQuiet)
        await self._until(lambda: all(g.desk.quieted >= number or not self._is_here(g) for g in sharing))

    async def catch_up(self) -> None:
        """Ask for what runs on hosts; whoever does not tell in time tells it with the ends of its requests."""
        guests = list(self._guests.values())
        number = self._ask(guests, AskTapes)

        def late() -> list[str]:
            return sorted(g.name for g in guests if g.desk.tapes_sent < number and self._is_here(g))

        try:
            async with asyncio.timeout(TAPES_S):
                await self._until(lambda: not late())
        except TimeoutError:
            log.warning("hosts %s have not told what runs there; the state is without it", ", ".join(late()))

    def _ask(self, guests: Iterable[Guest], question: type[AskQuiet | AskTapes]) -> int:
        """Ask hosts something; return the number of the question."""
        self._asked += 1
        for guest in guests:
            guest.desk.say(question(self._asked))
            self._collect(guest)
        return self._asked

    def _is_here(self, guest: Guest) -> bool:
        return self._guests.get(guest.name) is guest

    async def probed(self) -> None:
        core = self._core
        assert core is not None
        asked = [name for g in self._guests.values() for name in g.engines]
        await self._until(lambda: not any(s.probe for n in asked if (s := core.engines.states.get(n)) is not None))

    async def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for guest in list(self._guests.values()):
            guest.desk.say(Goodbye("the scheduler is closed"))
            self._send(guest)
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
        elif self._core is not None:
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
        log.warning("a host was refused: %s", clean(why))
        link.send(encode([Refusal(why)]))
        link.close()

    def _why_not(self, guest: Guest) -> str | None:
        """Return why a host cannot join, or None."""
        if self._closed:
            return "the scheduler is closed"
        if (times := self._cut_off[guest.joined.life]) >= MOST_CUT_OFF:
            return f"host {guest.name} was cut off {times} times for what cannot be true: start its process anew"
        whys = why_not(guest, self._config, self._core, tokenizer=self._tokenizer, attachments=self._attachments)
        if (why := next(whys, None)) is not None:
            return why
        ours = () if self._core is None else self._core.engines.states.keys() - self._owners
        return next((f"there is an engine {name} already" for name in guest.engines if name in ours), None)

    def _admit(self, guest: Guest, known: bool = False) -> None:
        core = self._core
        assert core is not None
        if not known and (why := self._why_not(guest)) is not None:
            self._refuse(guest.link, why)
            return
        before = self._guests.get(guest.name)
        if before is not None and before.joined.life != guest.joined.life:
            self._doubt(before, guest)
            return
        welcome = welcome_of(guest.name, core, self._config, self._door.deadline_s, self._sampling)
        guest.desk = HostDesk(
            core, guest.name, guest.limits, functions=guest.joined.functions, failed=self._failed,
            returned=self._returned, detokenizer=self._detokenizer,
        )  # fmt: skip
        guest.link.send(encode([welcome]))
        log.info("host %s has joined with %d engines", guest.name, len(guest.engines))
        if before is not None:  # it has given that connection up
            before.link.close()
            for event in self._end(before, "it has joined anew"):
                self._post(event)
        self._guests[guest.name] = guest
        self._beats.hear(guest, self._now())
        self._owners.update(dict.fromkeys(guest.engines, guest))
        limits = guest.limits
        if limits and (not known or any(engine.written for engine in limits)):
            self._post(ev.EnginesJoined(limits))
        guest.link.open(lambda frame: self._heard(guest, frame), lambda why: self._lost(guest, why))

    # ---------------------------------------------------------------- two of one name

    def _doubt(self, before: Guest, guest: Guest) -> None:
        """Let another process that joins under a host's name wait until that host is heard or known to be silent."""
        if guest.name in self._rivals:
            self._refuse(guest.link, f"a host {guest.name} is about to join already, from {before.link.peer}")
            return
        self._rivals[guest.name] = guest, self._now()
        guest.link.open(lambda _: None, lambda _: self._withdraw(guest))

    def _withdraw(self, guest: Guest) -> None:
        if self._rivals.get(guest.name, (None,))[0] is guest:
            del self._rivals[guest.name]

    def _lives(self, before: Guest) -> None:
        """Refuse whoever wanted the name of a host that has said something."""
        guest, _ = self._rivals.pop(before.name)
        self._refuse(
            guest.link,
            f"there is a host {before.name} already, at {before.link.peer}, and it lives; this one is at "
            f"{guest.link.peer}: give each a name of its own",
        )

    def _make_room(self) -> None:
        """End hosts that have been silent since another process came under their name, and admit that one."""
        for name, (guest, since) in list(self._rivals.items()):
            if self._now() - since < SILENT_BEATS * self._door.deadline_s / BEATS:
                continue
            if (before := self._guests.get(name)) is not None:
                before.desk.say(Goodbye(f"another host has joined as {name}, from {guest.link.peer}"))
                self._send(before)
                before.link.close()
                self._lost(before, f"it is silent, and another host has joined as {name}")

    # ---------------------------------------------------------------- what they say, and are told

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _heard(self, guest: Guest, frame: bytes) -> None:
        if not self._is_here(guest):
            return
        desk = guest.desk
        self._beats.hear(guest, self._now())
        if guest.name in self._rivals:
            self._lives(guest)
        try:
            for event in desk.receive(frame):
                self._post(event)
        except ProtocolError as error:
            self._cut_off[guest.joined.life] += 1
            guest.link.close()
            self._lost(guest, str(error))
            return
        if desk.leaves is not None:
            guest.link.close()
            self._lost(guest, desk.leaves, for_good=True)
        self._tell_watchers()

    def _lost(self, guest: Guest, why: str, *, for_good: bool = False) -> None:
        if self._closed or not self._is_here(guest):
            return
        level = logging.INFO if for_good and guest.desk.idle else logging.WARNING
        log.log(level, "host %s is %s: %s", guest.name, "gone" if for_good else "lost", clean(why))
        for event in self._end(guest, why, for_good=for_good):
            self._post(event)
        self._tell_watchers()
        if guest.name in self._rivals:
            self._admit(self._rivals.pop(guest.name)[0])

    def _collect(self, guest: Guest) -> None:
        """Send at the end of this turn of the loop."""
        if not self._collected:
            asyncio.get_running_loop().call_soon(self._flush)
        self._collected[guest] = None

    def _flush(self) -> None:
        collected, self._collected = self._collected, {}
        for guest in filter(self._is_here, collected):
            self._send(guest)

    def _send(self, guest: Guest) -> None:
        try:
            while (frame := guest.desk.take()) is not None:
                guest.link.send(frame)
        except LinkError as error:
            guest.link.close()
            self._lost(guest, str(error))

    def _look_around(self) -> None:
        """Give up hosts that are silent for too long, and tell all others that this side lives."""
        assert self._core is not None
        now, beats = self._now(), self._beats
        late = self._overdue(now)
        if beats.paused:
            self._rivals = {name: (guest, now) for name, (guest, _) in self._rivals.items()}
        for guest, why in late.items():
            guest.link.close()
            self._lost(guest, why)
        self._make_room()
        for guest in self._guests.values():
            guest.desk.say(Now(self._core.clock.current))
            self._collect(guest)
        self._timer = asyncio.get_running_loop().call_later(beats.interval_s, self._look_around)

    # ---------------------------------------------------------------- the end of a host

    def _end(self, guest: Guest, why: str, *, for_good: bool = False) -> Iterator[ev.Event]:
        """Yield what follows from the end of a connection; its host may come back, unless it has left ``for_good``."""
        desk = guest.desk
        del self._guests[guest.name]
        self._beats.forget(guest)
        for engine in desk.engines:
            self._owners[engine] = None
        orphans = [group for group, home in self._homes.items() if home == desk.name]
        for group in orphans:
            del self._homes[group]
        del self._at_home[desk.name]
        if for_good and desk.idle:  # it leaves in peace: nobody waits for anything there, and nothing has failed
            if desk.engines:
                yield ev.EnginesLeft(list(desk.engines))
            if orphans:
                yield ev.FunctionsLost(orphans)
            return
        # that its engines are dead comes before what follows from it: nothing goes there, or begins, in vain
        for event in desk.lost(why):
            if orphans and not isinstance(event, ev.EngineFailed):
                yield ev.FunctionsLost(orphans, died=not for_good)
                orphans = []
            yield event
        if orphans:
            yield ev.FunctionsLost(orphans, died=not for_good)
        if for_good and desk.engines:
            yield ev.EnginesLeft(list(desk.engines))

    def _overdue(self, now: float) -> dict[Guest, str]:
        """Hosts that are silent, or do not end what they were told to end, for the deadline; and which it is."""
        deadline_s = self._beats.deadline_s
        late = dict.fromkeys(self._beats.silent(now), f"it has said nothing for {deadline_s:g} s")
        for guest in self._guests.values():
            desk = guest.desk
            since = dict.fromkeys(desk.fenced) if self._beats.paused else desk.fenced
            if guest not in late and any(now - at >= deadline_s for at in since.values() if at is not None):
                late[guest] = f"requests that it was to end at once still run after {deadline_s:g} s"
            desk.fenced = {attempt_id: now if at is None else at for attempt_id, at in since.items()}
        return late

    # ---------------------------------------------------------------- what is settled

    def delivered(self, samples: Iterable[SampleId]) -> None:
        """Forget these on the hosts: they are in a batch."""
        gone = [sample for sample in samples if sample.group in self._groups]
        self._forget(gone)
        for number in {sample.group for sample in gone}:
            if all(s.state in SETTLED for s in self._groups[number].samples):
                self._settled(number)

    def settled(self, group: Group) -> None:
        """Nothing is left to do for it."""
        if group.id in self._groups:
            self._forget([sample.id for sample in group.samples])
            self._settled(group.id)

    def evaluated(self, evaluation: int) -> None:
        """An evaluation is over."""
        for group in [g for n, g in self._groups.items() if n < 0]:
            if group.evaluation is not None and group.evaluation.request.evaluation == evaluation:
                self.settled(group)

    def _forget(self, samples: list[SampleId]) -> None:
        for guest in self._guests.values() if samples else ():
            guest.desk.forget(samples)
            self._collect(guest)

    def _settled(self, number: int) -> None:
        del self._groups[number]
        if (home := self._homes.pop(number, None)) is not None:
            self._at_home[home] -= 1

    # ---------------------------------------------------------------- where commands go

    def _here(self, command: do.Command) -> None:
        self._local[type(command)](command)

    def _hand(self, guest: Guest | None, command: do.Command) -> None:
        if guest is None:
            self._here(command)
        else:
            guest.desk.execute(command)
            self._collect(guest)

    def _home(self, group: Group) -> Guest | None:
        """The host that runs the functions of a group; None: the one here."""
        name = self._homes.get(group.id)
        if name is None:
            hosts = [HERE, *(g.name for g in self._guests.values() if g.joined.functions)]
            if hosts[1:] and (why := why_not_plain(group.prompt.data)) is not None:
                self._warn_of_data(why)
                hosts = [HERE]
            name = self._homes[group.id] = min(hosts, key=lambda host: self._at_home[host])
            self._at_home[name] += 1
            self._groups[group.id] = group
        return self._guests[name] if name else None

    def _warn_of_data(self, why: str) -> None:
        """Once."""
        if not self._warned:
            self._warned = True
            log.warning(
                "prompts have data that cannot travel (%s): their functions run in the scheduler's process alone; give "
                "numbers, strings, bytes, lists and mappings", why,
            )  # fmt: skip

    def _for_sample(self, command: do.StartSample | do.ScoreSample) -> None:
        self._hand(self._home(command.sample.group), command)

    def _for_call(self, command: do.CallCompleted) -> None:
        self._hand(self._home(command.call.sample.group), command)

    def _for_group(self, command: do.ScoreGroup | do.JudgeGroup) -> None:
        self._hand(self._home(command.group), command)

    def _cancel(self, command: do.CancelSample) -> None:
        group = command.sample.group
        self._hand(self._home(group) if group.id in self._homes else None, command)

    def _submit(self, command: do.Submit) -> None:
        attempt = command.attempt
        if attempt.engine not in self._owners:
            self._here(command)
        elif (guest := self._owners[attempt.engine]) is None:
            self._post(ev.AttemptFailed.of(attempt, _gone(attempt.engine)))
        else:
            self._groups[attempt.sample.group.id] = attempt.sample.group
            self._hand(guest, command)

    def _for_engine(self, command: Any) -> None:
        name: str = command.engine
        if name not in self._owners:
            self._here(command)
        elif (guest := self._owners[name]) is not None:
            self._hand(guest, command)
        elif isinstance(command, do.ProbeEngine):
            self._post(ev.EngineProbed(engine=name, probe=command.probe, answered=False, detail=_gone(name)))
        elif isinstance(command, (do.PauseEngine, do.LoadEngine, do.ResumeEngine)):
            self._failed(command.call, EngineUnreachable(_gone(name)))
            self._post(ev.EngineCallEnded(name, command.call, ev.CallResult.UNREACHABLE, _gone(name)))
        elif isinstance(command, do.Fence):
            for attempt_id in command.attempt_ids:
                self._post(ev.AttemptEnded(attempt_id, EngineFinish.ABORT, fenced=True))

    # ---------------------------------------------------------------- waits

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


def _gone(engine: str) -> str:
    return f"engine {engine}: host {engine.partition('/')[0]} is gone"
