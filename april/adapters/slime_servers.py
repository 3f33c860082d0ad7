"""The SGLang servers behind slime's router, and what they call their weights."""

from __future__ import annotations

import asyncio

import msgspec

from april.engines.http_client import HttpClient
from april.engines.sglang_router import router_workers
from april.errors import EngineError

UNLABELLED = (None, "default")
"""Labels of weights that nobody has labelled."""



async def servers_behind(router: str) -> tuple[tuple[str, ...], tuple[str | None, ...]]:
    """Addresses of the router's servers, sorted, and the labels of their weights.

    Raises:
        ConfigError, EngineError: there is no router, or it has no servers.
    """
    client = HttpClient(router, name="the router")
    try:
        urls = tuple(sorted(await router_workers(client)))
    finally:
        await client.close()
    if not urls:
        raise EngineError(f"the router {router} has no workers yet; slime starts them before it asks for a rollout")
    return urls, tuple(await asyncio.gather(*map(_label, urls)))


async def _label(url: str) -> str | None:
    """Of a server's weights; None: it does not say, or is not there."""
    client = HttpClient(url, name=url)
    try:
        for route in ("/model_info", "/get_model_info"):
            reply = await client.call("GET", route, timeout_s=10.0, retry=True)
            if reply.ok:
                said = msgspec.json.decode(reply.body)
                label = said.get("weight_version") if isinstance(said, dict) else None
                return None if label is None else str(label)
        return None
    except (EngineError, msgspec.DecodeError):
        return None
    finally:
        await client.close()
