"""Starts ranks under torchrun, and says what came of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.ranks.trainer import SAMPLES, loss_of, optimizer_of, tiny_model

ROOT = Path(__file__).parents[2]
LIMIT_S = 180.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the ranks of one start have kept."""

    ranks: list[dict[str, Any]]
    code: int
    log: str
    failed: float
    """When one failed, as --fail says; seconds since the epoch."""

    @property
    def error(self) -> float:
        """Largest difference in nats to a recomputation, over all ranks."""
        return max(rank["error"] for rank in self.ranks)

    @property
    def stale(self) -> int:
        """Trained tokens of older weights than those of their delivery."""
        return sum(rank["stale"] for rank in self.ranks)

    @property
    def batches(self) -> list[list[dict[str, Any]]]:
        """Whole, step by step."""
        steps = zip(*(rank["steps"] for rank in self.ranks), strict=True)
        return [[row for share in shares for row in share] for shares in steps]

    @property
    def shares(self) -> list[list[int]]:
        """Rows of each rank, step by step."""
        return [[len(share) for share in shares] for shares in zip(*(r["steps"] for r in self.ranks), strict=True)]


def start(ranks: int, out: Path, *options: str) -> Run:
    """Run until all ranks have ended. Where one shall fail, torchrun gives the others 20 s to hear of it from april."""
    out.mkdir()
    ran = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
            "--monitor-interval", "20" if "--fail" in options else "0.1", "tests/ranks/trainer.py",
            "--out", str(out), *options,
        ],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    failed = out / "failed"
    files = sorted(out.glob("rank*.pt"))
    kept = [torch.load(file, weights_only=True) | {"rank": int(file.stem[4:])} for file in files]
    when = float(failed.read_text()) if failed.exists() else 0.0
    return Run(ranks=kept, code=ran.returncode, log=ran.stderr, failed=when)


def weights_apart(batches: list[list[dict[str, Any]]], weights: dict[str, torch.Tensor]) -> float:
    """Largest difference of ``weights`` to those of one process that trains the same batches."""
    model: Any = tiny_model()
    optimizer = optimizer_of(model)
    for rows in batches:
        loss_of(model, rows, len(rows)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return max(float((weight - weights[name]).abs().max()) for name, weight in model.state_dict().items())


def trained_otherwise_than_once(batches: list[list[dict[str, Any]]], prompts: int) -> list[Any]:
    """Samples that were trained twice or not at all, of a run to the end of its data; and those that nobody knows."""
    counts = Counter(row["id"] for rows in batches for row in rows)
    wanted = {(group, index) for group in range(prompts) for index in range(SAMPLES)}
    return sorted((wanted ^ counts.keys()) | {name for name, count in counts.items() if count > 1})
