"""From the decision to abort to the last partial held: april beside a plain aiohttp client making the same calls.

    python -m benchmarks.abort_latency --kinds vllm sglang --in-flight 256 --pairs 15

A server holds all requests until they are aborted and answers each with its tokens so far. vLLM takes all ids in one
call; SGLang takes one call per request, of which both clients have as many on their way as april. Both clients run in
this process, each on its own loop, and take turns before the same server, every other pair backwards. april's decision
is a pause of its driver, which aborts as the end of a step does. The wall time includes the server's work, which is
the same for both; the CPU is this process's. Ratios are taken within a pair.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import aiohttp
import msgspec

import april
from april.driver.loop_thread import LoopThread
from april.engines.sglang import ABORTS_AT_ONCE
from april.engines.sglang_wire import rid_of
from april.engines.vllm_wire import TOKEN_ROUTE, engine_id
from benchmarks.canned_replies import SGLANG, VLLM
from benchmarks.client_arms import Case, attempt_id, bare_call, engine_config, open_session, prompts_of
from benchmarks.client_cost import canned_server, server_counts, server_options
from benchmarks.generate_wire import JSON_HEADERS, make_prompts
from benchmarks.open_files import require_open_files

MOST_TOKENS = 4_000
"""Budget of the requests, which nothing reaches."""
POLL_S = 0.005


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

    def __init__(self, url: str, case: Case) -> None:
        self._url, self._case = url, case
        self._prompts = make_prompts(case.in_flight, case.prompt_len, case.samples_per_prompt)
        self._loop = LoopThread("bare")
        self._session: aiohttp.ClientSession | None = None
        self._turns = 0

    def turn(self) -> Turn:
        """Send all, wait until the server holds them, abort, and wait for the last partial."""
        return self._loop.run(self._turn())

    async def _turn(self) -> Turn:
        session = self._session = self._session or open_session()
        number, self._turns = self._turns, self._turns + 1
        calls = [
            asyncio.ensure_future(bare_call(session, self._url, self._case, number, i, prompt))
            for i, prompt in enumerate(self._prompts)
        ]
        while await asyncio.to_thread(_held, self._url) < len(calls):  # noqa: ASYNC110 - another process
            await asyncio.sleep(POLL_S)
        gc.collect()
        wall, cpu = time.perf_counter(), time.process_time()
        aborts = asyncio.ensure_future(self._abort(session, [attempt_id(number, i) for i in range(len(calls))]))
        kept = await asyncio.gather(*calls)
        turn = Turn(time.perf_counter() - wall, time.process_time() - cpu, sum(len(tokens) for tokens, _ in kept))
        await aborts
        return turn

    async def _abort(self, session: aiohttp.ClientSession, ids: list[str]) -> None:
        async def ask(route: str, body: object) -> None:
            raw = msgspec.json.encode(body)
            async with session.post(self._url + route, data=raw, headers=JSON_HEADERS) as response:
                await response.read()

        if self._case.kind == VLLM:
            await ask("/abort_requests", {"request_ids": [engine_id(TOKEN_ROUTE, i) for i in ids]})
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
    """A scheduler whose step never ends by itself: what one turn has aborted, the next one continues."""

    def __init__(self, url: str, case: Case) -> None:
        self._url, self._case = url, case
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
        while await asyncio.to_thread(_held, self._url) < self._case.in_flight:  # noqa: ASYNC110 - another process
            await asyncio.sleep(POLL_S)
        gc.collect()
        before, self._pause = driver.core.tokens.held, driver.paused()
        wall, cpu = time.perf_counter(), time.process_time()
        await self._pause.__aenter__()
        return Turn(time.perf_counter() - wall, time.process_time() - cpu, driver.core.tokens.held - before)

    def close(self) -> None:
        """End the scheduler."""
        self._scheduler.close()


def _held(url: str) -> int:
    return server_counts(url).held


def measure(kind: str, in_flight: int, abort_tokens: int, pairs: int) -> Summary:
    """All pairs before one server; raises RuntimeError when a client does not hold every token that was sent."""
    case = Case(kind, False, in_flight, MOST_TOKENS, 256, 1, 8)
    turns: dict[str, list[Turn]] = {"bare": [], "april": []}
    options = [*server_options(case), f"--abort-tokens={abort_tokens}"]
    with canned_server(in_flight + 1, MOST_TOKENS, *options) as url:
        clients: dict[str, BareClient | AprilClient] = {"bare": BareClient(url, case), "april": AprilClient(url, case)}
        try:
            for pair in range(pairs + 1):  # the first opens connections and fills the server's caches
                for arm in ("bare", "april") if pair % 2 == 0 else ("april", "bare"):
                    turn = clients[arm].turn()
                    if turn.tokens != in_flight * abort_tokens:
                        raise RuntimeError(f"{arm} holds {turn.tokens} tokens of {in_flight} x {abort_tokens}")
                    turns[arm].append(turn)
        finally:
            for client in clients.values():
                client.close()
    bare, mine = turns["bare"][1:], turns["april"][1:]
    ratios = [a.wall_s / b.wall_s for a, b in zip(mine, bare, strict=True)]
    cpu = [a.cpu_s / b.cpu_s for a, b in zip(mine, bare, strict=True)]
    return Summary(
        kind, in_flight, abort_tokens, pairs,
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
    parser.add_argument("--quick", action="store_true", help="16 in flight, one pair: does it work at all")
    args = parser.parse_args(argv)
    if args.quick:
        args.in_flight, args.abort_tokens, args.pairs = 16, 20, 1
    if args.pairs < 1 or args.in_flight % 8 or args.abort_tokens < 1:
        parser.error("needs --pairs >= 1, --abort-tokens >= 1 and --in-flight in whole groups of 8")
    require_open_files(2 * args.in_flight)
    rows: list[Summary] = []
    print(HEADER, "|---" * 9 + "|", sep="\n", flush=True)
    for kind in args.kinds:
        rows.append(measure(kind, args.in_flight, args.abort_tokens, args.pairs))
        print(table_row(rows[-1]), flush=True)
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
