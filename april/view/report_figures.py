"""Draws the pictures of ``april report`` as SVG.

A place is a request slot of an engine.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from april.core.partial_buffer import IdleCause
from april.view.run_data import RecordedBatch, RunData, mean_busy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]
WIDE, HALF = 9.6, 6.4
"""Width of a picture in inches, if one run has the whole page and if several runs stand side by side."""
POINTS_PER_INCH = 50
"""Points of a curve over time per inch of the picture's width; more points could not be seen."""
INCHES_PER_COLUMN = 1.6
"""Width of a column of a legend, in inches."""


class Colour(StrEnum):
    """A colour of the page."""

    TEXT = "#1f2328"
    FAINT = "#d5d9de"
    SOFT = "#6a737d"
    AGE0 = "#2f7fb8"
    AGE1 = "#f2b544"
    AGE2 = "#e07b39"
    AGE3 = "#c1402f"
    AGE4 = "#7d1f4b"
    EVALUATION = "#8a8fd1"
    EMPTY = "#eceff2"


AGES = (Colour.AGE0, Colour.AGE1, Colour.AGE2, Colour.AGE3, Colour.AGE4)
BELOW_AXES = -0.42
"""Offset of the legend from the bottom of the axes, in inches; leaves room for tick labels and axis label."""
IDLE = {
    IdleCause.OVER_SAMPLING: ("N' are in work", "#9aa4af"), IdleCause.TRAINER: ("no batch asked for", "#c58bb8"),
    IdleCause.UPDATE: ("new weights", "#7fb7a5"), IdleCause.BOUND: ("max_staleness", "#d9c37a"),
    IdleCause.FUNCTIONS: ("only functions run", "#8f9fd9"), IdleCause.ENGINES: ("none takes work", "#d98f7a"),
    IdleCause.EVALUATION: ("", Colour.EVALUATION), IdleCause.STOP: ("the rest is stopped", "#6f7f99"),
    IdleCause.PROMPTS: ("drawn, or ended", "#b5c97a"), IdleCause.HELD: ("max_held_tokens", "#a98f6f"),
    IdleCause.PAUSE: ("", "#7ab8d9"),
}  # fmt: skip
"""Label and colour of each reason why places (slots for requests) may be idle."""
MARKED = 24
"""Largest number of points of a curve with markers, without which a single point would be invisible."""


def cause_label(cause: IdleCause) -> str:
    """Return the label of an idle cause: the name of its metric without ``idle_``, and its meaning."""
    meant, _ = IDLE[cause]
    return f"{cause}: {meant}" if meant else str(cause)


def _points(width: float) -> int:
    return round(POINTS_PER_INCH * width)


def _columns(width: float) -> int:
    return round(width / INCHES_PER_COLUMN)


def busy_places(run: RunData, name: str, width: float) -> str:
    """Draw the busy places over the whole run, coloured by the age of the responses that they generate."""
    figure = new_figure(width, 2.9)
    axes, points = figure.add_subplot(), _points(width)
    edges = np.linspace(0.0, max(run.seconds, 1e-6), points + 1)
    there, below = run.engine_history, np.zeros(points)
    ends = [*there.since_s, max(float(edges[-1]), there.since_s[-1])]
    axes.stairs(there.places, ends, fill=True, color=Colour.EMPTY, linewidth=0)
    for label, ink, rows in _by_age(run):
        top = below + mean_busy(run.began_s[rows], run.ended_s[rows], edges)
        if (top > below).any() or label == "fresh":
            axes.stairs(top, edges, baseline=below, fill=True, color=ink, linewidth=0, label=label)
        below = top
    axes.set_xlim(0.0, float(edges[-1]))
    axes.set_ylim(0, 1.04 * max(run.places, float(below.max(initial=0.0))))
    style_axes(axes, "", "seconds", "places")
    whole_numbers(axes.yaxis)
    legend(axes, _columns(width))
    return svg_of(figure, name, "busy places over the whole run, coloured by the age of the responses")


def _by_age(run: RunData) -> list[tuple[str, Colour, NDArray[np.bool_]]]:
    """Return (label, colour, mask of requests [R]) for each age, and for evaluations at the end."""
    out = []
    for age, ink in enumerate(AGES):
        last = age == len(AGES) - 1
        rows = (run.age >= age if last else run.age == age) & ~run.evaluation
        words = "fresh" if age == 0 else f"{age} update{'s' if age > 1 else ''} old{' or more' if last else ''}"
        out.append((words, ink, rows))
    return [*out, ("evaluation", Colour.EVALUATION, run.evaluation)]


# ---------------------------------------------------------------- over the steps


