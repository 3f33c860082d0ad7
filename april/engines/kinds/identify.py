"""Finds out which kind of server is behind an address, by GET requests that change nothing on any server.

The kind follows from routes that only one kind has: sglang-router lists its workers, SGLang has ``/model_info``, and
vLLM names itself as the owner of its models. ``/health`` is not used, because on SGLang it takes at least a second, and
20 seconds while the server is paused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from april.config.engines import OpenAIEngineConfig, ServerEngineConfig, SglangEngineConfig, VllmEngineConfig
from april.engines.http.http_client import HttpClient, Reply, has_value, json_value
from april.engines.http.server_probe import ServerFacts
from april.engines.openai.probe import SOFTWARE, probe_openai
from april.engines.sglang.probe import probe_sglang
from april.engines.vllm.probe import probe_vllm
from april.text.server_text import clean

VERSION_CHARS = 64
"""Largest number of characters of a server's version in a report."""


class ServerKind(StrEnum):
    """The kinds of servers that april can tell apart."""

    VLLM = "vllm"
    SGLANG = "sglang"
    ROUTER = "sglang-router"
    OPENAI = "openai"
    """A server that lists models as OpenAI does, but is none of the other kinds."""
    NEEDS_KEY = "needs a key"
    """A server that answers 401 or 403 to every route that would identify it."""
    STARTING = "starting"
    """A server that answers 502, 503 or 504 to every route that would identify it."""
    OTHER = "other"
    """A web server of a kind unknown to april."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a server reports about itself, cleaned for display."""

    kind: ServerKind
    version: str | None = None
    """Version of the server's software; for kind OPENAI it begins with the software's name, if april knows the name."""
    models: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()
    """Addresses of a router's workers, as the router reports them."""
    needs_key: bool = False
    """True if the server lists its models only for a valid key, and none was given."""


ROUTES = ("/v1/models", "/version", "/model_info", "/workers")


async def identify(client: HttpClient, timeout_s: float) -> Identity:
    """Identify a server by asking all routes at once.

    Raises EngineError if none answers within ``timeout_s`` seconds.
    """
    replies = await asyncio.gather(
        *(client.call("GET", route, timeout_s=timeout_s) for route in ROUTES), return_exceptions=True
    )
    answers = [reply for reply in replies if isinstance(reply, Reply)]
    errors = [reply for reply in replies if isinstance(reply, BaseException)]
    if errors and not any(reply.ok for reply in answers):
        raise errors[0]
    by_route = {route: reply for route, reply in zip(ROUTES, replies, strict=True) if isinstance(reply, Reply)}
    return _judge(by_route)


async def why_silent(client: HttpClient, kind: ServerKind, timeout_s: float) -> str:
    """Explain why a server accepts requests but does not answer them (paused, asleep); empty if it does not say so."""
    for route, means in _PAUSED.get(kind, ()):
        reply = await client.call("GET", route, timeout_s=timeout_s)
        if means(reply):
            return f"{route} says {clean(reply.body, 200) or reply.status}"
    return ""


def _judge(replies: dict[str, Reply]) -> Identity:
    answers = {route: json_value(reply) for route, reply in replies.items() if reply.ok}
    listed = [m for m in _list(answers.get("/v1/models"), "data") if isinstance(m, dict)]
    models = tuple(clean(m["id"]) for m in listed if "id" in m)
    version = _text(answers.get("/version"), "version")
    models_locked = "/v1/models" in replies and replies["/v1/models"].status in (401, 403)
    locked = models_locked or (not answers and any(reply.status in (401, 403) for reply in replies.values()))

    def found(kind: ServerKind, **more: Any) -> Identity:
        return Identity(
            kind=kind, version=version and clean(version, VERSION_CHARS), models=models, needs_key=locked, **more
        )

    workers = answers.get("/workers")
    if isinstance(workers, dict) and isinstance(workers.get("workers"), list):
        urls = tuple(clean(w["url"]) for w in workers["workers"] if isinstance(w, dict) and "url" in w)
        return found(ServerKind.ROUTER, workers=urls)
    if _text(answers.get("/model_info"), "model_path") is not None:
        return found(ServerKind.SGLANG)
    if any(m.get("owned_by") == "sglang" for m in listed):
        return found(ServerKind.SGLANG)
    # without its key, a vLLM server hides its models but not its version
    if any(m.get("owned_by") == "vllm" for m in listed) or (version is not None and models_locked):
        return found(ServerKind.VLLM)
    if models:
        name = SOFTWARE.get(_text(listed[0], "owned_by") or "")
        version = " ".join(part for part in (name, version) if part) or None
        return found(ServerKind.OPENAI)
    if locked:
        return found(ServerKind.NEEDS_KEY)
    if all(reply.status in (502, 503, 504) for reply in replies.values()):
        return found(ServerKind.STARTING)
    return found(ServerKind.OTHER)


def _list(value: Any, key: str) -> list[Any]:
    inner = value.get(key) if isinstance(value, dict) else None
    return inner if isinstance(inner, list) else []


def _text(value: Any, key: str) -> str | None:
    inner = value.get(key) if isinstance(value, dict) else None
    return inner if isinstance(inner, str) else None


def _says(key: str) -> Callable[[Reply], bool]:
    return lambda reply: reply.ok and has_value(key, True)(json_value(reply))


_PAUSED: dict[ServerKind, tuple[tuple[str, Callable[[Reply], bool]], ...]] = {
    ServerKind.VLLM: (("/is_paused", _says("is_paused")), ("/is_sleeping", _says("is_sleeping"))),
    ServerKind.SGLANG: (("/ready", lambda reply: reply.status == 503),),
}
"""Routes that show whether a server is paused, each with a test of the reply. Replies to unknown routes never pass."""


SETTINGS: dict[ServerKind, type[VllmEngineConfig | SglangEngineConfig | OpenAIEngineConfig]] = {
    ServerKind.VLLM: VllmEngineConfig,
    ServerKind.SGLANG: SglangEngineConfig,
    ServerKind.OPENAI: OpenAIEngineConfig,
}
"""Settings class for each kind of server that april can use."""
_PROBES: dict[type[ServerEngineConfig], Callable[[HttpClient, Any], Awaitable[ServerFacts]]] = {
    VllmEngineConfig: probe_vllm,
    SglangEngineConfig: probe_sglang,
    OpenAIEngineConfig: probe_openai,
}


async def probe(client: HttpClient, config: ServerEngineConfig) -> ServerFacts:
    """Find out what a server is and can do as an engine of ``config``'s kind, without changing anything there.

    Raises ConfigError if the server is of another kind or april cannot use it, EngineError if it could not be probed.
    """
    return await _PROBES[type(config)](client, config)
