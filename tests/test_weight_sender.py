"""The sender of weights: who gets them when engines fail, hang or answer late, in each phase, on a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from april.core.events import TransferFailure
from april.driver.weight_update import WeightUpdate
from april.engines.protocol import Capabilities, LogprobKind
from april.engines.weight_transfer import GLOO, GroupInvitation, Handshake, TensorSpec
from april.errors import ConfigError, EngineError, EngineUnreachable
from april.testing.virtual_clock import VirtualClockLoop
from april.weights.sender import WORKER_LIMIT_SHARE, WeightSender
from april.weights.source import WeightSource

LIMIT_S = 10.0
CAPABILITIES = Capabilities(
    logprob_kind=LogprobKind.PROCESSED, vocab_size=10, max_context=10, remote=True, collective=(GLOO,)
)
PHASES = ("ranks", "join", "begin", "receive", "finish")
SAYS = {
    "ranks": "to report how many workers it has", "join": "to connect to the sender",
    "begin": "to prepare for new weights", "receive": "to receive tensor b", "finish": "to put the weights into use",
}  # fmt: skip
WEIGHTS = {"a": torch.arange(4.0), "b": torch.arange(8.0), "c": torch.ones(2, 2)}
ONE_EACH = 16
"""Bytes of a bucket, so that each tensor has its own."""


@dataclass(eq=False)
class Receiver:
    """An engine that says what it was asked, and fails as it is told: how, and at which call of which phase."""

    name: str
    size: int = 1
    fails: tuple[str, str, int] | None = None
    sender_address: str = "127.0.0.1"
    capabilities: Capabilities = CAPABILITIES
    handshake: Handshake = Handshake.TORCH
    asked: list[str] = field(default_factory=list)
    meetings: list[GroupInvitation] = field(default_factory=list)
    got: dict[str, TensorSpec] = field(default_factory=dict)
    group: Group | None = None
    whole = True

    async def _call(self, phase: str) -> None:
        self.asked.append(phase)
        if self.fails is None or self.fails[0] != phase or self.asked.count(phase) <= self.fails[2]:
            return
        how = self.fails[1]
        if how == "refuses":
            raise EngineError(f"{self.name} answered 500")
        if how == "gone":
            raise EngineUnreachable("the connection broke")
        if how == "hangs":
            await asyncio.get_running_loop().create_future()
        await asyncio.sleep(LIMIT_S / 2)  # late

    async def ranks(self) -> int:
        await self._call("ranks")
        return self.size

    async def join(self, meeting: GroupInvitation) -> None:
        self.meetings.append(meeting)
        self.got.clear()
        await self._call("join")
        assert self.group is not None
        await self.group.together("join", meeting.timeout_s)

    async def begin(self) -> None:
        await self._call("begin")

    async def receive(self, bucket: Sequence[TensorSpec], last: bool) -> None:
        self.whole = False
        await self._call("receive")
        assert self.group is not None
        await self.group.together(bucket[0].name, self.meetings[-1].timeout_s)
        self.got |= {spec.name: spec for spec in bucket}

    async def finish(self) -> None:
        await self._call("finish")

    async def leave(self) -> bool:
        self.asked.append("leave")
        return self.whole


class Group:
    """A group in which nobody gets on while somebody is missing; its members are told when it is closed."""

    def __init__(self, loop: VirtualClockLoop, engines: Sequence[Receiver]) -> None:
        self.loop, self.members, self.here, self.closed = loop, list(engines), dict[str, int](), False
        self.sent: list[list[Any]] = []
        self.changed = asyncio.Event()
        for engine in engines:
            engine.group = self

    async def together(self, what: str, limit_s: float) -> None:
        """A worker waits for all others and the sender."""
        self.here[what] = self.here.get(what, 0) + 1
        try:
            async with asyncio.timeout(limit_s):
                while self.here[what] < len(self.members) and not self.closed:
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            raise EngineError("500: a worker waited for the others in vain") from None
        self.changed.set()
        if self.closed:
            raise EngineError("500: a worker was left alone")

    def _wait(self, what: str, goes_on: Callable[[], None]) -> None:
        while self.here.get(what, 0) < len(self.members):
            goes_on()
            self.loop.run_until_complete(asyncio.sleep(0.01))

    def connect(self, goes_on: Callable[[], None]) -> None:
        self._wait("join", goes_on)

    def broadcast(self, tensors: Sequence[Any], specs: Sequence[TensorSpec], goes_on: Callable[[], None]) -> None:
        self._wait(specs[0].name, goes_on)
        self.sent.append([t.clone() for t in tensors])

    def close(self) -> None:
        self.closed = True
        self.changed.set()


class Desk:
    """A sender to engines on a virtual loop, which runs while somebody waits."""

    def __init__(self, *engines: Receiver) -> None:
        self.loop, self.engines = VirtualClockLoop(), engines
        self.groups: list[Group] = []
        self.opened: list[tuple[Any, ...]] = []
        self.sender = WeightSender(
            {e.name: e for e in engines}, self.ask, LIMIT_S, open_group=self.open, now=self.loop.time
        )  # type: ignore[arg-type]

    def ask(self, calls: Sequence[Any]) -> Sequence[Any]:
        return [Answer(self.loop, self.loop.create_task(call)) for call in calls]

    def open(
        self, backend: str, handshake: Handshake, address: str, size: int, timeout_s: float, bucket_bytes: int
    ) -> tuple[Group, GroupInvitation]:
        self.opened.append((backend, handshake, address, size))
        members = [e for e in self.engines if e.name in self.left and e.handshake is handshake]
        self.groups.append(Group(self.loop, members))
        return self.groups[-1], GroupInvitation(
            address=address, port=1, world_size=size, rank_offset=1, group=f"g{len(self.groups)}", backend=backend,
            timeout_s=timeout_s, bucket_bytes=bucket_bytes,
        )  # fmt: skip

    @property
    def left(self) -> set[str]:
        return {e.name for e in self.engines} - self.sender.left_out.keys()

    def send(self, weights: Any = WEIGHTS) -> None:
        try:
            self.sender.send(WeightSource(weights, bucket_bytes=ONE_EACH), [e.name for e in self.engines])
        finally:
            assert not asyncio.all_tasks(self.loop), "a call of an engine is still on its way"
            self.loop.close()

    def got_all(self, engine: Receiver) -> bool:
        """It has every tensor of one and the same group, and was asked to put them into use."""
        return engine.got.keys() == WEIGHTS.keys() and engine.asked[-1] == "finish"


@dataclass
class Answer:
    """A task of the virtual loop."""

    loop: VirtualClockLoop
    task: asyncio.Task[Any]

    def done(self) -> bool:
        return self.task.done()

    def wait(self) -> bool:
        if not self.task.done():
            self.loop.run_until_complete(asyncio.wait([self.task]))
        return True

    def result(self) -> Any:
        return self.task.result()


def test_all_tensors_go_to_all_engines_in_order() -> None:
    """In buckets, whole, with names, dtypes and shapes; every engine makes ready before and puts to use after."""
    desk = Desk(Receiver("a"), Receiver("b"))
    desk.send()
    assert desk.sender.left_out == {}
    (group,) = desk.groups
    assert [t.tolist() for bucket in group.sent for t in bucket] == [t.tolist() for t in WEIGHTS.values()]
    for engine in desk.engines:
        assert desk.got_all(engine)
        assert list(engine.got.values()) == [TensorSpec(n, "float32", tuple(t.shape)) for n, t in WEIGHTS.items()]
        assert engine.asked == ["ranks", "join", "begin", "receive", "receive", "receive", "finish"]


def test_tensors_of_wide_numbers_come_first() -> None:
    """A worker looks at a buffer without gaps as numbers of a dtype, which begin at a multiple of their size."""
    desk = Desk(Receiver("a"))
    mixed = {"odd": torch.ones(3, dtype=torch.bfloat16), "wide": torch.ones(2), "long": torch.ones(1).double()}
    desk.sender.send(WeightSource(mixed, bucket_bytes=1 << 10), ["a"])
    desk.loop.close()
    assert list(desk.engines[0].got) == ["long", "wide", "odd"]
    assert [t.dtype.itemsize for t in desk.groups[0].sent[0]] == [8, 4, 2]


def test_every_worker_has_a_rank_of_its_own() -> None:
    """The sender is rank 0; an engine's workers follow those of the engine before it."""
    desk = Desk(Receiver("a", 2), Receiver("b", 4), Receiver("c"))
    desk.send()
    assert [engine.meetings[0].rank_offset for engine in desk.engines] == [1, 3, 7]
    assert {engine.meetings[0].world_size for engine in desk.engines} == {8}


