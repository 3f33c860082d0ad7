"""What hosts cost the core's process: 1,000 engines with 64 requests each, on virtual time.

The real core with the real desks, mirrors and frames of hosts; engines and network are simulated. Throughput is
compared with the same engines in the core's own process; CPU is that of the core's process only: events, commands,
frames in and out. A host sends a frame whenever one of its engines has something to say: frames are as small as can be.

    python -m benchmarks.hosts_simulated
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from april.core.settings import CoreSettings
from april.core.types import GenerationMode, Refill
from april.engines.simulated.decode_cost import roofline
from april.engines.simulated.response_lengths import LognormalLengths, ResponseLengths
from april.simulate.hosts import SimulatedHosts
from april.simulate.simulation import Simulation, SimulationResult

COST = roofline("qwen3-4b", "h100", tensor_parallel=2)
SAMPLES = 8


class TimedSimulation(Simulation):
    """With the CPU time of all turns of the core's process; meant for simulations with hosts."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.core_cpu_s = 0.0
        self.turns = 0
        super().__init__(*args, **options)

    def turn(self, work: Callable[[], None]) -> None:
        """One more."""
        began = time.process_time()
        super().turn(work)
        self.core_cpu_s += time.process_time() - began
        self.turns += 1


def settings(engines: int, each: int, max_response_len: int, generation: GenerationMode) -> CoreSettings:
    """A batch is half of what is in flight."""
    groups = max(1, engines * each // SAMPLES // 2)
    return CoreSettings(
        rollout_batch_size=groups,
        n_samples_per_prompt=SAMPLES,
        over_sampling_batch_size=groups,
        max_response_len=max_response_len,
        max_in_flight=engines * each,
        refill=Refill.SAMPLE,
        generation=generation,
        has_reward=False,
    )


def counts(simulation: TimedSimulation) -> dict[str, float]:
    """Totals since the beginning."""
    assert isinstance(simulation.engines, SimulatedHosts)
    desks = simulation.engines.desks
    return {
        "cpu_s": simulation.core_cpu_s,
        "virtual_s": simulation.now,
        "turns": simulation.turns,
        "events": simulation.core.context.event_number,
        "requests": sum(d.counters().requests for d in simulation.decoders.values()),
        "frames": sum(d.frames_out + d.frames_in for d in desks),
        "messages_out": sum(d.messages_out for d in desks),
        "messages_in": sum(d.messages_in for d in desks),
        "bytes_out": sum(d.bytes_out for d in desks),
        "bytes_in": sum(d.bytes_in for d in desks),
    }


def per_unit(spent: dict[str, float], tokens: float, steps: int) -> dict[str, float]:
    """What the core's process spends per request and per step."""
    requests, messages = spent["requests"], spent["messages_in"] + spent["messages_out"]
    return {
        "requests_per_step": requests / steps,
        "cpu_us_per_request": 1e6 * spent["cpu_s"] / requests,
        "cpu_s_per_step": spent["cpu_s"] / steps,
        "cpu_ms_per_1000_tokens": 1e6 * spent["cpu_s"] / tokens,
        "cpu_cores_that_keep_up": spent["cpu_s"] / spent["virtual_s"],
        "events_per_request": spent["events"] / requests,
        "messages_per_request": messages / requests,
        "messages_per_step": messages / steps,
        "messages_per_frame": messages / spent["frames"],
        "bytes_per_request": (spent["bytes_in"] + spent["bytes_out"]) / requests,
        "megabytes_per_step": (spent["bytes_in"] + spent["bytes_out"]) / 1e6 / steps,
    }


def compare(
    core_settings: CoreSettings, lengths: ResponseLengths, engines: int, hosts: int, latency_s: float, steps: int
) -> dict[str, Any]:
    """Both simulations, each without its first step."""

    def rate(result: SimulationResult) -> float:
        return result.summary(skip=1)["generated_tokens_per_s"]

    alone = rate(Simulation(core_settings, COST, lengths, engines=engines).run(steps + 1))
    simulation = TimedSimulation(
        core_settings, COST, lengths, engines=engines, hosts=hosts, host_latency_s=latency_s
    )
    simulation.run(1)
    before = counts(simulation)
    result = simulation.run(steps)
    spent = {name: value - before[name] for name, value in counts(simulation).items()}
    tokens = result.summary(skip=1)["generated_tokens"]
    return {
        "engines": engines, "in_flight": core_settings.max_in_flight, "hosts": hosts, "latency_s": latency_s,
        "steps": steps, "generation": str(core_settings.generation), "tokens_per_s": rate(result),
        "tokens_per_s_without_hosts": alone,
        "throughput_ratio": rate(result) / alone, **per_unit(spent, tokens, steps),
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description="What hosts cost the core's process, on virtual time.")
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--each", type=int, default=64, help="requests in flight per engine")
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--latency-ms", type=float, default=1.0, help="of a frame, either way")
    parser.add_argument("--steps", type=int, default=3, help="besides the first one, which is left out")
    parser.add_argument("--median-len", type=float, default=500.0, help="of responses, in tokens")
    parser.add_argument("--max-response-len", type=int, default=2048)
    parser.add_argument("--continuous", action="store_true", help="a delivery cuts nothing")
    args = parser.parse_args(argv)
    generation = GenerationMode.CONTINUOUS if args.continuous else GenerationMode.STEPWISE
    lengths = LognormalLengths.split(median=args.median_len, sigma=0.8, between_share=0.6, seed=1)
    core_settings = settings(args.engines, args.each, args.max_response_len, generation)
    row = compare(core_settings, lengths, args.engines, args.hosts, args.latency_ms / 1e3, args.steps)
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
