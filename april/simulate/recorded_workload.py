"""Derives a workload for simulations from the record of a run: response lengths, cost of the engines, training time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from april.config.settings import Config
from april.core.run_times import pace
from april.core.types import GenerationMode
from april.engines.simulated.response_lengths import TraceLengths
from april.errors import ConfigError, RecordError
from april.simulate.workload import Placement, Workload
from april.view.run_data import RecordedEngine, RunData, limit_distance_of, read_run

MIN_RESPONSES = 32
"""Smallest number of finished responses for a plan; fewer responses would not show the distribution of lengths."""
FEW_BATCHES = 10
"""Number of batches below which a plan from a record carries a warning."""


def workload_of(path: Path) -> Workload:
    """Return the workload of a recorded run.

    Only finished responses count. Responses that were unfinished when the record ended tend to be long, so the lengths
    from a short record are too small.

    Raises:
        RecordError: the record cannot be read, or has too few responses.
        ValueError: the workload cannot be simulated.
    """
    run = read_run(path)
    settings = run.settings
    lengths = lengths_of(run)
    if run.finished.size < MIN_RESPONSES:
        count = run.finished.size
        raise RecordError(f"{path}: {count} responses were finished, but {MIN_RESPONSES} are needed to plan")
    if (cost := run.cost) is None:
        raise RecordError(f"{path}: too few requests ended to estimate the engines' cost")
    # the first step is not typical, as it began with nothing in flight
    train_s, ahead = pace(batch.metrics for batch in run.batches[1:])
    colocated = settings.generation is GenerationMode.STEPWISE and not ahead
    return Workload(
        model="", gpu="", engines=run.engine_count, groups=settings.rollout_batch_size,
        samples=settings.n_samples_per_prompt,
        max_response_len=settings.max_response_len, prompt_len=run.prompt_len,
        over=settings.rollout_batch_size, max_staleness=settings.max_staleness, on_stale=settings.on_stale,
        train_time=f"{train_s:.6f}" if train_s else None,
        placement=(Placement.COLOCATED if colocated else Placement.SEPARATE) if train_s else None,
        fetch_ahead=ahead if train_s else 0,
        measured_cost=cost, measured_lengths=lengths,
        settings=settings_of(run), slots=slots_of(run), whole_groups=settings.group_reward,
        filtered=settings.has_filter, doubts=doubts_of(run),
    )  # fmt: skip


def doubts_of(run: RunData) -> tuple[str, ...]:
    """Return sentences that say why a simulation of this run may be wrong."""
    out = []
    if len(run.batches) < FEW_BATCHES:
        few = len(run.batches)
        out.append(f"the record has {few} batches; {FEW_BATCHES} are needed to know lengths and costs well enough")
    if (limit := limit_distance_of(run)) is not None and limit.doubt:
        out.append(f"the speeds may be wrong: {limit.doubt}")
    return tuple(out)


def slots_of(run: RunData) -> int | None:
    """Return the smallest ``max_in_flight`` of the engines; None if an engine has no limit."""
    slots = [engine.max_in_flight for engine in msgspec.convert(run.head["engines"], list[RecordedEngine])]
    return min(number for number in slots if number) if all(slots) else None


def settings_of(run: RunData) -> dict[str, Any]:
    """Return the run's configuration. Raises RecordError if it is not valid."""
    try:
        return Config.from_mapping(run.head.get("config")).to_mapping()
    except ConfigError as error:
        raise RecordError(f"line 1 of {run.path} is not valid: its configuration: {error}") from None


def lengths_of(run: RunData, seed: int = 0) -> TraceLengths:
    """Return the lengths of the finished responses, by group."""
    order = np.argsort(run.finished_group, kind="stable")
    groups = np.split(run.finished[order], np.flatnonzero(np.diff(run.finished_group[order])) + 1)
    rows = [[int(length) for length in group if length > 0] for group in groups]
    return TraceLengths([row for row in rows if row], seed=seed)
