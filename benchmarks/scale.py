"""What does one scheduler need for so many GPUs: cores, bytes per second, memory, time of a checkpoint?

A scheduler runs before engines that cost nothing, which another process serves (``april.serve``), and generates as fast
as the two processes can. The benchmark measures what a request, an event, a sample in flight and a checkpoint cost
the scheduler, and multiplies this by what the GPUs of ``--gpus`` would ask for. Run: ``python -m benchmarks.scale``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import stat
import struct
import tempfile
import time
from pathlib import Path
from typing import Any

import april
from april.engines.protocol import Engine
from april.serialization.state_file import write_state
from benchmarks.canned_server import require_open_files
from benchmarks.loop_gaps import Ends, FreeEngine, prompts, resident_mb

BYTES_RECEIVED = 128
"""Position of this number in the kernel's ``tcp_info`` (Linux)."""
TOKEN_BYTES = 8
"""Bytes of a token and its log-probability."""


def serve(engines: int, mean_s: float, length: int, urls: Any) -> None:
    """Serve engines that cost nothing until the process is ended."""

    async def run() -> None:
        ends = Ends()
        names = [f"e{i:05d}" for i in range(engines)]
        objects: list[Engine] = [FreeEngine(name, mean_s, ends, i, length) for i, name in enumerate(names)]
        servers = [await april.serve(engine, shares_model=True) for engine in objects]
        urls.put([server.url for server in servers])
        await ends.run()

    asyncio.run(run())


def bytes_received() -> int:
    """Return the number of bytes that the open TCP connections of this process have received (Linux)."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            fd = os.dup(int(name))
        except OSError:  # closed meanwhile
            continue
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            os.close(fd)
            continue
        with socket.socket(fileno=fd) as connection:
            if connection.family == socket.AF_INET and connection.type == socket.SOCK_STREAM:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += struct.unpack_from("Q", info, BYTES_RECEIVED)[0]
    return total


def measure(in_flight: int, engines: int, length: int, seconds: float) -> dict[str, float]:
    """Run a scheduler before served engines and return what it needs."""
    require_open_files(in_flight + engines)
    methods = multiprocessing.get_context("spawn")
    urls: Any = methods.SimpleQueue()
    server = methods.Process(target=serve, args=(engines, in_flight / 5000, length, urls), daemon=True)
    server.start()
    config = april.Config(
        rollout_batch_size=max(1, in_flight // 16), n_samples_per_prompt=8, max_response_len=length, refill="sample",
        max_in_flight=in_flight, max_staleness=8, abort_deadline_s=600.0,
        engine={"kind": "april", "urls": urls.get(), "interval_s": 600.0},
    )  # fmt: skip
    before_mb = resident_mb()
    try:
        with april.RolloutScheduler(config, prompts=prompts(0), progress=False, reward=None) as rollouts:
            core, updates = rollouts._driver.core, list[float]()

            def step() -> int:
                count = len(rollouts.next_batch().samples)
                at = time.process_time()
                rollouts.weight_update()
                updates.append(time.process_time() - at)
                return count

            step()
            events, sent, received = core.context.event_number, core.counters["attempts"], bytes_received()
            began, cpu, samples = time.perf_counter(), time.process_time(), 0
            while time.perf_counter() - began < seconds:
                samples += step()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - began
            sent = core.counters["attempts"] - sent
            found = {
                "in_flight": in_flight, "engines": engines, "response_tokens": length, "seconds": round(wall),
                "samples": samples, "requests": sent, "requests_per_s": round(sent / wall),
                "share_of_a_core": round(cpu / wall, 2), "us_per_request": round(cpu / sent * 1e6),
                "events_per_request": round((core.context.event_number - events) / sent, 2),
                "bytes_per_sample": round((bytes_received() - received) / samples),
                "kb_per_sample_in_flight": round((resident_mb() - before_mb) / in_flight * 1024, 1),
            }  # fmt: skip
            found["update_us_per_engine"] = round(sorted(updates)[len(updates) // 2] / engines * 1e6)
            at = time.process_time()
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "state")
                write_state(path, "rollouts", rollouts.state_dict())
                found["checkpoint_us_per_sample"] = round((time.process_time() - at) / in_flight * 1e6)
                found["checkpoint_bytes_per_sample"] = round(path.stat().st_size / in_flight)
    finally:
        server.terminate()
        server.join()
    return found


def table(found: dict[str, float], options: argparse.Namespace) -> str:
    """Return what so many GPUs need, as a table in Markdown."""
    rows: dict[str, list[str]] = {}
    for gpus in options.gpus:
        in_flight, tokens = gpus * options.slots, gpus * options.tokens_per_s
        ends = tokens / options.length
        requests = ends * options.requests_per_response
        partial_bytes = in_flight * options.length / 2 * TOKEN_BYTES
        saving_us = in_flight * found["checkpoint_us_per_sample"] + partial_bytes * options.checkpoint_ns_per_byte / 1e3
        cells = {
            "requests in flight": f"{in_flight:,}",
            "tokens per second": f"{tokens:,.0f}",
            "responses that end per second": f"{ends:,.0f}",
            "events of the core per second": f"{requests * found['events_per_request']:,.0f}",
            "MB per second to the scheduler": f"{ends * found['bytes_per_sample'] / 1e6:,.1f}",
            "cores that the scheduler's loop would need": f"{requests * found['us_per_request'] / 1e6:.2f}",
            "memory, GB": f"{in_flight * found['kb_per_sample_in_flight'] * 1024 / 1e9:,.2f}",
            "CPU of a checkpoint, s": f"{saving_us / 1e6:,.2f}",
            "CPU of a weight update, s": f"{gpus * found['update_us_per_engine'] / 1e6:,.3f}",
        }
        for name, cell in cells.items():
            rows.setdefault(name, []).append(cell)
    head = ["GPUs", *(f"{gpus:,}" for gpus in options.gpus)]
    lines = [head, ["---"] * len(head), *([name, *cells] for name, cells in rows.items())]
    return "\n".join(f"|{'|'.join(line)}|" for line in lines)


def main() -> None:
    """Print the measured figures as JSON, and the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--in-flight", type=int, default=2048)
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64, 1000, 10_000])
    parser.add_argument("--slots", type=int, default=64, help="requests in flight per GPU")
    parser.add_argument("--tokens-per-s", type=float, default=2000.0, help="tokens per second of a GPU")
    parser.add_argument("--length", type=int, default=4000, help="tokens of a response, also in the run")
    parser.add_argument("--requests-per-response", type=float, default=2.0, help="a weight update cuts requests")
    parser.add_argument("--checkpoint-ns-per-byte", type=float, default=5.4, help="CPU (benchmarks.checkpoint)")
    options = parser.parse_args()
    found = measure(options.in_flight, options.engines, options.length, options.seconds)
    print(json.dumps(found), table(found, options), sep="\n")


if __name__ == "__main__":
    main()
