"""Helpers that several trainers' adapters share: checks of settings, batches, images and checkpoints."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from april.attachments import attachment_bytes
from april.core.attachments import Placed
from april.core.batch import Batch, DeliveredSample
from april.core.tape import Segment, SegmentKind
from april.core.versions import PolicyVersion
from april.errors import CheckpointError, ConfigError, RolloutError
from april.scheduler import RolloutScheduler

# ---------------------------------------------------------------- refusals

Refusal = tuple[Any, str, str, str]
"""Check of a setting: (true if it is refused, name of the setting, reason, what to do instead)."""
_RECOMPUTED = "that the trainer recomputes (log_softmax(logits / temperature))"


def refuse(rows: Iterable[Refusal]) -> None:
    """Raise ConfigError, in one sentence, for the first row whose condition is true."""
    for applies, setting, why, what_to_do in rows:
        if applies:
            raise ConfigError(f"{setting}: {why}; {what_to_do}")


def mapping_of(settings: Any, where: str) -> dict[str, Any]:
    """Return april's own settings as a dict, empty for None. Raises ConfigError for anything but a mapping."""
    if settings is None:
        return {}
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{where}: expected a mapping of settings, got {type(settings).__name__}")
    return {str(name): value for name, value in settings.items()}


def misplaced(
    own: Iterable[str], trainer: str, decided: Mapping[str, str], known: Sequence[str] | None = None,
    shown: str = "april.{}",
) -> Iterator[Refusal]:  # fmt: skip
    """Yield refusals of april's settings that a trainer's flag decides or, given ``known``, that do not exist."""
    for name in own:
        flag = decided.get(name.partition(".")[0])
        yield flag is not None, shown.format(name), f"{trainer}'s {flag} decides this", "leave it out"
        if known is not None:
            yield name not in known, shown.format(name), "there is no such setting", f"there are {', '.join(known)}"


def distorting(settings: Mapping[str, Any], instead: str = "") -> Iterator[Refusal]:
    """Yield refusals of sampling settings (name -> True if used) that the trainer's log-probabilities leave out."""
    for setting, applies in settings.items():
        why = f"this is not part of the log-probabilities {_RECOMPUTED}, so its ratios would be wrong"
        yield applies, setting, why, f"leave it out{instead}"


def greedy(applies: Any, setting: str, instead: str = "") -> Refusal:
    """Return the refusal of temperature 0, for :func:`refuse`; ``applies`` is true if it is set."""
    why = "greedy samples of a group are all equal, and the trainer recomputes log_softmax(logits / temperature)"
    return applies, setting, why, f"use a positive temperature{instead}"


def divided_groups(own: Mapping[str, Any], trainer: str, samples: str, shown: str = "april.{}") -> Iterator[Refusal]:
    """Yield refusals of incomplete groups, for a trainer that finds a group's rewards by position in the batch."""
    quorum, by_place = own.get("group_quorum"), f"of {samples} by their place in the batch"
    # fmt: off
    yield (quorum not in (None, 1), f"{shown.format('group_quorum')}={quorum}",
           f"{trainer} takes rewards over whole groups {by_place}, so groups are delivered whole", "leave it out")
    yield (own.get("on_failed_sample") == "shrink", f"{shown.format('on_failed_sample')}=shrink",
           f"{trainer} takes rewards over groups {by_place}, so none may have fewer", "use replace")
    # fmt: on


# ---------------------------------------------------------------- batches


class Deliveries:
    """Tracks the last delivered batch and the dropped prompts, and passes the trainer's weight updates on."""

    def __init__(self) -> None:
        self.last: int | None = None
        """Number of the last batch, None before the first one."""
        self._dropped: dict[str, int] = {}

    def metrics(self, batch: Batch, ledger: Any) -> dict[str, float]:
        """Return metrics of the batch, with the number of prompts dropped since the previous batch by reason."""
        self.last = batch.id
        before = self._dropped
        self.skip(ledger)
        more = {reason: count - before.get(reason, 0) for reason, count in self._dropped.items()}
        kept = {k: v for k, v in batch.metrics.items() if not k.startswith(("response_len", "reward_"))}
        return kept | {f"dropped_{reason}": float(count) for reason, count in more.items() if count}

    def skip(self, ledger: Any) -> None:
        """Leave the prompts dropped so far out of the next batch's metrics."""
        self._dropped = {str(reason): count for reason, count in ledger["prompts"].dropped.items()}

    def follow(self, scheduler: RolloutScheduler, label: int) -> None:
        """Report weights with a new ``label`` to the scheduler; they were trained on every batch delivered so far."""
        if label != scheduler.version.n:
            scheduler.weight_update(trained=self.last, label=label)


def require_count(count: int, wanted: int, unit: str = "prompts") -> None:
    """Raise RolloutError if the trainer asks for a batch size that differs from its configuration."""
    if count != wanted:
        raise RolloutError(f"the trainer asked for {count} {unit}, and its configuration says {wanted}")


def is_masked(row: DeliveredSample) -> bool:
    """Return True if the loss mask excludes any generated token of the row."""
    return int(np.count_nonzero(row.loss_mask)) < sum(s.count for s in generated(row.segments))


def generated(segments: Sequence[Segment]) -> list[Segment]:
    """Return the segments that the policy generated, without those of the environment."""
    return [s for s in segments if s.kind is SegmentKind.GENERATED]


def spans_of(segments: Sequence[Segment]) -> list[tuple[int, int, PolicyVersion | None]]:
    """Return (start, end, policy version) spans of a response, merged across attempts; None for the environment."""
    spans: list[tuple[int, int, PolicyVersion | None]] = []
    for s in segments:
        version = s.version if s.kind is SegmentKind.GENERATED else None
        if spans and spans[-1][2] == version:
            spans[-1] = (spans[-1][0], s.start + s.count, version)
        else:
            spans.append((s.start, s.start + s.count, version))
    return spans


# ---------------------------------------------------------------- images

NOT_TRAINED = frozenset({"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"})
"""Processor outputs to leave out: trainers compute them again for prompt and response together."""


def pictures(attached: Sequence[Placed], mode: str | None = "RGB") -> list[Any]:
    """Open the images that were sent to the engines with PIL, converted to ``mode`` (None: not converted)."""
    from PIL import Image

    opened = (Image.open(io.BytesIO(attachment_bytes(placed.attachment))) for placed in attached)
    return [image if mode is None else image.convert(mode) for image in opened]


# ---------------------------------------------------------------- checkpoints


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn errors that damaged saved values cause inside the block into CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{what} is damaged: {type(error).__name__}: {error}") from error


@contextmanager
def closing_on_error(close: Callable[[], None]) -> Iterator[None]:
    """Call ``close`` if the block raises, so that nothing is left half open."""
    try:
        yield
    except BaseException:
        close()
        raise
