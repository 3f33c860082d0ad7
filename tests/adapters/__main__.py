"""The adapters against the real, unmodified trainers on this CPU: ``python -m tests.adapters [TRAINER ...]``."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from tests.adapters.environments import AREAL, OPENRLHF, RAY, TRL, VERL
from tests.real_engines.environments import ROOT, environment

TRAINERS = {"trl": TRL, "trl_servers": TRL, "verl": VERL, "openrlhf": OPENRLHF, "areal": AREAL, "ray": RAY}


def main() -> int:
    """Make the environment of each trainer, and run what is in ``real_<trainer>/`` there; the worst exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.adapters", description=__doc__)
    parser.add_argument("trainers", nargs="*", choices=[[], *TRAINERS], help="which ones; all without")
    worst = 0
    for name in parser.parse_args().trainers or TRAINERS:
        python = environment(TRAINERS[name]) / "bin" / "python"
        # files that the ordinary suite does not collect, as their names do not begin with test_
        files = sorted(str(path) for path in (ROOT / "tests" / "adapters" / f"real_{name}").glob("*.py"))
        command = [str(python), "-m", "pytest", "-q", "-s", "-W", "default", "-p", "no:cacheprovider", *files]
        alone = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
        worst = max(worst, subprocess.run(command, cwd=ROOT, env=alone, check=False).returncode)
    return worst


if __name__ == "__main__":
    sys.exit(main())
