"""Runs ``april plan``: reads lengths or the record of a run, searches for the best settings, and shows the result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from textwrap import wrap
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from april.core.types import OnStale, Refill
from april.record.file import is_record
from april.serialization.state_file import write_atomic
from april.simulate.plan import CandidateResult, Plan, pareto_front, plan
from april.simulate.recorded_workload import workload_of
from april.simulate.workload import Placement, Workload
from april.text.server_text import printable
from april.view.bars import bars
from april.view.units import cost_of_a_step, short_time, three_digits

SHOWN_ALWAYS = (
    "rollout_batch_size", "n_samples_per_prompt", "max_response_len", "max_staleness", "on_stale", "refill",
    "max_in_flight",
)  # fmt: skip
"""Settings that are written into a plan even if they have their default values."""
MAX_SHOWN_ROWS = 8
"""Largest number of rows in the table, besides the rows of the chosen and the synchronous candidate."""


def plan_table(plan: Plan) -> Table:
    """Return a table of the Pareto front of speed and off-policy share, which marks the chosen candidate."""
    out = Table(title="What is faster only with older tokens", box=SIMPLE_HEAD, collapse_padding=True)
    for column in ("", "tokens\nper s", "speed-\nup", "off-\npolicy", "stale-\nness", "s per\nbatch"):
        out.add_column(column, justify="right" if column else "left", no_wrap=bool(column))
    rows = [row for row in pareto_front(plan.rows) if row is not plan.base][:MAX_SHOWN_ROWS]
    rows = sorted({id(row): row for row in (*rows, plan.best, plan.base)}.values(), key=lambda r: -r.tokens_per_s)
    for row in rows:
        out.add_row(
            f"{'> ' if row is plan.best else '  '}{row.name}", f"{row.tokens_per_s:,.0f}",
            f"{row.tokens_per_s / plan.base.tokens_per_s:.2f}x", f"{row.off_policy_share:.0%}",
            f"{row.staleness_mean:.2f}/{row.staleness_max}", three_digits(row.step_s),
            style="bold" if row is plan.best else None,
        )  # fmt: skip
    return out


def settings(workload: Workload, row: CandidateResult) -> str:
    """Return the run's configuration with the settings of a candidate, as YAML; comments hold :func:`notes`."""
    import yaml

    config = workload.config(row.schedule)
    changed, values = config.to_mapping(defaults=False), config.to_mapping()
    if row.schedule.refill is not Refill.NONE:
        changed.pop("over_sampling_batch_size", None)
    shown = {name: values[name] for name in (*SHOWN_ALWAYS, *changed) if name not in ("sampling", "engine")}
    shown |= {name: changed[name] for name in ("sampling", "engine") if name in changed}
    comments = "".join(f"# {line}\n" for note in notes(workload, row) for line in wrap(note, 110))
    return comments + str(yaml.safe_dump(shown, sort_keys=False))


def notes(workload: Workload, row: CandidateResult) -> list[str]:
    """Return sentences on what a user of the plan must know or add."""
    run, config = workload.settings, workload.config(row.schedule)
    out = list(workload.doubts)
    if row.schedule.quorum != 1.0:
        out.append(
            f"group_quorum {row.schedule.quorum:g}: a batch is N x n single responses, with parts of groups. Take the "
            "advantages from batch.advantages(), never from means over the rows of a group, and give every token the "
            'same weight in the loss, as april.loss_weights(mask, "dapo") does: docs/quorum.md'
        )
    if row.off_policy_share:
        out.append(
            f"{row.off_policy_share:.0%} of the trained tokens come from older weights: the loss needs the "
            "log-probabilities of the batch to correct for them, docs/corrections.md"
        )
    if config.on_stale is OnStale.MASK:
        out.append("on_stale mask: tokens that are too old have loss_mask 0, so the loss must leave them out")
    if row.schedule.tail_batching:
        out.append(
            "partial_rollout: false with over_sampling_batch_size above rollout_batch_size is tail batching: prompts "
            "with long responses are trained later than others, and somewhat shorter responses are trained than are "
            "generated, docs/choosing.md"
        )
    elif not run.get("partial_rollout", True):
        out.append("partial_rollout was false in the run; this plan needs it to be true")
    if not run:
        out.append(
            "planned from lengths, without a run: sampling, engine, seed and all settings that are missing here have "
            "their defaults; add those of your run"
        )
    if "api_key_env" in run.get("engine", ()) and run["engine"]["api_key_env"] is None:
        out.append("a record never contains the servers' key; if they need one, set engine.api_key_env")
    if workload.filtered:
        out.append(
            "the run's filter= is not a setting: give it to the scheduler again. Its rejections are not simulated"
        )
    return out


