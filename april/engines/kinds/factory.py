"""The way from the configuration to engine objects; the only place that knows engines by name."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from april.config.engines import (
    EngineConfig,
    OpenAIEngineConfig,
    SglangEngineConfig,
    SimulatedEngineConfig,
    TransformersEngineConfig,
    VllmEngineConfig,
)
from april.engines.protocol import Engine
from april.engines.simulated.decode_cost import roofline
from april.engines.simulated.engine import SimulatedEngine, by_sample_key
from april.engines.simulated.response_lengths import LognormalLengths
from april.engines.transformers.engine import TransformersEngine
from april.errors import ConfigError


def create_engines(
    config: EngineConfig,
    model: Any,
    seed: int,
    run: Callable[[Coroutine[Any, Any, list[Engine]]], list[Engine]],
    processor: Any = None,
) -> list[Engine]:
    """Make the engines that ``config`` describes, with a ``model`` object for those that embed one.

    ``processor`` is transformers' own, for an engine in this process that is given images. ``run`` runs a coroutine on
    the event loop that will use the engines: servers are asked there what they can do.

    Raises:
        ConfigError: a model is missing or superfluous, packages are not installed, a server cannot do what april needs,
            or servers differ in what must be equal.
        EngineError: a server could not be asked.
    """
    if isinstance(config, TransformersEngineConfig):
        return [_transformers(config, model, seed, processor)]
    if model is not None:
        raise ConfigError(f"engine kind {config.kind} takes no model object; leave model out or change engine.kind")
    if isinstance(config, SimulatedEngineConfig):
        return _simulated(config, seed)
    return run(open_servers(config))


def part_of_process(config: EngineConfig, model: Any, place: int, places: int) -> EngineConfig | None:
    """The part of one of several processes in what ``config`` describes: servers in turn; None: no engine.

    Servers behind a router are one engine, of the first process. An embedded engine is one in each that has a model.
    """
    if isinstance(config, TransformersEngineConfig):
        return config if model is not None or config.model is not None else None
    if isinstance(config, SimulatedEngineConfig):
        count = len(range(place, config.count, places))
        return config.model_copy(update={"count": count}) if count else None
    if isinstance(config, SglangEngineConfig) and config.router is not None:
        return None if place else config
    urls = config.urls[place::places]
    return config.model_copy(update={"urls": urls}) if urls else None


async def open_servers(config: VllmEngineConfig | SglangEngineConfig | OpenAIEngineConfig) -> list[Engine]:
    """Open one engine per server, asked all at once; if one cannot be used, none stays open."""
    # here, and not above: the configuration and simulations need no aiohttp
    if isinstance(config, VllmEngineConfig):
        from april.engines.vllm.engine import connect_vllm

        return list[Engine](await connect_vllm(config))
    if isinstance(config, SglangEngineConfig):
        from april.engines.sglang.engine import connect_sglang

        return await connect_sglang(config)
    from april.engines.openai.engine import connect_openai

    return list[Engine](await connect_openai(config))


def _transformers(config: TransformersEngineConfig, model: Any, seed: int, processor: Any) -> Engine:
    options: dict[str, Any] = {
        "slots": config.slots,
        "max_len": config.max_len,
        "stream_interval": config.stream_interval,
        "seed": seed,
        "processor": processor,
    }
    if model is not None:
        return TransformersEngine(model, **options)
    if config.model is None:
        raise ConfigError(
            "engine kind transformers needs a model: give the scheduler model=..., or set engine.model to a directory"
        )
    return TransformersEngine.from_pretrained(config.model, **options)


def _simulated(config: SimulatedEngineConfig, seed: int) -> list[Engine]:
    cost = roofline(config.model, config.gpu, config.tensor_parallel)
    lengths = LognormalLengths(config.median_len, config.sigma_between, config.sigma_within, seed=seed)
    return [
        SimulatedEngine(
            f"simulated{i}",
            cost,
            by_sample_key(lengths),
            max_running=config.slots,
            vocab_size=config.vocab_size,
            max_context=config.max_len,
        )
        for i in range(config.count)
    ]
