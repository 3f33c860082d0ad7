"""Converts slime's flags to april's configuration."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from april.adapters.common.refusals import Refusal, greedy, own_settings, refuse
from april.adapters.slime.samples import HOOK, method_of
from april.config.settings import Config
from april.config.values import shown_value
from april.core.types import GenerationMode, OnFailedSample
from april.engines.protocol import ROUTED_EXPERTS

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
WHOLE_GROUPS = (
    "group_rm", "log_passrate", "rollout_all_samples_process_path", "custom_convert_samples_to_train_data_path",
)  # fmt: skip
"""Attribute names of slime's flags that need whole groups."""
MAX_RESPONSE = 1 << 24
"""Response length that is never reached, for custom generate functions, which apply slime's limits themselves."""
OWN_GENERATE = "slime.rollout.sglang_rollout.generate"


def config_of(args: Any, urls: Sequence[str] | None, *, own_function: bool = False) -> Config:
    """Return april's configuration, from slime's flags and ``april:`` in the file of --custom-config-path.

    ``urls`` is None if engine objects are used. ``own_function`` is True if a custom generate function sends requests.

    Raises ConfigError, naming slime's flags, if settings contradict each other or are not supported.
    """
    own = _own_settings(args)
    if own.pop("rollout", None) is not None:
        refuse(_refusals_with_agent(args, own_function))
    refuse(_refusals(args, own_function))
    values: dict[str, Any] = {
        "rollout_batch_size": args.rollout_batch_size,
        "n_samples_per_prompt": args.n_samples_per_prompt,
        "over_sampling_batch_size": args.over_sampling_batch_size,
        "partial_rollout": bool(args.partial_rollout),
        "max_response_len": MAX_RESPONSE if own_function else args.rollout_max_response_len,
        "seed": args.rollout_seed,
        # a custom function gets slime's own parameters and decides itself where a response ends
        "sampling": {"temperature": args.rollout_temperature, **({} if own_function else _ends(args))},
        "allow_mismatch": own_function,
    }
    if getattr(args, "use_rollout_routing_replay", False) and not own_function:
        values["extras"] = ROUTED_EXPERTS
    shape = getattr(args, "num_layers", None), getattr(args, "moe_router_topk", None)
    engine = dict(own.pop("engine", {}))
    if urls is not None and not own_function:
        values["engine"] = {
            "kind": "sglang",
            "first_weights": "present",  # slime loads the first weights before it asks for a rollout
            "router": router_url(args),
            "urls": list(urls),
            "max_in_flight": getattr(args, "sglang_server_concurrency", None),
            "max_len": getattr(args, "rollout_max_context_len", None),
            "expert_shape": shape if values.get("extras") and None not in shape else None,
            **engine,
        }
    config = Config(**values, **own)
    refuse(_refusals_together(args, config, own_function))
    return config


def router_url(args: Any) -> str:
    """Return the URL of slime's router."""
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}"


def warn_of(args: Any, config: Config) -> None:
    """Warn about flags whose effect with april may surprise the user."""
    corrected = any(getattr(args, flag, None) for flag in ("use_tis", "use_rollout_logprobs"))
    if config.leaves_partials and not corrected:
        log.warning(
            "tokens of older weights will be trained without correction: slime recomputes their log-probabilities with "
            "the current weights, so their ratio is 1; add --use-tis or --use-rollout-logprobs"
        )
    if getattr(args, "buffer_filter_path", None):
        log.warning(
            "--buffer-filter-path has nothing to choose from: april keeps unfinished groups itself and continues the "
            "oldest first; see max_staleness and on_stale"
        )


def _own_settings(args: Any) -> dict[str, Any]:
    given = getattr(args, "april", None) or None
    return own_settings(given, "slime", DECIDED, where="april: in --custom-config-path")


def agent_path(args: Any) -> Any:
    """Return the setting ``april.rollout``, the path of a rollout function, or None."""
    return _own_settings(args).get("rollout")


def _ends(args: Any) -> dict[str, Any]:
    """Return stop strings and stop token ids as tuples; slime's flags may hold a single one without a list."""
    stop, ids = args.rollout_stop or (), args.rollout_stop_token_ids or ()
    return {
        "stop": (stop,) if isinstance(stop, str) else tuple(stop),
        "stop_token_ids": (ids,) if isinstance(ids, int) else tuple(ids),
    }


