"""Two processes of torchrun that generate from one model under FSDP2 on gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_two_ranks_generate_from_sharded_weights() -> None:
    """Each as many tokens as it likes, none too; log-probabilities equal a recomputation with the whole weights, after
    optimizer steps on the sharded ones too, and no rank waits for a collective that another does not make."""
    ran = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            "tests/ranks/sharded_generation.py",
        ],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert float(ran.stdout.split("largest error: ")[1]) <= 1e-4
