"""examples/slime/train.sh: every combination gives a command, and rollout functions differ in their flags only."""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from adapters.slime_stand_in import namespace
from april.adapters.slime.arguments import config_of

HERE = Path(__file__).parent.parent.parent / "examples" / "slime"


def command(**choices: str) -> list[str]:
    """The words of the command that would be run."""
    done = subprocess.run(
        [str(HERE / "train.sh")], env={"PATH": os.environ["PATH"], "DRY_RUN": "1", **choices}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    return done.stdout.split()


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "gspo"])
@pytest.mark.parametrize("model", ["qwen3-4b", "r1-distill-1.5b"])
def test_each_workload_on_each_platform(model: str, algorithm: str) -> None:
    """Two models, three algorithms, NVIDIA and AMD, Megatron and FSDP where the trainer has both."""
    for platform, trainer in itertools.product(("nvidia", "amd"), ("slime", "miles", "miles-fsdp")):
        words = command(MODEL=model, ALGORITHM=algorithm, PLATFORM=platform, TRAINER=trainer)
        assert words[words.index("--rollout-function-path") + 1] == "april.adapters.slime.generate_rollout"
        assert words[words.index("--over-sampling-batch-size") + 1] == "64"
        assert words[words.index("--advantage-estimator") + 1] == ("gspo" if algorithm == "gspo" else "grpo")
        assert ("--dynamic-sampling-filter-path" in words) == (algorithm == "dapo")
        assert ("--train-backend" in words) == (trainer == "miles-fsdp")
        assert len([w for w in words if w.startswith("--")]) == len({w for w in words if w.startswith("--")})


def test_each_data_set() -> None:
    """Columns by the names that its publishers gave them; another file with columns of the user's choice."""
    for data, keys in {
        "dapo-math-17k": ["prompt", "label"], "deepscaler": ["problem", "answer"],
        "deepmath-103k": ["question", "final_answer"], "mine/data.jsonl": ["prompt", "label"],
    }.items():  # fmt: skip
        words = command(DATA=data)
        assert [words[words.index(f"--{which}-key") + 1] for which in ("input", "label")] == keys
    words = command(DATA="mine/data.parquet", INPUT_KEY="text")
    assert words[words.index("--input-key") + 1] == "text"
    assert words[words.index("--prompt-data") + 1] == "/root/mine/data.parquet"


def test_one_switch() -> None:
    """april and the trainer's own partial rollout differ in two flags, and in the directory of the checkpoints."""
    april, own = command(ROLLOUT="april"), command(ROLLOUT="own")
    path = april.index("--rollout-function-path")
    rest = april[:path] + april[path + 4 :]
    assert april[path + 2] == "--custom-config-path"
    assert [w.replace("-april", "-own") for w in rest] == own


def test_wrong_choices_are_named() -> None:
    """One sentence, and nothing runs."""
    with pytest.raises(subprocess.CalledProcessError) as error:
        command(MODEL="qwen")
    assert error.value.stderr == "train.sh: MODEL=qwen must be qwen3-4b or r1-distill-1.5b\n"


def test_the_settings_are_aprils() -> None:
    """april.yaml is accepted beside slime's flags."""
    settings = yaml.safe_load((HERE / "april.yaml").read_text("utf-8"))
    config = config_of(namespace(**settings), None)
    assert (config.max_staleness, config.on_stale, config.refill) == (5, "finish", "none")
