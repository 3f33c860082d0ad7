"""The page of the study: a few tables, one figure. All of it is made from the raw outcomes, nothing by hand."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from april.demo.statistics import Estimate
from benchmarks.study import analysis
from benchmarks.study.claims import HOLDS, OPEN, REFUTED, Verdict, judge, shown, times
from benchmarks.study.design import Design, Kind
from benchmarks.study.training import Outcome

PRIMARY = ("over-1.25", "over-2", "refill", "quorum-0.5")
"""Arms in the table of the page; figures.json has them all."""
OTHERS = "tail"
"""The task whose other arms have a table of their own."""
HARM = 0.05
"""A loss breaks at the delay at which it ends so far below sync."""
WORDS = 750
"""Most words of the page."""
TERMS = (
    "* Tasks: `tail` counts down, in responses whose lengths have a heavy tail (`again`: with fresh seeds); `sorting`"
    " is reasoning-gym's `number_sorting`; responses of `long` have some 1,100 tokens.",
    "* Arms: `over-2` has N' = 2N, `refill` a constant number in flight and `max_staleness: 5`, `quorum-0.5` N' = 1.5N."
    " They have [the recommended loss](corrections.md#the-recommended-loss), `sequence`.",
)
"""Names that the tables use."""
LIMITS = (
    "* Large models, or seconds: a decode step counts as one, however many responses are in it. Arms generate as many"
    " tokens as sync to the same reward, or more.",
    "* [bfloat16](corrections.md#the-recommended-loss), several optimizer steps per batch, other questions: seeds vary"
    " weights, demonstrations and order.",
    "* Convergence: all curves still rise at the end.",
    "* Equality where a claim is refuted: with 12 pairs on `tail`, an arm as good as sync may fail by chance.",
    "* A gain on a light tail: responses of `long` are of nearly one length.",
    "* Staleness alone, for a quorum: it compares with 3 siblings, not 7, and delivers what ends first.",
    "* New abilities: held-out count-downs are mostly ends of trained ones.",
    "* The cost of sync's training time: only `continuous` pays for what is generated meanwhile.",
)
"""What a reader may not conclude."""


def figures(design: Design, outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    """Return every figure there is, by task and arm, and the verdicts; plain values, no infinity."""
    arms: dict[str, Any] = {}
    compared = _compared(design, outcomes)
    for task, of_task in analysis.by_arm(outcomes).items():
        for name, seeds in of_task.items():
            row: dict[str, Any] = {
                "trainings": len(seeds),
                "end": _mean([analysis.end(o) for o in seeds.values()]),
                "end_of_long_prompts": _mean([analysis.end(o, "long") for o in seeds.values()]),
                "old_share": _mean([o.old_share for o in seeds.values()]),
                "staleness": _mean([_over(o, "staleness") for o in seeds.values()]),
                "places": _mean([o.places for o in seeds.values()]),
                "length": _mean([_over(o, "length") for o in seeds.values()]),
                "falls": sum(analysis.fall(o) is not None for o in seeds.values()),
                "kl_alarms": sum(analysis.kl_alarm(o) is not None for o in seeds.values()),
                "ess_alarms": sum(analysis.ess_alarm(o) is not None for o in seeds.values()),
            }
            if found := compared.get(f"{task}/{name}"):
                sync = found.sync
                row |= {
                    "sync": found.name_of_sync,
                    "end_minus_sync": _plain(found.end),
                    "long_minus_sync": _plain(analysis.difference(seeds, sync, "long")),
                    "minus_sync_at_equal_decode_steps": _plain(analysis.at_equal(seeds, sync, "decode_steps")),
                    "minus_sync_at_equal_trained_tokens": _plain(analysis.at_equal(seeds, sync, "trained_tokens")),
                    "log_decode_steps_per_training_step": _plain(analysis.spent_ratio(seeds, sync)),
                }
                for target in ("early", "late"):
                    step = getattr(design.tasks[task], target)
                    for of in ("decode_steps", "passes", "trained_tokens", "step"):
                        row[f"log_{of}_to_{target}"] = _plain(analysis.ratio(seeds, sync, step, of))
            arms[f"{task}/{name}"] = row
    return {
        "trainings": len(outcomes),
        "planned": len(design.trainings()),
        "arms": arms,
        "guards": {
            "kl_k3": _guard(outcomes, analysis.kl_alarm),
            "effective sample size": _guard(outcomes, analysis.ess_alarm),
        },
        "claims": [{"id": v.claim.id, "verdict": v.verdict, "figures": v.figures} for v in judge(design, outcomes)],
    }


def _over(outcome: Outcome, what: str) -> float:
    quarters = outcome.quarters[what]
    return sum(quarters) / len(quarters)


def _mean(values: list[float]) -> float:
    return round(sum(values) / len(values), 4)


def _plain(found: Estimate) -> dict[str, float | int | None]:
    names = ("mean", "low", "high", "lower", "upper", "sd")
    numbers = {name: getattr(found, name) for name in names}
    return {n: round(v, 4) if math.isfinite(v) else None for n, v in numbers.items()} | {
        "n": found.n, "censored": found.censored,
    }  # fmt: skip


def _guard(outcomes: Mapping[str, Outcome], alarm: analysis.Alarm) -> dict[str, int]:
    found = analysis.guard(list(outcomes.values()), alarm)
    return dataclasses.asdict(found)


# ---------------------------------------------------------------- the page


def page(design: Design, outcomes: Mapping[str, Outcome]) -> str:
    """Return docs/study.md."""
    compared = _compared(design, outcomes)
    verdicts = judge(design, outcomes)
    count = {verdict: sum(v.verdict == verdict for v in verdicts) for verdict in (HOLDS, REFUTED, OPEN)}
    missing = len(design.trainings()) - len(outcomes)
    later = [f"`{name}`" for name, sizes in design.tasks.items() if sizes.task is not None]  # tasks again, fresh seeds
    lines = [
        "# Study",
        "",
        f"`make study` trains small models {len(outcomes)} times on three tasks"
        + (f" ({missing} more are planned)" if missing else "")
        + ", in arms and with claims fixed before the first ran"
        + (f", but for {', '.join(later)}, added later" if later else "")
        + " ([the design](../benchmarks/study/design.toml), with what was taken out for its cost)."
        " Arms are paired with synchronous training by seed."
        " ± and brackets: 95 % over pairs. Torch: " + _torch(outcomes) + ".",
        "",
        *TERMS,
        "",
        "![Reward against decode steps](images/study.png)",
        "",
        "|task, arm|held-out reward at the end, minus sync's|to sync's reward: decode steps|with prefills|",
        "|---|---|---|---|",
        *_arm_rows(design, compared),
        "",
        "## Losses",
        "",
        "Rollouts trained D updates late, with [other losses](../benchmarks/study/losses.py): the end minus sync's."
        f" Bold: {HARM:g} lower or more. Brackets: trainings that fell by {analysis.FALL:g}.",
        "",
        *_loss_table(compared),
        "",
        "## Other arms",
        "",
        f"On `{OTHERS}`, with the mean staleness of trained tokens; `none` and `behaviour` are losses. Arms of another"
        " `rate` (x0.5, x2), or with a mean per response (`samplemean`), are beside sync with the same.",
        "",
        *_other_rows(design, compared),
        "",
        "## Guards",
        "",
        *_guard_lines(outcomes),
        "",
        "## What it does not show",
        "",
        *LIMITS,
        "",
        "## Refuted",
        "",
        f"Of {len(verdicts)} claims {count[HOLDS]} hold, {count[REFUTED]} are refuted, {count[OPEN]} are open. The"
        " design has their sentences by name; bounds are one-sided.",
        "",
    ]
    lines += [f"* `{v.claim.id}`: {v.figures}" for v in verdicts if v.verdict == REFUTED]
    return "\n".join(lines).rstrip() + "\n"


def _torch(outcomes: Mapping[str, Outcome]) -> str:
    """Return which versions made how many outcomes."""
    found = Counter(outcome.made_with.get("torch", "not known") for outcome in outcomes.values())
    return ", ".join(f"{version} ({count} trainings)" for version, count in found.most_common())


@dataclass(frozen=True, slots=True)
class Compared:
    """Trainings beside the synchronous ones that they are paired with; there is one pair at least."""

    kind: Kind
    seeds: analysis.Seeds
    sync: analysis.Seeds
    name_of_sync: str
    part: str
    """How many pairs there are, where that is not all of them; else empty."""

    @property
    def end(self) -> Estimate:
        """The end's difference."""
        return analysis.difference(self.seeds, self.sync)


