"""The whole demo: bars on a terminal, then a table and sentences; it writes ``summary.json`` and ``demo.png``."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from april.core.types import Prompt
from april.demo import figure
from april.demo.arm import (
    EVALUATION_SEED,
    MODES,
    Arm,
    ArmResult,
    DemoSettings,
    MakeStage,
    Stage,
    held_out_prompts,
    score,
)  # fmt: skip
from april.demo.summary import summarise
from april.demo.warmup import warm_up
from april.scheduler import RolloutScheduler
from april.state_file import write_atomic
from april.view.bars import bars

Begin = Callable[[str, int], Callable[[int, dict[str, float]], None]]
"""Begin a phase of so many steps; the result is called with (steps done, figures)."""


def run_demo(
    settings: DemoSettings, out: Path, begin: Begin, make_stage: MakeStage = Stage
) -> dict[str, Any]:
    """Warm up, train in every mode with every seed, check and draw; return the content of ``summary.json``.

    torch runs on one thread meanwhile: with models this small a second one costs more than it gives.
    """
    began = time.perf_counter()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        arms: dict[str, list[ArmResult]] = {mode: [] for mode in MODES}
        starts: list[NDArray[np.float64]] = []
        warm_up_cpu_s = 0.0
        for seed in range(settings.seeds):
            cpu = time.process_time()
            model = _warm_up(settings, seed, begin)
            warm_up_cpu_s += time.process_time() - cpu
            starts.append(_start_rewards(settings, model, seed, make_stage))
            for mode in MODES:
                on_step = begin(f"seed {seed}: {mode}", settings.steps)
                arms[mode].append(Arm(settings, mode, seed, model, make_stage).run(starts[-1], on_step))
    finally:
        torch.set_num_threads(threads)
    summary = summarise(settings, arms, starts, warm_up_cpu_s, time.perf_counter() - began)
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / "summary.json", (json.dumps(summary, indent=2, allow_nan=False) + "\n").encode())
    figure.draw(settings, arms, summary, out / "demo.png")
    return summary


def _warm_up(settings: DemoSettings, seed: int, begin: Begin) -> PreTrainedModel:
    report: list[Callable[[int, dict[str, float]], None]] = []

    def progress(done: int, total: int, loss: float) -> None:
        if not report:
            report.append(begin(f"seed {seed}: supervised warm-up", total))
        report[0](done, {"loss": loss})

    return warm_up(seed, progress, for_servers=not settings.embedded)


def _start_rewards(
    settings: DemoSettings, model: PreTrainedModel, seed: int, make_stage: MakeStage
) -> NDArray[np.float64]:
    """Return held-out rewards of the common start, by the same evaluation that judges the ends."""
    stage = make_stage(settings, model, seed)
    nothing: list[Prompt] = []
    config = settings.config("sync", seed)
    with RolloutScheduler(config, prompts=nothing, reward=score, engines=[stage.engine]) as rollouts:
        found = rollouts.evaluate(held_out_prompts(seed, settings.held_out), seed=EVALUATION_SEED)
    stage.close()
    rewards: NDArray[np.float64] = found.rewards[:, 0]
    return rewards


# ---------------------------------------------------------------- on a terminal

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
