"""AReaL's configuration as april's; what cannot be right is refused in one sentence, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from april.config.settings import Config
from april.config.values import AUTO
from april.core.types import Work
from april.engines.protocol import ROUTED_EXPERTS
from april.errors import ConfigError

OURS = (
    "over_sampling_batch_size", "partial_rollout", "generation", "refill", "max_in_flight", "on_stale", "max_age",
    "max_resumes", "max_held_tokens", "max_extras_bytes", "max_filtered_groups", "max_attempt_failures",
    "max_failed_groups", "abort_deadline_s", "abort_resend_s", "allow_mismatch", "on_failed_sample",
)  # fmt: skip
"""Settings of april.Config that the keyword ``april`` takes; the others are AReaL's to decide."""
HERE = ("check", "group_quorum")
DECIDED = {
    "rollout_batch_size": "train_dataset.batch_size",
    "n_samples_per_prompt": "gconfig.n_samples",
    "max_response_len": "gconfig.max_new_tokens",
    "sampling": "gconfig.temperature",
    "max_staleness": "rollout.max_head_offpolicyness",
    "epochs": "total_train_epochs",
    "on_data_end": "total_train_epochs",
    "engine": "rollout.backend",
    "seed": "the servers",
    "extras": "rollout.return_routed_experts",
}
MAX_CONTEXT = 1 << 30
"""Workflows name the limit of each call, and servers have their own; april has none besides."""
NEUTRAL_TOP_K = 1_000_000


