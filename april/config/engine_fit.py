"""Do these engines fit this configuration? What cannot work is said before anything starts, one sentence each.

The scheduler refuses with the first sentence; ``april doctor`` shows them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from april.config.settings import Config
from april.core.sampling import LogprobKind
from april.core.types import GenerationMode
from april.errors import ConfigError

if TYPE_CHECKING:
    from april.engines.protocol import Capabilities


def why_unfit(config: Config, engines: Mapping[str, Capabilities]) -> Iterator[str]:
    """What stands against running ``config`` on ``engines`` (by name), one sentence each; none if they fit."""
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
        continuous = config.generation is GenerationMode.CONTINUOUS
        if config.leaves_partials and not c.returns_partials:
            mode = "generation: stepwise, " if continuous else ""
            yield (
                f"engine {name} hands over nothing when a request is aborted, so partial rollouts would lose "
                f"their tokens; set {mode}over_sampling_batch_size to rollout_batch_size, and refill: none"
            )
        if continuous and c.shares_weights:
            yield (
                f"engine {name} generates with the trainer's own model, which cannot be trained meanwhile; set "
                "generation: stepwise, or give the engine a copy of the model (a server, or a GPU of its own)"
            )


def fits(config: Config, engines: Mapping[str, Capabilities], **changes: object) -> bool:
    """Whether the configuration with these changes would be taken, by itself and on these engines."""
    try:
        changed = type(config)(**(config.model_dump(exclude_unset=True) | changes))
    except ConfigError:
        return False
    return not any(why_unfit(changed, engines))


def _wrong_logprobs(temperature: float, engines: Mapping[str, Capabilities]) -> Iterator[str]:
    """Engines whose log-probabilities are not log_softmax(logits / T).

    Nothing but the temperature shapes what is sampled, as the configuration refuses the rest; so all kinds agree at
    temperature 1, and elsewhere those that follow the temperature.
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
