"""The unmodified GRPOTrainer on two ranks, with a real vLLM that generates: whole models by a directory and sent from
the ranks, under DDP and FSDP2, and LoRA merged for it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.real_engines.commands import vllm_server
from tests.real_engines.models import make_models
from tests.real_engines.servers import ready

sys.path.insert(0, str(Path(__file__).parent.parent / "real_trl"))

import ranks

STEPS = 12


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """Of both ranks, after four trainings on one server."""
    folder = tmp_path_factory.mktemp("vllm")
    shutil.copytree(make_models(folder / "models")["first"], folder / "model")
    server = vllm_server("vllm", folder / "model", folder, open_routes=True, context=512)
    (folder / "url").write_text(server.url, "utf-8")
    with ready(server):
        return ranks.run("servers", folder)


@pytest.mark.parametrize("what", ["whole", "adapters", "sent", "sharded"])
def test_two_ranks_train_on_what_a_server_generates(what: str, reports: list[dict[str, dict[str, Any]]]) -> None:
    """Rank 0 hands the weights over; each response is trained once, and both ranks recompute its log-probabilities."""
    of_ranks = [report[what] for report in reports]

    ranks.check(f"vLLM, {what}", of_ranks, STEPS // 2 * ranks.GROUPS, limit=1e-3)
    for report in of_ranks:
        assert report["steps"] == STEPS
        assert report["updates"] == STEPS // 2
        assert report["stale_tokens"]
        assert report["largest_stale_difference"] > 10 * report["largest_error"]
