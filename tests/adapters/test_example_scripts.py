"""examples/*/train.sh: every combination gives a command, and arms differ in who does the rollouts only."""

from __future__ import annotations

import itertools
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from adapters import openrlhf_stand_in, slime_stand_in, stand_in_areal
from april.adapters.areal.settings import config_of as config_of_areal
from april.adapters.openrlhf.arguments import config_of as config_of_openrlhf
from april.adapters.slime.arguments import config_of as config_of_slime
from april.errors import ConfigError

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
DATA = ("dapo-math-17k", "deepscaler", "deepmath-103k")
PLATFORMS = ("nvidia", "amd")
OPENRLHF_FLAGS = {"rollout__batch_size": 32, "rollout__vllm_generate_batch_size": 32}


def printed(trainer: str, *more: str, **choices: str) -> str:
    """The commands that would be run."""
    done = subprocess.run(
        [str(EXAMPLES / trainer / "train.sh"), *more], env={"PATH": os.environ["PATH"], "DRY_RUN": "1", **choices},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout


def command(trainer: str, *more: str, **choices: str) -> list[str]:
    """The words of the only command; verl's overrides."""
    return printed(trainer, *more, **choices).split()


def commands(*words: str, **choices: str) -> list[list[str]]:
    """TRL's, the trainer's last."""
    return [line.split() for line in printed("trl", *words, **choices).splitlines()]


def loaded(path: Path) -> Any:
    """What a script defines."""
    return SimpleNamespace(**runpy.run_path(str(path)))


def settings_in(trainer: str) -> dict[str, Any]:
    """The example's april.yaml."""
    settings: dict[str, Any] = yaml.safe_load((EXAMPLES / trainer / "april.yaml").read_text("utf-8"))
    return settings


NO_MODEL = {"MODEL": "qwen"}, "MODEL=qwen must be qwen3-4b or r1-distill-1.5b"


@pytest.mark.parametrize(("trainer", "choice", "sentence"), [
    *((trainer, *NO_MODEL) for trainer in ("slime", "openrlhf", "trl", "verl")),
    ("trl", {"NUM_GPUS": "1"}, "NUM_GPUS=1: one trains, so at least 2 are needed to serve as well; or set SERVER=none"),
    ("verl", {"ALGORITHM": "ppo"}, "ALGORITHM=ppo must be grpo, dapo or gspo"),
    ("verl", {"DATA": "gsm8k"}, "DATA=gsm8k must be dapo-math-17k, deepscaler or deepmath-103k"),
    ("verl", {"ENGINE": "x"}, "ENGINE=x must be fsdp or megatron"),
    ("verl", {"SERVER": "x"}, "SERVER=x must be sglang or vllm"),
    ("verl", {"PLATFORM": "x"}, "PLATFORM=x must be nvidia or amd"),
    ("verl", {"ROLLOUT": "x"}, "ROLLOUT=x must be april, own or plain"),
])  # fmt: skip
def test_wrong_choices_are_named(trainer: str, choice: dict[str, str], sentence: str) -> None:
    """One sentence, and nothing runs."""
    with pytest.raises(subprocess.CalledProcessError) as error:
        printed(trainer, **choice)
    assert error.value.stderr == f"train.sh: {sentence}\n"


def test_a_wrong_choice_of_areals_script_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before AReaL is imported."""
    monkeypatch.setenv("ROLLOUT", "plain")
    with pytest.raises(SystemExit, match="ROLLOUT=plain must be one of april, own"):
        loaded(EXAMPLES / "areal" / "train.py").main([])


# ---------------------------------------------------------------- workloads


def of_slime(choices: dict[str, str]) -> None:
    """Megatron, and FSDP where the trainer has it."""
    for platform, trainer in itertools.product(PLATFORMS, ("slime", "miles", "miles-fsdp")):
        words = command("slime", **choices, PLATFORM=platform, TRAINER=trainer)
        assert words[words.index("--rollout-function-path") + 1] == "april.adapters.slime.generate_rollout"
        assert words[words.index("--over-sampling-batch-size") + 1] == "64"
        estimator = "gspo" if choices["ALGORITHM"] == "gspo" else "grpo"
        assert words[words.index("--advantage-estimator") + 1] == estimator
        assert ("--dynamic-sampling-filter-path" in words) == (choices["ALGORITHM"] == "dapo")
        assert ("--train-backend" in words) == (trainer == "miles-fsdp")
        each_flag_once(words)


def of_openrlhf(choices: dict[str, str]) -> None:
    """Both trainers; the platform changes nothing."""
    for data, mode in itertools.product(DATA, ("sync", "async")):
        words = command("openrlhf", **choices, DATA=data, MODE=mode)
        assert words[1:3] == ["-m", "april.adapters.openrlhf"]
        assert ("--algo.dynamic_filtering_enable" in words) == (choices["ALGORITHM"] == "dapo")
        assert ("gspo" in words) == (choices["ALGORITHM"] == "gspo")
        assert ("--train.async_enable" in words) == (mode == "async")
        each_flag_once(words)
    assert command("openrlhf", **choices, PLATFORM="amd") == command("openrlhf", **choices)


def each_flag_once(words: list[str]) -> None:
    flags = [word for word in words if word.startswith("--")]
    assert len(flags) == len(set(flags))


def of_verl(choices: dict[str, str]) -> None:
    """Both training engines, both servers; nothing is said twice."""
    for data, platform, engine, server in itertools.product(DATA, PLATFORMS, ("fsdp", "megatron"), ("sglang", "vllm")):
        more = {"DATA": data, "PLATFORM": platform, "ENGINE": engine, "SERVER": server, "NUM_GPUS": "8"}
        said = command("verl", **choices, **more)
        assert said[-2:] == ["hydra.searchpath=[pkg://april.adapters.verl.conf]", "+april=verl"]
        names = [word.partition("=")[0] for word in said]
        assert len(names) == len(set(names))
        assert f"actor_rollout_ref.rollout.name={server}" in said
        assert ("model_engine=megatron" in said) == (engine == "megatron")
        assert ("algorithm.filter_groups.enable=True" in said) == (choices["ALGORITHM"] == "dapo")
        assert ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo" in said) == (choices["ALGORITHM"] == "gspo")


def of_trl(choices: dict[str, str]) -> None:
    """One GPU trains, the others serve."""
    script = loaded(EXAMPLES / "trl" / "train.py")
    for data, platform in itertools.product(script.DATA, PLATFORMS):
        *servers, trainer = commands(**choices, DATA=data, PLATFORM=platform)
        devices = "CUDA_VISIBLE_DEVICES" if platform == "nvidia" else "HIP_VISIBLE_DEVICES"
        assert [words[1] for words in (*servers, trainer)] == [f"{devices}={gpu}" for gpu in (*range(1, 8), 0)]
        options = script.parse(trainer[4:])
        assert (options.model, options.algorithm) == (choices["MODEL"], choices["ALGORITHM"])
        assert (options.data, options.kind) == (data, "vllm")
        assert options.path == script.MODELS[options.model]
        assert [url.rpartition(":")[2] for url in options.urls] == [words[-1] for words in servers]
        assert all("VLLM_SERVER_DEV_MODE=1" in words and options.path in words for words in servers)


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "gspo"])
@pytest.mark.parametrize("model", ["qwen3-4b", "r1-distill-1.5b"])
@pytest.mark.parametrize("check", [of_slime, of_openrlhf, of_verl, of_trl])
def test_each_workload(check: Callable[[dict[str, str]], None], model: str, algorithm: str) -> None:
    """Two models, three algorithms, three data sets, NVIDIA and AMD."""
    check({"MODEL": model, "ALGORITHM": algorithm})


def test_the_three_trainers_have_the_papers_parameters() -> None:
    """As its own scripts have them: github.com/RLsys-Foundation/APRIL, scripts/partial_rollout/qwen/grpo."""
    paper = {
        "groups": 32, "samples": 8, "over": 64, "longest": 16384, "temperature": 0.8, "rate": 1e-6, "decay": 0.1,
        "beta1": 0.9, "beta2": 0.98, "clip": 0.2, "clip_high": 0.28,
    }  # fmt: skip
    words = command("slime")
    flags = {
        "groups": "rollout-batch-size", "samples": "n-samples-per-prompt", "over": "over-sampling-batch-size",
        "longest": "rollout-max-response-len", "temperature": "rollout-temperature", "rate": "lr",
        "decay": "weight-decay", "beta1": "adam-beta1", "beta2": "adam-beta2", "clip": "eps-clip",
        "clip_high": "eps-clip-high",
    }  # fmt: skip
    assert {name: float(words[words.index(f"--{flag}") + 1]) for name, flag in flags.items()} == paper
    assert "--use-kl-loss" in words
    assert words[words.index("--kl-loss-coef") + 1] == "0.0"

    said = dict(word.split("=", 1) for word in command("verl"))
    roll, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    betas = yaml.safe_load(said[f"{actor}.optim.betas"])
    keys = {
        "groups": "data.train_batch_size", "samples": f"{roll}.n", "longest": "data.max_response_length",
        "temperature": f"{roll}.temperature", "rate": f"{actor}.optim.lr", "decay": f"{actor}.optim.weight_decay",
        "clip": f"{actor}.clip_ratio_low", "clip_high": f"{actor}.clip_ratio_high",
    }  # fmt: skip
    found = {name: float(said[key]) for name, key in keys.items()} | {"beta1": betas[0], "beta2": betas[1]}
    assert found | {"over": 64} == paper  # twice N is the default of april's group
    group = EXAMPLES.parent / "april" / "adapters" / "verl" / "conf" / "april" / "verl.yaml"
    assert yaml.safe_load(group.read_text("utf-8"))["april"].get("over_sampling_batch_size") is None

    script = loaded(EXAMPLES / "trl" / "train.py")
    trl, rollout = script.trl_arguments("qwen3-4b", "grpo"), script.april_arguments("grpo")
    names = {
        "samples": "num_generations", "longest": "max_completion_length", "temperature": "temperature",
        "rate": "learning_rate", "decay": "weight_decay", "beta1": "adam_beta1", "beta2": "adam_beta2",
        "clip": "epsilon", "clip_high": "epsilon_high",
    }  # fmt: skip
    responses = trl["per_device_train_batch_size"] * trl["gradient_accumulation_steps"]
    found = {name: trl[key] for name, key in names.items()} | {"groups": responses // trl["num_generations"]}
    assert found | {"over": rollout["over_sampling_batch_size"]} == paper
    assert trl["beta"] == 0.0


def test_the_trainers_read_the_same_columns() -> None:
    """Data sets by their public names; verl's files are made of them, and ask for a box where the question does not."""
    verl, trl = loaded(EXAMPLES / "verl" / "data.py"), loaded(EXAMPLES / "trl" / "train.py")
    assert {name: verl.DATA[name] for name in DATA} == trl.DATA
    assert verl.ASKS == trl.ASKS
    for name, keys in verl.DATA.items():
        if name in DATA:
            words = command("slime", DATA=name)
            assert [words[words.index(f"--{which}-key") + 1] for which in ("input", "label")] == [*keys[1:]]
    messages = [{"role": "user", "content": "What is 1+1?"}]
    assert verl.row_of("dapo-math-17k", 3, {"prompt": messages, "label": "2"}) == {
        "data_source": "dapo-math-17k", "prompt": messages, "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"}, "extra_info": {"index": 3},
    }  # fmt: skip
    (asked,) = verl.row_of("deepscaler", 0, {"problem": "What is 1+1?", "answer": 2})["prompt"]
    assert asked["content"].startswith("What is 1+1?\n")
    assert r"\boxed{}" in asked["content"]


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


