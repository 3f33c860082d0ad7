"""examples/*/train.sh: every combination gives a command, and arms differ in who does the rollouts only."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from adapters import openrlhf_stand_in, slime_stand_in
from april.adapters.openrlhf.arguments import config_of as config_of_openrlhf
from april.adapters.slime.arguments import config_of as config_of_slime
from april.errors import ConfigError

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
VERL_SWITCH = ["hydra.searchpath=[pkg://april.adapters.verl.conf]", "+april=verl"]
MODELS = pytest.mark.parametrize("model", ["qwen3-4b", "r1-distill-1.5b"])
ALGORITHMS = pytest.mark.parametrize("algorithm", ["grpo", "dapo", "gspo"])


def printed(trainer: str, *more: str, **choices: str) -> str:
    """The commands that would be run."""
    done = subprocess.run(
        [str(EXAMPLES / trainer / "train.sh"), *more], env={"PATH": os.environ["PATH"], "DRY_RUN": "1", **choices},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout


def command(trainer: str, **choices: str) -> list[str]:
    """The words of the only command."""
    return printed(trainer, **choices).split()


def loaded(path: Path) -> ModuleType:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def settings_in(trainer: str) -> dict[str, Any]:
    """The example's april.yaml."""
    settings: dict[str, Any] = yaml.safe_load((EXAMPLES / trainer / "april.yaml").read_text("utf-8"))
    return settings


@pytest.mark.parametrize(
    ("trainer", "choice", "sentence"),
    [
        ("slime", {"MODEL": "qwen"}, "MODEL=qwen must be qwen3-4b or r1-distill-1.5b"),
        ("openrlhf", {"MODEL": "qwen"}, "MODEL=qwen must be qwen3-4b or r1-distill-1.5b"),
        ("trl", {"MODEL": "qwen"}, "MODEL=qwen must be qwen3-4b or r1-distill-1.5b"),
        ("trl", {"NUM_GPUS": "1"},
         "NUM_GPUS=1: one trains, so at least 2 are needed to serve as well; or set SERVER=none"),
        ("verl", {"MODEL": "qwen"}, "MODEL=qwen must be qwen3-4b or r1-distill-1.5b"),
        ("verl", {"ALGORITHM": "ppo"}, "ALGORITHM=ppo must be grpo, dapo or gspo"),
        ("verl", {"DATA": "gsm8k"}, "DATA=gsm8k must be dapo-math-17k, deepscaler or deepmath-103k"),
        ("verl", {"ENGINE": "x"}, "ENGINE=x must be fsdp or megatron"),
        ("verl", {"SERVER": "x"}, "SERVER=x must be sglang or vllm"),
        ("verl", {"PLATFORM": "x"}, "PLATFORM=x must be nvidia or amd"),
        ("verl", {"ROLLOUT": "x"}, "ROLLOUT=x must be april, own or plain"),
    ],
)  # fmt: skip
def test_wrong_choices_are_named(trainer: str, choice: dict[str, str], sentence: str) -> None:
    """One sentence, and nothing runs."""
    with pytest.raises(subprocess.CalledProcessError) as error:
        printed(trainer, **choice)
    assert error.value.stderr == f"train.sh: {sentence}\n"


# ---------------------------------------------------------------- slime and miles


@ALGORITHMS
@MODELS
def test_each_workload_of_slime(model: str, algorithm: str) -> None:
    """Two models, three algorithms, NVIDIA and AMD, Megatron and FSDP where the trainer has both."""
    for platform, trainer in itertools.product(("nvidia", "amd"), ("slime", "miles", "miles-fsdp")):
        words = command("slime", MODEL=model, ALGORITHM=algorithm, PLATFORM=platform, TRAINER=trainer)
        assert words[words.index("--rollout-function-path") + 1] == "april.adapters.slime.generate_rollout"
        assert words[words.index("--over-sampling-batch-size") + 1] == "64"
        assert words[words.index("--advantage-estimator") + 1] == ("gspo" if algorithm == "gspo" else "grpo")
        assert ("--dynamic-sampling-filter-path" in words) == (algorithm == "dapo")
        assert ("--train-backend" in words) == (trainer == "miles-fsdp")
        assert len([w for w in words if w.startswith("--")]) == len({w for w in words if w.startswith("--")})


