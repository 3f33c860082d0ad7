"""The calls of ranks at their server: asked again, crossing on their way, lost, failed, and by ranks that come back."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import pytest
from rank_threads import PATIENCE_S, begun, until

import april
from april.errors import RankError
from april.processes.heartbeats import Heartbeats
from april.processes.rank_client import RankClient
from april.processes.rank_messages import CallRequest, CallResult, Joined, Step
from april.processes.rank_server import PIECE_BYTES, RankServer, RunOnAllRanks

TOKEN = april.new_token()
Made = Callable[[RunOnAllRanks], Any]


class ServedScheduler:
    """A scheduler whose calls do what a test says."""

    def __init__(self) -> None:
        self.make: Made = lambda on_all: None
        self.calls = 0
        self.uncommitted_batches: list[int] = []

    def execute(self, request: Any, on_all: RunOnAllRanks, shares: Sequence[int]) -> tuple[Any, Sequence[bytes]]:
        self.calls += 1
        content = self.make(on_all) or b"call %d of share " % self.calls
        return None, [content + str(share).encode() for share in shares]

    def query(self, method: str, arguments: list[Any]) -> bytes:
        return method.encode()


def two_transfers(on_all: RunOnAllRanks) -> None:
    on_all("transfer", b"first")
    on_all("transfer", b"second")


class Rank:
    """A rank without a socket: what it asks, it asks the server's coroutine."""

    def __init__(self, server: RankServer, number: int) -> None:
        self.server, self.number = server, number
        self.scheduler: ServedScheduler = server._scheduler
        self.joined: Joined = server.join(number, server._ranks.world_size - 1 - number)
        self.requests = 0

    def ask(
        self, call: int, what: str = "next_batch()", carried: int = 0, **more: Any
    ) -> asyncio.Task[Step | CallResult]:
        """Come to a call; the answer is the task's."""
        self.requests += 1
        asked = CallRequest(
            rank=self.number, session=self.joined.session, call_number=call, call_text=what, steps_done=carried,
            **{"request": self.requests} | more,
        )  # fmt: skip
        return asyncio.get_running_loop().create_task(self.server.exchange(asked))


@contextmanager
def served(**timeouts: float) -> Iterator[tuple[RankServer, ServedScheduler]]:
    """A server of two ranks."""
    given: dict[str, Any] = {"rank_timeout_s": 30.0} | timeouts
    server = RankServer(april.Ranks(world_size=2, address="127.0.0.1:0", token=TOKEN, **given))
    scheduler = ServedScheduler()
    server.set_scheduler(scheduler)
    try:
        yield server, scheduler
    finally:
        server.close(ConnectionError("enough"))
        server.stop()


async def a_turn() -> None:
    """What was begun has gone as far as it can."""
    for _ in range(5):
        await asyncio.sleep(0)