def test_engines_of_two_handshakes_are_in_groups_of_their_own() -> None:
    """Each gets everything."""
    desk = Desk(Receiver("a"), Receiver("b", handshake=Handshake.UNIQUE_ID))
    desk.send()
    assert [(shake, size) for _, shake, _, size in desk.opened] == [(Handshake.TORCH, 2), (Handshake.UNIQUE_ID, 2)]
    assert all(map(desk.got_all, desk.engines))


def test_the_address_is_one_that_other_machines_reach() -> None:
    """Where one engine is elsewhere, the loopback address of another one is of no use."""
    desk = Desk(Receiver("a"), Receiver("b", sender_address="10.0.0.7"))
    desk.send()
    assert desk.opened[0][2] == "10.0.0.7"


@pytest.mark.parametrize("how", ["refuses", "gone", "hangs"])
@pytest.mark.parametrize("phase", PHASES)
def test_one_of_two_engines_fails(phase: str, how: str) -> None:
    """It alone is left out, by a sentence with its name and the phase; the other one gets all, in a new group."""
    desk = Desk(Receiver("bad", fails=(phase, how, phase == "receive")), Receiver("good"))
    desk.send()
    bad, good = desk.engines
    assert list(desk.sender.left_out) == ["bad"]
    fate = desk.sender.left_out["bad"]
    assert fate.why.startswith(f"engine bad failed {SAYS[phase]}")
    assert fate.torn == (phase in ("receive", "finish") or (phase == "begin" and how != "refuses"))
    assert desk.got_all(good)
    assert bad.asked.count(phase) == 1 + (phase == "receive")
    assert all(group.closed for group in desk.groups[:-1])


