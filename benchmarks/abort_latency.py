"""From the decision to abort to the last partial held: april beside a plain aiohttp client making the same calls.

    python -m benchmarks.abort_latency --kinds vllm sglang --in-flight 256 --pairs 15
    python -m benchmarks.abort_latency --kinds vllm --url http://127.0.0.1:8000 --model tiny --vocab-size 512

A canned server holds all requests until they are aborted and answers each with its tokens so far: no time passes in it
but that of its own replies. A real one (``--url``; its model must have no end-of-sequence token) decodes meanwhile, and
the decision comes once it runs them all. vLLM takes all ids in one call; SGLang takes one call per request, of which
both clients have as many on their way as april. Both clients run in this process, each on its own loop, and take turns
before the same server, every other pair backwards; what one turn has aborted, the next one continues. april's decision
is a pause of its driver, which aborts as the end of a step does. The wall time includes the server's work, which is the
same for both; the CPU is this process's. Ratios are taken within a pair.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import aiohttp
import msgspec
import numpy as np

import april
from april.driver.loop_thread import LoopThread
from april.engines.http.server_process import parse_metrics
from april.engines.sglang.engine import ABORTS_AT_ONCE
from april.engines.sglang.wire import rid_of
from april.engines.vllm.wire import engine_id
from benchmarks.canned_replies import JSON_HEADERS, MODEL, SGLANG, VLLM
from benchmarks.canned_server import require_open_files
from benchmarks.client_arms import Case, attempt_id, bare_call, engine_config, open_session, prompts_of
from benchmarks.client_cost import canned_server, server_counts, server_options

MOST_TOKENS = 4_000
"""Budget of the requests, which nothing reaches."""
POLL_S = 0.005
TAKEN_S = 60.0
"""Longest wait until a server has taken all requests."""
DECODING_S = 0.5
"""After a real server has taken all requests: each has its first tokens."""


Held = Callable[[], int]
"""How many requests the server has at this moment."""


class Turn(msgspec.Struct, frozen=True):
    """One abort of everything."""

    wall_s: float
    cpu_s: float
    tokens: int


class Summary(msgspec.Struct, frozen=True):
    """Medians over pairs, ratios with their range; milliseconds."""

    kind: str
    in_flight: int
    abort_tokens: int
    pairs: int
    bare_ms: float
    april_ms: float
    ratio: float
    ratio_min: float
    ratio_max: float
    bare_cpu_ms: float
    april_cpu_ms: float
    cpu_ratio: float


class BareClient:
    """Plain requests on a loop of their own."""

    def __init__(self, url: str, case: Case, held: Held) -> None:
        self._url, self._case, self._held = url, case, held
        self._prompts = case.prompts()
        self._loop = LoopThread("bare")
        self._session: aiohttp.ClientSession | None = None
        self._turns = 0

    def turn(self) -> Turn:
        """Send all, wait until the server holds them, abort, and wait for the last partial."""
        return self._loop.run(self._turn())

    async def _turn(self) -> Turn:
        session = self._session = self._session or open_session()
        number, self._turns = self._turns, self._turns + 1
        had = [len(prompt) - self._case.prompt_len for prompt in self._prompts]
        calls = [
            asyncio.ensure_future(bare_call(session, self._url, self._case, number, i, prompt, had[i]))
            for i, prompt in enumerate(self._prompts)
        ]
        await _until_held(self._held, self._case)
        gc.collect()
        wall, cpu = time.perf_counter(), time.process_time()
        aborts = asyncio.ensure_future(self._abort(session, [attempt_id(number, i) for i in range(len(calls))]))
        kept = await asyncio.gather(*calls)
        turn = Turn(time.perf_counter() - wall, time.process_time() - cpu, sum(len(tokens) for tokens, _ in kept))
        await aborts
        self._prompts = [np.concatenate((p, tokens)) for p, (tokens, _) in zip(self._prompts, kept, strict=True)]
        return turn

    async def _abort(self, session: aiohttp.ClientSession, ids: list[str]) -> None:
        async def ask(route: str, body: object) -> None:
            raw = msgspec.json.encode(body)
            async with session.post(self._url + route, data=raw, headers=JSON_HEADERS) as response:
                await response.read()

        if self._case.kind == VLLM:
            await ask("/abort_requests", {"request_ids": list(map(engine_id, ids))})
            return

        async def some() -> None:
            while ids:
                await ask("/abort_request", {"rid": rid_of(ids.pop())})

        await asyncio.gather(*(some() for _ in range(ABORTS_AT_ONCE)))

    def close(self) -> None:
        """End the session and the loop."""
        if self._session is not None:
            self._loop.run(self._session.close())
        self._loop.stop()


class AprilClient:
    """A scheduler whose step never ends by itself."""

    def __init__(self, url: str, case: Case, held: Held) -> None:
        self._case, self._held = case, held
        config = april.Config(
            rollout_batch_size=case.in_flight // case.samples_per_prompt,
            n_samples_per_prompt=case.samples_per_prompt,
            max_response_len=case.response_tokens,
            engine=engine_config(url, case),
        )
        self._scheduler = april.RolloutScheduler(config, prompts=prompts_of(case, 1), reward=None)
        self._driver = self._scheduler._driver
        self._pause = self._driver.paused()
        self._scheduler._thread.run(self._pause.__aenter__())
        self._step = self._scheduler._thread.submit(self._driver.next_batch())

    def turn(self) -> Turn:
        """The same as the plain client's; afterwards the driver stays paused until the next turn."""
        return self._scheduler._thread.run(self._turn())

    async def _turn(self) -> Turn:
        driver = self._driver
        await self._pause.__aexit__(None, None, None)
        await _until_held(self._held, self._case)
        gc.collect()
        before, self._pause = driver.core.tokens.held, driver.paused()
        wall, cpu = time.perf_counter(), time.process_time()
        await self._pause.__aenter__()
        return Turn(time.perf_counter() - wall, time.process_time() - cpu, driver.core.tokens.held - before)

    def close(self) -> None:
        """End the scheduler."""
        self._scheduler.close()


