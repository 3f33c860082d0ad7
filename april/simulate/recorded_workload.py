"""Derives a workload to simulate from the record of a run: response lengths, cost of the engines, training time."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from april.config.settings import Config
from april.core.run_times import pace
from april.core.types import GenerationMode, OnFailedSample
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.response_lengths import TraceLengths
from april.errors import ConfigError, RecordError
from april.simulate.workload import Placement, Workload
from april.view.run_data import RecordedEngine, RunData, limit_distance_of, read_run

MIN_RESPONSES = 32
"""Smallest number of finished responses from which a plan is made; fewer would not show the distribution of lengths."""
FEW_BATCHES = 10
"""A plan from a record with fewer batches has a warning."""


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
    first = run.context[(run.age == 0) & ~run.evaluation]
    # the first step is not typical, as it began with nothing in flight
    train_s, ahead = pace(batch.metrics for batch in run.batches[1:])
    colocated = settings.generation is GenerationMode.STEPWISE and not ahead
    return Workload(
        model="", gpu="", engines=run.engine_count, groups=settings.rollout_batch_size,
        samples=settings.n_samples_per_prompt,
        max_response_len=settings.max_response_len, prompt_len=max(1, round(float(np.median(first)))),
        over=settings.rollout_batch_size, max_staleness=settings.max_staleness, on_stale=settings.on_stale,
        train_time=f"{train_s:.6f}" if train_s else None,
        placement=(Placement.COLOCATED if colocated else Placement.SEPARATE) if train_s else None,
        fetch_ahead=ahead if train_s else 0,
        measured_cost=mean_cost(run, path), measured_lengths=lengths,
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
    """Return the smallest ``max_in_flight`` of the engines; None if an engine has no limit, or for a simulated run."""
    slots = [engine.max_in_flight for engine in msgspec.convert(run.head["engines"], list[RecordedEngine])]
    known = [number for number in slots if number]
    return min(known) if run.head.get("config") is not None and len(known) == len(slots) else None


def settings_of(run: RunData) -> dict[str, Any]:
    """Return the run's configuration. Raises RecordError if it is not valid.

    A record without a configuration, such as that of a simulated run, gives only the settings that the core uses.
    """
    if (recorded := run.head.get("config")) is not None:
        try:
            return Config.from_mapping(recorded).to_mapping()
        except ConfigError as error:
            raise RecordError(f"line 1 of {run.path} is not valid: its configuration: {error}") from None
    known = asdict(run.settings)
    found = {name: known[name] for name in Config.model_fields if name in known}
    found |= {"seed": known["run_seed"], "partial_rollout": True}
    if known["max_age"] == 4 * (known["max_staleness"] + 1):
        found["max_age"] = None
    if known["on_failed_sample"] is not OnFailedSample.SHRINK:
        found["min_group_size"] = None
    return found


def lengths_of(run: RunData, seed: int = 0) -> TraceLengths:
    """Return the lengths of the finished responses, by group."""
    order = np.argsort(run.finished_group, kind="stable")
    groups = np.split(run.finished[order], np.flatnonzero(np.diff(run.finished_group[order])) + 1)
    rows = [[int(length) for length in group if length > 0] for group in groups]
    return TraceLengths([row for row in rows if row], seed=seed)


def mean_cost(run: RunData, path: Path) -> DecodeCost:
    """Return the mean cost of the run's engines. Raises RecordError if no cost could be fitted."""
    costs = [fitted.cost for fitted in run.costs.values()]
    if not costs:
        raise RecordError(f"{path}: too few requests ended to estimate the engines' cost")
    return DecodeCost(
        *(
            float(np.mean([getattr(cost, name) for cost in costs]))
            for name in ("base_s", "per_sequence_s", "per_kv_token_s", "per_prefill_token_s")
        )  # type: ignore[arg-type]
    )
