"""The reference workload of the APRIL paper (arXiv 2509.18521) on virtual time, in three modes.

32 groups x 8 samples, responses of at most 16,384 tokens, four engines of two H100 with Qwen3-4B. Prints the digest of
ten steps per mode, which covers every delivered sample with its segments, versions and times.
"""

from __future__ import annotations

import json

from april.core.settings import CoreSettings
from april.core.types import Refill
from april.engines.simulated.decode_cost import roofline
from april.engines.simulated.response_lengths import LognormalLengths
from april.simulate.simulation import Simulation

COST = roofline("qwen3-4b", "h100", tensor_parallel=2)
LENGTHS = LognormalLengths.split(median=2500, sigma=0.8, between_share=0.6, seed=1)
MODES = {
    "sync": (32, Refill.NONE, 256),
    "april": (64, Refill.NONE, 512),
    "refill": (32, Refill.SAMPLE, 256),
}


def reference(mode: str) -> Simulation:
    """The simulation of one mode, not started."""
    over, refill, in_flight = MODES[mode]
    settings = CoreSettings(
        rollout_batch_size=32,
        n_samples_per_prompt=8,
        over_sampling_batch_size=over,
        max_response_len=16_384,
        max_in_flight=in_flight,
        refill=refill,
        has_reward=False,
    )
    return Simulation(settings, COST, LENGTHS, engines=4, prompt_len=128)


if __name__ == "__main__":
    print(json.dumps({mode: reference(mode).run(10).digest for mode in MODES}))