@pytest.mark.parametrize("phase", PHASES)
def test_the_only_engine_fails(phase: str) -> None:
    """The error has its name and the phase; it is torn if it may have a part of the weights, and not before."""
    desk = Desk(Receiver("only", fails=(phase, "refuses", 0)))
    with pytest.raises(EngineError, match=f"engine only failed {SAYS[phase].replace('tensor b', 'tensor a')}"):
        desk.send()
    assert desk.sender.left_out["only"].torn == (phase in ("receive", "finish"))
    assert desk.engines[0].asked[-1] == "leave"


@pytest.mark.parametrize("phase", PHASES)
def test_a_slow_engine_is_waited_for(phase: str) -> None:
    """Below the limit nothing is wrong."""
    desk = Desk(Receiver("slow", fails=(phase, "late", 0)), Receiver("good"))
    desk.send()
    assert desk.sender.left_out == {}
    assert all(map(desk.got_all, desk.engines))


def test_a_hung_engine_is_told_from_those_that_wait_for_it() -> None:
    """Workers give up before the limit of their call, so who has not answered then is who hangs."""
    assert WORKER_LIMIT_SHARE < 1
    desk = Desk(Receiver("good"), Receiver("hung", fails=("receive", "hangs", 1)), Receiver("well"))
    desk.send()
    assert list(desk.sender.left_out) == ["hung"]
    assert desk.loop.time() < 2.5 * LIMIT_S


