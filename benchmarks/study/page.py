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

import numpy as np

from benchmarks.study import analysis
from benchmarks.study.claims import HOLDS, OPEN, REFUTED, UNDECIDED, Verdict, judge, shown, times
from benchmarks.study.design import Design, Kind
from benchmarks.study.statistics import Estimate
from benchmarks.study.training import Outcome

PRIMARY = ("over-1.25", "over-2", "refill", "quorum-0.75", "quorum-0.5")
"""Arms in the table of the page; figures.json has them all."""
COLOURS = ("#8a8a8a", "#8fbfe0", "#1b6ca8", "#d1603d", "#8a6bbf", "#3a8f5c")
"""Of sync and of those, as in the demo's picture."""
OTHERS = "tail"
"""The task whose other arms have a table of their own."""
LATE = "late"
"""Names of the tasks begin so that say what losses do with late and rounded tokens."""
HARM = 0.05
"""A loss breaks at the delay at which it ends so far below sync."""
WORDS = 1000
"""Most words of the page."""
TERMS = (
    "* Tasks: `tail` counts down, in responses whose lengths have a heavy tail; `sorting` is reasoning-gym's"
    " `number_sorting`; responses of `long` have some 1,100 tokens. `again` and `again-long`: with fresh seeds.",
    "* Arms: `over-2` has N' = 2N, `refill` a constant number in flight and `max_staleness: 5`, `quorum-0.5` N' = 1.5N."
    " They have [the recommended loss](corrections.md#the-recommended-loss), `sequence`.",
    "* Tasks whose names begin with `late` are the same three with fresh seeds, for [late and rounded"
    " tokens](#late-and-rounded-tokens).",
)
"""Names that the tables use."""
LIMITS = (
    "* Large models, or seconds: a decode step counts as one, however many responses are in it. Arms generate as many"
    " tokens as sync to the same reward, or more.",
    "* [bfloat16](corrections.md#the-recommended-loss), several optimizer steps per batch, other questions: seeds vary"
    " weights, demonstrations and order.",
    "* Convergence: all curves still rise at the end.",
    "* Numbers that repeat elsewhere: of four trainings run again on another machine, one ended 0.021 away, by"
    " rounding.",
    "* A gain on a light tail: responses of `long` are of nearly one length.",
    "* Staleness alone, for a quorum: it compares with 3 siblings, not 7, and delivers what ends first.",
    "* New abilities: held-out count-downs are mostly ends of trained ones.",
    "* A quorum of 0.75 at twice the rate, or where all responses are long.",
    "* Equal starts everywhere: those of `again` were made anew for later trainings, on another machine; at step 0 they"
    " differ by up to 0.006. Those of `late` are the same for all, with checksums in the results.",
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
                "falls": analysis.falls(seeds),
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
            "kl_k3": _guard(_first(outcomes), analysis.kl_alarm),
            "kl_k3 without fixed delays": _guard(
                [o for o in _first(outcomes) if not o.settings.delay], analysis.kl_alarm
            ),
            "effective sample size": _guard(_first(outcomes), analysis.ess_alarm),
            "kl_response": _guard(_late(outcomes, rounded=False), analysis.response_alarm),
            "kl_k3 of late tokens": _guard(_late(outcomes, rounded=False), analysis.kl_alarm),
            "kl_response without the dead zone": _guard(_late(outcomes), analysis.far_alarm),
        },
        "pooled": {
            name: {
                "end_minus_sync": _plain(found.end), "falls": analysis.falls(found.seeds),
                "trainings": len(found.seeds), "never": analysis.never(found.seeds, found.sync)[0],
            }
            for name, found in _pooled(design, compared).items()
        },
        "at_best_rates": {
            name: {
                "rate": rate, "rate_of_sync": of_sync, "end_minus_sync": _plain(analysis.difference(seeds, sync)),
                "log_decode_steps_to_late": _plain(analysis.ratio(seeds, sync, design.tasks[OTHERS].late)),
            }
            for name, (rate, seeds, of_sync, sync) in _at_best_rates(design, outcomes).items()
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


def _guard(outcomes: list[Outcome], alarm: analysis.Alarm) -> dict[str, int]:
    return dataclasses.asdict(analysis.guard(outcomes, alarm))


def _first(outcomes: Mapping[str, Outcome]) -> list[Outcome]:
    """Return the trainings on which the limits of the guards per token and per response were chosen."""
    return [o for name, o in outcomes.items() if not name.startswith(LATE)]


def _late(outcomes: Mapping[str, Outcome], *, rounded: bool = True) -> list[Outcome]:
    """Return the trainings with fresh seeds, without those with rounded log-probabilities unless ``rounded``."""
    return [o for name, o in outcomes.items() if name.startswith(LATE) and (rounded or not o.settings.noise)]


# ---------------------------------------------------------------- the page


def page(design: Design, outcomes: Mapping[str, Outcome]) -> str:
    """Return docs/study.md."""
    compared = _compared(design, outcomes)
    verdicts = judge(design, outcomes)
    count = {verdict: sum(v.verdict == verdict for v in verdicts) for verdict in (HOLDS, REFUTED, UNDECIDED, OPEN)}
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
        " ± and brackets: 95 % over pairs. Factors are geometric means, medians where a pair never gets there."
        " Torch: " + _torch(outcomes) + ".",
        "",
        *TERMS,
        "",
        "![Reward against decode steps](images/study.png)",
        "",
        "Factors are to the reward that sync has half-way (`long`: after 24 of 40 steps), at sync's learning rate,"
        " which is not [its best](#each-at-its-best-rate). *Never* counts pairs that do not reach sync's reward of its"
        " last step: half of them where curves are equal.",
        "",
        "|task, arm|held-out reward at the end, minus sync's|decode steps to sync's half-way reward|with prefills|never"
        "|fell|",
        "|---|---|---|---|---|---|",
        *_arm_rows(design, compared),
        "",
        f"Fell: {analysis.FALL:g} below their best. Synchronous trainings of this table fell {_sync_falls(compared)}"
        " times.",
        "",
        "## Each at its best rate",
        "",
        f"On `{OTHERS}`, each at the learning rate, of 0.5, 1 and 2 times the task's, with which it ends highest"
        " (a quorum of 0.75: at the task's).",
        "",
        "|arm|rate|sync's rate|the end, minus sync's|decode steps|",
        "|---|---|---|---|---|",
        *_best_rate_rows(design, outcomes),
        "",
        "## Losses",
        "",
        "Rollouts trained D updates late, with [other losses](../benchmarks/study/losses.py): the end minus sync's."
        f" Bold: {HARM:g} lower or more. Brackets: trainings that fell by {analysis.FALL:g}.",
        "",
        *_loss_table(compared),
        "",
        "## Late and rounded tokens",
        "",
        "Rollouts trained D updates late, with fresh seeds and claims fixed before. *Rounded*: the log-probabilities at"
        " sampling have a noise of 0.0014 nats per token, as engines in bfloat16 have it, and weights per response"
        " count that of 1,000 tokens. `dead-zone` is the recommended loss with `dead_zone=0.4`,"
        " `behaviour` a clipped ratio to q, `bounded` the same with `negative_bound=3`, `geo-mask` weights per token"
        " without the responses whose geometric mean is outside 0.98 to 1.02. *Weight* is the mean over the trained"
        " tokens; *effective* the effective sample size of these weights, as a share of the tokens.",
        "",
        "The noise of a token multiplies p / q by a number with the mean 1, so some noisy q are above 1; only ratios"
        " are used. Tokens that a response lacks to 1,000 have noise and no drift, and enter products alone. A first"
        " model of rounding cut q at 1 and left products as they were; with it no difference between `dead-zone` and"
        " `sequence` was beyond chance. All was run again with the same seeds and claims (`m2po` for the first time),"
        " and sync too, so that all trainings of a seed begin from the same weights.",
        "",
        *_late_rows(compared),
        "",
        "## Other arms",
        "",
        f"On `{OTHERS}`, with the mean staleness of trained tokens; `none` and `behaviour` are losses. Arms of another"
        " `rate` (x0.5, x2), or with a mean per response (`samplemean`), are beside sync with the same. `auto` was run"
        " while it could choose a quorum of 0.5, which it no longer does.",
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
        "## Claims that do not hold",
        "",
        f"Of {len(verdicts)} claims {count[HOLDS]} hold. {count[REFUTED]} are refuted: the data exclude them."
        f" {count[UNDECIDED]} are undecided, as there are too few pairs; {count[OPEN]} are open. The"
        " design has their sentences by name; bounds are one-sided.",
        "",
    ]
    failed = [v for verdict in (REFUTED, UNDECIDED) for v in verdicts if v.verdict == verdict]
    lines += [f"* {v.verdict}: `{v.claim.id}`, {v.figures}" for v in failed]
    return "\n".join(lines).rstrip() + "\n"


