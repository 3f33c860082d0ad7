"""Trainers whose layout has one row per sample, and batches whose samples have several."""

from __future__ import annotations

from collections import Counter

from april.core.batch import Batch
from april.errors import RolloutError


def why_not_one_row(batch: Batch, trainer: str, call: str = "") -> str | None:
    """Describe a sample of several rows, where ``trainer`` has one for each; None means that there is none.

    ``call``: what stands against more, in its code.
    """
    if batch.one_row_each:
        return None
    (sample, rows), *_ = Counter(s.id for s in batch.samples).most_common(1)
    return (
        f"{trainer} trains one row per sample{call and f' ({call})'}, and sample {sample} of batch {batch.id} has "
        f"{rows} conversations; have its rollout function go on with one conversation, or train with a loop of your "
        "own, by batch.sample_numbers"
    )


def refuse_several_rows(batch: Batch, trainer: str, call: str = "") -> None:
    """Raise RolloutError for a batch in which a sample has several rows, where ``trainer`` has one for each."""
    if why := why_not_one_row(batch, trainer, call):
        raise RolloutError(why)
