"""Ranks that attach to the core's actor, die and come back; the end of a run. Real threads and loops, without Ray."""

from __future__ import annotations

import asyncio
import concurrent.futures.thread
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rank_threads import CONFIG, PATIENCE_S, begun, beside, cut, cut_server, engine, until

import april
from april.driver.loop_thread import LoopThread
from april.errors import RankError
from april.processes.rank_packing import pack_call, unpack_call
from april.processes.rank_server import RankServer
from april.processes.ranks import Ranks
from april.processes.ray_run import CLOSE_S, ActorScheduler, Run, SchedulerActor, scheduler


class Gone(Exception):
    """As Ray's RayActorError."""


class FakeRay:
    """What the end of a run asks of Ray."""

    exceptions = SimpleNamespace(RayActorError=Gone)

    def __init__(self) -> None:
        self.killed: list[Any] = []
        self.waited: list[float | None] = []

    def wait(self, references: list[Any], *, timeout: float | None = None) -> Any:
        """Time is not waited for."""
        self.waited.append(timeout)
        if "interrupt" in references:
            raise KeyboardInterrupt
        return [r for r in references if r is not None], [r for r in references if r is None]

    def get(self, reference: Any) -> None:
        assert reference is not None, "it hangs"
        if reference == "gone":
            raise Gone

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    return fake


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("closed", []),
        ("gone", ["run r: its actor was gone already (Gone)"]),
        (None, ["run r: its actor did not close in 30 s and is killed"]),
        ("interrupt", []),
    ],
)
def test_the_end_of_a_run(ray: FakeRay, caplog: pytest.LogCaptureFixture, answer: str | None, said: list[str]) -> None:
    """An actor that is gone, or that Ray has never placed, does not hold the end up; a warning says so. No actor stays,
    not after a second Ctrl-C while it closes either."""
    core = SimpleNamespace(close=SimpleNamespace(remote=lambda: answer))  # None never comes
    run = Run("r", core)
    with pytest.raises(KeyboardInterrupt) if answer == "interrupt" else nullcontext():
        run.close()
    run.close()
    assert ray.killed == [core]
    assert ray.waited == [CLOSE_S]
    assert caplog.messages == said


def test_a_core_that_would_begin_anew_is_refused(ray: FakeRay) -> None:
    """Ray would start it without what it held, and ranks would wait for it for ever."""
    ray.is_initialized = lambda: True  # type: ignore[attr-defined]
    config = april.Config(rollout_batch_size=1, max_response_len=9)
    with pytest.raises(april.ConfigError, match="max_restarts must stay 0"):
        scheduler(config, name="r", prompts=[[1]], actor_options={"max_restarts": 1})


GO_ON = threading.Event()
"""Rewards wait for it."""
EVERYTHING = dict.fromkeys(((g, i) for g in range(8) for i in range(3)), 1)


def reward(prompt: april.Prompt, response: april.Response) -> float:
    """Differs inside of groups."""
    GO_ON.wait(PATIENCE_S)
    return float(response.sample_id.index)


class World:
    """The core's actor on a loop of its own, with an engine, and the ranks that attach to it."""

    def __init__(self, ranks: int = 2, prompts: int = 8, **options: Any) -> None:
        group = Ranks(world_size=ranks, address="none", token="none", **{"rank_timeout_s": 30.0} | options)  # noqa: S106
        GO_ON.set()
        self.core = SchedulerActor("127.0.0.1")
        self._thread = LoopThread("actor")
        pool = concurrent.futures.ThreadPoolExecutor()  # as a loop of Ray's has it
        self._thread.call(lambda: asyncio.get_running_loop().set_default_executor(pool))
        seen = {"prompts": [[1 + i, 2] for i in range(prompts)], "reward": reward, "check": True}
        start = partial(
            self.core.start, config=CONFIG, ranks=group, split_by="samples", engines=lambda: [engine()],
            options=seen,
        )  # fmt: skip
        assert self._thread.run(start) is None

    @property
    def server(self) -> RankServer:
        """The actor's, at which the ranks make their calls."""
        assert self.core.server is not None
        return self.core.server

    def attach(self, rank: int) -> ActorScheduler:
        seat = self._thread.run(partial(self.core.rank, rank))
        if isinstance(seat, Exception):
            raise seat
        return ActorScheduler(*seat)

    def both(self) -> list[ActorScheduler]:
        return [self.attach(rank) for rank in range(2)]

    def kill(self, rank: ActorScheduler) -> None:
        """The end of a rank's process: its connection ends, and nothing comes from it any more."""
        cut(rank)
        client = rank._client
        assert client._http is not None
        client.thread.request_stop(client._http.close)
        client.thread.stop()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *exc: object) -> None:
        self._thread.run(self.core.close)
        self._thread.stop()


@pytest.fixture
def world() -> Iterator[World]:
    """Of two ranks."""
    with World() as made:
        yield made


def nothing() -> None:
    """A transfer that hands over nothing."""


