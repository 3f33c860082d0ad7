"""Can the server be reached at all, and if not: why, in words that say what to do."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from contextlib import suppress
from urllib.parse import urlsplit

from april.doctor.advice import missing
from april.doctor.findings import Finding
from april.errors import EngineError, EngineUnreachable
from april.server_text import said

_REACH = "reach"
_TALK = "talk"


async def why_unreachable(url: str, timeout_s: float) -> Finding | None:
    """Look up the name and open a connection; None if both work. Each takes at most ``timeout_s`` seconds."""
    parts = urlsplit(url)
    host, port = str(parts.hostname), parts.port or (443 if parts.scheme == "https" else 80)
    try:
        async with asyncio.timeout(timeout_s):
            await _addresses(host, port)
    except TimeoutError:
        return missing(_REACH, f"the name {host} was not resolved in {timeout_s:g} s", _CHECK_NAME)
    except OSError as error:
        return missing(_REACH, f"the name {host} does not resolve ({said(error.strerror or error)})", _CHECK_NAME)
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return missing(
            _REACH, f"{host} does not answer on port {port} in {timeout_s:g} s",
            "look at the address, at firewalls between here and there, and whether the machine is up",
        )  # fmt: skip
    except ConnectionRefusedError:
        return missing(
            _REACH, f"nothing listens on port {port} of {host}",
            "start the server, or correct the port; vLLM opens its port only when the model is loaded, which takes "
            "minutes; a server that listens on 127.0.0.1 is closed to other machines (start it with --host 0.0.0.0, "
            "in a private network)",
        )  # fmt: skip
    except OSError as error:
        why = said(error.strerror or error)
        return missing(_REACH, f"no connection to port {port} of {host} ({why})", "look at the address")
    await _close(writer)
    return None


_CHECK_NAME = "correct the name, or give the address as a number"


async def _addresses(host: str, port: int) -> None:
    """Raise OSError unless the name resolves. In a thread that nobody waits for: a resolver may take half a minute."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[OSError | None] = loop.create_future()

    def tell(error: OSError | None) -> None:
        if not done.done():
            done.set_result(error)

    def look_up() -> None:
        try:
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            result = None
        except OSError as error:
            result = error
        with suppress(RuntimeError):  # the loop is closed by now
            loop.call_soon_threadsafe(tell, result)

    threading.Thread(target=look_up, name="april-doctor-lookup", daemon=True).start()
    error = await done
    if error is not None:
        raise error


async def why_no_talk(url: str, error: EngineError, timeout_s: float) -> Finding:
    """Why an open port does not answer as an HTTP server does; ``error`` is what came of asking."""
    parts = urlsplit(url)
    if not isinstance(error, EngineUnreachable):  # a redirect, or an answer without end
        return missing(_TALK, str(error), "is this the server itself, or a proxy or web site before it?")
    if not error.why:
        return missing(
            _TALK, f"{url} accepts connections and gives no answer in {timeout_s:g} s",
            "the server is hung or drowned in requests: look at its log, restart it",
        )  # fmt: skip
    if error.distrusted:
        return missing(
            _TALK, f"the certificate of {url} is not trusted ({error.distrusted})",
            "give the environment variable SSL_CERT_FILE the certificate of its authority",
        )  # fmt: skip
    other = await _other_scheme(url, timeout_s)
    if other is not None:
        sentence = f"the server speaks {other.upper()}, and the address says {parts.scheme}"
        return missing(_TALK, sentence, f"write {other}://{parts.netloc}")
    return missing(_TALK, f"{url} does not speak HTTP ({error.why})", "is this the right port?")


async def _other_scheme(url: str, timeout_s: float) -> str | None:
    """``https`` if an http:// address answers a TLS greeting, ``http`` if an https:// address answers a plain one."""
    parts = urlsplit(url)
    host, secure = str(parts.hostname), parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    greeting = f"GET / HTTP/1.0\r\nHost: {parts.netloc}\r\n\r\n".encode() if secure else _tls_greeting(host)
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(greeting)
                answer = await reader.read(5)
            finally:
                await _close(writer)
    except (OSError, TimeoutError):
        return None
    if secure:
        return "http" if answer.startswith(b"HTTP") else None
    return "https" if answer[:2] in _TLS_RECORDS else None


_TLS_RECORDS = (b"\x16\x03", b"\x15\x03")
"""How a TLS server begins its answer: a handshake, or an alert if it dislikes the greeting."""


def _tls_greeting(host: str) -> bytes:
    """The first bytes of a TLS client."""
    outgoing = ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=host)
    with suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


async def _close(writer: asyncio.StreamWriter) -> None:
    """Without waiting for the other side's goodbye, which may never come."""
    writer.transport.abort()
    with suppress(OSError):
        await writer.wait_closed()
