"""Imports TRL, checks the settings of its trainers, and converts GRPOConfig's settings to april's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from april.adapters.common.installed_trainer import import_trainer
from april.adapters.common.refusals import Refusal, agents_sampling, distorting, greedy, mapping_of, refuse
from april.adapters.trl.data import column_of, images_of_row, require_trainable, tokenizer_of
from april.adapters.trl.ranks import UNREADABLE, sharding_of, why_not_sent, why_unmerged
from april.config.engines import EngineConfig, OpenAIEngineConfig, TransformersEngineConfig
from april.config.settings import Config, read_yaml
from april.core.types import GenerationMode, OnDataEnd, OnFailedSample, WeightsRoute
from april.errors import ConfigError

TESTED_VERSION = "1.16.0"
REQUIRED_FUNCTIONS = {
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
ASYNC_FUNCTIONS = {
    "_save_checkpoint": ("self", "model", "trial"),
    "_load_optimizer_and_scheduler": ("self", "checkpoint"),
    "_sync_weight": ("self",),
    "_streaming_iter": ("self",),
}
_SAMPLING = {"top_p": (1.0,), "top_k": (0, None), "min_p": (None,), "repetition_penalty": (1.0,)}
"""Sampling settings of GRPOConfig, each with the values that leave softmax(logits / temperature) unchanged."""


def require_trl() -> Any:
    """Import and return the package trl. Raises ConfigError if it cannot be imported."""
    return import_trainer("trl", "april.adapters.trl needs trl", TESTED_VERSION)


def config_for(
    given: Config | Mapping[str, Any], trainer: Any, decided: Mapping[str, tuple[str, Any]] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Config:  # fmt: skip
    """Return april's settings, completed from the trainer's. Raises ConfigError if the two contradict each other.

    ``decided`` has (TRL's name, value) of each setting that the trainer decides, by april's name; None stands for the
    settings of GRPOTrainer. ``defaults`` are used for settings that the user has not given.
    """
    args = trainer.args
    refuse([greedy(args.temperature == 0, "GRPOConfig.temperature=0")])
    if decided is None:
        groups = args.generation_batch_size // args.num_generations
        decided = {"rollout_batch_size": ("generation_batch_size / num_generations", groups)}
    theirs = {
        **decided,
        "n_samples_per_prompt": ("num_generations", args.num_generations),
        "max_response_len": ("max_completion_length", args.max_completion_length),
    }
    if isinstance(given, Config):
        config = given
    else:
        sampling = given.get("sampling") or {}
        if isinstance(sampling, Mapping):
            sampling = {"temperature": args.temperature, **sampling}
        values = {name: value for name, (_, value) in theirs.items()} | {"seed": args.seed} | dict(defaults or {})
        config = Config.from_mapping({**values, **given, "sampling": sampling})
    ours = {**config.model_dump(include=set(theirs)), "sampling.temperature": config.sampling.temperature}
    for name, (their_name, value) in {**theirs, "sampling.temperature": ("temperature", args.temperature)}.items():
        if ours[name] != value:
            raise ConfigError(
                f"{name}={ours[name]} of april contradicts {their_name}={value} of GRPOConfig; leave it out, or make "
                "them equal"
            )
    # TRL ends a completion at any of these tokens, so generation must stop there too
    stop = tuple(sorted({*config.sampling.stop_token_ids, *trainer.eos_token_ids}))
    return config.model_copy(update={"sampling": config.sampling.model_copy(update={"stop_token_ids": stop})})


def given_settings(
    config: Config | Mapping[str, Any] | str | Path | None, settings: Mapping[str, Any]
) -> Config | dict[str, Any]:
    """Return the settings that a user has given to ``rollout(...)``. Raises ConfigError if they cannot be read."""
    if isinstance(config, Config):
        if settings:
            raise ConfigError(
                f"rollout: {sorted(settings)} given together with an april.Config; put them into the Config"
            )
        return config
    return mapping_of(read_yaml(config) if isinstance(config, (str, Path)) else config, "rollout") | dict(settings)


# fmt: off
def _shared_refusals(trainer: Any, config: Config, *, servers: bool) -> Iterator[Refusal]:
    args, dataset = trainer.args, trainer.train_dataset
    embedded = isinstance(config.engine, TransformersEngineConfig)
    yield from distorting({f"GRPOConfig.{name}={getattr(args, name)}": getattr(args, name) not in neutral
                           for name, neutral in _SAMPLING.items()})
    yield (config.allow_mismatch, "allow_mismatch: true",
           "TRL recomputes log_softmax(logits / temperature) and nothing else", "leave it out")
    yield from agents_sampling(config.model_dump(include={"sampling_of_clients", "constraints"}), "TRL", "{}")
    readable = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    yield (not readable, f"train_dataset is a {type(dataset).__name__}, which cannot be read row by row",
           "april orders the prompts itself", "use a datasets.Dataset")
    why = "" if embedded and config.weights is not WeightsRoute.COLLECTIVE else why_not_sent(trainer, config)
    yield (not embedded and not servers and why, f"engine {config.engine.kind}",
           f"it gets its weights through a directory ({why})", "give rollout(weights_dir=...)")
    yield config.weights is WeightsRoute.COLLECTIVE and why, "weights: collective", why, "leave it out"
    yield (not config.delivers_parts and config.on_failed_sample is OnFailedSample.SHRINK, "on_failed_sample=shrink",
           "a smaller group leaves TRL with fewer rows than a generation batch has",
           "use replace or drop_group, or a group_quorum below 1, with which batches have that number of rows")
    yield (config.epochs != 1 or config.on_data_end is OnDataEnd.WAIT,
           f"epochs={config.epochs}, on_data_end={config.on_data_end}", "the trainer decides how long it trains",
           "set num_train_epochs or max_steps of GRPOConfig, and on_data_end to short or wrap")


def async_refusals(trainer: Any, config: Config, *, servers: bool, rows: int, given: Mapping[str, Any]
                   ) -> Iterator[Refusal]:
    """Yield a refusal for each setting with which april cannot run in AsyncGRPOTrainer.

    ``servers`` is true if servers read weights from a directory, ``rows`` is the number of rows per optimizer step, and
    ``given`` has further arguments of the trainer, with None for those not given.
    """
    args = trainer.args
    yield from _shared_refusals(trainer, config, servers=servers)
    yield (isinstance(config.engine, TransformersEngineConfig), "the embedded engine",
           "AsyncGRPOTrainer trains while servers generate",
           "name them: rollout_worker(engine={'kind': 'vllm', 'urls': [...]})")
    yield (config.generation is not GenerationMode.CONTINUOUS, f"generation: {config.generation}",
           "servers would stand still while AsyncGRPOTrainer trains", "set generation: continuous")
    for name in ("tools", "environment_factory"):
        yield given[name], name, "april runs the tools of AprilGRPOTrainer only", f"leave {name} out, or use that"
    yield (given["weight_transfer"] is not None, "weight_transfer", "april itself gives its servers the weights",
           "leave it out")
    yield (column_of(trainer.train_dataset) is not None or trainer._is_vlm, "images, or a model that sees",
           "AsyncGRPOTrainer trains text", "use AprilGRPOTrainer")
    yield (getattr(trainer.model, "peft_config", None) is not None, "peft_config",
           "adapters were not run with AsyncGRPOTrainer", "use AprilGRPOTrainer")
    sharding = sharding_of(trainer)
    yield sharding in UNREADABLE, sharding, "its parameters cannot be read one by one", "use FSDP2 (fsdp_version: 2)"
    yield ((args.token_budget or 0) > 0, f"token_budget={args.token_budget}",
           "the number of rows of a step then varies, but april plans batches and their staleness for one number",
           "leave it out, and let per_device_train_batch_size bound the rows of a micro-batch")
    yield (rows % args.num_generations, f"{rows} rows per optimizer step", f"num_generations={args.num_generations} "
           "does not divide it", "change per_device_train_batch_size or gradient_accumulation_steps")
    yield (args.max_staleness < 1, f"max_staleness={args.max_staleness}",
           "the trainer fetches the next rows before it trains the last ones", "set at least 1")
    yield (config.on_data_end is not OnDataEnd.WRAP, f"on_data_end={config.on_data_end}",
           "the trainer fetches rows beyond its last step", "leave it out")


def refusals(trainer: Any, config: Config, *, servers: bool, filters: bool) -> Iterator[Refusal]:
    """Yield a refusal for each setting of GRPOTrainer with which rollouts or their log-probabilities would be wrong.

    ``servers`` is true if servers read weights from a directory, and ``filters`` if a filter may reject groups.
    """
    args = trainer.args
    parallel, sharding = getattr(trainer.accelerator, "parallelism_config", None), sharding_of(trainer)
    embedded = isinstance(config.engine, TransformersEngineConfig)
    yield (parallel is not None and parallel.non_data_parallel_size > 1, "tensor, context or sequence parallelism",
           "several ranks then train the same rows, but april gives each rank rows of its "
           "own", "use DDP, FSDP or DeepSpeed")
    for name in ("use_vllm", "use_transformers_continuous_batching"):
        yield (getattr(args, name), f"{name}=True", "april generates on the engine of its own configuration",
               f"leave {name} out")
    yield from _shared_refusals(trainer, config, servers=servers)
    yield (args.generation_kwargs, f"GRPOConfig.generation_kwargs={sorted(args.generation_kwargs or ())}",
           "april generates", "see april's sampling")
    yield from _refused_images(trainer)
    yield from _refused_adapters(trainer, config.engine)
    yield (embedded and sharding in UNREADABLE, sharding,
           "it leaves no rank with the whole model, which the embedded engine needs to generate",
           "use FSDP2 (fsdp_version: 2), whose ranks gather the weights for the engine, or use servers")
    yield (embedded and servers, "weights_dir is for servers", "the embedded engine reads the trainer's model in place",
           "leave it out")
    yield (filters and config.on_data_end is not OnDataEnd.WRAP, "filter",
           "rejected groups are replaced by more prompts than a pass may have", "set on_data_end: wrap")
    objective = trainer.multi_objective_aggregation
    yield (config.delivers_parts and objective != "sum_then_normalize", f"multi_objective_aggregation={objective}",
           "it normalises each reward function over whole groups, but with group_quorum below 1 a batch has parts of "
           "groups", "use sum_then_normalize")
    early = "environment_factory" if trainer.environment_factories else "filter" if filters else ""
    early = "group_quorum below 1" if config.delivers_parts else early
    yield (early and any(hasattr(function, "parameters") for function in trainer.reward_funcs), early,
           "only TRL computes rewards by a model, too late for it", "use reward functions")


def _refused_images(trainer: Any) -> Iterator[Refusal]:
    column, processor = column_of(trainer.train_dataset), type(trainer.processing_class).__name__
    yield (column is not None and not trainer._is_vlm,
           f"train_dataset has a column {column}, but processing_class ({processor}) reads no images",
           "TRL would train without them", "give the processor of a vision model, or remove the column")
    side = getattr(tokenizer_of(trainer), "padding_side", "left")
    yield (column is not None and side != "left", f"the processor pads on the {side}",
           "TRL aligns the processor's token types with prompts that are padded on the left",
           "set processing_class.tokenizer.padding_side = 'left'")
    first = trainer.train_dataset[0] if len(trainer.train_dataset) else {}
    if first.get("prompt") is not None:
        require_trainable(first["prompt"], images_of_row(first))
    what = "environment_factory" if trainer.environment_factories else "tools"
    yield (trainer._is_vlm and (trainer.tools or trainer.environment_factories), f"{what} with a vision model",
           "april does not pass images of later turns to TRL's loss", f"leave {what} out")


def _refused_adapters(trainer: Any, engine: EngineConfig) -> Iterator[Refusal]:
    """Yield refusals about PEFT adapters. Raises ConfigError if they must be merged for the servers but cannot be."""
    model = trainer.model
    adapters = getattr(model, "peft_config", None)
    if adapters is None:
        return
    yield (getattr(model.config, "quantization_config", None) is not None, "PEFT model over a quantised base",
           "not tested against TRL's log-probabilities", "load the base unquantised")
    for name, adapter in adapters.items():
        yield (getattr(adapter, "is_prompt_learning", False),
               f"PEFT adapter {name} is of the kind prompt learning, which puts virtual tokens before every prompt",
               "april resumes from real tokens only", "use LoRA")
    # in other cases the servers may load the adapter itself, unmerged
    must_merge = isinstance(engine, OpenAIEngineConfig) or sharding_of(trainer) in UNREADABLE
    if not isinstance(engine, TransformersEngineConfig) and must_merge and (why := why_unmerged(trainer)):
        raise ConfigError(why)
# fmt: on