def test_other_servers_and_none_for_trl() -> None:
    """SGLang by one variable; without servers one GPU does all; further words are the trainer's."""
    script = loaded(EXAMPLES / "trl" / "train.py")
    *servers, trainer = commands("--resume", SERVER="sglang", NUM_GPUS="3")
    options = script.parse(trainer[4:])
    assert (len(servers), options.kind, options.resume) == (2, "sglang", True)
    assert all("sglang.launch_server" in words for words in servers)
    (alone,) = commands(SERVER="none")
    assert script.parse(alone[4:]).urls is None


# ---------------------------------------------------------------- one switch


def test_one_switch() -> None:
    """april and the trainer's own rollouts differ in two flags or words, and in the directory of the checkpoints."""
    april, own = command("slime", ROLLOUT="april"), command("slime", ROLLOUT="own")
    path = april.index("--rollout-function-path")
    assert april[path + 2] == "--custom-config-path"
    assert [w.replace("-april", "-own") for w in april[:path] + april[path + 4 :]] == own
    april, own = command("openrlhf", ROLLOUT="april"), command("openrlhf", ROLLOUT="own")
    assert april[3] == "--april.config"
    assert [w.replace("-april/", "-own/") for w in april[5:]] == own[3:]
    arms = {a: [w.replace(f"-{a}", "") for w in command("verl", ROLLOUT=a)] for a in ("april", "own", "plain")}
    assert arms["april"][:-2] == arms["own"][:-3] == arms["plain"][:-1]
    assert command("verl", "april.max_staleness=3")[-1] == "april.max_staleness=3"  # last, so it wins


