"""Speed against age of the trained tokens: quorum 1, 0.75 and 0.5, N', tail batching, refill, bounds, continuous.

The workload of the paper's scripts (32 groups x 8, at most 16,384 tokens, four engines of two H100 with Qwen3-4B),
lengths lognormal with mean 3,000, sigma 0.6 between and 0.5 within prompts; the real core, beside a model that shares
no code with it (``benchmarks.quorum_model``; stepwise, refill none and sample). Speeds are over sync of the same seed;
training takes no time, but in continuous generation one batch time, and over sync with the same trainer.
Run: ``python -m benchmarks.frontier``; it writes ``runs/frontier/frontier.json`` and ``docs/images/frontier.png`` and
prints the table of ``docs/measurements.md``. ``--draw``: the same of the rows that were written, without a run.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import statistics
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from april.core.types import Refill
from april.simulate.simulation import Simulation
from april.simulate.workload import Schedule, Workload
from benchmarks.quorum_model import EngineCost, QuorumModel

GROUPS, SAMPLES = 32, 8
QUORUMS = (1.0, 0.75, 0.5)
OVER = (32, 36, 40, 44, 48, 56, 64, 80, 96)
"""N' with refill none."""
TAIL = (36, 40, 44, 48)
"""N' with tail batching, which is strictly on-policy and has whole groups."""
IN_WORK = (32, 36, 40, 48)
"""N' with refill group."""
IN_FLIGHT = (192, 256, 320)
"""With refill sample."""
BOUNDS = (1, 2, 3, 4, 5, 6, 7, 8)
"""max_staleness with refill sample at 256 in flight; the others have FREE."""
FREE = 8
"""A bound that does not bind at 256 in flight."""
CONTINUOUS_TRAIN_TIME = "1x"
MEAN_LEN, BETWEEN, WITHIN = 3000.0, 0.6, 0.5
MEDIAN_LEN = MEAN_LEN * math.exp(-(BETWEEN**2 + WITHIN**2) / 2)
ROWS, PICTURE = Path("runs/frontier/frontier.json"), Path("docs/images/frontier.png")
FIGURES = ("speed", "off_policy", "staleness", "staleness_max")


@dataclass(frozen=True, order=True)
class Case:
    """One way to schedule; ``over``: N'; ``continuous``: with a trainer that takes one batch time, else none."""

    kind: str
    quorum: float
    over: int
    in_flight: int
    bound: int

    @property
    def schedule(self) -> Schedule:
        """Of a workload whose max_staleness is ``bound``."""
        refill = {"continuous": Refill.SAMPLE, "tail": Refill.NONE}.get(self.kind) or Refill(self.kind)
        bound, tail = self.bound if self.kind == "continuous" else None, self.kind == "tail"
        return Schedule(self.over, refill, self.in_flight, bound, self.quorum, tail_batching=tail)

    @property
    def sync(self) -> Case:
        """What its speed is compared with; of the same trainer."""
        return replace(self, quorum=1.0, over=GROUPS, in_flight=GROUPS * SAMPLES, kind="none", bound=FREE)

    @property
    def name(self) -> str:
        """As in the table."""
        if self.kind == "none":
            return f"N' = {self.over}"
        if self.kind == "tail":
            return f"N' = {self.over}, tail batching"
        if self.kind == "group":
            return f"refill group, {self.over} in work"
        words = "refill sample" if self.kind == "sample" else "continuous"
        return f"{words}, {self.in_flight} in flight, bound {self.bound}"


def cases() -> Iterator[Case]:
    """All of them, each once."""
    full = GROUPS * SAMPLES
    yield from (Case("tail", 1.0, over, over * SAMPLES, FREE) for over in TAIL)
    for quorum in QUORUMS:
        yield from (Case("none", quorum, over, over * SAMPLES, FREE) for over in OVER)
        yield from (Case("group", quorum, over, over * SAMPLES, FREE) for over in IN_WORK)
        yield from (Case("sample", quorum, GROUPS, n, FREE) for n in IN_FLIGHT if n != full)
        yield from (Case("sample", quorum, GROUPS, full, bound) for bound in BOUNDS)
        yield from (Case("continuous", quorum, GROUPS, full, bound) for bound in BOUNDS)


