"""The demo by one command: ``python -m benchmarks.demo``, which ``make demo`` runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from april.errors import AprilError
from benchmarks.demo.arm import MODES, SHOWN, DemoSettings
from benchmarks.demo.run import run_and_show


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; returns 1 if a check does not hold, or a training failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/demo"), help="directory of summary.json and the pictures"
    )
    parser.add_argument("--steps", type=int, default=80, help="training steps per mode and seed")
    parser.add_argument("--seeds", type=int, default=4, help="each with its own warm-up")
    parser.add_argument("--quorum", action="store_true", help="also a group quorum of 0.5 with N' = 1.5N")
    parser.add_argument("--processes", type=int, default=2, help="trainings at the same time, of one thread each")
    options = parser.parse_args(arguments)
    modes = MODES if options.quorum else SHOWN
    settings = DemoSettings(steps=options.steps, seeds=options.seeds, modes=modes)
    try:
        return 0 if run_and_show(settings, options.out, processes=options.processes) else 1
    except AprilError as error:
        print(f"the demo failed: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
