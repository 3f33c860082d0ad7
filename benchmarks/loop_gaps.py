"""For how long does april's event loop answer nobody, with thousands of samples in flight?

A whole scheduler before engines that cost nothing: it delivers batches, updates weights and, in the middle of the run,
evaluates and saves its state. The benchmark times every turn of the loop, by the wall clock and by the CPU time of the
loop's thread, and prints a histogram, the memory over time, and the CPU time per delivered sample. With ``--sessions``
agents in another process wait for answers of their own sessions; it prints how late the bytes came that keep their
connections alive. Run: ``python -m benchmarks.loop_gaps --in-flight 65536 --seconds 600 --engines 64 --sessions 64``.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import heapq
import itertools
import json
import multiprocessing
import os
import random
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

import april
from april.agents.sessions import Sessions
from april.core.sampling import LogprobKind
from april.core.types import Prompt, Request
from april.core.versions import FIRST_VERSION, PolicyVersion
from april.driver.llm import LLM
from april.driver.rewards import Response
from april.engines.protocol import Capabilities, Chunk, EngineFinish, Health
from april.serialization.state_file import write_state

EDGES_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
ENDS_PER_TURN = 32
AGENT = "agent"
ALIVE_S = 1.0


class FreeEngine:
    """Answers each request with ``length`` tokens after a random time, at next to no cost; if cut, with ``part``."""

    def __init__(self, name: str, mean_s: float, ends: Ends, seed: int, length: int = 256, part: int = 16) -> None:
        self._part = part
        self.name, self._mean_s, self._ends, self._rng = name, mean_s, ends, random.Random(seed)
        self._tokens = np.append(np.arange(length - 1, dtype=np.int32) % 900 + 5, np.int32(0))
        self._logprobs = np.full(length, -0.5, np.float32)
        self.capabilities = Capabilities(
            logprob_kind=LogprobKind.TEMPERATURE, vocab_size=1000, max_context=1 << 16, eos_token_ids=(0,),
            max_in_flight=1 << 17,
        )  # fmt: skip
        self._version = FIRST_VERSION
        self._running: dict[str, asyncio.Future[bool]] = {}

    async def generate(self, request: Request) -> AsyncIterator[Chunk]:
        future = asyncio.get_running_loop().create_future()
        self._running[request.attempt_id] = future
        self._ends.add(self._rng.expovariate(1.0 / self._mean_s), future)
        try:
            whole = await future
        finally:
            del self._running[request.attempt_id]
        begin = request.response_offset
        length = len(self._tokens)
        end = length if whole else max(begin, min(begin + self._part, length - 1))
        finish = EngineFinish.STOP if whole else EngineFinish.ABORT
        yield Chunk(self._tokens[begin:end], self._logprobs[begin:end], self._version, finish)

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        self._ends.cut += [self._running[i] for i in attempt_ids or list(self._running) if i in self._running]

    async def pause(self) -> None:
        return None

    async def resume(self) -> None:
        return None

    async def update_weights(self, version: PolicyVersion, path: str | None = None) -> None:
        self._version = version

    async def health(self) -> Health:
        return Health(ok=True)

    async def close(self) -> None:
        return None


class Ends:
    """Ends requests at their times and after aborts, a few in each turn of the loop, as replies of servers would."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, asyncio.Future[bool]]] = []
        self._number = itertools.count()
        self.cut: list[asyncio.Future[bool]] = []

    def add(self, after_s: float, future: asyncio.Future[bool]) -> None:
        heapq.heappush(self._due, (time.monotonic() + after_s, next(self._number), future))

    async def run(self) -> None:
        while True:
            now, due = time.monotonic(), self._due
            for _ in range(ENDS_PER_TURN):
                if self.cut:
                    future, whole = self.cut.pop(), False
                elif due and due[0][0] <= now:
                    future, whole = heapq.heappop(due)[2], True
                else:
                    break
                if not future.done():
                    future.set_result(whole)
            await asyncio.sleep(0 if self.cut or (due and due[0][0] <= now) else 0.002)


