"""``python -m tests.ranks``: the rank trainer in all its ways, one line of figures each; ends with 1 if one is wrong.

``python -m tests.ranks ddp "kill in"``: those with one of the words in their names.

12 steps of 4 groups and one of a single group, whose two responses are less than one for each of three ranks. The
second half of a restart runs on another number of ranks.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.ranks.runs import Run, start, trained_otherwise_than_once, weights_apart

PROMPTS, STEPS = 49, 13
EXACT_NATS, EXACT_WEIGHTS = 1e-4, 1e-5
DEADLINE_S = 10.0
"""For the others to end, after one has failed."""


def compared(name: str, *runs: Run) -> bool:
    """Print what came of one run, or of several that went on from each other."""
    if failed := [run for run in runs if run.code]:
        print(f"{name}: FAILED\n{failed[0].log[-3000:]}")
        return False
    last = runs[-1]
    batches = [batch for run in runs for batch in run.batches]
    apart = max(weights_apart(batches, rank["weights"]) for rank in last.ranks)
    error = max(run.error for run in runs)
    wrong = trained_otherwise_than_once(batches, PROMPTS)
    tokens = sum(len(row["tokens"]) for batch in batches for row in batch)
    ends = {rank["end"] for rank in last.ranks}
    right = (
        len(batches) == STEPS and not wrong and error <= EXACT_NATS and apart <= EXACT_WEIGHTS and len(ends) == 1
        and all(max(s) - min(s) <= 1 for run in runs for s in run.shares)
    )  # fmt: skip
    print(
        f"{name}: {'right' if right else 'WRONG'}; {len(batches)} steps, {sum(map(len, batches))} responses each once"
        f"{f' BUT {wrong}' if wrong else ''}, {tokens} tokens ({sum(run.stale for run in runs)} of older weights); "
        f"log-probabilities {error:.1e} nats, weights {apart:.1e} apart; last shares {last.shares[-1]}; "
        f"{max(rank['seconds'] for rank in last.ranks):.1f} s; end: {' | '.join(ends)}"
    )
    return right


def failed_alike(name: str, run: Run, dead: int, *, killed: bool) -> bool:
    """Print how the others have ended, and how long after it."""
    others = [rank for rank in run.ranks if rank["rank"] != dead]
    ends = [rank["end"] for rank in others]
    late = max((rank["ended"] for rank in others), default=0.0) - run.failed
    right = (
        len(run.ranks) == len(others) + (not killed) and bool(others) and late <= DEADLINE_S
        and all(f"rank {dead}" in end for end in ends)
    )  # fmt: skip
    print(f"{name}: {'right' if right else 'WRONG'}; the others within {late:.2f} s: {' | '.join(sorted(set(ends)))}")
    return right


def main() -> int:
    """All of it, or what has a word of the command line in its name."""
    right = True

    def wanted(name: str) -> bool:
        return not sys.argv[1:] or any(word in name for word in sys.argv[1:])

    with tempfile.TemporaryDirectory(prefix="april_ranks") as directory:
        out = Path(directory)
        data = ("--prompts", str(PROMPTS))
        for kind in ("ddp", "fsdp2"):
            for ranks in (2, 3):
                if wanted(name := f"{kind}, {ranks} ranks"):
                    right &= compared(name, start(ranks, out / name, *data, "--kind", kind))
            for before, after in ((2, 3), (3, 2)):
                saved = out / f"{kind}{before}.pt"
                if wanted(name := f"{kind}, {before} ranks, after 6 steps {after}"):
                    until = ("--steps", "6", "--save", str(saved))
                    first = start(before, out / f"{name} a", *data, "--kind", kind, *until)
                    second = start(after, out / f"{name} b", *data, "--kind", kind, "--resume", str(saved))
                    right &= compared(name, first, second)
        for how, where, dead in (
            ("kill", "next_batch", 1), ("kill", "transfer", 1), ("kill", "next_batch", 0), ("raise", "next_batch", 1),
            ("raise", "transfer", 0), ("raise", "transfer", 2),
        ):  # fmt: skip
            if wanted(name := f"fsdp2, 3 ranks, rank {dead}: {how} in {where}"):
                run = start(3, out / name, *data, "--kind", "fsdp2", "--fail", f"{how}:{where}:{dead}:3")
                right &= failed_alike(name, run, dead, killed=how == "kill")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
