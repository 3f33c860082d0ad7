"""Helpers around a trainer's scheduler: metrics of batches, errors of damaged checkpoints, closing after an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from april.core.batch import Batch
from april.errors import CheckpointError
from april.scheduler import RolloutScheduler


class Deliveries:
    """Tracks the last delivered batch and the dropped prompts, and passes the trainer's weight updates on."""

    def __init__(self) -> None:
        self.last: int | None = None
        """Number of the last batch; None before the first batch."""
        self._dropped: dict[str, int] = {}

    def metrics(self, batch: Batch, ledger: Any) -> dict[str, float]:
        """Return metrics of the batch, with the number of prompts dropped since the previous batch by reason."""
        self.last = batch.id
        before = self._dropped
        self.skip_dropped(ledger)
        more = {reason: count - before.get(reason, 0) for reason, count in self._dropped.items()}
        kept = {k: v for k, v in batch.metrics.items() if not k.startswith(("response_len", "reward_mean"))}
        return kept | {f"dropped_{reason}": float(count) for reason, count in more.items() if count}

    def skip_dropped(self, ledger: Any) -> None:
        """Leave the prompts dropped so far out of the next batch's metrics."""
        self._dropped = {str(reason): count for reason, count in ledger["prompts"].dropped.items()}

    def report_weights(self, scheduler: RolloutScheduler, label: int) -> None:
        """Report weights with a new ``label`` to the scheduler; all batches delivered so far count as trained."""
        if label != scheduler.version.n:
            scheduler.weight_update(trained=self.last, label=label)


@contextmanager
def checkpoint_errors(what: str) -> Iterator[None]:
    """Turn errors that damaged saved values cause inside the block into CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{what} is damaged: {type(error).__name__}: {error}") from error


@contextmanager
def closing_on_error(close: Callable[[], None]) -> Iterator[None]:
    """Call ``close`` if the block raises, so that nothing stays half open."""
    try:
        yield
    except BaseException:
        close()
        raise
