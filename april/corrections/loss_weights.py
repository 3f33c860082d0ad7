"""Computes the weight of each token in the losses of GRPO and related methods, such as 1 / (number of tokens).

These weights only average over tokens and responses. Weights for off-policy tokens are in ``importance.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from april.corrections.advantages import Method, check_method, same_kind
from april.corrections.arguments import ArrayOrTensor, array_of, number


@dataclass(frozen=True, slots=True)
class BatchShare:
    """Number of one rank's part of a batch, and totals of the whole batch, by which the loss is divided."""

    rank: int = 0
    """Number of this part, from 0."""
    ranks: int = 1
    """Number of parts into which the batch was split."""
    samples: int = 0
    """Number of samples in the whole batch."""
    loss_tokens: int = 0
    """Number of tokens with loss mask 1 in the whole batch."""


def loss_weights(
    loss_mask: ArrayOrTensor, method: Method = "grpo", *, max_response_len: int | None = None,
    share: BatchShare | None = None, samples: ArrayLike | None = None,
) -> ArrayOrTensor:  # fmt: skip
    """Compute the weight of every token so that ``(weights * loss).sum()`` is the method's loss: float32 [B, T].

    For micro-batches, compute the weights of the whole batch and take the rows of each micro-batch: the losses then add
    up to the loss of the batch. They also add up over ranks if each rank gives its ``share``. As DDP and FSDP average
    gradients over ranks, multiply the loss by ``share.ranks`` there.
    With B responses and T_i tokens with loss in response i, the weight of a token is


    * ``grpo``, ``gspo``: 1 / (B T_i), the mean over a response's tokens, then over the responses;
    * ``dr_grpo``: 1 / (B max_response_len), a constant, so that all tokens weigh the same in long and short responses;
    * ``rloo``: 1 / B, as the log-probability of a response is the sum over its tokens;
    * ``dapo``: 1 / (sum of T_i), the mean over the tokens of the batch.

    Args:
        loss_mask: mask [B, T], array or tensor; not 0 where a token has loss.
        method: method of the loss, see above.
        max_response_len: configured largest length of a response; needed for ``dr_grpo``.
        share: ``batch.share``, with B and the sum of T_i of the whole batch; None takes them from ``loss_mask``.
        samples: number of each row's sample, int [B]: ``batch.sample_numbers``. All rows of a sample form one response,
            and T_i is summed over them. None means that each row is a response.

    Raises ValueError for an unknown method or shape, and for ``dr_grpo`` without ``max_response_len``.
    """
    check_method(method)
    mask: Any = loss_mask if hasattr(loss_mask, "detach") else array_of("loss_weights", "loss_mask", loss_mask)
    if mask.ndim != 2:
        raise ValueError(f"loss_weights: loss_mask has the shape {list(mask.shape)}; give [B, T]")
    longest = 0.0 if max_response_len is None else number("loss_weights", "max_response_len", max_response_len)
    if method == "dr_grpo" and not 0 < longest < math.inf:
        raise ValueError(
            f"loss_weights: dr_grpo divides by a constant, the configured one; got max_response_len={max_response_len}"
        )
    if share is not None and not isinstance(share, BatchShare):
        raise ValueError(f"loss_weights: share must be batch.share, got {share!r:.100}")
    counted: Any = mask != 0
    trained: Any = counted.astype(np.float32) if isinstance(counted, np.ndarray) else counted.float()
    numbers = np.arange(len(trained)) if samples is None else array_of("loss_weights", "samples", samples)
    if numbers.shape != (len(trained),):
        raise ValueError(f"loss_weights: samples have the shape {list(numbers.shape)}; give one number per row")
    unique, numbers = np.unique(numbers, return_inverse=True)
    rows = max(len(unique) if share is None else share.samples, 1)
    divisor: Any = rows
    if method == "dr_grpo":
        divisor = rows * longest
    elif method == "dapo":
        divisor = max(int(counted.sum()) if share is None else share.loss_tokens, 1)
    elif method != "rloo":
        lengths = trained.sum(1)
        if samples is not None:
            of_rows = array_of("loss_weights", "loss_mask", lengths)
            lengths = same_kind(lengths, np.bincount(numbers, of_rows)[numbers].astype(np.float32))
        divisor = (rows * lengths.clip(1))[:, None]
    weights: ArrayOrTensor = trained / divisor
    return weights
