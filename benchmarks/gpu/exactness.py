"""Delivered log-probabilities against a recomputation, with the model's own noise beside them.

The weights never change here, so that every delivered token, those of resumed responses included, can be recomputed.
In bfloat16 the same model gives other numbers when its batch is another one, or its keys and values come from a cache:
the same sequences alone, padded, and token by token with transformers' own cache, all without april, say how far apart
right answers are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from april.core.batch import Batch
from april.engines.transformers.model_support import cache_argument
from benchmarks.gpu.record import Deadline
from benchmarks.gpu.schedules import ARMS, Workload, run_arm

MOST = 64
"""Responses that are recomputed."""
PADDED = 8
"""Sequences of a padded forward pass."""
CACHED_TOKENS = 128
"""Of each of the PADDED sequences that are decoded with transformers' own cache, one step per token."""

Float32 = NDArray[np.float32]


def measure(model: Any, workload: Workload, deadline: Deadline, figures: dict[str, Any]) -> None:
    """Generate with N' = 2N, then recompute what was delivered, responses that were cut and continued first."""
    samples: list[Any] = []

    def seen(batch: Batch, _: dict[str, Any]) -> None:
        samples.extend(batch.samples)

    run_arm(model, workload, ARMS["N' = 2N"], Deadline(deadline.left_s / 2), seen)
    samples.sort(key=lambda s: -len(set(s.versions[:, 1].tolist())))
    chosen = samples[:MOST]
    sequences = [np.concatenate([s.prompt.token_ids, s.tokens]).astype(np.int64) for s in chosen]
    delivered, alone, padded = [], [], []
    done = 0
    for start in range(0, len(chosen), PADDED):
        part = slice(start, start + PADDED)
        for sample, row in zip(chosen[part], _padded(model, sequences[part]), strict=True):
            padded.append(row[-len(sample.tokens) :])
        for sample, sequence in zip(chosen[part], sequences[part], strict=True):
            alone.append(_padded(model, [sequence])[0][-len(sample.tokens) :])
            delivered.append(sample.logprobs)
        done = min(start + PADDED, len(chosen))
        if deadline.over:
            break
    longest = sorted(range(done), key=lambda i: -len(sequences[i]))[:PADDED]
    length = min([CACHED_TOKENS, *(len(sequences[i]) for i in longest)])
    cached = _cached(model, [sequences[i][:length] for i in longest])
    uncached = [_padded(model, [sequences[i][:length]])[0] for i in longest]
    cut = [len(set(s.versions[:, 1].tolist())) > 1 for s in chosen[:done]]
    figures |= {
        "responses": done,
        "cut_and_continued": sum(cut),
        "tokens": sum(len(row) for row in delivered),
        "april": difference(delivered, alone),
        "own_padded": difference(padded, alone),
        "own_cached": difference(cached, uncached),
        "april_of_continued": difference(
            [d for d, c in zip(delivered, cut, strict=True) if c], [a for a, c in zip(alone, cut, strict=True) if c]
        ),
    }


def difference(these: Sequence[Float32], those: Sequence[Float32]) -> dict[str, float]:
    """Of log-probabilities, in nats; empty without tokens."""
    if not these:
        return {}
    apart = np.abs(np.concatenate(these).astype(np.float64) - np.concatenate(those).astype(np.float64))
    return {"mean": float(apart.mean()), "p99": float(np.quantile(apart, 0.99)), "max": float(apart.max())}


@torch.no_grad()
def _padded(model: Any, sequences: Sequence[NDArray[np.int64]]) -> list[Float32]:
    """Log-probabilities [T - 1] of each sequence, by one forward pass without a cache over all, padded on the right."""
    device = next(model.parameters()).device
    longest = max(map(len, sequences))
    ids = torch.zeros(len(sequences), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, sequence in enumerate(sequences):
        ids[i, : len(sequence)] = torch.from_numpy(sequence)
        mask[i, : len(sequence)] = 1
    alone = len(sequences) == 1
    ids = ids.to(device)
    logits = model(input_ids=ids, attention_mask=None if alone else mask.to(device), use_cache=False).logits
    rows = []
    for i, sequence in enumerate(sequences):
        n = len(sequence)
        row = logits[i, : n - 1].float().log_softmax(-1).gather(1, ids[i, 1:n, None])
        rows.append(row.squeeze(1).cpu().numpy())
    return rows


@torch.no_grad()
def _cached(model: Any, sequences: Sequence[NDArray[np.int64]]) -> list[Float32]:
    """Log-probabilities [T - 1] of sequences of one length, token by token with transformers' own cache."""
    device = next(model.parameters()).device
    ids = torch.from_numpy(np.stack(sequences)).to(device)
    columns, cache, name = [], None, cache_argument(model)
    for t in range(ids.shape[1] - 1):
        out = model(input_ids=ids[:, t : t + 1], use_cache=True, **{name: cache})
        cache = getattr(out, name)
        columns.append(out.logits[:, -1].float().log_softmax(-1).gather(1, ids[:, t + 1, None]))
    found: Float32 = torch.cat(columns, 1).cpu().numpy()
    return list(found)
