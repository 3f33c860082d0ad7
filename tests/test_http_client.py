"""One server over HTTP: every failure has its type, nothing is followed, cut short or told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from raw_servers import RawServer, http, raw_server
from server_fixtures import until

from april.config.engines import VllmEngineConfig
from april.engines.http.http_client import HttpClient
from april.engines.http.server_probe import connect_all
from april.engines.http.wire import error_text
from april.errors import ConfigError, EngineBusy, EngineError, EngineUnreachable, RequestRefused, WireError


class Answers:
    """What a server says to everything; ``breaks``: so many connections break instead."""

    said: bytes | None = http(200, {"fine": True})
    breaks = 0

    def __call__(self, path: str) -> bytes | None:
        self.breaks -= 1
        return self.said if self.breaks < 0 else b""


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Answers, RawServer, HttpClient]]:
    answers = Answers()
    with raw_server(answers) as server:
        client = HttpClient(server.url, name="one")
        try:
            yield answers, server, client
        finally:
            await client.close()


@pytest.mark.parametrize(
    ("status", "error"),
    [(400, RequestRefused), (422, RequestRefused), (401, EngineError), (404, EngineError), (429, EngineBusy),
     (500, EngineError), (502, EngineError), (503, EngineBusy)],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True], ids=["call", "events"])
async def test_a_status_is_a_type(status: int, error: type[EngineError], stream: bool) -> None:
    """With the server's own words in the message, and the time it asks to wait, at most a minute."""
    async with served() as (answers, _, client):
        answers.said = http(status, {"error": {"message": "said so"}}, "Retry-After: 999")
        with pytest.raises(EngineError, match=f"{status}: said so") as caught:
            await (client.post("/x", b"{}") if stream else client.json("POST", "/x", {}))
        assert type(caught.value) is error
        if isinstance(caught.value, EngineBusy):
            assert caught.value.retry_after_s == 60.0


@pytest.mark.parametrize(
    ("asked", "seconds"),
    [("7", 7.0), ("0.5", 0.5), ("0", 0.0), ("1e9", 60.0), ("nan", None), ("-nan", None), ("inf", None),
     ("1e309", None), ("-5", None), ("soon", None), ("", None), ("Wed, 21 Oct 2026 07:28:09 GMT", None)],
)  # fmt: skip
async def test_retry_after(asked: str, seconds: float | None) -> None:
    """At most a minute, and nothing that is no number of seconds."""
    async with served() as (answers, _, client):
        answers.said = http(429, b"", f"Retry-After: {asked}")
        with pytest.raises(EngineBusy) as caught:
            await client.json("POST", "/x", {})
        assert caught.value.retry_after_s == seconds


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_redirects_are_refused(status: int) -> None:
    """The request, and its key, go nowhere else."""
    async with served() as (answers, server, client):
        answers.said = http(status, b"", f"Location: {client.url}/else")
        with pytest.raises(EngineError, match="redirect"):
            await client.call("POST", "/x", {})
        with pytest.raises(EngineError, match="redirect"):
            await client.post("/x", b"{}")
        assert len(server.asked) == 2


async def test_a_broken_connection_is_tried_again_only_where_it_may() -> None:
    """A call that may be made twice is made twice, no other."""
    async with served() as (answers, server, client):
        answers.breaks = 1
        assert await client.json("POST", "/x", {}, retry=True) == {"fine": True}
        assert len(server.asked) == 2
        answers.breaks = 1
        with pytest.raises(EngineUnreachable, match=r"is the server alive\? `april doctor http://\S+:\d+` says more$"):
            await client.call("POST", "/x", {})
        assert len(server.asked) == 3
        answers.breaks = 2
        with pytest.raises(EngineUnreachable):
            await client.call("POST", "/x", {}, retry=True)
        assert len(server.asked) == 5


async def test_https_before_a_server_without_it() -> None:
    """The message says what to write instead."""
    async with served() as (_, _, client):
        wrong = HttpClient(client.url.replace("http:", "https:"), name="one")
        with pytest.raises(EngineUnreachable, match=f"the server does not use TLS; write {client.url}"):
            await wrong.call("GET", "/x")
        await wrong.close()


async def test_no_limit_of_connections_and_of_time() -> None:
    """aiohttp's 100 connections but does not 300 s would throttle and cut long responses without a word."""
    async with served() as (answers, server, client):
        answers.said = None
        calls = [asyncio.create_task(client.call("POST", "/x", {}, timeout_s=None)) for _ in range(150)]
        await until(lambda: len(server.asked) == 150)
        assert client._session is not None
        assert client._session.timeout.total is None
        assert client._session.timeout.sock_read is None
        await client.close()
        assert {type(e) for e in await asyncio.gather(*calls, return_exceptions=True)} == {EngineUnreachable}


