"""verl's configuration as april's; what cannot be right is refused in one sentence, before anything starts."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from april.config.settings import Config
from april.core.settings import CoreSettings
from april.engines.protocol import ROUTED_EXPERTS
from april.errors import ConfigError
from april.processes.coordinator.media import KINDS

OURS = (
    "over_sampling_batch_size", "partial_rollout", "refill", "max_in_flight", "max_staleness", "max_off_policy_share",
    "on_stale", "max_age", "max_resumes", "max_held_tokens", "max_extras_bytes", "max_filtered_groups",
    "max_attempt_failures", "max_failed_groups", "abort_deadline_s", "abort_resend_s", "group_quorum",
    "on_failed_sample", "min_group_size",
)  # fmt: skip
"""Settings of april.Config that stand under ``april:``; the others are verl's to decide."""
HERE = ("max_in_flight_per_replica", "check")
DECIDED = {
    "rollout_batch_size": "data.train_batch_size",
    "n_samples_per_prompt": "actor_rollout_ref.rollout.n",
    "max_response_len": "data.max_response_length",
    "sampling": "actor_rollout_ref.rollout.temperature",
    "epochs": "trainer.total_epochs",
    "on_data_end": "trainer.total_epochs",
    "engine": "actor_rollout_ref.rollout.name",
    "generation": "trainer.v1.trainer_mode",
    "seed": "data.seed",
    "extras": "actor_rollout_ref.rollout.enable_rollout_routing_replay",
}
ESTIMATOR = "april_grpo"
"""The value of algorithm.adv_estimator that is april's own."""
WITHOUT_GROUPS = ("gae", "reinforce_plus_plus")
"""The estimators of verl that look at each row alone."""
SERVERS = "verl"
"""verl balances the load of its replicas itself, so they are one engine to the core."""
OVERRUNNING = ("trtllm",)
"""``rollout.name`` of servers that overwrite the limit of every request by what prompt_length and response_length
leave: more than is left of a response where the prompt is short, and nothing beyond their sum."""
UNBANNED = ("sglang",)
"""``rollout.name`` of servers that verl does not keep from generating ids that stand for images, and a bias does."""
RAY_CALLS = 960
"""Calls that one Ray actor of verl's takes at the same time, 1,000, less some for aborts and weights."""
ABORT_DEADLINE_S = 2.0
"""Later ends of aborted requests lose nothing (they are taken when they come), so the step need not wait long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The settings of a run under verl."""

    config: Config
    core: CoreSettings
    context: int
    """Most tokens of a conversation."""
    max_tokens: int
    """Most tokens of a call that names no limit itself."""
    filter_metric: str | None
    check: bool
    scaled: bool | None
    """True if april's advantages are divided by the standard deviation; None: verl makes its own."""
    overruns: bool
    """Servers generate beyond the limit of a request."""
    places: int
    """Most samples in flight at all servers together."""


def settings_of(config: Any) -> RunSettings:
    """Read verl's whole configuration (an OmegaConf container, or mappings of the same shape); raises ConfigError."""
    for sentence in objections(config):
        raise ConfigError(sentence)
    own = plain(config, "april")
    rollout = "actor_rollout_ref.rollout"
    n, samples = select(config, "data.train_batch_size"), select(config, f"{rollout}.n")
    length = int(select(config, f"{rollout}.response_length", select(config, "data.max_response_length")))
    prompt = int(select(config, f"{rollout}.prompt_length", select(config, "data.max_prompt_length")))
    values = {name: own[name] for name in OURS if own.get(name) is not None}
    partial = values.get("partial_rollout", True)
    values.setdefault("over_sampling_batch_size", 2 * n if partial else n)
    april = Config(
        rollout_batch_size=n,
        n_samples_per_prompt=samples,
        max_response_len=length,
        sampling={"temperature": select(config, f"{rollout}.temperature", 1.0)},
        extras=(ROUTED_EXPERTS,) if select(config, f"{rollout}.enable_rollout_routing_replay", False) else (),
        **{"abort_deadline_s": ABORT_DEADLINE_S, **values},
    )
    per_replica = own.get("max_in_flight_per_replica") or select(config, f"{rollout}.max_num_seqs", 256)
    cap = min(int(per_replica), RAY_CALLS) * replicas(config)
    overruns = select(config, f"{rollout}.name") in OVERRUNNING
    context = int(select(config, f"{rollout}.max_model_len") or prompt + length)
    if overruns:
        context = min(context, prompt + length)
    metric = _filter_metric(config)
    core = april.core_settings(
        has_reward=not _scored_later(config), group_reward=False, has_filter=metric is not None,
        run_id=secrets.randbits(64), attachments=KINDS,
    )  # fmt: skip
    core = dataclasses.replace(core, max_response_len=context, max_in_flight=min(core.max_in_flight, cap))
    return RunSettings(
        config=april,
        core=core,
        context=context,
        max_tokens=length,
        filter_metric=metric,
        check=bool(own.get("check", False)),
        scaled=bool(select(config, "algorithm.norm_adv_by_std_in_grpo", True)) if _own_estimator(config) else None,
        overruns=overruns,
        places=cap,
    )


