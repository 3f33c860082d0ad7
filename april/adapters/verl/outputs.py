"""verl's TokenOutput and the coordinator's words: what a server of verl's returned, and what verl's agent loop gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from april.core.types import DropReason
from april.engines.http.token_rows import narrowed
from april.engines.protocol import ROUTED_EXPERTS
from april.processes.coordinator.messages import Done, Result


def result_of(
    offset: int, output: Any, cut_at: int | None = None, sampling: Mapping[str, Any] = MappingProxyType({})
) -> Result:
    """Return what a server returned for ``offset`` tokens. Weights are called by the trainer's global step.

    ``cut_at``: the request's limit, where the server is one that goes beyond it; what is beyond is cut off and counted.
    ``sampling``: of the request.
    """
    label = output.extra_fields.get("global_steps")
    tokens = np.asarray(output.token_ids, np.int32)
    logprobs = np.asarray(output.log_probs if output.log_probs is not None else [], np.float32)
    aborted = output.stop_reason in ("abort", "aborted")
    unused = None
    if len(tokens) != len(logprobs):
        # nobody knows which belongs to which; TensorRT-LLM does not promise equal numbers where it was cut off
        if aborted:
            unused = len(tokens), DropReason.CORRUPT
            tokens, logprobs = tokens[:0], logprobs[:0]
    elif cut_at is not None and len(tokens) > cut_at:
        unused = len(tokens) - cut_at, DropReason.OVER_BUDGET
        tokens, logprobs = tokens[:cut_at], logprobs[:cut_at]
    rows = getattr(output, "routed_experts", None)
    return Result(
        offset=offset,
        tokens=tokens,
        logprobs=logprobs,
        label=None if label is None else int(label),
        aborted=aborted,
        unused=unused,
        stop_token_ids=tuple(sampling.get("stop_token_ids") or ()),
        ends_anywhere=bool(sampling.get("stop") or sampling.get("ignore_eos")),
        extras={} if rows is None or not len(tokens) else {ROUTED_EXPERTS: _rows(rows, offset + len(tokens) - 1)},
    )


def _rows(given: Any, count: int) -> Any:
    """The experts of so many tokens, as verl's servers of either kind say them, in the smallest numbers."""
    rows = np.asarray(given)
    return (narrowed(rows, None) if rows.dtype.kind in "iu" else rows)[:count]


def fields_of(done: Done, outputs: Sequence[Any]) -> dict[str, Any]:
    """Fields of a TokenOutput: the complete response of a call, from all servers' ``outputs`` of it."""
    steps = [n for *_, n in done.spans]
    preempted = [o.num_preempted for o in outputs if o.num_preempted is not None]
    return {
        "token_ids": done.tokens.tolist(),
        "log_probs": done.logprobs.tolist(),
        "stop_reason": "length" if done.by_length else "completed",
        "num_preempted": sum(preempted) if preempted else None,
        # the type of verl's own field; rows of the whole conversation but its last token, as its own client gives them
        "routed_experts": None if (rows := done.extras.get(ROUTED_EXPERTS)) is None else rows.astype(np.int16),
        "extra_fields": {
            "global_steps": max(steps, default=None),
            "min_global_steps": min(steps, default=None),
            "max_global_steps": max(steps, default=None),
            "num_cached_tokens": outputs[0].extra_fields.get("num_cached_tokens") if outputs else None,
        },
    }
