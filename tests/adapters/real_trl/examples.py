"""The real package takes the settings of the examples, and april fits them; dynamic sampling."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import short_runs
import tiny
from transformers import HfArgumentParser
from trl import GRPOConfig

import april
from april.adapters.trl import rollout
from benchmarks import trl_demo


def test_dynamic_sampling(tmp_path: Path) -> None:
    """Groups without a difference in reward never reach the trainer, which has no such thing itself."""

    def even_rows(number: Any, completion_ids: Any, **columns: Any) -> list[float]:
        return [0.0 if n % 2 else len(ids) / 100 for n, ids in zip(number, completion_ids, strict=True)]

    rollouts = rollout(**short_runs.SETTINGS, filter=april.rewards_differ, on_data_end="wrap")
    trainer = short_runs.trainer(tmp_path, rollouts, even_rows, max_steps=4)
    trainer.train()

    logged = [row for row in trainer.state.log_history if "frac_reward_zero_std" in row]
    assert [float(row["frac_reward_zero_std"]) for row in logged] == [0.0] * 4
    assert all(row % 2 == 0 for row in trainer.delivered)
    assert trainer.rollout_func.ledger["prompts"].dropped


# ---------------------------------------------------------------- the examples


EXAMPLES = Path(__file__).parents[3] / "examples" / "trl"


def load(name: str) -> Any:
    return SimpleNamespace(**runpy.run_path(str(EXAMPLES / f"{name}.py")))


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "gspo"])
@pytest.mark.parametrize("model", ["qwen3-4b", "r1-distill-1.5b"])
def test_the_workloads_of_the_paper(model: str, algorithm: str, tmp_path: Path) -> None:
    """Parsed by GRPOConfig itself; april's settings fit them, and 32 groups of 8 are one optimizer step."""
    example = load("train")
    arguments = example.trl_arguments(model, algorithm) | {"use_cpu": True, "output_dir": str(tmp_path)}
    (args,) = HfArgumentParser(GRPOConfig).parse_dict(arguments, allow_extra_keys=False)

    assert (args.generation_batch_size, args.num_generations, args.max_completion_length) == (256, 8, 16_384)
    assert args.steps_per_generation == args.gradient_accumulation_steps
    trainer = short_runs.Watched(
        model=tiny.model(), reward_funcs=example.right_answer, args=args, train_dataset=tiny.dataset(64),
        processing_class=tiny.tokenizer(), rollout_func=rollout(**example.april_arguments(algorithm)),
    )  # fmt: skip
    config = trainer.rollout_func.config
    assert (config.rollout_batch_size, config.over_sampling_batch_size, config.n_samples_per_prompt) == (32, 64, 8)
    assert config.sampling.temperature == 0.8
    for kind in ("vllm", "sglang"):
        served = rollout(**example.april_arguments(algorithm, ["http://127.0.0.1:8001"], "weights", kind))
        served.attach(trainer)
        assert served.config.engine.kind == kind


@pytest.mark.parametrize("mode", ["trl", "over-sampling", "constant"])
def test_the_tiny_run(mode: str, tmp_path: Path) -> None:
    """A few steps of benchmarks/trl_demo.py in each mode, from a model that has learned next to nothing."""
    result = trl_demo.main(
        ["--mode", mode, "--steps", "3", "--warm-up-steps", "3", "--held-out", "4", "--out", str(tmp_path)]
    )

    assert result["trained tokens"] > 0
    assert (result["off-policy share"] > 0) == (mode != "trl")