def workload(bound: int, seed: int, train_time: str | None = None) -> Workload:
    """The reference workload with lengths of mean 3,000."""
    return Workload(
        groups=GROUPS, samples=SAMPLES, median_len=MEDIAN_LEN, sigma_between=BETWEEN, sigma_within=WITHIN,
        max_staleness=bound, train_time=train_time, seed=seed,
    )  # fmt: skip


def core(case: Case, seed: int, steps: int, ramp: int, train_time: str | None = None) -> dict[str, float]:
    """Tokens per second and ages by april's core; of steps after the ramp."""
    w = workload(case.bound, seed, train_time)
    simulation = Simulation(
        w.core_settings(case.schedule), w.cost, w.lengths, engines=w.engines, prompt_len=w.prompt_len, train_s=w.train_s
    )
    s = simulation.run(steps).summary(skip=ramp)
    return {
        "tokens_per_s": s["trained_tokens_per_s"],
        "off_policy": s["off_policy_share"],
        "staleness": s["staleness_mean"],
        "staleness_max": s["staleness_max"],
    }


def model(case: Case, seed: int, steps: int, ramp: int) -> dict[str, float]:
    """The same by the model."""
    w = workload(case.bound, seed)
    c = w.cost
    made = QuorumModel(
        EngineCost(c.base_s, c.per_sequence_s, c.per_kv_token_s, c.per_prefill_token_s),
        lambda group: np.minimum(w.lengths.group(group, SAMPLES), w.max_response_len).tolist(),
        quorum=case.quorum, over=case.over if case.kind == "none" else None, slots=case.in_flight, bound=case.bound,
        groups=GROUPS, n=SAMPLES, engines=w.engines, prompt=w.prompt_len,
    )  # fmt: skip
    made.run(steps)
    return made.figures(ramp)


def run(case: Case, seed: int, steps: int, ramp: int, base: dict[str, float] | None) -> dict[str, Any]:
    """One case with one seed: speeds over ``base``, sync's tokens per second by core and model (None: it is sync)."""
    train_time = CONTINUOUS_TRAIN_TIME if case.kind == "continuous" else None
    out = {"core": core(case, seed, steps, ramp, train_time)}
    if case.kind in ("none", "sample"):
        out["model"] = model(case, seed, steps, ramp)
    if base is None:
        return out
    return {
        who: {"speed": found["tokens_per_s"] / base[who]} | {k: found[k] for k in FIGURES[1:]}
        for who, found in out.items()
    }


@functools.cache
def sync_of(seed: int, steps: int, ramp: int) -> dict[bool, dict[str, float]]:
    """Tokens per second of sync by core and model, without (False) and with (True) the trainer of continuous cases."""
    sync = Case("none", 1.0, GROUPS, GROUPS * SAMPLES, FREE)
    alone = {who: found["tokens_per_s"] for who, found in run(sync, seed, steps, ramp, None).items()}
    trained = core(sync, seed, steps, ramp, CONTINUOUS_TRAIN_TIME)["tokens_per_s"]
    return {False: alone, True: {"core": trained}}


def _job(job: tuple[Case, int, int, int, dict[str, float]]) -> dict[str, Any]:
    return run(*job)


def frontier(
    chosen: Iterable[Case], seeds: int, steps: int, ramp: int, processes: int = 1
) -> Iterator[dict[str, Any]]:
    """One row per case: means over the seeds, and the standard error of each mean where there are several."""
    base = {seed: sync_of(seed, steps, ramp) for seed in range(1, seeds + 1)}
    jobs = [(case, seed, steps, ramp, base[seed][case.kind == "continuous"]) for case in chosen for seed in base]
    with ProcessPoolExecutor(processes) as pool:
        found = pool.map(_job, jobs)
        for case, group in itertools.groupby(zip(jobs, found, strict=True), key=lambda pair: pair[0][0]):
            by_seed = [row for _, row in group]
            yield asdict(case) | {"name": case.name} | {who: _mean([r[who] for r in by_seed]) for who in by_seed[0]}


