"""Client CPU per request with thousands of generate requests in flight: bare aiohttp, engine protocol, driver.

    python -m benchmarks.requests_in_flight --in-flight 1024 4096 16384 --response-tokens 64 256 --repeats 3

For each size the arms take turns, each time with a new server process and a new client process. The server
answers nothing until all requests wait, so "in flight" is what it counted. CPU is that of the client process
(user and system, all threads). A client's first round opens its connections and is reported apart; the later
rounds use them again. Ratios are taken within a repeat, whose arms ran one after another.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.arm_result import ArmResult
from benchmarks.generate_wire import LONGEST_ANSWER
from benchmarks.open_files import require_open_files
from benchmarks.server_process import ROOT, server_process, server_stats

ARMS = ("bare", "engine", "driver")
GC_MODES: dict[str, tuple[int, int, int] | None] = {
    "default": None,
    "relaxed": (50_000, 20, 100),
    "off": (0, 0, 0),
}
"""Thresholds of the client's garbage collector; it also runs before each round, unmeasured, in every mode."""


class Cell(msgspec.Struct, frozen=True):
    """One client process together with what its server counted."""

    repeat: int
    gc_mode: str
    peak_in_flight: int
    result: ArmResult


class Summary(msgspec.Struct, frozen=True):
    """One arm at one size, over all repeats; microseconds of CPU per request."""

    arm: str
    in_flight: int
    response_tokens: int
    gc_mode: str
    peak_in_flight: int
    pooled_us: float
    pooled_us_min: float
    pooled_us_max: float
    opening_us: float
    round_wall_s: float
    ratio: float
    """Median over repeats of pooled CPU of this arm / pooled CPU of the first arm."""
    ratio_min: float
    ratio_max: float


def run_client(arm: str, url: str, size: ClientSize, gc_mode: str) -> ArmResult:
    """One arm inside this process."""
    thresholds = GC_MODES[gc_mode]
    if thresholds is not None:
        gc.set_threshold(*thresholds)
    require_open_files(size.in_flight)
    # imported here, so that no arm pays for the modules of another
    if arm == "bare":
        from benchmarks.bare_client import run_bare as run
    elif arm == "engine":
        from benchmarks.engine_arm import run_engine as run
    else:
        from benchmarks.driver_arm import run_driver as run
    return run(url, size.in_flight, size.prompt_len, size.response_tokens, size.rounds, size.samples_per_prompt)


class ClientSize(msgspec.Struct, frozen=True):
    """What one client process does."""

    in_flight: int
    response_tokens: int
    prompt_len: int
    rounds: int
    samples_per_prompt: int


def run_cell(arm: str, size: ClientSize, gc_mode: str, repeat: int, timeout_s: float) -> Cell:
    """One server process and one client process; raises RuntimeError when the peak or the tokens fall short."""
    with server_process(size.in_flight, size.response_tokens) as url:
        order = msgspec.json.encode(size).decode()
        command = [sys.executable, "-m", "benchmarks.requests_in_flight", "--client", arm, url, order, gc_mode]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, timeout=timeout_s, check=True)
        result = msgspec.json.decode(done.stdout, type=ArmResult)
        stats = server_stats(url)
    if stats.peak_in_flight != size.in_flight or stats.releases != size.rounds:
        raise RuntimeError(f"{arm}: {size.in_flight} in flight, {size.rounds} rounds were asked for, but got {stats}")
    if result.tokens_kept != size.in_flight * size.response_tokens * size.rounds:
        raise RuntimeError(f"{arm}: {result.tokens_kept} tokens were kept of {stats.tokens} sent")
    return Cell(repeat, gc_mode, stats.peak_in_flight, result)


