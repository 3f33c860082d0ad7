"""What a trainer's settings, rows and answers become: april's configuration, prompts and rewards."""

from __future__ import annotations

import importlib
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tiny_models import tiny_model

import april
from adapters import openrlhf_stand_in as openrlhf
from adapters import stand_in_areal as areal
from adapters import stand_in_trl as trl
from adapters.stand_in_verl import config
from april.adapters import trl as trl_adapter
from april.adapters.areal.settings import config_of as config_of_areal
from april.adapters.areal.settings import is_colocated
from april.adapters.openrlhf.arguments import config_of, split_flags
from april.adapters.openrlhf.samples import RewardResult, prompt_ids, row_of, trained_ranges
from april.adapters.verl.settings import settings_of
from april.errors import CheckpointError, ConfigError, RolloutError
from april.serialization.plain_values import plain, restored

ROLLOUT = "actor_rollout_ref__rollout__"


# ---------------------------------------------------------------- settings


def test_what_openrlhfs_flags_become() -> None:
    """OpenRLHF's numbers, and april's own beside them."""
    own = {"over_sampling_batch_size": 8, "refill": "sample", "group_quorum": 1}
    made = config_of(openrlhf.namespace(rollout__temperature=0.8), own)
    assert (made.rollout_batch_size, made.n_samples_per_prompt, made.over_sampling_batch_size) == (4, 2, 8)
    assert (made.max_response_len, made.sampling.temperature, made.seed) == (100, 0.8, 42)
    assert config_of(openrlhf.namespace(rollout__max_new_tokens=None), own).max_response_len == 199


def test_aprils_part_of_openrlhfs_command_line(tmp_path: Path) -> None:
    """A file, and single settings above it; all else is OpenRLHF's and stays in its order."""
    file = tmp_path / "april.yaml"
    file.write_text("max_staleness: 3\nrefill: none\n")
    words = ["--a.b", "1", "--april.config", str(file), "--april.refill=sample", "--c", "--april.max_age", "7"]
    assert split_flags(words) == (["--a.b", "1", "--c"], {"max_staleness": 3, "refill": "sample", "max_age": 7})
    assert split_flags(["--april.partial_rollout", "false"])[1] == {"partial_rollout": False}


