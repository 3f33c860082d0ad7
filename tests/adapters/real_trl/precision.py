"""What TRL's default precision means on a real model: its log-probabilities beside those of the rollouts.

    HF_HUB_OFFLINE=1 TRL_EXPERIMENTAL_SILENCE=1 python tests/adapters/real_trl/precision.py MODEL_DIRECTORY

Run by the Python of the environment that ``python -m tests.adapters trl`` makes. ``AprilGRPOTrainer`` with the defaults
of GRPOConfig, ``bf16=True`` among them, and the embedded engine; beside it the same with ``bf16=False``. Compared are
tokens of the present weights.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig

from april.adapters.trl import AprilGRPOTrainer, rollout

QUESTIONS = ("What is 17 + 25?", "Name three rivers.", "Why is the sky blue?", "Say hello in French.")


class Watched(AprilGRPOTrainer):  # type: ignore[misc,valid-type]
    """Keeps the differences of its own log-probabilities to those of the rollouts."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.differences: list[torch.Tensor] = []

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        draw, taken = self.rollout_func.next_rows, []

        def noted(*arguments: Any) -> Any:
            rows = draw(*arguments)
            taken.append(self.rollout_func._batch)
            return rows

        self.rollout_func.next_rows = noted
        output = super()._generate_and_score_completions(inputs)
        del self.rollout_func.next_rows
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
        mask = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
        width = output["completion_ids"].size(1)
        with torch.no_grad():
            now = self._get_per_token_logps_and_entropies(self.model, ids, mask, width)[0]
        for row, old, sample in zip(now, output["old_per_token_logps"], taken[0].samples, strict=True):
            fresh = torch.from_numpy((sample.versions == taken[0].version).all(1))
            count = len(sample.tokens)
            self.differences.append((row[:count] - old[:count]).abs()[fresh].float().cpu())
        return output


def main() -> None:
    """One line per precision of weights and computation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    data = Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in QUESTIONS * 4]})
    for weights, changes in (("float32", {}), ("bfloat16", {}), ("float32", {"bf16": False})):
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, weights))
        with tempfile.TemporaryDirectory() as folder:
            trainer = Watched(
                model=model,
                reward_funcs=lambda completion_ids, **columns: [float(len(set(ids))) for ids in completion_ids],
                args=GRPOConfig(
                    output_dir=str(Path(folder)), use_cpu=not torch.cuda.is_available(), report_to=[],
                    save_strategy="no", per_device_train_batch_size=8, num_generations=4,
                    max_completion_length=options.tokens, max_steps=options.steps, disable_tqdm=True, **changes,
                ),
                train_dataset=data,
                processing_class=tokenizer,
                rollout_func=rollout(
                    over_sampling_batch_size=4, engine={"kind": "transformers", "stream_interval": 8}
                ),
            )  # fmt: skip
            trainer.train()
        gaps = torch.cat(trainer.differences)
        print(
            f"\n{weights} weights, bf16={trainer.args.bf16}: mean {gaps.mean():.2e}  p99 {gaps.quantile(0.99):.2e}  "
            f"max {gaps.max():.2e}  of {len(gaps)} tokens",
            flush=True,
        )


if __name__ == "__main__":
    main()