def _over_steps(batches: Sequence[RecordedBatch], metric: str, points: int) -> tuple[Floats, Floats]:
    """Return (step numbers, values) of a metric; more than ``points`` steps are averaged to ``points`` values."""
    values = np.array([batch.metrics.get(metric, np.nan) for batch in batches], np.float64)
    steps = np.array([batch.id for batch in batches], np.float64)
    if len(values) <= points:
        return steps, values
    edges = np.linspace(0, len(values), points + 1).astype(np.int64)
    means = [np.nanmean(values[a:b]) if np.isfinite(values[a:b]).any() else np.nan for a, b in pairwise(edges)]
    return np.array([steps[a:b].mean() for a, b in pairwise(edges)]), np.array(means)


def _edges(steps: Floats) -> Floats:
    """Return the edges of bars around the step numbers, half way between neighbours."""
    return np.concatenate((steps[:1] - 0.5, (steps[1:] + steps[:-1]) / 2, steps[-1:] + 0.5))


def time_shares(run: RunData, name: str, width: float) -> str:
    """Draw for each batch the share of (places x time) that was busy, and the shares that were idle for each cause."""
    batches = run.batches
    figure = new_figure(width, 2.9)
    axes = figure.add_subplot()
    points = _points(width) // 2
    steps, busy = _over_steps(batches, "engines_busy", points)
    layers: list[tuple[str, str, Floats]] = [("busy", Colour.AGE0, busy)]
    for cause, (_, ink) in IDLE.items():
        if any(batch.metrics.get(f"idle_{cause}") for batch in batches):
            layers.append((cause_label(cause), ink, _over_steps(batches, f"idle_{cause}", points)[1]))
    below = np.zeros(len(steps))
    edges = _edges(steps)
    for label, ink, values in layers:
        top = below + np.nan_to_num(values)
        axes.stairs(top, edges, baseline=below, fill=True, color=ink, linewidth=0, label=label)
        below = top
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    style_axes(axes, "", "batch", "share of places x time")
    whole_numbers(axes.xaxis)
    legend(axes, _columns(width) // 2)  # fewer columns, as causes have long names
    return svg_of(figure, name, "share of places and time, batch by batch: busy, or empty and why")


PARTS = (Colour.AGE2, "#7fb7a5", Colour.EVALUATION, Colour.AGE4, "#d9c37a", "#a98f6f")
"""Colours of the named parts of rewards; parts beyond these are not drawn."""


def rewards(run: RunData, name: str, width: float) -> str:
    """Draw the mean reward of each batch, and running means of its parts; empty if there are no rewards."""
    if not run.settings.has_reward or not any("reward_mean" in batch.metrics for batch in run.batches):
        return ""

    parts = sorted({metric for batch in run.batches for metric in batch.metrics if metric.startswith("reward_mean/")})
    figure = new_figure(width, 2.4)
    axes = figure.add_subplot()
    steps, values = _over_steps(run.batches, "reward_mean", _points(width) // 2)
    window = max(1, len(values) // 10)
    smooth = _trailing_mean(values, window)
    axes.plot(steps, values, color=Colour.AGE0, linewidth=1.0, alpha=0.55 if window > 1 else 1.0,
              marker="o" if len(values) <= MARKED else "", markersize=3, label="mean of a batch")  # fmt: skip
    if window > 1:
        axes.plot(steps, smooth, color=Colour.AGE3, linewidth=1.8, label="running mean")
    for part, ink in zip(parts, PARTS, strict=False):
        values = _trailing_mean(_over_steps(run.batches, part, _points(width) // 2)[1], window)
        axes.plot(steps, values, color=ink, linewidth=1.0, linestyle="--", label=part.partition("/")[2])
    style_axes(axes, "", "batch", "reward")
    whole_numbers(axes.xaxis)
    legend(axes, _columns(width))
    return svg_of(figure, name, "mean reward of each batch")


def _trailing_mean(values: Floats, window: int) -> Floats:
    """Return for each value the mean of the last ``window`` values up to it; NaN is left out."""
    there = np.isfinite(values)
    sums = np.concatenate(((0.0,), np.cumsum(np.where(there, values, 0.0))))
    counts = np.concatenate(((0,), np.cumsum(there)))
    at = np.arange(1, len(values) + 1)
    since = np.maximum(0, at - window)
    with np.errstate(invalid="ignore"):
        return np.asarray((sums[at] - sums[since]) / (counts[at] - counts[since]))


def staleness(run: RunData, name: str, width: float) -> str:
    """Draw the off-policy share and the staleness of each batch."""
    figure = new_figure(width, 2.9)
    left, right = figure.subplots(1, 2)
    points = _points(width) // 2
    steps, share = _over_steps(run.batches, "off_policy_share", points)
    mark = "o" if len(steps) <= MARKED else ""
    left.plot(steps, share, color=Colour.AGE2, linewidth=1.4, marker=mark, markersize=3)
    left.set_ylim(0, 1)
    left.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    style_axes(left, "off-policy share of the trained tokens", "batch")
    for metric, words, ink in (
        ("staleness_max", "oldest", Colour.AGE4), ("staleness_mean", "mean of the responses", Colour.AGE1)
    ):
        steps, values = _over_steps(run.batches, metric, points)
        right.plot(steps, values, color=ink, linewidth=1.4, label=words, marker=mark, markersize=3)
    bounds = [run.settings_at(batch).max_staleness for batch in run.batches]
    right.stairs(
        bounds, _edges(np.array([batch.id for batch in run.batches], np.float64)), baseline=None,
        color=Colour.SOFT, linewidth=0.9, linestyle=":", label="max_staleness",
    )  # fmt: skip
    right.set_ylim(bottom=0)
    style_axes(right, "staleness, in weight updates", "batch")
    for axis in (left.xaxis, right.xaxis, right.yaxis):
        whole_numbers(axis)
    legend(right, 2)
    return svg_of(figure, name, "off-policy share and staleness, batch by batch")


def lengths(run: RunData, name: str, width: float) -> str:
    """Draw histograms of the lengths of finished responses and of responses in batches; empty if there are none."""
    trained = np.array([length for batch in run.batches for length in batch.lengths], np.float64)
    finished = run.finished[run.finished > 0].astype(np.float64)
    both_of = np.concatenate((trained, finished))
    if not len(both_of):
        return ""
    low, high = max(1.0, float(both_of.min())), float(both_of.max())
    edges = np.geomspace(low, max(high, low + 1.0) * 1.0001, 41)
    figure = new_figure(width, 2.6)
    axes = figure.add_subplot()
    for values, words, ink, fill in (
        (finished, "generated to the end", Colour.AGE0, True), (trained, "in batches", Colour.AGE3, False),
    ):  # fmt: skip
        if len(values):
            share = np.histogram(values, edges)[0] / len(values)
            label, width = f"{words}: {len(values):,}", 0 if fill else 1.6
            axes.stairs(share, edges, fill=fill, color=ink, linewidth=width, label=label)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.xaxis.set_minor_formatter(lambda value, _: f"{value:,.0f}" if f"{value:.0e}"[0] in "25" else "")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    style_axes(axes, "", "response tokens", "share of the responses")
    legend(axes, 2)
    return svg_of(figure, name, "lengths of the responses generated and of those trained")


# ---------------------------------------------------------------- figures as SVG


def new_figure(width: float, height: float) -> Figure:
    """Return a matplotlib figure of this size in inches, without a background."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.patch.set_visible(False)
    return figure


def style_axes(axes: Axes, title: str = "", x: str = "", y: str = "") -> None:
    """Set the title and labels of axes, and draw text and lines in the page's colours."""
    axes.patch.set_visible(False)
    axes.set_title(title, loc="left", fontsize=10, color=Colour.TEXT)
    axes.set_xlabel(x, fontsize=9, color=Colour.SOFT)
    axes.set_ylabel(y, fontsize=9, color=Colour.SOFT)
    axes.tick_params(which="both", labelsize=8, color=Colour.FAINT, labelcolor=Colour.SOFT)
    for name, spine in axes.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(Colour.FAINT)


def whole_numbers(axis: Axis) -> None:
    """Put ticks at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins="auto", integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))


def legend(axes: Axes, columns: int) -> None:
    """Put the legend below the picture."""
    handles, _ = axes.get_legend_handles_labels()
    from matplotlib.transforms import ScaledTranslation

    figure = axes.get_figure()
    assert figure is not None
    below = axes.transAxes + ScaledTranslation(0.0, BELOW_AXES, figure.dpi_scale_trans)
    axes.legend(
        handles=handles, ncols=columns, loc="upper left", bbox_to_anchor=(0.0, 0.0), bbox_transform=below,
        borderaxespad=0.0, fontsize=8, frameon=False, labelcolor=Colour.TEXT, handlelength=1.1, columnspacing=1.2,
    )  # fmt: skip


def svg_of(figure: Figure, name: str, what: str) -> str:
    """Return a figure as HTML, which can be scrolled on a narrow screen.

    ``name`` makes the ids in the SVG unique, and ``what`` is the aria-label of the SVG.
    """
    from matplotlib import rc_context

    out = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", text)
    head, _, rest = text.partition(">")
    box = re.search(r'viewBox="[^"]*"', head)
    assert box is not None
    return f'<div class="scroll"><svg {box[0]} role="img" aria-label="{what}">{rest}</div>'
