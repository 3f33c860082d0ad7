"""Draws the results of a simulation: busy slots, lengths, throughput against the limit, token ages, training loop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from april.simulate.run import ScheduleMeasurement
from april.simulate.workload import with_quorum

COLOURS = {"sync": "#8a8a8a", "april": "#1b6ca8", "refill": "#d1603d", "tail": "#b8860b"}
WITH_QUORUM = {"april": "#6fa8d6", "refill": "#e59a80"}
CONTINUOUS, TRAINER = "#2e8b57", "#7a4a9e"
SHOWN_SYNC_STEPS, SHOWN_SYNC_BATCHES = 4, 6
"""Panels over time end when the mode ``sync`` has delivered this many steps (or batches, if training takes time)."""
SHOWN_BOUNDS = (1, 4)
"""Continuous modes with these values of max_staleness get a panel over time; if there are none, all modes get one."""
PIXELS = 1500
"""Number of points of a curve of busy slots; more points could not be seen."""
OLDEST_SHOWN = 5


def draw(report: dict[str, Any], runs: dict[str, ScheduleMeasurement], path: Path) -> None:
    """Draw a simulation in which training takes no time, and write the picture to ``path`` as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 11), layout="constrained")
    heights = [1.0] * len(runs) + [2.6] * (2 if report["sweep"] else 1)
    grid = figure.add_gridspec(len(heights), 3, height_ratios=heights)
    w = report["workload"]
    title = f"{_engines(w)}: busy decode slots over time (lines: a batch goes to training; dotted: all slots)"
    for name, axes, until in _over_time(figure, grid, report, runs, SHOWN_SYNC_STEPS, title):
        m, ends = report["modes"][name], [end for end in runs[name].step_ends if end <= until]
        for end in ends:
            axes.axvline(end, color="black", linewidth=0.6, alpha=0.5)
        axes.set_ylim(0, 1.06 * max(m["in_flight"] for m in report["modes"].values()))
        _note(axes, f"{_label(report, name)}: {len(ends)} steps; bubble {m['bubble']:.0%} of {m['in_flight']} slots")
    row = len(runs)
    _lengths(figure.add_subplot(grid[row, 0]), report)
    _throughput(figure.add_subplot(grid[row, 1]), report)
    _ages(figure.add_subplot(grid[row, 2]), report)
    if report["sweep"]:
        _sweep(figure, grid, row + 1, report)
    for axes in figure.axes:
        axes.tick_params(labelsize=8)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _label(report: dict[str, Any], name: str) -> str:
    m = report["modes"][name]
    mode, _, quorum = name.partition(" q=")
    words = {"april": f", N' = {m['over_sampling_batch_size']}", "refill": f", {m['in_flight']} in flight"}
    words["tail"] = words["april"]
    return mode + words.get(mode, "") + (f", quorum {quorum}" if quorum else "")


def _colour(name: str) -> str:
    mode, _, quorum = name.partition(" q=")
    return (WITH_QUORUM if quorum else COLOURS).get(mode, CONTINUOUS)


def _engines(w: dict[str, Any]) -> str:
    return f"{w['model']}, {w['engines']} x {w['tensor_parallel']} x {w['gpu']}"


def _over_time(
    figure: Any, grid: Any, report: dict[str, Any], runs: dict[str, ScheduleMeasurement], steps: int, title: str
) -> Iterator[tuple[str, Any, float]]:
    """Draw a panel of busy slots for each mode; yield (mode, axes, last second).

    The panels end when the mode ``sync`` has delivered ``steps`` steps.
    """
    ends = runs["sync"].step_ends
    until = ends[min(steps, len(ends)) - 1]
    for row, (name, run) in enumerate(runs.items()):
        axes = figure.add_subplot(grid[row, :])
        times, mean = _averaged(run.busy, until)
        axes.fill_between(times, mean, step="post", color=_colour(name), linewidth=0)
        axes.axhline(report["modes"][name]["in_flight"], color="black", linewidth=0.8, linestyle=":")
        axes.set_xlim(0, until)
        axes.set_ylabel("busy slots", fontsize=8)
        if row == 0:
            axes.set_title(title, fontsize=10)
        if row == len(runs) - 1:
            axes.set_xlabel("seconds after the ramp", fontsize=9)
        else:
            axes.set_xticklabels([])
        yield name, axes, until


def _note(axes: Any, text: str) -> None:
    axes.text(
        0.995, 0.92, text, transform=axes.transAxes, ha="right", va="top", fontsize=9,
        bbox={"facecolor": "white", "alpha": 0.85, "linewidth": 0},
    )  # fmt: skip


