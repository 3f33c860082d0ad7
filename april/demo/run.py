"""Runs the whole demo and writes ``summary.json`` and ``demo.png``."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
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
