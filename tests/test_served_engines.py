"""An engine behind april's own server: who may ask, what a session is, what is sent once, and what is believed."""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from aiohttp import web
from msgspec import structs
from served_lives import KEY, Life, Process, TrueEngine, connections_of, logprobs_of, says
from server_fixtures import Got, read, request
from socket_clock import run_with_sockets

import april
from april import errors
from april.config.engines import AprilEngineConfig
from april.core.attachments import Attachment, Placed
from april.core.versions import FIRST_VERSION, PolicyVersion
from april.engines.protocol import Chunk, EngineFinish, FirstWeights, Health, SharesModel
from april.engines.served import server as served_server
from april.engines.served.client import ServedEngine, connect_april
from april.engines.served.server import EngineServer, serve
from april.engines.served.wire import ChunkMessage, EngineCall, Failure, Leave, Outbox, Start, Tensors, unpacked
from april.engines.weight_transfer import TensorSpec
from april.errors import ConfigError, EngineError, EngineUnreachable, RequestRefused, WeightsGone
from april.serialization.own_values import pack, unpack
from april.testing import FakeEngine

ONE, TWO = PolicyVersion(0, 1), PolicyVersion(0, 2)
RED = Attachment.of("image", b"red" * 1000)


def with_sockets(test: Any) -> Any:
    """The test runs on a virtual clock with real sockets."""

    def run() -> None:
        run_with_sockets(asyncio.wait_for(test(), 100_000))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def client_of(server: EngineServer, key: str = KEY, interval_s: float = 1.0, **more: Any) -> ServedEngine:
    settings: dict[str, Any] = {"urls": (server.url,), "api_key": key or None, "interval_s": interval_s, **more}
    (engine,) = await connect_april(AprilEngineConfig(**settings))
    return engine


@asynccontextmanager
async def offered(engine: Any = None, **more: Any) -> AsyncIterator[tuple[Any, EngineServer, ServedEngine]]:
    engine = engine or TrueEngine()
    server = await serve(engine, key=KEY)
    client = await client_of(server, **more)
    try:
        yield engine, server, client
    finally:
        await client.close()
        await server.close()


async def updated(client: ServedEngine, version: PolicyVersion, path: str | None = "w://1") -> None:
    await client.pause()
    await client.update_weights(version, path)
    await client.resume()


def long(**more: Any) -> Any:
    """A request whose response has many tokens."""
    prompt = next([5, i] for i in range(999) if len(says([5, i], None, 99)) > 35)
    return request(prompt, 90, **more)


async def some(got: Got) -> None:
    for _ in range(1000):
        if got.tokens:
            return
        await asyncio.sleep(0.1)
    raise AssertionError("no tokens have come")


async def said_of(server: EngineServer, name: str, call: EngineCall) -> Any:
    """What the server answers to a control call of anybody with the key."""
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as http:  # noqa: SIM117
        async with http.post(f"{server.url}/april/{name}", data=pack(call)) as reply:
            return reply.status if reply.status != 200 else unpack(await reply.read(), served_server.CallReply)


# ---------------------------------------------------------------- who may ask


@with_sockets
async def test_nobody_without_the_key_is_let_in() -> None:
    """Another key, or none, opens nothing. A key that no header holds, none where others listen, and a port that is
    none are refused."""
    server = await serve(TrueEngine(), key=KEY)
    for key in ("", "other", KEY + "x"):
        with pytest.raises(EngineError, match="401"):
            await (await client_of(server, key)).close()
    async with aiohttp.ClientSession() as http:
        for method, route in (("GET", "line/x"), ("PUT", "attachments/image/x"), ("POST", "tensors"), ("POST", "end")):
            async with http.request(method, f"{server.url}/april/{route}") as reply:
                assert reply.status == 401, route
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
    writer.write(b"POST /april/end HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xe9\r\n\r\n")  # not UTF-8
    assert b" 401 " in await reader.readline()
    writer.close()
    await server.close()
    with pytest.raises(ConfigError, match="give a key="):
        await serve(TrueEngine(), "0.0.0.0")  # noqa: S104
    with pytest.raises(ConfigError, match="line break"):
        await serve(TrueEngine(), key="a\n")
    with pytest.raises(ConfigError, match="is not an engine"):
        await serve(object())  # type: ignore[arg-type]
    for port in (-1, 70_000):
        with pytest.raises(ConfigError, match="serve: cannot listen at"):
            await serve(TrueEngine(), port=port)


