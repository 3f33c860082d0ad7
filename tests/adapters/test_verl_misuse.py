"""Wrong use of the verl adapter: one sentence each, in verl's own words, before anything starts."""

from __future__ import annotations

import importlib
import re
import sys
from importlib import resources
from types import ModuleType
from typing import Any

import pytest
import yaml

from adapters.stand_in_verl import config
from april import seams
from april.adapters.verl import checks
from april.adapters.verl.settings import HERE, OURS, settings_of
from april.errors import ConfigError

ROLLOUT = "actor_rollout_ref__rollout__"
QUORUM = {"april__group_quorum": 0.5, "algorithm__adv_estimator": "april_grpo", f"{ROLLOUT}n": 6}
CONFIGS: list[tuple[dict[str, Any], str]] = [
    (
        {"april__partial_rollout": False, "april__over_sampling_batch_size": 6},
        "over_sampling_batch_size=6 starts more groups than rollout_batch_size=3, and partial_rollout=false would",
    ),
    (
        {"algorithm__rollout_correction__rollout_is": None},
        "algorithm.rollout_correction.rollout_is=null: verl recomputes old log-probabilities with the present weights",
    ),
    (
        {"april__group_quorum": 0.5},
        "april.group_quorum=0.5 delivers groups in parts, and algorithm.adv_estimator=grpo compares rows of the "
        "same batch",
    ),
    ({**QUORUM, f"{ROLLOUT}n": 4}, "count with 2 finished responses, and a baseline needs 3"),
    ({**QUORUM, "algorithm__use_kl_in_reward": True}, "algorithm.use_kl_in_reward=True changes rewards that"),
    (
        {"algorithm__adv_estimator": "april_grpo", "reward__reward_model__enable": True},
        "algorithm.adv_estimator=april_grpo needs rewards when a response is finished",
    ),
    ({f"{ROLLOUT}top_p": 0.9}, "actor_rollout_ref.rollout.top_p=0.9 is not part of the log-probabilities"),
    ({f"{ROLLOUT}top_k": 20}, "actor_rollout_ref.rollout.top_k=20 is not part of the log-probabilities"),
    ({f"{ROLLOUT}temperature": 0}, "temperature=0: greedy samples of a group are all equal"),
    (
        {f"{ROLLOUT}logprobs_mode": "raw_logprobs", f"{ROLLOUT}temperature": 0.8},
        "actor_rollout_ref.rollout.logprobs_mode=raw_logprobs leaves out the temperature",
    ),
    ({f"{ROLLOUT}calculate_log_probs": False}, "actor_rollout_ref.rollout.calculate_log_probs=False: tokens of older"),
    ({f"{ROLLOUT}enable_rollout_routing_replay": True}, "enable_rollout_routing_replay=True: april does not keep"),
    ({"trainer__v1__trainer_mode": "sync"}, "trainer.use_v1=True, trainer.v1.trainer_mode=sync: april continues"),
    ({"trainer__use_v1": False}, "trainer.use_v1=False, trainer.v1.trainer_mode=colocate_async: april continues"),
    ({"trainer__checkpoint_callback_class": None}, "trainer.checkpoint_callback_class is empty, so checkpoints would"),
    ({f"{ROLLOUT}agent": {}}, "agent_loop_manager_class is empty, so april would not see a request"),
    ({"skip__rollout_tq__enable": True}, "skip.rollout_tq.enable=True replays stored rollouts"),
    ({"algorithm__adv_estimator": "remax"}, "algorithm.adv_estimator=remax mixes greedy samples into each group"),
    (
        {"algorithm__filter_groups__enable": True, "reward__reward_model__enable": True},
        "algorithm.filter_groups needs rewards when a group is finished",
    ),
    (
        {"algorithm__filter_groups__enable": True, "algorithm__filter_groups__metric": None},
        "algorithm.filter_groups.enable=True needs algorithm.filter_groups.metric",
    ),
    ({"april__rollout_batch_size": 4}, "april.rollout_batch_size: verl's data.train_batch_size decides this"),
    ({"april__generation": "continuous"}, "april.generation: verl's trainer.v1.trainer_mode decides this"),
    ({"april__max_stalenes": 4}, "april.max_stalenes: there is no such setting; there are over_sampling_batch_size,"),
    ({"april": "fast"}, "april: expected a mapping of settings, got str"),
    (
        {"april__max_staleness": 0, "april__over_sampling_batch_size": 6},
        "over_sampling_batch_size=6 holds more groups than max_staleness=0 lets april deliver in time",
    ),
]


