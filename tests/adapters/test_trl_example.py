"""examples/trl: every combination gives the commands of the servers and one for the trainer, which the script takes."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent.parent.parent / "examples" / "trl"


def commands(*words: str, **choices: str) -> list[list[str]]:
    """Those that would be run, the trainer's last."""
    done = subprocess.run(
        [str(HERE / "train.sh"), *words], env={"PATH": os.environ["PATH"], "DRY_RUN": "1", **choices}, text=True,
        capture_output=True, check=True,
    )  # fmt: skip
    return [line.split() for line in done.stdout.splitlines()]


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("trl_example_train", HERE / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "gspo"])
@pytest.mark.parametrize("model", ["qwen3-4b", "r1-distill-1.5b"])
def test_each_workload(model: str, algorithm: str, script: ModuleType) -> None:
    """Two models, three algorithms, three data sets, NVIDIA and AMD: one GPU trains, the others serve."""
    for data, platform in itertools.product(script.DATA, ("nvidia", "amd")):
        *servers, trainer = commands(MODEL=model, ALGORITHM=algorithm, DATA=data, PLATFORM=platform)
        devices = "CUDA_VISIBLE_DEVICES" if platform == "nvidia" else "HIP_VISIBLE_DEVICES"
        assert [words[1] for words in (*servers, trainer)] == [f"{devices}={gpu}" for gpu in (*range(1, 8), 0)]
        options = script.parse(trainer[4:])
        assert (options.model, options.algorithm, options.data, options.kind) == (model, algorithm, data, "vllm")
        assert options.path == script.MODELS[model]
        assert [url.rpartition(":")[2] for url in options.urls] == [words[-1] for words in servers]
        assert all("VLLM_SERVER_DEV_MODE=1" in words and options.path in words for words in servers)


def test_other_servers_and_none(script: ModuleType) -> None:
    """SGLang by one variable; without servers one GPU does all; further words are the trainer's."""
    *servers, trainer = commands("--resume", SERVER="sglang", NUM_GPUS="3")
    options = script.parse(trainer[4:])
    assert (len(servers), options.kind, options.resume) == (2, "sglang", True)
    assert all("sglang.launch_server" in words for words in servers)
    (alone,) = commands(SERVER="none")
    assert script.parse(alone[4:]).urls is None


@pytest.mark.parametrize(("choices", "sentence"), [
    ({"MODEL": "qwen"}, "MODEL=qwen must be qwen3-4b or r1-distill-1.5b"),
    ({"NUM_GPUS": "1"}, "NUM_GPUS=1: one trains, so at least 2 are needed to serve as well; or set SERVER=none"),
])  # fmt: skip
def test_wrong_choices_are_named(choices: dict[str, str], sentence: str) -> None:
    """One sentence, and nothing runs."""
    with pytest.raises(subprocess.CalledProcessError) as error:
        commands(**choices)
    assert error.value.stderr == f"train.sh: {sentence}\n"


def test_the_answer_in_the_box(script: ModuleType) -> None:
    r"""The last \boxed{...} counts, with the braces inside it."""
    texts: list[Any] = [r"\boxed{1} so \boxed{\frac{1}{2}}", r"\boxed{\frac12", "2"]
    right = script.right_answer([[{"content": text}] for text in texts], [r"\frac{1} {2}", "1", "2"])
    assert right == [1.0, 0.0, 0.0]
