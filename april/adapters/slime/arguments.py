"""slime's flags as april's configuration; what cannot be right is refused in one sentence, before anything starts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from april.adapters.slime.samples import HOOK, method_of
from april.config.settings import Config
from april.config.values import shown
from april.core.types import GenerationMode, OnFailedSample
from april.engines.protocol import ROUTED_EXPERTS
from april.errors import ConfigError

log = logging.getLogger("april")

DECIDED = {
    "rollout_batch_size": "--rollout-batch-size",
    "n_samples_per_prompt": "--n-samples-per-prompt",
    "over_sampling_batch_size": "--over-sampling-batch-size",
    "partial_rollout": "--partial-rollout",
    "max_response_len": "--rollout-max-response-len",
    "sampling": "--rollout-temperature, --rollout-stop and their like",
    "seed": "--rollout-seed",
    "epochs": "--num-epoch",
    "on_data_end": "--num-epoch",
    "allow_mismatch": "--custom-generate-function-path",
    "extras": "--use-rollout-routing-replay",
}
"""Settings of april.Config that slime's flags decide."""
WHOLE_GROUPS = (
    "group_rm", "log_passrate", "rollout_all_samples_process_path", "custom_convert_samples_to_train_data_path",
)  # fmt: skip
"""Flags of slime, without dashes, under which something looks at a group as a whole."""
MAX_RESPONSE = 1 << 24
"""The limit where functions keep slime's limits themselves."""
OWN_GENERATE = "slime.rollout.sglang_rollout.generate"


def config_of(args: Any, urls: Sequence[str] | None, *, own_function: bool = False) -> Config:
    """The configuration that slime's flags and ``april:`` in its --custom-config-path describe.

    Args:
        args: slime's namespace.
        urls: the SGLang servers behind its router; None means that the engines are objects.
        own_function: a custom generate function talks to the servers itself, in its own way.

    Raises ConfigError, in slime's names, for flags that contradict each other or ask for what april does not do.
    """
    own = _own_settings(args)
    if own.pop("rollout", None) is not None:
        _refuse_beside_an_agent(args, own_function)
    _refuse(args, own_function)
    values: dict[str, Any] = {
        "rollout_batch_size": args.rollout_batch_size,
        "n_samples_per_prompt": args.n_samples_per_prompt,
        "over_sampling_batch_size": args.over_sampling_batch_size,
        "partial_rollout": bool(args.partial_rollout),
        "max_response_len": MAX_RESPONSE if own_function else args.rollout_max_response_len,
        "seed": args.rollout_seed,
        # a function of its own is given slime's parameters, and ends its responses itself
        "sampling": {"temperature": args.rollout_temperature, **({} if own_function else _ends(args))},
        "allow_mismatch": own_function,
    }
    if getattr(args, "use_rollout_routing_replay", False) and not own_function:
        values["extras"] = ROUTED_EXPERTS
    engine = dict(own.pop("engine", {}))
    if urls is not None and not own_function:
        values["engine"] = {
            "kind": "sglang",
            "router": router_url(args),
            "urls": list(urls),
            "max_in_flight": getattr(args, "sglang_server_concurrency", None),
            "max_len": getattr(args, "rollout_max_context_len", None),
            "expert_shape": _expert_shape(args),
            **engine,
        }
    config = Config(**values, **own)
    if config.generation is GenerationMode.CONTINUOUS:
        _refuse_continuous(args, own_function)
    if config.delivers_parts:
        _refuse_parts_of_groups(args, shown(config.group_quorum))
    elif config.on_failed_sample is OnFailedSample.SHRINK:
        raise ConfigError(
            "april.on_failed_sample=shrink: a batch would have fewer than --rollout-batch-size * "
            "--n-samples-per-prompt samples, and slime trains in full --global-batch-size only; say replace, or set "
            "april.group_quorum below 1, with which batches are full"
        )
    interval = int(getattr(args, "update_weights_interval", None) or 1)
    if interval > max(1, config.max_staleness):
        raise ConfigError(
            f"--update-weights-interval {interval}: the last batch before an update is trained so many updates after "
            f"it was generated, and april.max_staleness={config.max_staleness}; lower the one or raise the other"
        )
    return config


def _expert_shape(args: Any) -> tuple[int, int] | None:
    """Layers, and experts per token, by the flags of the trainer's model; None where they are not said."""
    shape = getattr(args, "num_layers", None), getattr(args, "moe_router_topk", None)
    asked = getattr(args, "use_rollout_routing_replay", False) and None not in shape
    return (int(shape[0] or 0), int(shape[1] or 0)) if asked else None


def router_url(args: Any) -> str:
    """Return where slime's requests go."""
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}"


def warn_of(args: Any, config: Config) -> None:
    """Say what will work, and not as the user may think."""
    corrected = any(getattr(args, flag, None) for flag in ("use_tis", "use_rollout_logprobs"))
    if config.leaves_partials and not corrected:
        log.warning(
            "tokens of older weights will be trained on without correction: slime recomputes their log-probabilities "
            "with the present weights, so their ratio is 1; add --use-tis or --use-rollout-logprobs"
        )
    if getattr(args, "buffer_filter_path", None):
        log.warning(
            "--buffer-filter-path has nothing to choose from: april keeps unfinished groups itself and continues the "
            "oldest first; see max_staleness and on_stale"
        )