def test_each_data_set_of_slime() -> None:
    """Columns by the names that its publishers gave them; another file with columns of the user's choice."""
    for data, keys in {
        "dapo-math-17k": ["prompt", "label"], "deepscaler": ["problem", "answer"],
        "deepmath-103k": ["question", "final_answer"], "mine/data.jsonl": ["prompt", "label"],
    }.items():  # fmt: skip
        words = command("slime", DATA=data)
        assert [words[words.index(f"--{which}-key") + 1] for which in ("input", "label")] == keys
    words = command("slime", DATA="mine/data.parquet", INPUT_KEY="text")
    assert words[words.index("--input-key") + 1] == "text"
    assert words[words.index("--prompt-data") + 1] == "/root/mine/data.parquet"


def test_one_switch_of_slime() -> None:
    """april and the trainer's own partial rollout differ in two flags, and in the directory of the checkpoints."""
    april, own = command("slime", ROLLOUT="april"), command("slime", ROLLOUT="own")
    path = april.index("--rollout-function-path")
    rest = april[:path] + april[path + 4 :]
    assert april[path + 2] == "--custom-config-path"
    assert [w.replace("-april", "-own") for w in rest] == own


def test_the_settings_of_slime_are_aprils() -> None:
    """april.yaml is accepted beside slime's flags."""
    config = config_of_slime(slime_stand_in.namespace(**settings_in("slime")), None)
    assert (config.max_staleness, config.on_stale, config.refill) == (5, "finish", "none")


# ---------------------------------------------------------------- OpenRLHF


@ALGORITHMS
@MODELS
def test_each_workload_of_openrlhf(model: str, algorithm: str) -> None:
    """Two models, three algorithms, three data sets, both trainers, NVIDIA and AMD."""
    for data, mode in itertools.product(("dapo-math-17k", "deepscaler", "deepmath-103k"), ("sync", "async")):
        words = command("openrlhf", MODEL=model, ALGORITHM=algorithm, DATA=data, MODE=mode)
        assert words[1:3] == ["-m", "april.adapters.openrlhf"]
        assert ("--algo.dynamic_filtering_enable" in words) == (algorithm == "dapo")
        assert ("gspo" in words) == (algorithm == "gspo")
        assert ("--train.async_enable" in words) == (mode == "async")
        assert len([w for w in words if w.startswith("--")]) == len({w for w in words if w.startswith("--")})
    assert command("openrlhf", MODEL=model, PLATFORM="amd") == command("openrlhf", MODEL=model)


def test_one_switch_of_openrlhf() -> None:
    """april and OpenRLHF alone differ in the module that is run, april's settings, and where checkpoints go."""
    april, own = command("openrlhf", ROLLOUT="april"), command("openrlhf", ROLLOUT="own")
    assert april[3] == "--april.config"
    assert [w.replace("-april/", "-own/") for w in april[5:]] == own[3:]


def test_continuous_generation_is_for_the_asynchronous_trainer() -> None:
    """Two of april's settings more; where all GPUs are colocated, april refuses them."""
    words = command("openrlhf", ROLLOUT="continuous", MODE="async")
    assert words[5:9] == ["--april.generation", "continuous", "--april.refill", "sample"]
    theirs = command("openrlhf", ROLLOUT="april", MODE="async")[5:]
    assert [w.replace("-continuous/", "-april/") for w in words[9:]] == theirs
    settings = settings_in("openrlhf") | {"generation": "continuous"}
    flags = {"rollout__batch_size": 32, "rollout__vllm_generate_batch_size": 32}
    namespace = openrlhf_stand_in.namespace
    config_of_openrlhf(namespace(train__async_enable=True, **flags), settings)
    with pytest.raises(ConfigError, match=r"^--vllm.enable_sleep: the engines sleep"):
        config_of_openrlhf(namespace(train__colocate_all=True, vllm__enable_sleep=True, **flags), settings)


