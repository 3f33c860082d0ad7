"""Makes the environment, and runs the checks in it: ``python -m tests.real_exporters`` (``make test-exporters``)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("tensorboard", "wandb")
TOOLS = ("pytest", "pytest-asyncio")


def main(directory: Path = ROOT / ".venv" / "exporters") -> int:
    python = directory / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PACKAGES, *TOOLS, str(ROOT)], check=True)
    checks = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", "tests/real_exporters/checks.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([str(python), *checks], cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
