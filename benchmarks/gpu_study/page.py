"""The tables of the study on GPUs: what is computed before it runs, and what came of it, from its outcomes alone.

Invariant: without outcomes the page says nothing but what is computed, and says that it is computed.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.gpu_study import plan
from benchmarks.gpu_study.design import GpuDesign
from benchmarks.gpu_study.training import GpuEvaluation, GpuOutcome
from benchmarks.study import analysis
from benchmarks.study.claims import judge, shown, times
from benchmarks.study.training import Outcome


def page(design: GpuDesign, outcomes: Mapping[str, GpuOutcome], gpus: int) -> str:
    """Return the page of one size."""
    trainings = design.of(gpus)
    here = {name: outcome for name, outcome in outcomes.items() if name in trainings}
    devices = sorted({outcome.device for outcome in here.values()})
    lines = [
        f"# Study on {gpus} GPU{'s' if gpus > 1 else ''}",
        "",
        f"{len(here)} of {len(trainings)} trainings have run" + (f" ({', '.join(devices)})." if here else "."),
        "",
        "## Computed before it ran",
        "",
        "By april's simulation of the design, not measured.",
        "",
        *plan.table(design, gpus),
    ]
    if here:
        lines += [
            "",
            "## Measured",
            "",
            "± and brackets: 95 % over pairs. Seconds leave out evaluations and checkpoints.",
            "",
            *arm_rows(design, here),
            "",
            f"![Held-out reward](study-{gpus}.png)",
        ]
    named = {name.rpartition("/")[0] for name in trainings}
    verdicts = [v for v in judge(design, outcomes) if f"{v.claim.task}/{v.claim.arm}" in named]
    lines += ["", "## Claims", "", *(f"* {v.verdict}: {v.claim.says} {v.figures}" for v in verdicts)]
    return "\n".join(lines) + "\n"


def arm_rows(design: GpuDesign, outcomes: Mapping[str, GpuOutcome]) -> list[str]:
    """Return the measured figures as lines of Markdown, an arm a row."""
    rows = [
        "|task, arm|trainings|held-out reward at the end|minus sync's|GPU seconds to sync's reward|seconds per step"
        "|of these rollouts|decode steps per step|older tokens|",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for task, arms in analysis.by_arm(outcomes).items():
        sync = arms.get("sync", {})
        for arm, seeds in arms.items():
            paired = arm != "sync" and bool(seeds.keys() & sync.keys())
            spent = analysis.ratio(seeds, sync, design.tasks[task].late, "gpu_s") if paired else None
            cells = [
                f"{task}, {arm}",
                str(len(seeds)),
                f"{_mean([analysis.end(o) for o in seeds.values()]):.3f}",
                shown(analysis.difference(seeds, sync)) if paired else "",
                "" if spent is None else times(spent),
                *(f"{_mean([_per_step(o, what) for o in seeds.values()]):.1f}" for what in ("wall_s", "rollout_s")),
                f"{steps:.0f}" if (steps := _mean([_per_step(o, "decode_steps") for o in seeds.values()])) else "",
                f"{_mean([o.old_share for o in seeds.values()]):.0%}",
            ]
            rows.append(f"|{'|'.join(cells)}|")
    return rows


def _per_step(outcome: Outcome, what: str) -> float:
    last = outcome.evaluations[-1]
    assert isinstance(last, GpuEvaluation)
    return float(getattr(last, what)) / last.step


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