def test_continuous_generation_is_for_openrlhfs_asynchronous_trainer() -> None:
    """Two of april's settings more; where all GPUs are colocated, april refuses them."""
    words = command("openrlhf", ROLLOUT="continuous", MODE="async")
    assert words[5:9] == ["--april.generation", "continuous", "--april.refill", "sample"]
    theirs = command("openrlhf", ROLLOUT="april", MODE="async")[5:]
    assert [w.replace("-continuous/", "-april/") for w in words[9:]] == theirs
    settings, namespace = settings_in("openrlhf") | {"generation": "continuous"}, openrlhf_stand_in.namespace
    config_of_openrlhf(namespace(train__async_enable=True, **OPENRLHF_FLAGS), settings)
    sleeping = {"train__colocate_all": True, "vllm__enable_sleep": True}
    with pytest.raises(ConfigError, match=r"^--vllm.enable_sleep: the engines sleep"):
        config_of_openrlhf(namespace(**sleeping, **OPENRLHF_FLAGS), settings)


def test_the_settings_are_aprils(tmp_path: Path) -> None:
    """april.yaml is accepted beside the trainer's flags; AReaL's workload is split over four ranks that train."""
    config = config_of_slime(slime_stand_in.namespace(**settings_in("slime")), None)
    assert (config.max_staleness, config.on_stale, config.refill) == (5, "finish", "none")
    config = config_of_openrlhf(openrlhf_stand_in.namespace(**OPENRLHF_FLAGS), settings_in("openrlhf"))
    assert config.over_sampling_batch_size == 64
    areal = stand_in_areal.config(tmp_path)
    for part, values in yaml.safe_load((EXAMPLES / "areal" / "grpo.yaml").read_text("utf-8")).items():
        if part in ("gconfig", "rollout", "actor"):
            vars(getattr(areal, part)).update(values)
    config = config_of_areal(areal, {}, groups=8, ranks=4)
    assert (config.generation, config.n_samples_per_prompt, config.max_staleness) == ("continuous", 8, 2)
    assert config.max_in_flight == 64