@pytest.mark.parametrize(("words", "sentence"), [
    (["--april.config"], "--april.config needs a value"),
    (["--april.refill", "--train.seed", "1"], "--april.refill needs a value"),
    (["--april.config", "nowhere.yaml"], "cannot read nowhere.yaml"),
    (["--april.config", "list.yaml"], r"list.yaml: expected a mapping of settings, got list"),
])  # fmt: skip
def test_wrong_flags(words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before OpenRLHF is imported."""
    (tmp_path / "list.yaml").write_text("- 1\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=sentence):
        split_flags(words)


def test_what_verls_settings_become() -> None:
    """N, n, lengths and temperature are verl's; N' is twice N; the cap per replica counts replicas."""
    made = settings_of(
        config(
            trainer__n_gpus_per_node=8, april__max_in_flight_per_replica=2,
            **{f"{ROLLOUT}tensor_model_parallel_size": 2, f"{ROLLOUT}temperature": 0.8},
        )
    )  # fmt: skip
    assert (made.config.rollout_batch_size, made.config.over_sampling_batch_size) == (3, 6)
    assert made.config.sampling.temperature == 0.8
    assert (made.places, made.config.max_response_len, made.max_tokens) == (8, 47, 40)
    correction = "algorithm__rollout_correction__"
    bypass = settings_of(config(**{f"{correction}rollout_is": None, f"{correction}bypass_mode": True}))
    assert bypass.config.partial_rollout


def test_verls_switch_ships_with_the_package_and_is_accepted() -> None:
    """What +april=verl merges into verl's configuration: known settings, and the adapter's three classes."""
    text = resources.files("april.adapters.verl.conf").joinpath("april", "verl.yaml").read_text("utf-8")
    assert text.startswith("# @package _global_\n")
    group = yaml.safe_load(text)
    named = group["trainer"]["checkpoint_callback_class"], group["actor_rollout_ref"]["rollout"]["agent"]
    assert named == (
        "april.adapters.verl.Checkpoints", {"agent_loop_manager_class": "april.adapters.verl.AgentLoopManager"}
    )
    sampler = group["trainer"]["v1"]["sampler"]["custom_sampler"]
    assert sampler == {"path": "pkg://april.adapters.verl", "name": "Sampler"}
    assert {name.rpartition(".")[2] for name in (named[0], *named[1].values())} | {sampler["name"]} == set(
        importlib.import_module("april.adapters.verl").__all__
    )
    made = settings_of(config(april=group["april"]))
    assert (made.config.over_sampling_batch_size, made.config.max_staleness, made.check) == (6, 5, False)
    assert set(group["april"]) <= {*april.Config.model_fields, "max_in_flight_per_replica", "check"}


def test_what_areals_settings_become(tmp_path: Path) -> None:
    """Placement decides what generation is; servers' own options are taken on the user's word."""
    made = config_of_areal(areal.config(tmp_path), {}, groups=3, ranks=1)
    assert (made.generation, made.refill, made.max_staleness) == ("continuous", "sample", 2)
    together = areal.SimpleNamespace(type="colocation", target="actor")
    colocated = areal.config(tmp_path, rollout__scheduling_strategy=together, rollout__max_concurrent_rollouts=16)
    assert is_colocated(colocated)
    made = config_of_areal(colocated, {}, groups=3, ranks=2)
    assert (made.generation, made.refill, made.over_sampling_batch_size) == ("stepwise", "none", 6)
    assert made.max_in_flight == 8 * areal.SAMPLES
    made = config_of_areal(areal.config(tmp_path, gconfig__top_p=0.9), {"allow_mismatch": True}, groups=3, ranks=1)
    assert made.sampling.top_p == 0.9


def test_trls_settings_come_from_a_config_a_mapping_a_file_or_keywords(tmp_path: Path) -> None:
    """What GRPOConfig says already may be left out; keywords go above a file, and not beside a Config."""
    whole = april.Config(rollout_batch_size=2, n_samples_per_prompt=2, max_response_len=40, seed=42)
    (tmp_path / "april.yaml").write_text("over_sampling_batch_size: 3\nmax_staleness: 2\n", "utf-8")
    trainer, model = trl_adapter.april_trainer(trl.GRPOTrainer), tiny_model()

    def made(*given: Any, **settings: Any) -> Any:
        of: Any = trainer(model, trl_adapter.rollout(*given, **settings), trl.prompts(4))
        return of.rollout_func.config

    assert made() == made(whole) == made({"max_response_len": 40})
    assert made().sampling.stop_token_ids == (trl.EOS,)
    from_file = made(tmp_path / "april.yaml", over_sampling_batch_size=4)
    assert (from_file.over_sampling_batch_size, from_file.max_staleness) == (4, 2)
    with pytest.raises(ConfigError, match=r"rollout: \['seed'\] given together with an april.Config"):
        trl_adapter.rollout(whole, seed=1)
    with pytest.raises(ConfigError, match="expected a mapping of settings, got list"):
        trl_adapter.rollout([1])  # type: ignore[arg-type]


# ---------------------------------------------------------------- rows and answers


def test_prompts_are_cut_as_openrlhf_cuts_them() -> None:
    """They lose their beginning, so that the response has its room."""

    def tokenizer(text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": list(range(int(text)))}

    assert prompt_ids(tokenizer, "5", 20, 12) == [0, 1, 2, 3, 4]
    assert prompt_ids(tokenizer, "10", 20, 12) == list(range(2, 10))
    assert prompt_ids(tokenizer, "10", 20, None) == list(range(10))
    assert prompt_ids(tokenizer, "30", 20, None) == list(range(11, 30))


def test_rows_of_openrlhfs_loader() -> None:
    """Images are one or several, and perhaps none."""
    assert row_of((["source"], ["text"], ["label"], [None])) == ("text", "label", [])
    assert row_of((["source"], ["text"], ["label"], ["a.png"])) == ("text", "label", ["a.png"])
    assert row_of((["source"], ["text"], ["label"], [["a.png", None]])) == ("text", "label", ["a.png"])


def test_answers_of_openrlhfs_reward_functions() -> None:
    """Numbers, lists, arrays and tensors of one; the score is the reward where there is none."""
    assert RewardResult.of({"rewards": [0.5], "extra_logs": {"a": [[2]]}}) == RewardResult(0.5, 0.5, {"a": 2.0})
    assert RewardResult.of({"rewards": 1, "scores": 0, "extra_logs": None}) == RewardResult(1.0, 0.0, {})
    for tensor in (torch.tensor([0.5], dtype=torch.bfloat16), torch.tensor(0.5, requires_grad=True)):
        assert RewardResult.of({"rewards": tensor}).reward == 0.5
    for answer in (None, {}, {"rewards": None}, [0.5]):
        with pytest.raises(RolloutError, match="expected a mapping with rewards"):
            RewardResult.of(answer)
    for value in ([], "much", object()):
        with pytest.raises(RolloutError, match="instead of a number"):
            RewardResult.of({"rewards": value})


def test_what_openrlhf_trains() -> None:
    """Runs of ones, behind the prompt."""
    assert trained_ranges([1, 1, 0, 1], 3) == [(3, 5), (6, 7)]
    assert trained_ranges([], 3) == trained_ranges([0], 3) == []


def test_values_with_arrays_come_back_as_they_were() -> None:
    """Arrays and tensors with their type and shape; all else is named, and is no code."""
    value = {
        "t": torch.tensor([[1.5, 2.0]], dtype=torch.bfloat16), "b": torch.tensor([True, False]), "0": torch.tensor(3),
        "empty": torch.zeros((0, 4), dtype=torch.int32), "n": np.array([1.0], np.float32), "x": [1, {"y": None}, "z"],
    }  # fmt: skip
    back = restored(plain(value, "a prompt"))
    for key in ("t", "b", "0", "empty"):
        assert back[key].dtype == value[key].dtype  # type: ignore[attr-defined]
        assert torch.equal(back[key], value[key])  # type: ignore[arg-type]
    assert (back["n"].dtype, back["n"].tolist()) == (np.float32, [1.0])
    assert back["x"] == value["x"]
    with pytest.raises(CheckpointError, match=r"a prompt\['image'\] is a object; give only numbers, "):
        plain({"image": object()}, "a prompt")
    for library, name in (("torch", "load"), ("numpy", "object"), ("torch", "int64")):
        with pytest.raises(CheckpointError, match="an array in it cannot be decoded"):
            restored({"__array__": [library, name, [1], b"1"]})