async def _until_held(held: Held, case: Case) -> None:
    """Raises RuntimeError when one of them has ended by itself, which would be waited for in vain."""
    latest = time.monotonic() + TAKEN_S
    while (there := await asyncio.to_thread(held)) < case.in_flight:
        if time.monotonic() > latest:
            raise RuntimeError(f"the server has {there} of {case.in_flight} requests after {TAKEN_S:g} s")
        await asyncio.sleep(POLL_S)
    if case.model != MODEL:
        await asyncio.sleep(DECODING_S)


def running(kind: str, url: str) -> int:
    """Requests that a real server runs."""
    route = "/metrics" if kind == VLLM else "/v1/loads?include=core"
    with urllib.request.urlopen(url + route, timeout=30.0) as reply:  # noqa: S310 - the caller's own server
        said = reply.read()
    if kind == VLLM:
        load = parse_metrics(said.decode().splitlines()).load
        return 0 if load is None else load.running
    return sum(one["num_running_reqs"] for one in msgspec.json.decode(said)["loads"])


def before_canned(kind: str, in_flight: int, abort_tokens: int, pairs: int) -> Summary:
    """All pairs before one canned server; raises RuntimeError when a client does not hold every token that was sent."""
    case = Case(kind, False, in_flight, MOST_TOKENS, 256, 1, 8)
    options = [*server_options(case), f"--abort-tokens={abort_tokens}"]
    with canned_server(in_flight + 1, MOST_TOKENS, *options) as url:
        turns = take_turns(url, case, pairs, lambda: server_counts(url).held)
    for arm, taken in turns.items():
        for turn in taken:
            if turn.tokens != in_flight * abort_tokens:
                raise RuntimeError(f"{arm} holds {turn.tokens} tokens of {in_flight} x {abort_tokens}")
    return summary(case, abort_tokens, turns)