def _averaged(busy: list[tuple[float, int]], until: float) -> tuple[Any, Any]:
    """Return (edges, means) of a step function over PIXELS equal intervals of [0, until]."""
    at = np.array([0.0] + [time for time, _ in busy])
    level = np.array([busy[0][1]] + [running for _, running in busy], np.float64)
    integral = np.concatenate([[0.0], np.cumsum(np.diff(at) * level[:-1])])
    edges = np.linspace(0.0, until, PIXELS + 1)
    mean = np.diff(np.interp(edges, at, integral)) / np.diff(edges)
    return edges, np.append(mean, mean[-1])


def _lengths(axes: Any, report: dict[str, Any]) -> None:
    lengths = report["lengths"]
    axes.stairs(lengths["histogram"]["counts"], lengths["histogram"]["edges"], fill=True, color="#5b7f5b")
    axes.set_yscale("log")
    top = axes.get_ylim()[1]
    for label, value, height in (("median", lengths["median"], 0.9), ("p99", lengths["percentiles"]["p99"], 0.5)):
        right = value > 0.6 * lengths["longest"]
        axes.axvline(value, color="black", linewidth=1, linestyle="--")
        axes.text(value, top * height, f" {label} {value:,.0f} ", fontsize=8, va="top", ha="right" if right else "left")
    ratio = lengths["longest_of_a_step_over_median"]
    axes.set_title(f"Response lengths; longest of a step = {ratio:.1f} medians", fontsize=10)
    axes.set_xlabel("tokens", fontsize=9)
    axes.set_ylabel(f"of {lengths['samples']:,} responses", fontsize=9)


def _throughput(axes: Any, report: dict[str, Any]) -> None:
    for x, (name, m) in enumerate(report["modes"].items()):
        axes.bar(x, m["trained_tokens_per_s"], 0.6, color=_colour(name))
        limit = m["limit_tokens_per_s"]
        axes.plot([x - 0.38, x + 0.38], [limit, limit], color="black", linewidth=1.6)
        axes.text(x, limit, f"limit at {m['in_flight']}", fontsize=8, ha="center", va="bottom")
        words = f"{m['fraction_of_limit']:.0%}\nof limit\n\n{m['speed_up']:.2f}x"
        axes.text(x, 0.97 * m["trained_tokens_per_s"], words, fontsize=9, ha="center", va="top", color="white")
    names = [_label(report, name).replace(", ", ",\n") for name in report["modes"]]
    axes.set_xticks(range(len(names)), names, fontsize=8 if len(names) < 4 else 6)
    axes.set_ylim(top=1.06 * max(m["limit_tokens_per_s"] for m in report["modes"].values()))
    axes.set_title("Tokens trained per second of rollout", fontsize=10)


def _ages(axes: Any, report: dict[str, Any]) -> None:
    from matplotlib import colormaps

    colours = colormaps["YlOrRd"]
    for age in range(OLDEST_SHOWN + 1):
        bottom, height = [], []
        for m in report["modes"].values():
            shares = m["trained_token_age_shares"]
            bottom.append(sum(shares[:age]))
            height.append(sum(shares[age:]) if age == OLDEST_SHOWN else sum(shares[age : age + 1]))
        label = f"{age} or more" if age == OLDEST_SHOWN else f"{age}"
        axes.bar(range(len(height)), height, 0.6, bottom=bottom, color=colours(0.05 + 0.18 * age), label=label)
    names = [f"{name}\noff-policy {m['off_policy_share']:.0%}" for name, m in report["modes"].items()]
    axes.set_xticks(range(len(names)), names, fontsize=8 if len(names) < 4 else 6)
    axes.set_xlim(-0.5, 1.14 * len(names))
    axes.legend(title="updates", fontsize=7, title_fontsize=7, loc="center right")
    axes.set_title("Age of the trained tokens (share)", fontsize=10)


def _sweep(figure: Any, grid: Any, row: int, report: dict[str, Any]) -> None:
    rows, name = report["sweep"], with_quorum("refill", report["workload"]["group_quorum"])
    refill = report["modes"][name]
    x = [r["ratio"] for r in rows]
    panels = (
        ("Tokens trained per second", (("N' once per step", "trained_tokens_per_s", COLOURS["april"]),), 1.0),
        (
            "Shares and ratios",
            (
                ("off-policy share", "off_policy_share", COLOURS["april"]),
                ("re-prefilled / generated", "reprefill_per_generated_token", "#5b7f5b"),
            ),
            1.0,
        ),
        ("Tokens held over a step's end (M)", (("N' once per step", "held_tokens_mean", COLOURS["april"]),), 1e-6),
    )
    for column, (title, lines, scale) in enumerate(panels):
        axes = figure.add_subplot(grid[row, column])
        for what, key, own in lines:
            axes.plot(x, [scale * r[key] for r in rows], marker="o", markersize=4, color=own, label=what)
            dashes = COLOURS["refill"] if len(lines) == 1 else own
            label = f"{what}, refill" if len(lines) > 1 else _label(report, name)
            axes.axhline(scale * refill[key], color=dashes, linestyle="--", linewidth=1.2, label=label)
        axes.set_ylim(bottom=0)
        axes.set_xticks(x, [f"{value:g}" for value in x])
        axes.set_xlabel("N'/N", fontsize=9)
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="lower right")


