"""Shares of a batch: every sample is in exactly one of them, and each share knows the whole that it is a part of."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

if TYPE_CHECKING:
    from april.core.batch import Batch, DeliveredSample

SplitBy = Literal["samples", "tokens"]


@dataclass(frozen=True, slots=True)
class BatchShare:
    """Which part of a batch it is, and what a loss over all of its parts is divided by."""

    rank: int = 0
    """number of the share, from 0"""
    ranks: int = 1
    """into how many the batch was split"""
    samples: int = 0
    """of the whole batch"""
    loss_tokens: int = 0
    """of the whole batch: tokens with loss mask 1"""


def whole_of(samples: Sequence[DeliveredSample]) -> BatchShare:
    """A batch that was not split."""
    return BatchShare(0, 1, len(samples), sum(int(np.count_nonzero(s.loss_mask)) for s in samples))


def split_batch(batch: Batch, ranks: int, by: SplitBy) -> list[Batch]:
    """See :meth:`april.core.batch.Batch.split`."""
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"split: ranks must be a whole number and at least 1, got {ranks!r}")
    if by not in get_args(SplitBy):
        raise ValueError(f'split: by must be "samples" or "tokens", got {by!r}')
    if by == "samples":
        shares = _contiguous(len(batch), ranks)
    else:
        shares = _balanced([len(s.prompt.token_ids) + len(s.tokens) for s in batch.samples], ranks)
    whole = batch.share
    groups = [number for number, size in enumerate(batch.group_sizes) for _ in range(size)]
    return [
        replace(
            batch,
            samples=tuple(batch.samples[row] for row in rows),
            group_sizes=tuple(_run_lengths([groups[row] for row in rows])),
            _part=replace(whole, rank=rank, ranks=ranks),
        )
        for rank, rows in enumerate(shares)
    ]


def _contiguous(rows: int, ranks: int) -> Sequence[Sequence[int]]:
    """The first ``rows % ranks`` shares have one row more."""
    starts = [rank * (rows // ranks) + min(rank, rows % ranks) for rank in range(ranks + 1)]
    return [range(start, end) for start, end in itertools.pairwise(starts)]


def _balanced(tokens: Sequence[int], ranks: int) -> Sequence[Sequence[int]]:
    """The longest row first, each to the share that has the fewest tokens (then rows) so far; rows in their order."""
    heap = [(0, 0, rank) for rank in range(ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for row in sorted(range(len(tokens)), key=lambda row: (-tokens[row], row)):
        held, count, rank = heap[0]
        shares[rank].append(row)
        heapq.heapreplace(heap, (held + tokens[row], count + 1, rank))
    return [sorted(rows) for rows in shares]


def _run_lengths(numbers: Sequence[int]) -> list[int]:
    """How often each number follows itself."""
    lengths: list[int] = []
    for i, number in enumerate(numbers):
        if i and numbers[i - 1] == number:
            lengths[-1] += 1
        else:
            lengths.append(1)
    return lengths
