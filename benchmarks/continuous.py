"""A trainer that takes as long as a batch does, before a real server: stepwise beside continuous generation.

The trainer sleeps, then the server loads weights from a directory: a whole loop without the trainer's arithmetic.
Forced lengths (lognormal between and within prompts), the same for every schedule, and the same number of requests at
the server at most. Schedules take turns of a few batches, in rotating order, so that a machine that gets slower favours
nobody; between two turns of a schedule only its state is left of it, taken behind a weight update, when no request has
got far. Beside each: what the simulation expects of the same core, lengths and times.

    python -m benchmarks.continuous vllm http://127.0.0.1:8000 --weights DIR DIR
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from april.config.settings import Config
from april.core.types import Prompt
from april.driver.llm import LLM
from april.engines.kinds.factory import open_servers
from april.engines.protocol import Engine
from april.simulate.simulation import Simulation
from april.testing import rollouts
from april.testing.same_loop import Rollouts
from benchmarks.real_engines import (
    CAP,
    GROUPS,
    PROMPT_LEN,
    SAMPLES,
    LimitSlices,
    drawn_lengths,
    forced_lengths,
    seconds_per_token,
)
from benchmarks.step_times import MeasuredCost, StepTimes, prompt
from benchmarks.stopwatch_engine import StopwatchEngine

SLOTS = GROUPS * SAMPLES
"""Requests at the server at most, in every schedule."""
LENGTHS = forced_lengths(mean=150.0)
"""Shorter than where nothing else takes time, so that all schedules have their turns within ten minutes."""
CURVE = (1, 8, 16, 32)
"""In flight, where step times are measured."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Settings of april, and whether the trainer asks for a batch before it trains the one it has."""

    settings: dict[str, Any]
    ahead: bool = False


def continuous(bound: int) -> dict[str, Any]:
    """Settings of continuous generation within a staleness bound."""
    return {"generation": "continuous", "max_staleness": bound}


STEPWISE = "stepwise, N' = N"
"""What the others are compared with."""
REFILL = {"refill": "sample", "max_staleness": 4}
SCHEDULES: dict[str, Schedule] = {
    STEPWISE: Schedule({"max_staleness": 4}),
    "stepwise, N' = 2N": Schedule({"over_sampling_batch_size": 2 * GROUPS, "max_staleness": 4}),
    "stepwise, refill": Schedule(REFILL),
    "stepwise, refill, one ahead": Schedule(REFILL, ahead=True),
    "continuous, bound 1": Schedule(continuous(1)),
    "continuous, bound 2": Schedule(continuous(2)),
    "continuous, bound 4": Schedule(continuous(4)),
    "continuous, bound 2, one ahead": Schedule(continuous(2), ahead=True),
}


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """Some batches of one schedule, one after the other; seconds."""

    wall_s: float
    busy_s: float
    """Requests at the server, integrated over the time."""
    batches: list[dict[str, float]]
    """Metrics of each."""


