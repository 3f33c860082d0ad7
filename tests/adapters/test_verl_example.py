"""examples/verl/train.sh: every combination gives overrides, and the arms differ in who does the rollouts only."""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "examples" / "verl" / "train.sh"
SWITCH = ["hydra.searchpath=[pkg://april.adapters.verl.conf]", "+april=verl"]


def words(*more: str, **choices: str) -> list[str]:
    """The overrides that verl would get."""
    done = subprocess.run(
        [str(SCRIPT), *more], env={"PATH": os.environ["PATH"], "DRY_RUN": "1", **choices}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "gspo"])
@pytest.mark.parametrize("model", ["qwen3-4b", "r1-distill-1.5b"])
def test_each_workload(model: str, algorithm: str) -> None:
    """Models, algorithms, data sets, platforms, engines and servers; nothing is said twice."""
    for data, platform, engine, server in itertools.product(
        ("dapo-math-17k", "deepscaler", "deepmath-103k"), ("nvidia", "amd"), ("fsdp", "megatron"), ("sglang", "vllm")
    ):
        said = words(
            MODEL=model, ALGORITHM=algorithm, DATA=data, PLATFORM=platform, ENGINE=engine, SERVER=server, NUM_GPUS="8"
        )
        assert said[-2:] == SWITCH
        names = [word.partition("=")[0] for word in said]
        assert len(names) == len(set(names))
        assert f"actor_rollout_ref.rollout.name={server}" in said
        assert ("model_engine=megatron" in said) == (engine == "megatron")
        assert ("algorithm.filter_groups.enable=True" in said) == (algorithm == "dapo")
        assert ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo" in said) == (algorithm == "gspo")


def test_one_switch() -> None:
    """april, verl's own partial rollout and the plain one: the same but for the last words and the names of the run."""
    arms = {arm: [w.replace(f"-{arm}", "") for w in words(ROLLOUT=arm)] for arm in ("april", "own", "plain")}
    assert arms["april"][:-2] == arms["own"][:-3] == arms["plain"][:-1]


def test_words_of_the_user_come_last() -> None:
    """So they win."""
    assert words("april.max_staleness=3")[-1] == "april.max_staleness=3"


@pytest.mark.parametrize(
    ("choice", "sentence"),
    [
        ({"MODEL": "qwen"}, "MODEL=qwen must be qwen3-4b or r1-distill-1.5b"),
        ({"ALGORITHM": "ppo"}, "ALGORITHM=ppo must be grpo, dapo or gspo"),
        ({"DATA": "gsm8k"}, "DATA=gsm8k must be dapo-math-17k, deepscaler or deepmath-103k"),
        ({"ENGINE": "x"}, "ENGINE=x must be fsdp or megatron"),
        ({"SERVER": "x"}, "SERVER=x must be sglang or vllm"),
        ({"PLATFORM": "x"}, "PLATFORM=x must be nvidia or amd"),
        ({"ROLLOUT": "x"}, "ROLLOUT=x must be april, own or plain"),
    ],
)
def test_wrong_choices_are_named(choice: dict[str, str], sentence: str) -> None:
    """One sentence, and nothing runs."""
    with pytest.raises(subprocess.CalledProcessError) as error:
        words(**choice)
    assert error.value.stderr == f"train.sh: {sentence}\n"
