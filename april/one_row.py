"""Refuses batches whose samples have several rows, for trainers that train one row per sample."""

from __future__ import annotations

from collections import Counter

from april.core.batch import Batch
from april.errors import RolloutError


def why_not_one_row(batch: Batch, trainer: str, call: str = "") -> str | None:
    """Return an error message if a sample of the batch has several rows, else None.

    ``trainer`` is the trainer's name; ``call`` names the part of its code that needs one row per sample.
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
    """Raise RolloutError if a sample of the batch has several rows, which ``trainer`` cannot train."""
    if why := why_not_one_row(batch, trainer, call):
        raise RolloutError(why)
