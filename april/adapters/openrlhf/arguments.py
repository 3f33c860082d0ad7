"""Checks that the installed OpenRLHF fits april's adapter, and converts OpenRLHF's flags to april's configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from april.adapters.common.installed_trainer import import_trainer, require_functions
from april.adapters.common.refusals import Refusal, distorting, divided_groups, greedy, mapping_of, own_settings, refuse
from april.config.settings import Config, read_yaml
from april.core.types import GenerationMode, OnStale
from april.errors import ConfigError

TESTED_VERSION = "0.11.2"
_GENERATOR = "openrlhf.trainer.ppo_utils.samples_generator:SamplesGenerator"
_EXECUTOR = "openrlhf.utils.agent:SingleTurnAgentExecutor"
_ASYNC = "openrlhf.trainer.ppo_trainer_async"
_ENGINE = "openrlhf.trainer.ray.vllm_engine:RolloutRayActor"
REQUIRED_FUNCTIONS: dict[str, tuple[str, ...]] = {
    f"{_GENERATOR}.__init__": (
        "self", "strategy", "prompts_dataloader", "eval_dataloader", "tokenizer", "vllm_engines",
    ),
    f"{_GENERATOR}.generate_samples": ("self", "generate_kwargs"),
    f"{_GENERATOR}.generate_eval_samples": ("self", "generate_kwargs"),
    f"{_GENERATOR}._generate_vllm": ("self", "dataloader_iter", "num_prompts", "dynamic_filtering", "generate_kwargs"),
    f"{_GENERATOR}._process_response_into_experience": ("self", "response", "generate_kwargs"),
    "openrlhf.trainer.ppo_trainer:BasePPOTrainer.broadcast_to_vllm": ("self",),
    f"{_EXECUTOR}._fetch_rewards_via_func": ("self", "queries_list", "prompts_list", "labels_list"),
    f"{_EXECUTOR}._fetch_rewards_via_http": ("self", "queries_list", "prompts_list", "labels_list"),
    "openrlhf.trainer.ppo_trainer:PPOTrainer.fit": ("self", "global_step"),
    "openrlhf.trainer.ppo_trainer:PPOTrainer.broadcast_to_vllm": ("self",),
    f"{_ASYNC}:GenerateSamplesActor.fit": ("self", "episode", "total_consumed_prompts"),
    f"{_ASYNC}:GenerateSamplesActor.load_state_dict": ("self", "state_dict"),
    f"{_ASYNC}:TrainingActor.broadcast_to_vllm": ("self",),
    f"{_ASYNC}:PPOTrainerAsync.fit": ("self",),
    f"{_ENGINE}.update_weight": ("self", "name", "dtype", "shape", "empty_cache"),
    f"{_ENGINE}.update_weight_cuda_ipc": ("self", "name", "dtype", "shape", "ipc_handles", "empty_cache"),
}  # fmt: skip
PREFIX = "--april."
DECIDED = {
    "rollout_batch_size": "--rollout.batch_size",
    "n_samples_per_prompt": "--rollout.n_samples_per_prompt",
    "max_response_len": "--rollout.max_new_tokens and --data.max_len",
    "sampling": "--rollout.temperature",
    "seed": "--train.seed",
    "epochs": "--train.num_episodes",
    "on_data_end": "--train.num_episodes",
    "engine": "--vllm.num_engines and its like",
    "max_chains": "rows, one per sample,",
}


def require_openrlhf() -> None:
    """Raise ConfigError if OpenRLHF, or a function that april needs, is missing or has other parameters."""
    needs = "april.adapters.openrlhf runs OpenRLHF, which is not installed here"
    import_trainer("openrlhf", needs, TESTED_VERSION, "; in a loop of your own use april.RolloutScheduler")
    require_functions("openrlhf", TESTED_VERSION, REQUIRED_FUNCTIONS)


def split_flags(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Split a command line into OpenRLHF's words and april's settings. Raises ConfigError if a value is missing.

    ``--april.config FILE`` names a YAML file; ``--april.max_staleness 3`` sets one value and overrides the file.
    """
    theirs: list[str] = []
    ours: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    rest = iter(words)
    for word in rest:
        if not word.startswith(PREFIX):
            theirs.append(word)
            continue
        name, given, value = word[len(PREFIX) :].partition("=")
        if not given and (value := next(rest, "--")).startswith("--"):
            raise ConfigError(f"{PREFIX}{name} needs a value")
        if name == "config":
            settings |= mapping_of(read_yaml(value), value)
        else:
            ours[name] = _read(value)
    return theirs, settings | ours


