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
import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.canned_replies import LONGEST_ANSWER, SGLANG, VLLM
from benchmarks.canned_server import Counts, require_open_files
from benchmarks.client_arms import ArmResult, Case, run_april, run_bare

ROOT = Path(__file__).resolve().parent.parent
TURN_S = 600.0
"""Longest turn."""


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


def run_turn(arm: str, url: str, case: Case) -> ArmResult:
    """One client process; raises RuntimeError when a token is missing."""
    order = msgspec.json.encode(case).decode()
    return result_of(["-m", "benchmarks.client_cost", "--client", arm, url, order], case)


def result_of(command: list[str], case: Case) -> ArmResult:
    """What a client process prints at its end; raises RuntimeError when a token is missing."""
    done = subprocess.run([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, timeout=TURN_S, check=True)
    result = msgspec.json.decode(done.stdout, type=ArmResult)
    if result.tokens_kept != case.in_flight * case.response_tokens * case.rounds:
        raise RuntimeError(f"{result.arm} kept {result.tokens_kept} tokens")
    return result


HEADER = (
    "| server | streaming | in flight | tokens | bare us/request | april us/request | bare us/1,000 tokens "
    "| april us/1,000 tokens | april / bare (min-max) |"
)


def table_row(case: Case, pairs: int) -> str:
    """Measure all pairs of one case; one line of the Markdown table, medians over pairs.

    Raises RuntimeError when fewer requests were in flight than asked for.
    """
    own: dict[str, list[float]] = {"bare": [], "april": []}
    with canned_server(case.in_flight, case.response_tokens, *server_options(case)) as url:
        for pair in range(pairs):
            for arm in ("bare", "april") if pair % 2 == 0 else ("april", "bare"):
                own[arm].append(median(run_turn(arm, url, case).pooled_us))
        counts = server_counts(url)
    if counts.peak != case.in_flight or counts.requests != 2 * pairs * case.rounds * case.in_flight:
        raise RuntimeError(f"{case.in_flight} requests should have been in flight, and were not: {counts}")
    ratios = [april / bare for april, bare in zip(own["april"], own["bare"], strict=True)]
    costs, thousand = [median(own["bare"]), median(own["april"])], 1000 / case.response_tokens
    return "| " + " | ".join([
        *first_cells(case), *(f"{cost:.0f}" for cost in costs), *(f"{cost * thousand:.0f}" for cost in costs),
        f"{median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
    ]) + " |"  # fmt: skip


def first_cells(case: Case) -> list[str]:
    """Which case a line of a table is about."""
    return [case.kind, "yes" if case.stream else "no", str(case.in_flight), str(case.response_tokens)]


def parser_of(description: str, in_flight: list[int], response_tokens: list[int]) -> argparse.ArgumentParser:
    """Options of the cases."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--kinds", nargs="+", choices=[VLLM, SGLANG], default=[VLLM, SGLANG])
    parser.add_argument("--streaming", nargs="+", choices=["no", "yes"], default=["no", "yes"])
    parser.add_argument("--in-flight", type=int, nargs="+", default=in_flight)
    parser.add_argument("--response-tokens", type=int, nargs="+", default=response_tokens)
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--samples-per-prompt", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3, help="per turn; the first opens the connections")
    return parser


def print_table(
    parser: argparse.ArgumentParser, args: argparse.Namespace, header: str, row: Callable[[Case], str]
) -> None:
    """The table with a row per case."""
    if args.rounds < 2 or args.pairs < 1 or max(args.response_tokens) > LONGEST_ANSWER:
        parser.error(f"needs --rounds >= 2, --pairs >= 1 and --response-tokens <= {LONGEST_ANSWER}")
    if any(n % args.samples_per_prompt for n in args.in_flight):
        parser.error("--in-flight must be whole groups of --samples-per-prompt")
    print(header, "|---" * (header.count(" | ") + 1) + "|", sep="\n", flush=True)
    for kind, stream, in_flight, tokens in product(args.kinds, args.streaming, args.in_flight, args.response_tokens):
        sizes = in_flight, tokens, args.prompt_len, args.rounds, args.samples_per_prompt
        print(row(Case(kind, stream == "yes", *sizes)), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; ``--client ARM URL CASE`` is how it starts its own client processes."""
    parser = parser_of("Client CPU of april beside a plain aiohttp client.", [256, 1024], [250, 1000])
    parser.add_argument("--client", nargs=3, metavar=("ARM", "URL", "CASE"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.client:
        arm, url, order = args.client
        case = msgspec.json.decode(order, type=Case)
        require_open_files(case.in_flight)
        print(msgspec.json.encode((run_april if arm == "april" else run_bare)(url, case)).decode())
        return 0
    print_table(parser, args, HEADER, lambda case: table_row(case, args.pairs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
