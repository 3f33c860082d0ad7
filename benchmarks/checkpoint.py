"""How long does a checkpoint hold april's event loop, what CPU time does it take, and how much memory at its peak?

    python -m benchmarks.checkpoint --samples 1024 16384 --tokens 8192

Samples with that many tokens each are in flight; saving collects their state on a loop whose longest stretch without
another callback is measured, and writes it from the main thread, as a trainer does; another process reads and restores
it. Memory is what the process takes beyond its state before the samples, over what the samples take: 1.0 means no copy.
16,384 samples of 8,192 tokens take 1 GB of memory and of disk.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from april.concurrency.garbage import collecting_less
from april.core import snapshot
from april.core.rollout_core import RolloutCore
from april.core.settings import CoreSettings, EngineLimits
from april.core.state_checksum import State, seal, verify_checksum
from april.driver.loop_thread import LoopThread
from april.driver.wire_checks import copied
from april.engines.protocol import Chunk
from april.serialization.state_file import read_state, write_state
from benchmarks.core_events import Pump

T = TypeVar("T")
KIND = "benchmark"
ENGINES = [EngineLimits(f"e{i}", 32768) for i in range(8)]


def memory_mib(name: str) -> float:
    """VmRSS, or VmHWM, of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


class Stage:
    """CPU time and peak memory of one stage, and the longest stretches of a loop in between."""

    def __init__(self) -> None:
        self.figures: dict[str, float] = {}
        gc.collect()
        self.base_mib = memory_mib("VmRSS")

    def run(self, name: str, function: Callable[[], T]) -> T:
        """Call the function and keep its figures under the name."""
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        cpu = time.process_time()
        value = function()
        self.figures[f"{name}_cpu_s"] = round(time.process_time() - cpu, 3)
        self.figures[f"{name}_peak_mib"] = round(memory_mib("VmHWM") - self.base_mib, 1)
        return value


class Gaps:
    """Longest delay of a callback on a loop, in seconds of the clock and in CPU seconds of the loop's thread."""

    def __init__(self) -> None:
        self.longest_s = self.longest_cpu_s = 0.0

    async def watch(self) -> None:
        """Watch until cancelled, by a callback every millisecond."""
        last = time.perf_counter(), time.thread_time()
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter(), time.thread_time()
            self.longest_s = max(self.longest_s, now[0] - last[0] - 0.001)
            self.longest_cpu_s = max(self.longest_cpu_s, now[1] - last[1])
            last = now


async def freeze(core: RolloutCore) -> Callable[[], State]:
    """Do what the driver does for ``state_dict``."""
    freezer = snapshot.Freezer(core)
    more = True
    while more:
        more = freezer.advance()
        await asyncio.sleep(0)
    return freezer.finish(None)


def write(samples: int, tokens: int, path: Path) -> dict[str, float]:
    """Save a core with so many samples in flight."""
    stage = Stage()
    pump = Pump(samples, 8)
    pump.run(200, random.Random(0))
    numbers = np.random.default_rng(0)
    for attempt in pump.attempts:
        ids, logprobs = numbers.integers(0, 150_000, tokens, np.int32), -numbers.random(tokens, np.float32)
        chunk = copied(Chunk(ids, logprobs, pump.core.clock.current), ())
        attempt.tape.append(chunk.tokens, chunk.logprobs, chunk.version)
    gc.collect()
    held = memory_mib("VmRSS") - stage.base_mib
    thread, gaps = LoopThread("loop", relax_gc=True), Gaps()
    watch = thread.submit(gaps.watch)
    state = stage.run("collect", lambda: thread.run(lambda: freeze(pump.core)))
    sealed = stage.run("seal", lambda: seal(KIND, {"core": state()}))
    stage.run("write", lambda: write_state(path, KIND, {"state": sealed}))
    watch.cancel()
    thread.stop()
    stage.figures |= {
        "longest_gap_ms": round(gaps.longest_s * 1e3, 1), "longest_hold_cpu_ms": round(gaps.longest_cpu_s * 1e3, 1)
    }  # fmt: skip
    return summary(stage, held)


def read(path: Path, settings: CoreSettings) -> dict[str, float]:
    """Read and restore what :func:`write` has written."""
    stage = Stage()
    found: dict[str, Any] = stage.run("read", lambda: read_state(path, KIND))
    stage.run("check", lambda: verify_checksum(KIND, found["state"]))
    core, trial = (RolloutCore(settings, ENGINES) for _ in range(2))
    loaded = stage.run("restore", lambda: snapshot.restore(trial, found["state"]["core"]))
    stage.run("move", lambda: snapshot.move(loaded, core))
    found, loaded, trial = {}, None, None  # type: ignore[assignment]
    gc.collect()
    return summary(stage, memory_mib("VmRSS") - stage.base_mib)


def summary(stage: Stage, held: float) -> dict[str, float]:
    """The figures with the sums and the peak over what is held."""
    figures = stage.figures
    peak = max(value for name, value in figures.items() if name.endswith("_peak_mib"))
    cpu = sum(value for name, value in figures.items() if name.endswith("_cpu_s"))
    return {**figures, "held_mib": round(held, 1), "cpu_s": round(cpu, 2), "peak_over_held": round(peak / held, 2)}


def main() -> None:
    """Print a JSON object for each number of samples."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, nargs="+", default=[1024])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--stage", choices=("write", "read"), help="run only this, on --file, in this process")
    parser.add_argument("--file", type=Path)
    args = parser.parse_args()
    if args.stage is not None:
        (samples,) = args.samples
        with collecting_less():
            if args.stage == "write":
                print(json.dumps(write(samples, args.tokens, args.file)))
            else:
                settings = replace(Pump(samples, 8).core.settings, max_response_len=32768)
                print(json.dumps(read(args.file, settings)))
        return
    for samples in args.samples:
        with tempfile.TemporaryDirectory() as folder:
            common = [sys.executable, "-m", "benchmarks.checkpoint", f"--samples={samples}", f"--tokens={args.tokens}"]
            for stage in ("write", "read"):
                command = [*common, f"--stage={stage}", f"--file={folder}/state"]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                print(json.dumps({"samples": samples, "stage": stage, **json.loads(done.stdout)}), flush=True)


if __name__ == "__main__":
    main()
