"""CPU of april with hosts in processes of their own, beside april in one process, before canned servers.

    python -m benchmarks.hosts --in-flight 256 --response-tokens 250 --pairs 5

Each host has a server of its own and reads its streams; without hosts the one process reads those of all servers. The
arms take turns, each time in new processes, every other pair backwards; the first round of a turn opens the connections
and is left out. CPU is user and system time of all threads of all april processes, collections of garbage included,
which each process makes when it wants to; that of the servers does not count. Ratios are taken within a pair.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import IO

import msgspec

import april
from april.engines.kinds.factory import open_servers
from april.processes.remote_hosts import RemoteHosts
from benchmarks.bare_client import check_kept
from benchmarks.canned_replies import SGLANG, VLLM
from benchmarks.client_arms import Case, engine_config, keep_pace, prompts_of
from benchmarks.client_cost import canned_server, server_options
from benchmarks.open_files import require_open_files

ROOT = Path(__file__).resolve().parent.parent
TURN_S = 300.0
"""Longest turn."""
_TIMES = slice(11, 13)
"""utime and stime, of the fields of ``/proc/PID/stat`` behind the name."""


class Turn(msgspec.Struct, frozen=True):
    """One turn, without its first round. CPU in seconds, of the core's process and of all hosts together."""

    core_cpu_s: float
    hosts_cpu_s: float
    requests: int
    rounds: int
    messages: int
    frames: int
    bytes: int


def cpu_s(pid: int) -> float:
    """User and system time of a process, in ticks of some 10 ms; Linux only."""
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    return sum(map(int, fields[_TIMES])) / os.sysconf("SC_CLK_TCK")


# ---------------------------------------------------------------- a host


async def lend(name: str, url: str, case: Case, address: str, token: str) -> None:
    """The engine of one server, until the scheduler says goodbye."""
    host = april.Host(name, engines=await open_servers(engine_config(url, case)), address=address, token=token)
    pace = await keep_pace(url)
    await host.astart()
    await host.aend()
    pace.close()
    await host.aclose()


@contextlib.contextmanager
def lending(urls: Sequence[str], case: Case, address: str, token: str) -> Iterator[list[int]]:
    """One process per server; yields their ids."""
    started: list[subprocess.Popen[str]] = []
    try:
        for number, url in enumerate(urls):
            command = [sys.executable, "-m", "benchmarks.hosts", "--lend", f"host{number}", url, address]
            process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, text=True)
            started.append(process)
            pipe: IO[str] | None = process.stdin
            assert pipe is not None
            pipe.write(f"{token}\n{msgspec.json.encode(case).decode()}\n")  # the token is on no command line
            pipe.close()
        yield [process.pid for process in started]
    finally:
        for process in started:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()


# ---------------------------------------------------------------- the core's process


def turn(arm: str, urls: Sequence[str], case: Case) -> Turn:
    """All rounds of one turn; raises RuntimeError when an array differs from what was sent."""
    groups = case.in_flight // case.samples_per_prompt
    engine = engine_config(urls[0], case)
    config = april.Config(
        rollout_batch_size=groups, n_samples_per_prompt=case.samples_per_prompt, max_response_len=case.response_tokens,
        engine=engine.model_copy(update={"urls": tuple(urls)}),
    )  # fmt: skip
    prompts = prompts_of(case, case.rounds)
    with contextlib.ExitStack() as stack:
        if arm == "alone":
            pids: list[int] = []
            scheduler = stack.enter_context(april.RolloutScheduler(config, prompts=prompts, reward=None))
            for url in urls:  # answered on the loop that reads the streams
                stack.callback(scheduler._thread.call, scheduler._thread.run(keep_pace(url)).close)
        else:
            token = april.new_token()
            listener = april.HostListener(token)
            pids = stack.enter_context(lending(urls, case, listener.address, token))
            scheduler = stack.enter_context(
                april.RolloutScheduler(config, prompts=prompts, reward=None, engines=[], hosts=listener)
            )
            while len(scheduler._driver.core.engines.states) < len(urls):
                time.sleep(0.05)
        return _rounds(scheduler, case, pids)


