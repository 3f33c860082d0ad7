"""Checks that the installed verl fits april's adapter, and converts verl's configuration to april's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from april.adapters.common.installed_trainer import import_trainer, require_functions
from april.adapters.common.refusals import Refusal, distorting, greedy, own_settings, refuse
from april.config.settings import Config
from april.engines.protocol import ROUTED_EXPERTS

TESTED_VERSION = "0.9.1"
_V1 = "verl.trainer.ppo.v1"
REQUIRED_FUNCTIONS: dict[str, tuple[str, ...]] = {
    f"{_V1}.agent_loop_tq:AgentLoopManagerTQ.generate_sequences": ("self", "prompts"),
    "verl.experimental.agent_loop.agent_loop:AgentLoopManager.__init__": (
        "self", "config", "llm_client", "teacher_client", "reward_loop_worker_handles",
    ),
    f"{_V1}.agent_loop_tq:AgentLoopWorkerTQ.generate_sequences": ("self", "batch"),
    f"{_V1}.agent_loop_tq:AgentLoopWorkerTQ._run_prompt": ("self", "prompt", "sampling_params", "trajectory", "trace"),
    f"{_V1}.agent_loop_tq:AgentLoopWorkerTQ._agent_loop_postprocess": ("self", "output", "validate", "kwargs"),
    f"{_V1}.replay_buffer:ReplayBufferAsync.sample": ("self", "global_steps", "partition_id", "batch_size"),
    f"{_V1}.trainer_base:PPOTrainer._add_prompts_to_generate": ("self", "num_prompts"),
    f"{_V1}.trainer_base:PPOTrainer.prepare_step": ("self",),
    f"{_V1}.trainer_colocate_async:PPOTrainerColocateAsync.on_sample_end": ("self",),
    "verl.workers.rollout.llm_server:LLMServerClient.generate": (
        "self", "request_id", "prompt_ids", "sampling_params", "image_data", "video_data", "audio_data",
        "mm_processor_kwargs", "kwargs",
    ),
    "verl.utils.tokenizer:get_processor_token_id": ("processor", "token_name"),
    "verl.checkpoint_engine.base:CheckpointEngineManager.abort_replicas": ("self", "reject_request"),
    "verl.trainer.ppo.checkpoint_callback:CheckpointCallback.on_save": (
        "self", "trainer", "global_step", "checkpoint_dir", "async_save", "kwargs",
    ),
}  # fmt: skip
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
    "max_chains": "rows, one per sample,",
}
ESTIMATOR = "april_grpo"
WITHOUT_GROUPS = ("gae", "reinforce_plus_plus")
"""Estimators of verl that compute a row's advantage from that row alone."""
UNBANNED = ("sglang",)
"""``rollout.name`` of servers that generate placeholder ids of images unless a logit bias prevents it."""
RAY_CALLS = 960
"""Maximum number of concurrent requests to a Ray actor of verl; Ray allows 1,000 calls, aborts and others included."""
ABORT_DEADLINE_S = 2.0
"""Seconds to wait for aborted requests; short, because tokens that arrive later are still used."""