class TurnTimer:
    """Times each turn of a loop: from the return of the selector to its next call."""

    def __init__(self, selector: Any) -> None:
        self._selector = selector
        self.wall, self.cpu = defaultdict[str, Counter[int]](Counter), defaultdict[str, Counter[int]](Counter)
        self.collections = Counter[int]()
        self.longest: dict[str, list[tuple[float, float, float]]] = {}
        self.phase = "start"
        self._began: tuple[float, float] | None = None
        self._gc_s = self._gc_began = 0.0
        gc.callbacks.append(self._collected)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._selector, name)

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._gc_began = time.perf_counter()
        else:
            took = time.perf_counter() - self._gc_began
            self._gc_s += took
            self.collections[info["generation"]] += 1

    def select(self, timeout: float | None = None) -> Any:
        if self._began is not None:
            wall, cpu = time.perf_counter() - self._began[0], time.thread_time() - self._began[1]
            self.wall[self.phase][bin_of(wall)] += 1
            self.cpu[self.phase][bin_of(cpu)] += 1
            worst = self.longest.setdefault(self.phase, [])
            if len(worst) < 3 or cpu > worst[-1][0]:
                worst.append((round(cpu, 4), round(wall, 4), round(self._gc_s, 4)))
                worst.sort(reverse=True)
                del worst[3:]
            self._gc_s = 0.0
        found = self._selector.select(timeout)
        self._began = time.perf_counter(), time.thread_time()
        return found


def bin_of(seconds: float) -> int:
    """Return the index of the histogram's bin for a duration."""
    return sum(seconds * 1e3 > edge for edge in EDGES_MS)