@pytest.mark.parametrize(("changes", "sentence"), CONFIGS)
def test_configurations_that_cannot_be_right(changes: dict[str, Any], sentence: str) -> None:
    """Each is refused in verl's words."""
    with pytest.raises(ConfigError, match=re.escape(sentence)) as error:
        settings_of(config(**changes))
    assert "\n" not in str(error.value)


def test_what_follows_from_verls_settings() -> None:
    """N, n, lengths and temperature are verl's; N' is twice N; the cap per replica counts replicas."""
    made = settings_of(
        config(
            trainer__n_gpus_per_node=8, actor_rollout_ref__rollout__tensor_model_parallel_size=2,
            actor_rollout_ref__rollout__temperature=0.8, april__max_in_flight_per_replica=2,
        )
    )  # fmt: skip
    assert (made.config.rollout_batch_size, made.config.over_sampling_batch_size) == (3, 6)
    assert made.config.sampling.temperature == 0.8
    assert (made.core.max_in_flight, made.core.max_response_len, made.max_tokens) == (8, 48, 40)
    assert settings_of(config(actor_rollout_ref__rollout__max_model_len=64)).context == 64
    bypass = settings_of(
        config(algorithm__rollout_correction__rollout_is=None, algorithm__rollout_correction__bypass_mode=True)
    )
    assert bypass.config.partial_rollout


def test_the_switch_ships_with_the_package_and_is_accepted() -> None:
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
    assert set(group["april"]) == {*OURS, *HERE}


def test_without_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing the adapter works anywhere; taking a class of it says what to install."""
    monkeypatch.setitem(sys.modules, "verl", None)
    module = importlib.import_module("april.adapters.verl")
    for name in module.__all__:
        with pytest.raises(ConfigError, match=r"april.adapters.verl needs verl: pip install verl==0.9.1"):
            getattr(module, name)
    with pytest.raises(AttributeError, match="no attribute 'Smapler'"):
        _ = module.Smapler


@pytest.mark.parametrize("version", ["0.8.0", "0.9.0", "0.10.0", "1.0", "0.9.dev1", ""])
def test_another_version_of_verl(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Refused by name before anything of it is used."""
    monkeypatch.setitem(sys.modules, "verl", ModuleType("verl"))
    monkeypatch.setattr(seams, "version_of", lambda package: version)
    with pytest.raises(ConfigError, match=r"is installed, and april.adapters.verl needs verl 0.9.1 or a later 0.9.x"):
        checks.require_verl()


def test_functions_that_have_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that is gone, or takes something else, is named with what april builds on."""
    there = ModuleType("verl.stand_in")

    class A:
        def sample(self, steps: int) -> None: ...

    there.A = A  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verl.stand_in", there)
    monkeypatch.setattr(seams, "version_of", lambda package: "0.9.7")
    monkeypatch.setattr(checks, "SEAMS", {"verl.stand_in:A.sample": ("self", "steps")})
    checks.require_seams()
    monkeypatch.setattr(checks, "SEAMS", {"verl.stand_in:A.sample": ("self", "global_steps")})
    with pytest.raises(ConfigError, match=r"A.sample of verl 0.9.7 takes \(self, steps\), and .* builds on"):
        checks.require_seams()
    monkeypatch.setattr(checks, "SEAMS", {"verl.stand_in:A.wait": ("self",)})
    with pytest.raises(ConfigError, match=r"A.wait of verl 0.9.7 is not there"):
        checks.require_seams()


def test_nothing_of_verl_or_ray_is_imported() -> None:
    """The parts that the coordinator and the driver run by need neither."""
    adapter = (f"adapters.verl.{name}" for name in ("checks", "outputs", "settings"))
    for name in (*adapter, "processes.coordinator.coordinator", "processes.coordinator.run"):
        importlib.import_module(f"april.{name}")
    assert "ray" not in sys.modules
    assert not isinstance(sys.modules.get("verl.trainer"), ModuleType)