def _compared(design: Design, outcomes: Mapping[str, Outcome]) -> dict[str, Compared]:
    planned = Counter(name.rpartition("/")[0] for name in design.trainings())
    by_task, found = analysis.by_arm(outcomes), {}
    for name, kind in design.kinds().items():
        arms, other = by_task.get(kind.task, {}), design.sync_of(kind)
        seeds, sync = (arms.get(one.partition("/")[2], {}) for one in (name, other))
        there, wanted = len(seeds.keys() & sync.keys()), min(planned[name], planned[other])
        if there and name != other:
            part = "" if there >= wanted else f" ({there}/{wanted} pairs)"
            found[name] = Compared(kind, seeds, sync, other, part)
    return found


def _arm_rows(design: Design, compared: Mapping[str, Compared]) -> list[str]:
    rows = []
    for task, name in itertools.product(design.tasks, PRIMARY):
        if found := compared.get(f"{task}/{name}"):
            late = design.tasks[task].late
            spent = [analysis.ratio(found.seeds, found.sync, late, of) for of in ("decode_steps", "passes")]
            cells = "|".join(times(one) if one.n else "" for one in spent)
            rows.append(f"|{task}, {name}{found.part}|{shown(found.end)}|{cells}|")
    return rows


def _other_rows(design: Design, compared: Mapping[str, Compared]) -> list[str]:
    """Return a row per arm of OTHERS that is in no other table."""
    rows = ["|arm|the end, minus sync's|decode steps|staleness|", "|---|---|---|---|"]
    for name, found in compared.items():
        task, _, arm = name.partition("/")
        if task == OTHERS and arm not in PRIMARY and not found.kind.delay and found.kind.minibatches == 1:
            spent = analysis.ratio(found.seeds, found.sync, design.tasks[task].late)
            stale = _mean([_over(o, "staleness") for o in found.seeds.values()])
            rows.append(f"|{arm}{found.part}|{shown(found.end)}|{times(spent)}|{stale:.1f}|")
    return rows


