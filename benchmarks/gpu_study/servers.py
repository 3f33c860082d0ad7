"""Servers on the GPUs that do not train, started anew for each training, which begins with the weights of the start."""

from __future__ import annotations

import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.gpu_study.design import GpuSizes

FIRST_PORT = 8000
READY_S = 1800.0
"""Longest wait for a server: the first one downloads the model."""
ALONE, SHARED = 0.9, 0.35
"""Share of a GPU's memory for a server that has it alone, and for one that has it with the trainer."""
KEEP_ALIVE_S = "7200"
"""Longer than any training step and evaluation."""


def command(sizes: GpuSizes, port: int, python: str) -> list[str]:
    """Return the command of one server; docs/servers.md says what each flag is for."""
    share = str(SHARED if sizes.gpus == 1 else ALONE)
    where = ["--host", "127.0.0.1", "--port", str(port), "--dtype", sizes.dtype]
    if sizes.engine == "vllm":
        return [
            python, "-m", "vllm.entrypoints.cli.main", "serve", sizes.model, *where, "--max-model-len",
            str(sizes.max_len), "--enable-scale-out", "--logprobs-mode", "processed_logprobs",
            "--enable-prefix-caching", "--gpu-memory-utilization", share,
        ]  # fmt: skip
    return [
        python, "-m", "sglang.launch_server", "--model-path", sizes.model, *where, "--context-length",
        str(sizes.max_len), "--incremental-streaming-output", "--mem-fraction-static", share,
    ]  # fmt: skip


def gpus_of(sizes: GpuSizes) -> tuple[str, list[str]]:
    """Return the GPUs of the trainer, and that of each server, of those that CUDA_VISIBLE_DEVICES names, if it does.

    Raises:
        RuntimeError: it names fewer.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = named.split(",") if named else [str(number) for number in range(sizes.gpus)]
    if len(gpus) < sizes.gpus:
        raise RuntimeError(f"CUDA_VISIBLE_DEVICES={named} names fewer than {sizes.gpus} GPUs")
    first = 0 if sizes.gpus == 1 else sizes.trainers
    return ",".join(gpus[: sizes.trainers]), gpus[first : first + sizes.servers]


@contextmanager
def serving(sizes: GpuSizes, logs: Path, python: str) -> Iterator[list[str]]:
    """Start the servers, wait until all are ready, and end them; gives their addresses.

    Raises:
        RuntimeError: one has ended, or is not ready after READY_S; its log is named.
    """
    with ExitStack() as stack:
        running = []
        for number, gpu in enumerate(gpus_of(sizes)[1]):
            port, log = FIRST_PORT + number, logs / f"server{number}.log"
            environment = os.environ | {
                "CUDA_VISIBLE_DEVICES": gpu, "VLLM_SERVER_DEV_MODE": "1",
                "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": KEEP_ALIVE_S, "SGLANG_TIMEOUT_KEEP_ALIVE": KEEP_ALIVE_S,
            }  # fmt: skip
            output = stack.enter_context(log.open("wb"))
            process = subprocess.Popen(command(sizes, port, python), env=environment, stdout=output, stderr=output)
            stack.callback(_end, process)
            running.append((f"http://127.0.0.1:{port}", process, log))
        for url, process, log in running:
            _wait(url, process, log)
        yield [url for url, _, _ in running]


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + READY_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise RuntimeError(f"the server for {url} has ended; {log} says why")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=10):  # noqa: S310 - our own loopback server
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"the server for {url} is not ready after {READY_S:.0f} s; {log} says why")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