def resident_mb() -> int:
    """Return the resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


def prompts(sessions: int) -> Iterator[dict[str, Any]]:
    """Return prompts without end; the first ones are for the agents."""
    for number in itertools.count():
        yield {"token_ids": [1, 2 + number % 900], AGENT: number < sessions}


# ---------------------------------------------------------------- agents, in a process of their own


def run_agents(url: str, key: str, count: int, length: int, stop: Any, results: Any) -> None:
    """Until ``stop`` is set, open sessions and ask for one answer in each; put the latenesses of bytes into results."""
    asyncio.run(_agents(url, key, count, length, stop, results))


async def _agents(url: str, key: str, count: int, length: int, stop: Any, results: Any) -> None:
    late: list[float] = []

    async def agent(client: aiohttp.ClientSession) -> None:
        while True:
            async with client.post(f"{url}/sessions", headers={"Authorization": f"Bearer {key}"}) as reply:
                if reply.status != 200:
                    await asyncio.sleep(0.5)
                    continue
                session = await reply.json()
            own = {"Authorization": f"Bearer {session['api_key']}"}
            body = {"model": "m", "prompt": [1, 2, 3], "max_tokens": length}
            async with client.post(f"{session['base_url']}/completions", headers=own, json=body) as reply:
                last = None
                async for _ in reply.content.iter_any():
                    now = time.monotonic()
                    if last is not None:
                        late.append(max(0.0, now - last - ALIVE_S))
                    last = now
            where = f"{url}/sessions/{session['id']}/end"
            headers = {"Authorization": f"Bearer {key}"}
            async with client.post(where, headers=headers, json={"reward": 1.0}) as reply:
                await reply.read()

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None)) as client:
        tasks = [asyncio.create_task(agent(client)) for _ in range(count)]
        await asyncio.to_thread(stop.wait)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    results.put(late)


# ---------------------------------------------------------------- the run


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run a scheduler for the given time and return what was measured."""
    in_flight, count = options.in_flight, options.engines
    ends = Ends()
    mean_s = in_flight / options.rate
    engines = [FreeEngine(f"e{i:05d}", mean_s, ends, i, options.length, options.part) for i in range(count)]
    config = april.Config(
        rollout_batch_size=max(1, in_flight // 128), n_samples_per_prompt=8, max_response_len=4096, refill="sample",
        max_in_flight=in_flight, max_staleness=8, generation=options.generation, abort_deadline_s=600.0,
    )  # fmt: skip
    sessions = Sessions(commit_s=0.5, alive_s=ALIVE_S)

    async def rollout(prompt: Prompt, llm: LLM) -> Any:
        return await sessions.rollout(prompt, llm) if prompt.data.get(AGENT) else await llm.generate()

    async def reward(prompt: Prompt, response: Response) -> float:
        return 1.0

    functions: dict[str, Any] = {"reward": reward if options.evaluation or options.sessions else None}
    if options.sessions:
        functions["rollout"] = rollout
    first_mb, began = resident_mb(), time.perf_counter()
    memory: list[tuple[int, int]] = []
    delivered, updates, batches = 0, list[float](), list[int]()
    agents = None
    processes = multiprocessing.get_context("spawn")
    results: Any = processes.SimpleQueue()
    stop = processes.Event()
    with april.RolloutScheduler(
        config, prompts=prompts(options.sessions), engines=engines, progress=False, **functions
    ) as rollouts:
        thread = rollouts._thread
        loop = thread._loop
        turns = TurnTimer(loop._selector)  # type: ignore[attr-defined]
        thread.call(lambda: setattr(loop, "_selector", turns))
        running = thread.call(lambda: loop.create_task(ends.run()))
        if options.sessions:
            sessions.start()
            agents = processes.Process(
                target=run_agents, args=(sessions.url, sessions.key, options.sessions, options.length, stop, results)
            )
            agents.start()

        def watch() -> None:
            while not running.done():
                memory.append((round(time.perf_counter() - began), resident_mb() - first_mb))
                time.sleep(options.seconds / 20)

        threading.Thread(target=watch, daemon=True).start()
        evaluation = "evaluation", lambda: rollouts.evaluate([[1, 2]] * 12, n_samples=1, seed=1)
        checkpoint = "checkpoint", lambda: save(rollouts)
        others = [evaluation] * options.evaluation + [checkpoint] * options.checkpoint
        spent: dict[str, float] = {}
        rollouts.next_batch()
        context = rollouts._driver.core.context
        cpu, events = time.process_time(), context.event_number
        while (passed := time.perf_counter() - began) < options.seconds or not batches:
            turns.phase, at = "update", time.process_time()
            rollouts.weight_update(transfer=lambda: None)
            updates.append(round(time.process_time() - at, 2))
            if others and passed > options.seconds * (0.7 - 0.2 * len(others)):
                turns.phase, work = others.pop()
                at = time.perf_counter()
                work()
                spent[f"{turns.phase}_s"] = round(time.perf_counter() - at, 2)
            turns.phase, at = "batch", time.process_time()
            batch = rollouts.next_batch()
            batches.append(round((time.process_time() - at) / len(batch.samples) * 1e6))
            delivered += len(batch.samples)
        cpu, events = time.process_time() - cpu, context.event_number - events
        turns.phase = "end"
        if agents is not None:
            stop.set()
            late = sorted(results.get())
            agents.join()
            bins = Counter(bin_of(s) for s in late)
            spent["keep_alives"] = len(late)
            spent["latest_keep_alive_s"] = round(late[-1], 3) if late else 0.0
            spent["keep_alives_late"] = histogram(bins)  # type: ignore[assignment]
        thread.call(running.cancel)
        thread.call(lambda: setattr(loop, "_selector", turns._selector))
    sessions.close()
    return {
        "in_flight": in_flight, "engines": count, "delivered": delivered, "seconds": round(time.perf_counter() - began),
        "cpu_ms_per_sample": round(1e3 * cpu / max(1, delivered), 3), "events_per_cpu_s": round(events / cpu),
        "batch_us_per_sample": batches,
        "update_cpu_s": updates, **{f"turns_by_cpu_{phase}": histogram(bins) for phase, bins in turns.cpu.items()},
        "turns_by_wall": histogram(sum(turns.wall.values(), Counter())), "longest_cpu_wall_gc_s": turns.longest,
        "collections": dict(turns.collections), "memory_s_mb": memory, **spent,
    }  # fmt: skip


def save(rollouts: april.RolloutScheduler) -> None:
    """Save the state of a run to a file, as a trainer would."""
    with tempfile.TemporaryDirectory() as folder:
        write_state(Path(folder, "state"), "rollouts", rollouts.state_dict())


def histogram(bins: Counter[int]) -> dict[str, int]:
    """Return the counts by the upper edges of the bins."""
    names = [f"<= {edge} ms" for edge in EDGES_MS] + [f"> {EDGES_MS[-1]} ms"]
    return {name: bins[i] for i, name in enumerate(names) if bins[i]}


def main() -> None:
    """Print one JSON object, a line per measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--in-flight", type=int, default=16_384)
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=2_000.0, help="responses that end per second")
    parser.add_argument("--length", type=int, default=256, help="tokens of a whole response")
    parser.add_argument("--part", type=int, default=16, help="tokens that a request has when it is cut")
    parser.add_argument("--sessions", type=int, default=0)
    parser.add_argument("--generation", default="stepwise", choices=("stepwise", "continuous"))
    parser.add_argument("--checkpoint", action="store_true", help="save the state in the middle of the run")
    parser.add_argument("--evaluation", action="store_true", help="evaluate in the middle of the run")
    found = measure(parser.parse_args())
    print("{" + ",\n ".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in found.items()) + "}")


if __name__ == "__main__":
    main()
