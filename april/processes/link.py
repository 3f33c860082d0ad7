"""Links: ordered two-way connections between two processes of april, in memory or over WebSockets.

Invariant: of whoever connects, nothing but the headers of its requests is read before it has proven the token, which is
never sent: each side answers the other's challenge. What is said afterwards is not encrypted.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

import aiohttp
import msgspec
from aiohttp import web

from april.errors import ConfigError, LinkError
from april.server_text import clean, hide

log = logging.getLogger("april")

OnFrame = Callable[[bytes], None]
OnLost = Callable[[str], None]

TOKEN_BYTES = NONCE_BYTES = 32
NONCE, PROOF, HELLO = "April-Nonce", "April-Proof", "April-Hello"
"""Headers of the greeting, in hexadecimal digits."""
LONGEST_FRAME = 1 << 30
HANDSHAKE_S = 10.0
"""The time that a peer has to prove the token."""
CLOSE_S = 2.0
"""The longest wait of the end of a connection for the other side's."""
STRANGERS = 64
"""Connections that may be at their handshake at the same time, where nobody is expected."""
CLOSING_TURNS = 4
"""Turns of the loop: asyncio makes a transport of a connection that it has taken, tells of it, and closes it in one
each.
"""


# -------------------------------------------------------------------- signs of life


K = TypeVar("K", bound=Hashable)

BEATS = 4
"""Heartbeats within the deadline."""


class Heartbeats(Generic[K]):
    """Deadlines of some others, of whom something is to be heard every ``interval_s`` at least.

    Time is given; own pauses are nobody else's death.
    """

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.interval_s = deadline_s / BEATS
        self.paused = False
        """True if this process itself did not run for a while before the last look."""
        self._heard: dict[K, float] = {}
        self._looked: float | None = None

    def hear(self, whom: K, now: float) -> None:
        """Note that anything was heard."""
        self._heard[whom] = now

    def forget(self, whom: K) -> None:
        """Expect nothing more."""
        self._heard.pop(whom, None)

    def silent(self, now: float) -> list[K]:
        """Return those whose deadline is over; if this process did not run for a while, they all begin anew."""
        self.paused = self._looked is not None and now - self._looked > self.deadline_s / 2
        self._looked = now
        if self.paused:  # what was said meanwhile is on its way
            self._heard = dict.fromkeys(self._heard, now)
        return [whom for whom, heard in self._heard.items() if now - heard >= self.deadline_s]


# -------------------------------------------------------------------- in memory