def settled(batches: list[april.Batch]) -> Counter[tuple[int, int]]:
    """Samples in shares."""
    return Counter(s.id for batch in batches for s in batch.samples)


def equal(one: april.Batch, other: april.Batch) -> bool:
    """The same samples, token for token."""
    pairs = zip(one.samples, other.samples, strict=True)
    return one.id == other.id and all(a.id == b.id and np.array_equal(a.tokens, b.tokens) for a, b in pairs)


def both(ranks: list[ActorScheduler], call: Callable[[ActorScheduler], Any]) -> list[Any]:
    """A call on all ranks at the same time; raises the first error."""
    outcomes = beside(*(lambda rank=rank: call(rank) for rank in ranks))
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


def update(rank: ActorScheduler) -> april.PolicyVersion:
    return rank.weight_update(transfer=nothing)


def to_the_end(ranks: list[ActorScheduler]) -> list[april.Batch]:
    """All shares that are left; ends where the data does."""
    shares: list[april.Batch] = []
    while True:
        found = beside(*(rank.next_batch for rank in ranks))
        if any(isinstance(share, april.DataExhausted) for share in found):
            assert all(isinstance(share, april.DataExhausted) for share in found)
            return shares
        shares += found
        both(ranks, update)


def raises() -> Any:
    """Prompts that cannot be read."""
    yield [1]
    raise ZeroDivisionError("no prompts")


@pytest.mark.parametrize(
    ("prompts", "kinds", "words"),
    [
        ("text", (april.ConfigError, april.ConfigError), "must be an iterable of prompts"),
        ([{"token_ids": [1], "path": "caf\udce9"}], (april.RolloutError, april.RolloutError), "half a character"),
        (raises(), (ZeroDivisionError, RankError), "no prompts"),
    ],
)  # fmt: skip
def test_a_call_that_rank_0_cannot_make(world: World, prompts: Any, kinds: tuple[type, type], words: str) -> None:
    """What it gives cannot go to the core: all ranks are told, at that call, and go on together."""
    ranks = world.both()
    outcomes = beside(*(lambda r=rank: r.evaluate(prompts if r is ranks[0] else None) for rank in ranks))
    assert tuple(map(type, outcomes)) == kinds
    assert all(words in str(outcome) for outcome in outcomes)
    assert settled(to_the_end(ranks)) == EVERYTHING
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize(
    ("victim", "batches", "updates"),
    [
        pytest.param(1, 1, 0, id="while it trained: its share comes again"),
        pytest.param(0, 1, 0, id="rank 0, like any other: it has nothing that the others have not"),
        pytest.param(1, 2, 0, id="with two batches out: both come again, in their order"),
        pytest.param(1, 1, 1, id="after the update: what was trained and committed is not handed out again"),
    ],
)
def test_a_rank_that_was_started_anew_goes_on_where_the_others_are(
    world: World, victim: int, batches: int, updates: int
) -> None:
    """It died while the other one waits in its next call, and nothing is trained twice or left out."""
    ranks = world.both()
    out = [both(ranks, ActorScheduler.next_batch) for _ in range(batches)]
    trained = [share for shares in out for share in shares]
    for _ in range(updates):
        both(ranks, update)
        del out[0]
    call = update if out else ActorScheduler.next_batch
    world.kill(ranks[victim])
    waits = begun(partial(call, ranks[1 - victim]))
    again = ranks[victim] = world.attach(victim)
    for shares in out:
        assert equal(again.next_batch(), shares[victim])
    waited = [call(again), waits.result(PATIENCE_S)]
    if out:
        assert waited == [(0, 1), (0, 1)]
    else:
        assert [share.id for share in waited] == [batches] * 2
        trained += waited
    for _ in range(len(out) - 1 if out else 1):
        both(ranks, update)
    assert settled([*trained, *to_the_end(ranks)]) == EVERYTHING
    assert again.ledger()["tokens"].balanced


def test_a_rank_that_died_in_the_wait_for_a_batch(world: World) -> None:
    """The batch was delivered while nobody was there: it gets its share when it asks for it."""
    zero, one = world.both()
    GO_ON.clear()
    waits, asks = begun(zero.next_batch), begun(one.next_batch)
    server = world.server
    server.thread.run(lambda: until(lambda: 0 in server._calls and server._calls[0].started))
    world.kill(one)
    GO_ON.set()
    assert asks.exception(PATIENCE_S)
    again = world.attach(1)
    shares = [waits.result(PATIENCE_S), again.next_batch()]
    assert [share.id for share in shares] == [0, 0]
    both([zero, again], update)
    assert settled([*shares, *to_the_end([zero, again])]) == EVERYTHING


