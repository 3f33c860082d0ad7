"""One training of the unmodified package on the tiny model, and everything that its trainer saw."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import tiny
import torch
from trl import GRPOConfig

from april.adapters.trl import AprilGRPOTrainer, rollout

ROWS, GROUPS, SAMPLES, LONGEST = 24, 4, 4, 160
SETTINGS: dict[str, Any] = {
    "over_sampling_batch_size": 2 * GROUPS,
    # ticks of 8 tokens, so that a step ends soon after its last group
    "engine": {"kind": "transformers", "stream_interval": 8},
}


class Watched(AprilGRPOTrainer):  # type: ignore[misc,valid-type]
    """Notes what was delivered, scored and trained; changes nothing."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.delivered: Counter[int] = Counter()
        """Groups by dataset row."""
        self.trained: Counter[tuple[int, ...]] = Counter()
        """Micro-batch rows that reached the loss, by their tokens."""
        self.resumed = self.stale_tokens = self.tokens = 0
        self.logprob_errors: list[float] = []
        """Largest difference of trainer and rollout per step, over tokens of the present weights."""
        self.stale_differences: list[float] = []
        self.weights: list[tuple[int, int]] = []
        """(batch, optimizer steps of the weights) at each delivery."""
        self.batches: list[Any] = []
        self.given: list[tuple[int, tuple[int, ...], float]] = []
        """(optimizer steps so far, tokens, advantage) of each row that reached the loss."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        training, taken = self.model.training, []
        if training:
            draw = self.rollout_func.next_rows

            def noted(*arguments: Any) -> Any:
                rows = draw(*arguments)
                taken.append(self.rollout_func._batch)
                return rows

            self.rollout_func.next_rows = noted
        try:
            output = super()._generate_and_score_completions(inputs)
        finally:
            self.rollout_func.__dict__.pop("next_rows", None)
        if training:
            self._note(taken[0], output)
        return output

    def _note(self, batch: Any, output: Any) -> None:
        self.delivered.update(s.prompt.data["row"] for s in batch.samples[::SAMPLES])
        self.weights.append((batch.id, self.state.global_step))
        self.batches.append(batch)
        self.resumed += sum(1 for s in batch.samples if s.resumes)
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
        mask = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
        width = output["completion_ids"].size(1)
        with torch.no_grad():
            now = self._get_per_token_logps_and_entropies(self.model, ids, mask, width, **self._seen(output))[0]
        fresh = torch.zeros(len(batch), width, dtype=torch.bool)
        for i, sample in enumerate(batch.samples):
            assert output["completion_ids"][i, : len(sample.tokens)].tolist() == sample.tokens.tolist()
            fresh[i, : len(sample.tokens)] = torch.tensor((sample.versions == batch.version).all(1))
        real = output["completion_mask"].bool()
        difference = (now - output["old_per_token_logps"]).abs()
        self.tokens += int(real.sum())
        self.stale_tokens += int((real & ~fresh).sum())
        if (real & fresh).any():
            self.logprob_errors.append(float(difference[real & fresh].max()))
        if (real & ~fresh).any():
            self.stale_differences.append(float(difference[real & ~fresh].max()))

    def _seen(self, output: Any) -> dict[str, Any]:
        """What the model is given beside tokens."""
        names = ("pixel_values", "image_grid_thw", "num_images", "mm_token_type_ids", "token_type_ids")
        return {name: output[name] for name in names if name in output}

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        if self.model.training:
            masks, advantages = inputs["completion_mask"].bool(), inputs["advantages"].tolist()
            for ids, mask, advantage in zip(inputs["completion_ids"], masks, advantages, strict=True):
                self.trained[tuple(ids[mask].tolist())] += 1
                self.given.append((self.state.global_step, tuple(ids[mask].tolist()), advantage))
        return super()._compute_loss(model, inputs)


def reward(prompts: Any, completions: Any, completion_ids: Any, number: Any, **others: Any) -> list[float]:
    """Share of even tokens; refuses rows whose columns do not belong together."""
    texts = tiny.dataset(ROWS)["prompt"]
    assert prompts == [texts[n] for n in number]
    assert completions == tiny.tokenizer().batch_decode(completion_ids, skip_special_tokens=True)
    return [sum(1 for token in ids if token % 2 == 0) / len(ids) for ids in completion_ids]


def arguments(folder: Path, **changes: Any) -> GRPOConfig:
    """One pass over the data, one optimizer step per generation batch, fp32."""
    values: dict[str, Any] = {
        "output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True,
        "per_device_train_batch_size": GROUPS * SAMPLES, "num_generations": SAMPLES, "max_completion_length": LONGEST,
        "num_train_epochs": 1, "learning_rate": 3e-3, "beta": 0.0, "logging_steps": 1, "save_strategy": "no",
    }  # fmt: skip
    return GRPOConfig(**(values | changes))


def trainer(
    folder: Path,
    rollouts: Any = None,
    reward_funcs: Any = reward,
    data: Any = None,
    held_out: Any = None,
    model: Any = None,
    peft_config: Any = None,
    processing_class: Any = None,
    kind: type[Watched] = Watched,
    **changes: Any,
) -> Any:
    """A trainer of the tiny model, or of ``model``; ``changes`` are of GRPOConfig."""
    torch.set_num_threads(1)
    return kind(
        model=tiny.model() if model is None else model,
        peft_config=peft_config,
        reward_funcs=reward_funcs,
        args=arguments(folder, **changes),
        train_dataset=tiny.dataset(ROWS) if data is None else data,
        eval_dataset=held_out,
        processing_class=tiny.tokenizer() if processing_class is None else processing_class,
        rollout_func=rollout(**SETTINGS, metrics="all") if rollouts is None else rollouts,
    )
