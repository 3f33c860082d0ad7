"""The picture of a report: step times over the bandwidth limit, exactness, tokens per second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

NO_PICTURE = "no picture: matplotlib is not installed (pip install matplotlib); gpu.json has all figures"


def draw(report: dict[str, Any], path: Path) -> bool:
    """Write what is known so far to ``path`` (PNG); False: there is no matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    shapes = report["shapes"]
    figure = Figure(figsize=(4.2 * max(1, len(shapes)), 11), layout="constrained")
    machine = report.get("machine", {})
    bandwidth = report.get("bandwidth", {}).get("bytes_per_s", 0.0)
    figure.suptitle(
        f"{machine.get('device', '')}, {report.get('dtype', '')}: copies at {bandwidth / 1e9:.0f} GB/s\ntorch "
        f"{machine.get('torch', '')}, transformers {machine.get('transformers', '')}", fontsize=9,
    )  # fmt: skip
    grid = figure.add_gridspec(3, max(1, len(shapes)))
    for column, (name, found) in enumerate(shapes.items()):
        _steps(figure.add_subplot(grid[0, column]), name, found.get("step_times", {}).get("points", []))
        _schedules(figure.add_subplot(grid[1, column]), found.get("schedules", {}).get("arms", {}))
        _exactness(figure.add_subplot(grid[2, column]), found.get("exactness", {}))
    for axes in figure.axes:
        axes.tick_params(labelsize=8)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return True


def _steps(axes: Any, name: str, points: list[dict[str, Any]]) -> None:
    known = [p for p in points if "step_s" in p]
    for i, asked in enumerate(sorted({p["asked"] for p in known})):
        line = sorted((p for p in known if p["asked"] == asked), key=lambda p: p["batch"])
        batches = [p["batch"] for p in line]
        axes.plot(batches, [1e3 * p["step_s"] for p in line], f"C{i}o-", markersize=3, label=f"{asked} tokens each")
        axes.plot(batches, [1e3 * p["limit_s"] for p in line], f"C{i}:")
    axes.set(xscale="log", yscale="log")
    axes.set_title(f"{name}: a decode step (dotted: reading memory alone)", fontsize=9)
    axes.set_xlabel("sequences", fontsize=8)
    axes.set_ylabel("milliseconds", fontsize=8)
    if known:
        axes.legend(fontsize=7)


def _schedules(axes: Any, arms: dict[str, Any]) -> None:
    known = {name: arm for name, arm in arms.items() if "trained_per_s" in arm}
    for i, (name, arm) in enumerate(known.items()):
        axes.bar(i, arm["trained_per_s"], color=f"C{i}")
        text = f"{arm['trained_per_s']:.0f}"
        if "share_of_limit" in arm:
            text += f"\n{arm['share_of_limit']:.0%} of the limit"
        axes.text(i, arm["trained_per_s"], text, ha="center", va="bottom", fontsize=7)
        axes.text(i, 0, f"{name}\n{arm['in_flight']} in flight", ha="center", va="bottom", fontsize=7, color="white")
    axes.set_xticks([])
    axes.margins(y=0.2)
    axes.set_title("trained tokens per second of rollout", fontsize=9)


def _exactness(axes: Any, found: dict[str, Any]) -> None:
    rows = (("april", "april"), ("own_padded", "transformers, padded"), ("own_cached", "transformers, cached"))
    for i, (key, label) in enumerate(rows):
        figures = found.get(key)
        if figures:
            axes.plot(range(3), [max(figures[k], 1e-9) for k in ("mean", "p99", "max")], f"C{i}o-", label=label)
    axes.set_xticks(range(3), ["mean", "p99", "max"])
    axes.set_yscale("log")
    axes.set_title("log-probabilities against a forward pass alone (nats)", fontsize=9)
    if axes.lines:
        axes.legend(fontsize=7)