def _torch(outcomes: Mapping[str, Outcome]) -> str:
    """Return which versions made how many outcomes."""
    found = Counter(outcome.made_with.get("torch", "not known") for outcome in outcomes.values())
    return ", ".join(f"{version} ({count})" for version, count in found.most_common())


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
    named = {f"{task}, {name}": (task, f"{task}/{name}") for task, name in itertools.product(design.tasks, PRIMARY)}
    there = {words: (task, compared[name]) for words, (task, name) in named.items() if name in compared}
    there |= {words: (found.kind.task, found) for words, found in _pooled(design, compared).items()}
    for words, (task, found) in there.items():
        late = design.tasks[task].late
        spent = [analysis.ratio(found.seeds, found.sync, late, of) for of in ("decode_steps", "passes")]
        if words not in named:
            spent[1:] = []  # one of its tasks has no prefills
        cells = "|".join([times(one) if one.n else "" for one in spent] + [""] * (2 - len(spent)))
        never, fell = analysis.never(found.seeds, found.sync), analysis.falls(found.seeds)
        ends = f"{never[0]} of {never[1]}|{fell} of {len(found.seeds)}"
        rows.append(f"|{words}{found.part}|{shown(found.end)}|{cells}|{ends}|")
    return rows


def _pooled(design: Design, compared: Mapping[str, Compared]) -> dict[str, Compared]:
    """Return the primary arms of a task together with those of the same task with fresh seeds."""
    found = {}
    for (again, sizes), name in itertools.product(design.tasks.items(), PRIMARY):
        one, other = compared.get(f"{sizes.task}/{name}"), compared.get(f"{again}/{name}")
        if one is not None and other is not None:
            found[f"{sizes.task} and {again}, {name}"] = dataclasses.replace(
                one, seeds={**one.seeds, **other.seeds}, sync={**one.sync, **other.sync}, part=one.part + other.part
            )
    return found


