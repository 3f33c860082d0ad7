"""Creates engines from the configuration; the only module that knows every kind of engine by name."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from april.config.engines import (
    AprilEngineConfig,
    EngineConfig,
    OpenAIEngineConfig,
    SglangEngineConfig,
    SimulatedEngineConfig,
    TransformersEngineConfig,
    VllmEngineConfig,
    checked_key,
)
from april.engines.protocol import Engine
from april.engines.simulated.decode_cost import roofline
from april.engines.simulated.engine import SimulatedEngine, by_sample_key
from april.engines.simulated.response_lengths import LognormalLengths
from april.engines.transformers.engine import TransformersEngine
from april.errors import ConfigError


def create_engines(
    config: EngineConfig, model: Any, seed: int,
    run: Callable[[Callable[[], Coroutine[Any, Any, list[Engine]]]], list[Engine]], processor: Any = None,
) -> list[Engine]:  # fmt: skip
    """Create the engines that ``config`` describes.

    Args:
        model: Model object for an engine in this process; None if the configuration names the model or servers.
        seed: Seed of an engine in this process.
        run: Function that runs a coroutine function on the event loop that will use the engines, to probe servers.
        processor: Processor of transformers, for an engine in this process that gets images.

    Raises:
        ConfigError: a model is missing or superfluous, packages are not installed, a server cannot do what april needs,
            or servers differ in something that must be equal.
        EngineError: a server could not be probed.
    """
    if isinstance(config, TransformersEngineConfig):
        return [_transformers(config, model, seed, processor)]
    if model is not None:
        raise ConfigError(f"engine kind {config.kind} accepts no model object; leave model= out or change engine.kind")
    if isinstance(config, SimulatedEngineConfig):
        return _simulated(config, seed)
    return run(lambda: open_servers(config))


async def open_servers(
    config: AprilEngineConfig | VllmEngineConfig | SglangEngineConfig | OpenAIEngineConfig,
) -> list[Engine]:
    """Open one engine per server, all at the same time; if one server cannot be used, close all engines again."""
    # imported here, because the configuration and simulations need no aiohttp
    if isinstance(config, AprilEngineConfig):
        from april.engines.served.client import connect_april

        return list[Engine](await connect_april(config))
    if isinstance(config, VllmEngineConfig):
        from april.engines.vllm.engine import connect_vllm

        return list[Engine](await connect_vllm(config))
    if isinstance(config, SglangEngineConfig):
        from april.engines.sglang.engine import connect_sglang

        return await connect_sglang(config)
    from april.engines.openai.engine import connect_openai

    return list[Engine](await connect_openai(config))


async def open_server(config: EngineConfig, url: str, api_key: str | None = None) -> Engine:
    """Open one more server, with the settings of ``config`` if its engines are servers, otherwise as an april server.

    Raises:
        ConfigError: the server cannot be used, or ``config`` has a router, to which the server must be added instead.
        EngineError: the server could not be probed.
    """
    if isinstance(config, SglangEngineConfig) and config.router is not None:
        raise ConfigError(
            f"the router {config.router} decides which servers get requests; add {url} there and restart the run"
        )
    if api_key is not None:
        checked_key(api_key)  # checked here, because an error in the settings would show the key
    changes: dict[str, Any] = {"urls": (url,)} | ({} if api_key is None else {"api_key": api_key, "api_key_env": None})
    if not isinstance(config, AprilEngineConfig | VllmEngineConfig | SglangEngineConfig | OpenAIEngineConfig):
        config = AprilEngineConfig(**changes)
    else:
        config = type(config)(**(dict(config) | changes))
    (engine,) = await open_servers(config)
    return engine


def _transformers(config: TransformersEngineConfig, model: Any, seed: int, processor: Any) -> Engine:
    options: dict[str, Any] = {
        "slots": config.slots, "max_len": config.max_len, "stream_interval": config.stream_interval, "seed": seed,
        "processor": processor,
    }  # fmt: skip
    if model is not None:
        return TransformersEngine(model, **options)
    if config.model is None:
        raise ConfigError(
            "engine kind transformers needs a model: give the scheduler model=..., or set engine.model to a directory"
        )
    if config.model.startswith(("/", ".", "~")) and not Path(config.model).is_dir():
        raise ConfigError(f"engine.model: there is no directory {config.model}")
    return TransformersEngine.from_pretrained(config.model, **options)


def _simulated(config: SimulatedEngineConfig, seed: int) -> list[Engine]:
    cost = roofline(config.model, config.gpu, config.tensor_parallel)
    lengths = LognormalLengths(config.median_len, config.sigma_between, config.sigma_within, seed=seed)
    return [
        SimulatedEngine(
            f"simulated{i}", cost, by_sample_key(lengths), max_running=config.slots, vocab_size=config.vocab_size,
            max_context=config.max_len,
        )
        for i in range(config.count)
    ]  # fmt: skip
