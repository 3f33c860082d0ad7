"""What april reaches on a real server, beside the server's own limit and each schedule without any overhead.

Forced lengths (lognormal between and within prompts), the same for every arm; a weight update from disk with a
cache reset at every step boundary. One round = one step of each arm, and in every fourth one slice of each limit, in
rotating order, so that a machine that gets slower favours nobody. The server's model must have no end-of-sequence
token: response lengths are what this benchmark says.

    python -m benchmarks.real_engines vllm http://127.0.0.1:8000 --weights DIR DIR
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import msgspec

from april.config.settings import Config
from april.core.event_pump import EndedRequest, RequestSums
from april.core.sampling import SamplingParams
from april.core.types import Prompt
from april.driver.llm import LLM
from april.driver.step_limit import distance_of
from april.engines.kinds.factory import open_servers
from april.engines.protocol import Engine, Request
from april.engines.simulated.fitted_cost import Requests, fit
from april.engines.simulated.response_lengths import LognormalLengths
from april.simulate.simulation import Simulation
from april.testing import rollouts
from april.testing.same_loop import Rollouts
from benchmarks.step_times import LONG, SHORT, MeasuredCost, StepTimes, attempt_id, prompt
from benchmarks.stopwatch_engine import StopwatchEngine

GROUPS, SAMPLES, CAP = 4, 8, 3_000
MEAN, SIGMA_BETWEEN, SIGMA_WITHIN = 250.0, 0.6, 0.6
PROMPT_LEN = 32
ARMS: dict[str, dict[str, Any]] = {
    "sync": {},
    "N' = 2N": {"over_sampling_batch_size": 2 * GROUPS},
    "refill": {"refill": "sample", "max_in_flight": GROUPS * SAMPLES},
}
IN_FLIGHT = {"sync": GROUPS * SAMPLES, "N' = 2N": 2 * GROUPS * SAMPLES, "refill": GROUPS * SAMPLES}
SLICE_S = 3.0
"""Of the limit, for each number in flight; as many responses as there are places end before, or all would be short."""
SLICE_EVERY = 8
"""Rounds between two slices."""
CURVE_EVERY = 8
"""Rounds between two measurements of the step times."""


def forced_lengths(mean: float = MEAN) -> LognormalLengths:
    """Of every arm: the same group has the same lengths everywhere."""
    median = mean / math.exp((SIGMA_BETWEEN**2 + SIGMA_WITHIN**2) / 2.0)
    return LognormalLengths(median, SIGMA_BETWEEN, SIGMA_WITHIN, cap=CAP)


def drawn_lengths(lengths: LognormalLengths) -> list[int]:
    """Of so many groups that their mean is that of the distribution."""
    return [length for group in range(512) for length in lengths.group(group, SAMPLES).tolist()]


def config(arm: str, engine: dict[str, Any]) -> Config:
    """Settings of an arm."""
    return Config(
        rollout_batch_size=GROUPS, n_samples_per_prompt=SAMPLES, max_response_len=CAP, engine=engine, **ARMS[arm]
    )


class StepFigures(msgspec.Struct, frozen=True):
    """One step of one arm; wall seconds, tokens."""

    wall_s: float
    update_s: float
    abort_s: float
    generated: int
    trained: int
    reprefill: int
    in_flight_s: float
    off_policy_share: float
    ended: list[EndedRequest]
    """Requests that ended in it."""


class Arm:
    """One schedule, with a scheduler of its own before the common engine, which they use in turns."""

    def __init__(self, name: str, settings: Config, weights: list[str], places: int) -> None:
        self.name = name
        self.places = places
        """In flight at most."""
        self.figures: list[StepFigures] = []
        self._config = settings
        self._weights = itertools.cycle(weights)
        self._lengths = forced_lengths()

    def open(self, engine: Engine) -> Rollouts:
        """To be closed by the caller."""
        self._engine = StopwatchEngine(engine)
        self._since = 0.0
        self._rollouts = rollouts(
            self._config, engines=[self._engine], prompts=self._prompts(), rollout=self._rollout, check=False
        )
        return self._rollouts

    def _prompts(self) -> Iterator[Prompt]:
        for index in itertools.count():
            yield Prompt(prompt(PROMPT_LEN, index, self._engine.capabilities.vocab_size))

    async def _rollout(self, prompt: Prompt, llm: LLM) -> None:
        await llm.generate(max_tokens=self._lengths.sample(llm.sample_id.group, llm.sample_id.index))

    async def step(self) -> None:
        """A weight update and a batch."""
        before = self._rollouts.ledger()["tokens"].observed
        self._engine.reset()
        start = time.perf_counter()
        await self._rollouts.weight_update(next(self._weights))
        updated = time.perf_counter()
        batch = await self._rollouts.next_batch()
        end = time.perf_counter()
        expected = [self._lengths.sample(s.id.group, s.id.index) for s in batch.samples]
        if batch.lengths.tolist() != expected:
            raise RuntimeError("a response has not the forced length; has the model an end-of-sequence token?")
        since, self._since = self._since, asyncio.get_running_loop().time()
        ended = [ran for _, latest in self._rollouts.requests for ran in latest if ran.ended_s > since]
        self.figures.append(
            StepFigures(
                end - start,
                updated - start,
                self._engine.abort_s,
                self._rollouts.ledger()["tokens"].observed - before,
                int(batch.metrics["trained_tokens"]),
                int(batch.metrics["reprefill_tokens"]),
                self._engine.busy_s,
                batch.off_policy_share,
                ended,
            )
        )
        self._rollouts.batches.clear()

    def replay(self, cost: MeasuredCost, steps: int) -> dict[str, float]:
        """The same schedule and lengths by the same core, where nothing but decode steps takes time."""
        settings = self._config.core_settings(has_reward=False, group_reward=False, run_id=0)
        simulation = Simulation(settings, cost, self._lengths, prompt_len=PROMPT_LEN)
        return simulation.run(steps).summary(skip=steps - len(self.figures))


class LimitSlices:
    """The server kept full at ``in_flight`` by a client that never stops."""

    def __init__(self, engine: Engine, in_flight: int, lengths: LognormalLengths) -> None:
        self.in_flight = in_flight
        self.rates: list[float] = []
        self._engine = engine
        self._lengths = lengths
        self._numbers = itertools.count()

    async def measure(self) -> None:
        """One slice: tokens made while all places were taken, by the second."""
        spans: list[tuple[float, float, int]] = []
        stop, settled = asyncio.Event(), asyncio.Event()

        async def place() -> None:
            while not stop.is_set():
                number = next(self._numbers)
                length = self._lengths.sample(number // SAMPLES, number % SAMPLES)
                ids = prompt(PROMPT_LEN, number, self._engine.capabilities.vocab_size)
                begun, count = time.perf_counter(), 0
                request = Request(
                    attempt_id=attempt_id("limit"), token_ids=ids, sampling=SamplingParams(length, seed=number)
                )
                # closed also when it breaks: its place at the engine would stay taken
                async with aclosing(self._engine.generate(request)) as chunks:  # type: ignore[type-var]
                    async for chunk in chunks:
                        count += len(chunk.tokens)
                spans.append((begun, time.perf_counter(), count))
                if len(spans) >= self.in_flight:
                    settled.set()

        tasks = [asyncio.create_task(place()) for _ in range(self.in_flight)]
        settling = asyncio.create_task(settled.wait())
        await asyncio.wait([settling, *tasks], return_when=asyncio.FIRST_COMPLETED)
        settling.cancel()
        start = time.perf_counter()
        await asyncio.sleep(SLICE_S)
        end = time.perf_counter()
        stop.set()
        while not all(t.done() for t in tasks):
            await self._engine.abort(None)
            await asyncio.wait(tasks, timeout=0.2)
        for task in tasks:
            task.result()
        # a request makes its tokens evenly between its start and its end
        shares = (count * max(min(e, end) - max(b, start), 0.0) / (e - b) for b, e, count in spans)
        self.rates.append(sum(shares) / (end - start))


async def run(engine: dict[str, Any], weights: list[str], steps: int, ramp: int) -> dict[str, Any]:
    """All rounds; the report."""
    times = StepTimes()
    arms = [Arm(name, config(name, engine), weights, IN_FLIGHT[name]) for name in ARMS]
    async with AsyncExitStack() as stack:
        # one for all: the labels that another connection gives to weights are none of its own
        (probe,) = await open_servers(config("sync", engine).engine)  # type: ignore[arg-type]
        stack.push_async_callback(probe.close)
        for arm in arms:
            stack.push_async_callback(arm.open(probe).close)
        limits = {n: LimitSlices(probe, n, forced_lengths()) for n in sorted(set(IN_FLIGHT.values()))}
        await times.measure(probe, PROMPT_LEN, (1, 8))  # a first request is slow everywhere
        times = StepTimes()
        steps_of_arms, slices_of_limits = [arm.step for arm in arms], [s.measure for s in limits.values()]
        for number in range(ramp + steps):
            if number == ramp:
                for arm in arms:
                    arm.figures.clear()
                for slices in limits.values():
                    slices.rates.clear()
            if number >= ramp and (number - ramp) % CURVE_EVERY == 0:
                await times.measure(probe, PROMPT_LEN)
            turns = steps_of_arms + (slices_of_limits if number % SLICE_EVERY == 0 else [])
            shift = number % len(turns)
            for turn in turns[shift:] + turns[:shift]:
                await turn()
            print(f"\rround {number + 1} of {ramp + steps}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return report(arms, limits, times, steps + ramp)


def report(arms: list[Arm], limits: dict[int, LimitSlices], times: StepTimes, steps: int) -> dict[str, Any]:
    """Rates, ratios, and where the time went that is not decoding."""
    cost = MeasuredCost.of(times, PROMPT_LEN)
    limit = {n: sum(s.rates) / len(s.rates) for n, s in limits.items()}
    rows = {arm.name: arm_row(arm, limit[arm.places], cost, times, steps) for arm in arms}
    for row in rows.values():
        for kind in ("", "replay_"):
            rate = f"{kind}trained_per_s"
            row[f"{kind}gain"] = row[rate] / rows["sync"][rate]
        row["gain_of_replay"] = row["gain"] / row["replay_gain"]
    return {
        "arms": rows,
        "limit_tokens_per_s": limit,
        "limit_by_curve": {n: 1.0 / seconds_per_token(cost, n, forced_lengths()) for n in limit},
        "step_ms": {n: s * 1e3 for n, s in times.curve().items()},
        "held_token_ns": cost.per_kv_token_s * 1e9,
    }


def seconds_per_token(cost: MeasuredCost, in_flight: int, lengths: LognormalLengths) -> float:
    """Of an engine kept full by responses of such lengths."""
    drawn = drawn_lengths(lengths)
    # a response of length L is met with a probability proportional to L, and half done
    held = PROMPT_LEN + sum(n * n for n in drawn) / (2 * sum(drawn))
    return cost.step_s(in_flight, round(in_flight * held)) / in_flight


def arm_row(arm: Arm, limit: float, cost: MeasuredCost, times: StepTimes, steps: int) -> dict[str, float]:
    """Means over the counted steps."""
    f, n = arm.figures, len(arm.figures)
    wall = sum(s.wall_s for s in f)
    replay = arm.replay(cost, steps)
    prefill_s = sorted(times.prefill)[len(times.prefill) // 2]
    return {
        "steps": n,
        "wall_s_per_step": wall / n,
        "generated_per_s": sum(s.generated for s in f) / wall,
        "trained_per_s": sum(s.trained for s in f) / wall,
        "of_limit": sum(s.generated for s in f) / wall / limit,
        "replay_generated_per_s": replay["generated_tokens_per_s"],
        "replay_trained_per_s": replay["trained_tokens_per_s"],
        "of_replay": sum(s.generated for s in f) / wall / replay["generated_tokens_per_s"],
        "update_share": sum(s.update_s for s in f) / wall,
        "abort_share": sum(s.abort_s for s in f) / wall,
        "reprefill_share": sum(s.reprefill for s in f) * prefill_s / wall,
        "in_flight_mean": sum(s.in_flight_s for s in f) / wall,
        "off_policy_share": sum(s.off_policy_share * s.trained for s in f) / sum(s.trained for s in f),
        "of_fitted_limit": of_fitted_limit(arm),
    }


def of_fitted_limit(arm: Arm) -> float:
    """Share of the time that the limit takes, by the cost that is fitted to the arm's own requests; nan if too few."""
    ended = [ran for step in arm.figures for ran in step.ended]
    fitted = fit(Requests.of(ended))
    if fitted is None:
        return math.nan
    brought = RequestSums()
    for ran in ended:
        brought.add(ran)
    found = distance_of(
        [(fitted.cost, brought)], places=arm.places, seconds=sum(s.wall_s for s in arm.figures),
        again=sum(s.reprefill for s in arm.figures), idle={},
    )  # fmt: skip
    assert found is not None
    return found.at_limit