def test_a_rank_that_is_lost_in_its_transfer_ends_the_update_for_all(world: World) -> None:
    """The version stays, and the update can be made again when it is back."""
    zero, one = world.both()
    both([zero, one], ActorScheduler.next_batch)
    inside, on = threading.Event(), threading.Event()

    def hangs() -> None:
        inside.set()
        on.wait()

    dies, waits = begun(partial(one.weight_update, transfer=hangs)), begun(partial(update, zero))
    inside.wait()
    world.kill(one)
    with pytest.raises(RankError, match="rank 1 was lost in its transfer"):
        waits.result(PATIENCE_S)
    on.set()
    assert dies.exception(PATIENCE_S)
    assert zero.version == (0, 0)
    again = world.attach(1)
    again.next_batch()
    with pytest.raises(RankError, match="rank 1 was lost in its transfer"):
        again.weight_update(transfer=nothing)
    assert both([zero, again], update) == [(0, 1), (0, 1)]


def test_a_rank_that_does_not_come_back_is_named_on_all_others() -> None:
    """Within the deadline; a state can still be taken."""
    with World(rank_timeout_s=0.3, rank_deadline_s=0.6) as world:
        zero, one = world.both()
        both([zero, one], ActorScheduler.next_batch)
        world.kill(one)
        with pytest.raises(RankError, match=r"(connection to rank 1 is lost|rank 1 did not reach weight_update)"):
            zero.weight_update(transfer=nothing)
        with pytest.raises(RankError):
            zero.next_batch()
        assert zero.state_dict()


def test_calls_that_differ_are_named_on_all_ranks(world: World) -> None:
    """And on one that came back: what it calls must be what all have called."""
    zero, one = world.both()
    both([zero, one], ActorScheduler.next_batch)
    world.kill(one)
    again = world.attach(1)
    with pytest.raises(RankError, match=r"makes another call .* commit\(batch_id=0\) instead of next_batch\(\)"):
        again.commit(0)
    outcomes = beside(lambda: zero.weight_update(transfer=nothing), lambda: again.commit(0))
    assert all(isinstance(o, RankError) and "different calls" in str(o) for o in outcomes)


def test_what_rank_0_gives_reaches_the_core() -> None:
    """Prompts of evaluations, more prompts, a state; values of an evaluation on every rank."""
    with World(prompts=4) as world:
        ranks = world.both()
        asked = [{"input_ids": [5, 6], "answer": 7}, [8]]
        results = both(
            ranks, lambda rank: rank.evaluate(asked if rank is ranks[0] else None, n_samples=2, temperature=1)
        )
        assert [r.rewards.tolist() for r in results] == [[[0.0, 1.0], [0.0, 1.0]]] * 2
        both(ranks, lambda rank: rank.extend([[9, 9], [9, 8]] if rank is ranks[0] else []))
        both(ranks, ActorScheduler.next_batch)
        state = ranks[1].state_dict()
    with World(prompts=4) as world:
        ranks = world.both()
        versions = both(ranks, lambda rank: rank.load_state_dict(state if rank is ranks[0] else {}, transfer=nothing))
        assert versions == [(1, 0), (1, 0)]


def test_a_rank_that_attached_anew_is_told_so_in_its_old_place(world: World) -> None:
    """Quickly one after the other, and in a process that lives: the last one counts, and only that."""
    zero = world.attach(0)
    ones = [world.attach(1) for _ in range(3)]
    shares = to_the_end([zero, ones[-1]])
    assert settled(shares) == EVERYTHING
    for old in ones[:-1]:
        client = old._client
        client.thread.run(partial(until, lambda client=client: client.group_error is not None))
        with pytest.raises(RankError, match="rank 1 has connected again") as caught:
            old.next_batch()
        assert caught.value.ranks == (1,)


def test_a_run_that_nobody_closed_does_not_keep_its_process_alive() -> None:
    """Its driver has ended, and Ray lets the actor's process end by itself: no thread of april's is waited for."""
    before = set(threading.enumerate())
    with World(ranks=1) as world:
        rank = world.attach(0)
        rank.next_batch()
        rank.validate()
        joined = concurrent.futures.thread._threads_queues  # the interpreter waits for these, daemons or not
        assert [t.name for t in threading.enumerate() if t not in before and (t in joined or not t.daemon)] == []


def test_mistakes(world: World) -> None:
    """Each with a sentence, before anything happens."""
    zero = world.attach(0)
    with pytest.raises(RankError, match="rank 2 is not one of 2"):
        world.attach(2)
    with pytest.raises(april.ConfigError, match="cannot read the trainer's model in place"):
        zero.weight_update()


def test_a_core_that_died_is_told_of_on_all_ranks(world: World) -> None:
    """Whoever waits for it, too."""
    waits = begun(world.attach(0).next_batch)
    cut_server(world.server)
    with pytest.raises(RankError, match="the connection to the core is lost"):
        waits.result(PATIENCE_S)


@pytest.mark.parametrize("method", ["weight_update", "load_state_dict"])
def test_a_directory_is_that_of_the_rank_that_calls(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core's actor runs in another directory; an address is the same everywhere."""
    monkeypatch.chdir(tmp_path)
    for path, meant in ((None, None), (Path("w1"), str(tmp_path / "w1")), ("w1", str(tmp_path / "w1")), ("s3://b/w1", "s3://b/w1")):
        assert unpack_call(pack_call(method, {"path": path}), nothing) == (method, {"path": meant})
