"""Several servers are connected to together, or none of them; and keys stay secret."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from fake_servers.vllm import FakeVllmServer
from sglang_fixtures import run, until

from april.config.engines import VllmEngineConfig
from april.engines.http.http_client import HttpClient
from april.engines.http.server_probe import connect_all
from april.engines.vllm.engine import connect_vllm
from april.errors import EngineError


@pytest.mark.parametrize("cancelled", [True, False], ids=["cancelled", "failed"])
def test_no_client_is_left_open(cancelled: bool) -> None:
    """Those of servers that had answered already are closed as well."""
    clients: list[HttpClient] = []

    async def connect(client: HttpClient) -> Any:
        clients.append(client)
        if len(clients) < 2:
            return client
        if not cancelled:
            raise EngineError("not this one")
        return await asyncio.Event().wait()

    async def program() -> None:
        config = VllmEngineConfig(urls=("http://127.0.0.1:1", "http://127.0.0.1:2"))
        connecting = asyncio.create_task(connect_all(config, connect))
        await until(lambda: len(clients) == 2)
        if cancelled:
            connecting.cancel()
        with pytest.raises(asyncio.CancelledError if cancelled else EngineError):
            await connecting
        assert all(client._closed for client in clients)

    run(program)


def test_a_key_that_the_server_repeats_is_in_no_message() -> None:
    """It quotes the header that it refuses; april quotes the server, without the key."""

    async def program() -> None:
        server = FakeVllmServer(api_key="another-key")
        url = await server.start()
        with pytest.raises(EngineError, match="Bearer <the key>") as caught:
            await connect_vllm(VllmEngineConfig(urls=(url,), api_key="my-secret-key"))
        assert "my-secret" not in str(caught.value)
        await server.close()

    run(program)


def test_a_key_is_blotted_out_of_every_kind_of_error() -> None:
    """Of answers that are looked at, and of those that became an exception before a stream began."""

    async def echo(request: web.Request) -> web.Response:
        return web.Response(status=500, text=f"bad header {request.headers['Authorization']}")

    async def program() -> None:
        app = web.Application()
        app.router.add_route("*", "/x", echo)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        client = HttpClient(f"http://127.0.0.1:{runner.addresses[0][1]}", name="one", api_key="my-secret-key")
        assert (await client.call("GET", "/x")).body == b"bad header Bearer <the key>"
        with pytest.raises(EngineError) as caught:
            await client.post("/x", b"{}")
        assert "my-secret" not in str(caught.value)
        await client.close()
        await runner.cleanup()

    run(program)
