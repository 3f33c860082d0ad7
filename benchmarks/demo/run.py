"""The whole demo: its trainings, then a table and sentences; it writes ``summary.json`` and its pictures."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from april.errors import AprilError
from april.serialization.state_file import write_atomic
from benchmarks.demo import figure
from benchmarks.demo.arm import ArmOutcome, DemoSettings, MakeStage, Stage, train_arm
from benchmarks.demo.summary import difference, summarise, times
from benchmarks.study.runner import Runner, Say, gather, make_outcome


def trained(
    settings: DemoSettings, say: Say, make_stage: MakeStage = Stage, processes: int = 1
) -> dict[str, list[ArmOutcome]]:
    """Return the outcomes by mode, in the order of the seeds; a stage of one's own stays in this process.

    In how many processes they run changes no result, but for seconds. Refill fills a free place as soon as it can, so
    in which decode step it does may depend on what else the machine does. Raises AprilError if a training fails.
    """
    apart = processes if processes > 1 and make_stage is Stage else 0
    make = partial(make_outcome, train=train_arm if apart else partial(train_arm, make_stage=make_stage))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with models this small a second thread of torch costs more than it gives
    try:
        with TemporaryDirectory() as out:
            runner = Runner(Path(out), settings.trainings(), apart, say, nice=0, make=make, kind=ArmOutcome)
            if not runner.run():
                raise AprilError("; ".join(runner.failed))
            found: dict[str, Any] = gather(Path(out), settings.trainings(), ArmOutcome)
    finally:
        torch.set_num_threads(threads)
    return {mode: [found[f"{mode}/{seed}"] for seed in range(settings.seeds)] for mode in settings.modes}


def run_demo(
    settings: DemoSettings, out: Path, say: Say, make_stage: MakeStage = Stage, processes: int = 1
) -> dict[str, Any]:
    """Warm up, train in every mode with every seed, check and draw; return the content of ``summary.json``."""
    began = time.perf_counter()
    arms = trained(settings, say, make_stage, processes)
    summary = summarise(settings, arms, time.perf_counter() - began)
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / "summary.json", (json.dumps(summary, indent=2, allow_nan=False) + "\n").encode())
    figure.draw(settings, arms, summary, out / "demo.png")
    if figure.WAITS.keys() <= arms.keys():
        figure.draw_slots(settings, arms, out / "slots.png")
    return summary


# ---------------------------------------------------------------- on a terminal

Show = Callable[[dict[str, Any], dict[str, Any] | None], str]
"""Word a figure of a mode, given its figures and its comparison with sync, which sync has not."""


def _to_sync(name: str) -> Show:
    return lambda mode, versus: "1" if versus is None else _short(versus[name])


def _short(ratio: dict[str, Any]) -> str:
    if ratio["ratio"] is None:
        return "never" if ratio["n"] else "-"
    return f"{ratio['ratio']:.2f}"


def _minus_sync(quarter: int) -> Show:
    def show(mode: dict[str, Any], versus: dict[str, Any] | None) -> str:
        found = versus and versus["held_out_reward_difference_by_quarter"][quarter]["difference"]
        return "-" if found is None else f"{found:+.3f}"

    return show


ROWS: tuple[tuple[str, Show], ...] = (
    ("decode steps to sync's reward, of sync's", _to_sync("decode_steps_to_target")),
    ("training steps to it, of sync's", _to_sync("training_steps_to_target")),
    ("rollout CPU time to it, of sync's", _to_sync("rollout_cpu_s_to_target")),
    ("decode steps per training step", lambda m, _: f"{m['decode_steps_per_step']:.1f}"),
    ("rollout CPU s per training step", lambda m, _: f"{m['rollout_cpu_s_per_step']:.3f}"),
    ("trained tokens per training step", lambda m, _: f"{m['trained_tokens_per_step']:,.0f}"),
    ("bubble (idle share of the slots)", lambda m, _: f"{m['bubble']:.1%}"),
    ("off-policy share of trained tokens", lambda m, _: f"{m['off_policy_share']:.1%}"),
    ("staleness, mean / max versions", lambda m, _: f"{m['staleness_mean']:.2f} / {m['staleness_max']:.0f}"),
    (
        "held-out reward, start -> last quarter",
        lambda m, _: f"{m['held_out_reward_start']:.3f} -> {m['held_out_reward_end']:.3f}",
    ),
    ("minus sync's, in the first quarter", _minus_sync(0)),
    ("minus sync's, in the last quarter", _minus_sync(-1)),
    ("largest log-probability error", lambda m, _: f"{m['max_abs_logprob_error']:.1e}"),
    ("tokens observed", lambda m, _: f"{m['ledger']['observed']:,}"),
    (
        "tokens delivered / held / dropped",
        lambda m, _: f"{m['ledger']['delivered']:,} / {m['ledger']['held']:,} / {sum(m['ledger']['dropped'].values())}",
    ),
)


def run_and_show(settings: DemoSettings, out: Path, make_stage: MakeStage = Stage, processes: int = 1) -> bool:
    """Run the demo and print its figures; return whether all checks hold. Raises AprilError."""
    console = Console()
    summary = run_demo(settings, out, partial(print, flush=True), make_stage, processes)
    console.print(table(summary))
    for line in verdict(summary):
        console.print(line, highlight=False)
    console.print(f"wrote {out / 'summary.json'} and {out / 'demo.png'}", highlight=False, soft_wrap=True)
    return bool(summary["all_checks_hold"])


def table(summary: dict[str, Any]) -> Table:
    """Return the figures of every mode side by side."""
    out = Table(title="The same training, scheduled in several ways (means over seeds)")
    out.add_column("", min_width=len("log-probability"))
    for mode in summary["modes"]:
        out.add_column(mode, justify="right")
    for label, show in ROWS:
        out.add_row(label, *(show(summary["modes"][m], summary["against_sync"].get(m)) for m in summary["modes"]))
    return out


def verdict(summary: dict[str, Any]) -> list[str]:
    """Return sentences on the figures."""
    lines = []
    for mode, versus in summary["against_sync"].items():
        share = summary["modes"][mode]["off_policy_share"]
        lines += [
            summary["sentences"][mode],
            f"  per training step {times(versus['decode_steps_per_step'])} of the decode steps; {share:.0%} of the "
            f"trained tokens from older weights; reward at the end minus sync's: "
            f"{difference(versus['held_out_reward_difference'])}",
        ]
    broken = [
        f"{mode}: {name} is {check['value']}, expected {check['expected']}"
        for mode, group in summary["checks"].items()
        for name, check in group.items()
        if not check["holds"]
    ]
    lines += [f"BROKEN: {line}" for line in broken] or [
        "every token is delivered or held, as the engine itself counted; every log-probability is that of its version"
    ]
    return lines