@with_sockets
async def test_no_page_in_a_browser_is_let_in() -> None:
    """A page of anybody can post to this machine; browsers say from where."""
    server = await serve(TrueEngine())
    async with aiohttp.ClientSession() as http:  # noqa: SIM117
        async with http.post(f"{server.url}/april/begin", data=b"", headers={"Origin": "http://a.example"}) as reply:
            assert reply.status == 403
    await server.close()


@with_sockets
async def test_redirects_are_not_followed() -> None:
    """Neither those of control calls nor those of the WebSocket, which aiohttp would follow."""
    reached: list[str] = []

    async def away(http: web.Request) -> web.Response:
        reached.append(http.path)
        raise web.HTTPFound("/elsewhere")

    app = web.Application()
    app.router.add_route("*", "/{all:.*}", away)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    config = AprilEngineConfig(urls=(f"http://127.0.0.1:{runner.addresses[0][1]}",))  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="redirect"):
        await connect_april(config)
    async with offered() as (_, _, client):
        client._client.url = str(config.urls[0])
        got = await read(client, request())
        assert isinstance(got.error, EngineError)
        assert "redirect" in str(got.error)
    assert reached == ["/april/begin", f"/april/line/{client._session}", "/april/end"]
    await runner.cleanup()


@with_sockets
async def test_what_is_too_large_is_not_read() -> None:
    """A message, an attachment, a call and a bucket of tensors beyond the limits end their connection or call."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served_server, "MESSAGE_BYTES", 1 << 16)
        await too_large(b"x" * ((1 << 16) + 1))


async def too_large(big: bytes) -> None:
    """Send it everywhere."""
    async with offered() as (_, server, client):
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as http:
            for method, route in (("POST", "pause"), ("PUT", "attachments/image/x")):
                with suppress(aiohttp.ClientError):
                    async with http.request(method, f"{server.url}/april/{route}", data=big) as reply:
                        assert reply.status == 413
            async with http.post(f"{server.url}/april/tensors", data=b"\xff\xff\xff\xff") as reply:
                assert reply.status == 400
            head = pack(Tensors(client._session, [TensorSpec("w", "float32", (1,))], [1 << 60], True))
            body = len(head).to_bytes(4, "big") + head
            async with http.post(f"{server.url}/april/tensors", data=body) as reply:
                assert reply.status == 400
                assert "at most" in await reply.text()
            line = await http.ws_connect(f"{server.url}/april/line/{client._session}?interval_s=1")
            await line.send_bytes(big)
            end = await line.receive()
            assert (end.type, end.data) == (aiohttp.WSMsgType.CLOSE, aiohttp.WSCloseCode.MESSAGE_TOO_BIG)
            await line.close()
        assert (await read(client, request())).finish is not None


@with_sockets
async def test_noise_ends_a_connection_and_nothing_else() -> None:
    """What is no message of april's closes the line it came on; the client opens another one."""
    async with offered() as (_, server, client):
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as http:
            for noise in (b"\xc1", msgspec.msgpack.encode([b"\x90"]), msgspec.msgpack.encode([pack(["Start", {}])])):
                line = await http.ws_connect(f"{server.url}/april/line/{client._session}?interval_s=1")
                await line.send_bytes(noise)
                assert (await line.receive()).type is aiohttp.WSMsgType.CLOSE
                await line.close()
            for route, body in (("pause", b"noise"), ("nothing", pack(EngineCall())), ("line", b"")):
                async with http.post(f"{server.url}/april/{route}", data=body) as reply:
                    assert reply.status in (400, 404)
        assert (await read(client, request())).finish is not None


# ---------------------------------------------------------------- sessions