class Link:
    """An end of a connection; everything is called on the loop that it lives on."""

    peer: str
    """The other end's address, for messages."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self._on_frame: OnFrame | None = None
        self._on_lost: OnLost | None = None
        self._closed = False
        self._why_lost: str | None = None

    def open(self, on_frame: OnFrame, on_lost: OnLost) -> None:
        """Give frames to ``on_frame`` from now on, each once and in order, those that came before first.

        ``on_lost(why)`` is called at most once, when the other end is gone, and nothing after it.
        """
        self._on_frame, self._on_lost = on_frame, on_lost

    def send(self, frame: bytes) -> None:
        """Send a frame, later; what the other end does not get, because the link is lost, is gone.

        Raises LinkError for a frame that is longer than the other side reads.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Send what was said, then tell the other end that the link is lost; here nothing is called any more."""
        raise NotImplementedError

    async def wait_closed(self) -> None:
        """After :meth:`close`: wait until all is done, before the loop ends."""

    def _receive(self, frame: bytes) -> None:
        if self._on_frame is not None and not self._closed and self._why_lost is None:
            self._on_frame(frame)

    def _lose(self, why: str) -> None:
        self._why_lost = why
        on_lost, self._on_lost = self._on_lost, None
        if on_lost is not None and not self._closed:
            on_lost(why)


async def close_all(links: Sequence[Link]) -> None:
    """Close them, and wait until what was sent has gone out, as the end of a loop must."""
    for link in links:
        link.close()
    await asyncio.gather(*(link.wait_closed() for link in links))


class MemoryLink(Link):
    """An end of a link inside of a process; see :func:`memory_links`."""

    def __init__(self) -> None:
        super().__init__("this process")
        self._loop = asyncio.get_running_loop()
        self._other: MemoryLink | None = None
        self._early: list[tuple[Callable[[Any], None], Any]] = []

    def open(self, on_frame: OnFrame, on_lost: OnLost) -> None:
        super().open(on_frame, on_lost)
        early, self._early = self._early, []
        for receive, what in early:
            self._loop.call_soon(receive, what)

    def send(self, frame: bytes) -> None:
        if not self._closed and self._other is not None:
            self._loop.call_soon(self._other._receive, frame)

    def close(self) -> None:
        self._closed = True
        self.cut("the other end has closed the connection")

    def cut(self, why: str) -> None:
        """Lose the connection; what is on its way still arrives."""
        other, self._other = self._other, None
        if other is not None:
            other._other = None
            self._loop.call_soon(other._lose, why)
            self._loop.call_soon(self._lose, why)

    def _receive(self, frame: bytes) -> None:
        if self._on_frame is None:
            self._early.append((self._receive, frame))
        else:
            super()._receive(frame)

    def _lose(self, why: str) -> None:
        if self._on_lost is None and not self._closed:
            self._early.append((self._lose, why))
        else:
            super()._lose(why)


def memory_links() -> tuple[MemoryLink, MemoryLink]:
    """Make both ends of a link on the running loop, a virtual one as well."""
    a, b = MemoryLink(), MemoryLink()
    a._other, b._other = b, a
    return a, b


# -------------------------------------------------------------------- over a network


HOST, RANK = "host", "rank"
"""Purposes of connections."""


class Hello(msgspec.Struct, frozen=True):
    """The purpose of a connection, and who asks for it."""

    purpose: str
    name: str


def new_token() -> str:
    """A token for those that belong together: 64 hexadecimal digits. Whoever has it can join."""
    return secrets.token_hex(TOKEN_BYTES)


def _key_of(token: str) -> bytes:
    """The token's bytes; raises ConfigError, which does not show it."""
    try:
        key = bytes.fromhex(token)
    except (TypeError, ValueError):
        key = b""
    if len(key) != TOKEN_BYTES:
        raise ConfigError(f"token: expected {2 * TOKEN_BYTES} hexadecimal digits; secrets.token_hex(32) makes them")
    hide(token.strip())
    return key


def _proof(key: bytes, side: bytes, challenge: str, own: str, hello: bytes = b"") -> str:
    """That its maker has the key, on this side of this connection: it is good for nothing else."""
    return hmac.digest(key, b"april-link-2" + side + challenge.encode() + own.encode() + hello, "sha256").hex()


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[ipv6]:port"; raises ConfigError."""
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not host or not (port.isascii() and port.isdecimal()) or int(port) >= 1 << 16:
        raise ConfigError(f'address: expected "host:port", such as "127.0.0.1:0" for any free port, got {address!r}')
    return host.removeprefix("[").removesuffix("]"), int(port)


def bound(address: str) -> socket.socket:
    """A socket that listens there already, so that the address is taken and known; raises LinkError."""
    host, port = split_address(address)
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise LinkError(f"cannot listen at {address}: {error.strerror or error}") from None


def told_address(address: Any) -> str:
    """An address of the system's as "host:port"."""
    if not isinstance(address, tuple):
        return "?"
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _WebSocket(aiohttp.ClientWebSocketResponse):
    """A WebSocket that knows the response it came with, which holds the connection until it is closed."""

    def __init__(self, reader: Any, writer: Any, protocol: Any, response: Any, *arguments: Any, **named: Any) -> None:
        super().__init__(reader, writer, protocol, response, *arguments, **named)
        self.response: aiohttp.ClientResponse = response


