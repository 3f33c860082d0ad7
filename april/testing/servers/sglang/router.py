"""A fake sglang-router: requests in turn to its workers, everything about control answered with 404."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import count

import aiohttp
from aiohttp import web


class FakeSglangRouter:
    """Passes ``/generate`` on as it comes; a worker that cannot be reached is left out, and the next one asked.

    Args:
        workers: addresses of fake servers.
        late: how many times ``/workers`` is answered with none, as a router does that has just started.
    """

    def __init__(self, workers: Sequence[str], *, late: int = 0) -> None:
        self.workers = list(workers)
        self.late = late
        self.ready = True
        self.passed: list[str] = []
        """Address of the worker that answered, for every request in order."""
        self._turn = count()
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self) -> str:
        """Open a port; returns the URL."""
        app = web.Application(client_max_size=1 << 26)
        app.add_routes([
            web.post("/generate", self._generate), web.get("/workers", self._workers),
            web.get("/readiness", self._ready),
        ])  # fmt: skip
        # a client that leaves takes its request at the worker along
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=aiohttp.ClientTimeout(total=None)
        )
        return self.url

    async def close(self) -> None:
        """Close the port and all connections."""
        if self._session is not None:
            await self._session.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _workers(self, request: web.Request) -> web.Response:
        if self.late:
            self.late -= 1
            return web.json_response({"workers": [], "total": 0})
        workers = [{"url": url, "is_healthy": True, "worker_type": "regular", "load": 0} for url in self.workers]
        return web.json_response({"workers": workers, "total": len(workers)})

    async def _ready(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.ready else 503)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        assert self._session is not None
        for _ in range(len(self.workers)):
            url = self.workers[next(self._turn) % len(self.workers)]
            try:
                answer = await self._session.post(
                    f"{url}/generate", data=body, headers={"Content-Type": "application/json"}
                )
            except aiohttp.ClientError:
                continue  # the next worker gets the same request, rid included
            self.passed.append(url)
            return await self._pass_on(request, answer)
        return web.json_response({"error": {"message": "No available workers"}}, status=503)

    async def _pass_on(self, request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
        async with answer:
            await response.prepare(request)
            try:
                async for piece in answer.content.iter_any():
                    await response.write(piece)
            except (aiohttp.ClientError, asyncio.IncompleteReadError):
                if request.transport is not None:
                    request.transport.abort()
                return response
        await response.write_eof()
        return response
