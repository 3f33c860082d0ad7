"""examples/openrlhf: every combination gives a command; april is one switch in it."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from adapters.openrlhf_stand_in import namespace
from april.adapters.openrlhf.arguments import config_of
from april.errors import ConfigError

HERE = Path(__file__).parent.parent.parent / "examples" / "openrlhf"


def command(**choices: str) -> list[str]:
    """The words of the command that would be run."""
    done = subprocess.run(
        [str(HERE / "train.sh")], env={"PATH": os.environ["PATH"], "DRY_RUN": "1", **choices}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    return done.stdout.split()


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "gspo"])
@pytest.mark.parametrize("model", ["qwen3-4b", "r1-distill-1.5b"])
def test_each_workload(model: str, algorithm: str) -> None:
    """Two models, three algorithms, three data sets, both trainers, NVIDIA and AMD."""
    for data, mode in itertools.product(("dapo-math-17k", "deepscaler", "deepmath-103k"), ("sync", "async")):
        words = command(MODEL=model, ALGORITHM=algorithm, DATA=data, MODE=mode)
        assert words[1:3] == ["-m", "april.adapters.openrlhf"]
        assert ("--algo.dynamic_filtering_enable" in words) == (algorithm == "dapo")
        assert ("gspo" in words) == (algorithm == "gspo")
        assert ("--train.async_enable" in words) == (mode == "async")
        assert len([w for w in words if w.startswith("--")]) == len({w for w in words if w.startswith("--")})
    assert command(MODEL=model, PLATFORM="amd") == command(MODEL=model)


def test_one_switch() -> None:
    """april and OpenRLHF alone differ in the module that is run, april's settings, and where checkpoints go."""
    april, own = command(ROLLOUT="april"), command(ROLLOUT="own")
    assert april[3] == "--april.config"
    assert [w.replace("-april/", "-own/") for w in april[5:]] == own[3:]


def test_continuous_generation_is_for_the_asynchronous_trainer() -> None:
    """Two of april's settings more; where all GPUs are colocated, april refuses them."""
    words = command(ROLLOUT="continuous", MODE="async")
    assert words[5:9] == ["--april.generation", "continuous", "--april.refill", "sample"]
    theirs = command(ROLLOUT="april", MODE="async")[5:]
    assert [w.replace("-continuous/", "-april/") for w in words[9:]] == theirs
    settings = yaml.safe_load((HERE / "april.yaml").read_text("utf-8")) | {"generation": "continuous"}
    flags = {"rollout__batch_size": 32, "rollout__vllm_generate_batch_size": 32}
    config_of(namespace(train__async_enable=True, **flags), settings)
    with pytest.raises(ConfigError, match=r"^--vllm.enable_sleep: the engines sleep"):
        config_of(namespace(train__colocate_all=True, vllm__enable_sleep=True, **flags), settings)


def test_wrong_choices_are_named() -> None:
    """One sentence, and nothing runs."""
    with pytest.raises(subprocess.CalledProcessError) as error:
        command(MODEL="qwen")
    assert error.value.stderr == "train.sh: MODEL=qwen must be qwen3-4b or r1-distill-1.5b\n"


def test_the_settings_are_aprils() -> None:
    """april.yaml is accepted beside OpenRLHF's flags."""
    settings = yaml.safe_load((HERE / "april.yaml").read_text("utf-8"))
    config = config_of(namespace(rollout__batch_size=32, rollout__vllm_generate_batch_size=32), settings)
    assert config.over_sampling_batch_size == 64


def test_the_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenRLHF's grader is asked about the boxed answer of the response, not of the prompt."""
    grader = ModuleType("openrlhf.utils.math_utils")
    grader.extract_boxed_answer = lambda text: text.partition("box ")[2] or None  # type: ignore[attr-defined]
    grader.grade_answer = lambda given, right: given == right  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "openrlhf", ModuleType("openrlhf"))
    monkeypatch.setitem(sys.modules, "openrlhf.utils", ModuleType("openrlhf.utils"))
    monkeypatch.setitem(sys.modules, "openrlhf.utils.math_utils", grader)
    spec = importlib.util.spec_from_file_location("openrlhf_example_reward", HERE / "reward.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    queries = ["put in box 4? box 5", "p box 5", "p none"]
    answer = module.reward_func(queries, ["put in box 4?", "p", "p"], ["5", "6", "7"])

    assert answer["rewards"].tolist() == answer["scores"].tolist() == [1.0, 0.0, 0.0]
