"""Runs a process that only serves engines: its own, or servers to which it forwards requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

from april.config.engines import ServerEngineConfig
from april.config.settings import Config
from april.engines.kinds.factory import open_servers
from april.engines.protocol import Engine
from april.engines.served.server import serve
from april.errors import ConfigError
from april.text.server_text import quoted


def serve_forever(
    make: Callable[[], Engine | Sequence[Engine]] | Mapping[str, Any], host: str = "127.0.0.1", port: int = 0,
    key: str = "", told: Callable[[str], object] = print,
) -> None:  # fmt: skip
    """Run :func:`serve` for one or more engines on a new event loop, until interrupted.

    Args:
        make: Function that returns one or several engines, or a mapping of settings as for ``engine`` in
            :class:`april.Config`, whose servers (``urls``) this process forwards requests to.
        host: Address to listen at, as in :func:`serve`.
        port: Port of the first engine; the others use the following ports. 0 means any free ones.
        key: Secret that clients must send, as in :func:`serve`.
        told: Callback that receives the URL of each engine.

    Raises:
        ConfigError: the settings are wrong, a server cannot be used, or for a reason of :func:`serve`.
        EngineError: a server could not be probed.
    """

    async def run() -> None:
        engines = await _made(make)
        async with AsyncExitStack() as stack:
            for engine in engines:
                stack.push_async_callback(engine.close)
            for i, engine in enumerate(engines):
                server = await serve(engine, host, port and port + i, key)
                stack.push_async_callback(server.close)
                told(server.url)
            await asyncio.Event().wait()

    with suppress(KeyboardInterrupt):
        asyncio.run(run())


async def _made(make: Callable[[], Engine | Sequence[Engine]] | Mapping[str, Any]) -> Sequence[Engine]:
    if isinstance(make, Mapping):
        settings = Config(rollout_batch_size=1, n_samples_per_prompt=1, max_response_len=1, engine=make).engine
        if not isinstance(settings, ServerEngineConfig):
            raise ConfigError(
                f"serve_forever: engine.kind {settings.kind} cannot be served; give a function that makes the engine"
            )
        return await open_servers(settings)
    if not callable(make):
        got = f"got {type(make).__name__}; to serve an engine object, call april.serve"
        raise ConfigError(f"serve_forever: give a function that makes the engine, {got}")
    made = make()
    engines = made if isinstance(made, Sequence) else [made]
    several = len({id(engine) for engine in engines}) == len(engines) > 0
    if not several or not all(hasattr(engine, "capabilities") for engine in engines):
        raise ConfigError(f"serve_forever: the function must return an engine or several engines, got {quoted(made)}")
    return engines
