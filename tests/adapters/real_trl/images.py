"""The unmodified GRPOTrainer trains a model that sees on aborted and resumed responses, each with its own image."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import short_runs
import torch
from checkpoints import StopAfter
from datasets import Dataset
from peft import LoraConfig

from april.adapters.trl import rollout
from april.adapters.trl.checkpoint import buffer_file

sys.path.insert(0, str(Path(__file__).parents[2]))

from models_that_see import IMAGE, VIDEO, opened, picture, tiny_processor, tiny_vision_model

ROWS, GROUPS, SAMPLES = 16, 4, 4
SIZES = ((16, 24), (16, 24), (24, 24))
"""Most rows have as many tokens as their neighbours, so that only the image tells them apart."""
RUN: dict[str, Any] = {"per_device_train_batch_size": GROUPS * SAMPLES, "max_completion_length": 160}


def images_of(row: int) -> list[Any]:
    return [opened(picture(100 + row + 50 * i, *SIZES[(row + i) % 3])) for i in range(1 + (row == 3))]


def data(column: str = "images", rows: int = ROWS) -> Dataset:
    """One prompt for all, so that the image is all that they differ in; row 3 has two where it can."""
    shown = [images_of(row) for row in range(rows)]
    prompts = [[{"role": "user", "content": "t20 t21"}] for _ in range(rows)]
    columns = {"images": shown, "image": [images[0] for images in shown]}
    return Dataset.from_dict({"prompt": prompts, "number": list(range(rows)), column: columns[column]})


def reward(prompts: Any, completions: Any, completion_ids: Any, number: Any, **others: Any) -> list[float]:
    """Share of even tokens; the prompt has the row's image in its messages."""
    for prompt, row in zip(prompts, number, strict=True):
        (shown, *_) = [part["image"] for part in prompt[0]["content"] if part["type"] == "image"]
        assert shown.tobytes() == images_of(row)[0].tobytes()
    return [sum(1 for token in ids if token % 2 == 0) / len(ids) for ids in completion_ids]


class Seeing(short_runs.Watched):
    """Notes which image reached the loss with which tokens."""

    rows: dict[tuple[int, ...], int]
    """Rows of the data set by the tokens of a response."""
    right: int = 0
    """Rows of micro-batches that came with their own image."""
    without: float = 0.0
    """Largest difference of log-probabilities where the images are those of other rows."""
    column = "images"

    def _note(self, batch: Any, output: Any) -> None:
        super()._note(batch, output)
        self.rows = getattr(self, "rows", {})
        for sample in batch.samples:
            assert not set(sample.tokens.tolist()) & {IMAGE, VIDEO}
            self.rows[tuple(sample.tokens.tolist())] = sample.prompt.data["row"]
        seen = self._seen(output)
        others = seen | {"pixel_values": seen["pixel_values"].roll(24 * len(SIZES), 0)}
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
        mask = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
        width, real = output["completion_ids"].size(1), output["completion_mask"].bool()
        with torch.no_grad():
            now, then = (
                self._get_per_token_logps_and_entropies(self.model, ids, mask, width, **given)[0]
                for given in (seen, others)
            )
        self.without = max(self.without, float((now - then).abs()[real].max()))

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        if self.model.training:
            process = self.processing_class.image_processor
            grids = torch.split(inputs["image_grid_thw"], inputs["num_images"])
            pixels = torch.split(inputs["pixel_values"], [int(grid.prod(-1).sum()) for grid in grids])
            masks = inputs["completion_mask"].bool()
            for ids, mask, values in zip(inputs["completion_ids"], masks, pixels, strict=True):
                shown = images_of(self.rows[tuple(ids[mask].tolist())])
                expected = process(shown if self.column == "images" else shown[:1], return_tensors="pt")["pixel_values"]
                assert torch.equal(values, expected)
                self.right += 1
            types = inputs["mm_token_type_ids"]
            whole = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
            assert torch.equal(types == 1, whole == IMAGE)
        return super()._compute_loss(model, inputs)


