"""Ask a server of a known kind what it can do, by the probe of its engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from april.config.engines import OpenAIEngineConfig, ServerEngineConfig, SglangEngineConfig, VllmEngineConfig
from april.engines.http.http_client import HttpClient
from april.engines.http.server_probe import ServerFacts
from april.engines.kinds.identify import ServerKind
from april.engines.openai.probe import probe_openai
from april.engines.sglang.probe import probe_sglang
from april.engines.vllm.probe import probe_vllm

SETTINGS: dict[ServerKind, type[VllmEngineConfig | SglangEngineConfig | OpenAIEngineConfig]] = {
    ServerKind.VLLM: VllmEngineConfig,
    ServerKind.SGLANG: SglangEngineConfig,
    ServerKind.OPENAI: OpenAIEngineConfig,
}
"""The settings to use for a server of which only its kind is known."""
_PROBES: dict[type[ServerEngineConfig], Callable[[HttpClient, Any], Awaitable[ServerFacts]]] = {
    VllmEngineConfig: probe_vllm,
    SglangEngineConfig: probe_sglang,
    OpenAIEngineConfig: probe_openai,
}


async def probe(client: HttpClient, config: ServerEngineConfig) -> ServerFacts:
    """What the server behind ``client`` is, and can do for an engine of the kind of ``config``. Changes nothing there.

    Raises:
        ConfigError: it is of another kind, cannot do what april needs, or does not tell what must then be set.
        EngineError: it could not be asked.
    """
    return await _PROBES[type(config)](client, config)
