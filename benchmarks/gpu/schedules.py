"""Whole rollouts through april: sync, N' = 2N and refill, with the same forced lengths, in tokens per second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from april.config.settings import Config
from april.core.batch import Batch
from april.core.types import Prompt
from april.driver.llm import LLM
from april.engines.simulated.decode_cost import DecodeCost, limit_tokens_per_s
from april.engines.simulated.response_lengths import LognormalLengths
from april.engines.transformers.engine import TransformersEngine
from april.scheduler import RolloutScheduler
from benchmarks.gpu.record import Deadline
from benchmarks.gpu.shapes import Traffic

ARMS: dict[str, dict[str, Any]] = {
    "sync": {},
    "N' = 2N": {"over": 2},
    "refill": {"refill": "sample"},
}
RAMP = 1
"""Steps of an arm that are not counted."""
STEPS = 5
"""That an arm should have time for, the ramp among them."""
SIGMA_BETWEEN, SIGMA_WITHIN = 0.7, 0.7
CAP_OVER_MEDIAN = 8


@dataclass(frozen=True, slots=True)
class Workload:
    """N groups of n samples; ``cap``: longest response; the lengths are lognormal, equal in every arm."""

    groups: int
    samples: int
    prompt_len: int
    cap: int
    most_steps: int | None = None
    """Of an arm; None: until its time is over."""

    @property
    def lengths(self) -> LognormalLengths:
        """By group and sample."""
        return LognormalLengths(max(1.0, self.cap / CAP_OVER_MEDIAN), SIGMA_BETWEEN, SIGMA_WITHIN, cap=self.cap)

    @property
    def in_flight(self) -> int:
        """Of sync and refill; N' = 2N has twice as many."""
        return self.groups * self.samples

    @classmethod
    def fitting(
        cls, reads: Traffic, free: int, step_s: float, arm_s: float, *, groups: int, samples: int, prompt_len: int,
        longest: int, most_steps: int | None = None,
    ) -> Workload:  # fmt: skip
        """As many groups as memory has room for, and responses as long as leave time for STEPS steps of sync."""
        cap = int(min(max(arm_s / STEPS / step_s, 4 * CAP_OVER_MEDIAN), longest - prompt_len))
        while groups > 2 and 2 * groups * samples * (prompt_len + cap) * reads.kv_bytes_per_token > 0.4 * free:
            groups //= 2
        return cls(groups, samples, prompt_len, cap, most_steps)

    def prompts(self, vocab: int) -> Iterator[Prompt]:
        """For ever; no two begin alike."""
        rng = np.random.default_rng(0)
        while True:
            yield Prompt(rng.integers(2, vocab, self.prompt_len, dtype=np.int32))


async def no_reward(prompt: Prompt, response: Any) -> float:
    """Nothing is trained here."""
    return 0.0


def run_arm(
    model: Any, workload: Workload, arm: dict[str, Any], deadline: Deadline,
    seen: Callable[[Batch, dict[str, Any]], None],
) -> dict[str, float]:  # fmt: skip
    """Steps of one schedule until its time is over, at least one beyond the ramp; ``seen`` hears of each.

    Returns: the engine's own counters at the end.

    Raises:
        RuntimeError: a response has not its forced length.
    """
    w, lengths = workload, workload.lengths
    over = int(arm.get("over", 1))
    settings = {k: v for k, v in arm.items() if k != "over"}
    if "refill" in settings:
        settings["max_in_flight"] = w.in_flight
    config = Config(
        rollout_batch_size=w.groups, n_samples_per_prompt=w.samples, over_sampling_batch_size=over * w.groups,
        max_response_len=w.cap, **settings,
    )  # fmt: skip
    engine = TransformersEngine(model, slots=over * w.in_flight, max_len=w.prompt_len + w.cap)

    async def forced(prompt: Prompt, llm: LLM) -> None:
        await llm.generate(max_tokens=lengths.sample(llm.sample_id.group, llm.sample_id.index))

    vocab = engine.capabilities.vocab_size
    with RolloutScheduler(
        config, engines=[engine], prompts=w.prompts(vocab), rollout=forced, reward=no_reward
    ) as rollouts:
        steps = 0
        while steps <= RAMP or (steps != w.most_steps and not deadline.over):
            before, start = rollouts.ledger()["tokens"].observed, time.perf_counter()
            rollouts.weight_update()
            batch = rollouts.next_batch()
            wall = time.perf_counter() - start
            if batch.lengths.tolist() != [lengths.sample(s.id.group, s.id.index) for s in batch.samples]:
                raise RuntimeError("a response has not the length that was asked for")
            m = batch.metrics
            seen(batch, {
                "wall_s": wall, "trained": int(batch.lengths.sum()),
                "generated": rollouts.ledger()["tokens"].observed - before,
                "prefilled_again": m.get("reprefill_tokens", 0.0), "off_policy_share": batch.off_policy_share,
            })  # fmt: skip
            steps += 1
    return engine.stats.counters()


