"""verl's TokenOutput and the desk's words: what a server of verl's returned, and what verl's agent loop gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from april.desk.answers import Done, Result


def result_of(offset: int, output: Any) -> Result:
    """What a server returned for ``offset`` tokens. Weights are called by the trainer's global step."""
    label = output.extra_fields.get("global_steps")
    return Result(
        offset=offset,
        tokens=np.asarray(output.token_ids, np.int32),
        logprobs=np.asarray(output.log_probs if output.log_probs is not None else [], np.float32),
        label=None if label is None else int(label),
        aborted=output.stop_reason in ("abort", "aborted"),
    )


def fields_of(done: Done, outputs: Sequence[Any]) -> dict[str, Any]:
    """Fields of a TokenOutput: the complete response of a call, from all servers' ``outputs`` of it."""
    steps = [n for *_, n in done.spans]
    preempted = [o.num_preempted for o in outputs if o.num_preempted is not None]
    return {
        "token_ids": done.tokens.tolist(),
        "log_probs": done.logprobs.tolist(),
        "stop_reason": "length" if done.by_length else "completed",
        "num_preempted": sum(preempted) if preempted else None,
        "extra_fields": {
            "global_steps": max(steps, default=None),
            "min_global_steps": min(steps, default=None),
            "max_global_steps": max(steps, default=None),
            "num_cached_tokens": outputs[0].extra_fields.get("num_cached_tokens") if outputs else None,
        },
    }
