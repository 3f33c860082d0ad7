"""The picture of a loop of generation and training: who works when, throughput, who waits, token ages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from april.simulate.figure import averaged, colour
from april.simulate.measure import Measured

CONTINUOUS, TRAINER, LIMIT = "#2e8b57", "#7a4a9e", "black"
SHOWN_BOUNDS = (1, 4)
"""Of the continuous modes, those that get a panel over time; where none of them is run, all that are."""
SHOWN_BATCHES = 6
"""The panels over time show the time in which sync takes this many batches."""


def draw_loop(report: dict[str, Any], runs: dict[str, Measured], path: Path) -> None:
    """Write the picture to ``path`` (PNG)."""
    from matplotlib.figure import Figure

    shown = {name: run for name, run in runs.items() if _bound(report, name) in (None, *SHOWN_BOUNDS)}
    if not any(_bound(report, name) for name in shown):
        shown = runs
    figure = Figure(figsize=(12, 4.5 + 1.5 * len(shown)), layout="constrained")
    grid = figure.add_gridspec(len(shown) + 1, 3, height_ratios=[1.0] * len(shown) + [2.6])
    _over_time(figure, grid, report, shown)
    bottom = len(shown)
    _throughput(figure.add_subplot(grid[bottom, 0]), report)
    _idle(figure.add_subplot(grid[bottom, 1]), report)
    _staleness(figure.add_subplot(grid[bottom, 2]), report)
    for axes in figure.axes:
        axes.tick_params(labelsize=8)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _bound(report: dict[str, Any], name: str) -> int | None:
    m = report["modes"][name]
    return m["max_staleness"] if m["generation"] == "continuous" else None


def _over_time(figure: Any, grid: Any, report: dict[str, Any], runs: dict[str, Measured]) -> None:
    sync_ends = runs["sync"].step_ends
    until = sync_ends[min(SHOWN_BATCHES, len(sync_ends)) - 1]
    slots = max(report["modes"][name]["in_flight"] for name in runs)
    for row, (name, run) in enumerate(runs.items()):
        m = report["modes"][name]
        axes = figure.add_subplot(grid[row, :])
        times, mean = averaged(run.busy, until)
        axes.fill_between(times, mean, step="post", color=colour(name, CONTINUOUS), linewidth=0)
        axes.axhline(m["in_flight"], color="black", linewidth=0.8, linestyle=":")
        trained = [(began, min(ended, until) - began) for began, ended in run.trainings if began < until]
        axes.broken_barh(trained, (-0.24 * slots, 0.16 * slots), facecolors=TRAINER, edgecolors="white", linewidth=0.6)
        batches = sum(end <= until for end in run.step_ends)
        axes.text(
            0.995, 0.93,
            f"{name}: {batches} batches; slots idle {m['bubble']:.0%}, trainer {m['trainer_idle_share']:.0%}",
            transform=axes.transAxes, ha="right", va="top", fontsize=9,
            bbox={"facecolor": "white", "alpha": 0.85, "linewidth": 0},
        )  # fmt: skip
        axes.set_xlim(0, until)
        axes.set_ylim(-0.28 * slots, 1.06 * slots)
        axes.set_ylabel("busy slots", fontsize=8)
        if row == 0:
            w, loop = report["workload"], report["loop"]
            axes.set_title(
                f"{w['model']}, {w['engines']} x {w['tensor_parallel']} x {w['gpu']}, {loop['placement']} trainer with "
                f"{loop['train_s']:.3g} s per batch: busy decode slots, and below when the trainer trains", fontsize=10,
            )  # fmt: skip
        if row == len(runs) - 1:
            axes.set_xlabel("seconds after the ramp", fontsize=9)
        else:
            axes.set_xticklabels([])


def _names(axes: Any, report: dict[str, Any]) -> None:
    names = [name.replace(" ", "\n") for name in report["modes"]]
    axes.set_xticks(range(len(names)), names, fontsize=8 if len(names) < 8 else 5)


def _throughput(axes: Any, report: dict[str, Any]) -> None:
    for x, (name, m) in enumerate(report["modes"].items()):
        axes.bar(x, m["trained_tokens_per_s"], 0.7, color=colour(name, CONTINUOUS))
        limit = m["trained_tokens_per_s"] / m["fraction_of_limit"]
        axes.plot([x - 0.42, x + 0.42], [limit, limit], color=LIMIT, linewidth=1.6)
        words = f"{m['fraction_of_limit']:.0%}\n{m['speed_up']:.2f}x"
        axes.text(x, 0.97 * m["trained_tokens_per_s"], words, fontsize=8, ha="center", va="top", color="white")
    _names(axes, report)
    axes.set_title("Tokens trained per second (lines: the limit)", fontsize=10)


def _idle(axes: Any, report: dict[str, Any]) -> None:
    for x, (name, m) in enumerate(report["modes"].items()):
        first = x == 0
        axes.bar(x - 0.2, m["bubble"], 0.38, color=colour(name, CONTINUOUS), label="decode slots" if first else None)
        axes.bar(x + 0.2, m["trainer_idle_share"], 0.38, color=TRAINER, label="trainer" if first else None)
    _names(axes, report)
    axes.set_ylim(0, 1)
    axes.legend(fontsize=8)
    axes.set_title("Share of the time idle", fontsize=10)


def _staleness(axes: Any, report: dict[str, Any]) -> None:
    for x, (name, m) in enumerate(report["modes"].items()):
        axes.bar(x, m["staleness_mean"], 0.7, color=colour(name, CONTINUOUS))
        axes.plot([x - 0.42, x + 0.42], [m["staleness_max"]] * 2, color=LIMIT, linewidth=1.6)
        axes.text(x, m["staleness_max"], f"{m['off_policy_share']:.0%}", fontsize=8, ha="center", va="bottom")
    _names(axes, report)
    axes.set_title("Staleness: mean, max (line), off-policy share", fontsize=10)
    axes.set_ylabel("updates", fontsize=9)
