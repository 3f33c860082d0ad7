"""Several real ranks train one model: nothing twice, nothing lost, and the weights that one process would have."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from tests.ranks.runs import start, trained_otherwise_than_once, weights_apart
from tests.ranks.trainer import Rank, options_of

PROMPTS = 9


def test_two_ranks_of_fsdp2_and_after_a_restart_one(tmp_path: Path) -> None:
    """Each response is trained once over all ranks and both starts; the log-probabilities equal a recomputation on each
    rank; the final weights are those of one process that trains the same batches. Collectives work inside of transfers,
    and evaluations are alike. With DDP, three ranks, empty shares and ranks that die: ``python -m tests.ranks``."""
    data = ("--kind", "fsdp2", "--short", "--prompts", str(PROMPTS))
    first = start(2, tmp_path / "a", *data, "--steps", "2", "--save", str(tmp_path / "saved.pt"))
    assert first.code == 0, first.log[-3000:]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        alone = Rank(options_of([*data, "--out", str(tmp_path), "--resume", str(tmp_path / "saved.pt")]))
        alone.train()
    finally:
        dist.destroy_process_group()
    second = alone.kept
    batches = first.batches + second["steps"]
    assert (first.shares, [len(rows) for rows in second["steps"]]) == ([[4, 4], [4, 4]], [2])
    assert trained_otherwise_than_once(batches, PROMPTS) == []
    assert first.stale > 0
    assert [(rank["transfers"], rank["reward"]) for rank in first.ranks] == [([2.0, 2.0], first.ranks[0]["reward"])] * 2
    assert max(first.error, second["error"]) <= 1e-4
    assert weights_apart(batches, second["weights"]) <= 1e-5 < 1e-3 < weights_apart([], second["weights"])
    assert second["end"] == "the prompt source has ended; every prompt is settled"
