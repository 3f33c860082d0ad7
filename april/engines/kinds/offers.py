"""Ask a server of a known kind what it offers, by the probe of its engine; one record for all kinds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from april.config.engines import OpenAIEngineConfig, ServerEngineConfig, SglangEngineConfig, VllmEngineConfig
from april.engines.http.http_client import HttpClient
from april.engines.kinds.identify import VERSION_CHARS, ServerKind
from april.engines.openai.engine import OpenAIEngine
from april.engines.openai.probe import probe_openai
from april.engines.protocol import Capabilities
from april.engines.sglang.offer import probe_sglang
from april.engines.vllm.offer import probe_vllm
from april.server_text import said


@dataclass(frozen=True, slots=True)
class Offer:
    """What a server can do for april."""

    capabilities: Capabilities
    """As the engine would have them."""
    model: str
    """As the server names it, fit to be shown; so are the next two."""
    version: str | None = None
    """Of the server's software."""
    weight_version: str | None = None
    """Label of the present weights."""


async def probe(client: HttpClient, config: ServerEngineConfig) -> Offer:
    """What the server behind ``client`` offers to an engine of the kind of ``config``. Changes nothing there.

    Raises:
        ConfigError: it is of another kind, cannot do what april needs, or does not tell what must then be set.
        EngineError: it could not be asked.
    """
    return await _PROBES[type(config)](client, config)


async def _vllm(client: HttpClient, config: VllmEngineConfig) -> Offer:
    offer = await probe_vllm(client, config)
    return Offer(offer.capabilities(config), *_shown(offer.model, offer.version, offer.label))


async def _sglang(client: HttpClient, config: SglangEngineConfig) -> Offer:
    offer = await probe_sglang(client, config)
    return Offer(offer.capabilities(config), *_shown(offer.model, offer.version, offer.weight_version))


async def _openai(client: HttpClient, config: OpenAIEngineConfig) -> Offer:
    offer = await probe_openai(client, config)
    engine = OpenAIEngine(client, offer, max_in_flight=config.max_in_flight)
    return Offer(engine.capabilities, *_shown(offer.model, offer.software or None, None))


def _shown(model: str, version: str | None, label: str | None) -> tuple[str, str | None, str | None]:
    return said(model), version and said(version, VERSION_CHARS), label if label is None else said(label, VERSION_CHARS)


_PROBES: dict[type[ServerEngineConfig], Callable[[HttpClient, Any], Awaitable[Offer]]] = {
    VllmEngineConfig: _vllm,
    SglangEngineConfig: _sglang,
    OpenAIEngineConfig: _openai,
}
SETTINGS: dict[ServerKind, type[VllmEngineConfig | SglangEngineConfig | OpenAIEngineConfig]] = {
    ServerKind.VLLM: VllmEngineConfig,
    ServerKind.SGLANG: SglangEngineConfig,
    ServerKind.OPENAI: OpenAIEngineConfig,
}
"""The settings to use for a server of which only its kind is known."""
