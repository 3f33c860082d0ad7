"""The picture of the demo: busy slots, response lengths, held-out reward against steps and against cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from april.demo.arm import ArmResult
from april.demo.settings import DemoSettings

COLOURS = {"sync": "#8a8a8a", "april": "#1b6ca8", "refill": "#d1603d", "quorum": "#3a8f5c"}
LABELS = {"sync": "sync", "april": "april, N' = 2N", "refill": "april, refill", "quorum": "april, N' = 1.5N, quorum"}
SHOWN_TOKENS = 15_000
"""The occupancy panels show the time in which about this many tokens were trained."""


def draw(settings: DemoSettings, arms: dict[str, list[ArmResult]], summary: dict[str, Any], path: Path) -> None:
    """Write the picture to ``path`` (PNG); time is in decode steps, on a server by the clock."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 9.5), layout="constrained")
    grid = figure.add_gridspec(len(arms) + 2, 3, height_ratios=[1.0] * len(arms) + [0.15, 3.2])
    _occupancy(figure, grid, settings, arms, summary)
    _lengths(figure.add_subplot(grid[-1, 0]), arms)
    _reward(figure.add_subplot(grid[-1, 1]), arms, 0, "training step")
    _reward(figure.add_subplot(grid[-1, 2]), arms, 1, "rollout CPU seconds")
    figure.savefig(path, dpi=120, metadata={"Software": None})


def _occupancy(figure: Any, grid: Any, settings: DemoSettings, arms: dict[str, list[ArmResult]], summary: Any) -> None:
    shown = {name: _window(rows[0]) for name, rows in arms.items()}
    width = max(len(busy) for busy, _, _ in shown.values())
    for row, (name, (busy, ends, steps)) in enumerate(shown.items()):
        axes = figure.add_subplot(grid[row, :])
        axes.fill_between(np.arange(len(busy)), busy, step="post", color=COLOURS[name], linewidth=0)
        for end in ends:
            axes.axvline(end, color="black", linewidth=0.6, alpha=0.5)
        axes.set_xlim(0, width)
        axes.set_ylim(0, settings.slots)
        axes.set_ylabel("busy slots", fontsize=8)
        axes.tick_params(labelsize=8)
        bubble = summary["modes"][name]["bubble"]
        trained = sum(sum(row) for row in arms[name][0].lengths[:steps])
        unit = "decode steps" if settings.embedded else "hundredths of a second"
        axes.text(
            0.995, 0.9, f"{LABELS[name]}: {steps} steps, {trained:,} tokens trained in {len(busy):,} {unit}; "
            f"bubble {bubble:.0%}", transform=axes.transAxes, ha="right", va="top", fontsize=9,
            bbox={"facecolor": "white", "alpha": 0.85, "linewidth": 0},
        )  # fmt: skip
        if row == 0:
            axes.set_title("Busy decode slots over time (seed 0; lines: a batch goes to training)", fontsize=10)
        if row == len(arms) - 1:
            axes.set_xlabel(unit, fontsize=9)
        else:
            axes.set_xticklabels([])


def _window(arm: ArmResult) -> tuple[list[int], list[int], int]:
    """(busy slots, step ends, steps) from the start until about SHOWN_TOKENS were trained."""
    tokens = np.cumsum([sum(row) for row in arm.lengths])
    steps = min(int(np.searchsorted(tokens, SHOWN_TOKENS)) + 1, len(arm.step_ends))
    return arm.occupancy[: arm.step_ends[steps - 1]], arm.step_ends[:steps], steps


def _lengths(axes: Any, arms: dict[str, list[ArmResult]]) -> None:
    lengths = np.concatenate([row for arm in arms["sync"] for row in arm.lengths])
    axes.hist(lengths, bins=np.arange(0, lengths.max() + 10, 8), color=COLOURS["sync"], log=True)
    for value, label in ((np.median(lengths), "median"), (np.quantile(lengths, 0.99), "p99")):
        axes.axvline(value, color="black", linewidth=1, linestyle="--")
        axes.text(value, axes.get_ylim()[1], f" {label} {value:.0f}", fontsize=8, va="top")
    axes.set_title("Response lengths (sync)", fontsize=10)
    axes.set_xlabel("tokens", fontsize=9)
    axes.set_ylabel("responses", fontsize=9)
    axes.tick_params(labelsize=8)


def _reward(axes: Any, arms: dict[str, list[ArmResult]], column: int, label: str) -> None:
    for name, rows in arms.items():
        curves = np.array([arm.curve for arm in rows], np.float64)
        x, y = curves[:, :, column].mean(axis=0), curves[:, :, 2]
        axes.plot(x, y.mean(axis=0), color=COLOURS[name], marker="o", markersize=3, label=LABELS[name])
        if len(rows) > 1:
            axes.fill_between(x, y.min(axis=0), y.max(axis=0), color=COLOURS[name], alpha=0.15, linewidth=0)
    axes.set_title("Held-out reward (band: all seeds)", fontsize=10)
    axes.set_xlabel(label, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