@dataclass(slots=True)
class Arm:
    """One schedule; between two turns only its state is left of it."""

    name: str
    schedule: Schedule
    engine: dict[str, Any]
    weights: Iterator[str]
    turns: list[Turn] = field(default_factory=list)
    _state: dict[str, Any] | None = None

    @property
    def config(self) -> Config:
        """Settings of its scheduler."""
        return Config(
            rollout_batch_size=GROUPS, n_samples_per_prompt=SAMPLES, max_response_len=CAP, max_in_flight=SLOTS,
            engine=self.engine, **self.schedule.settings,
        )  # fmt: skip

    async def turn(self, batches: int, train_s: float) -> None:
        """``batches`` batches, from the end of a weight update to that of the last one's."""
        config = self.config
        (server,) = await open_servers(config.engine)  # type: ignore[arg-type]
        watched = StopwatchEngine(server)
        prompts = (Prompt(prompt(PROMPT_LEN, i, server.capabilities.vocab_size)) for i in itertools.count())
        async with rollouts(
            config, engines=[watched], prompts=prompts, rollout=_respond, reward=None, check=False
        ) as loop:
            if self._state is None:
                await loop.weight_update(next(self.weights))
            else:
                await loop.load_state_dict(self._state, next(self.weights))
            watched.reset()
            start = time.perf_counter()
            await self._train(loop, batches, train_s)
            self._state = loop.state_dict()
            watched.up_to_now()
            self.turns.append(
                Turn(
                    wall_s=time.perf_counter() - start,
                    busy_s=watched.busy_s,
                    batches=[dict(batch.metrics) for batch in loop.batches[:batches]],
                )
            )
            loop.validate()

    async def _train(self, loop: Rollouts, batches: int, train_s: float) -> None:
        """Wait for a batch, sleep, update the weights."""
        asked = None
        for _ in range(batches):
            batch = await (asked or loop.next_batch())
            if batch.lengths.tolist() != [LENGTHS.sample(s.id.group, s.id.index) for s in batch.samples]:
                raise RuntimeError("a response has not the forced length; has the model an end-of-sequence token?")
            asked = asyncio.create_task(loop.next_batch()) if self.schedule.ahead else None
            await asyncio.sleep(train_s)
            await loop.weight_update(next(self.weights), trained=batch.id)
        if asked is not None:
            asked.cancel()  # the state has its batch
            await asyncio.wait([asked])

    def expected(self, cost: MeasuredCost, train_s: float, ramp: int, batches: int) -> dict[str, float]:
        """The same by the simulation, where decoding, prefill and training take time, and nothing else does."""
        settings = self.config.core_settings(has_reward=False, group_reward=False, run_id=0)
        simulation = Simulation(
            settings, cost, LENGTHS, prompt_len=PROMPT_LEN, train_s=train_s,
            fetch_ahead=int(self.schedule.ahead),
        )  # fmt: skip
        result = simulation.run(ramp + batches)
        trained_s = [0.0]  # when the trainer was done with each batch, which may have waited for it
        for step in result.steps:
            trained_s.append(max(trained_s[-1], step.end_s) + train_s)
        counted = result.summary(skip=ramp)
        return counted | {"trained_tokens_per_s": counted["trained_tokens"] / (trained_s[-1] - trained_s[ramp])}


async def _respond(prompt: Prompt, llm: LLM) -> None:
    await llm.generate(max_tokens=LENGTHS.sample(llm.sample_id.group, llm.sample_id.index))


def batch_tokens() -> float:
    """Mean of a batch."""
    return GROUPS * SAMPLES * fmean(drawn_lengths(LENGTHS))


def fitted(times: StepTimes, limit: float) -> MeasuredCost:
    """The measured step times and prefill, and so much more for each token that a server kept full makes ``limit``/s.

    The waves by which step times are measured have neither the prefills nor the answers between them that a server kept
    full has, and those cost decoding time where they share its cores.
    """
    cost = MeasuredCost.of(times, PROMPT_LEN)
    prefill_s = max(median(times.prefill), 0.0)
    decoding_s = 1.0 / limit - prefill_s * PROMPT_LEN / fmean(drawn_lengths(LENGTHS))
    more = decoding_s - seconds_per_token(cost, SLOTS, LENGTHS)
    return replace(cost, points=tuple((n, s + n * more) for n, s in cost.points), per_prefill_token_s=prefill_s)


async def run(
    engine: dict[str, Any], weights: list[str], *, train: float, turns: int, batches: int, ramp: int
) -> dict[str, Any]:
    """All turns; the report."""
    began = time.perf_counter()
    arms = [Arm(name, s, engine, itertools.cycle(weights)) for name, s in SCHEDULES.items()]
    times = StepTimes()
    config = arms[0].config
    async with _connected(config) as probe:
        await StepTimes().measure(probe, PROMPT_LEN, (1, 8))  # a first request is slow everywhere
    limits: list[float] = []
    for number in range(turns + 1):
        async with _connected(config) as probe:
            await times.measure(probe, PROMPT_LEN, CURVE)
        limits.append(await limit(config))
        shift = number % len(arms)
        for arm in arms[shift:] + arms[:shift]:
            # a machine that gets slower has a slower trainer, too
            await arm.turn(batches if number else ramp, train * batch_tokens() / limits[-1])
            line = f"turn {number} of {turns}: {arm.name}, {time.perf_counter() - began:.0f} s"
            print(f"\r{line.ljust(72)}", end="", file=sys.stderr, flush=True)
    limits.append(await limit(config))
    print(file=sys.stderr)
    for arm in arms:
        del arm.turns[0]  # the way into a steady state
    mean_limit = 1.0 / fmean(1.0 / rate for rate in limits[1:])
    return report(arms, times, mean_limit, train * batch_tokens() / mean_limit, ramp)


@asynccontextmanager
async def _connected(config: Config) -> AsyncIterator[Engine]:
    """A connection of its own: weights under a label that another one gave are not taken for known ones."""
    (engine,) = await open_servers(config.engine)  # type: ignore[arg-type]
    try:
        yield engine
    finally:
        await engine.close()