COST_ARGUMENTS = ("model", "gpu", "tensor_parallel")
"""Arguments from which the cost of an engine is estimated; they are refused if the cost was measured."""


def plan_file(
    path: Path, given: dict[str, Any], max_off_policy_share: float | None, out: Path, console: Console
) -> Plan:
    """Search for the best settings for a file of response lengths or the record of a run.

    ``given`` overrides fields of the :class:`.workload.Workload` that the file describes. If ``max_off_policy_share``
    is None, the limit of the recorded run holds.

    Raises:
        ValueError: an argument is wrong.
        RecordError: the record is damaged or has too few responses.
        RolloutError: a simulation failed.
        OSError: ``out`` cannot be written.
    """
    workload = read_workload(path, given)
    if max_off_policy_share is None:
        max_off_policy_share = float(workload.settings.get("max_off_policy_share", 1.0))
    out.mkdir(parents=True, exist_ok=True)
    cost, lengths = workload.cost, workload.length_sample
    console.print(
        f"batches of {workload.groups} x {workload.samples} on {workload.engines} "
        f"{'engine' if workload.engines == 1 else 'engines'}; a step takes {cost_of_a_step(cost)}; lengths: mean "
        f"{lengths.mean():,.0f}, longest {lengths.max():,}; training {short_time(workload.train_s)} per batch",
        soft_wrap=True,
    )
    with bars(console) as begin:
        found = plan(workload, max_off_policy_share=max_off_policy_share, progress=begin("simulating", 0))
    console.print(plan_table(found))
    best, base = found.best, found.base
    console.print(
        f"{best.name}: {best.tokens_per_s / base.tokens_per_s:.2f}x of N' = N, {best.off_policy_share:.0%} of the "
        f"trained tokens from older weights, at most {best.staleness_max} updates old", soft_wrap=True,
    )  # fmt: skip
    if found.speculative_gains:
        gain, plain = found.speculative_gains
        words = f"speculative decoding brings {best.name} {gain:.2f}x and {base.name} {plain:.2f}x"
        console.print(words, soft_wrap=True)
    if best.off_policy_share > max_off_policy_share:
        console.print(f"note: no candidate has an off-policy share of {max_off_policy_share:.0%} or less")
    for note in notes(workload, best):
        console.print(f"note: {note}", soft_wrap=True)
    written = [out / "plan.yaml", out / "plan.json"]
    write_atomic(written[0], settings(workload, best).encode())
    report = {
        "max_off_policy_share": max_off_policy_share, "cost": cost, "engines": workload.engines,
        "train_s": workload.train_s, "length_mean": float(lengths.mean()), "best": best, "sync": base,
        "speculative_gains": found.speculative_gains, "rows": found.rows,
    }  # fmt: skip
    write_atomic(written[1], msgspec.json.format(msgspec.json.encode(report), indent=1))
    console.print(printable(f"wrote {', '.join(map(str, written))}"), soft_wrap=True)
    return found


def read_workload(path: Path, given: dict[str, Any]) -> Workload:
    """Return the workload of a file of lengths or a record. Raises the same errors as :func:`plan_file`."""
    recorded, wrong = is_record(path), [name for name in COST_ARGUMENTS if name in given]
    if wrong and "measured_cost" in given:
        raise ValueError(f"the engines' cost was measured; leave out {', '.join(wrong)}")
    if wrong and recorded:
        raise ValueError(
            f"{path} is the record of a run, from which the engines' cost is known; leave out {', '.join(wrong)}"
        )
    if not recorded:
        return Workload(lengths_file=path, over=given.get("groups", Workload.groups), **given)
    found = workload_of(path)
    if given.get("placement") is Placement.COLOCATED:
        given = {**given, "fetch_ahead": 0}
    return replace(found, over=given.get("groups", found.groups), **given)
