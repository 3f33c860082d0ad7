"""examples/verl: each combination is a configuration of verl's, composed by verl's own hydra, that april accepts."""

from __future__ import annotations

import itertools
import os
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from verl.utils.config import validate_config

from april.adapters.verl.settings import settings_of

EXAMPLES = Path(__file__).parents[3] / "examples" / "verl"


def composed(**choices: str) -> Any:
    """The configuration that verl would get."""
    done = subprocess.run(
        [str(EXAMPLES / "train.sh")], env={"PATH": os.environ["PATH"], "DRY_RUN": "1", **choices}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=done.stdout.splitlines())


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "gspo"])
@pytest.mark.parametrize("model", ["qwen3-4b", "r1-distill-1.5b"])
def test_each_workload(model: str, algorithm: str) -> None:
    """Both engines on both platforms, and each data set: the paper's parameters arrive."""
    combinations = [*itertools.product(("fsdp", "megatron"), ("nvidia", "amd"), ("dapo-math-17k",))]
    combinations += [("fsdp", "nvidia", "deepscaler"), ("megatron", "amd", "deepmath-103k")]
    for engine, platform, data in combinations:
        config = composed(MODEL=model, ALGORITHM=algorithm, ENGINE=engine, PLATFORM=platform, DATA=data)
        validate_config(config, use_reference_policy=False, use_critic=False)
        made = settings_of(config)
        assert (made.config.rollout_batch_size, made.config.n_samples_per_prompt) == (32, 8)
        assert made.config.over_sampling_batch_size == 64
        assert (made.max_tokens, made.context, made.config.sampling.temperature) == (16384, 2048 + 16384, 0.8)
        assert made.config.samples_in_flight == 512
        assert (made.filter_metric == "reward") == (algorithm == "dapo")
        actor = config.actor_rollout_ref.actor
        assert actor.strategy == {"fsdp": "fsdp2", "megatron": "megatron"}[engine]
        assert actor.policy_loss.loss_mode == ("gspo" if algorithm == "gspo" else "vanilla")
        assert (actor.optim.lr, actor.optim.weight_decay, list(actor.optim.betas)) == (1e-6, 0.1, [0.9, 0.98])
        assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.2, 0.28)
        assert config.trainer.v1.trainer_mode == "colocate_async"
        assert config.data.train_files.endswith(f"{data}.parquet")


@pytest.mark.parametrize("algorithm", ["grpo", "dapo"])
def test_verls_own_rollouts_compose_as_well(algorithm: str) -> None:
    """The two arms without april."""
    own = composed(ROLLOUT="own", ALGORITHM=algorithm)
    plain = composed(ROLLOUT="plain", ALGORITHM=algorithm, SERVER="vllm")
    for config in (own, plain):
        validate_config(config, use_reference_policy=False, use_critic=False)
        assert "april" not in config
    assert own.trainer.v1.colocate_async.num_warmup_batches == 1
    assert plain.trainer.v1.trainer_mode == "sync"


def test_what_stands_on_the_command_line_wins() -> None:
    """The switch first, and a user's own settings above it."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer",
            overrides=[
                "hydra.searchpath=[pkg://april.adapters.verl.conf]", "+april=verl",
                "actor_rollout_ref.rollout.name=vllm",
                "april.max_staleness=3", "april.refill=sample", "algorithm.rollout_correction.rollout_is=sequence",
            ],
        )  # fmt: skip
    made = settings_of(config)
    assert (made.config.max_staleness, made.config.refill) == (3, "sample")
    assert config.algorithm.rollout_correction.rollout_is == "sequence"


def test_the_reward() -> None:
    """examples/verl/reward.py on right, wrong and missing boxes, by verl's own comparison."""
    compute_score = runpy.run_path(str(EXAMPLES / "reward.py"))["compute_score"]
    text = "so that\n\\boxed{\\frac12}"
    assert compute_score("x", text, "\\frac{1}{2}") == 1.0
    assert compute_score("x", text, ["3", "\\frac{1}{2}"]) == 1.0
    assert compute_score("x", text, "2") == 0.0
    assert compute_score("x", "no box", "2") == 0.0