@with_sockets
async def test_a_second_client_shuts_out_the_first() -> None:
    """The first one's request ends with an error; it can neither ask nor change weights until the other has gone."""
    async with AsyncExitStack() as stack, offered(interval_s=0.0) as (engine, server, first):
        await updated(first, ONE)
        got, asked = Got(), long()
        running = asyncio.ensure_future(read(first, asked, got))
        await some(got)
        second = await client_of(server)
        stack.push_async_callback(second.close)
        assert not engine._running
        await running
        assert isinstance(got.error, EngineUnreachable)
        assert isinstance((await read(first, request())).error, EngineError)
        for call in (first.pause, first.resume, lambda: first.update_weights(TWO, "w://2")):
            with pytest.raises(EngineError):
                await call()
        assert await first.health() == Health(ok=False, detail="another client uses the engine")
        assert engine.weights == "w://1"
        # of the second client, which knows nothing of them, these weights are those of another run
        assert second.capabilities.first_weights is FirstWeights.OTHERS
        assert "another run" in str((await read(second, request())).error)
        await updated(second, ONE, "w://3")
        assert (await read(second, request())).versions[0] == ONE
        await second.close()
        health = await first.health()
        assert health.ok
        assert not health.current
        await updated(first, TWO, "w://4")
        assert set((await read(first, request())).versions) == {TWO}
        assert (await first.health()).current


@with_sockets
async def test_present_weights_are_the_first_version_if_the_settings_say_so() -> None:
    """And only then: a run that begins takes weights that another run has left for those of no version."""
    async with offered() as (engine, server, client):
        await updated(client, ONE)
        later = await client_of(server, first_weights="present")
        assert later.capabilities.first_weights is FirstWeights.KNOWN
        got = await read(later, request())
        assert set(got.versions) == {FIRST_VERSION}
        assert engine.weights == "w://1"
        await later.close()


@with_sockets
async def test_a_process_that_was_started_anew_hands_over_nothing() -> None:
    """Its weights are those of its start. It says so, and gets requests again after an update; not by name alone."""
    process = Process(Life(0))
    process.life.luck = random.Random(3)
    await process.start()
    assert process.server is not None
    client = await client_of(process.server, interval_s=0.0)
    process.life.allowed |= {"w://1", "w://2"}
    process.engine._life = None  # no update fails here
    await updated(client, ONE)
    got = Got()
    running = asyncio.ensure_future(read(client, long(), got))
    await some(got)
    await process.kill()
    await running
    assert isinstance(got.error, EngineUnreachable)
    assert np.array_equal(got.logprobs, logprobs_of(np.array(got.tokens, np.int32), "w://1"))
    assert not (await client.health()).ok
    await process.start()
    process.engine._life = None
    health = await client.health()
    assert health.ok
    assert not health.current
    assert isinstance((await read(client, request())).error, EngineError)
    await client.pause()
    client._of_start = False
    with pytest.raises(WeightsGone):
        await client.update_weights(FIRST_VERSION)
    assert isinstance((await read_paused(client)).error, EngineError)
    await client.update_weights(TWO, "w://2")
    await client.resume()
    assert set((await read(client, request())).versions) == {TWO}
    await client.close()
    await process.kill()


@with_sockets
async def test_another_model_at_the_same_address_is_none_of_the_run() -> None:
    """Its tokens and log-probabilities would mean something else, so it gets no weights and no requests."""
    process = Process(Life(0))
    await process.start()
    assert process.server is not None
    client = await client_of(process.server)
    for changes, told in (
        ({"vocab_size": 50}, "vocab_size 50 instead of 1000"),
        ({"eos_token_ids": (7,)}, r"eos_token_ids \(7,\) instead of \(0,\)"),
        ({"logprob_kind": april.LogprobKind.RAW}, "logprob_kind raw instead of temperature"),
        ({"max_context": 30}, "max_context 30 instead of 400"),
    ):
        await process.kill()
        await process.start()
        process.engine.capabilities = replace(process.engine.capabilities, **changes)
        for _ in range(2):
            with pytest.raises(EngineError, match=f"was restarted with another model: {told}"):
                await client.pause()
        assert not (await client.health()).current
        assert not process.server._client, "it is nobody's"
    await process.kill()
    await process.start()
    process.engine.capabilities = replace(process.engine.capabilities, max_in_flight=2)
    process.life.allowed.add("w://1")
    process.engine._life = None
    await updated(client, ONE)
    assert set((await read(client, request())).versions) == {ONE}
    await client.close()
    await process.kill()


async def read_paused(client: ServedEngine) -> Got:
    """A request at an engine whose gate is opened here, though its weights are not known."""
    client._admission.open()
    try:
        return await read(client, request())
    finally:
        client._admission.close()


