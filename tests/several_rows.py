"""Rows made by hand, and a batch in which samples have several of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from april.core.batch import Batch, DeliveredSample
from april.core.tape import Segment, SegmentKind
from april.core.types import FinishReason, Prompt, SampleId
from april.core.versions import FIRST_VERSION


def delivered(group: int, index: int, count: int = 1, **changes: Any) -> DeliveredSample:
    """A row of so many tokens, all of which have loss, without segments unless ``changes`` say more."""
    values = {
        "prompt": Prompt(np.zeros(1, np.int32)), "tokens": np.zeros(count, np.int32),
        "logprobs": np.zeros(count, np.float32), "loss_mask": np.ones(count, np.uint8), "segments": (),
        "staleness": 0, "reward": 0.0, "cohort": (), "finish": FinishReason.STOP, "attempts": 1, "resumes": 0,
    }  # fmt: skip
    return DeliveredSample(id=SampleId(group, index), **(values | changes))


def row(group: int, index: int, chain: int, prompt: list[int], tokens: int) -> DeliveredSample:
    """A row of a batch."""
    return delivered(
        group, index,
        prompt=Prompt(np.array(prompt, np.int32), {"group": group}, 2, group),
        tokens=np.arange(tokens, dtype=np.int32),
        logprobs=np.full(tokens, -0.5, np.float32),
        loss_mask=np.array([0] + [1] * (tokens - 1), np.uint8),
        segments=(Segment(0, tokens, FIRST_VERSION, SegmentKind.GENERATED, f"a{chain}", "e", 1.0),),
        staleness=chain, reward=float(index), cohort=((0, 0.0), (1, 1.0)), attempts=3, resumes=1, chain=chain,
    )  # fmt: skip


def batch() -> Batch:
    """Two groups, samples of one to three rows; the first row of the second group is no row of its prompt."""
    rows = (
        row(7, 0, 0, [1, 2], 3), row(7, 0, 1, [9], 2), row(7, 0, 4, [1, 2], 4), row(7, 1, 0, [1, 2], 3),
        row(8, 0, 1, [50, 51, 52], 3), row(8, 1, 0, [3], 5), row(8, 1, 2, [60], 5),
    )  # fmt: skip
    metrics = {"batches_out": 0.0, "samples": 4.0, "off_policy_share": 0.0}
    return Batch(id=4, version=FIRST_VERSION, samples=rows, group_sizes=(4, 3), metrics=metrics)
