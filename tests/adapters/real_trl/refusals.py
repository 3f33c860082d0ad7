"""What the real package's own configuration can say that april cannot be exact with; and dynamic sampling."""

from __future__ import annotations

import inspect
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import short_runs
import tiny
from transformers import HfArgumentParser
from trl import GRPOConfig, GRPOTrainer

import april
from april.adapters.trl import rollout
from april.adapters.trl.checks import REQUIRED_FUNCTIONS, TESTED_VERSION, require_trl
from benchmarks import trl_demo

WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"top_p": 0.9}, {}, "GRPOConfig.top_p=0.9"),
    ({"top_k": 10}, {}, "GRPOConfig.top_k=10"),
    ({"min_p": 0.1}, {}, "GRPOConfig.min_p=0.1"),
    ({"repetition_penalty": 1.1}, {}, "GRPOConfig.repetition_penalty=1.1"),
    ({"temperature": 0.7}, {"sampling": {"temperature": 0.8}}, "contradicts temperature=0.7"),
    ({"num_generations": 2}, {"n_samples_per_prompt": 4}, "contradicts num_generations=2"),
    ({"generation_batch_size": 32}, {"rollout_batch_size": 4}, "contradicts generation_batch_size / num_generations=8"),
    ({}, {"group_quorum": 0.5}, "a baseline needs 3"),
    ({"multi_objective_aggregation": "normalize_then_sum"}, {"group_quorum": 0.75}, "over whole groups, but with"),
    ({}, {"on_failed_sample": "shrink"}, "on_failed_sample=shrink: a smaller group leaves TRL with fewer rows"),
    ({}, {"over_sampling_batch_size": 8, "partial_rollout": False, "max_staleness": 2}, "set partial_rollout: true"),
]


@pytest.mark.parametrize(("args", "settings", "sentence"), WRONG)
def test_wrong_settings_are_refused(args: Any, settings: Any, sentence: str, tmp_path: Path) -> None:
    """When the trainer is made, by one sentence."""
    with pytest.raises(april.ConfigError, match=sentence):
        short_runs.trainer(tmp_path, rollout(**settings), **args)


def test_the_plain_trainer_is_refused_before_it_trains(tmp_path: Path) -> None:
    """It would take the ratio of stale tokens to be 1."""
    plain = GRPOTrainer(
        model=tiny.model(), reward_funcs=short_runs.reward, args=short_runs.arguments(tmp_path),
        train_dataset=tiny.dataset(8), processing_class=tiny.tokenizer(), rollout_func=rollout(),
    )  # fmt: skip
    with pytest.raises(april.ConfigError, match="this rollout_func needs AprilGRPOTrainer"):
        plain.train()


def test_a_data_stream_is_refused(tmp_path: Path) -> None:
    """april orders the prompts itself, and finds a row again after a restart."""
    with pytest.raises(april.ConfigError, match="IterableDataset, which cannot be read row by row"):
        short_runs.trainer(tmp_path, data=tiny.dataset(8).to_iterable_dataset(), max_steps=2)


def test_the_tested_version_is_this_one() -> None:
    """The page, the recipe and the refusal name it; all that is overridden is there."""
    assert require_trl().__version__ == TESTED_VERSION
    for name, parameters in REQUIRED_FUNCTIONS.items():
        assert tuple(inspect.signature(getattr(GRPOTrainer, name)).parameters) == parameters
    assert "rollout_func" in inspect.signature(GRPOTrainer.__init__).parameters


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
