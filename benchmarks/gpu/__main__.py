"""Measure the embedded engine on this machine's GPU within a budget of time; gpu.json grows as it goes.

    python -m benchmarks.gpu --minutes 10 --out gpu-benchmark
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from april.errors import ConfigError

SHAPES = ("0.6b", "1.7b", "4b")


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; the exit status is 1 where it could not begin, or a part of it has failed (the report says which)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="for everything; more gives longer responses")
    parser.add_argument("--out", type=Path, default=Path("gpu-benchmark"), help="directory of gpu.json")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=SHAPES, help="of Qwen3")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--device", help="as torch calls it; default: the GPU")
    parser.add_argument("--miniature", action="store_true", help="tiny shapes on the CPU: to see that it runs")
    options = parser.parse_args(argv)
    try:
        from benchmarks.gpu.run import run
    except ImportError as error:
        print(f"the GPU benchmark needs torch and transformers: {error}", file=sys.stderr)
        return 1
    try:
        report = run(
            minutes=options.minutes, out=options.out, shapes=options.shapes, dtype=options.dtype,
            device=options.device, miniature=options.miniature,
        )  # fmt: skip
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    return 1 if report["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