class SocketLink(Link):
    """An end of a WebSocket between two that have proven the token.

    Args:
        hello: of the side that has connected.
        session: of the side that has connected; ends with the link.
    """

    def __init__(
        self, ws: Any, peer: str, hello: Hello, limit: int, session: aiohttp.ClientSession | None = None
    ) -> None:
        super().__init__(peer)
        self.hello = hello
        self._ws, self._limit, self._session = ws, limit, session
        self._out: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._writer = asyncio.get_running_loop().create_task(self._write())
        self._reader: asyncio.Task[None] | None = None

    def open(self, on_frame: OnFrame, on_lost: OnLost) -> None:
        super().open(on_frame, on_lost)
        loop = asyncio.get_running_loop()
        if self._reader is None:
            self._reader = loop.create_task(self._read())
            self._reader.add_done_callback(lambda task: task.cancelled() or task.result())  # to the loop's log
        elif self._why_lost is not None:
            loop.call_soon(self._lose, self._why_lost)

    def send(self, frame: bytes) -> None:
        if len(frame) > self._limit:
            raise LinkError(f"a message of {len(frame):,} bytes is longer than the {self._limit:,} that a link carries")
        if not self._closed and self._why_lost is None:
            self._out.put_nowait(frame)

    def close(self) -> None:
        self._closed = True
        self._out.put_nowait(None)

    async def wait_closed(self) -> None:
        await asyncio.wait([self._writer])

    async def _read(self) -> None:
        why = "the connection was closed"
        try:
            async for message in self._ws:
                if message.type is aiohttp.WSMsgType.ERROR:
                    why = str(message.data)
                    log.warning("the connection to %s is closed: %s", self.peer, why)
                elif message.type is aiohttp.WSMsgType.BINARY:
                    self._receive(message.data)
        finally:
            self._out.put_nowait(None)
            self._lose(why)

    async def _write(self) -> None:
        try:
            with suppress(OSError, RuntimeError, aiohttp.ClientError):  # the reader hears of it
                while (frame := await self._out.get()) is not None:
                    await self._ws.send_bytes(frame)
                await self._ws.close()
        finally:
            if self._session is not None:
                self._ws.response.close()  # a close that was cut short, or came after a loss, leaves it open
                await self._session.close()


class _Peer(web.RequestHandler):
    """A connection to a listener: a stranger's until the token is proven over it."""

    __slots__ = ("challenge", "deadline", "listener", "peer")

    def __init__(self, listener: Listener, server: web.Server) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), access_log=None)  # type: ignore[arg-type]
        self.listener, self.peer, self.challenge = listener, "?", secrets.token_hex(NONCE_BYTES)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the greeting."""
        super().connection_made(transport)
        self.peer = told_address(transport.get_extra_info("peername"))
        within_s, strangers = self.listener.within_s, self.listener.strangers
        strangers.add(self)
        late = f"it has not finished its greeting in {within_s:g} s"
        self.deadline = asyncio.get_running_loop().call_later(within_s, self.refuse, late)
        if self.listener.closed:
            self.refuse("nobody listens any more")
        elif len(strangers) > self.listener.most:
            self.refuse(f"{self.listener.most} others are at their greeting")

    def connection_lost(self, exc: BaseException | None) -> None:
        """Say so, if it has not been said why."""
        self.refuse("it was closed before the greeting was done (is the token the same on both sides?)")
        super().connection_lost(exc)

    def handle_error(self, *arguments: Any, **named: Any) -> web.StreamResponse:
        """Refuse a peer that has sent what is not HTTP."""
        self.refuse("it does not speak as this april does")
        return super().handle_error(*arguments, **named)

    def greeted(self) -> None:
        """The token is proven."""
        self.deadline.cancel()
        self.listener.strangers.discard(self)

    def refuse(self, why: str) -> None:
        """End a greeting; does nothing after it."""
        if self in self.listener.strangers:
            self.greeted()
            log.warning("a connection was refused: %s: %s", self.peer, clean(why))
            if self.transport is not None:
                self.transport.abort()


class Listener:
    """Waits for others that have the token.

    Args:
        accepted: given each link whose other side has proven the token; its ``hello`` says what it is for. Who does not
            want it closes it.
        within_s: how long a greeting may take.
        limit: bytes of the longest frame.
        strangers: how many connections may be at their greeting at the same time.
    """

    def __init__(
        self, token: str, accepted: Callable[[SocketLink], None], *, within_s: float = HANDSHAKE_S,
        limit: int = LONGEST_FRAME, strangers: int = STRANGERS,
    ) -> None:  # fmt: skip
        self._key, self._accepted, self._limit = _key_of(token), accepted, limit
        self.within_s, self.most, self.closed = within_s, strangers, False
        self.strangers: set[_Peer] = set()
        self._server: asyncio.Server | None = None

    async def open(self, address: str | socket.socket = "127.0.0.1:0") -> str:
        """Listen at ``address``, port 0: any free one, or on what :func:`bound` made; returns where, with the port.

        Raises LinkError.
        """
        listening = bound(address) if isinstance(address, str) else address
        server = web.Server(self._greet)
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Peer(self, server), sock=listening, backlog=self.most
        )
        return told_address(listening.getsockname())

    async def close(self) -> None:
        """Take no new connections; links that were accepted stay."""
        if self._server is not None:
            self.closed = True
            for listening in self._server.sockets:  # taking one for a server that is closed leaves it open
                asyncio.get_running_loop().remove_reader(listening.fileno())
            for peer in list(self.strangers):
                peer.refuse("nobody listens any more")
            for _ in range(CLOSING_TURNS):
                await asyncio.sleep(0)
            self._server.close()

    async def _greet(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer the first request by the proof of this side, and the second, which proves the other, by a link."""
        peer, headers = request.protocol, request.headers
        assert isinstance(peer, _Peer)
        nonce, proof, hello = headers.get(NONCE, ""), headers.get(PROOF), headers.get(HELLO, "")
        if len(nonce) != 2 * NONCE_BYTES or not f"{nonce}{proof}{hello}".isascii():
            peer.refuse("it does not speak as this april does")
            return web.Response(status=400)
        if proof is None:
            own = _proof(self._key, b"listens", nonce, peer.challenge)
            return web.Response(headers={NONCE: peer.challenge, PROOF: own})
        ws = web.WebSocketResponse(timeout=CLOSE_S, max_msg_size=self._limit + 1, compress=False)
        expected = _proof(self._key, b"connects", peer.challenge, nonce, hello.encode())
        if not hmac.compare_digest(proof.encode(), expected.encode()):
            peer.refuse("its token is another one")
        if peer not in self.strangers or not ws.can_prepare(request):
            return web.Response(status=403)
        peer.greeted()
        await ws.prepare(request)
        link = SocketLink(ws, peer.peer, msgspec.json.decode(bytes.fromhex(hello), type=Hello), self._limit)
        self._accepted(link)
        await link.wait_closed()
        return ws