# fmt: off
def _refusals_with_agent(args: Any, own_function: bool) -> Iterator[Refusal]:
    hook = getattr(args, "custom_reward_post_process_path", None)
    rows = "it may return several rows for one response"
    yield (own_function, "april.rollout and --custom-generate-function-path", "both generate the responses",
           "leave out one of them")
    yield (getattr(args, "rollout_sample_hook_path", None), "april.rollout",
           f"{rows}, but --rollout-sample-hook-path would see only the first",
           "leave it out; --rollout-sample-filter-path sees all rows")
    yield (getattr(args, "log_passrate", False), "april.rollout", f"{rows}, but --log-passrate takes n per group",
           "leave --log-passrate out")
    yield (not getattr(args, "use_dynamic_batch_size", True), "april.rollout",
           f"{rows}, so their number is not a multiple of slime's micro-batches (build_dp_schedule)",
           "add --use-dynamic-batch-size with --max-tokens-per-gpu")
    yield (hook != HOOK and method_of(args) is not None, "april.rollout",
           f"{rows}, but {hook or 'slime'} takes the mean reward over rows",
           f"add --custom-reward-post-process-path {HOOK}")


def _refusals(args: Any, own_function: bool) -> Iterator[Refusal]:
    n, over = args.rollout_batch_size, args.over_sampling_batch_size or args.rollout_batch_size
    yield (over > n and not args.partial_rollout, f"--over-sampling-batch-size {over}",
           f"it starts more groups than --rollout-batch-size {n}, and without --partial-rollout the tokens of the "
           "others would be thrown away", "add --partial-rollout")
    yield (args.rollout_max_response_len is None, "--rollout-max-response-len is missing",
           "april must know how long a response may become", "add it")
    yield (not getattr(args, "rollout_global_dataset", True), "--disable-rollout-global-dataset",
           "it leaves april without prompts", "leave it out")
    if own_function:
        return
    instead = f", or let slime itself talk to the servers: --custom-generate-function-path {OWN_GENERATE}"
    yield greedy(args.rollout_temperature == 0, "--rollout-temperature 0", instead)
    for setting, applies in (
        (f"--rollout-top-p {args.rollout_top_p}", args.rollout_top_p != 1),
        (f"--rollout-top-k {args.rollout_top_k}", args.rollout_top_k not in (-1, None)),
    ):
        yield (applies, setting, (
            "the trainer would recompute log-probabilities other than those of the sampling, and needs the kept ids of "
            "every token, which april does not request"
        ), f"leave it out{instead}")


def _refusals_together(args: Any, config: Config, own_function: bool) -> Iterator[Refusal]:
    continuous, parts = config.generation is GenerationMode.CONTINUOUS, config.delivers_parts
    for flag in ("colocate", "offload_rollout"):
        yield (continuous and getattr(args, flag, False), f"--{flag.replace('_', '-')}", (
            "the engines sleep while the trainer trains, but april.generation=continuous would let them continue"
        ),
               "give the engines GPUs of their own, or leave it out")
    yield (continuous and own_function, "--custom-generate-function-path", (
        "it sends its requests itself, so april cannot tell which weights made the tokens of requests that run during "
        "an update"
    ),
           "leave april.generation=continuous out")
    quorum = f"april.group_quorum={shown_value(config.group_quorum)}"
    for flag in WHOLE_GROUPS:
        yield (parts and getattr(args, flag, None), f"--{flag.replace('_', '-')}",
               f"it needs whole groups, but {quorum} delivers parts of them", "leave out one of them")
    hook = getattr(args, "custom_reward_post_process_path", None)
    yield (parts and hook != HOOK and (hook is not None or method_of(args) is not None), quorum,
           f"it delivers groups in parts, but {hook or 'slime'} takes the mean reward over whole ones",
           f"add --custom-reward-post-process-path {HOOK}")
    yield (not parts and config.on_failed_sample is OnFailedSample.SHRINK, "april.on_failed_sample=shrink",
           "a batch would have fewer than --rollout-batch-size * --n-samples-per-prompt samples, but slime only trains "
           "full --global-batch-size batches", "say replace, or set april.group_quorum below 1")
    interval = int(getattr(args, "update_weights_interval", None) or 1)
    yield (interval > max(1, config.max_staleness), f"--update-weights-interval {interval}", "the last batch before an "
           f"update is trained so many updates after it was generated, and april.max_staleness={config.max_staleness}",
           "lower the first or raise the second")
# fmt: on