def objections(config: Any) -> Iterator[str]:
    """Everything that speaks against this configuration, one sentence each."""
    own = plain(config, "april")
    rollout = "actor_rollout_ref.rollout"
    for name in own:
        if name in DECIDED:
            yield f"april.{name}: verl's {DECIDED[name]} decides this; leave it out"
        elif name not in (*OURS, *HERE):
            yield f"april.{name}: there is no such setting; there are {', '.join((*OURS, *HERE))}"
    quorum, estimator = own.get("group_quorum"), select(config, "algorithm.adv_estimator")
    if quorum is not None and quorum != 1 and not _own_estimator(config) and estimator not in WITHOUT_GROUPS:
        yield (
            f"april.group_quorum={quorum} delivers groups in parts, and algorithm.adv_estimator={estimator} compares "
            f"rows of the same batch; set it to {ESTIMATOR}, which compares with the first finishers of the group"
        )
    if _own_estimator(config) and select(config, "algorithm.use_kl_in_reward", False):
        yield (
            f"algorithm.use_kl_in_reward=True changes rewards that algorithm.adv_estimator={ESTIMATOR} has already "
            "compared; set it to False (actor.use_kl_loss is a penalty that needs no reward)"
        )
    if _own_estimator(config) and _scored_later(config):
        yield (
            f"algorithm.adv_estimator={ESTIMATOR} needs rewards when a response is finished, and a reward model on the "
            "training GPUs gives them later; set reward.reward_model.enable_resource_pool=True"
        )
    mode = select(config, "trainer.v1.trainer_mode")
    if not select(config, "trainer.use_v1", True) or mode != "colocate_async":
        yield (
            f"trainer.use_v1={select(config, 'trainer.use_v1', True)}, trainer.v1.trainer_mode={mode}: april continues "
            "partial rollouts in the v1 trainer's colocate_async mode; switch it on with +april=verl, and set neither"
        )
    for name, neutral in (("top_p", (1.0, None)), ("top_k", (-1, 0, None))):
        value = select(config, f"{rollout}.{name}")
        if value not in neutral:
            yield (
                f"{rollout}.{name}={value} is not part of the log-probabilities that verl's actor recomputes "
                "(log_softmax(logits / temperature)), so its ratios would be wrong; leave it out (validation has its "
                "own under val_kwargs)"
            )
    if select(config, f"{rollout}.temperature", 1.0) == 0:
        yield (
            f"{rollout}.temperature=0: greedy samples of a group are all equal, and verl's actor recomputes "
            "log_softmax(logits / temperature); use a positive temperature"
        )
    if not select(config, f"{rollout}.do_sample", True):
        yield f"{rollout}.do_sample=False: greedy samples of a group are all equal; leave it out"
    if not select(config, f"{rollout}.calculate_log_probs", False):
        yield (
            f"{rollout}.calculate_log_probs=False: tokens of older weights cannot be corrected without the "
            "log-probabilities they were drawn with; set it to True"
        )
    logprobs = select(config, f"{rollout}.logprobs_mode", "processed_logprobs")
    if logprobs == "raw_logprobs" and select(config, f"{rollout}.temperature", 1.0) != 1.0:
        yield f"{rollout}.logprobs_mode=raw_logprobs leaves out the temperature, which verl's actor does not"
    if select(config, f"{rollout}.name") == "trtllm" and select(config, f"{rollout}.temperature", 1.0) != 1.0:
        yield (
            f"{rollout}.temperature={select(config, f'{rollout}.temperature')} with {rollout}.name=trtllm: verl's "
            "logprobs_mode does not reach this server, its TorchSampler leaves the temperature out of the "
            "log-probabilities, and what its other sampler does was not seen; set it to 1, or use vllm or sglang"
        )
    correction = "algorithm.rollout_correction"
    if select(config, f"{correction}.rollout_is") is None and not select(config, f"{correction}.bypass_mode", False):
        yield (
            f"{correction}.rollout_is=null: verl recomputes old log-probabilities with the present weights, so tokens "
            "of older ones would be trained with ratio 1, uncorrected; set it to token or sequence (or bypass_mode)"
        )
    if select(config, "skip.rollout_tq.enable", False):
        yield "skip.rollout_tq.enable=True replays stored rollouts instead of making new ones; leave out one of the two"
    if select(config, "algorithm.adv_estimator") == "remax":
        yield "algorithm.adv_estimator=remax mixes greedy samples into each group, which april cannot tell apart"
    callback = select(config, "trainer.checkpoint_callback_class")
    if not callback:
        yield (
            "trainer.checkpoint_callback_class is empty, so checkpoints would lose what is unfinished; leave it to "
            "+april=verl, or name a subclass of april.adapters.verl.Checkpoints"
        )
    if not select(config, f"{rollout}.agent.agent_loop_manager_class"):
        yield (
            f"{rollout}.agent.agent_loop_manager_class is empty, so april would not see a request; leave it to "
            "+april=verl"
        )
    if _filter_metric(config) is not None and _scored_later(config):
        yield (
            "algorithm.filter_groups needs rewards when a group is finished, and a reward model on the training GPUs "
            "gives them later; set reward.reward_model.enable_resource_pool=True, or leave the filter out"
        )
    if select(config, "algorithm.filter_groups.enable", False) and not select(config, "algorithm.filter_groups.metric"):
        yield "algorithm.filter_groups.enable=True needs algorithm.filter_groups.metric (reward, or acc and its like)"


