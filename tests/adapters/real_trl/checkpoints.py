"""A training that was cut and resumed from the trainer's checkpoint: nothing lost, nothing trained twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import short_runs
import torch
from transformers import TrainerCallback

from april.adapters.trl.checkpoint import KIND, STATE_FILE, buffer_file
from april.serialization.state_file import unpack


class StopAfter(TrainerCallback):  # type: ignore[misc]
    """Ends the training after so many optimizer steps, as a killed process would, but for the last checkpoint."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        control.should_training_stop = state.global_step >= self._steps


MODES: dict[str, dict[str, Any]] = {
    "aligned": {},
    # 4 optimizer steps per generation batch: every second checkpoint is in the middle of one
    "middle of a generation batch": {
        "per_device_train_batch_size": 8, "steps_per_generation": 2, "num_iterations": 2,
        "gradient_accumulation_steps": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("saved_at", [2, 3])
def test_a_resumed_training_loses_nothing_and_trains_nothing_twice(mode: str, saved_at: int, tmp_path: Path) -> None:
    """Before the checkpoint and after it, each prompt is delivered once, each response trained as often as asked."""
    saving = {"save_strategy": "steps", "save_steps": 1, **MODES[mode]}
    before = short_runs.trainer(tmp_path, **saving)
    before.add_callback(StopAfter(saved_at))
    before.train()
    checkpoint = tmp_path / f"checkpoint-{saved_at}"
    state = unpack(KIND, (checkpoint / STATE_FILE).read_bytes(), "the checkpoint")
    held = state["rollouts"]["core"]["waiting"]
    samples = [sample for group in held for sample in group["samples"]]
    assert any(chain["tokens"] for sample in samples for chain in sample["chains"])  # partials cross the restart

    after = short_runs.trainer(tmp_path, **saving)
    after.train(resume_from_checkpoint=str(checkpoint))

    assert before.delivered + after.delivered == dict.fromkeys(range(short_runs.ROWS), 1)
    assert after.rollout_func.ledger["prompts"].delivered == short_runs.ROWS
    times = 2 if "middle" in mode else 1
    trained = before.trained + after.trained
    assert sum(trained.values()) == times * short_runs.ROWS * short_runs.SAMPLES
    assert {count % times for count in trained.values()} == {0}
    assert max(after.logprob_errors) <= 1e-3
    assert after.state.global_step == times * times * short_runs.ROWS // short_runs.GROUPS
    assert (checkpoint / buffer_file(0)).exists() == ("middle" in mode)
    print(f"\n{mode}, cut after step {saved_at}: {sum(before.delivered.values())} groups before, {len(held)} held")


def test_the_weights_of_a_resumed_training_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """What remains of a half-trained generation batch gives the same weights as without the cut."""
    saving = {"save_strategy": "steps", "save_steps": 1, **MODES["middle of a generation batch"], "max_steps": 4}
    whole = short_runs.trainer(tmp_path / "whole", **saving)
    whole.train()
    cut = short_runs.trainer(tmp_path / "cut", **saving)
    cut.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))

    for one, other in zip(whole.model.parameters(), cut.model.parameters(), strict=True):
        assert torch.equal(one, other)