def _rounds(scheduler: april.RolloutScheduler, case: Case, pids: list[int]) -> Turn:
    def counted() -> list[float]:
        others = scheduler._driver.hosts
        desks = others.desks if isinstance(others, RemoteHosts) else []
        return [
            time.process_time(), sum(map(cpu_s, pids)), sum(d.messages_in + d.messages_out for d in desks),
            sum(d.frames_in + d.frames_out for d in desks), sum(d.bytes_in + d.bytes_out for d in desks),
        ]  # fmt: skip

    spent = [0.0] * 5
    for number in range(case.rounds):
        if number:
            scheduler.weight_update(transfer=lambda: None)  # commits the batch before; not measured
        before = counted()
        batch = scheduler.next_batch()
        if number:
            spent = [s + after - b for s, after, b in zip(spent, counted(), before, strict=True)]
        kept = [(sample.tokens, sample.logprobs) for sample in batch.samples]
        check_kept([sample.prompt.token_ids for sample in batch.samples], kept, case.response_tokens)
        del batch, kept
    return Turn(
        core_cpu_s=spent[0], hosts_cpu_s=spent[1], requests=case.in_flight * (case.rounds - 1),
        rounds=case.rounds - 1, messages=int(spent[2]), frames=int(spent[3]), bytes=int(spent[4]),
    )  # fmt: skip


# ---------------------------------------------------------------- both arms in turns


def measure(case: Case, hosts: int, pairs: int) -> dict[str, object]:
    """Medians over pairs, with the range of the ratios."""
    turns: dict[str, list[Turn]] = {"alone": [], "hosts": []}
    with contextlib.ExitStack() as stack:
        urls = [
            stack.enter_context(canned_server(case.in_flight // hosts, case.response_tokens, *server_options(case)))
            for _ in range(hosts)
        ]
        for pair in range(pairs):
            for arm in ("alone", "hosts") if pair % 2 == 0 else ("hosts", "alone"):
                command = [sys.executable, "-m", "benchmarks.hosts", "--turn", arm, msgspec.json.encode(case).decode()]
                done = subprocess.run([*command, *urls], cwd=ROOT, stdout=subprocess.PIPE, timeout=TURN_S, check=True)
                turns[arm].append(msgspec.json.decode(done.stdout, type=Turn))

    def per_cpu_s(t: Turn) -> float:
        return t.requests / (t.core_cpu_s + t.hosts_cpu_s)

    def core_us(t: Turn) -> float:
        return 1e6 * t.core_cpu_s / t.requests

    both = list(zip(turns["alone"], turns["hosts"], strict=True))
    rates = [per_cpu_s(hosted) / per_cpu_s(alone) for alone, hosted in both]
    cores = [core_us(hosted) / core_us(alone) for alone, hosted in both]
    hosted = turns["hosts"]
    thousand = 1000 / case.response_tokens
    return {
        "case": msgspec.to_builtins(case), "hosts": hosts, "pairs": pairs,
        "requests_per_cpu_s_alone": median(map(per_cpu_s, turns["alone"])),
        "requests_per_cpu_s_of_all": median(map(per_cpu_s, hosted)),
        "requests_per_cpu_s_ratio": [median(rates), min(rates), max(rates)],
        "core_us_per_request": median(map(core_us, hosted)),
        "alone_us_per_request": median(map(core_us, turns["alone"])),
        "core_us_per_1000_tokens": thousand * median(map(core_us, hosted)),
        "alone_us_per_1000_tokens": thousand * median(map(core_us, turns["alone"])),
        "core_ratio": [median(cores), min(cores), max(cores)],
        "messages_per_request": median(t.messages / t.requests for t in hosted),
        "messages_per_step": median(t.messages / t.rounds for t in hosted),
        "messages_per_frame": median(t.messages / t.frames for t in hosted),
        "bytes_per_request": median(t.bytes / t.requests for t in hosted),
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; ``--turn`` and ``--lend`` are how it starts its own processes."""
    parser = argparse.ArgumentParser(description="CPU of april with hosts, beside april in one process.")
    parser.add_argument("--kind", choices=[VLLM, SGLANG], default=VLLM)
    parser.add_argument("--whole", action="store_true", help="answers in one piece instead of streams")
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--response-tokens", type=int, default=250)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=4, help="per turn; the first opens the connections")
    parser.add_argument("--turn", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--lend", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    require_open_files(args.in_flight)
    if args.lend:
        name, url, address = args.lend
        token, case = sys.stdin.readline().strip(), msgspec.json.decode(sys.stdin.readline(), type=Case)
        asyncio.run(lend(name, url, case, address, token))
        return 0
    if args.turn:
        arm, order, *urls = args.turn
        print(msgspec.json.encode(turn(arm, urls, msgspec.json.decode(order, type=Case))).decode())
        return 0
    if args.in_flight % (args.hosts * 8):
        parser.error("--in-flight must be whole groups of 8 on each host")
    case = Case(args.kind, not args.whole, args.in_flight, args.response_tokens, 256, args.rounds, 8)
    print(json.dumps(measure(case, args.hosts, args.pairs), indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
