"""The cap on a simulated server whose key-value memory is too small for what may be in flight."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import pairwise

import april
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.engine import SimulatedEngine
from april.testing import rollouts, run_virtual

MEMORY = DecodeCost(0.02, 1e-4, 1e-7, per_prefill_token_s=5e-4, kv_capacity_tokens=24_000)
"""Room for some 40 responses of the mean length at once; 128 may be in flight."""
STEPS = 6


@dataclass(frozen=True)
class Outcome:
    """Of a run of a few steps."""

    seconds: float
    preemptions: list[int]
    """Per step."""
    caps: list[float | None]
    """At the end of each step."""


def outcome(*, remote: bool) -> Outcome:
    """``remote``: april hears of the load, and may lower the cap."""

    async def program() -> Outcome:
        engine = SimulatedEngine(
            "simulated", MEMORY, lambda request: 300 + 37 * (request.sample_key or (0, 0))[0] % 900, max_running=128,
            admission_reserve=1, remote=remote,
        )  # fmt: skip
        config = april.Config(
            rollout_batch_size=32, over_sampling_batch_size=48, n_samples_per_prompt=4, max_response_len=2000,
            max_in_flight=128,
        )  # fmt: skip
        preemptions, caps = [0], []
        prompts = [[i % 900 + 1, i // 900 + 1] for i in range(1000)]
        run = rollouts(config, engines=[engine], prompts=prompts, reward=lambda p, r: 1.0)
        for _ in range(STEPS):
            batch = await run.next_batch()
            caps.append(batch.metrics.get("engine/simulated/cap"))
            preemptions.append(engine.decoder.counters().preemptions)
            await run.weight_update(transfer=lambda: None)
        seconds = asyncio.get_running_loop().time()
        await run.close()
        return Outcome(seconds, [b - a for a, b in pairwise(preemptions)], caps)

    return run_virtual(program())


def test_over_commitment_is_found_and_ended() -> None:
    """Fewer than a quarter of the preemptions are left, and the same work takes no longer than without a cap."""
    free, capped = outcome(remote=False), outcome(remote=True)
    assert free.caps == [128.0] * STEPS
    assert all(cap is not None and cap < 128 for cap in capped.caps)
    assert sum(capped.preemptions) < sum(free.preemptions) / 4
    assert capped.seconds < free.seconds
