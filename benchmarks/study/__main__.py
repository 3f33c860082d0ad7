"""The study by one command, which can be interrupted and begun again.

    python -m benchmarks.study                      run what is missing, then make the page
    python -m benchmarks.study run --only tail/     run a part
    python -m benchmarks.study status               what is there
    python -m benchmarks.study page                 make the page of what is there

A study whose published results are not whole goes on from them, on any machine; one that is whole is run anew.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from april.serialization.state_file import write_atomic
from benchmarks.study import design as designs
from benchmarks.study.claims import judge
from benchmarks.study.page import draw, figures, page, verdict_rows
from benchmarks.study.runner import Runner, gather, read_results, status, take_over, write_results

ROOT = Path(__file__).parent.parent.parent
RESULTS = Path(__file__).with_name("results.jsonl")
"""The raw outcomes of the page."""
FIGURES = Path(__file__).with_name("figures.json")
"""Everything that is computed from them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; returns 1 if a training failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="all", choices=("all", "run", "status", "page"))
    parser.add_argument("--out", type=Path, default=Path("runs/study"), help="directory of the outcomes")
    parser.add_argument("--workers", type=int, default=2, help="processes, of one thread each; 0: this one")
    parser.add_argument("--only", default="", help="only trainings whose name begins so, as tail/refill")
    parser.add_argument("--design", type=Path, default=designs.DESIGN)
    parser.add_argument("--root", type=Path, default=ROOT, help="where docs/study.md and the results go")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the workers, and of auto's processes
    design = designs.read(options.design)
    trainings = design.trainings()
    chosen = {name: s for name, s in trainings.items() if name.startswith(options.only)}
    if options.what == "status":
        print("\n".join(status(options.out, chosen)))
        return 0
    if options.what != "page":
        published = read_results(options.root / RESULTS.relative_to(ROOT))
        if len(published) < len(trainings) and (taken := take_over(published, options.out, chosen)):
            print(f"{taken} trainings were run before, elsewhere", flush=True)
        say = lambda line: print(line, flush=True)  # noqa: E731 - a line at a time, into files as well
        runner = Runner(options.out, chosen, options.workers, say)
        try:
            fine = runner.run()
        except KeyboardInterrupt:
            print("interrupted; the same command goes on from here", file=sys.stderr)
            return 130
        if not fine:
            print("\n".join(runner.failed), file=sys.stderr)
            return 1
    if options.what != "run":
        publish(design, options.out, options.root)
    return 0


def publish(design: designs.Design, out: Path, root: Path) -> None:
    """Write results, figures, picture and page of the outcomes that are there."""
    results, computed = (root / path.relative_to(ROOT) for path in (RESULTS, FIGURES))
    results.parent.mkdir(parents=True, exist_ok=True)
    write_results(results, gather(out, design.trainings()))
    outcomes = read_results(results)
    write_atomic(computed, (json.dumps(figures(design, outcomes), indent=1, allow_nan=False) + "\n").encode())
    draw(design, outcomes, root / "docs" / "images" / "study.png")
    write_atomic(root / "docs" / "study.md", page(design, outcomes).encode())
    print("\n".join(verdict_rows(judge(design, outcomes))))


if __name__ == "__main__":
    sys.exit(main())
