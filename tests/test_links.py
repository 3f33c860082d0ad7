"""Links over TCP: only who has the token gets in, and whatever else comes is closed in time, with one line."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from april.errors import ConfigError, LinkError
from april.processes import link as links
from april.processes.link import (
    HELLO,
    NONCE,
    PROOF,
    Hello,
    Link,
    Listener,
    SocketLink,
    connect,
    memory_links,
    new_token,
)  # fmt: skip

HELLO_ = Hello("host", "west")


class End:
    """What one end of a link hears."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.frames: asyncio.Queue[bytes] = asyncio.Queue()
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        link.open(self.frames.put_nowait, self.lost.set_result)


class Ears(Listener):
    """A listener with the links that it has accepted."""

    def __init__(self, token: str, **options: Any) -> None:
        self.links: asyncio.Queue[SocketLink] = asyncio.Queue()
        super().__init__(token, self.links.put_nowait, **options)

    async def close(self) -> None:
        """Let links that were closed before close, too."""
        await super().close()
        await turns()


async def turns(count: int = 5) -> None:
    """Of the loop."""
    for _ in range(count):
        await asyncio.sleep(0)


async def joined(**options: Any) -> tuple[Ears, End, End]:
    """A listener with both ends of a link."""
    token = new_token()
    ears = Ears(token, **options)
    address = await ears.open()
    there = await connect(address, token, HELLO_, **options)
    return ears, End(await ears.links.get()), End(there)


async def test_frames_arrive_whole_and_in_order() -> None:
    """Of any length, empty ones and those of many packets, both ways; and the listener knows who came for what."""
    ears, here, there = await joined()
    assert isinstance(here.link, SocketLink)
    assert here.link.hello == HELLO_
    frames = [b"", b"x", bytes(range(256)) * 8192, *(str(i).encode() for i in range(500))]
    for a, b in ((here, there), (there, here)):
        for frame in frames:
            a.link.send(frame)
        assert [await b.frames.get() for _ in frames] == frames
    there.link.close()
    assert await here.lost == "the connection was closed"
    assert not there.lost.done()
    here.link.close()
    await ears.close()


@pytest.mark.parametrize("over", ["sockets", "memory"])
async def test_what_came_before_somebody_listened_is_kept(over: str) -> None:
    """A link holds its frames until it is opened, and tells then that it was lost meanwhile."""
    a: Link
    b: Link
    if over == "memory":
        a, b = memory_links()
    else:
        token = new_token()
        ears = Ears(token)
        b = await connect(await ears.open(), token, HELLO_)
        a = await ears.links.get()
    a.send(b"one")
    a.send(b"two")
    a.close()
    await asyncio.sleep(0)
    end = End(b)
    assert [await end.frames.get(), await end.frames.get()] == [b"one", b"two"]
    assert "closed" in await end.lost
    b.send(b"nobody hears it")
    b.close()
    if over == "sockets":
        await ears.close()


async def test_another_token_is_refused_on_both_sides(caplog: pytest.LogCaptureFixture) -> None:
    """Neither token is in any message, and the listener goes on."""
    token, other = new_token(), new_token()
    ears = Ears(token)
    address = await ears.open()
    with pytest.raises(LinkError, match="is the token the same on both sides") as caught:
        await connect(address, other, HELLO_)
    assert len(caplog.records) == 1
    assert "is the token the same on both sides?" in caplog.text
    for secret in (token, other):
        assert secret not in caplog.text + str(caught.value) + repr(vars(ears))
    link = await connect(address, token, HELLO_)
    (await ears.links.get()).close()
    link.close()
    await ears.close()


