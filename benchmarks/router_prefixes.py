"""The share of prompts that servers find in their caches, behind a real router, without and with april's routing key.

    python -m benchmarks.router_prefixes --workers 2 --router .venv/bin/sglang-router --policies manual cache_aware

The router is the real one (``pip install sglang-router`` or ``smg``), and april's client and scheduler are. The workers
are fake SGLang servers in this process, which keep every prefix of every sequence for ever, apart by salt, and have no
model: they show where requests go, not how fast. Without ``--router`` april itself places the requests. Each group is a
prompt and ``--samples`` conversations of ``--turns`` turns.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from aiohttp import web

import april
from april.config.engines import SglangEngineConfig
from tests.fake_servers.sglang import FakeSglangServer

VOCAB_SIZE, EOS = 32_000, 1
PROMPT_TOKENS, TURN_TOKENS, TOOL_TOKENS = 192, 16, 32
HEADER = (
    "| router | policy | routing key | cached share of the prompts | requests at the busiest worker / mean |\n"
    "|---|---|---|---|---|"
)


class Worker(FakeSglangServer):
    """With the routes by which a router looks for workers; requests last until the loop has turned some times."""

    def _routes(self) -> list[web.RouteDef]:
        ready = [web.get(route, self._ready) for route in ("/health", "/health_generate")]
        return [*super()._routes(), *ready]


@contextmanager
def workers_of(number: int) -> Iterator[list[Worker]]:
    """Workers on a loop of their own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def call(work: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(work, loop).result(60)

    workers = [Worker(vocab_size=VOCAB_SIZE, eos=EOS, mean_length=1 << 30, turns=40) for _ in range(number)]
    try:
        for worker in workers:
            call(worker.start())
        yield workers
    finally:
        for worker in workers:
            call(worker.close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def routed(command: str, policy: str, port: int, workers: list[Worker]) -> Iterator[str]:
    """A router process before the workers, once it knows them all; yields its address."""
    own = f"http://127.0.0.1:{port}"
    order = [command, "launch", "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(port + 1)]
    order += ["--policy", policy, "--worker-urls", *(worker.url for worker in workers)]
    with tempfile.TemporaryFile() as log, subprocess.Popen(order, stdout=log, stderr=log) as process:
        try:
            deadline = time.monotonic() + 60
            while not _answers(f"{own}/readiness"):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise SystemExit(log.read().decode(errors="replace")[-2000:])
                time.sleep(0.2)
            yield own
        finally:
            process.terminate()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:  # noqa: S310 - the router of this program
            return bool(answer.status == 200)
    except OSError:
        return False


def conversation(turns: int) -> Callable[..., Coroutine[Any, Any, None]]:
    """A rollout function: the model and a tool take turns. The tool never answers two conversations alike."""
    numbers = count()

    async def rollout(prompt: april.Prompt, llm: april.LLM) -> None:
        tokens, number = list(prompt.token_ids), next(numbers)
        for _ in range(turns):
            said = await llm.generate(tokens, max_tokens=TURN_TOKENS)
            tokens = [*tokens, *said.tokens.tolist(), *range(number + 2, number + 2 + TOOL_TOKENS)]

    return rollout


def measure(
    workers: list[Worker], router: str | None, key: str, groups: int, samples: int, turns: int
) -> tuple[float, float]:
    """Return the cached share of one step, and how many requests the busiest worker got, relative to the mean."""
    engine = SglangEngineConfig.model_validate({
        "urls": [worker.url for worker in workers], "router": router, "routing_key": key, "eos_token_ids": [EOS],
    })  # fmt: skip
    config = april.Config(
        rollout_batch_size=groups, n_samples_per_prompt=samples, engine=engine,
        max_response_len=turns * (TURN_TOKENS + TOOL_TOKENS),
    )  # fmt: skip
    prompts = ([2 + (group * 7 + i * i) % 20_000 for i in range(PROMPT_TOKENS)] for group in range(groups))
    with april.RolloutScheduler(
        config, prompts=prompts, rollout=conversation(turns), reward=lambda prompt, response: 0.0
    ) as scheduler:
        for worker in workers:
            worker.runs.clear()  # those of the probe
        share = scheduler.next_batch().metrics["cached_share"]
    got = [len(worker.runs) for worker in workers]
    return share, max(got) / (sum(got) / len(got))


def main(argv: list[str] | None = None) -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", help="Program of sglang-router or smg; without it april places requests.")
    parser.add_argument("--policies", nargs="+", default=["manual"])
    parser.add_argument("--keys", nargs="+", default=["off", "sample", "group"])
    parser.add_argument("--port", type=int, default=9810)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    asked = parser.parse_args(argv)
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # routers try HTTP/2 first
    print(HEADER)
    sizes = asked.groups, asked.samples, asked.turns
    if asked.router is None:
        with workers_of(asked.workers) as workers:
            share, busiest = measure(workers, None, "off", *sizes)
        print(f"| none: april places | | | {share:.1%} | {busiest:.2f} |", flush=True)
        return 0
    for policy in asked.policies:
        for key in asked.keys:
            with workers_of(asked.workers) as workers, routed(asked.router, policy, asked.port, workers) as url:
                share, busiest = measure(workers, url, key, *sizes)
            print(f"| {Path(asked.router).name} | {policy} | {key} | {share:.1%} | {busiest:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