def _own_settings(args: Any) -> dict[str, Any]:
    own = getattr(args, "april", None) or {}
    if not isinstance(own, Mapping):
        raise ConfigError(f"april: in --custom-config-path must be a mapping of settings, got {type(own).__name__}")
    for name in own:
        if name in DECIDED:
            raise ConfigError(
                f"april.{name} is decided by {DECIDED[name]} of slime; leave it out of --custom-config-path"
            )
    return {str(name): value for name, value in own.items()}


def agent_path(args: Any) -> str | None:
    """The path of april's own rollout function, if one is given; raises ConfigError."""
    path = _own_settings(args).get("rollout")
    if path is not None and not isinstance(path, str):
        raise ConfigError(f"april.rollout must be the path of a function, such as package.module.rollout, got {path!r}")
    return path


def _refuse_beside_an_agent(args: Any, own_function: bool) -> None:
    if own_function:
        raise ConfigError(
            "april.rollout and --custom-generate-function-path both generate the responses; leave out one of them"
        )
    rows = "april.rollout may bring several rows of one response"
    if getattr(args, "log_passrate", False):
        raise ConfigError(f"--log-passrate takes n rows for a group, and {rows}; leave it out")
    if not getattr(args, "use_dynamic_batch_size", True):
        raise ConfigError(
            f"{rows}, so their number is not a multiple of slime's micro-batches (build_dp_schedule); add "
            "--use-dynamic-batch-size with --max-tokens-per-gpu"
        )
    hook = getattr(args, "custom_reward_post_process_path", None)
    if hook != HOOK and method_of(args) is not None:
        raise ConfigError(
            f"{rows}, and {hook or 'slime'} takes the mean reward over rows; add --custom-reward-post-process-path "
            f"{HOOK}"
        )


def _ends(args: Any) -> dict[str, Any]:
    """Stop strings and ids; one alone may stand without a list."""
    stop, ids = args.rollout_stop or (), args.rollout_stop_token_ids or ()
    return {
        "stop": (stop,) if isinstance(stop, str) else tuple(stop),
        "stop_token_ids": (ids,) if isinstance(ids, int) else tuple(ids),
    }


def _refuse_continuous(args: Any, own_function: bool) -> None:
    for flag in ("colocate", "offload_rollout"):
        if getattr(args, flag, False):
            raise ConfigError(
                f"--{flag.replace('_', '-')}: the engines sleep while the trainer trains, and "
                "april.generation=continuous lets them go on; give the engines GPUs of their own, or leave it out"
            )
    if own_function:
        raise ConfigError(
            "--custom-generate-function-path sends its requests itself, so april cannot tell which weights made the "
            "tokens of those that an update meets; leave april.generation=continuous out"
        )


def _refuse_parts_of_groups(args: Any, quorum: str) -> None:
    parts = f"april.group_quorum={quorum} delivers groups in parts"
    for flag in WHOLE_GROUPS:
        if getattr(args, flag, None):
            raise ConfigError(f"--{flag.replace('_', '-')} goes by whole groups, and {parts}; leave out one of them")
    hook = getattr(args, "custom_reward_post_process_path", None)
    if hook != HOOK and (hook is not None or method_of(args) is not None):
        raise ConfigError(
            f"{parts}, and {hook or 'slime'} takes the mean reward over whole ones; add "
            f"--custom-reward-post-process-path {HOOK}"
        )


def _refuse(args: Any, own_function: bool) -> None:
    n, over = args.rollout_batch_size, args.over_sampling_batch_size or args.rollout_batch_size
    if over > n and not args.partial_rollout:
        raise ConfigError(
            f"--over-sampling-batch-size {over} starts more groups than --rollout-batch-size {n}, and without "
            "--partial-rollout the tokens of the others would be thrown away; add --partial-rollout"
        )
    if args.rollout_max_response_len is None:
        raise ConfigError("--rollout-max-response-len is missing; april must know how long a response may become")
    if not getattr(args, "rollout_global_dataset", True):
        raise ConfigError("--disable-rollout-global-dataset leaves april without prompts; leave it out")
    if own_function:
        return
    instead = f"or let slime itself talk to the servers: --custom-generate-function-path {OWN_GENERATE}"
    if args.rollout_temperature == 0:
        raise ConfigError(
            "--rollout-temperature 0: greedy samples of a group are all equal, and the trainer recomputes "
            f"log_softmax(logits / T); use a positive temperature, {instead}"
        )
    for what, wrong in (
        (f"--rollout-top-p {args.rollout_top_p}", args.rollout_top_p != 1),
        (f"--rollout-top-k {args.rollout_top_k}", args.rollout_top_k not in (-1, None)),
    ):
        if wrong:
            raise ConfigError(
                f"{what}: the trainer would recompute other log-probabilities than were sampled from, and needs the "
                f"kept ids of every token, which april does not ask for; leave it out, {instead}"
            )

