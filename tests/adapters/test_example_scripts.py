"""examples/*/train.sh: every combination gives a command, and arms differ in who does the rollouts only."""

from __future__ import annotations

import os
import runpy
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from adapters import openrlhf_stand_in, slime_stand_in, stand_in_areal
from april.adapters.areal.settings import config_of as config_of_areal
from april.adapters.openrlhf.arguments import config_of as config_of_openrlhf
from april.adapters.slime.arguments import config_of as config_of_slime

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
DATA = ("dapo-math-17k", "deepscaler", "deepmath-103k")
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


# ---------------------------------------------------------------- workloads


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