def test_the_settings_of_openrlhf_are_aprils() -> None:
    """april.yaml is accepted beside OpenRLHF's flags."""
    settings = settings_in("openrlhf")
    flags = {"rollout__batch_size": 32, "rollout__vllm_generate_batch_size": 32}
    config = config_of_openrlhf(openrlhf_stand_in.namespace(**flags), settings)
    assert config.over_sampling_batch_size == 64


def test_the_reward_of_openrlhf(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenRLHF's grader is asked about the boxed answer of the response, not of the prompt."""
    grader = ModuleType("openrlhf.utils.math_utils")
    grader.extract_boxed_answer = lambda text: text.partition("box ")[2] or None  # type: ignore[attr-defined]
    grader.grade_answer = lambda given, right: given == right  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "openrlhf", ModuleType("openrlhf"))
    monkeypatch.setitem(sys.modules, "openrlhf.utils", ModuleType("openrlhf.utils"))
    monkeypatch.setitem(sys.modules, "openrlhf.utils.math_utils", grader)
    module = loaded(EXAMPLES / "openrlhf" / "reward.py")

    queries = ["put in box 4? box 5", "p box 5", "p none"]
    answer = module.reward_func(queries, ["put in box 4?", "p", "p"], ["5", "6", "7"])

    assert answer["rewards"].tolist() == answer["scores"].tolist() == [1.0, 0.0, 0.0]


# ---------------------------------------------------------------- verl


def overrides(*more: str, **choices: str) -> list[str]:
    """What verl would get."""
    return printed("verl", *more, **choices).splitlines()


@ALGORITHMS
@MODELS
def test_each_workload_of_verl(model: str, algorithm: str) -> None:
    """Models, algorithms, data sets, platforms, engines and servers; nothing is said twice."""
    for data, platform, engine, server in itertools.product(
        ("dapo-math-17k", "deepscaler", "deepmath-103k"), ("nvidia", "amd"), ("fsdp", "megatron"), ("sglang", "vllm")
    ):
        said = overrides(
            MODEL=model, ALGORITHM=algorithm, DATA=data, PLATFORM=platform, ENGINE=engine, SERVER=server, NUM_GPUS="8"
        )
        assert said[-2:] == VERL_SWITCH
        names = [word.partition("=")[0] for word in said]
        assert len(names) == len(set(names))
        assert f"actor_rollout_ref.rollout.name={server}" in said
        assert ("model_engine=megatron" in said) == (engine == "megatron")
        assert ("algorithm.filter_groups.enable=True" in said) == (algorithm == "dapo")
        assert ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo" in said) == (algorithm == "gspo")


def test_one_switch_of_verl() -> None:
    """april, verl's own partial rollout and the plain one: the same but for the last words and the names of the run."""
    arms = {arm: [w.replace(f"-{arm}", "") for w in overrides(ROLLOUT=arm)] for arm in ("april", "own", "plain")}
    assert arms["april"][:-2] == arms["own"][:-3] == arms["plain"][:-1]


def test_words_of_the_user_come_last() -> None:
    """So they win."""
    assert overrides("april.max_staleness=3")[-1] == "april.max_staleness=3"


# ---------------------------------------------------------------- TRL


def commands(*words: str, **choices: str) -> list[list[str]]:
    """Those that would be run, the trainer's last."""
    return [line.split() for line in printed("trl", *words, **choices).splitlines()]


@pytest.fixture
def script() -> ModuleType:
    return loaded(EXAMPLES / "trl" / "train.py")


@ALGORITHMS
@MODELS
def test_each_workload_of_trl(model: str, algorithm: str, script: ModuleType) -> None:
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


def test_the_answer_in_the_box(script: ModuleType) -> None:
    r"""The last \boxed{...} counts, with the braces inside it."""
    texts: list[Any] = [r"\boxed{1} so \boxed{\frac{1}{2}}", r"\boxed{\frac12", "2"]
    right = script.right_answer([[{"content": text}] for text in texts], [r"\frac{1} {2}", "1", "2"])
    assert right == [1.0, 0.0, 0.0]
