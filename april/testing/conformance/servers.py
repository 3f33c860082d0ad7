"""Makes the test subject for a server's URL, with a recording proxy and a Hugging Face model as reference."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import aiohttp
from pydantic import TypeAdapter

from april.config.engines import EngineConfig, ServerEngineConfig, SglangEngineConfig
from april.engines.kinds.factory import open_servers
from april.engines.protocol import Engine, Float32
from april.errors import ConfigError
from april.testing.conformance.subject import Reference, Subject, Weights
from april.testing.recording_proxy import RecordingProxy

_MADE = re.compile(rb"^(?:vllm|sglang):generation_tokens_total(?:\{[^}]*\})? (\S+)", re.MULTILINE)
"""Pattern of the metrics that count the tokens which a server has generated."""


@asynccontextmanager
async def served(
    kind: str, urls: Sequence[str], *, model: str | None = None, other: str | None = None, second: str | None = None,
    name: str = "", options: dict[str, Any] | None = None, **subject: Any,
) -> AsyncIterator[Subject]:  # fmt: skip
    """Make a subject for the server at ``urls``; several workers behind an SGLang router count as one server.

    Args:
        kind: Kind of the engine configuration: vllm, sglang, openai.
        model: Directory of the server's weights, also readable here. The suite takes reference and tokenizer from it,
            and loads it at the end to restore the weights.
        other: Directory of other weights of the same shape, which the suite loads.
        second: URL of another server with the same weights, on which responses must finish if the first is killed.
        name: Name of the subject in the suite's matrix; by default ``kind``.
        options: Further settings of the engine configuration.
        subject: Further fields of :class:`Subject`.
    """
    config = _config(kind, urls, options or {})
    front = config.router if isinstance(config, SglangEngineConfig) and config.router else urls[0]
    async with RecordingProxy(front) as proxy:
        if isinstance(config, SglangEngineConfig) and config.router:
            watched: ServerEngineConfig = config.model_copy(update={"router": proxy.url})
        else:
            watched = config.model_copy(update={"urls": (proxy.url,)})
        values: dict[str, Any] = {
            "open": lambda: _open(watched), "name": name or kind, "wire": proxy, "made": await _counter(urls)
        }  # fmt: skip
        if second is not None:
            values["second"] = lambda: _open(_config(kind, [second], options or {}))
        if model is not None:
            values |= {"now": Weights(model, hugging_face(model)), "tokenizer": hugging_face_tokenizer(model)}
        if other is not None:
            values["other"] = Weights(other, hugging_face(other))
        yield replace(Subject(**values), **subject)


def _config(kind: str, urls: Sequence[str], options: dict[str, Any]) -> ServerEngineConfig:
    config = TypeAdapter(EngineConfig).validate_python({"kind": kind, "urls": list(urls), **options})
    if not isinstance(config, ServerEngineConfig):
        raise ConfigError(f"engine kind {kind} is not a server; make a Subject of your own for it")
    return config


async def _open(config: Any) -> Engine:
    engines = await open_servers(config)
    return engines[0]


async def _counter(urls: Sequence[str]) -> Callable[[], Awaitable[float]] | None:
    """Return a function for the servers' own count of generated tokens; None if one of them has no count."""

    async def total() -> float:
        counts = [await _made_by(url) for url in urls]
        return sum(count or 0.0 for count in counts)

    return None if None in [await _made_by(url) for url in urls] else total


async def _made_by(url: str) -> float | None:
    timeout = aiohttp.ClientTimeout(total=30)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, trust_env=False) as session,
            session.get(f"{url}/metrics", allow_redirects=False) as response,
        ):
            found = _MADE.findall(await response.read()) if response.status == 200 else []
    except (aiohttp.ClientError, OSError, TimeoutError):
        return None
    return sum(map(float, found)) if found else None


@cache
def hugging_face(path: str) -> Reference:
    """Return a reference for the causal language model in a directory: fp32 on the CPU, one forward pass per response.

    Needs the ``transformers`` extra.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, use_safetensors=True)
    model.eval()

    def logits(prompt: list[int], response: list[int]) -> Float32:
        with torch.no_grad():
            rows: Float32 = (
                model(input_ids=torch.tensor([prompt + response]), use_cache=False)
                .logits[0, len(prompt) - 1 : -1].float().numpy()
            )  # fmt: skip
        return rows

    return logits


@cache
def hugging_face_tokenizer(path: str) -> Any:
    """Return the tokenizer in a directory, or None if there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError):
        return None
