"""examples/slime/train.sh against the trainers' own definitions of their flags: each workload, platform and backend."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from april.adapters.slime.arguments import config_of
from benchmarks.slime_surroundings import Trainer

ROOT = Path(__file__).resolve().parents[3]
TREES = {"slime": os.environ.get("SLIME_TREE"), "miles": os.environ.get("MILES_TREE")}
MODELS, ALGORITHMS = ("qwen3-4b", "r1-distill-1.5b"), ("grpo", "dapo", "gspo")
DATA = {"dapo-math-17k": ("prompt", "label"), "deepscaler": ("problem", "answer"),
        "deepmath-103k": ("question", "final_answer")}  # fmt: skip


def command(work: Path, **choices: str) -> list[str]:
    """The words of the command, without ``python3 train.py``."""
    tree = TREES[choices["TRAINER"].removesuffix("-fsdp")]
    where = {f"{name}_DIR": str(work) for name in ("MODEL", "DATA", "SAVE")} | {"TRAINER_DIR": str(tree)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [str(ROOT / "examples" / "slime" / "train.sh")], capture_output=True, text=True, check=True,
        env={"PATH": path, "PYTHONPATH": str(tree), "DRY_RUN": "1", **where, **choices},
    )  # fmt: skip
    words = done.stdout.split()
    assert words[:2] == ["python3", "train.py"]
    return words[2:]


@cache
def flags_of_its_scripts(tree: str) -> frozenset[str]:
    """Every flag in the trainer's own launch scripts, Megatron's included."""
    files = [*Path(tree, "scripts").rglob("*.sh"), *Path(tree, "scripts").rglob("*.py")]
    return frozenset(f for file in files for f in re.findall(r"--[a-z0-9-]+", file.read_text("utf-8")))


def parsed(trainer: Trainer, words: list[str]) -> Any:
    """By the trainer's own parser; what it leaves must be flags of Megatron or SGLang that its own scripts use."""
    args, rest = trainer.parser().parse_known_args(words)
    unknown = {word for word in rest if word.startswith("--")}
    tree = TREES[trainer.name]
    assert tree is not None
    assert unknown <= flags_of_its_scripts(tree), unknown - flags_of_its_scripts(tree)
    return args


@pytest.mark.parametrize("platform", ["nvidia", "amd"])
@pytest.mark.parametrize("trainer", ["slime", "miles", "miles-fsdp"])
def test_every_workload(trainer: str, platform: str, tmp_path: Path) -> None:
    """Two models, three algorithms, three data sets: the trainer reads what was meant, and april accepts it."""
    name = trainer.removesuffix("-fsdp")
    if not TREES[name]:
        pytest.skip(f"no --{name} PATH")
    framework = Trainer(name)
    for model, algorithm, (data, keys) in itertools.product(MODELS, ALGORITHMS, DATA.items()):
        words = command(tmp_path, TRAINER=trainer, PLATFORM=platform, MODEL=model, ALGORITHM=algorithm, DATA=data)
        if trainer == "miles-fsdp":
            args = fsdp(framework, words)
            assert args.train_backend == "fsdp"
        else:
            args = parsed(framework, words)
        assert args.rollout_function_path == "april.adapters.slime.generate_rollout"
        assert (args.input_key, args.label_key) == keys
        assert args.advantage_estimator == ("gspo" if algorithm == "gspo" else "grpo")
        assert bool(args.dynamic_sampling_filter_path) == (algorithm == "dapo")
        if algorithm == "dapo":
            assert callable(framework.get("utils.misc.load_function")(args.dynamic_sampling_filter_path))
        assert args.use_tis
        assert args.partial_rollout
        config = config_of(args, None)
        assert (config.rollout_batch_size, config.groups_in_work, config.max_response_len) == (32, 64, 16_384)


def fsdp(framework: Trainer, words: list[str]) -> Any:
    """miles' parser of its FSDP backend knows every flag but those of SGLang."""
    load = framework.get("backends.fsdp_utils.arguments.load_fsdp_args")
    provider = framework.get("utils.arguments.get_miles_extra_args_provider")()
    without = [w for w in words if not w.startswith("--sglang-") and w != "0.6"]
    with mock.patch.object(sys, "argv", ["train.py", *without]):
        return load(extra_args_provider=provider)


@pytest.mark.parametrize("rollout", ["april", "own", "plain"])
def test_slimes_validation(rollout: str, tmp_path: Path) -> None:
    """slime's own checks of its own flags accept the command; april's settings arrive in the namespace."""
    framework = Trainer("slime")
    words = command(tmp_path, TRAINER="slime", ROLLOUT=rollout)
    args = parsed(framework, words)
    (tmp_path / "Qwen3-4B_torch_dist").mkdir()
    pre = {"train_backend": "megatron", "debug_rollout_only": False, "debug_train_only": False,
           "load_debug_rollout_data": None}  # fmt: skip
    for name, value in pre.items():
        setattr(args, name, value)
    framework.get("utils.arguments.slime_validate_args")(args)
    assert args.over_sampling_batch_size == (32 if rollout == "plain" else 64)
    assert args.colocate
    assert args.offload_rollout
    assert hasattr(args, "april") == (rollout == "april")
    if rollout == "april":
        config = config_of(args, None)
        assert (config.max_staleness, config.refill) == (5, "none")
