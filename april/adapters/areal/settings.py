"""Checks that the installed AReaL fits april's adapter, and converts AReaL's configuration to april's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from april.adapters.common.installed_trainer import import_trainer, require_functions
from april.adapters.common.refusals import Refusal, distorting, divided_groups, greedy, own_settings, refuse
from april.config.settings import Config
from april.config.values import AUTO
from april.core.types import Work
from april.engines.protocol import ROUTED_EXPERTS

TESTED_VERSION = "1.0.4"
_TRAINER = "areal.trainer.rl_trainer:PPOTrainer"
_EXECUTOR = "areal.infra.workflow_executor:WorkflowExecutor"
_REMOTE = "areal.infra.remote_inf_engine"
REQUIRED_FUNCTIONS: dict[str, tuple[str, ...]] = {
    f"{_TRAINER}.__init__": ("self", "config", "train_dataset", "valid_dataset"),
    f"{_TRAINER}._create_dataloader": ("self", "dataset", "dataset_config", "rank", "world_size"),
    f"{_TRAINER}._init_rollout": ("self", "rollout_config", "is_eval", "lora_path"),
    f"{_EXECUTOR}.__init__": ("self", "config", "inference_engine", "staleness_manager"),
    f"{_EXECUTOR}.initialize": ("self", "logger", "train_data_parallel_size"),
    f"{_EXECUTOR}.prepare_batch": ("self", "dataloader", "workflow", "should_accept_fn", "dynamic_bs"),
    **{f"{_EXECUTOR}.{name}": ("self",) for name in ("pause", "resume", "destroy")},
    f"{_REMOTE}:GroupedRolloutWorkflow.__init__": ("self", "workflow", "group_size", "logger"),
    f"{_REMOTE}:RemoteInfEngine.agenerate": ("self", "req"),
    **{f"{_REMOTE}:RemoteInfEngine.{name}": ("self",)
       for name in ("choose_server", "pause_generation", "continue_generation")},
    "areal.infra.utils.http:arequest_with_retry": (
        "addr", "endpoint", "payload", "session", "method", "max_retries", "timeout", "retry_delay", "verbose",
    ),
    "areal.utils.data:concat_padded_tensors": ("tensor_dicts", "pad_value"),
    "areal.utils.recover:RecoverHandler.recover_info_path": ("experiment_name", "trial_name", "fileroot"),
}  # fmt: skip
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
"""Conversation length in tokens that is never reached, because AReaL's workflows and servers limit it themselves."""
NEUTRAL_TOP_K = 1_000_000
NAME_PATTERN = "april[{!r}]"


def require_areal() -> None:
    """Raise ConfigError if AReaL, or a function that april needs, is missing or has other parameters."""
    needs = "april.adapters.areal runs AReaL, which is not installed here"
    import_trainer("areal", needs, TESTED_VERSION, "; in a loop of your own use april.RolloutScheduler")
    require_functions("areal", TESTED_VERSION, REQUIRED_FUNCTIONS)


