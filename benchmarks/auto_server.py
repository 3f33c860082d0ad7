"""``auto`` on a real server, beside five fixed settings in turns; and what ``april plan`` expects of these five.

Workload and turns are those of :mod:`benchmarks.real_engines`. Questions are answered between two turns: on these cores
the simulation would take from whichever schedule has its turn. It is told that training takes no time, as the time
between two batches of a schedule is that of the others' turns.

    python -m benchmarks.auto_server vllm http://127.0.0.1:8000 --weights DIR DIR
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from april.auto.auto_run import Chooser
from april.auto.process import ChooserProcess
from april.auto.question import Answer, Question
from april.config.settings import Config
from april.core.types import Refill
from april.engines.kinds.factory import open_servers
from april.engines.protocol import Engine
from april.simulate.plan import ENOUGH, LONG, expect
from april.simulate.profile import Profile, profile
from april.simulate.workload import Schedule, Workload
from april.testing.same_loop import Rollouts
from benchmarks.real_engines import CAP, GROUPS, PROMPT_LEN, SAMPLES, Arm, StepFigures, forced_lengths, keep

LIMIT = 0.6
"""max_off_policy_share of auto; fixed settings beyond it are shown and do not count."""
FULL = GROUPS * SAMPLES
FIXED = {
    "N' = N": Schedule(GROUPS, Refill.NONE, FULL),
    "N' = 1.5N": Schedule(GROUPS * 3 // 2, Refill.NONE, FULL * 3 // 2),
    "N' = 2N": Schedule(GROUPS * 2, Refill.NONE, FULL * 2),
    "N' = 1.5N, quorum 0.5": Schedule(GROUPS * 3 // 2, Refill.NONE, FULL * 3 // 2, quorum=0.5),
    "refill, quorum 0.5": Schedule(GROUPS, Refill.SAMPLE, FULL, quorum=0.5),
}
AUTO = {"over_sampling_batch_size": "auto", "max_in_flight": "auto", "group_quorum": "auto"}
MOST = 3 * FULL
"""In flight; room of the servers of this benchmark."""
PROFILED = 256
"""Tokens of the longest response of the profile."""


def config(engine: dict[str, Any], **changes: Any) -> Config:
    """Settings of an arm."""
    return Config(
        rollout_batch_size=GROUPS, n_samples_per_prompt=SAMPLES, max_response_len=CAP, engine=engine, **changes
    )


def fixed(engine: dict[str, Any], schedule: Schedule) -> Config:
    """Those of a fixed one."""
    size: dict[str, Any] = {"over_sampling_batch_size": schedule.over}
    if schedule.refill is Refill.SAMPLE:
        size = {"refill": "sample", "max_in_flight": schedule.in_flight}
    return config(engine, group_quorum=schedule.quorum, **size)


class BetweenTurns(Chooser):
    """Asks what a run asks, but with a trainer that takes no time; the benchmark waits for the answer."""

    def __init__(self) -> None:
        self._process = ChooserProcess()
        self.answered = asyncio.Event()
        self.answered.set()
        self.told: list[str] = []

    async def ask(self, question: Question) -> Answer:
        """What the process says."""
        self.answered.clear()
        began = time.perf_counter()
        try:
            answer = await self._process.ask(replace(question, train_s=0.0))
        finally:
            self.answered.set()
        self.told.append(
            f"{answer.best}: {answer.tokens_per_s:,.0f} tokens/s and a share of {answer.off_policy_share:.2f} are "
            f"expected; answered after {time.perf_counter() - began:.0f} s"
        )
        return answer

    def close(self) -> None:
        """End it."""
        self._process.close()


class AutoArm(Arm):
    """The one that learns."""

    def open(self, engine: Engine) -> Rollouts:
        """See the base class."""
        found = super().open(engine)
        self.chooser = BetweenTurns()
        auto = found.scheduler._driver._auto
        assert auto is not None
        auto._chooser = self.chooser
        return found

    async def step(self) -> None:
        """A step; then whatever was asked is answered."""
        await super().step()
        await asyncio.sleep(0)
        await self.chooser.answered.wait()
        self._engine.reset()


async def run(engine: dict[str, Any], weights: list[str], steps: int, learns: int, raw: Path | None) -> dict[str, Any]:
    """All rounds; the report."""
    arms: list[Arm] = [Arm(name, fixed(engine, schedule), weights, MOST) for name, schedule in FIXED.items()]
    auto = AutoArm("auto", config(engine, max_off_policy_share=LIMIT, **AUTO), weights, MOST)
    arms.append(auto)
    async with AsyncExitStack() as stack:
        (probe,) = await open_servers(config(engine).engine)  # type: ignore[arg-type]
        stack.push_async_callback(probe.close)
        measured = await profile(probe, 2 * FULL, PROFILED, asyncio.get_running_loop().time)
        for arm in arms:
            stack.push_async_callback(arm.open(probe).close)
        for number in range(learns + steps):
            shift = number % len(arms)
            for arm in arms[shift:] + arms[:shift]:
                await arm.step()
            print(f"\rround {number + 1} of {learns + steps}", end="", file=sys.stderr, flush=True)
            keep(arms, raw)
        again = await profile(probe, 2 * FULL, PROFILED, asyncio.get_running_loop().time)
    print(file=sys.stderr)
    rows = {arm.name: row(arm.figures[learns:]) for arm in arms}
    for name, schedule in FIXED.items():
        for kind, cost in (("plan", measured), ("plan_after", again)):
            rows[name][kind] = expected(schedule, cost)
    return {
        "arms": rows, "told": auto.chooser.told,
        "profile": profile_row(measured), "profile_after": profile_row(again),
    }  # fmt: skip


def row(figures: list[StepFigures]) -> dict[str, float]:
    """Of the counted steps."""
    trained = sum(s.trained for s in figures)
    return {
        "steps": len(figures),
        "trained_per_s": trained / sum(s.wall_s for s in figures),
        "off_policy_share": sum(s.off_policy_share * s.trained for s in figures) / trained,
        "cpu_s_per_step": sum(s.cpu_s for s in figures) / len(figures),
    }


def profile_row(found: Profile) -> dict[str, Any]:
    """What is shown of a profile."""
    return {"speeds": found.speeds, "held_out": found.held_out, "cost": msgspec.to_builtins(found.cost)}


def expected(schedule: Schedule, found: Profile) -> float:
    """Trained tokens per second, as ``april plan`` has it from lengths and a profile."""
    lengths = forced_lengths()
    workload = Workload(
        engines=1, groups=GROUPS, samples=SAMPLES, max_response_len=CAP, prompt_len=PROMPT_LEN,
        measured_cost=found.cost, measured_lengths=lengths,
    )  # fmt: skip
    times = ENOUGH // FULL
    return expect(workload, schedule, times * LONG[0], times * LONG[1]).tokens_per_s


def table(found: dict[str, Any]) -> str:
    """Markdown."""
    arms = found["arms"]
    within = {n: r["trained_per_s"] for n, r in arms.items() if n != "auto" and r["off_policy_share"] <= LIMIT}
    best = max(within, key=lambda name: within[name])
    lines = [
        "| schedule | trained tok/s | off-policy | of the best fixed within the limit | april plan expects |",
        "|---" * 5 + "|",
    ]
    for name, r in arms.items():
        plans = [r[kind] / r["trained_per_s"] - 1.0 for kind in ("plan", "plan_after") if kind in r]
        lines.append(
            f"| {name} | {r['trained_per_s']:,.0f} | {r['off_policy_share']:.2f} "
            f"| {r['trained_per_s'] / within[best]:.3f} | {', '.join(f'{off:+.1%}' for off in plans)} |"
        )
    off = float(np.mean([found["profile"]["held_out"], found["profile_after"]["held_out"]]))
    last = f"best fixed: {best}; profiles off by {off:.1%} in their last rounds"
    return "\n".join([*lines, "", *found["told"], last])


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="auto on a real server beside five fixed settings.")
    parser.add_argument("kind", choices=("vllm", "sglang", "openai"))
    parser.add_argument("url")
    parser.add_argument("--weights", nargs=2, required=True, help="two directories, loaded in turn at each step")
    parser.add_argument("--steps", type=int, default=24, help="counted steps of each arm")
    parser.add_argument("--learns", type=int, default=20, help="steps before them, for auto to learn")
    parser.add_argument("--json", type=Path, help="write the report here, and all steps beside it")
    args = parser.parse_args(argv)
    if args.steps < 1 or args.learns < 0:
        parser.error("--steps must be at least 1 and --learns at least 0")
    raw = args.json.with_suffix(".steps.json") if args.json else None
    found = asyncio.run(run({"kind": args.kind, "urls": args.url}, args.weights, args.steps, args.learns, raw))
    print(table(found))
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
