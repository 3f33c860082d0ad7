"""The arrays of a delivered batch: ragged (flat, with offsets) and padded; both hold the same tokens.

Every call makes new arrays, so a trainer may write into them. Shapes: B rows, P longest prompt, T longest response.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from april.core.batch import DeliveredSample

Array = NDArray[Any]
Columns = dict[str, tuple[list[Array], type[np.generic], int]]
"""Per-token values: the rows, their type, what the padding is."""


def ragged_arrays(samples: Sequence[DeliveredSample]) -> dict[str, Array]:
    """Flat arrays; see :meth:`april.core.batch.Batch.ragged`."""
    prompts = [s.prompt.token_ids for s in samples]
    arrays = {"prompt_ids": _joined(prompts, np.int32), "prompt_offsets": _offsets(prompts)}
    for name, (rows, dtype, _) in _response_columns(samples, 0).items():
        arrays[name] = _joined(rows, dtype)
    arrays["response_offsets"] = _offsets([s.tokens for s in samples])
    return arrays | _per_sample(samples)


def padded_arrays(samples: Sequence[DeliveredSample], pad_id: int, *, left_pad_prompts: bool) -> dict[str, Array]:
    """Rectangular arrays; see :meth:`april.core.batch.Batch.padded`."""
    prompts = [s.prompt.token_ids for s in samples]
    responses = [s.tokens for s in samples]
    arrays = {
        "prompt_ids": pad(prompts, pad_id, np.int32, left=left_pad_prompts),
        "prompt_mask": pad(_ones(prompts), 0, np.uint8, left=left_pad_prompts),
        "response_mask": pad(_ones(responses), 0, np.uint8),
    }
    for name, (rows, dtype, fill) in _response_columns(samples, pad_id).items():
        arrays[name] = pad(rows, fill, dtype)
    if left_pad_prompts:
        arrays["input_ids"] = np.concatenate((arrays["prompt_ids"], arrays["response_ids"]), axis=1)
        arrays["attention_mask"] = np.concatenate((arrays["prompt_mask"], arrays["response_mask"]), axis=1)
    else:
        whole = [np.concatenate(pair) for pair in zip(prompts, responses, strict=True)]
        arrays["input_ids"] = pad(whole, pad_id, np.int32)
        arrays["attention_mask"] = pad(_ones(whole), 0, np.uint8)
    return arrays | _per_sample(samples)


def pad(rows: Sequence[Array], fill: float, dtype: type[np.generic], *, left: bool = False) -> Array:
    """Rows of different length as one array [len(rows), longest], padded on the right (or on the left)."""
    longest = max((len(r) for r in rows), default=0)
    out = np.full((len(rows), longest), fill, dtype)
    for i, row in enumerate(rows):
        start = longest - len(row) if left else 0
        out[i, start : start + len(row)] = row
    return out


def _response_columns(samples: Sequence[DeliveredSample], pad_id: int) -> Columns:
    versions = [s.versions for s in samples]
    return {
        "response_ids": ([s.tokens for s in samples], np.int32, pad_id),
        "loss_mask": ([s.loss_mask for s in samples], np.uint8, 0),
        "logprobs": ([s.logprobs for s in samples], np.float32, 0),
        "version_n": ([v[:, 1] for v in versions], np.int32, -1),
        "version_incarnation": ([v[:, 0] for v in versions], np.int32, -1),
    }


def _per_sample(samples: Sequence[DeliveredSample]) -> dict[str, Array]:
    return {
        "rewards": np.array([s.reward for s in samples], np.float32),
        "group_ids": np.array([s.id.group for s in samples], np.int64),
        "staleness": np.array([s.staleness for s in samples], np.int32),
    }


def _ones(rows: Sequence[Array]) -> list[Array]:
    return [np.ones(len(row), np.uint8) for row in rows]


def _joined(rows: Sequence[Array], dtype: type[np.generic]) -> Array:
    return np.concatenate(rows, dtype=dtype) if rows else np.empty(0, dtype)


def _offsets(rows: Sequence[Array]) -> Array:
    """int64 [B + 1]: where each row begins, and the end."""
    return np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)