@with_sockets
async def test_a_broken_connection_ends_its_requests_at_once() -> None:
    """On both sides; the next request opens another one in the same session."""
    async with offered(interval_s=0.0) as (engine, server, client):
        got = Got()
        running = asyncio.ensure_future(read(client, long(), got))
        await some(got)
        for connection in connections_of(server):
            connection.transport.abort()
        began = asyncio.get_running_loop().time()
        await running
        assert isinstance(got.error, EngineUnreachable)
        assert asyncio.get_running_loop().time() - began < 0.1
        await asyncio.sleep(1.0)
        assert not engine._running
        session = client._session
        assert (await read(client, request())).finish is not None
        assert client._session == session


@with_sockets
async def test_the_server_itself_refuses_what_its_client_should_not_ask() -> None:
    """Requests between two versions, calls of another session, a line of another session."""
    async with offered() as (engine, server, client):
        await client.pause()
        engine.weights = "torn"
        broken = engine.update_weights
        engine.update_weights = lambda version, path=None: _raises(EngineError("broken"))
        with pytest.raises(EngineError, match="broken"):
            await client.update_weights(ONE, "w://1")
        engine.update_weights = broken
        await engine.resume()
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as http:
            line = await http.ws_connect(f"{server.url}/april/line/{client._session}?interval_s=1")
            await line.send_bytes(msgspec.msgpack.encode([pack(Start(request()))]))
            (piece,) = unpacked((await line.receive()).data, ChunkMessage)
            assert piece.failure is not None
            assert "no policy version" in piece.failure.message
            await line.close()
            with pytest.raises(aiohttp.WSServerHandshakeError, match="409"):
                await http.ws_connect(f"{server.url}/april/line/other?interval_s=1")
        for name in ("pause", "resume", "update", "end", "quiet", "content"):
            for session in ("", "other"):
                answer = await said_of(server, name, EngineCall(session, version=TWO, path="w://2"))
                assert answer.failure.kind == "EngineUnreachable", name
        assert engine.weights == "torn"


async def _raises(error: Exception) -> None:
    raise error


# ---------------------------------------------------------------- weights


@with_sockets
async def test_an_update_that_fails_leaves_what_the_engine_says() -> None:
    """One that was refused leaves the old weights in use; after one that tore them, nothing is generated."""
    async with offered() as (engine, _, client):
        await updated(client, ONE)
        right = engine.update_weights
        for weights in ("w://1", "torn"):

            async def fails(version: PolicyVersion, path: str | None = None, weights: str = weights) -> None:
                engine.weights = weights
                raise EngineError("no")

            engine.update_weights = fails
            await client.pause()
            with pytest.raises(EngineError, match="no"):
                await client.update_weights(TWO, "w://2")
            await client.resume()
            whole = weights != "torn"
            assert (await client.health()).current == whole
            got = await read(client, request())
            assert (got.error is None) == whole
            assert set(got.versions) == ({ONE} if whole else set())
        engine.update_weights = right
        await updated(client, TWO, "w://2")
        assert set((await read(client, request())).versions) == {TWO}


@with_sockets
async def test_tensors_that_come_leave_no_version_until_they_are_named() -> None:
    """They arrive as they were, whatever their type and shape; an update names them."""
    torch = pytest.importorskip("torch")
    took: list[Any] = []

    class Takes(TrueEngine):
        def __init__(self) -> None:
            super().__init__()
            self.capabilities = replace(self.capabilities, takes_tensors=True)

        def reads(self, model: Any) -> bool:
            return True

        async def take(self, specs: Any, tensors: Any, last: bool) -> None:
            took.append(([s.name for s in specs], [t.clone() for t in tensors], last))

    async with offered(Takes()) as (_, server, client):
        sent = [torch.arange(6.0).reshape(2, 3), torch.tensor(7, dtype=torch.bfloat16), torch.zeros(0, 4).half()]
        specs = [TensorSpec(f"t{i}", str(t.dtype).removeprefix("torch."), tuple(t.shape)) for i, t in enumerate(sent)]
        await client.pause()
        await client.take(specs[:1], sent[:1], False)
        await client.resume()
        assert not (await client.health()).current
        assert "part of the new weights" in str((await read(client, request())).error)
        assert server._version is None
        await client.pause()
        await client.take(specs, sent, True)
        await client.update_weights(ONE)
        await client.resume()
        names, tensors, last = took[-1]
        assert (names, last) == (["t0", "t1", "t2"], True)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(tensors, sent, strict=True))
        assert set((await read(client, request())).versions) == {ONE}
        assert not client.reads(object())


