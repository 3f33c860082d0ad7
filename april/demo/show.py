"""The demo on a terminal: live progress, then a table (rich)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from april.demo.arm import MODES, DemoSettings, MakeStage, Stage
from april.demo.run import run_demo
from april.view.bars import bars

GAIN = 0.98
"""Ratio to sync's CPU time that every seed must be below for a gain."""
ROWS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("decode steps per training step", lambda m: f"{m['decode_steps_per_step']:.1f}"),
    ("trained tokens per training step", lambda m: f"{m['trained_tokens_per_step']:,.0f}"),
    ("decode steps per 1,000 trained tokens", lambda m: f"{1e3 * m['decode_steps_per_trained_token']:.1f}"),
    ("rollout CPU ms per 1,000 trained tokens", lambda m: f"{1e6 * m['rollout_cpu_s_per_trained_token']:.1f}"),
    ("rollout wall seconds", lambda m: f"{m['rollout_wall_s']:.1f}"),
    ("bubble (idle share of the slots)", lambda m: f"{m['bubble']:.1%}"),
    ("off-policy share of trained tokens", lambda m: f"{m['off_policy_share']:.1%}"),
    ("staleness, mean / max versions", lambda m: f"{m['staleness_mean']:.2f} / {m['staleness_max']:.0f}"),
    (
        "held-out reward, start -> end",
        lambda m: f"{m['held_out_reward_start']:.3f} -> {m['held_out_reward_end']:.3f}",
    ),
    ("largest log-probability error", lambda m: f"{m['max_abs_logprob_error']:.1e}"),
    ("tokens observed", lambda m: f"{m['ledger']['observed']:,}"),
    (
        "tokens delivered / held / dropped",
        lambda m: f"{m['ledger']['delivered']:,} / {m['ledger']['held']:,} / {sum(m['ledger']['dropped'].values())}",
    ),
)


def run_and_show(settings: DemoSettings, out: Path, make_stage: MakeStage = Stage) -> bool:
    """Run the demo and print its figures; return whether all checks hold. Raises AprilError."""
    console = Console()
    with bars(console, 30, transient=False) as begin_bar:

        def begin(what: str, total: int) -> Callable[[int, dict[str, float]], None]:
            update = begin_bar(what, total)
            return lambda done, figures: update(done, note=_in_words(figures))

        summary = run_demo(settings, out, begin, make_stage)
    console.print(table(summary))
    for line in verdict(summary):
        console.print(line, highlight=False)
    console.print(f"wrote {out / 'summary.json'} and {out / 'demo.png'}", highlight=False, soft_wrap=True)
    return bool(summary["all_checks_hold"])


def _in_words(figures: dict[str, float]) -> str:
    """Word the figures of a step, of the warm-up or of an arm."""
    if "reward_mean" not in figures:
        return f"loss {figures['loss']:.2f}"
    return (
        f"reward {figures['reward_mean']:.2f}  longest/median "
        f"{figures['response_len_max'] / figures['response_len_median']:.0f}  "
        f"old tokens {figures['off_policy_share']:.0%}"
    )


def table(summary: dict[str, Any]) -> Table:
    """Return the figures of every mode side by side."""
    out = Table(title="The same training, scheduled four ways (means over seeds)")
    out.add_column("", min_width=len("log-probability"))
    for mode in MODES:
        out.add_column(mode, justify="right")
    for label, show in ROWS:
        out.add_row(label, *(show(summary["modes"][mode]) for mode in MODES))
    return out


def verdict(summary: dict[str, Any]) -> list[str]:
    """Return sentences on the figures."""
    lines = []
    for mode, versus in summary["against_sync"].items():
        share = summary["modes"][mode]["off_policy_share"]
        lines.append(
            f"{mode} against sync: {versus['decode_steps_per_step']:.2f}x the decode steps per training step; per "
            f"trained token {versus['decode_steps_per_trained_token']:.2f}x, and {_cpu(versus)}; {share:.0%} of the "
            f"trained tokens are of older weights; held-out reward {_difference(versus)}"
        )
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


def _difference(versus: dict[str, Any]) -> str:
    """Word the difference in held-out reward, with its error over seeds: all prompts of a seed share a training."""
    number = len(versus["held_out_reward_difference_by_seed"])
    error = versus["held_out_reward_difference_standard_error"]
    said = f"{versus['held_out_reward_difference']:+.3f}"
    return f"{said} (one seed, so no standard error)" if error is None else f"{said} +- {error:.3f} over {number} seeds"


def _cpu(versus: dict[str, Any]) -> str:
    """Word the ratio of CPU time, as a gain only if every seed has one: other work on the machine moves it."""
    by_seed = versus["rollout_cpu_s_per_trained_token_by_seed"]
    said = f"{versus['rollout_cpu_s_per_trained_token']:.2f}x the rollout CPU time"
    if max(by_seed) < GAIN:
        return said
    return f"{said} (no gain: {min(by_seed):.2f} to {max(by_seed):.2f} by seed)"
