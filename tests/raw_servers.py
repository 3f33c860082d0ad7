"""Servers on loopback sockets that answer what a test says, byte by byte, in a thread of their own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Answer = Callable[[str], bytes | None]
"""From the path of a GET (``POST /path`` and the body in the next line for others; ``""`` for what is no HTTP) to the
bytes of the answer; None: none, for ever."""


def http(status: int = 200, body: Any = b"", *headers: str, length: int | None = None) -> bytes:
    """A whole answer; ``body`` that is no bytes becomes JSON. ``length`` promises another length than is sent."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    size = len(content) if length is None else length
    head = [f"HTTP/1.1 {status} Something", f"Content-Length: {size}", "Connection: close", *headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + content


class RawServer:
    """What a test sees of a server: its address, and what was asked."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[str] = []
        self.heads: list[str] = []


@contextmanager
def raw_server(answer: Answer) -> Iterator[RawServer]:
    """A server that answers ``answer(path)`` to each connection's first request, and closes."""
    server, loop = RawServer(), asyncio.new_event_loop()
    connections: set[asyncio.Task[Any]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            head = await reader.read(1 << 16)
            if not head:
                return
            path = head.split(b" ", 2)[1].decode() if head.startswith(b"GET ") else ""
            if head.startswith(b"POST "):
                body = head.partition(b"\r\n\r\n")[2]
                while len(body) < _promised(head):
                    body += await reader.read(1 << 16)
                path = f"{head.split(b' HTTP', 1)[0].decode()}\n{body.decode()}"
            server.asked.append(path)
            server.heads.append(head.decode("latin-1"))
            said = answer(path)
            if said is None:
                await asyncio.Event().wait()
                return
            writer.write(said)
            await writer.drain()
            if b"\r\nContent-Length" in said and len(said.partition(b"\r\n\r\n")[2]) < _promised(said):
                await asyncio.Event().wait()  # promised more
        except (asyncio.CancelledError, ConnectionError):
            pass
        finally:
            connections.discard(task)
            writer.transport.abort()

    async def start() -> asyncio.Server:
        listening = await asyncio.start_server(connected, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        return listening

    async def stop(listening: asyncio.Server) -> None:
        listening.close()
        for task in list(connections):
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    thread = threading.Thread(target=loop.run_forever, name="raw-server")
    thread.start()
    listening = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(stop(listening), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _promised(said: bytes) -> int:
    return int(said.partition(b"\r\nContent-Length: ")[2].split(b"\r\n")[0])
