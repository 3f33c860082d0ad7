"""OpenRLHF's flags as april's configuration; what cannot be right is refused by one sentence before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from april.config.settings import Config, read_yaml
from april.core.types import GenerationMode, OnStale
from april.errors import ConfigError

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
}
"""Settings of april.Config that OpenRLHF's flags decide."""


def split_flags(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Split a command line into OpenRLHF's part and april's settings; raises ConfigError.

    ``--april.config FILE`` names a YAML file; ``--april.max_staleness 3`` gives one setting, above those of the file.
    """
    theirs: list[str] = []
    ours: dict[str, Any] = {}
    files: list[str] = []
    rest = iter(words)
    for word in rest:
        if not word.startswith(PREFIX):
            theirs.append(word)
            continue
        name, given, value = word[len(PREFIX) :].partition("=")
        if not given and (value := next(rest, "--")).startswith("--"):
            raise ConfigError(f"{PREFIX}{name} needs a value")
        if name == "config":
            files.append(value)
        else:
            ours[name] = _read(value)
    settings: dict[str, Any] = {}
    for file in files:
        content = read_yaml(file)
        if not isinstance(content, Mapping):
            raise ConfigError(f"{file}: expected a mapping of april's settings, got {type(content).__name__}")
        settings |= {str(name): value for name, value in content.items()}
    return theirs, settings | ours


def _read(text: str) -> Any:
    """A value as YAML would have it; words stay words, also without PyYAML."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False, "none": None, "null": None}.get(text.lower(), text)


def config_of(args: Any, own: Mapping[str, Any]) -> Config:
    """The configuration that OpenRLHF's checked flags and april's ``own`` settings describe.

    Raises ConfigError, in OpenRLHF's names, for flags that contradict each other or ask for what april does not do.
    """
    own = dict(own)
    for name in own:
        if name in DECIDED or name.startswith(("sampling.", "engine.")):
            flag = DECIDED[name.partition(".")[0]]
            raise ConfigError(f"april.{name} is decided by {flag} of OpenRLHF; leave it out of april's settings")
    for sentence in _objections(args, own):
        raise ConfigError(sentence)
    most = args.rollout.max_new_tokens
    flags = {name.partition(".")[2]: own.pop(name) for name in list(own) if name.startswith("images.")}
    if flags and isinstance(own.get("images", {}), Mapping):
        own["images"] = {**own.get("images", {}), **flags}
    if (shown := getattr(args.data, "max_images_per_prompt", 0)) and isinstance(own.get("images", {}), Mapping):
        own["images"] = {"max_per_prompt": shown, **own.get("images", {})}
    config = Config(
        rollout_batch_size=args.rollout.batch_size,
        n_samples_per_prompt=args.rollout.n_samples_per_prompt,
        # an agent's turns go on to the end of --data.max_len
        max_response_len=args.data.max_len - 1 if most is None or args.train.agent_func_path else most,
        sampling={"temperature": args.rollout.temperature},
        seed=args.train.seed,
        **own,
    )
    if config.on_stale is OnStale.MASK:
        raise ConfigError(
            "april.on_stale: mask may leave a response without a trained token, and OpenRLHF divides by their number; "
            "use finish, restart or drop"
        )
    queued = int(getattr(args.train, "async_queue_size", None) or 1)
    if getattr(args.train, "async_enable", False) and queued > config.max_staleness:
        raise ConfigError(
            f"--train.async_queue_size {queued}: so many batches may wait or be trained while the next one is "
            f"generated, which then is older than april.max_staleness={config.max_staleness} when it is trained; lower "
            "the one or raise the other"
        )
    if config.generation is GenerationMode.CONTINUOUS and (where := _shared_gpus(args)):
        raise ConfigError(
            f"{where}: the engines sleep or stand still on the trainer's GPUs while it trains, and april.generation: "
            "continuous is for engines that go on; give them GPUs of their own (--train.async_enable, or no "
            "--train.colocate_all), or leave it out"
        )
    return config


def _shared_gpus(args: Any) -> str:
    """The flag by which the engines have the trainer's GPUs; in the asynchronous trainer they never do."""
    if getattr(args.vllm, "enable_sleep", False):
        return "--vllm.enable_sleep"
    together = getattr(args.train, "colocate_all", False) and not getattr(args.train, "async_enable", False)
    return "--train.colocate_all" if together else ""


def _objections(args: Any, own: Mapping[str, Any]) -> Iterator[str]:
    """Return what stands against this run, one sentence each."""
    if not args.vllm.num_engines:
        yield "--vllm.num_engines is missing or 0; april generates on OpenRLHF's vLLM engines"
    agent = args.train.agent_func_path
    if agent and not agent.endswith(".py"):
        yield f"--train.agent_func_path {agent}: expected a Python file with a class AgentExecutor"
    if getattr(args.data, "max_images_per_prompt", 0) and agent:
        yield (
            "--data.max_images_per_prompt with --train.agent_func_path: what an agent makes of images for training is "
            "not kept over cuts and restarts; use one of the two"
        )
    if getattr(args.train, "partial_rollout_enable", False):
        yield (
            "--train.partial_rollout_enable changes weights in the middle of requests, so nobody would know which "
            "weights wrote a token; leave it out, april continues partial rollouts itself"
        )
    if (getattr(args.rollout, "vllm_generate_batch_size", None) or args.rollout.batch_size) != args.rollout.batch_size:
        yield (
            "--rollout.vllm_generate_batch_size is not --rollout.batch_size: more is OpenRLHF's own over-sampling, "
            "which waits for all of it, and less is not a whole step; leave it out and set "
            f"{PREFIX}over_sampling_batch_size"
        )
    if args.rollout.temperature == 0:
        yield (
            "--rollout.temperature 0: greedy responses of a group are all equal, and OpenRLHF recomputes "
            "log_softmax(logits / T); use a positive temperature"
        )
    level = getattr(args.algo.advantage, "is_correction_level", None)
    if level is None:
        yield "this OpenRLHF has no --algo.advantage.is_correction_level, which april's adapter needs; install 0.11.2"
    if level == "off":
        yield (
            "--algo.advantage.is_correction_level is off (OpenRLHF's default), so tokens of older weights would be "
            "trained as if the present ones had written them; add --algo.advantage.is_correction_level token"
        )
    if args.rollout.top_p != 1:
        yield (
            f"--rollout.top_p {args.rollout.top_p:g} is not part of the log-probabilities that OpenRLHF recomputes "
            "(log_softmax(logits / T)), so its ratios would be wrong; leave it out"
        )
    if own.get("weights") == "disk":
        yield "april.weights disk: OpenRLHF sends its weights to its engines itself; leave it out"
    if own.get("allow_mismatch"):
        yield "april.allow_mismatch: OpenRLHF recomputes log_softmax(logits / T) and nothing else; leave it out"
    if own.get("group_quorum", 1) != 1:
        yield (
            f"april.group_quorum={own['group_quorum']}: OpenRLHF takes rewards over whole groups of "
            "--rollout.n_samples_per_prompt by their place in the batch, so groups are delivered whole; leave it out"
        )
    if own.get("on_failed_sample") == "shrink":
        yield (
            "april.on_failed_sample: shrink: OpenRLHF takes rewards over groups of --rollout.n_samples_per_prompt by "
            "their place in the batch, so none may have fewer; use replace"
        )
    most = args.rollout.max_new_tokens
    if most is not None and most >= args.data.max_len:
        yield (
            f"--rollout.max_new_tokens {most} leaves no room for a prompt in --data.max_len {args.data.max_len}; lower "
            "it"
        )