async def connect(
    address: str, token: str, hello: Hello, *, within_s: float = HANDSHAKE_S, limit: int = LONGEST_FRAME
) -> SocketLink:
    """A link to whoever listens at ``address``, once both have proven the token.

    Raises:
        LinkError: nobody listens there, or not with this token, or no april does.
    """
    host, port = split_address(address)
    key, nonce, name = _key_of(token), secrets.token_hex(NONCE_BYTES), msgspec.json.encode(hello).hex()
    url = f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
    connector = aiohttp.TCPConnector(limit=1)  # both requests on one connection
    session = aiohttp.ClientSession(connector=connector, ws_response_class=_WebSocket)
    try:
        async with asyncio.timeout(within_s):
            async with session.get(url, headers={NONCE: nonce}, allow_redirects=False) as answer:
                challenge, proof = answer.headers.get(NONCE, ""), answer.headers.get(PROOF, "")
                await answer.read()
            if not hmac.compare_digest(proof.encode(), _proof(key, b"listens", nonce, challenge).encode()):
                raise LinkError("its token is another one (is the token the same on both sides?)")
            proof = _proof(key, b"connects", challenge, nonce, name.encode())
            ws = await session.ws_connect(
                url, headers={NONCE: nonce, PROOF: proof, HELLO: name}, max_msg_size=limit + 1, compress=0,
                timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_S),
            )  # fmt: skip
        return SocketLink(ws, f"{host}:{port}", hello, limit, session)
    except BaseException as error:
        await session.close()
        if isinstance(error, TimeoutError):
            why = f"nobody answers in {within_s:g} s"
        elif isinstance(error, aiohttp.ClientConnectorError):
            why = error.os_error.strerror or str(error.os_error)
        elif isinstance(error, LinkError):
            why = str(error)
        elif isinstance(error, (OSError, aiohttp.ClientError)):
            why = f"it does not speak as this april does, or has closed the connection ({type(error).__name__})"
        else:
            raise
        raise LinkError(f"cannot join {address}: {clean(why)}") from None