def table(found: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        "| arm | generated tok/s | of the limit | of the fitted limit | of the replay | trained tok/s "
        "| gain over sync (replay) | update | abort | re-prefill | in flight | off-policy |",
        "|---" * 12 + "|",
    ]
    for name, r in found["arms"].items():
        lines.append(
            f"| {name} | {r['generated_per_s']:,.0f} | {r['of_limit']:.2f} | {r['of_fitted_limit']:.0%} "
            f"| {r['of_replay']:.2f} | {r['trained_per_s']:,.0f} | {r['gain']:.2f}x ({r['replay_gain']:.2f}x) "
            f"| {r['update_share']:.1%} | {r['abort_share']:.1%} | {r['reprefill_share']:.1%} "
            f"| {r['in_flight_mean']:.1f} | {r['off_policy_share']:.0%} |"
        )
    by_curve = found["limit_by_curve"]
    kept = ", ".join(
        f"{rate:,.0f} tok/s at {n}, {rate / by_curve[n]:.2f} of the curve's"
        for n, rate in found["limit_tokens_per_s"].items()
    )
    curve = ", ".join(f"{ms:.2f} at {n}" for n, ms in found["step_ms"].items())
    each = PROMPT_LEN + (SHORT + LONG) // 2
    held = f"{found['held_token_ns']:.0f} ns more for each token in the cache beyond {each} per request"
    return "\n".join([*lines, "", f"Limit (server kept full): {kept}.", f"Decode step, ms: {curve}; {held}."])


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="april on a real server: rates beside the limit and the replay.")
    parser.add_argument("kind", choices=("vllm", "sglang", "openai"))
    parser.add_argument("url")
    parser.add_argument("--weights", nargs=2, required=True, help="two directories, loaded in turn at each step")
    parser.add_argument("--steps", type=int, default=64, help="counted steps of each arm")
    parser.add_argument("--ramp", type=int, default=4, help="steps before them")
    parser.add_argument("--json", type=Path, help="write the report here")
    args = parser.parse_args(argv)
    if args.steps < 1 or args.ramp < 0:
        parser.error("--steps must be at least 1 and --ramp at least 0")
    found = asyncio.run(run({"kind": args.kind, "urls": args.url}, args.weights, args.steps, args.ramp))
    print(table(found))
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