def summarize(cells: Sequence[Cell], arms: Sequence[str]) -> list[Summary]:
    """One row per arm of cells of one size and collector mode; ratios are to ``arms[0]``."""
    by_arm = {arm: sorted((c for c in cells if c.result.arm == arm), key=lambda c: c.repeat) for arm in arms}
    floor = [median(cell.result.pooled_us) for cell in by_arm[arms[0]]]
    rows = []
    for arm, own in by_arm.items():
        pooled = [median(cell.result.pooled_us) for cell in own]
        ratios = [mine / base for mine, base in zip(pooled, floor, strict=True)]
        first = own[0].result
        rows.append(
            Summary(
                arm=arm,
                in_flight=first.requests,
                response_tokens=first.response_tokens,
                gc_mode=own[0].gc_mode,
                peak_in_flight=min(cell.peak_in_flight for cell in own),
                pooled_us=median(pooled),
                pooled_us_min=min(pooled),
                pooled_us_max=max(pooled),
                opening_us=median(cell.result.opening_us for cell in own),
                round_wall_s=median(one.wall_s for cell in own for one in cell.result.rounds[1:]),
                ratio=median(ratios),
                ratio_min=min(ratios),
                ratio_max=max(ratios),
            )
        )
    return rows


HEADER = "| in flight (peak) | tokens | gc | arm | CPU us/request (min-max) | opening us | round s | ratio (min-max) |"


def table_row(row: Summary) -> str:
    """One line of the Markdown table."""
    return (
        f"| {row.in_flight} ({row.peak_in_flight}) | {row.response_tokens} | {row.gc_mode} | {row.arm} "
        f"| {row.pooled_us:.0f} ({row.pooled_us_min:.0f}-{row.pooled_us_max:.0f}) | {row.opening_us:.0f} "
        f"| {row.round_wall_s:.2f} | {row.ratio:.2f} ({row.ratio_min:.2f}-{row.ratio_max:.2f}) |"
    )


def main(argv: list[str] | None = None) -> int:
    """Command line; ``--client ARM URL SIZE GC`` is how it starts its own client processes."""
    parser = argparse.ArgumentParser(description="Client CPU per generate request, by number in flight.")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--response-tokens", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--samples-per-prompt", type=int, default=8)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="the first is the base of ratios")
    parser.add_argument("--gc", nargs="+", choices=list(GC_MODES), default=["default"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=4, help="per client process; the first opens the connections")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one client process")
    parser.add_argument("--json", type=Path, help="write every cell and the summary here")
    parser.add_argument("--client", nargs=4, metavar=("ARM", "URL", "SIZE", "GC"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.client:
        arm, url, order, gc_mode = args.client
        result = run_client(arm, url, msgspec.json.decode(order, type=ClientSize), gc_mode)
        print(msgspec.json.encode(result).decode())
        return 0
    if args.rounds < 2 or args.repeats < 1 or max(args.response_tokens) > LONGEST_ANSWER:
        parser.error(f"needs --rounds >= 2, --repeats >= 1 and --response-tokens <= {LONGEST_ANSWER}")
    require_open_files(max(args.in_flight))

    cells: list[Cell] = []
    rows: list[Summary] = []
    print(HEADER, "|---" * 8 + "|", sep="\n", flush=True)
    for in_flight in args.in_flight:
        for tokens in args.response_tokens:
            for gc_mode in args.gc:
                size = ClientSize(in_flight, tokens, args.prompt_len, args.rounds, args.samples_per_prompt)
                own = []
                for repeat in range(args.repeats):
                    # every other repeat backwards: a machine that gets slower or faster favours no arm
                    for arm in args.arms if repeat % 2 == 0 else reversed(args.arms):
                        own.append(run_cell(arm, size, gc_mode, repeat, args.timeout))
                cells += own
                for row in summarize(own, args.arms):
                    rows.append(row)
                    print(table_row(row), flush=True)
                if args.json:  # after each size: a long run that is stopped keeps what it measured
                    args.json.write_bytes(msgspec.json.format(msgspec.json.encode({"summary": rows, "cells": cells})))
    return 0


if __name__ == "__main__":
    sys.exit(main())