def config_of(config: Any, settings: Any, *, groups: int, ranks: int) -> Config:
    """Return april's configuration for one data-parallel rank, from AReaL's PPOConfig and april's own settings.

    The rank trains ``groups`` groups in each step, and all ``ranks`` share ``rollout.max_concurrent_rollouts``. Raises
    ConfigError if settings contradict each other or are not supported.
    """
    values = own_settings(settings, "AReaL", DECIDED, pattern=NAME_PATTERN)
    refuse(refusals(config, values))
    values.pop("check", None)
    stale = int(config.rollout.max_head_offpolicyness)
    values.setdefault("generation", "stepwise" if is_colocated(config) else "continuous")
    most = config.rollout.max_concurrent_rollouts
    if most is not None and "max_in_flight" not in values:
        values["max_in_flight"] = max(1, int(most) // ranks) * config.gconfig.n_samples
    if values["generation"] != "continuous" and values.get("partial_rollout", True):
        values.setdefault("over_sampling_batch_size", min(2, stale + 1) * groups)
    # AReaL has its own time limits for episodes and requests
    limits = {"function_timeout_s": None, "stall_timeout_s": None}
    return Config(
        rollout_batch_size=groups,
        n_samples_per_prompt=config.gconfig.n_samples,
        max_response_len=MAX_CONTEXT,
        max_staleness=stale,
        sampling={"temperature": config.gconfig.temperature, "top_p": config.gconfig.top_p},
        extras=(ROUTED_EXPERTS,) if config.rollout.return_routed_experts else (),
        # refusals() has checked gconfig already, and a workflow may choose other sampling for each call
        **limits | values | {"allow_mismatch": True},
    )


def is_colocated(config: Any) -> bool:
    """Return True if trainer and servers take turns on the same GPUs. The rule is AReaL's own."""
    pairs = ((config.actor.scheduling_strategy, "rollout"), (config.rollout.scheduling_strategy, "actor"))
    return any(s is not None and str(getattr(s.type, "value", s.type)) == "colocation" and s.target == target
               for s, target in pairs)  # fmt: skip


def refusals(config: Any, own: Mapping[str, Any]) -> Iterator[Refusal]:
    """Yield a refusal for each setting that april does not support."""
    rollout, actor, sampling = config.rollout, config.actor, config.gconfig
    # fmt: off
    yield from divided_groups(own, "AReaL", "gconfig.n_samples rows", NAME_PATTERN)
    for name in Work:
        yield (own.get(name) == AUTO, f"april[{str(name)!r}]='auto'",
               "AReaL's ranks share their servers, and each would choose as if they were its own",
               "give a number (april plan finds one in a record)")
    yield (is_colocated(config) and own.get("generation") == "continuous", "april['generation']='continuous'",
           "rollout.scheduling_strategy (or actor's) is colocation, so the servers sleep while the trainer trains",
           "leave it out, or give the servers GPUs of their own")
    yield ("v2" in (rollout._version, actor._version), "rollout._version and actor._version",
           "v2 generates behind a gateway, where april cannot end a request and go on later", "leave them at v1")
    yield (config.dynamic_bs, "dynamic_bs", (
        "batches would be shortened by the groups that the filter rejects, but april replaces those during generation, "
        "so that each batch is complete"
    ), "set it to false")
    yield (rollout.use_lora or actor.use_lora, "use_lora",
           "AReaL trains adapters only in its single-controller mode, which april does not support", "set it to false")
    yield (getattr(getattr(rollout, "agent", None), "mode", None) == "online", "rollout.agent.mode",
           "online has no prompts that april could count", "use inline or a workflow")
    yield greedy(sampling.greedy or sampling.temperature == 0, "gconfig.greedy (or temperature 0)")
    yield (sampling.use_beam_search, "gconfig.use_beam_search",
           "beams have no log-probability of their own to train on", "set it to false")
    if own.get("allow_mismatch"):
        return
    yield (str(rollout.backend).startswith("vllm") and sampling.temperature != 1,
           f"gconfig.temperature={sampling.temperature:g} with rollout.backend={rollout.backend}",
           "vLLM's log-probabilities ignore the temperature, but the trainer's do not", (
               "set it to 1, or start the servers with --logprobs-mode processed_logprobs and set "
               "april={'allow_mismatch': True}"
           ))
    neutral = {"top_p": sampling.top_p >= 1, "top_k": sampling.top_k >= NEUTRAL_TOP_K,
               "frequency_penalty": sampling.frequency_penalty == 0}
    yield from distorting({f"gconfig.{name}={getattr(sampling, name):g}": not is_neutral
                           for name, is_neutral in neutral.items()}, ", or set april={'allow_mismatch': True}")
    older = rollout.max_head_offpolicyness > 0
    yield (older and actor.recompute_logprob and not actor.use_decoupled_loss,
           "actor.recompute_logprob without actor.use_decoupled_loss",
           "log-probabilities of the current weights replace those of the sampling, so tokens of older weights would "
           "be trained without correction", "set use_decoupled_loss to true, or recompute_logprob to false")
    # AReaL computes importance weights of tokens only with rejection_sampling
    unweighted = getattr(actor, "rejection_sampling", True) is None
    yield (older and actor.use_decoupled_loss and unweighted,
           "actor.use_decoupled_loss without actor.rejection_sampling",
           "tokens of older weights get no importance weight, so they would be trained without correction",
           "set rejection_sampling to {level: token, action: clamp, metric: ratio, upper: 2.0}, or use_decoupled_loss "
           "to false")
    # fmt: on
