"""The pictures of the demo. One has all: busy slots and why the others are empty, held-out reward over training steps
and over decode steps, gain and price. The other has the empty slots alone, of sync and april, in large letters.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from april.core.partial_buffer import IdleCause
from benchmarks.demo.arm import ArmOutcome, DemoSettings
from benchmarks.demo.summary import arm_figures, ratios_to_sync
from benchmarks.study.analysis import series
from benchmarks.study.statistics import with_censored

COLOURS = {"sync": "#8a8a8a", "april": "#1b6ca8", "refill": "#d1603d", "quorum": "#3a8f5c"}
LABELS = {"sync": "sync", "april": "april, N' = 2N", "refill": "april, refill", "quorum": "april, N' = 1.5N, quorum"}
EMPTY = {
    IdleCause.OVER_SAMPLING: ("#f7e9bf", "empty: the step's groups have begun, and it waits for enough of them to end"),
    IdleCause.BOUND: ("#e5d3ee", "empty: max_staleness, old responses have to end before new ones may begin"),
}
"""Colour and words, by the cause of most empty slots in a step."""
WAITS = {"sync": "waits for the longest response", "april": "keeps what is unfinished"}
"""What happens in the modes of the small picture, in words."""
OTHERWISE = ("#e4e4e4", "empty: rewards, prompts, requests that end")
SHOWN_TOKENS = 15_000
"""The occupancy panels show the time in which about this many tokens were trained."""
RATIOS = (
    ("decode_steps_to_target", "decode steps to\nsync's reward, of sync's"),
    ("rollout_cpu_s_to_target", "rollout CPU to\nsync's reward, of sync's"),
    ("decode_steps_per_step", "decode steps per\ntraining step, of sync's"),
)
"""Gains of each mode: name and words."""
PRICES = (
    ("off_policy_share", "trained tokens from\nolder weights"),
    ("reprefill_share", "input tokens computed\nagain, per trained token"),
)


def draw(settings: DemoSettings, arms: dict[str, list[ArmOutcome]], summary: dict[str, Any], path: Path) -> None:
    """Write the picture to ``path`` (PNG); time is in decode steps, on a server by the clock."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 10), layout="constrained")
    grid = figure.add_gridspec(len(arms) + 2, 1, height_ratios=[1.0] * len(arms) + [0.3, 3.4])
    below = grid[-1, 0].subgridspec(1, 3, width_ratios=[1.3, 1.3, 1.0])
    causes = _occupancy(figure, grid, settings, arms)
    _legend(figure.add_subplot(grid[-2, :]), causes)
    target = summary["target_step"], summary["target_reward"]
    _reward(figure.add_subplot(below[0]), arms, "step", "training steps", target)
    _reward(figure.add_subplot(below[1]), arms, "decode_steps", "decode steps (the rollout)", target)
    _gain_and_price(figure.add_subplot(below[2]), settings, arms)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def draw_slots(settings: DemoSettings, arms: dict[str, list[ArmOutcome]], path: Path) -> None:
    """Write the empty slots of sync and april to ``path`` (PNG); time as in :func:`draw`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.2), layout="constrained")
    unit = "hundredths of a second" if settings.served else "decode steps"
    shown = {name: _window(arms[name][0]) for name in WAITS}
    width = max(len(busy) for busy, _, _ in shown.values())
    for row, (name, (busy, ends, _)) in enumerate(shown.items()):
        axes = figure.add_subplot(len(shown), 1, row + 1)
        at = np.arange(len(busy) + 1)
        level = np.append(busy, busy[-1:])
        axes.fill_between(at, level, settings.slots, step="post", color=EMPTY[IdleCause.OVER_SAMPLING][0], linewidth=0)
        axes.fill_between(at, level, step="post", color=COLOURS[name], linewidth=0)
        for end in ends:
            axes.axvline(end, color="black", linewidth=1.5)
        empty = 1.0 - sum(busy) / (settings.slots * len(busy))
        axes.set_title(f"{name} {WAITS[name]}", fontsize=17, loc="left", color=COLOURS[name], fontweight="bold")
        axes.set_title(f"{empty:.0%} of the slots empty", fontsize=17, loc="right")
        if not row:
            axes.text(0.6 * ends[0], 0.7 * settings.slots, "empty", fontsize=15, ha="center", va="center")
        axes.set_xlim(0, width)
        axes.set_ylim(0, settings.slots)
        axes.set_yticks([0, settings.slots])
        axes.set_ylabel("busy slots", fontsize=15)
        axes.tick_params(labelsize=14)
        axes.spines[["top", "right"]].set_visible(False)
        if row < len(shown) - 1:
            axes.set_xticklabels([])
    axes.set_xlabel(f"{unit} (at each line a batch goes to training)", fontsize=15)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def _occupancy(figure: Any, grid: Any, settings: DemoSettings, arms: dict[str, list[ArmOutcome]]) -> set[str]:
    """Draw one panel per mode; return the causes of empty slots."""
    shown = {name: _window(rows[0]) for name, rows in arms.items()}
    width = max(len(busy) for busy, _, _ in shown.values())
    unit = "hundredths of a second" if settings.served else "decode steps"
    causes: set[str] = set()
    for row, (name, (busy, ends, steps)) in enumerate(shown.items()):
        axes = figure.add_subplot(grid[row, :])
        axes.fill_between(np.arange(len(busy)), busy, step="post", color=COLOURS[name], linewidth=0)
        begin = 0
        for end, cause in zip(ends, arms[name][0].measured.idle, strict=False):
            at = np.arange(begin, end + 1)
            level = np.append(busy[begin:end], busy[end - 1] if end > begin else 0)
            if len(level) and level.min() < settings.slots:
                axes.fill_between(at, level, settings.slots, step="post", color=_empty(cause)[0], linewidth=0)
                causes.add(cause)
            axes.axvline(end, color="black", linewidth=0.8)
            begin = end
        axes.set_xlim(0, width)
        axes.set_ylim(0, settings.slots)
        axes.set_ylabel("busy slots", fontsize=8)
        axes.tick_params(labelsize=8)
        trained = sum(sum(row) for row in arms[name][0].measured.lengths[:steps])
        empty = 1.0 - sum(busy) / (settings.slots * len(busy))
        axes.set_title(
            f"{LABELS[name]}: {steps} steps, {trained:,} tokens trained in {len(busy):,} {unit}; "
            f"{empty:.0%} of the slots empty", fontsize=9, loc="left", color=COLOURS[name], fontweight="bold",
        )  # fmt: skip
        if row == len(arms) - 1:
            axes.set_xlabel(f"{unit} (seed 0; at each line a batch goes to training)", fontsize=9)
        else:
            axes.set_xticklabels([])
    return causes


def _empty(cause: str) -> tuple[str, str]:
    return next((shown for known, shown in EMPTY.items() if known == cause), OTHERWISE)


def _legend(axes: Any, causes: set[str]) -> None:
    from matplotlib.patches import Patch

    axes.axis("off")
    words = dict.fromkeys(_empty(cause) for cause in sorted(causes))
    patches = [Patch(facecolor=colour, edgecolor="#999999", label=label) for colour, label in words]
    axes.legend(handles=patches, loc="center", ncols=2, fontsize=8.5, frameon=False)


def _window(arm: ArmOutcome) -> tuple[list[int], list[int], int]:
    """(busy slots, step ends, steps) from the start until about SHOWN_TOKENS were trained."""
    m = arm.measured
    tokens = np.cumsum([sum(row) for row in m.lengths])
    steps = min(int(np.searchsorted(tokens, SHOWN_TOKENS)) + 1, len(m.step_ends))
    return m.occupancy[: m.step_ends[steps - 1]], m.step_ends[:steps], steps


def _gain_and_price(axes: Any, settings: DemoSettings, arms: dict[str, list[ArmOutcome]]) -> None:
    """Bars: means over seeds, of ratios on the logarithms; lines: from the lowest seed to the highest."""
    height = 0.8 / len(arms)
    for number, (mode, of_mode) in enumerate(arms.items()):
        ratios = ratios_to_sync(settings, of_mode, arms["sync"])
        rows = [_ratio_bar(ratios[name]) for name, _ in RATIOS]
        rows += [_mean_bar([arm_figures(arm)[name] for arm in of_mode]) for name, _ in PRICES]
        for row, bar in enumerate(rows):
            if bar is not None:
                mean, low, high = bar
                at = row + (number - (len(arms) - 1) / 2) * height
                axes.barh(at, mean, height=0.9 * height, color=COLOURS[mode])
                axes.plot([low, high], [at, at], color="black", linewidth=1)
                axes.text(max(high, mean) + 0.02, at, f"{mean:.2f}", fontsize=7, va="center")
    labels = [words for _, words in (*RATIOS, *PRICES)]
    axes.axvline(1.0, color=COLOURS["sync"], linewidth=1, linestyle="--")
    axes.axhline(len(RATIOS) - 0.5, color="black", linewidth=0.6)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_title("The gain, and below the line its price", fontsize=10)
    axes.set_xlabel("less is better (lines: all seeds)", fontsize=9)


Bar = tuple[float, float, float]
"""Mean, lowest and highest seed."""


def _ratio_bar(logs: list[float]) -> Bar | None:
    """Return the bar of log ratios; None without any, or where half of the seeds never got there."""
    mean = with_censored(logs).mean
    if not math.isfinite(mean):
        return None
    reached = [log for log in logs if math.isfinite(log)]
    return math.exp(mean), math.exp(min(reached)), math.exp(max(reached))


def _mean_bar(values: list[float]) -> Bar:
    return float(np.mean(values)), min(values), max(values)


def _reward(axes: Any, arms: dict[str, list[ArmOutcome]], of: str, label: str, target: tuple[int, float]) -> None:
    """Draw means over seeds of what was spent and of the reward, at each evaluation."""
    for name, rows in arms.items():
        spent = np.array([series(arm, of) for arm in rows]).mean(axis=0)
        rewards = np.array([series(arm, "reward") for arm in rows])
        axes.plot(spent, rewards.mean(axis=0), color=COLOURS[name], marker="o", markersize=3, label=LABELS[name])
        if len(rows) > 1:
            axes.fill_between(
                spent, rewards.min(axis=0), rewards.max(axis=0), color=COLOURS[name], alpha=0.12, linewidth=0
            )
    step, reward = target
    axes.axhline(reward, color="black", linewidth=0.8, linestyle=":")
    axes.annotate(
        f"sync's reward of step {step}", (0.01, reward), xycoords=("axes fraction", "data"), fontsize=8, ha="left",
        va="bottom", xytext=(0, 1), textcoords="offset points",
    )  # fmt: skip
    axes.set_title("Held-out reward (bands: all seeds)", fontsize=10)
    axes.set_xlabel(label, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
