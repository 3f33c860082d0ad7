"""Helpers with which adapters use april's scheduler: batch metrics, per-sample values, saved states, errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

from april.core.batch import Batch
from april.core.types import SampleId
from april.errors import CheckpointError
from april.scheduler import RolloutScheduler


class Deliveries:
    """Tracks the last delivered batch and the dropped prompts, and tells april's scheduler of new weights."""

    def __init__(self) -> None:
        self.last: int | None = None
        """Id of the last delivered batch; None before the first batch."""
        self._dropped: dict[str, int] = {}

    def metrics(self, batch: Batch, ledger: Any) -> dict[str, float]:
        """Return the batch's metrics, and as ``dropped_REASON`` the number of prompts dropped since the last batch."""
        self.last = batch.id
        before = self._dropped
        self.skip_dropped(ledger)
        more = {reason: count - before.get(reason, 0) for reason, count in self._dropped.items()}
        kept = {k: v for k, v in batch.metrics.items() if not k.startswith(("response_len", "reward_mean"))}
        return kept | {f"dropped_{reason}": float(count) for reason, count in more.items() if count}

    def skip_dropped(self, ledger: Any) -> None:
        """Do not count the prompts that were dropped so far in the next batch's metrics."""
        self._dropped = {str(reason): count for reason, count in ledger["prompts"].dropped.items()}

    def report_weights(self, scheduler: RolloutScheduler, label: int) -> None:
        """Report weights to the scheduler if their ``label`` is new; all delivered batches then count as trained."""
        if label != scheduler.version.n:
            scheduler.weight_update(trained=self.last, label=label)


class KeptSamples:
    """Deletes the per-sample values of a dropped group, one batch after april has dropped the group.

    They are kept for one more batch because a state saved just before the drop may need them, and a reward may arrive
    just after the drop.

    Args:
        tables: Dicts of values by sample id. The adapter adds samples and removes delivered ones, in any thread.
    """

    def __init__(self, *tables: dict[SampleId, Any]) -> None:
        self._tables = tables
        self._dropped: set[SampleId] = set()

    def forget_dropped(self, held_groups: Set[int]) -> None:
        """Delete samples of groups that april held neither at the last call nor now. Call it once per batch."""
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
    """Convert errors that damaged saved values cause inside the block to CheckpointError; ``what`` names the values."""
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