def _mean(rows: list[dict[str, float]]) -> dict[str, float]:
    out: dict[str, float] = {}
    for key in FIGURES:
        values = [row[key] for row in rows]
        out[key] = round(max(values) if key == "staleness_max" else statistics.fmean(values), 4)
        if len(rows) > 1 and key != "staleness_max":
            out[f"{key}_error"] = round(statistics.stdev(values) / math.sqrt(len(values)), 4)
    return out


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: one line per schedule, the quorums side by side; the model's in brackets."""
    by_name: dict[str, dict[float, dict[str, Any]]] = {}
    for row in rows:
        by_name.setdefault(row["name"], {})[row["quorum"]] = row
    quorums = sorted({row["quorum"] for row in rows}, reverse=True)
    lines = [
        "| | " + " | ".join(f"quorum {q:g}" for q in quorums) + " |",
        "|---" * (1 + len(quorums)) + "|",
    ]
    for name, cells in by_name.items():
        lines.append(f"| {name} | " + " | ".join(_cell(cells[q]) if q in cells else "" for q in quorums) + " |")
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> str:
    c, m = row["core"], row.get("model")
    words = f"{c['speed']:.2f}x {c['off_policy']:.0%} {c['staleness']:.2f}"
    return words if m is None else f"{words} ({m['speed']:.2f}x {m['off_policy']:.0%} {m['staleness']:.2f})"


COLOURS = {1.0: "#8a8a8a", 0.75: "#1b6ca8", 0.5: "#d1603d"}
PANELS = (
    ("N' groups in work, refill none", "none", ""),
    ("Refill: groups (dashed) or samples", "sample", "in_flight"),
    ("Refill sample, max_staleness 1 to 8", "sample", "bound"),
    ("Continuous, max_staleness 1 to 8", "continuous", "bound"),
)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """The picture: speed over sync against off-policy share (above) and mean staleness (below)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 6.4), layout="constrained")
    axes = figure.subplots(2, len(PANELS), sharey="row")
    for column, (title, kind, by) in enumerate(PANELS):
        for line, (key, words) in enumerate((("off_policy", "off-policy share"), ("staleness", "mean staleness"))):
            ax = axes[line][column]
            for quorum, colour in COLOURS.items():
                mine = [r for r in rows if r["quorum"] == quorum]
                _line(ax, _of(mine, kind, by), key, colour, f"quorum {quorum:g}", "o-")
                if by == "in_flight":
                    _line(ax, _of(mine, "group", ""), key, colour, None, "s--")
            if kind == "none":
                _line(ax, _of(rows, "tail", ""), key, "#b8860b", "tail batching", "D")
            ax.set_xlabel(words, fontsize=8)
            ax.tick_params(labelsize=7)
            ax.grid(alpha=0.3)
        axes[0][column].set_title(title, fontsize=8)
    for row in axes:
        row[0].set_ylabel("speed over sync", fontsize=8)
    axes[0][0].legend(fontsize=7, loc="lower right")
    figure.savefig(path, dpi=80, metadata={"Software": None})


def _of(rows: list[dict[str, Any]], kind: str, by: str) -> list[dict[str, Any]]:
    full = GROUPS * SAMPLES
    mine = [r for r in rows if r["kind"] == kind]
    if by == "bound":
        mine = [r for r in mine if r["in_flight"] == full]
    elif by == "in_flight":
        mine = [r for r in mine if r["bound"] == FREE]
    return sorted(mine, key=lambda r: (r["over"], r["in_flight"], r["bound"]))


def _line(ax: Any, rows: list[dict[str, Any]], key: str, colour: str, label: str | None, style: str) -> None:
    x, y = [r["core"][key] for r in rows], [r["core"]["speed"] for r in rows]
    ax.plot(x, y, style, color=colour, markersize=3, linewidth=1, label=label)


def main(arguments: list[str] | None = None) -> None:
    """Run and write the rows, print the table; or draw the picture of rows that were written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--ramp", type=int, default=30, help="first steps that are left out")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", default=("tail", "none", "group", "sample", "continuous"))
    parser.add_argument("--quorums", nargs="+", type=float, default=QUORUMS)
    parser.add_argument("--rows", type=Path, default=ROWS, help="JSON of the rows")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("--draw", action="store_true", help="only draw the picture of --rows, and print the table")
    asked = parser.parse_args(arguments)
    if not asked.draw:
        chosen = [case for case in cases() if case.kind in asked.kinds and case.quorum in asked.quorums]
        made = []
        for row in frontier(chosen, asked.seeds, asked.steps, asked.ramp, asked.processes):
            made.append(json.dumps(row))
            print(made[-1], flush=True)
        asked.rows.parent.mkdir(parents=True, exist_ok=True)
        asked.rows.write_text("[\n" + ",\n".join(made) + "\n]\n", "utf-8")
    rows = json.loads(asked.rows.read_text("utf-8"))
    draw(rows, asked.picture)
    print(table(rows))


if __name__ == "__main__":
    main()
