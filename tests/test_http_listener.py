"""april's HTTP servers leave no connection open and nothing that listens."""

from __future__ import annotations

import asyncio
import gc
import socket
from contextlib import suppress

import pytest
from aiohttp import web

from april.concurrency.http_listener import HttpListener


def test_a_connection_of_the_last_moment_is_closed() -> None:
    """A client that connects while the server closes is disconnected: asyncio itself would leave its socket open."""

    async def live(iterations: int) -> None:
        listener = HttpListener(web.Application(), 1.0)
        address = await listener.start(("127.0.0.1", 0))
        with socket.create_connection(address, timeout=5) as client:
            for _ in range(iterations):
                await asyncio.sleep(0)
            await listener.close()
            await asyncio.sleep(0)
            with suppress(ConnectionError):
                assert client.recv(1) == b""
        await listener.close()

    for iterations in range(4):
        asyncio.run(live(iterations))
        gc.collect(1)  # an open socket is a ResourceWarning, which is an error


def test_a_start_that_fails_leaves_nothing_open() -> None:
    async def live() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
            await HttpListener(web.Application(), 1.0).start(taken.getsockname()[:2])

    asyncio.run(live())
    gc.collect(1)


def test_a_close_that_is_cancelled_stops_listening() -> None:
    """As the loop's thread cancels whatever still runs when it ends."""

    async def live() -> None:
        listener = HttpListener(web.Application(), 1.0)
        address = await listener.start(("127.0.0.1", 0))
        closing = asyncio.create_task(listener.close())
        await asyncio.sleep(0)
        closing.cancel()
        with suppress(asyncio.CancelledError):
            await closing
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=5)

    asyncio.run(live())
    gc.collect(1)
