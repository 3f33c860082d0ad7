"""Checks before a run starts whether the configuration fits the engines; each problem has one sentence.

The scheduler raises the first sentence as an error; the command ``april doctor`` shows all sentences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from april.config.settings import Config
from april.core.types import OnStale
from april.engines.abilities import ABILITIES, Capabilities
from april.engines.protocol import Engine
from april.errors import ConfigError


def why_unfit(config: Config, engines: Mapping[str, Capabilities], attachments: Sequence[str] = ()) -> Iterator[str]:
    """Yield a sentence for each reason why ``config`` cannot work on the engines.

    ``engines`` are indexed by name; ``attachments`` are the kinds of attachments that prompts may have.
    """
    for name, c in engines.items():
        yield from filter(None, (ability.unfit(config, attachments, name, c) for ability in ABILITIES))


def check_engines(config: Config, engines: Sequence[Engine], *, gathers: bool, attachments: Sequence[str] = ()) -> None:
    """Raise ConfigError if the configuration cannot work on the engines, for one of the reasons in :func:`why_unfit`.

    ``gathers`` says whether the caller gathers sharded parameters on all ranks, as april.RankScheduler does.
    """
    if not engines:
        raise ConfigError("engines: at least one engine is needed")
    for engine in engines:
        if not hasattr(engine, "capabilities"):
            raise ConfigError(f"engines: {type(engine).__name__} is not an engine (april.engines.protocol.Engine)")
        if engine.capabilities.gathers_weights and not gathers:
            raise ConfigError(
                f"engine {engine.name}: the model's parameters are sharded over several ranks, which must gather them "
                "together; use april.RankScheduler on every rank"
            )
    names = [e.name for e in engines]
    if len(set(names)) != len(names):
        raise ConfigError(f"engines: names must be unique, got {names}")
    for sentence in why_unfit(config, {e.name: e.capabilities for e in engines}, attachments):
        raise ConfigError(sentence)


def warnings_of(config: Config) -> Iterator[str]:
    """Yield a warning for each setting that is allowed but may not be intended."""
    n, over = config.rollout_batch_size, config.groups_in_work
    if over < n:
        yield (
            f"over_sampling_batch_size={over} is below rollout_batch_size={n}, so april starts {over} groups at a time "
            f"until {n} are in work, and no more; to over-sample, set it above {n}"
        )
    most = (config.max_staleness + 1) * n
    if over > most and config.on_stale is not OnStale.DROP and not config.tail_batching:
        yield (
            f"max_staleness={config.max_staleness} allows {most} groups in work at most: more, as "
            f"over_sampling_batch_size={over} asks for, could not be trained in time; raise max_staleness, or set "
            "on_stale: drop"
        )