def config_of(config: Any, own: Mapping[str, Any], *, groups: int, ranks: int) -> Config:
    """april's configuration of one data-parallel rank.

    Args:
        config: AReaL's PPOConfig.
        own: the keyword ``april``.
        groups: that this rank asks for in each step.
        ranks: data-parallel, which share ``rollout.max_concurrent_rollouts``.

    Raises:
        ConfigError: something contradicts itself, or asks for what this adapter cannot be exact with.
    """
    for sentence in objections(config, own):
        raise ConfigError(sentence)
    values = {name: own[name] for name in OURS if own.get(name) is not None}
    stale = int(config.rollout.max_head_offpolicyness)
    colocated = is_colocated(config)
    values.setdefault("generation", "stepwise" if colocated else "continuous")
    continuous = values["generation"] == "continuous"
    most = config.rollout.max_concurrent_rollouts
    if most is not None and "max_in_flight" not in values:
        values["max_in_flight"] = max(1, int(most) // ranks) * config.gconfig.n_samples
    if not continuous and values.get("partial_rollout", True):
        values.setdefault("over_sampling_batch_size", min(2, stale + 1) * groups)
    return Config(
        rollout_batch_size=groups,
        n_samples_per_prompt=config.gconfig.n_samples,
        max_response_len=MAX_CONTEXT,
        max_staleness=stale,
        sampling={"temperature": config.gconfig.temperature, "top_p": config.gconfig.top_p},
        extras=(ROUTED_EXPERTS,) if config.rollout.return_routed_experts else (),
        **values,
    )


def is_colocated(config: Any) -> bool:
    """Return whether trainer and servers take turns on the same GPUs, by AReaL's own rule."""
    pairs = ((config.actor.scheduling_strategy, "rollout"), (config.rollout.scheduling_strategy, "actor"))
    return any(s is not None and str(getattr(s.type, "value", s.type)) == "colocation" and s.target == target
               for s, target in pairs)  # fmt: skip


def objections(config: Any, own: Mapping[str, Any]) -> Iterator[str]:
    """Everything that speaks against this configuration, one sentence each."""
    for name in own:
        if name in DECIDED:
            yield f"april[{name!r}]: AReaL's {DECIDED[name]} decides this; leave it out"
        elif name not in (*OURS, *HERE):
            yield f"april[{name!r}]: there is no such setting; there are {', '.join((*OURS, *HERE))}"
    if own.get("group_quorum") not in (None, 1):
        yield (
            f"april['group_quorum']={own['group_quorum']}: AReaL takes rewards over whole groups of gconfig.n_samples "
            "rows by their place in the batch, so groups are delivered whole; leave it out"
        )
    if own.get("on_failed_sample") == "shrink":
        yield (
            "april['on_failed_sample']='shrink': AReaL takes rewards over groups of gconfig.n_samples rows by their "
            "place in the batch, so none may have fewer; use replace"
        )
    if chosen := [name for name in Work if own.get(name) == AUTO]:
        yield (
            f"april[{chosen[0]!r}]='auto': AReaL's ranks share their servers, and each would choose as if they were "
            "its own; give a number (april plan finds one in a record)"
        )
    rollout, actor, sampling = config.rollout, config.actor, config.gconfig
    if is_colocated(config) and own.get("generation") == "continuous":
        yield (
            "april['generation']='continuous': rollout.scheduling_strategy (or actor's) is colocation, so the servers "
            "sleep while the trainer trains; leave it out, or give the servers GPUs of their own"
        )
    if "v2" in (rollout._version, actor._version):
        yield (
            "rollout._version and actor._version: v2 generates behind a gateway, where april cannot end a request and "
            "go on later; leave them at v1"
        )
    if config.dynamic_bs:
        yield (
            "dynamic_bs: batches are to be short by the groups that the filter rejects, and april replaces those while "
            "generation goes on, so that each batch is whole; set it to false"
        )
    if rollout.use_lora or actor.use_lora:
        yield (
            "use_lora: AReaL trains adapters in its single-controller mode only, where april is not; set it to false"
        )
    agent = getattr(rollout, "agent", None)
    if agent is not None and getattr(agent, "mode", None) == "online":
        yield "rollout.agent.mode: online has no prompts that april could count; use inline or a workflow"
    if sampling.greedy or sampling.temperature == 0:
        yield (
            "gconfig.greedy (or temperature 0): all samples of a group are equal and have no log-probability to train "
            "on; use a positive temperature"
        )
    if sampling.use_beam_search:
        yield "gconfig.use_beam_search: beams have no log-probability of their own to train on; set it to false"
    if own.get("allow_mismatch"):
        return
    if str(rollout.backend).startswith("vllm") and sampling.temperature != 1:
        yield (
            f"gconfig.temperature={sampling.temperature:g} with rollout.backend={rollout.backend}: vLLM's "
            "log-probabilities leave the temperature out, and the trainer's do not; set it to 1, or start the servers "
            "with --logprobs-mode processed_logprobs and say april={'allow_mismatch': True}"
        )
    for name, off in (("top_p", sampling.top_p < 1), ("top_k", sampling.top_k < NEUTRAL_TOP_K),
                      ("frequency_penalty", sampling.frequency_penalty != 0)):  # fmt: skip
        if off:
            yield (
                f"gconfig.{name}={getattr(sampling, name):g} is not part of the log-probabilities that the trainer "
                "recomputes (log_softmax(logits / temperature)), so its ratios would be wrong; leave it out, or say "
                "april={'allow_mismatch': True}"
            )
    if actor.recompute_logprob and not actor.use_decoupled_loss and rollout.max_head_offpolicyness > 0:
        yield (
            "actor.recompute_logprob without actor.use_decoupled_loss replaces the log-probabilities that tokens were "
            "drawn with by those of the present weights, so tokens of older weights would be trained uncorrected; set "
            "use_decoupled_loss to true, or recompute_logprob to false"
        )
    unweighted = getattr(actor, "rejection_sampling", True) is None  # which is what brings the weights
    if actor.use_decoupled_loss and unweighted and rollout.max_head_offpolicyness > 0:
        yield (
            "actor.use_decoupled_loss without actor.rejection_sampling takes no weight for a token, so those of older "
            "weights would be trained uncorrected; set rejection_sampling to {level: token, action: clamp, metric: "
            "ratio, upper: 2.0}, or use_decoupled_loss to false"
        )
