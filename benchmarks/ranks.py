"""CPU of the ranks of a trainer whose work is spread over them, beside rank 0 doing it all, before canned servers.

    python -m benchmarks.ranks --in-flight 256 --response-tokens 250 --pairs 5

One server per rank. The arms take turns, each time in new processes, every other pair backwards; the first round of a
turn opens the connections and is left out. CPU is that of a rank's whole process from its call of ``next_batch`` to its
return; that of the servers does not count. Every rank checks that each array of its share is what was sent.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import IO

import msgspec

import april
from april.processes.link import bound, told_address
from april.processes.rank_scheduler import RankScheduler
from benchmarks.bare_client import check_kept
from benchmarks.canned_replies import VLLM
from benchmarks.client_arms import Case, engine_config, keep_pace, prompts_of
from benchmarks.client_cost import canned_server, server_options
from benchmarks.hosts import TURN_S
from benchmarks.open_files import require_open_files

ROOT = Path(__file__).resolve().parent.parent


class Order(msgspec.Struct, frozen=True):
    """What one rank does."""

    rank: int
    urls: tuple[str, ...]
    """of all servers, as many as ranks"""
    spread: bool
    case: Case
    address: str
    token: str


def live(order: Order) -> float:
    """CPU seconds of one rank for all rounds but the first; raises RuntimeError when an array is not what was sent."""
    case, ranks = order.case, len(order.urls)
    engine = engine_config(order.urls[0], case).model_copy(update={"urls": order.urls})
    config = april.Config(
        rollout_batch_size=case.in_flight // case.samples_per_prompt, n_samples_per_prompt=case.samples_per_prompt,
        max_response_len=case.response_tokens, engine=engine,
    )  # fmt: skip
    place = april.Ranks(rank=order.rank, world_size=ranks, address=order.address, token=order.token)
    spent = 0.0
    with contextlib.ExitStack() as stack:
        prompts = prompts_of(case, case.rounds)
        rollouts = stack.enter_context(
            RankScheduler(config, ranks=place, spread=order.spread, prompts=prompts, reward=None)
        )
        reader = rollouts._own or rollouts._host
        if reader is not None:
            for url in order.urls[order.rank :: ranks] if order.spread else order.urls:
                # answered on the loop that reads the streams
                stack.callback(reader._thread.call, reader._thread.run(keep_pace(url)).close)
        for number in range(case.rounds):
            if number:
                rollouts.weight_update(transfer=lambda: None)  # commits the batch before; not measured
            gc.collect()
            before = time.process_time()
            batch = rollouts.next_batch()
            if number:
                spent += time.process_time() - before
            kept = [(sample.tokens, sample.logprobs) for sample in batch.samples]
            check_kept([sample.prompt.token_ids for sample in batch.samples], kept, case.response_tokens)
    return spent


def turn(urls: Sequence[str], case: Case, *, spread: bool) -> list[float]:
    """CPU seconds of each rank."""
    with bound("127.0.0.1:0") as free:
        where = {"address": told_address(free.getsockname()), "token": april.new_token()}
    started = []
    for rank in range(len(urls)):
        order = Order(rank=rank, urls=tuple(urls), spread=spread, case=case, **where)
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.ranks", "--rank"], cwd=ROOT, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        pipe: IO[str] | None = process.stdin
        assert pipe is not None
        pipe.write(msgspec.json.encode(order).decode())  # the token is on no command line
        pipe.close()
        process.stdin = None
        started.append(process)
    try:
        return [float(process.communicate(timeout=TURN_S)[0]) for process in started]
    finally:
        for process in started:
            process.kill()


def measure(case: Case, ranks: int, pairs: int) -> dict[str, object]:
    """CPU milliseconds per 1,000 streamed tokens: medians over pairs, with the range of the ratios."""
    turns: dict[bool, list[list[float]]] = {False: [], True: []}
    with contextlib.ExitStack() as stack:
        urls = [
            stack.enter_context(canned_server(case.in_flight // ranks, case.response_tokens, *server_options(case)))
            for _ in range(ranks)
        ]
        for pair in range(pairs):
            for spread in (False, True) if pair % 2 == 0 else (True, False):
                turns[spread].append(turn(urls, case, spread=spread))
    tokens = case.in_flight * case.response_tokens * (case.rounds - 1)

    def ms(spread: bool, rank: int) -> float:
        return median(1e6 * spent[rank] / tokens for spent in turns[spread])

    pairs_of = list(zip(turns[False], turns[True], strict=True))
    first = [spread[0] / alone[0] for alone, spread in pairs_of]
    everybody = [sum(spread) / sum(alone) for alone, spread in pairs_of]
    return {
        "case": msgspec.to_builtins(case), "ranks": ranks, "pairs": pairs,
        "ms_per_1000_tokens": {str(s).lower(): [ms(s, rank) for rank in range(ranks)] for s in (False, True)},
        "rank_0_ratio": [median(first), min(first), max(first)],
        "all_ranks_ratio": [median(everybody), min(everybody), max(everybody)],
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; ``--rank`` is how it starts its own processes."""
    parser = argparse.ArgumentParser(description="CPU of ranks whose work is spread, beside rank 0 doing it all.")
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--response-tokens", type=int, default=250)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=4, help="per turn; the first opens the connections")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    require_open_files(args.in_flight)
    if args.rank:
        print(live(msgspec.json.decode(sys.stdin.read(), type=Order)))
        return 0
    if args.in_flight % (args.ranks * 8):
        parser.error("--in-flight must be whole groups of 8 on each rank")
    case = Case(VLLM, True, args.in_flight, args.response_tokens, 256, args.rounds, 8)
    print(json.dumps(measure(case, args.ranks, args.pairs), indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
