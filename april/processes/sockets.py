"""Links over TCP, between processes that share a token: length-prefixed frames.

Invariant: nothing of a peer is looked at, but its greeting of a known length, before it has proven the token. The token
is never sent: each side answers the other's challenge. What is said is not encrypted.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
import struct
from collections.abc import Callable
from typing import Any

import msgspec

from april.errors import ConfigError, LinkError
from april.processes.link import OnFrame, OnLost
from april.server_text import hide, said

log = logging.getLogger("april")

TOKEN_BYTES = 32
MAGIC = b"april-link-1\n"
"""First bytes of both sides: who says something else is no april, or one that speaks otherwise."""
NONCE_BYTES = PROOF_BYTES = 32
CONNECTS, LISTENS = b"connects", b"listens "
LONGEST_GREETING = 1 << 12
"""Bytes of a frame before the token is proven."""
LONGEST_FRAME = 1 << 30
HANDSHAKE_S = 10.0
"""How long a peer has to prove the token."""
STRANGERS = 64
"""Connections that may be at their handshake at the same time, where nobody is expected."""
CLOSING_TURNS = 4
"""Of the loop: asyncio makes a transport of a connection that it has taken, tells of it, and closes it in one each."""

_LENGTH = struct.Struct(">I")


class Hello(msgspec.Struct, frozen=True):
    """What a connection is for ("host", "rank"), and who asks for it."""

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


def _proof(key: bytes, side: bytes, challenge: bytes, own: bytes, hello: bytes) -> bytes:
    """That its maker has the key, on this side of this connection: it is good for nothing else."""
    return hmac.digest(key, MAGIC + side + challenge + own + hello, "sha256")


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


class _Refused(Exception):
    """The peer is not who it should be."""


class SocketLink(asyncio.Protocol):
    """One end of a connection: a :class:`april.processes.link.Link` once its handshake is done.

    Args:
        greeted: told of the link when the other side has proven the token, or (``None``, why) that it never will.
        hello: of the side that has connected; None: this is the side that listens.
    """

    def __init__(
        self,
        key: bytes,
        greeted: Callable[[SocketLink | None, str], None],
        hello: Hello | None = None,
        *,
        within_s: float = HANDSHAKE_S,
        limit: int = LONGEST_FRAME,
    ) -> None:
        self._key = key
        self._greeted: Callable[[SocketLink | None, str], None] | None = greeted
        self._hello_bytes = b"" if hello is None else msgspec.json.encode(hello)
        self._listens = hello is None
        self._own = secrets.token_bytes(NONCE_BYTES)
        self._challenge = b""
        self._within_s = within_s
        self._limit = limit
        self._buffer = bytearray()
        self._on_frame: OnFrame | None = None
        self._on_lost: OnLost | None = None
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._over: str | None = None
        """Why nothing comes any more."""
        self._closed = False
        self.hello = hello
        self.peer = "?"

    # ---------------------------------------------------------------- as a Link

    def open(self, on_frame: OnFrame, on_lost: OnLost) -> None:
        """See :class:`april.processes.link.Link`."""
        self._on_frame, self._on_lost = on_frame, on_lost
        asyncio.get_running_loop().call_soon(self._open)

    def send(self, frame: bytes) -> None:
        """See :class:`april.processes.link.Link`; raises LinkError for a frame that is too long."""
        if len(frame) > self._limit:
            raise LinkError(f"a message of {len(frame):,} bytes is longer than the {self._limit:,} that a link carries")
        if self._over is None and not self._closed:
            self._wire.writelines((_LENGTH.pack(len(frame)), frame))

    def close(self) -> None:
        """See :class:`april.processes.link.Link`."""
        self._closed = True
        self._wire.close()

    # ---------------------------------------------------------------- as asyncio calls it

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The handshake begins, if nobody has refused it meanwhile."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._over is not None:
            transport.abort()
            return
        self.peer = told_address(transport.get_extra_info("peername"))
        self._deadline = asyncio.get_running_loop().call_later(
            self._within_s, self._refuse, f"it has not finished its greeting in {self._within_s:g} s"
        )
        transport.write(MAGIC + self._own)

    def data_received(self, data: bytes) -> None:
        """Bytes of the peer."""
        self._buffer += data
        try:
            if self._greeted is not None:
                self._greet()
            if self._greeted is None:
                self._deliver()
        except _Refused as refused:
            self._refuse(str(refused))

    def connection_lost(self, exc: Exception | None) -> None:
        """Whatever the reason was."""
        half = " in the middle of a message" if self._buffer else ""
        detail = f" ({type(exc).__name__})" if exc is not None else ""
        self._lose(f"the connection was closed{half}{detail}")

    # ---------------------------------------------------------------- inside

    @property
    def _wire(self) -> asyncio.Transport:
        """It is connected."""
        assert self._transport is not None
        return self._transport

    def _greet(self) -> None:
        """The peer's greeting, as far as it has come; raises _Refused."""
        if not self._challenge:
            if bytes(self._buffer[: len(MAGIC)]) != MAGIC[: len(self._buffer)]:
                raise _Refused("it does not speak as this april does")
            if len(self._buffer) < len(MAGIC) + NONCE_BYTES:
                return
            self._challenge = self._take(len(MAGIC), NONCE_BYTES)
            if self._challenge == self._own:
                raise _Refused("it repeats what it is told")
            if not self._listens:
                self._send_proof(CONNECTS, self._hello_bytes)
        greeting = self._frame(LONGEST_GREETING)
        if greeting is None:
            return
        proof, hello = greeting[:PROOF_BYTES], greeting[PROOF_BYTES:]
        other, about = (CONNECTS, hello) if self._listens else (LISTENS, self._hello_bytes)
        if not hmac.compare_digest(proof, _proof(self._key, other, self._own, self._challenge, about)):
            raise _Refused("its token is another one")
        if self._listens:
            try:
                self.hello = msgspec.json.decode(hello, type=Hello)
            except msgspec.DecodeError:
                raise _Refused("its greeting cannot be read") from None
            self._hello_bytes = hello
            self._send_proof(LISTENS, b"")
        assert self._deadline is not None
        self._deadline.cancel()
        self._wire.pause_reading()  # until somebody listens
        greeted, self._greeted = self._greeted, None
        assert greeted is not None
        greeted(self, "")

    def _send_proof(self, side: bytes, hello: bytes) -> None:
        proof = _proof(self._key, side, self._challenge, self._own, self._hello_bytes)
        self._wire.write(_LENGTH.pack(len(proof) + len(hello)) + proof + hello)

    def _open(self) -> None:
        self._deliver()
        if self._over is not None:
            self._tell_lost()
        elif not self._wire.is_closing():
            self._wire.resume_reading()

    def _deliver(self) -> None:
        """Whole frames go up."""
        while self._on_frame is not None and not self._closed:
            try:
                frame = self._frame(self._limit)
            except _Refused as refused:
                log.warning("the connection to %s is closed: %s", self.peer, refused)
                self._wire.abort()
                self._lose(str(refused))
                return
            if frame is None:
                return
            self._on_frame(frame)

    def _frame(self, limit: int) -> bytes | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > limit:
            raise _Refused(f"a message of {length:,} bytes, and {limit:,} are the most")
        if len(self._buffer) < _LENGTH.size + length:
            return None
        return self._take(_LENGTH.size, length)

    def _take(self, skipped: int, count: int) -> bytes:
        taken = bytes(memoryview(self._buffer)[skipped : skipped + count])
        del self._buffer[: skipped + count]
        return taken

    def _refuse(self, why: str) -> None:
        """End a handshake."""
        greeted, self._greeted = self._greeted, None
        self._over, self._closed = why, True
        self._buffer.clear()
        if self._deadline is not None:
            self._deadline.cancel()
        if self._transport is not None:
            self._transport.abort()
        if greeted is not None:
            greeted(None, f"{self.peer}: {why}")

    def _lose(self, why: str) -> None:
        if self._greeted is not None:
            self._refuse(f"{why} before the greeting was done (is the token the same on both sides?)")
        elif self._over is None:
            self._over = why
            if self._on_lost is not None:
                self._tell_lost()

    def _tell_lost(self) -> None:
        on_lost, self._on_lost, self._on_frame = self._on_lost, None, None
        if on_lost is not None and not self._closed and self._over is not None:
            on_lost(self._over)