def _loss_table(compared: Mapping[str, Compared]) -> list[str]:
    lines: dict[str, dict[int, str]] = defaultdict(dict)
    for found in compared.values():
        kind = found.kind
        if kind.delay or kind.minibatches > 1:
            of = [kind.task, kind.loss]
            of += [f"{kind.rate:g}x rate"] if kind.rate != 1.0 else []
            of += [f"{kind.minibatches} minibatches"] if kind.minibatches > 1 else []
            mean, fell = found.end.mean, sum(analysis.fall(o) is not None for o in found.seeds.values())
            cell = f"**{mean:+.2f}**" if mean <= -HARM else f"{mean:+.2f}"
            lines[", ".join(of)][kind.delay] = cell + (f" ({fell}/{len(found.seeds)})" if fell else "") + found.part
    delays = sorted({delay for cells in lines.values() for delay in cells})
    rows = [f"|task, loss|{'|'.join(f'D={d}' for d in delays)}|", f"|---|{'---|' * len(delays)}"]
    return rows + [f"|{of}|{'|'.join(cells.get(d, '') for d in delays)}|" for of, cells in sorted(lines.items())]


def _guard_lines(outcomes: Mapping[str, Outcome]) -> list[str]:
    found = []
    for name, alarm in (("kl_k3", analysis.kl_alarm), ("ess_token", analysis.ess_alarm)):
        did = analysis.guard(list(outcomes.values()), alarm)
        found.append(
            f"* `{name}`: {did.in_time} of {did.falls} falls in time, {did.early} of them before the step that shows"
            f" it; false alarms in {did.false} of {did.sound} other trainings with older tokens."
        )
    return found


def verdict_rows(verdicts: list[Verdict]) -> list[str]:
    """Return a line per claim, for a terminal."""
    return [f"{v.verdict:8} {v.claim.id}: {v.claim.says} [{v.claim.refuted_if}] {v.figures}" for v in verdicts]


# ---------------------------------------------------------------- the figure


def draw(design: Design, outcomes: Mapping[str, Outcome], path: Path, against: str = "decode_steps") -> None:
    """Draw the mean held-out reward against training steps and another figure of evaluations, a row per task."""
    from matplotlib.figure import Figure

    by_task = analysis.by_arm(outcomes)
    figure = Figure(figsize=(9.0, 2.8 * len(by_task)), layout="constrained")
    grid = figure.subplots(len(by_task), 2, squeeze=False)
    for row, (task, arms) in zip(grid, by_task.items(), strict=True):
        for number, name in enumerate(("sync", *PRIMARY)):
            if seeds := arms.get(name):
                rewards = sum(analysis.series(o, "reward") for o in seeds.values()) / len(seeds)
                for axes, of in zip(row, ("step", against), strict=True):
                    spent = sum(analysis.series(o, of) for o in seeds.values()) / len(seeds)
                    axes.plot(spent, rewards, label=name, linewidth=1.4, color=f"C{number}")
        row[0].set_ylabel(f"{task}\nheld-out reward")
        row[0].set_xlabel("training steps")
        row[1].set_xlabel(against.replace("_", " "))
        row[1].legend(fontsize="small", loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