def before_real(kind: str, url: str, model: str, vocab_size: int, in_flight: int, pairs: int) -> Summary:
    """All pairs before a server that runs already, and has room for all requests at once."""
    case = Case(kind, False, in_flight, MOST_TOKENS - 1_000, 64, 1, 8, model, vocab_size)
    turns = take_turns(url, case, pairs, lambda: running(kind, url))
    return summary(case, round(median(t.tokens for t in turns["april"]) / in_flight), turns)


def take_turns(url: str, case: Case, pairs: int, held: Held) -> dict[str, list[Turn]]:
    """Turns of both clients, those of the first pair left out: it opens connections and fills the server's caches."""
    turns: dict[str, list[Turn]] = {"bare": [], "april": []}
    clients: dict[str, BareClient | AprilClient] = {}
    try:
        clients["bare"], clients["april"] = BareClient(url, case, held), AprilClient(url, case, held)
        for pair in range(pairs + 1):
            for arm in ("bare", "april") if pair % 2 == 0 else ("april", "bare"):
                turns[arm].append(clients[arm].turn())
    finally:
        for client in clients.values():
            client.close()
    return {arm: taken[1:] for arm, taken in turns.items()}


def summary(case: Case, abort_tokens: int, turns: dict[str, list[Turn]]) -> Summary:
    """Medians, and ratios within pairs."""
    bare, mine = turns["bare"], turns["april"]
    ratios = [a.wall_s / b.wall_s for a, b in zip(mine, bare, strict=True)]
    cpu = [a.cpu_s / b.cpu_s for a, b in zip(mine, bare, strict=True)]
    return Summary(
        case.kind, case.in_flight, abort_tokens, len(bare),
        median(t.wall_s for t in bare) * 1e3, median(t.wall_s for t in mine) * 1e3,
        median(ratios), min(ratios), max(ratios),
        median(t.cpu_s for t in bare) * 1e3, median(t.cpu_s for t in mine) * 1e3, median(cpu),
    )  # fmt: skip


HEADER = (
    "| server | in flight | tokens each | bare ms | april ms | april / bare (min-max) | bare CPU ms | april CPU ms "
    "| CPU ratio |"
)


def table_row(row: Summary) -> str:
    """One line of the Markdown table."""
    return (
        f"| {row.kind} | {row.in_flight} | {row.abort_tokens} | {row.bare_ms:.0f} | {row.april_ms:.0f} "
        f"| {row.ratio:.2f} ({row.ratio_min:.2f}-{row.ratio_max:.2f}) | {row.bare_cpu_ms:.0f} | {row.april_cpu_ms:.0f} "
        f"| {row.cpu_ratio:.2f} |"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Time from an abort of everything to the last partial held.")
    parser.add_argument("--kinds", nargs="+", choices=[VLLM, SGLANG], default=[VLLM, SGLANG])
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--abort-tokens", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--url", help="of a real server of the one kind; it must have room for all requests at once")
    parser.add_argument("--model", help="what that server calls its model")
    parser.add_argument("--vocab-size", type=int, default=512, help="of that model")
    parser.add_argument("--quick", action="store_true", help="16 in flight, one pair: does it work at all")
    args = parser.parse_args(argv)
    if args.quick:
        args.in_flight, args.abort_tokens, args.pairs = 16, 20, 1
    if args.pairs < 1 or args.in_flight % 8 or args.abort_tokens < 1:
        parser.error("needs --pairs >= 1, --abort-tokens >= 1 and --in-flight in whole groups of 8")
    if args.url and (len(args.kinds) != 1 or not args.model):
        parser.error("--url needs --model and one kind")
    require_open_files(2 * args.in_flight)
    rows: list[Summary] = []
    print(HEADER, "|---" * 9 + "|", sep="\n", flush=True)
    for kind in args.kinds:
        rows.append(
            before_real(kind, args.url, args.model, args.vocab_size, args.in_flight, args.pairs)
            if args.url
            else before_canned(kind, args.in_flight, args.abort_tokens, args.pairs)
        )
        print(table_row(rows[-1]), flush=True)
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
