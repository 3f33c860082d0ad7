"""Wrong use of AReaL's adapter: one sentence each, in AReaL's own words, before anything starts."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from adapters import stand_in_areal as areal
from april.adapters.areal import checks
from april.adapters.areal.settings import config_of, is_colocated
from april.errors import ConfigError

COLOCATED = SimpleNamespace(type="colocation", target="actor")
CONFIGS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"rollout_batch_size": 4}, r"april\['rollout_batch_size'\]: AReaL's train_dataset.batch_size decides this"),
    ({}, {"max_stale": 4}, r"april\['max_stale'\]: there is no such setting; there are over_sampling_batch_size,"),
    ({}, {"group_quorum": 0.5}, r"april\['group_quorum'\]=0.5: AReaL takes rewards over whole groups"),
    ({}, {"on_failed_sample": "shrink"}, "AReaL takes rewards over groups .* may have fewer; use replace"),
    ({"rollout__scheduling_strategy": COLOCATED}, {"generation": "continuous"}, "so the servers sleep while the"),
    ({"rollout___version": "v2"}, {}, "rollout._version and actor._version: v2 generates behind a gateway"),
    ({"dynamic_bs": True}, {}, "dynamic_bs: batches are to be short"),
    ({"rollout__use_lora": True}, {}, "use_lora: AReaL trains adapters in its single-controller mode only"),
    ({"rollout__return_routed_experts": True}, {}, "return_routed_experts: april does not keep routed experts"),
    ({"rollout__agent": SimpleNamespace(mode="online")}, {}, "rollout.agent.mode: online has no prompts"),
    ({"gconfig__greedy": True}, {}, "all samples of a group are equal"),
    ({"gconfig__use_beam_search": True}, {}, "beams have no log-probability"),
    (
        {"rollout__backend": "vllm:d1", "gconfig__temperature": 0.8}, {},
        "gconfig.temperature=0.8 with rollout.backend=vllm:d1: vLLM's log-probabilities leave the temperature out",
    ),
    ({"gconfig__top_p": 0.9}, {}, "gconfig.top_p=0.9 is not part of the log-probabilities"),
    ({"gconfig__top_k": 20}, {}, "gconfig.top_k=20 is not part of the log-probabilities"),
    ({"gconfig__frequency_penalty": 0.1}, {}, "gconfig.frequency_penalty=0.1 is not part"),
    (
        {"actor__recompute_logprob": True, "actor__use_decoupled_loss": False}, {},
        "actor.recompute_logprob without actor.use_decoupled_loss replaces the log-probabilities",
    ),
    (
        {"rollout__max_head_offpolicyness": 0}, {"generation": "stepwise", "over_sampling_batch_size": 6},
        "over_sampling_batch_size=6 holds more groups than max_staleness=0 lets april deliver in time",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "april", "message"), CONFIGS, ids=lambda value: str(value)[:40])
def test_a_configuration_that_cannot_be_right_is_refused(
    changes: dict[str, Any], april: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """By one sentence that says what to do."""
    with pytest.raises(ConfigError, match=message):
        config_of(areal.config(tmp_path, **changes), april, groups=3, ranks=1)


def test_what_is_said_of_settings_goes_through(tmp_path: Path) -> None:
    """Placement decides what generation is; servers' own options are taken on the user's word."""
    config = config_of(areal.config(tmp_path), {}, groups=3, ranks=1)
    assert (config.generation, config.refill, config.max_staleness) == ("continuous", "sample", 2)
    colocated = areal.config(tmp_path, rollout__scheduling_strategy=COLOCATED, rollout__max_concurrent_rollouts=16)
    assert is_colocated(colocated)
    config = config_of(colocated, {}, groups=3, ranks=2)
    assert (config.generation, config.refill, config.over_sampling_batch_size) == ("stepwise", "none", 6)
    assert config.max_in_flight == 8 * areal.SAMPLES
    config = config_of(areal.config(tmp_path, gconfig__top_p=0.9), {"allow_mismatch": True}, groups=3, ranks=1)
    assert config.sampling.top_p == 0.9


def test_without_areal_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing april's package needs nothing; taking its trainer needs AReaL."""
    monkeypatch.setitem(sys.modules, "areal", None)
    adapter = importlib.import_module("april.adapters.areal")
    with pytest.raises(ConfigError, match=r"AReaL, which is not installed here: pip install areal==1\.0\.4"):
        adapter.PPOTrainer  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'Trainer'"):
        adapter.Trainer  # noqa: B018


def test_another_areal_is_named_by_what_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first function that is gone or takes something else; AReaL promises none of its internals."""
    areal.install(monkeypatch)
    checks.require_areal()
    module = sys.modules["areal.infra.workflow_executor"]

    class Changed(areal.WorkflowExecutor):
        def pause(self, hard: bool) -> None:  # type: ignore[override]
            """Takes one more."""

    monkeypatch.setattr(module, "WorkflowExecutor", Changed)
    with pytest.raises(ConfigError, match=r"WorkflowExecutor.pause of areal .* takes \(self, hard\)"):
        checks.require_areal()
    monkeypatch.delattr(module, "WorkflowExecutor")
    with pytest.raises(ConfigError, match="is not there, and april"):
        checks.require_areal()


def test_single_controller_mode_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """AReaL's default; the sentence says how to leave it."""
    areal.install(monkeypatch, spmd=False)
    from april.adapters.areal import PPOTrainer

    with pytest.raises(ConfigError, match="start the run in SPMD mode: AREAL_SPMD_MODE=1"):
        PPOTrainer(areal.config(tmp_path), areal.rows())