async def test_closing_ends_what_is_on_its_way() -> None:
    """A call in flight breaks with an EngineError, and so does one that comes later; closing twice is fine."""
    async with served() as (answers, server, client):
        answers.said = None
        call = asyncio.create_task(client.call("POST", "/x", {}, timeout_s=None))
        await until(lambda: len(server.asked) == 1)
        await client.close()
        await client.close()
        with pytest.raises(EngineError):
            await call
        with pytest.raises(EngineError, match="is closed"):
            await client.call("GET", "/x")


async def test_closing_between_two_pieces() -> None:
    """Who reads on after the client was closed gets an EngineError, too."""
    async with served() as (answers, _, client):
        answers.said = http(200, b"x" * 1000)
        answer = await client.post("/x", b"{}")
        await client.close()
        with pytest.raises(EngineUnreachable, match="was closed"):
            await answer.read()
        answer.close()


async def test_giant_answers() -> None:
    """Neither a good answer nor an error text is read beyond its limit."""
    async with served() as (answers, _, client):
        answers.said = http(200, b"x" * 20_000)
        with pytest.raises(EngineError, match="more than 10000 bytes"):
            await client.call("GET", "/x", limit=10_000)
        answers.said = http(500, b"x" * (1 << 22))
        reply = await client.call("GET", "/x")
        assert reply.status == 500
        assert len(reply.body) < 1 << 20
        with pytest.raises(EngineError) as caught:
            client.require_ok(reply, "/x")
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize("head", ["Content-Length: 734003200", "Transfer-Encoding: chunked", "Connection: close"])
async def test_an_answer_without_end_is_not_read_to_it(head: str) -> None:
    """One that says how long it is not at all, others up to the limit and what is on its way then."""
    sent = over = 0

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent, over
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 200 OK\r\n{head}\r\n\r\n".encode())
        piece = b"x" * 65_536
        with suppress(ConnectionError):
            while sent < 700 << 20:
                writer.write(b"10000\r\n%b\r\n" % piece if "chunked" in head else piece)
                await writer.drain()
                sent += len(piece)
        writer.transport.abort()
        over += 1

    server = await asyncio.start_server(endless, "127.0.0.1", 0)
    client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", name="one")
    for options, limit in (({}, 4 << 20), ({"limit": 1 << 20}, 1 << 20)):
        with pytest.raises(EngineError, match=f"more than {limit} bytes; april stops reading"):
            await client.call("GET", "/x", **options)
    await client.close()
    server.close()
    await until(lambda: over == 2)
    await server.wait_closed()
    assert sent < 64 << 20


async def test_what_is_no_json() -> None:
    """A WireError that names the route; an empty answer is None."""
    async with served() as (answers, _, client):
        answers.said = http(200, b"<html>")
        with pytest.raises(WireError, match="/x answered with invalid JSON"):
            await client.json("GET", "/x")
        answers.said = http(200)
        assert await client.json("GET", "/x") is None


@pytest.mark.parametrize("url", ["ftp://a:1", "http://", "http://u:hush@a:1", "http://a:1/path", "http://a:1?q=1"])
def test_only_plain_addresses(url: str) -> None:
    """A password in an address is refused, and not repeated."""
    with pytest.raises(ConfigError) as caught:
        HttpClient(url, name="one")
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "words"),
    [(b'{"error":{"message":"m"}}', "m"), (b'{"message":"m"}', "m"), (b'{"detail":"m"}', "m"),
     (b'{"error":"m"}', "m"), (b" m\n n ", "m n"), (b"", "nothing"), (b"\xff", "\ufffd")],
)  # fmt: skip
def test_error_texts(body: bytes, words: str) -> None:
    """In every shape that servers use."""
    assert error_text(body) == words


@pytest.mark.parametrize("cancelled", [True, False], ids=["cancelled", "failed"])
async def test_no_client_is_left_open(cancelled: bool) -> None:
    """Those of servers that had answered already are closed as well."""
    clients: list[HttpClient] = []

    async def connect(client: HttpClient) -> Any:
        clients.append(client)
        if len(clients) < 2:
            return client
        if not cancelled:
            raise EngineError("not this one")
        return await asyncio.Event().wait()

    config = VllmEngineConfig(urls=("http://127.0.0.1:1", "http://127.0.0.1:2"))
    connecting = asyncio.create_task(connect_all(config, connect))
    await until(lambda: len(clients) == 2)
    if cancelled:
        connecting.cancel()
    with pytest.raises(asyncio.CancelledError if cancelled else EngineError):
        await connecting
    assert all(client._closed for client in clients)