@with_sockets
async def test_an_engine_on_the_model_of_its_own_trainer_is_waited_for() -> None:
    """Nobody sends it weights, its process is asked to be quiet, and one that has gone is quiet."""
    quiet: list[str] = []

    class Shares(TrueEngine):
        async def quiet(self) -> None:
            quiet.append("asked")

    server = await serve(Shares(), key=KEY, shares_model=True)
    client = await client_of(server)
    assert isinstance(client, SharesModel)
    assert client.capabilities.shares_weights
    assert not client.capabilities.takes_tensors
    await client.quiet()
    assert quiet == ["asked"]
    await server.close()
    await client.quiet()
    await client.close()


# ---------------------------------------------------------------- what cannot be encoded

HALF = "\ud83d"
"""Half of a surrogate pair, which no UTF-8 text can hold."""


@with_sockets
async def test_a_request_that_cannot_be_encoded_is_refused_alone() -> None:
    """The others on the connection, running and later ones, get their answers."""
    async with offered() as (_, _, client):
        running = asyncio.ensure_future(read(client, long()))
        await asyncio.sleep(0.1)
        refused = await read(client, request(stop=(HALF,)))
        assert isinstance(refused.error, RequestRefused)
        assert "surrogates not allowed" in str(refused.error)
        assert (await running).finish is not None
        assert (await read(client, request())).finish is not None


class Unsendable(TrueEngine):
    """The chunks of one attempt have a field that cannot be encoded; the request does not end by itself."""

    bad = ""

    async def generate(self, asked: Any) -> Any:
        async for chunk in super().generate(asked):
            yield replace(chunk, stopped_at=object()) if asked.attempt_id == self.bad else chunk


@with_sockets
async def test_an_answer_that_cannot_be_encoded_ends_its_request_alone() -> None:
    """With the reason, whether tokens are sent at once, at the interval or at the end; the engine's request ends."""
    for interval_s in (0.0, 1.0, 600.0):
        async with offered(Unsendable(), interval_s=interval_s) as (engine, _, client):
            asked = long()
            engine.bad = asked.attempt_id
            others = [asyncio.ensure_future(read(client, long())) for _ in range(2)]
            failed = await read(client, asked)
            assert type(failed.error) is EngineError
            assert "a object cannot be sent to another process" in str(failed.error)
            assert [got.error for got in await asyncio.gather(*others)] == [None, None]
            assert (await read(client, long())).finish is not None
            assert not engine._running


def test_numpys_scalars_arrive_as_numbers() -> None:
    """Where april's types have numbers, in answers and reports of engines."""
    chunk = Chunk(np.zeros(2, np.int32), np.zeros(2, np.float32), ONE, cached_tokens=np.int64(3))  # type: ignore[arg-type]
    health = Health(ok=np.bool_(True), counters={"load": np.float32(0.5)})  # type: ignore[arg-type,dict-item]
    assert unpack(pack(chunk), Chunk).cached_tokens == 3
    assert unpack(pack(health), Health) == Health(ok=True, counters={"load": 0.5})


class Unprintable(TrueEngine):
    """Its texts contain the name of a file that is not UTF-8."""

    async def generate(self, asked: Any) -> Any:
        raise OSError("no file /data/\udce9t\udce9")
        yield

    async def health(self) -> Health:
        return Health(ok=True, detail="/data/\udce9t\udce9")


@with_sockets
async def test_texts_that_no_message_can_hold_are_told_in_part() -> None:
    """An error comes with escapes; a report that cannot be encoded becomes an error."""
    async with offered(Unprintable()) as (_, _, client):
        got = await read(client, request())
        assert str(got.error) == r"OSError: no file /data/\udce9t\udce9"
        health = await client.health()
        assert not health.ok
        assert "surrogates not allowed" in health.detail


async def test_a_connection_that_cannot_send_is_closed() -> None:
    """So that its reader ends, and with it the requests that wait for answers."""

    class Socket:
        closed = False

        async def send_bytes(self, content: bytes) -> None:
            raise ConnectionResetError("gone")

        async def close(self) -> None:
            self.closed = True

    socket = Socket()
    outbox = Outbox(socket)
    outbox.put(Leave("a"))
    with pytest.raises(ConnectionResetError):
        await outbox.run()
    assert socket.closed


# ---------------------------------------------------------------- requests and answers