def _sync_falls(compared: Mapping[str, Compared]) -> int:
    syncs = {found.name_of_sync: found.sync for name, found in compared.items() if name.partition("/")[2] in PRIMARY}
    return sum(analysis.falls(sync) for sync in syncs.values())


def _at_best_rates(
    design: Design, outcomes: Mapping[str, Outcome]
) -> dict[str, tuple[float, analysis.Seeds, float, analysis.Seeds]]:
    """Return arms of OTHERS, each at its best rate (rate and trainings) beside sync at sync's best rate."""
    arms = analysis.by_arm(outcomes).get(OTHERS, {})

    def best(arm: str) -> tuple[float, analysis.Seeds]:
        kinds = [Kind(task=OTHERS, arm=arm, loss=design.recommended, rate=rate) for rate in (0.5, 1.0, 2.0)]
        names = {kind.rate: design.named(kind).partition("/")[2] for kind in kinds}
        rates = {rate: arms[name] for rate, name in names.items() if arms.get(name)}
        rate = analysis.best_rate(rates)
        return rate, rates[rate]

    if "sync-rate2" not in arms:
        return {}
    return {arm: (*best(arm), *best("sync")) for arm in PRIMARY[1:] if arm in arms}


def _best_rate_rows(design: Design, outcomes: Mapping[str, Outcome]) -> list[str]:
    return [
        f"|{arm}|{rate:g}x|{of_sync:g}x|{shown(analysis.difference(seeds, sync))}"
        f"|{times(analysis.ratio(seeds, sync, design.tasks[OTHERS].late))}|"
        for arm, (rate, seeds, of_sync, sync) in _at_best_rates(design, outcomes).items()
    ]


def _other_rows(design: Design, compared: Mapping[str, Compared]) -> list[str]:
    """Return a row per arm of OTHERS that is in no other table."""
    rows = ["|arm|the end, minus sync's|decode steps|staleness|fell|", "|---|---|---|---|---|"]
    for name, found in compared.items():
        task, _, arm = name.partition("/")
        if task == OTHERS and arm not in PRIMARY and not found.kind.delay and found.kind.minibatches == 1:
            spent = analysis.ratio(found.seeds, found.sync, design.tasks[task].late)
            stale = _mean([_over(o, "staleness") for o in found.seeds.values()])
            cells = f"{times(spent)}|{stale:.1f}|{analysis.falls(found.seeds) or ''}"
            rows.append(f"|{arm}{found.part}|{shown(found.end)}|{cells}|")
    return rows


def _loss_table(compared: Mapping[str, Compared]) -> list[str]:
    lines: dict[str, dict[int, str]] = defaultdict(dict)
    for found in compared.values():
        kind = found.kind
        if (kind.delay or kind.minibatches > 1) and not kind.task.startswith(LATE):
            of = [kind.task, kind.loss]
            of += [f"{kind.rate:g}x rate"] if kind.rate != 1.0 else []
            of += [f"{kind.minibatches} minibatches"] if kind.minibatches > 1 else []
            mean, fell = found.end.mean, sum(analysis.fall(o) is not None for o in found.seeds.values())
            cell = f"**{mean:+.2f}**" if mean <= -HARM else f"{mean:+.2f}"
            lines[", ".join(of)][kind.delay] = cell + (f" ({fell}/{len(found.seeds)})" if fell else "") + found.part
    delays = sorted({delay for cells in lines.values() for delay in cells})
    rows = [f"|task, loss|{'|'.join(f'D={d}' for d in delays)}|", f"|---|{'---|' * len(delays)}"]
    return rows + [f"|{of}|{'|'.join(cells.get(d, '') for d in delays)}|" for of, cells in sorted(lines.items())]


