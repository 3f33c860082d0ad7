"""Servers of others behind one process of april's: what a scheduler is promised before a server, it is before that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_servers.base import PlannedFault, RequestFault, uncut
from msgspec.structs import replace
from real_schedulers import reward
from served_lives import connections_of
from server_fixtures import BOTH, KINDS, PROMPT, Got, ServerThread, read, request, settings, until, update
from test_kept_requests import LONG, saved
from test_server_schedulers import MAX_LEN, STEPS, prompts, train

import april
from april.config.engines import AprilEngineConfig
from april.core import engine_table
from april.core.versions import FIRST_VERSION, PolicyVersion
from april.engines.kinds import serving
from april.engines.kinds.factory import open_servers
from april.engines.protocol import EngineFinish, OnWeightUpdate, Request
from april.engines.served.server import EngineServer, serve
from april.errors import ConfigError, EngineError, EngineUnreachable, WeightsGone

KEY = "secret"
ONE, TWO = PolicyVersion(0, 1), PolicyVersion(0, 2)


class Relay:
    """The process between: engines before servers, each behind a server of april's at a port that stays."""

    def __init__(self, kind: str, servers: list[Any], **config: Any) -> None:
        self._settings = settings(kind, *servers, eos_token_ids=(2,), **config)
        self.served: list[EngineServer] = []
        self.ports = [0] * len(servers)

    async def start(self) -> None:
        for i, engine in enumerate(await open_servers(self._settings)):
            self.served.append(await serve(engine, port=self.ports[i], key=KEY))
            self.ports[i] = int(self.served[i].url.rsplit(":", 1)[1])

    async def stop(self) -> None:
        for server in self.served:
            for connection in connections_of(server):
                connection.transport.abort()
            await server.close()
            await server.engine.close()
        self.served.clear()

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    async def client(self, interval_s: float = 0.0) -> Any:
        """An engine of another process, for its first one."""
        config: Any = {"urls": self.urls[:1], "api_key": KEY, "interval_s": interval_s}
        (engine,) = await open_servers(AprilEngineConfig(**config))
        return engine


@asynccontextmanager
async def relayed(kind: str, interval_s: float = 0.0, **options: Any) -> AsyncIterator[tuple[Any, Relay, Any]]:
    """A server, the process before it, and the engine of another one."""
    server = KINDS[kind][0](**options)
    await server.start()
    relay = Relay(kind, [server], **({"max_token_loss": 0} if kind == "vllm" else {}))
    await relay.start()
    client = await relay.client(interval_s)
    try:
        yield server, relay, client
        assert not server.violations
    finally:
        await client.close()
        await relay.stop()
        await server.close()


@contextmanager
def scheduler_over(
    kind: str, servers: list[Any], engine: dict[str, Any], interval_s: float = 600.0, **changes: Any
) -> Iterator[april.RolloutScheduler]:
    """A scheduler before a relay before servers that listen."""
    relay = Relay(kind, servers, **engine)
    with ServerThread() as thread:
        thread.call(relay.start())
        config = april.Config(
            rollout_batch_size=4, n_samples_per_prompt=2, over_sampling_batch_size=10, max_response_len=MAX_LEN,
            abort_resend_s=0.05, **changes,
            engine={"kind": "april", "urls": relay.urls, "api_key": KEY, "interval_s": interval_s},
        )  # fmt: skip
        with april.RolloutScheduler(config, prompts=prompts(), reward=reward, check=True) as scheduler:
            yield scheduler
        thread.call(relay.stop())


WAYS = [("vllm", {"max_token_loss": None}), ("vllm", {"max_token_loss": 0}), ("sglang", {})]


@pytest.mark.parametrize(("kind", "engine"), WAYS, ids=str)
def test_steps_over_two_servers(kind: str, engine: dict[str, Any], tmp_path: Path) -> None:
    """Every delivered token is the servers' own under its version, samples were cut by id, and weights have names."""
    servers = [KINDS[kind][0](max_running=2, turns=5) for _ in range(2)]
    with ServerThread(*servers), scheduler_over(kind, servers, engine) as scheduler:
        assert train(servers, scheduler, tmp_path) > 0
        for server in servers:
            assert not server.violations
            assert server.weights == f"w{STEPS}"
            assert server.label.startswith(f"v0.{STEPS}-")
            assert server.aborts


