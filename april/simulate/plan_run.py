"""The whole of ``april plan``: read lengths or a record, plan, show, write."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from april.extras import install
from april.record.lines import is_record
from april.server_text import printable
from april.simulate.observed import workload_of
from april.simulate.plan import Plan, plan
from april.simulate.plan_show import as_plain, draw_plan, notes, plan_table, settings
from april.simulate.trainer import Placement
from april.simulate.workload import Workload
from april.state_file import write_atomic

ENGINE = ("model", "gpu", "tensor_parallel")
"""Arguments that say what an engine costs; the record of a run has that measured."""


def plan_file(
    path: Path, given: dict[str, Any], max_off_policy_share: float | None, processes: int, out: Path, console: Console
) -> Plan:
    """See ``april plan``; ``given``: fields of :class:`.workload.Workload` that replace what the file says.

    Where ``max_off_policy_share`` is none, it is that of the run.

    Raises:
        ValueError: an argument is wrong.
        RecordError: the record is.
        RolloutError: the core gave up.
        OSError: nothing can be written there.
    """
    workload = read_workload(path, given)
    if max_off_policy_share is None:
        max_off_policy_share = float(workload.settings.get("max_off_policy_share", 1.0))
    out.mkdir(parents=True, exist_ok=True)
    cost, lengths = workload.cost, workload.length_sample
    console.print(
        f"batches of {workload.groups} x {workload.samples} on {workload.engines} "
        f"{'engine' if workload.engines == 1 else 'engines'}; a step takes "
        f"{cost.base_s * 1e3:.2f} ms, + {cost.per_sequence_s * 1e6:.2f} \N{MICRO SIGN}s per sequence, "
        f"+ {cost.per_kv_token_s * 1e9:.2f} ns per token in memory; lengths: mean {lengths.mean():,.0f}, "
        f"longest {lengths.max():,}; training {workload.train_s:.1f} s per batch", soft_wrap=True,
    )  # fmt: skip
    columns = (TextColumn("simulating"), BarColumn(bar_width=28), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as shown:
        bar = shown.add_task("")
        found = plan(
            workload, max_off_policy_share=max_off_policy_share, processes=processes,
            progress=lambda done, total: shown.update(bar, completed=done, total=total),
        )  # fmt: skip
    console.print(plan_table(found))
    best, base = found.best, found.base
    console.print(
        f"{best.name}: {best.tokens_per_s / base.tokens_per_s:.2f}x of N' = N, {best.off_policy_share:.0%} of the "
        f"trained tokens from older weights, at most {best.staleness_max} updates old", soft_wrap=True,
    )  # fmt: skip
    if best.off_policy_share > max_off_policy_share:
        console.print(f"note: no candidate stays within an off-policy share of {max_off_policy_share:.0%}")
    for note in notes(workload, best):
        console.print(f"note: {note}", soft_wrap=True)
    written = [out / "plan.yaml", out / "plan.json"]
    write_atomic(written[0], settings(workload, best).encode())
    report = as_plain(workload, found, max_off_policy_share)
    write_atomic(written[1], (json.dumps(report, indent=1) + "\n").encode())
    if find_spec("matplotlib"):
        written.append(out / "plan.png")
        draw_plan(found, max_off_policy_share, written[-1])
    else:
        console.print(f"no picture: that needs matplotlib, {install('plot')}", soft_wrap=True)
    console.print(printable(f"wrote {', '.join(map(str, written))}"), soft_wrap=True)
    return found


def read_workload(path: Path, given: dict[str, Any]) -> Workload:
    """What is planned for. Raises as :func:`plan_file`."""
    recorded, wrong = is_record(path), [name for name in ENGINE if name in given]
    if wrong and "measured_cost" in given:
        raise ValueError(f"the engines' cost was measured; leave out {', '.join(wrong)}")
    if wrong and recorded:
        raise ValueError(f"{path} is the record of a run, whose engines' cost is known; leave out {', '.join(wrong)}")
    if not recorded:
        return Workload(lengths_file=path, over=given.get("groups", Workload.groups), **given)
    found = workload_of(path)
    if given.get("placement") is Placement.COLOCATED:
        given = {**given, "fetch_ahead": 0}
    return replace(found, over=given.get("groups", found.groups), **given)
