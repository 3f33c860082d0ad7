"""From the configuration to engine objects; the only place that knows engines by name."""

from __future__ import annotations

from typing import Any

from april.config import SimulatedEngineConfig, TransformersEngineConfig
from april.engines.decode_cost import roofline
from april.engines.protocol import Engine
from april.engines.response_lengths import LognormalLengths
from april.engines.simulated import SimulatedEngine, by_sample_key
from april.engines.transformers import TransformersEngine
from april.errors import ConfigError


def create_engines(config: TransformersEngineConfig | SimulatedEngineConfig, model: Any, seed: int) -> list[Engine]:
    """The engines that ``config`` describes; ``model`` is a model object for those that embed one.

    Raises:
        ConfigError: a model is missing or superfluous, or the engine's packages are not installed.
    """
    if isinstance(config, SimulatedEngineConfig):
        return _simulated(config, model, seed)
    return [_transformers(config, model, seed)]


def _transformers(config: TransformersEngineConfig, model: Any, seed: int) -> Engine:
    options: dict[str, Any] = {
        "slots": config.slots,
        "max_len": config.max_len,
        "stream_interval": config.stream_interval,
        "seed": seed,
    }
    if model is not None:
        return TransformersEngine(model, **options)
    if config.model is None:
        raise ConfigError(
            "engine kind transformers needs a model: give the scheduler model=..., or set engine.model to a directory"
        )
    return TransformersEngine.from_pretrained(config.model, **options)


def _simulated(config: SimulatedEngineConfig, model: Any, seed: int) -> list[Engine]:
    if model is not None:
        raise ConfigError("engine kind simulated takes no model object; leave model out or change engine.kind")
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