def test_two_engines_fail_one_after_the_other() -> None:
    """Each costs a round."""
    desk = Desk(
        Receiver("x", fails=("join", "refuses", 0)), Receiver("y", fails=("receive", "gone", 0)), Receiver("good")
    )
    desk.send()
    assert sorted(desk.sender.left_out) == ["x", "y"]
    assert len(desk.groups) == 3
    assert desk.got_all(desk.engines[2])


@pytest.mark.parametrize(
    ("fails", "weights", "said"),
    [(("ranks", "refuses", 1), (), "good failed to report how many workers"),
     (None, (iter(WEIGHTS.items()),), "iterator: give a module")],
    ids=["rounds", "an iterator"],
)  # fmt: skip
def test_what_an_engine_got_in_an_earlier_round_counts(fails: Any, weights: tuple[Any, ...], said: str) -> None:
    """It is torn by the first round, though a second one, to which nobody else was left, ended before any tensor.

    An iterator cannot be sent again: all that had begun are torn, and the error says what to give.
    """
    desk = Desk(Receiver("bad", fails=("receive", "refuses", 1)), Receiver("good", fails=fails))
    sentence =rf"engine bad failed to receive tensor b.*{said}"
    with pytest.raises(EngineError, match=sentence):
        desk.send(*weights)
    assert {name: fate.torn for name, fate in desk.sender.left_out.items()} == {"bad": True, "good": True}


@pytest.mark.parametrize("again", [False, True])
def test_an_interrupt(again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are torn by it; if another one breaks off the end of the transfer, nobody knows what they have."""

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(4)
        yield "b", torch.ones(4)
        raise KeyboardInterrupt

    if again:
        monkeypatch.setattr(Desk, "ask", interrupted_at_the_end(Desk.ask))
    desk = Desk(Receiver("a"))
    update = WeightUpdate()
    update.sender = desk.sender
    with pytest.raises(KeyboardInterrupt):
        desk.send(weights())
    assert update.not_given == (None if again else (TransferFailure("a", desk.sender.left_out["a"].why, torn=True),))


def interrupted_at_the_end(ask: Callable[..., Any]) -> Callable[..., Any]:
    """As ``ask``, with an interrupt where engines are to leave the group."""

    def asks(desk: Desk, calls: Sequence[Any]) -> Any:
        if calls[0].__name__ == "_leave_group":
            for call in calls:
                call.close()
            raise KeyboardInterrupt
        return ask(desk, calls)

    return asks


def test_who_reads_in_place_has_them_whatever_becomes_of_others() -> None:
    """A server that fails is left out, as there is another engine with the new weights."""
    here = replace(CAPABILITIES, collective=(), shares_weights=True)
    desk = Desk(Receiver("here", capabilities=here), Receiver("bad", fails=("ranks", "gone", 0)))
    desk.send()
    assert list(desk.sender.left_out) == ["bad"]


def test_what_the_weights_raise_is_raised() -> None:
    """Engines that have a part of them are torn, and out of the group; those that have nothing keep what they had."""

    def weights(good: int) -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(WEIGHTS.items())[:good]
        raise OSError("the disk of the offloaded weights is gone")

    for good, torn in ((2, True), (0, False)):
        desk = Desk(Receiver("a"))
        with pytest.raises(OSError, match="offloaded"):
            desk.send(weights(good))
        assert {n: f.torn for n, f in desk.sender.left_out.items()} == {"a": torn}
        assert desk.engines[0].asked[-1] == "leave"


def test_engines_that_take_nothing_are_refused_before_anything_happens() -> None:
    """By name, with what to do."""
    deaf = Receiver("deaf", capabilities=replace(CAPABILITIES, collective=()))
    with pytest.raises(ConfigError, match=r"weight_update: engine deaf accepts no weights.*april doctor"):
        WeightSender({"a": Receiver("a"), "deaf": deaf}, lambda calls: [], LIMIT_S).refuse_engines("weight_update")  # type: ignore[dict-item]
