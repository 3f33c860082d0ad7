"""The unmodified PPOTrainer trains on cut and resumed responses, and every token is labelled with its own weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import short_runs
import tiny_areal

SLOW = ("--token-s", "0.02")
"""Responses take longer than a step, so that updates meet them half-way."""
GENERATIONS = {
    "continuous, offpolicyness 1": ("--generation", "continuous", "--offpolicyness", "1"),
    "continuous, offpolicyness 2": ("--generation", "continuous", "--offpolicyness", "2"),
    "stepwise": ("--generation", "stepwise", "--offpolicyness", "2"),
}


@pytest.mark.parametrize("name", GENERATIONS)
def test_every_trained_token_is_of_the_weights_that_its_version_names(name: str, tmp_path: Path) -> None:
    """GRPO steps of AReaL's FSDP actor on gloo, in float32: within 1e-4 of the model that the version stands for."""
    seen = short_runs.run(tmp_path, "--steps", "6", *GENERATIONS[name], *SLOW)

    seen.check_books()
    seen.report(name)
    assert len(seen.steps) == 6
    assert len(seen.prompts) == 6 * tiny_areal.GROUPS
    assert seen.server["weights"] == 6
    assert seen.server["aborted"] > 0
    assert any(span > 1 for step in seen.steps for span in step["spans"])
    assert seen.largest("own") <= 1e-4
    assert seen.largest("present") <= 1e-4
    # the check can fail: the next weights are far away, and so are the trainer's from tokens of older ones
    assert seen.largest("other") > 1e-2
    assert seen.largest("trainer_older") > 1e-2
    assert max(age for step in seen.steps for age in step["ages"]) <= int(GENERATIONS[name][-1])
    assert "rollout/april/off_policy_share" in seen.output


def test_a_restart_trains_every_prompt_once(tmp_path: Path) -> None:
    """Five steps, and four more in a process that goes on from AReaL's recover checkpoint: none twice, none skipped."""
    first = short_runs.run(tmp_path, "--steps", "5", *SLOW)
    second = short_runs.run(tmp_path, "--steps", "9", *SLOW)

    assert [step["step"] for step in (*first.steps, *second.steps)] == list(range(9))
    trained = first.prompts + second.prompts
    assert len(trained) == len(set(trained)) == 9 * tiny_areal.GROUPS
    prompts, tokens = second.ledgers["prompts"], second.ledgers["tokens"]
    assert len(short_runs.gaps(trained, second.drawn)) == second.drawn * tiny_areal.GROUPS - len(trained)
    assert short_runs.balanced(prompts)
    assert short_runs.balanced(tokens)
    assert prompts["delivered"] == len(trained)
    assert tokens["delivered"] == first.total("tokens") + second.total("tokens")
    assert second.total("older") > 0
    assert max(first.largest("own"), second.largest("own")) <= 1e-4
    print(
        f"\nafter a restart: trained {len(trained)} prompts, each once; the first step delivers "
        f"{second.steps[0]['older']} tokens of older weights; ledger of both: {tokens}, prompts {prompts}"
    )


def test_filter_and_evaluation_stay_areals(tmp_path: Path) -> None:
    """A filter of joined groups, and evaluations every second step on AReaL's own eval engine."""
    seen = short_runs.run(tmp_path, "--steps", "5", "--filter", "--evaluate", "--offpolicyness", "2")

    seen.check_books()
    assert len(seen.steps) == 5
    assert seen.ledgers["prompts"]["dropped"]["filtered"] > 0
    assert all(max(group) - min(group) > 0.15 for step in seen.steps for group in step["rewards"])
    assert seen.largest("own") <= 1e-4
    assert "eval-rollout" in seen.output
    seen.report("with a filter and evaluations")


# ---------------------------------------------------------------- late answers and failed episodes, stock beside april


ROOT = Path(__file__).resolve().parents[3]


def results(*words: str) -> dict[str, dict[str, Any]]:
    """Of ``benchmarks.areal_rollouts`` with these words, by arm."""
    command = [sys.executable, "-m", "benchmarks.areal_rollouts", "--json", "--turns", "1", "--bounds", "1", *words]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with short_runs.group(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=env) as process:
        output, _ = process.communicate(timeout=240)
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    print("\n" + "\n".join(map(str, found)))
    return {line["arm"]: line for line in found}


def test_late_answers_are_labelled_with_their_own_weights() -> None:
    """Answers leave 0.15 s late, behind the update: stock takes the version that is there then."""
    found = results("--late-s", "0.15", "--train-s", "0.02", "--warm", "1", "--steps", "6")

    assert found["stock 1"]["mislabelled"] > 0.2
    assert found["april 1"]["mislabelled"] == 0
    assert found["april 1"]["off_policy_share"] > 0
    assert found["april 1"]["staleness_max"] <= 1


def test_failed_episodes_are_tried_again() -> None:
    """Every 9th episode raises: stock drops its group and its prompt, april asks again."""
    found = results("--fail-every", "9", "--train-s", "0.1", "--warm", "1", "--steps", "8")

    assert found["stock 1"]["skipped"] > 0
    assert found["april 1"]["skipped"] == found["april 1"]["twice"] == 0
