"""Real clients before april's endpoint, cut in mid-call by step ends with weight updates: ``python -m tests.clients``.

Every client plays twice before the scripted engine, once without any cut. Then, for each: the transcripts are equal, no
request failed or came again, and each trained token is that of the engine's record, with its version.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from tests.clients.environments import VERIFIERS
from tests.real_engines.environments import ROOT, environment


def main() -> int:
    """Run the program in the environment that has ``verifiers``; the exit status is that of the worst client."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("kinds", nargs="*", help="which ones (see cases.KINDS); all without")
    python = environment(VERIFIERS) / "bin" / "python"
    command = [str(python), "-m", "tests.clients.table", *parser.parse_args().kinds]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
