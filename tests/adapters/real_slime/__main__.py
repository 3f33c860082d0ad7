"""``python -m tests.adapters.real_slime --slime PATH [--miles PATH]``: april in the real slime, on a CPU.

slime and miles are on no package index: PATH is a checkout (github.com/THUDM/slime at 624b824,
github.com/radixark/miles at 31f1ca9). What they import is installed into an environment of its own below ``.venv``,
once, 1.7 GB.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.adapters.environments import SLIME
from tests.real_engines.environments import ROOT, environment

HERE = Path(__file__).resolve().parent
PACKAGES = ("slime", "slime_plugins", "miles", "miles_plugins")
CHECKS = ("rounds.py", "launch_flags.py", "replay.py")


def main() -> int:
    """Run the checks, and with ``--compare`` the side-by-side table instead; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.adapters.real_slime", description=__doc__)
    parser.add_argument("--slime", type=Path, required=True, help="source tree of slime")
    parser.add_argument("--miles", type=Path, help="source tree of miles; without it, what is about miles is left out")
    parser.add_argument("--compare", action="store_true", help="run benchmarks.slime_rollouts, with what follows --")
    parser.add_argument("--compare-async", action="store_true", help="run benchmarks.slime_async, the same way")
    parser.add_argument("rest", nargs="*", help="after --: for pytest, or for the benchmark")
    o = parser.parse_args()
    trees = [tree.resolve() for tree in (o.slime, o.miles) if tree is not None]
    for tree in trees:
        if not (tree / "train.py").is_file():
            parser.error(f"{tree} is no source tree of slime or miles: it has no train.py")
    python = environment(SLIME) / "bin" / "python"
    with TemporaryDirectory() as packages:
        for package in (tree / name for tree in trees for name in PACKAGES):
            if package.is_dir():
                (Path(packages) / package.name).symlink_to(package)
        return run(python, packages, trees, o)


def run(python: Path, packages: str, trees: list[Path], o: argparse.Namespace) -> int:
    """Run what was asked for, where only ``packages`` of the trees can be imported; the exit status."""
    settings = {
        # a tree has a package named tests as well, which would hide ours
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), packages]),
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "SLIME_TREE": str(trees[0]), "MILES_TREE": str(trees[1]) if len(trees) > 1 else "",
    }  # fmt: skip
    if o.compare or o.compare_async:
        program = "benchmarks.slime_rollouts" if o.compare else "benchmarks.slime_async"
        command = [str(python), "-m", program, "--slime", str(trees[0]), *o.rest]
    else:
        # files that the ordinary suite does not collect, as their names do not begin with test_
        files = sorted(str(path) for path in HERE.glob("*.py") if path.name in CHECKS)
        command = [str(python), "-m", "pytest", "-q", "-rA", "-W", "default", "-p", "no:cacheprovider", *files, *o.rest]
    return subprocess.run(command, cwd=ROOT, env=os.environ | settings, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