# ---------------------------------------------------------------- rewards


def test_the_reward_of_openrlhf(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenRLHF's grader is asked about the boxed answer of the response, not of the prompt."""
    grader = ModuleType("openrlhf.utils.math_utils")
    grader.extract_boxed_answer = lambda text: text.partition("box ")[2] or None  # type: ignore[attr-defined]
    grader.grade_answer = lambda given, right: given == right  # type: ignore[attr-defined]
    for module in (ModuleType("openrlhf"), ModuleType("openrlhf.utils"), grader):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    module = loaded(EXAMPLES / "openrlhf" / "reward.py")
    queries = ["put in box 4? box 5", "p box 5", "p none"]

    answer = module.reward_func(queries, ["put in box 4?", "p", "p"], ["5", "6", "7"])

    assert answer["rewards"].tolist() == answer["scores"].tolist() == [1.0, 0.0, 0.0]


def test_the_reward_of_trl() -> None:
    r"""The last \boxed{...} counts, with the braces inside it."""
    texts: list[Any] = [r"\boxed{1} so \boxed{\frac{1}{2}}", r"\boxed{\frac12", "2"]
    answers = [r"\frac{1} {2}", "1", "2"]
    script = loaded(EXAMPLES / "trl" / "train.py")
    assert script.right_answer([[{"content": text}] for text in texts], answers) == [1.0, 0.0, 0.0]
