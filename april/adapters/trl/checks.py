"""The settings that the TRL adapter can be exact with; others are refused when the trainer is made."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from april.adapters.trl.images import column_of, of_row, tokenizer_of, why_not_shown
from april.adapters.trl.ranks import UNREADABLE, sharding_of, why_not_sent, why_unmerged
from april.config.engines import EngineConfig, OpenAIEngineConfig, TransformersEngineConfig
from april.config.settings import Config
from april.core.types import OnDataEnd, OnFailedSample, WeightsRoute
from april.errors import ConfigError
from april.seams import import_trainer

log = logging.getLogger("april")

TESTED_VERSION = "1.16.0"
SEAMS = {
    "_generate_and_score_completions": ("self", "inputs"),
    "_tokenize_prompts": ("self", "prompts"),
    "_tool_call_loop": (
        "self", "prompts", "prompt_ids", "completion_ids", "completions", "logprobs", "images", "multimodal_fields",
    ),
    "_get_tool_suffix_ids": ("self", "tool_messages"),
    "_calculate_rewards": ("self", "inputs", "prompts", "completions", "completion_ids_list"),
    "_save_checkpoint": ("self", "model", "trial"),
    "_load_optimizer_and_scheduler": ("self", "checkpoint"),
}  # fmt: skip
"""Methods of GRPOTrainer that are called or overridden, with their parameters."""
_SAMPLING = {"top_p": (1.0,), "top_k": (0, None), "min_p": (None,), "repetition_penalty": (1.0,)}
"""Settings of GRPOConfig, and the values under which all tokens are drawn from softmax(logits / temperature)."""


def require_trl() -> Any:
    """The package trl; raises ConfigError if it cannot be imported."""
    return import_trainer("trl", "april.adapters.trl needs trl", TESTED_VERSION)


def config_for(given: Config | Mapping[str, Any], trainer: Any) -> Config:
    """The settings, completed by what GRPOConfig says; raises ConfigError where the two contradict each other."""
    args = trainer.args
    if args.temperature == 0:
        raise ConfigError(
            "GRPOConfig.temperature=0: greedy responses of a group are all equal, and the trainer recomputes "
            "log_softmax(logits / T); use a positive temperature"
        )
    groups = args.generation_batch_size // args.num_generations
    theirs = {
        "rollout_batch_size": ("generation_batch_size / num_generations", groups),
        "n_samples_per_prompt": ("num_generations", args.num_generations),
        "max_response_len": ("max_completion_length", args.max_completion_length),
    }
    if isinstance(given, Config):
        config = given
    else:
        sampling = given.get("sampling") or {}
        if isinstance(sampling, Mapping):
            sampling = {"temperature": args.temperature, **sampling}
        values = {name: value for name, (_, value) in theirs.items()} | {"seed": args.seed}
        config = Config.from_mapping({**values, **given, "sampling": sampling})
    ours = {**config.model_dump(include=set(theirs)), "sampling.temperature": config.sampling.temperature}
    for name, (their_name, value) in {**theirs, "sampling.temperature": ("temperature", args.temperature)}.items():
        if ours[name] != value:
            raise ConfigError(
                f"{name}={ours[name]} of april contradicts {their_name}={value} of GRPOConfig; leave it out, or make "
                "them equal"
            )
    # where TRL sees the end of a completion, generation ends
    stop = tuple(sorted({*config.sampling.stop_token_ids, *trainer.eos_token_ids}))
    return config.model_copy(update={"sampling": config.sampling.model_copy(update={"stop_token_ids": stop})})


def refuse_unsupported(trainer: Any, config: Config, *, servers: bool, filters: bool) -> None:
    """Raise ConfigError for the first thing under which rollouts or their log-probabilities would not be right.

    ``servers`` get weights through a directory; ``filters`` means that groups may be rejected.
    """
    early = "environment_factory" if trainer.environment_factories else "filter" if filters else ""
    early = "group_quorum below 1" if config.delivers_parts else early
    for sentence in chain(
        _objections(trainer, config, servers),
        _objections_to_batches(trainer, config, filters),
        _objections_to_early_rewards(trainer, early) if early else (),
    ):
        raise ConfigError(sentence)


def _objections_to_batches(trainer: Any, config: Config, filters: bool) -> Iterator[str]:
    if filters and config.on_data_end is not OnDataEnd.WRAP:
        yield "filter: rejected groups are replaced by more prompts than a pass may have; set on_data_end: wrap"
    if not config.delivers_parts and config.on_failed_sample is OnFailedSample.SHRINK:
        yield (
            "on_failed_sample=shrink: a smaller group leaves TRL with fewer rows than a generation batch has; use "
            "replace or drop_group, or a group_quorum below 1, with which batches have that number of whatever groups"
        )
    if config.delivers_parts and trainer.multi_objective_aggregation != "sum_then_normalize":
        yield (
            f"multi_objective_aggregation={trainer.multi_objective_aggregation} normalises each reward function over "
            "whole groups, and with group_quorum below 1 a batch has parts of groups; use sum_then_normalize"
        )


def _objections_to_early_rewards(trainer: Any, what: str) -> Iterator[str]:
    """``what``: the setting that wants rewards before a batch is complete."""
    for function in trainer.reward_funcs:
        if hasattr(function, "parameters"):
            yield f"{what}: rewards by a model are computed by TRL alone, too late for it; use reward functions"


def _objections(trainer: Any, config: Config, has_weights_dir: bool) -> Iterator[str]:
    args, dataset = trainer.args, trainer.train_dataset
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    if parallel is not None and parallel.non_data_parallel_size > 1:
        yield (
            "tensor, context or sequence parallelism: several ranks train the same rows then, and april gives each its "
            "own; use DDP, FSDP or DeepSpeed"
        )
    for name in ("use_vllm", "use_transformers_continuous_batching"):
        if getattr(args, name):
            yield f"{name}=True: april generates, on the engine of its own configuration; leave {name} out"
    for name, neutral in _SAMPLING.items():
        if (value := getattr(args, name)) not in neutral:
            yield (
                f"GRPOConfig.{name}={value} is not part of the log-probabilities that the trainer recomputes, so its "
                "ratios would be wrong; leave it out"
            )
    if args.generation_kwargs:
        yield f"GRPOConfig.generation_kwargs={sorted(args.generation_kwargs)}: april generates; see april's sampling"
    if config.allow_mismatch:
        yield "allow_mismatch: true: TRL recomputes log_softmax(logits / temperature) and nothing else; leave it out"
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        yield (
            f"train_dataset is a {type(dataset).__name__}, which cannot be read row by row, and april orders the "
            "prompts itself; use a datasets.Dataset"
        )
    else:
        yield from _objections_to_images(trainer)
    if config.epochs != 1 or config.on_data_end is OnDataEnd.WAIT:
        yield (
            f"epochs={config.epochs}, on_data_end={config.on_data_end}: the trainer decides how long it trains; set "
            "num_train_epochs or max_steps of GRPOConfig, and on_data_end to short or wrap"
        )
    embedded = isinstance(config.engine, TransformersEngineConfig)
    yield from _objections_to_adapters(trainer, config.engine)
    sharding = sharding_of(trainer)
    if embedded and sharding in UNREADABLE:
        yield (
            f"{sharding} leaves no rank with the whole model, from which the embedded engine generates; use FSDP2 "
            "(fsdp_version: 2), whose ranks put the weights together for it, or servers"
        )
    if embedded and has_weights_dir:
        yield "weights_dir is for servers; the embedded engine reads the trainer's model in place, so leave it out"
    if not embedded and not has_weights_dir and (why := why_not_sent(trainer, config)):
        yield f"engine {config.engine.kind} gets its weights through a directory ({why}): give rollout(weights_dir=...)"
    if config.weights is WeightsRoute.COLLECTIVE and (why := why_not_sent(trainer, config)):
        yield f"weights: collective: {why}; leave it out"


def _objections_to_images(trainer: Any) -> Iterator[str]:
    """Objections to images of the data set, and to models that see."""
    column = column_of(trainer.train_dataset)
    if column is not None and not trainer._is_vlm:
        yield (
            f"train_dataset has a column {column}, and processing_class ({type(trainer.processing_class).__name__}) "
            "reads no images; give the processor of a model that sees, or remove the column"
        )
    elif column is not None and (side := getattr(tokenizer_of(trainer), "padding_side", "left")) != "left":
        yield (
            f"the processor pads on the {side}, and TRL puts what it says of the tokens of images beside prompts that "
            "are padded on the left; set processing_class.tokenizer.padding_side = 'left'"
        )
    if len(trainer.train_dataset) and (first := trainer.train_dataset[0]).get("prompt") is not None:
        why = why_not_shown(first["prompt"], of_row(first))
        if why is not None:
            yield why
    if trainer._is_vlm and (trainer.tools or trainer.environment_factories):
        what = "environment_factory" if trainer.environment_factories else "tools"
        yield f"{what} with a model that sees: april does not bring images of turns to TRL's loss; leave {what} out"


def _objections_to_adapters(trainer: Any, engine: EngineConfig) -> Iterator[str]:
    """Objections to adapters of PEFT."""
    model = trainer.model
    adapters = getattr(model, "peft_config", None)
    if adapters is None:
        return
    if getattr(model.config, "quantization_config", None) is not None:
        yield "PEFT model over a quantised base: not held against TRL's log-probabilities; load the base unquantised"
    for name, adapter in adapters.items():
        if getattr(adapter, "is_prompt_learning", False):
            yield (
                f"PEFT adapter {name} is of the kind prompt learning, which puts virtual tokens before every prompt, "
                "and april resumes by the tokens there are; use LoRA"
            )
    embedded = isinstance(engine, TransformersEngineConfig)
    # other servers may take an adapter as such, unless its tensors are nowhere whole
    alone = isinstance(engine, OpenAIEngineConfig) or sharding_of(trainer) in UNREADABLE
    if not embedded and alone and (why := why_unmerged(trainer)):
        yield why


def hint_at_one_process(trainer: Any) -> None:
    """A warning where ``accelerate launch --cpu --num_processes N`` has started one process, which it does silently."""
    address, ranks, on_cpu = map(os.environ.get, ("MASTER_ADDR", "WORLD_SIZE", "ACCELERATE_USE_CPU"))
    if trainer.accelerator.num_processes == 1 and address is not None and ranks is None and on_cpu == "True":
        log.warning(
            "accelerate launch --cpu starts one process, whatever --num_processes says; for several ranks on CPUs use "
            "ACCELERATE_USE_CPU=true torchrun --nproc-per-node N"
        )