@dataclass(frozen=True, slots=True)
class Limits:
    """Tokens per second of places that are full for ever: by the measured step times, and by memory bandwidth alone."""

    workload: Workload
    reads: Traffic
    bytes_per_s: float
    cost: DecodeCost | None

    def of(self, in_flight: int, generated_per_s: float) -> dict[str, float]:
        """The limits at so many in flight, and what share of them this rate is."""
        w = self.workload
        sampled = np.concatenate([w.lengths.group(i, w.samples) for i in range(256)])
        weighed = sampled.astype(float)
        # a sequence is met with probability proportional to its length, on average half done
        held = w.prompt_len + float((weighed * weighed).sum() / weighed.sum()) / 2
        found = {"bandwidth_per_s": in_flight * self.bytes_per_s / self.reads.step_bytes(in_flight, held)}
        found["share_of_bandwidth"] = generated_per_s / found["bandwidth_per_s"]
        if self.cost is not None:
            found["limit_per_s"] = limit_tokens_per_s(self.cost, sampled, in_flight, w.prompt_len)
            found["share_of_limit"] = generated_per_s / found["limit_per_s"]
        return found


def measure(
    model: Any, workload: Workload, limits: Limits, deadline: Deadline, figures: dict[str, Any],
    write: Callable[[], None], tell: Callable[[str, dict[str, Any]], None],
) -> None:  # fmt: skip
    """All arms, one after the other, each with its share of the time; ``figures`` has what is known at any moment.

    ``write`` is called after every step, ``tell`` with every arm.
    """
    w = workload
    figures["workload"] = {
        "groups": w.groups, "samples": w.samples, "prompt_len": w.prompt_len, "longest": w.cap,
        "median": w.cap / CAP_OVER_MEDIAN, "sigma_between": SIGMA_BETWEEN, "sigma_within": SIGMA_WITHIN,
    }  # fmt: skip
    arms: dict[str, Any] = {}
    figures["arms"] = arms
    for i, (name, arm) in enumerate(ARMS.items()):
        steps: list[dict[str, Any]] = []
        row: dict[str, Any] = {"in_flight": int(arm.get("over", 1)) * w.in_flight, "steps": steps}
        arms[name] = row

        def seen(_: Batch, step: dict[str, Any], steps: list[Any] = steps, row: dict[str, Any] = row) -> None:
            steps.append(step)
            row |= _summary(steps[RAMP:])
            write()

        counters = run_arm(model, w, arm, Deadline(deadline.left_s / (len(ARMS) - i)), seen)
        row |= limits.of(row["in_flight"], row["generated_per_s"])
        row |= {"occupancy": counters["occupancy"], "over_sync": row["trained_per_s"] / arms["sync"]["trained_per_s"]}
        tell(name, row)


def _summary(steps: list[dict[str, Any]]) -> dict[str, float]:
    if not steps:
        return {}
    wall = sum(s["wall_s"] for s in steps)
    trained = sum(s["trained"] for s in steps)
    return {
        "counted_steps": len(steps),
        "trained_per_s": trained / wall,
        "generated_per_s": sum(s["generated"] for s in steps) / wall,
        "off_policy_share": sum(s["off_policy_share"] * s["trained"] for s in steps) / trained,
    }
