"""Serves an aiohttp application at an address, for the parts of april that answer HTTP requests."""

from __future__ import annotations

import asyncio
import logging
import socket

from aiohttp import web
from aiohttp.log import server_logger


class HttpListener:
    """Answers HTTP requests with an application from ``start`` until ``close``.

    Args:
        app: Application that answers the requests.
        shutdown_timeout: Seconds that ``close`` waits for requests that are being answered.
        cancel_handlers: Whether the handler of a request is cancelled when its client disconnects.
        logger: Logger for errors in handlers and for data that is not an HTTP request.
    """

    def __init__(
        self, app: web.Application, shutdown_timeout: float, *, cancel_handlers: bool = False,
        logger: logging.Logger = server_logger,
    ) -> None:  # fmt: skip
        self._runner = web.AppRunner(
            app, access_log=None, handle_signals=False, shutdown_timeout=shutdown_timeout,
            handler_cancellation=cancel_handlers, logger=logger,
        )  # fmt: skip
        self._server: asyncio.Server | None = None

    async def start(self, at: tuple[str, int] | socket.socket, backlog: int = 128) -> tuple[str, int]:
        """Listen at a host and port (0 means any free port) or with a bound socket; return the host and port.

        Raises OSError, or OverflowError for a port out of range. A start that fails leaves nothing open.
        """
        where = {"sock": at} if isinstance(at, socket.socket) else {"host": at[0], "port": at[1]}
        try:
            await self._runner.setup()
            assert self._runner.server is not None
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(self._runner.server, **where, backlog=backlog)
        except BaseException:
            await self._runner.cleanup()
            raise
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    async def close(self) -> None:
        """Stop listening, let running handlers end, and close all connections; idempotent."""
        server, self._server = self._server, None
        if server is not None:
            # stop accepting first: if the server closes while asyncio has accepted a connection but not yet handed it
            # to the server, the connection is never closed
            for listening in server.sockets:
                asyncio.get_running_loop().remove_reader(listening.fileno())
            try:
                await asyncio.sleep(0)
            finally:  # also when the caller is cancelled here
                server.close()
        await self._runner.cleanup()