def require_verl() -> None:
    """Raise ConfigError if verl, or a function that april needs, is missing or has other parameters."""
    import_trainer("verl", "april.adapters.verl needs verl", TESTED_VERSION)
    require_functions("verl", TESTED_VERSION, REQUIRED_FUNCTIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Settings of a run under verl: april's configuration, and further values that the adapter needs."""

    config: Config
    has_reward: bool
    """True if a sample's reward is known as soon as its agent loop has ended."""
    context: int
    """Maximum length of a conversation, in tokens."""
    max_tokens: int
    """Maximum number of new tokens for a call that sets no limit itself."""
    filter_metric: str | None
    check: bool
    scaled: bool | None
    """True if april's advantages are divided by the standard deviation; None if verl computes advantages."""
    places: int
    """Maximum number of requests in flight, over all servers."""


def settings_of(config: Any) -> RunSettings:
    """Read verl's whole configuration (OmegaConf or mappings). Raises ConfigError if april does not support it."""
    own = own_settings(select(config, "april"), "verl", DECIDED)
    refuse(refusals(config, own.get("group_quorum", 1)))
    rollout = "actor_rollout_ref.rollout"
    n, samples = select(config, "data.train_batch_size"), select(config, f"{rollout}.n")
    length = int(select(config, f"{rollout}.response_length", select(config, "data.max_response_length")))
    prompt = int(select(config, f"{rollout}.prompt_length", select(config, "data.max_prompt_length")))
    per_replica = own.pop("max_in_flight_per_replica", None) or select(config, f"{rollout}.max_num_seqs", 256)
    check = bool(own.pop("check", False))
    context = int(select(config, f"{rollout}.max_model_len") or prompt + length)
    defaults = {
        "over_sampling_batch_size": 2 * n if own.get("partial_rollout", True) else n,
        "abort_deadline_s": ABORT_DEADLINE_S,
        # verl's agent loops have no time limit, and its servers do not stream
        "function_timeout_s": None, "stall_timeout_s": None,
    }  # fmt: skip
    april = Config(
        rollout_batch_size=n,
        n_samples_per_prompt=samples,
        max_response_len=context - 1,  # for a conversation without its first token; each call has its own limit
        max_chains=1,  # verl has one row per sample
        sampling={"temperature": select(config, f"{rollout}.temperature", 1.0)},
        extras=(ROUTED_EXPERTS,) if select(config, f"{rollout}.enable_rollout_routing_replay", False) else (),
        **defaults | own,
    )
    return RunSettings(
        config=april,
        has_reward=not _scored_later(config),
        context=context,
        max_tokens=length,
        filter_metric=_filter_metric(config),
        check=check,
        scaled=bool(select(config, "algorithm.norm_adv_by_std_in_grpo", True)) if _own_estimator(config) else None,
        places=min(int(per_replica), RAY_CALLS) * replicas(config),
    )


def refusals(config: Any, quorum: Any) -> Iterator[Refusal]:
    """Yield a refusal for each setting of verl that april does not support."""
    rollout, correction = "actor_rollout_ref.rollout", "algorithm.rollout_correction"
    estimator, temperature = select(config, "algorithm.adv_estimator"), select(config, f"{rollout}.temperature", 1.0)
    mode = select(config, "trainer.v1.trainer_mode")
    v1, name = select(config, "trainer.use_v1", True), select(config, f"{rollout}.name")
    april_grpo, scored_later, filters = _own_estimator(config), _scored_later(config), _filter_metric(config)
    own_reward_gpus = "set reward.reward_model.enable_resource_pool=True"
    # fmt: off
    yield (quorum != 1 and not april_grpo and estimator not in WITHOUT_GROUPS,
           f"april.group_quorum={quorum}",
           f"it delivers groups in parts, but algorithm.adv_estimator={estimator} compares rows of the same batch",
           f"set that to {ESTIMATOR}, which compares with the first finishers of the group")
    yield (april_grpo and select(config, "algorithm.use_kl_in_reward", False), "algorithm.use_kl_in_reward=True",
           f"it changes rewards that algorithm.adv_estimator={ESTIMATOR} has already compared",
           "set it to False (actor.use_kl_loss is a penalty that needs no reward)")
    yield (april_grpo and scored_later, f"algorithm.adv_estimator={ESTIMATOR}", (
        "it needs a reward as soon as a response is finished, but a reward model on the training GPUs returns rewards "
        "later"
    ), own_reward_gpus)
    yield (not v1 or mode != "colocate_async", f"trainer.use_v1={v1}, trainer.v1.trainer_mode={mode}",
           "april continues partial rollouts in the v1 trainer's colocate_async mode",
           "switch it on with +april=verl, and set neither")
    yield from distorting({f"{rollout}.{name}={value}": value not in neutral
                           for name, neutral in (("top_p", (1.0, None)), ("top_k", (-1, 0, None)))
                           for value in [select(config, f"{rollout}.{name}")]},
                          " (validation has its own under val_kwargs)")
    yield greedy(temperature == 0, f"{rollout}.temperature=0")
    yield (not select(config, f"{rollout}.do_sample", True), f"{rollout}.do_sample=False",
           "greedy samples of a group are all equal", "leave it out")
    yield (not select(config, f"{rollout}.calculate_log_probs", False), f"{rollout}.calculate_log_probs=False",
           "tokens of older weights cannot be corrected without the log-probabilities of their sampling",
           "set it to True")
    yield (select(config, f"{rollout}.logprobs_mode") == "raw_logprobs" and temperature != 1.0,
           f"{rollout}.logprobs_mode=raw_logprobs", "it ignores the temperature, which verl's actor does not",
           "leave it at processed_logprobs")
    yield (name == "trtllm", f"{rollout}.name=trtllm", "verl's TensorRT-LLM servers replace the token limit of every "
           "request by their own", "use vllm or sglang")
    uncorrected = select(config, f"{correction}.rollout_is") is None
    yield (uncorrected and not select(config, f"{correction}.bypass_mode", False), f"{correction}.rollout_is=null",
           "verl recomputes old log-probabilities with the current weights, so tokens of older weights would be "
           "trained with ratio 1, without correction", "set it to token or sequence (or bypass_mode)")
    yield (select(config, "skip.rollout_tq.enable", False), "skip.rollout_tq.enable=True",
           "it replays stored rollouts instead of making new ones", "leave out one of the two")
    yield (estimator == "remax", "algorithm.adv_estimator=remax",
           "it mixes greedy samples into each group, which april cannot tell apart", "use another estimator")
    yield (filters is not None and scored_later, "algorithm.filter_groups", (
        "it needs rewards as soon as a group is finished, but a reward model on the training GPUs returns them later"
    ),
           f"{own_reward_gpus}, or leave the filter out")
    yield (select(config, "algorithm.filter_groups.enable", False) and filters is None,
           "algorithm.filter_groups.enable=True", "it needs algorithm.filter_groups.metric",
           "set that to reward, or to a metric such as acc")
    # fmt: on


def replicas(config: Any) -> int:
    """Return the number of servers that verl starts: all GPUs / (tensor * data * pipeline parallel size)."""
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
    """Return True if a reward model shares the training GPUs, so that only complete batches can be scored."""
    model = "reward.reward_model"
    return bool(select(config, f"{model}.enable", False)) and not select(config, f"{model}.enable_resource_pool", False)


def select(config: Any, path: str, default: Any = None) -> Any:
    """Return the value at a dotted path, or ``default`` if it is missing or null."""
    for name in path.split("."):
        config = config.get(name) if config is not None and hasattr(config, "get") else None
    return default if config is None else config