def replicas(config: Any) -> int:
    """Servers that verl starts: one per slice of tensor, data and pipeline parallel GPUs."""
    rollout = "actor_rollout_ref.rollout"
    gpus = select(config, "trainer.n_gpus_per_node", 1) * select(config, "trainer.nnodes", 1)
    for name in ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size"):
        gpus //= int(select(config, f"{rollout}.{name}", 1) or 1)
    return max(1, int(gpus))


def _own_estimator(config: Any) -> bool:
    return bool(select(config, "algorithm.adv_estimator") == ESTIMATOR)


def _filter_metric(config: Any) -> str | None:
    if not select(config, "algorithm.filter_groups.enable", False):
        return None
    return str(select(config, "algorithm.filter_groups.metric") or "") or None


def _scored_later(config: Any) -> bool:
    """Return whether a reward model shares the training GPUs, and scores a batch when it is complete."""
    model = "reward.reward_model"
    return bool(select(config, f"{model}.enable", False)) and not select(config, f"{model}.enable_resource_pool", False)


def select(config: Any, path: str, default: Any = None) -> Any:
    """The value at a dotted path; ``default`` where there is none, or null."""
    for name in path.split("."):
        config = config.get(name) if config is not None and hasattr(config, "get") else None
    return default if config is None else config


def plain(config: Any, path: str) -> dict[str, Any]:
    """The mapping at a path, empty where there is none; raises ConfigError for anything else."""
    value = select(config, path)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}: expected a mapping of settings, got {type(value).__name__}")
    return {str(k): v for k, v in value.items()}