NONSENSE = {NONCE: "0" * 64, PROOF: "\xff" * 64, HELLO: "00"}


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "does not speak as this april does"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", "does not speak as this april does"),
        (b"", "has not finished its greeting"),
        (b"GET / HTTP/1.1\r\nApr", "has not finished its greeting"),
        (f"GET / HTTP/1.1\r\nHost: x\r\n{NONCE}: {'0' * 64}\r\n\r\n".encode(), "has not finished its greeting"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nApril: " + b"0" * 9000 + b"\r\n\r\n", "does not speak as this april does"),
        (
            b"GET / HTTP/1.1\r\nHost: x\r\n" + f"{NONCE}: {'0' * 64}\r\n{PROOF}: {'0' * 64}\r\n\r\n".encode(),
            "its token is another one",
        ),
        (
            ("GET / HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in NONSENSE.items()) + "\r\n").encode("latin-1"),
            "does not speak as this april does",
        ),
    ],
    ids=["http", "tls", "silence", "half a request", "half a greeting", "too long", "wrong proof", "nonsense"],
)  # fmt: skip
async def test_strangers_are_closed_with_one_line(sent: bytes, why: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever somebody without the token sends: it is closed within the deadline, and nobody is accepted."""
    ears = Ears(new_token(), within_s=0.05 if "has not finished" in why else 20.0)
    host, port = links.split_address(await ears.open())
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(sent)
    with contextlib.suppress(ConnectionResetError):
        await reader.read()  # ends when the listener closes it
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    assert ears.links.empty()
    (record,) = (r for r in caplog.records if r.name == "april")
    assert why in record.getMessage()
    await ears.close()


async def test_what_the_listener_has_said_proves_nothing() -> None:
    """Its proof is not that of who connects, and what proved a token over one connection proves none over another."""
    token = new_token()
    ears = Ears(token)
    url = f"http://{await ears.open()}/"
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:
        for nonce in ("0" * 64, "1" * 64):
            async with session.get(url, headers={NONCE: nonce}) as answer:
                challenge, proof = answer.headers[NONCE], answer.headers[PROOF]
            with pytest.raises((aiohttp.WSServerHandshakeError, aiohttp.ServerDisconnectedError)):
                await session.ws_connect(url, headers={NONCE: nonce, PROOF: proof})
    right = links._proof(bytes.fromhex(token), b"connects", challenge, nonce)
    async with aiohttp.ClientSession() as session:
        with pytest.raises((aiohttp.WSServerHandshakeError, aiohttp.ServerDisconnectedError)):
            await session.ws_connect(url, headers={NONCE: nonce, PROOF: right})
    assert ears.links.empty()
    await ears.close()


async def test_who_connects_asks_for_the_proof_too() -> None:
    """A listener without the token, whatever it says, is given up by the deadline."""

    def answering(answer: bytes) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await reader.read()
            writer.close()

        return serve

    proven = f"HTTP/1.1 200 OK\r\n{NONCE}: {'0' * 64}\r\n{PROOF}: {'0' * 64}\r\nContent-Length: 0\r\n\r\n"
    for answer, why in ((b"SSH-2.0\r\n\r\n", "not speak"), (proven.encode(), "its token"), (b"", "nobody answers")):
        listening = await asyncio.start_server(answering(answer), "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        with pytest.raises(LinkError, match=why):
            await connect(f"127.0.0.1:{port}", new_token(), HELLO_, within_s=20.0 if answer else 0.2)
        listening.close()
        await listening.wait_closed()
        await turns()


async def test_a_frame_that_is_too_long_ends_the_link(caplog: pytest.LogCaptureFixture) -> None:
    """The sender hears it before it is sent; a peer that sends it all the same is closed, and nothing is kept of it."""
    ears, here, there = await joined(limit=1 << 12)
    with pytest.raises(LinkError, match=r"4,097 bytes is longer than the 4,096"):
        here.link.send(bytes(4097))
    here.link.send(bytes(4096))
    assert len(await there.frames.get()) == 4096
    assert isinstance(here.link, SocketLink)
    here.link._limit = 1 << 13
    here.link.send(bytes(4099))
    assert "exceeds limit" in await there.lost
    assert "closed" in await here.lost
    assert len(caplog.records) == 1
    here.link.close()
    await ears.close()


async def test_nobody_there() -> None:
    """A sentence that names the address."""
    ears = Ears(new_token())
    address = await ears.open()
    await ears.close()
    with pytest.raises(LinkError, match=f"cannot join {address}: "):
        await connect(address, new_token(), HELLO_)
    again = Ears(new_token())
    held = await again.open()
    with pytest.raises(LinkError, match=f"cannot listen at {held}: "):
        await Ears(new_token()).open(held)
    await again.close()


@pytest.mark.parametrize("token", ["", "swordfish", "0" * 63, "0" * 66, "x" * 64, None, 7])
def test_a_token_has_its_form(token: Any) -> None:
    """Refused without showing it."""
    with pytest.raises(ConfigError, match="expected 64 hexadecimal digits") as caught:
        Listener(token, lambda link: None)
    assert not token or str(token) not in str(caught.value)


@pytest.mark.parametrize("address", ["", "host", ":1", "host:", "host:x", "host:65536", "host:-1", None])
def test_an_address_has_its_form(address: Any) -> None:
    """Refused with an example of one."""
    with pytest.raises(ConfigError, match='expected "host:port"'):
        links.split_address(address)
    assert links.split_address("[::1]:80") == ("::1", 80)


@pytest.mark.parametrize("count", range(7))
async def test_who_comes_while_the_listener_closes(count: int) -> None:
    """However far a connection has come: it is closed, not left open on a loop that ends, and nothing is accepted."""
    ears = Ears(new_token())
    host, port = links.split_address(await ears.open())
    with socket.create_connection((host, port)) as stranger:
        await turns(count)
        await Listener.close(ears)
        stranger.settimeout(3)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(1 << 10):
                pass
    assert ears.links.empty()


async def test_a_loop_that_ends_leaves_no_connection_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tasks of a link are cancelled, as where a trainer is interrupted: its connection is closed all the same."""
    closed: list[bool] = []
    made = aiohttp.ClientWebSocketResponse.__init__
    responses: list[aiohttp.ClientResponse] = []

    def remember(self: Any, reader: Any, writer: Any, protocol: Any, response: Any, *others: Any, **named: Any) -> None:
        responses.append(response)
        made(self, reader, writer, protocol, response, *others, **named)

    monkeypatch.setattr(aiohttp.ClientWebSocketResponse, "__init__", remember)
    token = new_token()
    ears = Ears(token)
    End(await connect(await ears.open(), token, HELLO_))
    End(await ears.links.get())
    await asyncio.sleep(0)
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.wait(others)
    closed.extend(response.closed and response.connection is None for response in responses)
    await ears.close()

    assert closed == [True]
