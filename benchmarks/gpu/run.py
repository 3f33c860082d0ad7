"""All parts in their order: copies, then for each shape the step times, the exactness and the schedules."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from april.engines.simulated.decode_cost import DecodeCost
from benchmarks.gpu import exactness, schedules, step_time
from benchmarks.gpu.device import bandwidth, chosen, facts, free_bytes
from benchmarks.gpu.record import Deadline, Record
from benchmarks.gpu.shapes import MINIATURE, SHAPES, Shape, Traffic, build, traffic

PROMPT_LEN = 16
STEP_TIME_SHARE, EXACTNESS_SHARE = 0.4, 0.15
"""Of a model's time; the schedules have the rest."""


def run(
    *, minutes: float, out: Path, shapes: Sequence[str], dtype: str, device: str | None, miniature: bool
) -> dict[str, Any]:
    """The report, which is in ``out`` as well; see the command line for the arguments.

    Raises:
        ConfigError: there is no such device.
    """
    where = chosen(device, miniature=miniature)
    deadline, record = Deadline(60.0 * minutes), Record(out)
    threads = torch.get_num_threads()
    if miniature:  # with work beside it, more threads than one wait for each other longer than they compute
        torch.set_num_threads(1)
    record.data |= {"machine": facts(where), "dtype": dtype, "minutes": minutes}
    record.say(f"{record.data['machine']['device']}: {minutes:g} minutes; the report is {record.path}")

    def copies(figures: dict[str, Any]) -> None:
        figures |= bandwidth(where, 1 << (24 if miniature else 30))
        record.say(f"copies: {figures['bytes_per_s'] / 1e9:.0f} GB/s")

    record.part("bandwidth", deadline, record.data, "bandwidth", copies)
    chosen_shapes = MINIATURE if miniature else {name: SHAPES[name] for name in shapes}
    try:
        for i, (name, shape) in enumerate(chosen_shapes.items()):
            share = Deadline(deadline.left_s / (len(chosen_shapes) - i))
            ShapeRun(record, name, shape, where, getattr(torch, dtype), miniature=miniature).all(share)
            gc.collect()
        record.data["finished"] = True
    finally:
        torch.set_num_threads(threads)
        record.write()
        record.say(f"wrote {record.path}")
    for error in record.data["errors"]:
        record.say(f"failed: {error}")
    return record.data


class ShapeRun:
    """Everything about one shape. A part whose figures are missing in another one goes on without them."""

    def __init__(
        self, record: Record, name: str, shape: Shape, device: torch.device, dtype: torch.dtype, *, miniature: bool
    ) -> None:
        self._record, self._name, self._shape, self._device, self._dtype = record, name, shape, device, dtype
        self._miniature = miniature
        self._bytes_per_s = float(record.data["bandwidth"].get("bytes_per_s", float("inf")))
        self._model: Any = None
        self._reads: Traffic
        self._cost: DecodeCost | None = None

    def all(self, deadline: Deadline) -> None:
        """Every part, within its time."""
        found: dict[str, Any] = {}
        self._record.data["shapes"][self._name] = found
        steps = Deadline(STEP_TIME_SHARE * deadline.left_s)
        exact = Deadline((STEP_TIME_SHARE + EXACTNESS_SHARE) * deadline.left_s)

        def part(key: str, until: Deadline, work: Any) -> None:
            self._record.part(f"{self._name}, {key}", until, found, key, lambda figures: work(figures, until))

        part("model", deadline, self._build)
        if self._model is not None:
            part("step_times", steps, self._step_times)
            part("exactness", exact, self._exactness)
            part("schedules", deadline, self._schedules)
        self._model = None

    def _build(self, figures: dict[str, Any], deadline: Deadline) -> None:
        model = build(self._shape, self._device, self._dtype)
        self._reads = traffic(model, self._shape)
        figures |= {
            "parameters": sum(p.numel() for p in model.parameters()),
            "weight_bytes": self._reads.weight_bytes,
            "kv_bytes_per_token": self._reads.kv_bytes_per_token,
        }
        self._model = model

    def _step_times(self, figures: dict[str, Any], deadline: Deadline) -> None:
        def tell(points: list[step_time.Point]) -> None:
            figures["points"] = points
            p = points[-1]
            said = p.get("skipped") or f"{1e3 * p['step_s']:.2f} ms, {p['share_of_bandwidth']:.0%} of the bandwidth"
            self._record.say(f"{self._name}: {p['batch']} x {p['asked']} tokens: {said}")
            self._record.write()

        grid = step_time.MINIATURE_GRID if self._miniature else step_time.GRID
        points = step_time.measure(self._model, self._shape, self._reads, self._bytes_per_s, grid, deadline, tell)
        self._cost = step_time.fitted(points)
        if self._cost is not None:
            names = ("base_s", "per_sequence_s", "per_kv_token_s")
            figures["fit"] = {name: getattr(self._cost, name) for name in names}

    def _exactness(self, figures: dict[str, Any], deadline: Deadline) -> None:
        workload = self._workload(deadline.left_s / 2, 64 if self._miniature else 512)
        exactness.measure(self._model, workload, deadline, figures)
        rows = (("april", "april"), ("transformers, padded", "own_padded"), ("transformers, cached", "own_cached"))
        said = [f"{name} {figures[key]['mean']:.2g} mean, {figures[key]['max']:.2g} at most" for name, key in rows]
        self._record.say(f"{self._name}: log-probabilities against a forward pass alone: {'; '.join(said)}")

    def _schedules(self, figures: dict[str, Any], deadline: Deadline) -> None:
        def tell(arm: str, row: dict[str, Any]) -> None:
            self._record.say(
                f"{self._name}: {arm}: {row['trained_per_s']:.0f} trained tokens/s, {row['over_sync']:.2f} of sync; "
                f"{row['share_of_bandwidth']:.1%} of the bandwidth limit"
            )

        workload = self._workload(deadline.left_s / len(schedules.ARMS), 64 if self._miniature else 8192)
        limits = schedules.Limits(workload, self._reads, self._bytes_per_s, self._cost)
        schedules.measure(self._model, workload, limits, deadline, figures, self._record.write, tell)

    def _workload(self, seconds: float, longest: int) -> schedules.Workload:
        """For an arm of so many seconds; ``longest``: tokens of prompt and response."""
        groups, samples = (2, 2) if self._miniature else (16, 8)
        n = groups * samples
        step_s = 0.03 if self._cost is None else self._cost.step_s(n, n * longest // schedules.CAP_OVER_MEDIAN)
        return schedules.Workload.fitting(
            self._reads, free_bytes(self._device), step_s, seconds, groups=groups, samples=samples,
            prompt_len=PROMPT_LEN, longest=longest, most_steps=3 if self._miniature else None,
        )  # fmt: skip