def draw_loop(report: dict[str, Any], runs: dict[str, ScheduleMeasurement], path: Path) -> None:
    """Draw a simulation in which training takes time, and write the picture to ``path`` as PNG."""
    from matplotlib.figure import Figure

    shown = {name: run for name, run in runs.items() if _bound(report, name) in (None, *SHOWN_BOUNDS)}
    if not any(_bound(report, name) for name in shown):
        shown = runs
    figure = Figure(figsize=(12, 4.5 + 1.5 * len(shown)), layout="constrained")
    grid = figure.add_gridspec(len(shown) + 1, 3, height_ratios=[1.0] * len(shown) + [2.6])
    w, loop = report["workload"], report["loop"]
    title = (
        f"{_engines(w)}, {loop['placement']} trainer with {loop['train_s']:.3g} s per batch: busy decode slots, and "
        "below when the trainer trains"
    )
    slots = max(report["modes"][name]["in_flight"] for name in shown)
    for name, axes, until in _over_time(figure, grid, report, shown, SHOWN_SYNC_BATCHES, title):
        m, run = report["modes"][name], shown[name]
        trained = [(began, min(ended, until) - began) for began, ended in run.trainings if began < until]
        axes.broken_barh(trained, (-0.24 * slots, 0.16 * slots), facecolors=TRAINER, edgecolors="white", linewidth=0.6)
        axes.set_ylim(-0.28 * slots, 1.06 * slots)
        batches = sum(end <= until for end in run.step_ends)
        idle = f"slots idle {m['bubble']:.0%}, trainer {m['trainer_idle_share']:.0%}"
        _note(axes, f"{name}: {batches} batches; {idle}")
    bottom = len(shown)
    _loop_throughput(figure.add_subplot(grid[bottom, 0]), report)
    _idle(figure.add_subplot(grid[bottom, 1]), report)
    _staleness(figure.add_subplot(grid[bottom, 2]), report)
    for axes in figure.axes:
        axes.tick_params(labelsize=8)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _bound(report: dict[str, Any], name: str) -> int | None:
    m = report["modes"][name]
    return m["max_staleness"] if m["generation"] == "continuous" else None


def _names(axes: Any, report: dict[str, Any]) -> None:
    names = [name.replace(" ", "\n") for name in report["modes"]]
    axes.set_xticks(range(len(names)), names, fontsize=8 if len(names) < 8 else 5)


def _loop_throughput(axes: Any, report: dict[str, Any]) -> None:
    for x, (name, m) in enumerate(report["modes"].items()):
        axes.bar(x, m["trained_tokens_per_s"], 0.7, color=_colour(name))
        limit = m["trained_tokens_per_s"] / m["fraction_of_limit"]
        axes.plot([x - 0.42, x + 0.42], [limit, limit], color="black", linewidth=1.6)
        words = f"{m['fraction_of_limit']:.0%}\n{m['speed_up']:.2f}x"
        axes.text(x, 0.97 * m["trained_tokens_per_s"], words, fontsize=8, ha="center", va="top", color="white")
    _names(axes, report)
    axes.set_title("Tokens trained per second (lines: the limit)", fontsize=10)


def _idle(axes: Any, report: dict[str, Any]) -> None:
    for x, (name, m) in enumerate(report["modes"].items()):
        first = x == 0
        axes.bar(x - 0.2, m["bubble"], 0.38, color=_colour(name), label="decode slots" if first else None)
        axes.bar(x + 0.2, m["trainer_idle_share"], 0.38, color=TRAINER, label="trainer" if first else None)
    _names(axes, report)
    axes.set_ylim(0, 1)
    axes.legend(fontsize=8)
    axes.set_title("Share of the time idle", fontsize=10)


def _staleness(axes: Any, report: dict[str, Any]) -> None:
    for x, (name, m) in enumerate(report["modes"].items()):
        axes.bar(x, m["staleness_mean"], 0.7, color=_colour(name))
        axes.plot([x - 0.42, x + 0.42], [m["staleness_max"]] * 2, color="black", linewidth=1.6)
        axes.text(x, m["staleness_max"], f"{m['off_policy_share']:.0%}", fontsize=8, ha="center", va="bottom")
    _names(axes, report)
    axes.set_title("Staleness: mean, max (line), off-policy share", fontsize=10)
    axes.set_ylabel("updates", fontsize=9)