def _late_rows(compared: Mapping[str, Compared]) -> list[str]:
    """Return a row per loss, delay and kind of log-probabilities of the tasks for late tokens."""
    rows = ["|task, loss|D|rounded|the end, minus sync's|fell|weight|effective|", "|---|---|---|---|---|---|---|"]
    late = [found for found in compared.values() if found.kind.task.startswith(LATE)]
    order = sorted(late, key=lambda f: (f.kind.task, f.kind.delay, f.kind.noise > 0, f.kind.loss))
    for kind, found in ((found.kind, found) for found in order):
        cells = [str(kind.delay), "yes" if kind.noise else "", shown(found.end)]
        cells += [f"{analysis.falls(found.seeds)} of {len(found.seeds)}"]
        for of in ("weight_response", "weight_effective"):
            means = [float(np.mean(kept)) for o in found.seeds.values() if (kept := getattr(o, of))]
            cells += [f"{_mean(means):.2f}" if means else ""]
        rows.append(f"|{kind.task}, {kind.loss}{found.part}|{'|'.join(cells)}|")
    return rows


def _guard_lines(outcomes: Mapping[str, Outcome]) -> list[str]:
    first = _first(outcomes)
    delayed = [outcome for outcome in first if outcome.settings.delay]
    found = []
    for name, alarm in (("kl_k3", analysis.kl_alarm), ("ess_token", analysis.ess_alarm)):
        did, late = analysis.guard(first, alarm), analysis.guard(delayed, alarm)
        found.append(
            f"* `{name}`: {did.in_time} of {did.falls} falls in time, {did.early} of them before the step that shows"
            f" it; false alarms in {did.false} of {did.sound} other trainings with older tokens. Without fixed delays:"
            f" {did.in_time - late.in_time} of {did.falls - late.falls}, {did.false - late.false} of"
            f" {did.sound - late.sound}."
        )
    for name, alarm, of in (
        ("`kl_response`, late tokens, not rounded", analysis.response_alarm, _late(outcomes, rounded=False)),
        ("`kl_k3`, the same trainings", analysis.kl_alarm, _late(outcomes, rounded=False)),
        ("KL per response of tokens outside the dead zone, late tokens", analysis.far_alarm, _late(outcomes)),
    ):
        did = analysis.guard(of, alarm)
        if not did.falls + did.sound:
            continue
        found.append(
            f"* {name}: {did.in_time} of {did.falls} falls in time; false alarms in {did.false} of {did.sound} others."
        )
    return found


def verdict_rows(verdicts: list[Verdict]) -> list[str]:
    """Return a line per claim, for a terminal."""
    return [f"{v.verdict:8} {v.claim.id}: {v.claim.says} [{v.claim.fails_if}] {v.figures}" for v in verdicts]


# ---------------------------------------------------------------- the figure


def draw(design: Design, outcomes: Mapping[str, Outcome], path: Path, against: str = "decode_steps") -> None:
    """Draw the mean held-out reward against training steps and another figure of evaluations, a row per task."""
    from matplotlib.figure import Figure

    by_task = {task: arms for task, arms in analysis.by_arm(outcomes).items() if not task.startswith(LATE)}
    figure = Figure(figsize=(9.0, 2.8 * len(by_task)), layout="constrained")
    grid = figure.subplots(len(by_task), 2, squeeze=False)
    for row, (task, arms) in zip(grid, by_task.items(), strict=True):
        for name, colour in zip(("sync", *PRIMARY), COLOURS, strict=True):
            if seeds := arms.get(name):
                rewards = sum(analysis.series(o, "reward") for o in seeds.values()) / len(seeds)
                for axes, of in zip(row, ("step", against), strict=True):
                    spent = sum(analysis.series(o, of) for o in seeds.values()) / len(seeds)
                    axes.plot(spent, rewards, label=name, linewidth=1.4, color=colour)
        row[0].set_ylabel(f"{task}\nheld-out reward")
        row[0].set_xlabel("training steps")
        row[1].set_xlabel(against.replace("_", " "))
        row[1].legend(fontsize="small", loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
