"""sglang-router: one address for requests, and a list of workers that must be the configured one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from april.config.engines import SglangEngineConfig
from april.engines.http.http_client import HttpClient
from april.engines.protocol import Capabilities
from april.engines.sglang.offer import SglangOffer
from april.errors import ConfigError
from april.server_text import said

EMPTY_PATIENCE_S = 15.0
"""A router that has just started lists no workers for some seconds."""
ASK_AGAIN_S = 0.25


async def router_workers(router: HttpClient) -> frozenset[str]:
    """Addresses of the router's workers; empty: it has none yet.

    Raises:
        ConfigError: it is no sglang-router, or its workers split prefill from decode.
    """
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
        raise ConfigError(f"engine.router: {said(split[0])} splits prefill from decode, which april was not tried with")
    return urls


async def require_same_workers(router: HttpClient, config: SglangEngineConfig) -> None:
    """The router's workers are ``engine.urls``; waits a little for a router that has none yet.

    Raises:
        ConfigError: they differ; weights of a worker that april does not know would never change.
    """
    wanted = frozenset(config.urls)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + min(EMPTY_PATIENCE_S, config.probe_timeout_s / 2)
    found = await router_workers(router)
    while found < wanted and loop.time() < deadline:
        await asyncio.sleep(ASK_AGAIN_S)
        found = await router_workers(router)
    if unknown := sorted(found - wanted):
        raise ConfigError(
            f"the router {router.url} sends requests to {said(unknown[0])}, which engine.urls does not name: its "
            "weights would never be updated; add it to engine.urls, written as the router writes it"
        )
    if idle := sorted(wanted - found):
        raise ConfigError(
            f"engine.urls names {idle[0]}, which the router {router.url} does not have; add it to the router, or take "
            "it out of engine.urls (addresses must be written alike)"
        )


def common_offer(offers: Sequence[SglangOffer], config: SglangEngineConfig) -> tuple[SglangOffer, Capabilities]:
    """What all workers of one router offer: a request may come to any of them.

    Raises:
        ConfigError: they differ in what must be equal.
    """
    first = offers[0]
    for offer in offers[1:]:
        for what in ("vocab_size", "eos_token_ids", "logprob_kind", "spans", "incremental", "version"):
            ours, theirs = getattr(first, what), getattr(offer, what)
            if ours != theirs:
                raise ConfigError(
                    f"the workers {first.url} and {offer.url} of one router differ in {what} ({said(ours)} and "
                    f"{said(theirs)}); start them alike"
                )
    together = replace(
        first,
        context_length=min(offer.context_length for offer in offers),
        stream_interval=all(offer.stream_interval for offer in offers),
        updates_from_disk=all(offer.updates_from_disk for offer in offers),
        deterministic=all(offer.deterministic for offer in offers),
        weight_version=first.weight_version if all(o.weight_version is not None for o in offers) else None,
        missing=tuple(dict.fromkeys(sentence for offer in offers for sentence in offer.missing)),
    )
    places = [offer.capabilities(config).max_in_flight for offer in offers]
    total = None if None in places else sum(n for n in places if n is not None)
    return together, replace(together.capabilities(config), max_in_flight=total)