@with_sockets
async def test_tokens_are_handed_over_at_the_interval_and_not_before() -> None:
    """What nobody reads along comes every so often; what somebody reads along comes at once."""
    for interval_s, stream in ((5.0, False), (5.0, True), (0.0, False)):
        async with offered(FakeEngine(lengths=40, chunk_tokens=1), interval_s=interval_s) as (_, _, client):
            times, counts, began = [], [], asyncio.get_running_loop().time()
            async for chunk in client.generate(request([5, 6], 60, stream=stream)):
                times.append(asyncio.get_running_loop().time() - began)
                counts.append(len(chunk.tokens))
            assert sum(counts) == 40
            if stream or not interval_s:
                assert len(counts) == 40
            else:
                assert len(counts) <= 9
                assert max(np.diff([0.0, *times])) <= 5.5


@with_sockets
async def test_an_abort_hands_over_what_there_is_and_a_reader_that_leaves_frees_the_place() -> None:
    """Also of an answer in one piece."""
    async with offered(interval_s=600.0) as (engine, _, client):
        asked, left = long(), long()
        running = [asyncio.ensure_future(read(client, r)) for r in (asked, left)]
        await asyncio.sleep(1.5)
        running[1].cancel()
        await asyncio.sleep(0.6)
        assert engine._running == {asked.attempt_id}
        await client.abort([asked.attempt_id])
        got = await running[0]
        assert got.finish is EngineFinish.ABORT
        assert got.tokens == says(asked.token_ids, None, 90)[: len(got.tokens)].tolist() != []
        with suppress(asyncio.CancelledError):
            await running[1]


@with_sockets
async def test_an_attachment_is_sent_once_and_again_to_a_server_that_lost_it() -> None:
    """However many requests bring it at a time; the engine sees its bytes."""
    seen: list[bytes | None] = []

    class Sees(FakeEngine):
        def generate(self, request: Any) -> Any:
            seen.extend(placed.attachment.data for placed in request.attached)
            return super().generate(request)

    async with offered(Sees(max_context=400)) as (_, server, client):
        ask = [structs.replace(request([5, 400, 400, 7], 20), attached=(Placed(RED, 1, 2, (400,)),)) for _ in range(6)]
        again = ask.pop()
        got = await asyncio.gather(*(read(client, r) for r in ask))
        assert [g.error for g in got] == [None] * 5
        assert client.attachments_sent == 1
        server._attachments.clear()
        assert (await read(client, again)).error is None
        assert client.attachments_sent == 2
        assert seen == [RED.data] * 6
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as http:  # noqa: SIM117
            async with http.put(f"{server.url}/april/attachments/image/{RED.digest}", data=b"blue") as reply:
                assert reply.status == 400


def test_every_error_of_an_engine_arrives_as_it_was() -> None:
    """With what it has besides its message; any other exception is an EngineError with its name."""
    kinds = [k for _, k in inspect.getmembers(errors, inspect.isclass) if issubclass(k, EngineError)]
    assert len(kinds) > 6
    for kind in kinds:
        sent: Any = kind("what")
        for name, value in (("retry_after_s", 2.5), ("unsound", 7)):
            if hasattr(sent, name):
                setattr(sent, name, value)
        got: Any = unpack(pack(Failure.of(sent)), Failure).error()
        assert type(got) is kind
        assert str(got) == "what"
        assert getattr(got, "retry_after_s", None) == getattr(sent, "retry_after_s", None)
        assert getattr(got, "unsound", None) == getattr(sent, "unsound", None)
    assert str(Failure.of(ValueError("odd")).error()) == "ValueError: odd"
    assert type(Failure("SchedulerClosed", "x").error()) is EngineError
    assert type(Failure("os", "x").error()) is EngineError


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (TrueEngine(), "give a function that makes the engine, got TrueEngine"),
        (lambda: None, "must return an engine"), (lambda: [], "must return an engine"),
        (lambda: [TrueEngine(), 3], "must return an engine"), (lambda: [TrueEngine()] * 2, "must return an engine"),
        ({"kind": "april", "urls": ["http://127.0.0.1:1"]}, "engine.kind april cannot be served"),
    ],
)  # fmt: skip
def test_what_is_no_way_to_make_engines_is_refused(make: Any, says: str) -> None:
    """Nothing is served then, and nobody waits; one engine has one server."""


    def served(url: str) -> None:
        raise AssertionError(url)

    with pytest.raises(ConfigError, match=says):
        april.serve_forever(make, told=served)