async def limit(config: Config) -> float:
    """Tokens per second of the server while it is kept full."""
    async with _connected(config) as engine:
        slices = LimitSlices(engine, SLOTS, LENGTHS)
        await slices.measure()
    return slices.rates[0]


def report(arms: list[Arm], times: StepTimes, limit_rate: float, train_s: float, ramp: int) -> dict[str, Any]:
    """Rates of the loop, free slots, staleness, and the same as the simulation expects it."""
    cost = fitted(times, limit_rate)
    rows = {arm.name: arm_row(arm, cost, train_s, ramp) for arm in arms}
    smaller_limit = min(limit_rate, batch_tokens() / max(train_s, 1e-9))
    for row in rows.values():
        for kind in ("", "expected_"):
            row[f"{kind}gain"] = row[f"{kind}trained_per_s"] / rows[STEPWISE][f"{kind}trained_per_s"]
            row[f"{kind}of_limit"] = row[f"{kind}trained_per_s"] / smaller_limit
    return {
        "arms": rows,
        "train_s": train_s,
        "batch_s_at_limit": batch_tokens() / limit_rate,
        "limit_tokens_per_s": limit_rate,
    }


def arm_row(arm: Arm, cost: MeasuredCost, train_s: float, ramp: int) -> dict[str, Any]:
    """Means over the counted turns."""
    turns, metrics = arm.turns, [m for t in arm.turns for m in t.batches]
    wall = sum(t.wall_s for t in turns)
    trained = sum(m["trained_tokens"] for m in metrics)
    expected = arm.expected(cost, train_s, ramp, len(metrics))
    return {
        "trained_per_s": trained / wall,
        "free_slots": SLOTS - sum(t.busy_s for t in turns) / wall,
        "staleness_mean": fmean(m["staleness_mean"] for m in metrics),
        "staleness_max": max(m["staleness_max"] for m in metrics),
        "expected_trained_per_s": expected["trained_tokens_per_s"],
        "expected_bubble": expected["bubble"],
        "expected_staleness_mean": expected["staleness_mean"],
        "expected_staleness_max": expected["staleness_max"],
    }


def table(found: dict[str, Any]) -> Table:
    """Measured beside expected, in brackets."""
    shown = Table(
        title=f"Trained tokens per second of the loop; expected in brackets. Server kept full: "
        f"{found['limit_tokens_per_s']:,.0f} tokens/s, a batch in {found['batch_s_at_limit']:.2f} s; training takes "
        f"{found['train_s']:.2f} s (means)"
    )
    for name in ("schedule", "trained tok/s", f"over {STEPWISE}", "of the limit", "free slots", "staleness mean, max"):
        shown.add_column(name, justify="left" if name == "schedule" else "right")
    for name, r in found["arms"].items():
        shown.add_row(
            name,
            f"{r['trained_per_s']:,.0f} ({r['expected_trained_per_s']:,.0f})",
            f"{r['gain']:.2f}x ({r['expected_gain']:.2f}x)",
            f"{r['of_limit']:.2f} ({r['expected_of_limit']:.2f})",
            f"{r['free_slots']:.1f} ({SLOTS * r['expected_bubble']:.1f})",
            f"{r['staleness_mean']:.2f} ({r['expected_staleness_mean']:.2f}), "
            f"{r['staleness_max']:.0f} ({r['expected_staleness_max']:.0f})",
        )
    return shown


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Stepwise and continuous generation before a trainer that takes time.")
    parser.add_argument("kind", choices=("vllm", "sglang", "openai"))
    parser.add_argument("url")
    parser.add_argument("--weights", nargs=2, required=True, help="two directories, loaded in turn at each update")
    parser.add_argument("--train", type=float, default=1.0, help="time of training, in batches at the server's limit")
    parser.add_argument("--turns", type=int, default=3, help="counted turns of each schedule")
    parser.add_argument("--batches", type=int, default=3, help="batches in a turn")
    parser.add_argument("--ramp", type=int, default=4, help="batches of the turn before, which does not count")
    parser.add_argument("--json", type=Path, help="write the report here")
    args = parser.parse_args(argv)
    if min(args.turns, args.batches, args.ramp) < 1 or args.train < 0:
        parser.error("--turns, --batches and --ramp must be at least 1, and --train at least 0")
    found = asyncio.run(
        run(
            {"kind": args.kind, "urls": args.url}, args.weights, train=args.train, turns=args.turns,
            batches=args.batches, ramp=args.ramp,
        )
    )  # fmt: skip
    Console(width=200).print(table(found))
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