def trainer(folder: Path, column: str = "images", **changes: Any) -> Any:
    made = short_runs.trainer(
        folder, rollout(**short_runs.SETTINGS), reward, data(column), None, tiny_vision_model(),
        processing_class=tiny_processor(), kind=Seeing, **{**RUN, **changes},
    )  # fmt: skip
    made.column = column
    return made


@pytest.mark.parametrize("column", ["images", "image"])
def test_aborted_and_resumed_responses_are_trained_with_their_own_image(column: str, tmp_path: Path) -> None:
    """Four steps; log-probabilities agree; TRL's own tensors of the right image reach its loss."""
    made = trainer(tmp_path, column)
    made.train()

    assert made.state.global_step == ROWS // GROUPS == 4
    assert made.delivered == dict.fromkeys(range(ROWS), 1)
    assert made.rollout_func.ledger["tokens"].balanced
    assert made.right == ROWS * SAMPLES
    assert made.resumed > 0
    assert made.stale_tokens > 0
    assert max(made.logprob_errors) <= 1e-4
    assert max(made.stale_differences) > 10 * max(made.logprob_errors)
    assert made.without > 1e-2
    print(
        f"\n{column}: {made.resumed} resumed responses trained, {made.stale_tokens} of {made.tokens} tokens from older "
        f"weights; log-probabilities differ by at most {max(made.logprob_errors):.1e} (older weights: "
        f"{max(made.stale_differences):.1e}, other rows' images: {made.without:.1e})"
    )


@pytest.mark.parametrize("saved_at", [2, 3])
def test_a_resumed_training_loses_nothing_and_mixes_up_no_images(saved_at: int, tmp_path: Path) -> None:
    """At a boundary of generation batches, and in the middle of one, whose images and their numbers come back."""
    saving = {
        "save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 8, "steps_per_generation": 2,
        "gradient_accumulation_steps": 1,
    }  # fmt: skip
    before = trainer(tmp_path, **saving)
    before.add_callback(StopAfter(saved_at))
    before.train()
    checkpoint = tmp_path / f"checkpoint-{saved_at}"
    assert (checkpoint / buffer_file(0)).exists() is (saved_at == 3)
    after = trainer(tmp_path, **saving)
    after.rows = dict(before.rows)  # of what is left of a batch
    after.train(resume_from_checkpoint=str(checkpoint))

    assert before.delivered + after.delivered == dict.fromkeys(range(ROWS), 1)
    assert before.right + after.right == ROWS * SAMPLES
    assert after.resumed > 0
    assert max(after.logprob_errors) <= 1e-4


@pytest.mark.parametrize("shown", [True, False], ids=["with an alpha channel", "text alone"])
def test_other_rows(shown: bool, tmp_path: Path) -> None:
    """Images that readers treat in different ways: TRL trains what was generated from. A processor and no image."""
    columns: dict[str, Any] = {"number": list(range(ROWS))}
    columns["prompt"] = [[{"role": "user", "content": f"t{20 + (0 if shown else row)} t21"}] for row in range(ROWS)]
    if shown:
        columns["image"] = [images_of(row)[0] for row in range(ROWS)]
        for i, image in enumerate(columns["image"]):
            image.putalpha(40 * (i % 4))
    made = short_runs.trainer(
        tmp_path, rollout(**short_runs.SETTINGS),
        lambda completion_ids, **others: [float(len(ids)) for ids in completion_ids], Dataset.from_dict(columns), None,
        tiny_vision_model(), processing_class=tiny_processor(), max_steps=2, **RUN,
    )  # fmt: skip
    made.train()

    assert max(made.logprob_errors) <= 1e-4


def test_adapters_of_a_model_that_sees(tmp_path: Path) -> None:
    """LoRA on every linear layer, the tower's too, under gradient checkpointing."""
    settings = {"r": 4, "lora_alpha": 1, "init_lora_weights": False, "target_modules": "all-linear"}
    lora = LoraConfig(task_type="CAUSAL_LM", **settings)
    made = trainer(tmp_path, peft_config=lora, gradient_checkpointing=True, max_steps=4, max_completion_length=240)
    made.train()

    assert made.right == 4 * GROUPS * SAMPLES
    assert made.resumed > 0
    assert max(made.logprob_errors) <= 1e-4
    assert max(made.stale_differences) > 1e-3