def on_its_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test on the loop of a server to which both ranks have come."""

    @wraps(test)
    def runs(**parameters: Any) -> None:
        async def program() -> None:
            async with asyncio.timeout(PATIENCE_S):
                await test(Rank(server, 0), Rank(server, 1), **parameters)

        with served() as (server, _):
            server.thread.submit(program).result()

    _, _, *parameters = inspect.signature(test).parameters.values()
    runs.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return runs


def ended(*answers: Step | CallResult) -> list[bytes]:
    """The contents of ends."""
    assert all(isinstance(a, CallResult) and a.error is None for a in answers), answers
    return [a.content for a in answers]


@on_its_loop
async def test_an_answer_that_was_lost_is_given_again(zero: Rank, one: Rank) -> None:
    """A call is made once, however often a rank asks for its end, until all have come to the next one."""
    for _ in range(2):
        assert ended(*await asyncio.gather(zero.ask(0), one.ask(0))) == [b"call 1 of share 1", b"call 1 of share 0"]
    waits = zero.ask(1)
    assert ended(await one.ask(0)) == [b"call 1 of share 0"]
    assert ended(await one.ask(1), await waits)[::-1] == [b"call 2 of share 1", b"call 2 of share 0"]
    assert zero.scheduler.calls == 2


@on_its_loop
async def test_a_rank_that_was_interrupted_has_not_come(zero: Rank, one: Rank) -> None:
    """It is missed until it asks again; where its old question ends only after that, it has come all the same."""
    old = one.ask(0)
    await a_turn()
    old.cancel()
    await a_turn()
    waits = zero.ask(0)
    await a_turn()
    assert not zero.server._calls[0].started
    zero_again = zero.ask(0)  # an interrupt, and its question comes before the end of the old one is heard
    await a_turn()
    waits.cancel()
    await a_turn()
    assert len(ended(await one.ask(0), await zero_again)) == 2


@on_its_loop
async def test_a_question_that_was_overtaken_changes_nothing(zero: Rank, one: Rank) -> None:
    """Two of a rank that cross on their way: the later one counts, and the other ranks are asked nothing."""
    new = one.ask(0, "commit(0)", request=8)
    await a_turn()
    with pytest.raises(RankError, match="has made a newer call"):
        await one.ask(0, "next_batch()", request=7)
    assert len(ended(await zero.ask(0, "commit(0)"), await new)) == 2


@pytest.mark.parametrize("over", [False, True])
@on_its_loop
async def test_another_call_in_place_of_one_that_began_is_refused_for_all(zero: Rank, one: Rank, over: bool) -> None:
    """The others have made it with that rank: its end is no answer to the other call."""
    zero.scheduler.make = lambda on_all: None if over else on_all("transfer")
    waiting = [zero.ask(0), one.ask(0)]
    await asyncio.wait(waiting)
    for _ in range(2):
        with pytest.raises(RankError, match=r"rank 1 was interrupted in next_batch\(\) and called commit\(0\)"):
            await one.ask(0, "commit(0)")


@on_its_loop
async def test_a_step_is_carried_out_by_all_before_the_call_goes_on(zero: Rank, one: Rank) -> None:
    """Asked twice it is told twice, with what belongs to it, and it is done once."""
    zero.scheduler.make = two_transfers
    assert list(await asyncio.gather(zero.ask(0), one.ask(0))) == [Step("transfer", b"first")] * 2
    assert await zero.ask(0) == Step("transfer", b"first")
    done = zero.ask(0, carried=1)
    await a_turn()
    assert not done.done()
    assert list(await asyncio.gather(done, one.ask(0, carried=1))) == [Step("transfer", b"second")] * 2
    assert len(ended(*await asyncio.gather(zero.ask(0, carried=2), one.ask(0, carried=2)))) == 2


@on_its_loop
async def test_a_failed_step_is_told_before_the_end_of_the_rank_that_failed(zero: Rank, one: Rank) -> None:
    """It raises in a transfer and its process ends: the others hear of the transfer, and afterwards of the end."""
    zero.scheduler.make = lambda on_all: on_all("transfer")
    await asyncio.gather(zero.ask(0), one.ask(0))
    waits = zero.ask(0, carried=1)
    await a_turn()
    await one.ask(0, error="OSError: full")
    zero.server._note_closed(1, "OSError: full")
    end = await waits
    assert isinstance(end, CallResult)
    assert end.error == ("RankError", "the transfer of rank 1 raised OSError: full", (1,))
    with pytest.raises(RankError, match="rank 1 has ended with an error: OSError: full"):
        await zero.ask(1)


@on_its_loop
async def test_what_the_scheduler_raises_is_told_to_all(zero: Rank, one: Rank) -> None:
    """By its name where it is april's, else as rank 0's; the next call is made."""
    def make(on_all: RunOnAllRanks) -> None:
        raise april.DataExhausted("no more") if zero.scheduler.calls == 1 else ZeroDivisionError("a reward")

    zero.scheduler.make = make
    by_rank_0 = "RankError", "rank 0 raised ZeroDivisionError: a reward", (0,)
    for call, told in enumerate((("DataExhausted", "no more", ()), by_rank_0)):
        for end in await asyncio.gather(zero.ask(call), one.ask(call)):
            assert isinstance(end, CallResult)
            assert end.error == told


@on_its_loop
async def test_a_rank_that_died_has_not_come_and_is_asked_for_what_is_left(zero: Rank, one: Rank) -> None:
    """Where ranks come back: its question counts no more; the process in its place carries out only later steps."""
    zero.server._allow_rejoin = True
    one.ask(0)
    await a_turn()
    zero.server._remove_rank(1, "it died")
    waits = zero.ask(0)
    await a_turn()
    assert not zero.server._calls[0].started
    zero.scheduler.make = two_transfers
    one = Rank(zero.server, 1)
    assert list(await asyncio.gather(waits, one.ask(0))) == [Step("transfer", b"first")] * 2
    one.ask(0, carried=1)
    await a_turn()
    zero.server._remove_rank(1, "it died")  # after it had carried out the first step
    again = Rank(zero.server, 1)
    assert again.joined.call == 0
    comes = again.ask(0)
    assert await zero.ask(0, carried=1) == await comes == Step("transfer", b"second")
    assert len(ended(*await asyncio.gather(zero.ask(0, carried=2), again.ask(0, carried=1)))) == 2


def asked() -> CallRequest:
    """A request for the first call."""
    return CallRequest(call_number=0, call_text="next_batch()", steps_done=0)


@contextmanager
def clients(**timeouts: float) -> Iterator[tuple[RankServer, ServedScheduler, RankClient, RankClient]]:
    """A server, rank 0 in its process, and rank 1 elsewhere."""
    with served(**timeouts) as (server, scheduler):
        address = server.listen(TOKEN)
        here, there = (april.Ranks(rank=rank, world_size=2, address=address, token=TOKEN) for rank in range(2))
        zero, one = RankClient(here, server=server), RankClient(there)
        zero.join(here.rendezvous())
        one.join(there.rendezvous())
        yield server, scheduler, zero, one
        one.close(None)


def test_an_answer_of_any_length_arrives_whole() -> None:
    """It is written in pieces."""
    with clients() as (_, scheduler, zero, one):
        content = bytes(range(256)) * (5 * PIECE_BYTES // 512)
        scheduler.make = lambda on_all: content
        waits = zero.thread.submit(lambda: zero._exchange(asked()))
        assert ended(one.exchange(asked())) == [content + b"1"]
        assert ended(waits.result()) == [content + b"0"]


def test_a_rank_asks_again_where_a_connection_breaks_and_rank_0_lives() -> None:
    """Its line stands: the call is made with it, once."""
    with clients() as (server, scheduler, zero, one):
        asks = one.thread.submit(lambda: one._exchange(asked()))

        async def broken() -> None:
            await until(lambda: 1 in server._latest_requests)
            (task,) = server._request_tasks
            listener: Any = server._listener
            for connection in listener._runner.server.connections:
                if connection._current_request.path == "/call":
                    connection.transport.abort()
            await until(lambda: task not in server._request_tasks)

        server.thread.run(broken)
        assert ended(zero.exchange(asked()), asks.result()) == [b"call 1 of share 0", b"call 1 of share 1"]
        assert (scheduler.calls, server.group_error) == (1, None)


def test_the_end_does_not_wait_for_a_call_that_is_carried_out() -> None:
    """The scheduler is closed after the server: nothing else would end a batch that never comes."""
    closed = threading.Event()
    with clients() as (server, scheduler, zero, one):
        scheduler.make = lambda on_all: closed.wait(PATIENCE_S) and None
        asks = zero.thread.submit(lambda: zero._exchange(asked()))
        comes = one.thread.submit(lambda: one._exchange(asked()))
        server.thread.run(partial(until, lambda: scheduler.calls == 1))
        try:
            begun(partial(server.close, ConnectionError("enough"))).result(10.0)
        finally:
            closed.set()
        assert isinstance(asks.error(), RankError)
        end = comes.result()
        assert isinstance(end, CallResult)
        assert end.error == ("RankError", "rank 0 has ended with an error: ConnectionError: enough", (0,))


def test_silence_is_death_after_the_deadline() -> None:
    """One is silent, another beats; if this process itself stood still, all begin anew."""
    beats = Heartbeats(6.0)
    beats.note_beat(1, 0.0)
    beats.note_beat(2, 0.0)
    for now in range(1, 9):
        beats.note_beat(2, float(now))
        assert list(beats.silent_peers(float(now))) == ([1] if now >= 6 else [])
    beats.forget(1)
    assert [beats.silent_peers(now) for now in (9.0, 100.0, 102.0, 104.0, 106.5)] == [[], [], [], [], [2]]


def test_a_rank_of_which_nothing_is_heard_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connections stand, and it gives no sign of life: it is named after rank_deadline_s, not rank_timeout_s."""
    monkeypatch.setattr(RankClient, "_check_heartbeats", lambda self, line: None)
    with clients(rank_deadline_s=0.3) as (_, _, zero, _):
        sentence = r"the connection to rank 1 is lost: it sent nothing for 0\.3 s \(rank_deadline_s\)"
        with pytest.raises(RankError, match=sentence):
            zero.exchange(asked())
