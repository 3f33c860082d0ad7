"""Helpers around a trainer's scheduler: metrics of batches, values kept for samples, saved states, errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

from april.core.batch import Batch
from april.core.types import SampleId
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


class KeptSamples:
    """Removes the values of samples whose group was dropped, one batch after april has dropped the group.

    The values are kept for one more batch because a state saved just before the drop may need them, and a reward may
    arrive just after it.

    Args:
        tables: Dicts of values by sample. The adapter adds values and removes delivered ones, also in other threads.
    """

    def __init__(self, *tables: dict[SampleId, Any]) -> None:
        self._tables = tables
        self._dropped: set[SampleId] = set()

    def forget_dropped(self, held_groups: Set[int]) -> None:
        """Remove the samples whose groups are not in ``held_groups`` for the second time; called once per batch."""
        out = {sample for table in self._tables for sample in list(table) if sample.group not in held_groups}
        for sample in out & self._dropped:
            for table in self._tables:
                table.pop(sample, None)
        self._dropped = out


def saved_groups(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return all groups in a scheduler's saved state, each a dict that the caller may change."""
    return [*state["core"]["ready"], *state["core"]["waiting"]]


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
