"""Client CPU of april before vLLM and SGLang servers, beside a plain aiohttp client making the same calls.

    python -m benchmarks.client_cost --kinds vllm sglang --in-flight 256 1024 --response-tokens 250 1000 --pairs 5

The server answers canned replies in the servers' own shapes, once all requests wait. CPU is that of the client process
(user and system, all threads). Each turn is a new client process before the same server; the two clients take turns,
every other pair backwards; the first round of a turn opens the connections and is left out. Ratios are taken
within a pair.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.canned_replies import LONGEST_ANSWER, SGLANG, VLLM
from benchmarks.canned_server import Counts, require_open_files
from benchmarks.client_arms import ArmResult, Case, run_april, run_bare

ROOT = Path(__file__).resolve().parent.parent
TURN_S = 600.0
"""Longest turn."""


class Summary(msgspec.Struct, frozen=True):
    """One case; medians over pairs, with their range. CPU in microseconds."""

    case: Case
    gc: str
    pairs: int
    bare_us: float
    april_us: float
    bare_us_per_1000_tokens: float
    april_us_per_1000_tokens: float
    ratio: float
    ratio_min: float
    ratio_max: float


@contextlib.contextmanager
def canned_server(release_at: int, response_tokens: int, *options: str) -> Iterator[str]:
    """The server as a process of its own; yields its URL."""
    command = [
        sys.executable, "-m", "benchmarks.canned_server", f"--release-at={release_at}",
        f"--response-tokens={response_tokens}", *options,
    ]  # fmt: skip
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"the server did not start (exit status {process.wait()}); see its stderr")
            yield f"http://127.0.0.1:{json.loads(line)['port']}"
        finally:
            process.terminate()
            process.wait(timeout=30)


def server_counts(url: str) -> Counts:
    """What the server counted."""
    with urllib.request.urlopen(f"{url}/counts", timeout=30.0) as reply:  # noqa: S310 - our own loopback server
        return msgspec.json.decode(reply.read(), type=Counts)


def server_options(case: Case) -> list[str]:
    """An SGLang server whose streams repeat everything is not asked for streams."""
    return [] if case.stream else ["--cumulative"]


def run_turn(arm: str, url: str, case: Case, collector: str) -> ArmResult:
    """One client process; raises RuntimeError when a token is missing."""
    order = msgspec.json.encode(case).decode()
    command = [sys.executable, "-m", "benchmarks.client_cost", "--client", arm, url, order, collector]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, timeout=TURN_S, check=True)
    result = msgspec.json.decode(done.stdout, type=ArmResult)
    if result.tokens_kept != case.in_flight * case.response_tokens * case.rounds:
        raise RuntimeError(f"{arm} kept {result.tokens_kept} tokens")
    return result


def measure(case: Case, pairs: int, collector: str) -> Summary:
    """All pairs of one case; raises RuntimeError when fewer requests were in flight than asked for."""
    own: dict[str, list[float]] = {"bare": [], "april": []}
    with canned_server(case.in_flight, case.response_tokens, *server_options(case)) as url:
        for pair in range(pairs):
            for arm in ("bare", "april") if pair % 2 == 0 else ("april", "bare"):
                own[arm].append(median(run_turn(arm, url, case, collector).pooled_us))
        counts = server_counts(url)
    if counts.peak != case.in_flight or counts.requests != 2 * pairs * case.rounds * case.in_flight:
        raise RuntimeError(f"{case.in_flight} requests should have been in flight, and were not: {counts}")
    ratios = [april / bare for april, bare in zip(own["april"], own["bare"], strict=True)]
    bare_us, april_us, thousand = median(own["bare"]), median(own["april"]), 1000 / case.response_tokens
    return Summary(
        case, collector, pairs, bare_us, april_us, bare_us * thousand, april_us * thousand,
        median(ratios), min(ratios), max(ratios),
    )  # fmt: skip


def client(arm: str, url: str, case: Case, collector: str) -> ArmResult:
    """One turn inside this process."""
    if collector == "off":
        gc.disable()
    require_open_files(case.in_flight)
    return (run_april if arm == "april" else run_bare)(url, case)


HEADER = (
    "| server | streaming | in flight | tokens | gc | bare us/request | april us/request | bare us/1,000 tokens "
    "| april us/1,000 tokens | april / bare (min-max) |"
)


def table_row(row: Summary) -> str:
    """One line of the Markdown table."""
    case = row.case
    return (
        f"| {case.kind} | {'yes' if case.stream else 'no'} | {case.in_flight} | {case.response_tokens} | {row.gc} "
        f"| {row.bare_us:.0f} | {row.april_us:.0f} | {row.bare_us_per_1000_tokens:.0f} "
        f"| {row.april_us_per_1000_tokens:.0f} | {row.ratio:.2f} ({row.ratio_min:.2f}-{row.ratio_max:.2f}) |"
    )


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """In the order of the table."""
    for kind in args.kinds:
        for stream in args.streaming:
            for in_flight in args.in_flight:
                for tokens in args.response_tokens:
                    yield Case(
                        kind, stream == "yes", in_flight, tokens, args.prompt_len, args.rounds, args.samples_per_prompt
                    )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; ``--client ARM URL CASE GC`` is how it starts its own client processes."""
    parser = argparse.ArgumentParser(description="Client CPU of april beside a plain aiohttp client.")
    parser.add_argument("--kinds", nargs="+", choices=[VLLM, SGLANG], default=[VLLM, SGLANG])
    parser.add_argument("--streaming", nargs="+", choices=["no", "yes"], default=["no", "yes"])
    parser.add_argument("--in-flight", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--response-tokens", type=int, nargs="+", default=[250, 1000])
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--samples-per-prompt", type=int, default=8)
    parser.add_argument("--gc", nargs="+", choices=["default", "off"], default=["default"])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3, help="per turn; the first opens the connections")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--quick", action="store_true", help="16 in flight, 40 tokens, one pair: does it work at all")
    parser.add_argument("--client", nargs=4, metavar=("ARM", "URL", "CASE", "GC"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.client:
        arm, url, order, collector = args.client
        print(msgspec.json.encode(client(arm, url, msgspec.json.decode(order, type=Case), collector)).decode())
        return 0
    if args.quick:
        args.in_flight, args.response_tokens, args.pairs, args.rounds = [16], [40], 1, 2
    if args.rounds < 2 or args.pairs < 1 or max(args.response_tokens) > LONGEST_ANSWER:
        parser.error(f"needs --rounds >= 2, --pairs >= 1 and --response-tokens <= {LONGEST_ANSWER}")
    if any(n % args.samples_per_prompt for n in args.in_flight):
        parser.error("--in-flight must be whole groups of --samples-per-prompt")
    rows: list[Summary] = []
    print(HEADER, "|---" * HEADER.count(" | ") + "|---|", sep="\n", flush=True)
    for case in cases(args):
        for collector in args.gc:
            rows.append(measure(case, args.pairs, collector))
            print(table_row(rows[-1]), flush=True)
            if args.json:  # after each case: a long run that is stopped keeps what it measured
                args.json.write_bytes(msgspec.json.format(msgspec.json.encode(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
