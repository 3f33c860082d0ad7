"""Several servers are several engines: connect to all of them at once, or to none."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import TypeVar
from urllib.parse import urlsplit

from april.config.engines import ServerEngineConfig
from april.config.server_key import checked_key
from april.engines.http.http_client import HttpClient
from april.engines.protocol import Engine
from april.errors import ConfigError, EngineError

E = TypeVar("E", bound=Engine)


async def connect_all(config: ServerEngineConfig, connect: Callable[[HttpClient], Awaitable[E]]) -> list[E]:
    """``connect`` for each of the configured servers, all at once; when one fails, the others are closed again.

    Raises:
        ConfigError: as ``connect`` does, or the environment variable with the key is not set.
        EngineError: a server could not be asked; the message names it.
    """
    clients = [client_of(url, config) for url in config.urls]

    async def one(client: HttpClient) -> E:
        limit = asyncio.timeout(config.probe_timeout_s)
        try:
            async with limit:
                return await connect(client)
        except TimeoutError:
            if not limit.expired():
                raise
            raise EngineError(
                f"{client.url} has not said in {config.probe_timeout_s:g} s what it can do; is it overloaded or paused?"
            ) from None

    try:
        results = await asyncio.gather(*map(one, clients), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
    except BaseException:
        for client in clients:
            await client.close()
        raise
    return [r for r in results if not isinstance(r, BaseException)]


def client_of(url: str, config: ServerEngineConfig) -> HttpClient:
    """For one server, with the key and the patience of the configuration; raises ConfigError as :func:`api_key`."""
    return HttpClient(
        url, name=urlsplit(url).netloc, api_key=api_key(config), connect_timeout_s=config.connect_timeout_s
    )


def api_key(config: ServerEngineConfig) -> str | None:
    """The key, from the environment where it is named there."""
    if config.api_key_env is None:
        return None if config.api_key is None else config.api_key.get_secret_value()
    key = os.environ.get(config.api_key_env)
    if not key:
        raise ConfigError(f"engine.api_key_env: the environment variable {config.api_key_env} is not set")
    return checked_key(key)
