"""Engines join and leave a running scheduler: by a call, or as a function of the user's finds their servers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from served_lives import KEY, TrueEngine
from socket_clock import run_with_sockets
from virtual_rollouts import on_virtual_time

import april
from april.adapters.common.trainer_servers import ServerResult, TrainerServers
from april.core.ledger import DropReason
from april.driver.engine_roster import EngineRoster, open_found, urls_of
from april.engines.served.server import EngineServer, serve
from april.errors import ConfigError, EngineError, RolloutError, SchedulerClosed
from april.testing import FakeEngine, audit, rollouts


def config(**changes: Any) -> april.Config:
    """Two groups of four a step."""
    return april.Config(**({"rollout_batch_size": 2, "n_samples_per_prompt": 4, "max_response_len": 60} | changes))


def fake(name: str, **changes: Any) -> FakeEngine:
    """A response takes as many seconds as it has tokens."""
    return FakeEngine(name, lengths=lambda r: 10 + 5 * (r.sample_key or (0, 0))[1], chunk_tokens=1, **changes)


PROMPTS = [[1, 2, 3 + i] for i in range(100)]


def run_of(*engines: Any, **changes: Any) -> Any:
    """The scheduler on this loop."""
    return rollouts(config(**changes), engines=engines, prompts=PROMPTS, reward=lambda p, r: 1.0)


@on_virtual_time
async def test_an_engine_that_is_added_works_from_then_on() -> None:
    """Its tokens count like those of the others."""
    a, b = fake("a"), fake("b")
    async with run_of(a) as run:
        await run.next_batch()
        await run.weight_update()
        assert await run.scheduler.aadd_engine(b) == "b"
        assert [e.name for e in run.engines] == ["a", "b"]
        await asyncio.sleep(2)  # it is probed
        await run.weight_update()
        await run.next_batch()
        assert b.attempts
        assert {str(v) for _, v, _ in b.updates} == {str(run.version)}
        run.audit()


@on_virtual_time
async def test_tokens_that_an_engine_has_for_no_request_are_in_the_books() -> None:
    """Whether it is there from the start or was added; alone, such an engine tells nobody."""

    async def ask(asked: Any, token_ids: Any, most: int) -> ServerResult:
        raise OSError("unused")

    async def end_all() -> None: ...

    a, b = (TrainerServers(name, ask, end_all, max_context=1000) for name in "ab")
    a.unused(1, DropReason.LATE)
    async with run_of(a) as run:
        await run.scheduler.aadd_engine(b)
        for engine, count in ((a, 5), (b, 7)):
            engine.unused(count, DropReason.LATE)
        await asyncio.sleep(0)
        assert run.ledger()["tokens"].dropped == {DropReason.LATE: 12}


@on_virtual_time
async def test_an_engine_that_is_removed_ends_its_requests_first() -> None:
    """It gets no others, is closed afterwards, and can come again under its name."""
    a, b = fake("a"), fake("b")
    async with run_of(a, b) as run:
        step = asyncio.ensure_future(run.next_batch())
        await asyncio.sleep(3.5)
        had = len(b.attempts)
        assert had == 4
        await asyncio.gather(run.scheduler.aremove_engine("b"), run.scheduler.aremove_engine("b"))
        assert asyncio.get_running_loop().time() > 10
        assert not b.open_streams
        assert b._closed
        await step
        await run.weight_update()
        await run.next_batch()
        assert len(b.attempts) == had
        assert all(len(r.chunks) >= 10 for r in b.attempts.values()), "cut"
        assert [e.name for e in run.engines] == ["a"]
        await run.scheduler.aadd_engine(fake("b"))
        audit(run.batches, [a, b], run.ledger())


@on_virtual_time
async def test_an_engine_that_is_cut_off_leaves_its_tokens_to_the_others() -> None:
    """At once; what it had generated goes on elsewhere, and nothing is generated twice."""
    a, b = fake("a"), fake("b")
    async with run_of(a, b) as run:
        step = asyncio.ensure_future(run.next_batch())
        await asyncio.sleep(3.5)
        await run.scheduler.aremove_engine("b", cut=True)
        assert asyncio.get_running_loop().time() < 5
        await step
        assert all(r.end == "abort" for r in b.attempts.values())
        assert sum(r.request.response_offset == 3 for r in a.attempts.values()) == 4
        assert audit(run.batches, [a, b], run.ledger()) is not None


@on_virtual_time
async def test_what_cannot_join_or_leave_is_refused() -> None:
    """A name that is taken, an engine with less room, what is no engine, a name that nobody has."""
    async with run_of(fake("a")) as run:
        for engine, says in (
            (fake("a"), "an engine a exists already"),
            (fake("b", max_context=500), "a context of 500 tokens"),
            (object(), "is not an engine"),
        ):
            with pytest.raises(ConfigError, match=says):
                await run.scheduler.aadd_engine(engine)
        with pytest.raises(ConfigError, match="no engine is named c; the engines are a"):
            await run.scheduler.aremove_engine("c")
        with pytest.raises(ConfigError, match="look like http"):
            await run.scheduler.aadd_engine("nonsense")
        step = asyncio.ensure_future(run.next_batch())
        await asyncio.sleep(1)
        leaving = asyncio.ensure_future(run.scheduler.aremove_engine("a"))
        await asyncio.sleep(1)
        with pytest.raises(ConfigError, match="an engine a exists already"):
            await run.scheduler.aadd_engine(fake("a"))
    with pytest.raises(SchedulerClosed):
        await leaving
    with pytest.raises(SchedulerClosed):
        await step


# ---------------------------------------------------------------- servers that are found


class Found:
    """Servers that a function finds; while ``error`` is set it fails."""

    def __init__(self) -> None:
        self.servers: list[EngineServer] = []
        self.urls: list[str] = []
        self.error: Exception | None = None

    async def start(self) -> EngineServer:
        server = await serve(TrueEngine(), key=KEY)
        self.servers.append(server)
        self.urls.append(server.url)
        return server

    def __call__(self) -> list[str]:
        if self.error is not None:
            raise self.error
        return list(self.urls)

    async def close(self) -> None:
        for server in self.servers:
            await server.close()


def test_engines_come_and_go_with_the_servers_that_are_found(caplog: pytest.LogCaptureFixture) -> None:
    """A failure of the function changes nothing; a server that does not answer is told once, and tried again."""
    run_with_sockets(_found())
    told = [r.message for r in caplog.records if "cannot join" in r.message]
    assert len(told) == 1
    assert sum("discover failed, so all engines stay" in r.message for r in caplog.records) == 1


async def _found() -> None:
    found = Found()
    first = await found.start()
    settings = config(engine={"kind": "april", "urls": [first.url], "api_key": KEY})
    there = await open_found(settings, found)
    names = {url: engine.name for url, engine in there.items()}
    run = rollouts(settings, engines=list(there.values()), prompts=PROMPTS, reward=lambda p, r: 1.0)
    async with run:
        scheduler: Any = run.scheduler
        roster: EngineRoster = scheduler._roster
        following = asyncio.ensure_future(roster.follow(found, 5.0, names))

        def present() -> list[str]:
            return ["http://" + engine.name for engine in run.engines]

        second = await found.start()
        found.urls.append("http://127.0.0.1:1")  # nobody listens there
        await asyncio.sleep(21)
        assert present() == [first.url, second.url]
        found.error = OSError("no such file")
        await asyncio.sleep(21)
        assert present() == [first.url, second.url]
        found.error, found.urls = None, [second.url]
        await asyncio.sleep(6)
        assert present() == [second.url]
        await run.next_batch()
        await run.weight_update("w://1")
        found.urls.append(first.url)
        await asyncio.sleep(6)
        assert present() == [second.url, first.url]
        assert first._client
        following.cancel()
        with pytest.raises(asyncio.CancelledError):
            await following
    assert not first._client, "the session was not ended"
    await found.close()


def test_a_run_begins_with_the_servers_that_answer() -> None:
    """One at least; a function that returns no addresses is refused."""

    async def begins() -> None:
        found = Found()
        settings = config(engine={"kind": "april", "urls": ["http://127.0.0.1:1"], "api_key": KEY})
        with pytest.raises(ConfigError, match="returned no address"):
            await open_found(settings, found)
        found.urls.append("http://127.0.0.1:1")
        with pytest.raises(EngineError):
            await open_found(settings, found)
        server = await found.start()
        engines = await open_found(settings, found)
        assert list(engines) == [server.url]
        with pytest.raises(ConfigError, match="list of addresses"):
            await open_found(settings, lambda: "http://127.0.0.1:1")
        for engine in engines.values():
            await engine.close()
        await found.close()

    run_with_sockets(begins())


def test_a_server_that_does_not_fit_is_left_alone() -> None:
    """Its connection is closed again, and another client may have it."""

    async def refused() -> None:
        found = Found()
        first = await found.start()
        small = TrueEngine()
        small.capabilities = april.Capabilities(
            logprob_kind=april.LogprobKind.TEMPERATURE, vocab_size=1000, max_context=100
        )
        other = await serve(small)
        settings = config(engine={"kind": "april", "urls": [first.url], "api_key": KEY})
        there = await open_found(settings, found)
        async with rollouts(settings, engines=list(there.values()), prompts=PROMPTS) as run:
            with pytest.raises(ConfigError, match="a context of 100 tokens"):
                await run.scheduler.aadd_engine(other.url)
            assert not other._client
            with pytest.raises(EngineError, match="401"):
                await run.scheduler.aadd_engine((await found.start()).url, api_key="wrong")
        await other.close()
        await found.close()

    run_with_sockets(refused())


def test_a_server_that_is_here_keeps_its_session() -> None:
    """Whoever adds it again under any spelling, and while it joins, is refused before the server is asked."""

    async def refused() -> None:
        found = Found()
        first, second = await found.start(), await found.start()
        settings = config(engine={"kind": "april", "urls": [first.url], "api_key": KEY})
        there = await open_found(settings, found)
        async with rollouts(settings, engines=[there.pop(first.url)], prompts=PROMPTS) as run:
            await there[second.url].close()
            session = first._session
            for url in (first.url, f" {first.url}/\n", first.url.upper()):
                with pytest.raises(ConfigError, match="an engine 127"):
                    await run.scheduler.aadd_engine(url)
            assert first._session == session
            adding = (run.scheduler.aadd_engine(second.url) for _ in range(2))
            said = await asyncio.gather(*adding, return_exceptions=True)
            assert [type(each) for each in said] == [str, ConfigError]
            assert second._client
        await found.close()

    run_with_sockets(refused())


@pytest.mark.parametrize("end", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()])
@pytest.mark.parametrize("asynchronous", [False, True])
@on_virtual_time
async def test_nothing_that_discover_raises_ends_the_run(asynchronous: bool, end: BaseException) -> None:
    """It counts as a failure of the function, and engines stay."""

    def plain() -> list[str]:
        raise end

    async def other() -> list[str]:
        raise end

    with pytest.raises(RolloutError):
        await urls_of(other if asynchronous else plain)


@on_virtual_time
async def test_discover_may_be_a_generator() -> None:
    """Its addresses are those that it yields."""

    def found() -> Iterator[str]:
        yield from ("http://a:1", "http://A:1/")

    assert await urls_of(found) == ["http://a:1"]


@on_virtual_time
async def test_a_key_that_no_header_can_hold_is_not_shown() -> None:
    """The error says what is wrong with it, and not what it is."""
    async with run_of(fake("a")) as run:
        for key in ("se cret", "secret\n", 3):
            with pytest.raises(ConfigError, match="the key of the server") as caught:
                await run.scheduler.aadd_engine("http://127.0.0.1:1", api_key=key)
            assert "cret" not in str(caught.value)


def test_discover_is_in_place_of_engines() -> None:
    """What contradicts it is refused before anything starts."""
    for more in ({"engines": [fake("a")]}, {"model": object()}, {"discover_every_s": 0}):
        arguments: dict[str, Any] = {"discover": lambda: [], "prompts": PROMPTS, "reward": None, **more}
        with pytest.raises(ConfigError, match="discover"):
            april.RolloutScheduler(config(), **arguments)
    with pytest.raises(ConfigError, match="discover"):
        april.RolloutScheduler(config(), discover=["http://a:1"], prompts=PROMPTS, reward=None)  # type: ignore[arg-type]
