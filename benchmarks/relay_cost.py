"""CPU of a scheduler before servers, and of both processes where one of april's stands between and reads the streams.

    python -m benchmarks.relay_cost --kinds vllm sglang --streaming yes no --pairs 5

As ``client_cost``, with streams that end one after the other; the process between answers in one piece, or with
``--interval-s 0`` in one piece per event, which shows what a piece costs. Ratios are taken within a pair.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from statistics import median

import msgspec

import april
from april.engines.kinds.factory import open_servers
from benchmarks.canned_server import require_open_files
from benchmarks.client_arms import ArmResult, Case, Relay, engine_config, keep_pace, run_april
from benchmarks.client_cost import ROOT, canned_server, first_cells, parser_of, print_table, result_of, server_options

DIRECT, BETWEEN = "direct", "between"
HEADER = (
    "| server | streaming | in flight | tokens | direct us/request | scheduler us/request | relay us/request "
    "| scheduler / direct (min-max) | relay / direct (min-max) | tokens/s per core: direct | scheduler | relay |"
)


async def relay(url: str, case: Case, interval_s: float) -> None:
    """The process between."""
    (engine,) = await open_servers(engine_config(url, case))
    await keep_pace(url)
    server = await april.serve(engine)
    print(msgspec.json.encode(Relay(server.url, os.getpid(), interval_s)).decode(), flush=True)
    await server.wait()


@contextlib.contextmanager
def between(url: str, order: str, interval_s: float) -> Iterator[str]:
    """A process between; yields its :class:`Relay` as JSON."""
    command = [sys.executable, "-m", "benchmarks.relay_cost", "--own", "relay", url, order, str(interval_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline()
        finally:
            process.terminate()


def run_turn(arm: str, url: str, case: Case, interval_s: float) -> ArmResult:
    """One scheduler process; raises RuntimeError when a token is missing."""
    order = msgspec.json.encode(case).decode()
    with between(url, order, interval_s) if arm == BETWEEN else contextlib.nullcontext("") as process:
        return result_of(["-m", "benchmarks.relay_cost", "--own", "scheduler", url, order, process], case)


def table_row(case: Case, pairs: int, interval_s: float) -> str:
    """Measure all pairs of one case; one line of the Markdown table, medians over pairs."""
    own: dict[str, list[ArmResult]] = {DIRECT: [], BETWEEN: []}
    with canned_server(case.in_flight, case.response_tokens, "--staggered", *server_options(case)) as url:
        for pair in range(pairs):
            for arm in (DIRECT, BETWEEN) if pair % 2 == 0 else (BETWEEN, DIRECT):
                own[arm].append(run_turn(arm, url, case, interval_s))
    direct = [median(result.pooled_us) for result in own[DIRECT]]
    sides = [[median(r.pooled_us) for r in own[BETWEEN]], [median(r.relay_us) for r in own[BETWEEN]]]
    costs = [median(direct), *map(median, sides)]
    ratios = [[one / other for one, other in zip(side, direct, strict=True)] for side in sides]
    return "| " + " | ".join([
        *first_cells(case),
        *(f"{cost:,.0f}" for cost in costs),
        *(f"{median(ratio):.2f} ({min(ratio):.2f}-{max(ratio):.2f})" for ratio in ratios),
        *(f"{1e6 * case.response_tokens / cost:,.0f}" for cost in costs),
    ]) + " |"  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; ``--own PART URL CASE OF_RELAY`` is how it starts its own processes."""
    parser = parser_of("CPU of a scheduler with and without a process before the servers.", [256], [1000])
    parser.add_argument("--interval-s", type=float, default=600.0, help="of the engine of kind april")
    parser.add_argument("--own", nargs=4, metavar=("PART", "URL", "CASE", "OF_RELAY"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.own:
        part, url, order, process = args.own
        case = msgspec.json.decode(order, type=Case)
        require_open_files(case.in_flight)
        if part == "relay":
            asyncio.run(relay(url, case, float(process)))
            return 0
        found = msgspec.json.decode(process, type=Relay) if process else None
        print(msgspec.json.encode(run_april(url, case, found)).decode())
        return 0
    print_table(parser, args, HEADER, lambda case: table_row(case, args.pairs, args.interval_s))
    return 0


if __name__ == "__main__":
    sys.exit(main())
