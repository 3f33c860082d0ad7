"""What an evaluation per batch takes beside continuous training, and what it costs training, on simulated engines.

Two engines, 64 requests of training in flight, lognormal lengths, virtual time. ``alone`` is the same evaluation while
nothing trains. ``max_staleness`` is so large that training never waits for the trainer, who waits for evaluations.

    python -m benchmarks.evaluation --answers 24 160 --shares 0.25 0.5 1
"""

from __future__ import annotations

import argparse
import asyncio
from statistics import fmean

import numpy as np

import april
from april.engines.protocol import Request
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.engine import SimulatedEngine
from april.testing import rollouts, run_virtual

COST = DecodeCost(base_s=0.010, per_sequence_s=0.00002, per_kv_token_s=1e-8, per_prefill_token_s=1e-5)
ANSWER = 200
LENGTHS = np.minimum(np.random.default_rng(0).lognormal(6.5, 0.8, 100_000).astype(int) + 1, 4000)


def length_of(request: Request) -> int:
    """Return the length of a training response, or of a greedy answer of an evaluation."""
    group, index = request.sample_key or (0, 0)
    return ANSWER if request.sampling.temperature == 0 else int(LENGTHS[(8 * group + index) % len(LENGTHS)])


async def measured(slots: int, answers: int, share: float, batches: int) -> tuple[float, float, float]:
    """Return the seconds of an evaluation alone and beside training, and training's tokens per second."""
    config = april.Config(
        rollout_batch_size=8, n_samples_per_prompt=8, max_response_len=4000, generation="continuous", max_staleness=64,
        max_in_flight=64, evaluation_share=share,
    )  # fmt: skip
    engines = [SimulatedEngine(f"e{i}", COST, length_of, max_running=slots) for i in range(2)]
    prompts = [[1 + i % 900, 1 + i // 900] for i in range(100_000)]
    loop = asyncio.get_running_loop()
    async with rollouts(config, engines=engines, prompts=prompts, reward=lambda p, r: 1.0, check=False) as run:

        async def seconds() -> float:
            began = loop.time()
            if answers:
                await run.evaluate(prompts[:answers], temperature=0)
            return loop.time() - began

        alone = await seconds()
        await run.next_batch()
        began, had, taken = loop.time(), run.driver.core.tokens.observed, []
        for _ in range(batches):
            taken.append(await seconds())
            await run.weight_update()
            await run.next_batch()
        return alone, fmean(taken), (run.driver.core.tokens.observed - had) / (loop.time() - began)


def main() -> None:
    """Print one line per combination."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, nargs="+", default=[24, 160])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.5, 1.0])
    parser.add_argument("--batches", type=int, default=10)
    asked = parser.parse_args()
    for slots in (64, 32):
        _, _, without = run_virtual(measured(slots, 0, 0.5, asked.batches))
        print(f"{2 * slots} slots: {without:,.0f} tokens per second without evaluations")
        for answers in asked.answers:
            for share in asked.shares:
                alone, beside, rate = run_virtual(measured(slots, answers, share, asked.batches))
                print(
                    f"  {answers} answers, share {share:g}: {beside:.1f} s beside training, {alone:.1f} s alone "
                    f"({beside / alone:.2f}x); training generates {rate / without:.2f}x"
                )


if __name__ == "__main__":
    main()
