"""Refuses vLLM servers whose KV connectors may return keys and values that were computed with older weights.

A connector is a second cache behind vLLM's own: in host memory, on disk, or shared by several servers. Most connectors
look up entries by vLLM's block hashes, which depend on the cache salt that april changes with each policy version. Some
look up entries by token ids alone: after a weight update, they would return entries from older weights. Encoder-cache
connectors do the same with images, because they look up encoded images by the image alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from april.errors import ConfigError
from april.text.server_text import clean

KEEP_SALTS_APART = frozenset({
    # these look up entries by block hashes, or by the salt itself
    "OffloadingConnector", "SimpleCPUOffloadConnector", "MooncakeStoreConnector", "LMCacheMPConnector",
    # these act only on requests that name a server to fetch entries from, and april's requests name none
    "NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector", "MoRIIOConnector",
})  # fmt: skip
"""Connectors of vLLM 0.32 that are safe, as a reading of their code has shown."""


def require_salts_kept_apart(server: str, config: object, trusted: Collection[str]) -> None:
    """Refuse a server with a connector that may return values from older weights.

    Args:
        server: Address or name of the server, for the message.
        config: vLLM's ``VllmConfig``, as a mapping or as vLLM's own object.
        trusted: Names of further connectors that are known to be safe.

    Raises:
        ConfigError: A KV connector is not known to keep the keys of different salts apart, or encoder outputs are
            cached outside the server.
    """
    for name in connector_names(_field(config, "kv_transfer_config")):
        if name not in KEEP_SALTS_APART and name not in trusted:
            raise _refusal(server, f"the KV connector {clean(name, 64)}")
    encoded = _field(_field(config, "ec_transfer_config"), "ec_connector")
    if encoded is not None and str(encoded) not in trusted:
        raise ConfigError(
            f"{server} has the encoder-cache connector {clean(str(encoded), 64)}, which finds images only by their "
            "content, so after a weight update it returns encodings of older weights. Start the server without "
            "--ec-transfer-config, or, if the encoder is not trained, add the connector to engine.salted_kv_connectors"
        )


def refuse_hidden_connector(server: str, trusted: Collection[str]) -> None:
    """Refuse a server that was seen to use a KV connector whose name it hides, unless some connector is ``trusted``."""
    if not trusted:
        raise _refusal(server, "a KV connector whose name is hidden without VLLM_SERVER_DEV_MODE=1")


def _refusal(server: str, what: str) -> ConfigError:
    return ConfigError(
        f"{server} has {what}, and april does not know whether it separates keys with different cache salts; if not, "
        "it answers prompts with keys of older weights. Start the server without it, with one of "
        f"{', '.join(sorted(KEEP_SALTS_APART))}, or, if its keys depend on cache_salt, add it to "
        "engine.salted_kv_connectors"
    )


def connector_names(transfer: object) -> list[str]:
    """Return the connector names in a ``kv_transfer_config``; for a MultiConnector, the names of its parts."""
    if transfer is None:
        return []
    name, extra = _field(transfer, "kv_connector"), _field(transfer, "kv_connector_extra_config")
    parts = _field(extra, "connectors")
    if name == "MultiConnector" and isinstance(parts, list):
        return [inner for part in parts for inner in connector_names(part)]
    return [] if name is None else [str(name)]


def _field(value: object, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