FAULTS = (
    RequestFault.BREAK_OFF, RequestFault.BUSY, RequestFault.NAN_LOGPROB, RequestFault.UNASKED_ABORT,
    RequestFault.FOREIGN_LABEL,
)  # fmt: skip
"""One for each way in which a request fails."""


@pytest.mark.parametrize("kind", BOTH)
def test_faults_lose_nothing_that_came(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a server does with a few requests, what is delivered is right and the ledger is exact."""
    monkeypatch.setattr(engine_table, "PROBE_INTERVAL_S", 0.01)
    server = KINDS[kind][0](max_running=6, turns=5)
    engine = {"max_token_loss": 0} if kind == "vllm" else {}
    with ServerThread(server), scheduler_over(kind, [server], engine) as scheduler:
        first = len(server.runs)
        server.faults += [PlannedFault(f, request=first + 3 * i, after_tokens=i) for i, f in enumerate(FAULTS)]
        train([server], scheduler, tmp_path)
        assert not server.violations
        assert not any(planned.times for planned in server.faults)


def test_a_server_that_dies_leaves_what_it_had_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its samples finish on the other one, though nothing was handed over before; the one process stays."""
    monkeypatch.setattr(engine_table, "PROBE_INTERVAL_S", 0.01)
    servers = [KINDS["vllm"][0](max_running=6, turns=5, mean_length=60) for _ in range(2)]
    with ServerThread(*servers), scheduler_over("vllm", servers, {"max_token_loss": 0}) as scheduler:
        first = len(servers[0].runs)
        servers[0].faults += [
            PlannedFault(RequestFault.SERVER_DIES, request=first + n, after_tokens=5) for n in range(12)
        ]
        samples = [sample for _ in range(3) for sample in scheduler.next_batch().samples]
        for sample in samples:
            assert sample.tokens.tolist() == uncut(sample.prompt.token_ids, max_tokens=MAX_LEN, mean_length=60)[0]
        assert not servers[0].alive
        # a sample that had begun on the server that died went on elsewhere
        assert any(len({segment.engine for segment in sample.segments}) == 2 for sample in samples)
        assert not sum(scheduler.ledger()["tokens"].dropped.values())


async def reading(client: Any, server: Any, tokens: int, **more: Any) -> tuple[Request, Got, asyncio.Task[Got]]:
    """A request for which the server has sent so many tokens."""
    had, asked, got = len(server.runs), request(**more), Got()
    task = asyncio.create_task(read(client, asked, got))
    await until(lambda: len(server.runs) > had)
    server.step(tokens)
    return asked, got, task


@pytest.mark.parametrize("interval_s", [600.0, 0.001])
async def test_what_has_piled_up_is_handed_over(interval_s: float) -> None:
    """At the interval, however little it is; before that, nothing; what somebody reads along, at once."""
    async with relayed("vllm", interval_s, stepped=True, mean_length=LONG) as (server, _, client):
        _, along, first = await reading(client, server, 3, stream=True)
        await until(lambda: len(along.tokens) == 3)
        asked, got, second = await reading(client, server, 5)
        await until(lambda: len(along.tokens) == 8)
        if interval_s < 1:
            await until(lambda: len(got.tokens) == 5)
        assert got.tokens == ([] if interval_s > 1 else uncut(PROMPT, max_tokens=5, mean_length=LONG)[0])
        await client.abort()
        await until(lambda: first.done() and second.done())
        assert got.finish is EngineFinish.ABORT
        assert got.tokens == uncut(PROMPT, max_tokens=len(got.tokens), mean_length=LONG)[0]
        assert len(got.tokens) == server.runs[-1].sent >= 5
        assert asked.attempt_id in str(server.aborts)


async def test_requests_kept_over_an_update_carry_the_version_of_each_token(tmp_path: Path) -> None:
    """Read in one piece at the end: the tokens before the update and those after it."""
    async with relayed("vllm", 600.0, stepped=True, mean_length=LONG) as (server, _, client):
        got = Got()
        asked = replace(request(stream=True), in_flight=OnWeightUpdate.KEEP)
        task = asyncio.create_task(read(client, asked, got))
        await until(lambda: server.open_requests == 1)
        server.step(4)
        await until(lambda: len(got.tokens) == 4)
        await client.pause_in_flight(OnWeightUpdate.KEEP)
        await client.update_weights(ONE, saved(tmp_path, "w1"))
        await client.resume()
        server.step(3)
        await client.abort()
        await until(task.done)
        before = uncut(PROMPT, max_tokens=4, mean_length=LONG)[0]
        after = uncut(PROMPT + before, weights="w1", max_tokens=len(got.tokens) - 4, mean_length=LONG)[0]
        assert got.tokens == before + after
        assert len(after) >= 3
        assert got.versions == [FIRST_VERSION] * 4 + [ONE] * len(after)
        assert server.pauses == ["keep"]


@pytest.mark.parametrize("kind", BOTH)
async def test_a_server_that_was_started_anew_gives_nothing_before_an_update(kind: str, tmp_path: Path) -> None:
    """The process before it sees that by the label, and the scheduler's side hears it."""
    async with relayed(kind) as (server, _, client):
        await update(client, ONE, saved(tmp_path, "w1"))
        assert set((await read(client, request())).versions) == {ONE}
        assert server.label.startswith("v0.1-")
        server._restart_at_once()
        health = await client.health()
        assert health.ok
        assert not health.current
        got = await read(client, request())
        assert not got.tokens
        assert "restarted" in str(got.error)
        await update(client, ONE, saved(tmp_path, "w1"))
        assert (await client.health()).current
        assert (await client.health()).load is not None
        assert set((await read(client, request())).versions) == {ONE}


@pytest.mark.parametrize("kind", BOTH)
async def test_the_process_between_is_started_anew(kind: str, tmp_path: Path) -> None:
    """Its requests end at once on both sides. The weights of its servers have names that it does not know: they are of
    no version, also not of the first, until an update has succeeded."""
    async with relayed(kind, mean_length=LONG) as (server, relay, client):
        await update(client, ONE, saved(tmp_path, "w1"))
        got = Got()
        task = asyncio.create_task(read(client, request(max_tokens=4000), got))
        await until(lambda: bool(got.tokens))
        await relay.stop()
        await task
        assert isinstance(got.error, EngineUnreachable)
        await until(lambda: not server.open_requests)
        assert not (await client.health()).ok
        await relay.start()
        assert not (await client.health()).current
        assert isinstance((await read(client, request())).error, EngineError)
        await client.pause()
        with pytest.raises(WeightsGone):
            await client.update_weights(FIRST_VERSION)
        await client.resume()
        assert isinstance((await read(client, request())).error, EngineError)
        await update(client, TWO, saved(tmp_path, "w2"))
        assert set((await read(client, request())).versions) == {TWO}
        assert (await client.health()).current


def test_settings_name_the_servers_that_a_process_stands_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """One port after the other; a kind without servers is refused. What stands before them is closed at the end."""
    asked: list[tuple[str, int]] = []
    opened: list[Any] = []

    async def no_server(engine: Any, host: str, port: int, key: str) -> Any:
        asked.append((host, port))
        opened.append(engine)
        return await serve(engine, "127.0.0.1", 0, key)

    def told(url: str) -> None:
        if len(asked) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(serving, "serve", no_server)
    servers = [KINDS["vllm"][0]() for _ in range(2)]
    with ServerThread(*servers):
        urls = [server.url for server in servers]
        april.serve_forever({"kind": "vllm", "urls": urls}, "0.0.0.0", 9000, KEY, told)  # noqa: S104
    assert asked == [("0.0.0.0", 9000), ("0.0.0.0", 9001)]  # noqa: S104
    assert [engine._client.url for engine in opened] == urls
    assert [engine._client._session for engine in opened] == [None, None]
    with pytest.raises(ConfigError, match=r"cannot be served"):
        april.serve_forever({"kind": "simulated"})
