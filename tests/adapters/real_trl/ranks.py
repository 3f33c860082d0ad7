"""The unmodified GRPOTrainer on two ranks, started by torchrun: DDP on gloo, groups that straddle the ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import rank_runs
import torch
from rank_runs import GROUPS, ROWS
from safetensors.torch import load_file
from short_runs import SAMPLES

import april

SCRIPT = Path(__file__).parent / "rank_runs.py"


def torchrun(part: str, folder: Path, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """A part of the script on some ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [*command, str(SCRIPT), str(folder), part], env=os.environ | {"ACCELERATE_USE_CPU": "true"}, text=True,
        capture_output=True, timeout=600,
    )  # fmt: skip


def run(part: str, folder: Path, ranks: int = 2) -> list[dict[str, Any]]:
    """What each rank has seen."""
    done = torchrun(part, folder, ranks)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return [json.loads((folder / f"rank{rank}.json").read_text("utf-8")) for rank in range(ranks)]


def responses(*reports: dict[str, Any]) -> Counter[tuple[int, int, int]]:
    """(row, group, sample) of what was delivered."""
    return Counter((row, group, index) for report in reports for row, group, index, _ in report["responses"])


def check(
    name: str, reports: Sequence[dict[str, Any]], prompts: int, kept: Sequence[dict[str, Any]] = (), limit: float = 1e-4
) -> None:  # fmt: skip
    """So many prompts were delivered with all their responses, each once, to these ranks and in what was ``kept``.

    Log-probabilities agree on each rank, some responses were resumed, and the weights are the same in the end.
    """
    delivered = responses(*reports, *kept)
    assert len(delivered) == sum(delivered.values()) == prompts * SAMPLES
    assert set(Counter(row for row, _, _ in delivered).values()) == {SAMPLES}
    resumed, generated = ([report[of] for report in reports] for of in ("resumed", "generated"))
    largest = max(report["largest_error"] for report in reports)
    assert sum(resumed) > 0
    assert largest <= limit
    assert reports[0]["weights"] == reports[-1]["weights"]
    print(
        f"\n{name}: {resumed} resumed responses trained, {generated} tokens generated; "
        f"{sum(report['stale_tokens'] for report in reports) / sum(report['tokens'] for report in reports):.0%} of "
        f"tokens from older weights; log-probabilities differ by at most {largest:.1e}"
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def whole_and_resumed(folder: Path) -> list[dict[str, Any]]:
    return run("resumed", folder)


def test_two_ranks_train_each_response_once(whole_and_resumed: list[dict[str, Any]]) -> None:
    """Each prompt once over both ranks; log-probabilities agree on each; the weights are the same in the end."""
    ranks = [report["whole"] for report in whole_and_resumed]

    assert [report["ranks"] for report in ranks] == [2, 2]
    assert [report["steps"] for report in ranks] == [2 * ROWS // GROUPS] * 2
    check("two ranks", ranks, ROWS)
    halves = [{group for _, group, _, _ in report["responses"]} for report in ranks]
    assert halves[0] & halves[1]  # groups of which each rank has a part
    for report in ranks:
        assert sum(times for _, times in report["trained"]) == ROWS * SAMPLES / 2
        assert report["stale_tokens"] > 0
        assert report["largest_stale_difference"] > 1e-3
        assert report["evaluations"] == 2
        assert report["generated"] > 0
    assert (ranks[0]["delivered_prompts"], ranks[0]["token_ledger_balances"]) == (ROWS, True)


@pytest.mark.parametrize("step", [8, 9])
def test_two_ranks_resume(step: int, whole_and_resumed: list[dict[str, Any]], folder: Path) -> None:
    """Between two generation batches and in the middle of one: what was trained before is not trained again."""
    before = (step + 1) // 2 * GROUPS * SAMPLES // 2
    kept = [{"responses": report["whole"]["responses"][:before]} for report in whole_and_resumed]
    check(f"resumed at {step}", [report[f"from{step}"] for report in whole_and_resumed], ROWS, kept)
    if step == 9:  # what each rank had left of the batch gives the weights that it gave without the cut
        names = [folder / run / "checkpoint-10" / "model.safetensors" for run in ("whole", "from9")]
        one, other = map(load_file, names)
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_one_process_goes_on_from_two_ranks(
    whole_and_resumed: list[dict[str, Any]], folder: Path, tmp_path: Path
) -> None:
    """Between two generation batches, whose size stays; in the middle of one, in one sentence not."""
    def alone() -> Any:
        return rank_runs.trainer(tmp_path, per_device_train_batch_size=6, save_strategy="no")

    after = alone()
    after.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-8"))
    kept = [{"responses": report["whole"]["responses"][: 4 * GROUPS * SAMPLES // 2]} for report in whole_and_resumed]

    check("one process after two", [rank_runs.seen(after)], ROWS, kept)
    with pytest.raises(april.CheckpointError, match="spread over 2 processes, but now there are 1"):
        alone().train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-9"))


def test_steps_that_are_shifted_against_batches(whole_and_resumed: list[dict[str, Any]]) -> None:
    """num_iterations, gradient accumulation, dynamic sampling, evaluations, and max_steps in the middle of a batch."""
    ranks = [report["at once"] for report in whole_and_resumed]

    delivered = responses(*ranks)
    assert len(delivered) == sum(delivered.values()) == 4 * GROUPS * SAMPLES  # two optimizer steps per batch
    assert [report["steps"] for report in ranks] == [7, 7]
    for report in ranks:
        assert sum(times for _, times in report["trained"]) == 7 * 2 * 3  # two micro-batches of three rows each
        assert report["evaluations"] == 3  # steps 3 and 6, and the end
        assert report["largest_error"] <= 1e-4
    assert ranks[0]["weights"] == ranks[1]["weights"]


def test_adapters_on_two_ranks(whole_and_resumed: list[dict[str, Any]]) -> None:
    """LoRA, read in place."""
    ranks = [report["adapters"] for report in whole_and_resumed]

    check("LoRA", ranks, 4 * GROUPS)
    assert all(report["generated"] > 0 for report in ranks)


def test_two_ranks_that_have_pieces_of_the_model(whole_and_resumed: list[dict[str, Any]]) -> None:
    """FSDP2 by accelerate: the ranks put the weights together, and both generate; a cut in the middle of a batch."""
    ranks = [report["sharded"] for report in whole_and_resumed]
    after = [report["sharded from5"] for report in whole_and_resumed]
    before = 3 * GROUPS * SAMPLES // 2  # steps 5 and 6 train the third batch
    kept = [{"responses": report["responses"][:before]} for report in ranks]

    assert [report["pieces"] for report in ranks] == [True, True]
    check("FSDP2", ranks, 4 * GROUPS)
    check("FSDP2, resumed", after, 4 * GROUPS, kept)
    for report in [*ranks, *after]:
        assert report["steps"] == 8
        assert report["generated"] > 0


def test_two_ranks_train_responses_with_their_own_images(tmp_path: Path) -> None:
    """Each prompt once over both ranks; what each rank's loss gets are the tensors of its rows' images."""
    ranks = run("seeing", tmp_path)

    check("images", ranks, 12)
    assert [report["right"] for report in ranks] == [12 * SAMPLES // 2] * 2
    for report in ranks:
        assert (report["steps"], report["evaluations"]) == (8, 2)
        assert report["without"] > 1e-2
        assert report["generated"] > 0


def test_an_error_on_one_rank_ends_both(tmp_path: Path) -> None:
    """At once, not after a time-out of torch's."""
    begun = time.monotonic()
    done = torchrun("fails", tmp_path)

    assert done.returncode != 0
    assert "planted" in done.stderr
    print(f"\nan error on rank 1: both ended after {time.monotonic() - begun:.0f} s")
