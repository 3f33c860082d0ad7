"""A training that was cut and resumed from the trainer's checkpoint has the weights of one that was not.

That nothing is lost and nothing trained twice, the quorum's and the images' trainings and those on ranks say.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import short_runs
import torch
from transformers import TrainerCallback


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


def test_the_weights_of_a_resumed_training_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """What remains of a half-trained generation batch gives the same weights as without the cut."""
    saving = {"save_strategy": "steps", "save_steps": 1, **MODES["middle of a generation batch"], "max_steps": 4}
    whole = short_runs.trainer(tmp_path / "whole", **saving)
    whole.train()
    cut = short_runs.trainer(tmp_path / "cut", **saving)
    cut.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))

    for one, other in zip(whole.model.parameters(), cut.model.parameters(), strict=True):
        assert torch.equal(one, other)
