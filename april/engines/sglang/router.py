"""Checks that an sglang-router has the configured SGLang servers, and combines what was learned about them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import fields, replace

from april.config.engines import SglangEngineConfig
from april.engines.http.http_client import HttpClient
from april.engines.protocol import FirstWeights
from april.engines.sglang.probe import SglangFacts
from april.errors import ConfigError
from april.text.server_text import clean

ASK_AGAIN_S = 0.25


async def router_workers(router: HttpClient) -> frozenset[str]:
    """Return the addresses of the router's workers. Raises ConfigError if april cannot use such a router."""
    reply = await router.call("GET", "/workers", retry=True)
    if reply.status == 404:
        raise ConfigError(f"engine.router: {router.url} has no /workers; it must be an sglang-router (0.3 or later)")
    answer = await router.json("GET", "/workers", retry=True)
    try:
        workers = answer["workers"]
        split = [w["url"] for w in workers if w.get("worker_type", "regular") != "regular"]
        urls = frozenset(str(w["url"]).rstrip("/") for w in workers)
    except (TypeError, KeyError, AttributeError):
        raise ConfigError(f"engine.router: {router.url}/workers does not answer as an sglang-router does") from None
    if split:
        worker = clean(split[0])
        raise ConfigError(f"engine.router: {worker} splits prefill from decode, with which april was not tested")
    return urls


async def require_same_workers(router: HttpClient, config: SglangEngineConfig, patience_s: float = 0.0) -> None:
    """Raise ConfigError unless the router's workers are ``engine.urls``; wait so long for missing workers."""
    wanted = frozenset(config.urls)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_s
    found = await router_workers(router)
    while found < wanted and loop.time() < deadline:
        await asyncio.sleep(ASK_AGAIN_S)
        found = await router_workers(router)
    if unknown := sorted(found - wanted):
        raise ConfigError(
            f"the router {router.url} sends requests to {clean(unknown[0])}, which is missing in engine.urls, so its "
            "weights would never be updated; add it to engine.urls, written as the router writes it"
        )
    if idle := sorted(wanted - found):
        raise ConfigError(
            f"engine.urls contains {idle[0]}, which the router {router.url} does not have; add it to the router, or "
            "remove it from engine.urls (addresses must be written alike)"
        )


def common_facts(workers: Sequence[SglangFacts]) -> SglangFacts:
    """Return facts that hold for all workers, since the router may send a request to any of them.

    Raises ConfigError if the workers differ in an ability.
    """
    first = workers[0]
    ours = _abilities(first)
    for other in workers[1:]:
        for what, theirs in _abilities(other).items():
            if ours[what] != theirs:
                raise ConfigError(
                    f"the workers {first.url} and {other.url} of one router differ in {what} ({clean(ours[what])} and "
                    f"{clean(theirs)}); start them with the same settings"
                )
    each = [worker.capabilities for worker in workers]
    places = [c.max_in_flight for c in each if c.max_in_flight is not None]
    return replace(
        first,
        capabilities=replace(
            first.capabilities,
            max_context=min(c.max_context for c in each),
            max_in_flight=sum(places) if len(places) == len(each) else None,
            first_weights=max((c.first_weights for c in each), key=list(FirstWeights).index),
            limits=tuple(dict.fromkeys(limit for c in each for limit in c.limits)),
        ),
    )


_MAY_DIFFER = ("max_context", "max_in_flight", "first_weights", "limits", "needs")
"""Names of the capabilities in which the workers of one router may differ."""


def _abilities(worker: SglangFacts) -> dict[str, object]:
    c = worker.capabilities
    return {field.name: getattr(c, field.name) for field in fields(c) if field.name not in _MAY_DIFFER} | {
        "incremental": worker.incremental, "version": worker.software, "adapter": worker.adapter,
        "routed experts": worker.routing,
    }  # fmt: skip