def _read(text: str) -> Any:
    """Parse a value as YAML would, without requiring PyYAML."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False, "none": None, "null": None}.get(text.lower(), text)


def config_of(args: Any, own: Mapping[str, Any]) -> Config:
    """Return april's configuration, from OpenRLHF's checked flags and april's ``own`` settings.

    Raises ConfigError, naming OpenRLHF's flags, if settings contradict each other or are not supported.
    """
    own = own_settings(own, "OpenRLHF", DECIDED)
    refuse(_refusals(args, own))
    most = args.rollout.max_new_tokens
    most_images = getattr(args.data, "max_images_per_prompt", 0)
    if most_images and isinstance(own.get("images", {}), Mapping):
        own["images"] = {"max_per_prompt": most_images, **own.get("images", {})}
    config = Config(
        rollout_batch_size=args.rollout.batch_size,
        n_samples_per_prompt=args.rollout.n_samples_per_prompt,
        # an agent's turns together may fill --data.max_len
        max_response_len=args.data.max_len - 1 if most is None or args.train.agent_func_path else most,
        max_chains=1,  # OpenRLHF finds the rows of a group by their place
        sampling={"temperature": args.rollout.temperature},
        seed=args.train.seed,
        **own,
    )
    refuse(_refusals_together(args, config))
    return config


def _refusals(args: Any, own: Mapping[str, Any]) -> Iterator[Refusal]:
    rollout, agent, most = args.rollout, args.train.agent_func_path, args.rollout.max_new_tokens
    level = args.algo.advantage.is_correction_level
    # fmt: off
    yield (not args.vllm.num_engines, "--vllm.num_engines is missing or 0",
           "april generates on OpenRLHF's vLLM engines", "give their number")
    yield (agent and not agent.endswith(".py"), f"--train.agent_func_path {agent}",
           "expected a Python file with a class AgentExecutor", "name one")
    yield (getattr(args.data, "max_images_per_prompt", 0) and agent,
           "--data.max_images_per_prompt with --train.agent_func_path",
           "april does not keep what an agent makes of images for training over aborts and "
           "restarts", "use one of the two")
    yield (getattr(args.train, "partial_rollout_enable", False), "--train.partial_rollout_enable",
           "it changes weights in the middle of requests, so april would not know which weights made a token",
           "leave it out, april continues partial rollouts itself")
    yield ((getattr(rollout, "vllm_generate_batch_size", None) or rollout.batch_size) != rollout.batch_size,
           "--rollout.vllm_generate_batch_size is not --rollout.batch_size",
           "a larger value is OpenRLHF's own over-sampling, which waits for all responses, and a smaller one is not a "
           "whole step",
           f"leave it out and set {PREFIX}over_sampling_batch_size")
    yield greedy(rollout.temperature == 0, "--rollout.temperature 0")
    yield (level == "off", "--algo.advantage.is_correction_level is off (OpenRLHF's default)",
           "tokens of older weights would be trained as if the current weights had made them",
           "add --algo.advantage.is_correction_level token")
    yield from distorting({f"--rollout.top_p {rollout.top_p:g}": rollout.top_p != 1})
    yield (own.get("weights") == "disk", "april.weights disk", "OpenRLHF sends its weights to its engines itself",
           "leave it out")
    yield (own.get("allow_mismatch"), "april.allow_mismatch",
           "OpenRLHF recomputes log_softmax(logits / T) and nothing else", "leave it out")
    yield from divided_groups(own, "OpenRLHF", "--rollout.n_samples_per_prompt")
    yield (most is not None and most >= args.data.max_len, f"--rollout.max_new_tokens {most}",
           f"it leaves no room for a prompt in --data.max_len {args.data.max_len}", "lower it")
    # fmt: on


def _refusals_together(args: Any, config: Config) -> Iterator[Refusal]:
    queued = int(getattr(args.train, "async_queue_size", None) or 1)
    separate = getattr(args.train, "async_enable", False)
    continuous = config.generation is GenerationMode.CONTINUOUS
    # fmt: off
    yield (config.on_stale is OnStale.MASK, "april.on_stale: mask",
           "it may leave a response without a trained token, and OpenRLHF divides by their number",
           "use finish, restart or drop")
    yield (separate and queued > config.max_staleness, f"--train.async_queue_size {queued}",
           "that many batches may wait or be trained while the next one is generated, which is then older than "
           f"april.max_staleness={config.max_staleness} when it is trained", "lower the first or raise the second")
    for flag, shares in (
        ("--vllm.enable_sleep", getattr(args.vllm, "enable_sleep", False)),
        ("--train.colocate_all", getattr(args.train, "colocate_all", False) and not separate),
    ):
        yield (continuous and shares, flag,
               "the engines sleep on the trainer's GPUs while it trains, but april.generation: continuous is for "
               "engines that never stop",
               "give them GPUs of their own (--train.async_enable, or no --train.colocate_all), or leave it out")
    # fmt: on