class Listener:
    """Waits for others that have the token.

    Args:
        accepted: given each link whose other side has proven the token; its ``hello`` says what it is for. Who does not
            want it closes it.
        strangers: how many connections may be at their handshake at the same time.
    """

    def __init__(
        self,
        token: str,
        accepted: Callable[[SocketLink], None],
        *,
        within_s: float = HANDSHAKE_S,
        limit: int = LONGEST_FRAME,
        strangers: int = STRANGERS,
    ) -> None:
        self._key = _key_of(token)
        self._accepted = accepted
        self._strangers = strangers
        self._within_s = within_s
        self._limit = limit
        self._server: asyncio.Server | None = None
        self._closed = False
        self._links: set[SocketLink] = set()
        """At their handshake."""

    async def open(self, address: str | socket.socket = "127.0.0.1:0") -> str:
        """Listen at ``address``, port 0: any free one, or on what :func:`bound` made; returns where, with the port.

        Raises LinkError.
        """
        listening = bound(address) if isinstance(address, str) else address
        self._server = await asyncio.get_running_loop().create_server(
            self._protocol, sock=listening, backlog=self._strangers
        )
        return told_address(listening.getsockname())

    async def close(self) -> None:
        """Take no new connections; links that were accepted stay."""
        if self._server is not None:
            self._closed = True
            for listening in self._server.sockets:  # taking one for a server that is closed leaves it open
                asyncio.get_running_loop().remove_reader(listening.fileno())
            for link in list(self._links):
                link._refuse("nobody listens any more")
            for _ in range(CLOSING_TURNS):
                await asyncio.sleep(0)
            self._server.close()

    def _protocol(self) -> asyncio.Protocol:
        def greeted(done: SocketLink | None, why: str) -> None:
            self._links.discard(link)
            if done is not None:
                self._accepted(done)
            else:
                log.warning("a connection was refused: %s", said(why))

        if self._closed:
            return _Refusing()
        if len(self._links) >= self._strangers:
            log.warning("a connection was refused: %d others are at their greeting", self._strangers)
            return _Refusing()
        link = SocketLink(self._key, greeted, within_s=self._within_s, limit=self._limit)
        self._links.add(link)
        return link


