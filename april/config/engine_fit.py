"""Checks whether a configuration fits its engines before anything starts, with one sentence for each problem.

The scheduler refuses with the first sentence; ``april doctor`` shows them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from april.config.settings import Config
from april.core.engine_limits import CUTS
from april.core.sampling import LogprobKind
from april.core.types import GenerationMode, OnStale, OnWeightUpdate
from april.errors import ConfigError

if TYPE_CHECKING:
    from april.engines.protocol import Capabilities, Engine


def why_unfit(config: Config, engines: Mapping[str, Capabilities], attachments: Sequence[str] = ()) -> Iterator[str]:
    """Yield a sentence for each reason why ``config`` cannot work on the engines.

    ``engines`` are given by name; ``attachments`` are the kinds of attachments that prompts may have.
    """
    if not config.allow_mismatch:
        yield from _wrong_logprobs(config.sampling.temperature, engines)
    for name, c in engines.items():
        if config.max_response_len >= c.max_context:
            yield (
                f"max_response_len={config.max_response_len} leaves no room for a prompt in the context of "
                f"{c.max_context} tokens of engine {name}; lower it or give the engine more"
            )
        bad = [i for i in config.sampling.stop_token_ids if i >= c.vocab_size]
        if bad:
            yield f"sampling.stop_token_ids: {bad[0]} is outside the vocabulary of {c.vocab_size} of engine {name}"
        if missing := [extra for extra in config.extras if extra not in c.extras]:
            gives = f"it gives {', '.join(c.extras)}" if c.extras else "leave extras out, or use an engine that does"
            yield (
                f"engine {name} does not give {', '.join(missing)} with its tokens, as extras asks; "
                f"{c.extras_need or gives}"
            )
        continuous = config.generation is GenerationMode.CONTINUOUS
        if config.leaves_partials and not c.returns_partials:
            mode = "generation: stepwise, " if continuous else ""
            yield (
                f"engine {name} hands over nothing when a request is aborted, so partial rollouts would lose "
                f"their tokens; set {mode}over_sampling_batch_size to rollout_batch_size, and refill: none"
            )
        if (how := config.on_weight_update) is not OnWeightUpdate.RESUBMIT and how not in c.in_flight_updates:
            why = next((limit for code in CUTS for limit in c.limits if limit.code is code), None)
            offers = ", ".join([OnWeightUpdate.RESUBMIT, *c.in_flight_updates])
            yield (
                f"engine {name} cannot do on_weight_update: {how}, only {offers}; set one that all engines can"
                f"{'' if why is None or not why.remedy else f', or {why.remedy}'}"
            )
        for kind in attachments:
            if kind not in c.attachments:
                need = c.attachments_need or "use an engine and a model that do"
                yield (
                    f"engine {name} takes no {kind}s, and processor= is for prompts that have some; {need}; for text "
                    "give tokenizer= instead"
                )
        if continuous and c.shares_weights:
            yield (
                f"engine {name} generates with the trainer's own model, which cannot be trained meanwhile; set "
                "generation: stepwise, or give the engine a copy of the model (a server, or a GPU of its own)"
            )


def check_engines(config: Config, engines: Sequence[Engine], *, gathers: bool, attachments: Sequence[str] = ()) -> None:
    """Raise ConfigError if the configuration cannot work on the engines; see :func:`why_unfit` for ``attachments``."""
    if not engines:
        raise ConfigError("engines: at least one engine is needed")
    for engine in engines:
        if not hasattr(engine, "capabilities"):
            raise ConfigError(f"engines: {type(engine).__name__} is not an engine (april.engines.protocol.Engine)")
        if engine.capabilities.gathers_weights and not gathers:
            raise ConfigError(
                f"engine {engine.name}: the model's parameters are sharded over ranks, which have to gather them "
                "together; use april.RankScheduler on every rank"
            )
    names = [e.name for e in engines]
    if len(set(names)) != len(names):
        raise ConfigError(f"engines: names must be unique, got {names}")
    for sentence in why_unfit(config, {e.name: e.capabilities for e in engines}, attachments):
        raise ConfigError(sentence)


def fits(config: Config, engines: Mapping[str, Capabilities], **changes: object) -> bool:
    """Return True if the configuration with these changes is valid and fits the engines."""
    try:
        changed = type(config)(**(config.model_dump(exclude_unset=True) | changes))
    except ConfigError:
        return False
    return not any(why_unfit(changed, engines))


def _wrong_logprobs(temperature: float, engines: Mapping[str, Capabilities]) -> Iterator[str]:
    """Yield a sentence for each engine whose log-probabilities are not log_softmax(logits / T).

    The configuration refuses all sampling parameters that change the distribution, except the temperature. So all kinds
    of log-probabilities agree at temperature 1; at others, the kinds that follow the temperature do.
    """
    if temperature == 1:
        return
    for name, c in engines.items():
        if c.logprob_kind is LogprobKind.RAW:
            yield (
                f"engine {name} gives log-probabilities of temperature 1 (raw), which sampling.temperature="
                f"{temperature:g} makes wrong for training; start the server with --logprobs-mode processed_logprobs "
                "(vLLM) or without SGLANG_RETURN_ORIGINAL_LOGPROB (SGLang), set temperature: 1, or allow_mismatch: "
                "true if your trainer accounts for it"
            )
        elif not c.logprob_kind.follows_temperature:
            yield (
                f"engine {name} does not say of which distribution its log-probabilities are, which matters at "
                f"sampling.temperature={temperature:g}; set engine.logprobs if you know it (vLLM with "
                "--logprobs-mode processed_logprobs: processed), temperature: 1, or allow_mismatch: true"
            )


def warnings_of(config: Config) -> Iterator[str]:
    """Yield a warning for each setting that is allowed but may not be intended."""
    n, over = config.rollout_batch_size, config.groups_in_work
    if over < n:
        yield (
            f"over_sampling_batch_size={over} is below rollout_batch_size={n}, so groups are submitted in portions of "
            f"{over} until {n} are in work, and none beyond; to over-sample set it above {n}"
        )
    most = (config.max_staleness + 1) * n
    if over > most and config.on_stale is not OnStale.DROP:
        yield (
            f"max_staleness={config.max_staleness} limits the groups in work to {most}: what over_sampling_batch_size="
            f"{over} begins beyond that could not be trained in time; raise max_staleness, or set on_stale: drop"
        )