class _Refusing(asyncio.Protocol):
    """It came too late, or too many others are at their handshake."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


async def connect(
    address: str, token: str, hello: Hello, *, within_s: float = HANDSHAKE_S, limit: int = LONGEST_FRAME
) -> SocketLink:
    """A link to whoever listens at ``address``, once both have proven the token.

    Raises:
        LinkError: nobody listens there, or not with this token, or no april does.
    """
    host, port = split_address(address)
    key = _key_of(token)
    loop = asyncio.get_running_loop()
    done: asyncio.Future[SocketLink] = loop.create_future()

    def greeted(link: SocketLink | None, why: str) -> None:
        if done.done():
            return
        if link is not None:
            done.set_result(link)
        else:
            done.set_exception(LinkError(f"cannot join {address}: {said(why)}"))

    def protocol() -> SocketLink:
        return SocketLink(key, greeted, hello, within_s=within_s, limit=limit)

    link: Any = None
    try:
        async with asyncio.timeout(within_s):
            _, link = await loop.create_connection(protocol, host, port)
        return await done
    except TimeoutError:
        raise LinkError(f"cannot join {address}: nobody answers in {within_s:g} s") from None
    except OSError as error:
        raise LinkError(f"cannot join {address}: {error.strerror or error}") from None
    except asyncio.CancelledError:
        if link is not None:
            link.close()
        raise


def told_address(address: Any) -> str:
    """An address of the system's as "host:port"."""
    if not isinstance(address, tuple):
        return "?"
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
