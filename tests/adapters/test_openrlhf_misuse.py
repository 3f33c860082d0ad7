"""Wrong use of the OpenRLHF adapter gives one sentence, in OpenRLHF's own names, before anything starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from adapters.openrlhf_stand_in import SamplesGenerator, installed, namespace
from april.adapters.openrlhf import main
from april.adapters.openrlhf.arguments import config_of, split_flags
from april.adapters.openrlhf.framework import require_openrlhf, undecorated
from april.adapters.openrlhf.samples import RewardResult, prompt_ids, row_of, trained_ranges
from april.errors import ConfigError, RolloutError

OVER = {"over_sampling_batch_size": 8}
WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"vllm__num_engines": None}, {}, "--vllm.num_engines is missing or 0"),
    ({"train__agent_func_path": "agent.py"}, {}, "--train.agent_func_path: an agent generates inside the engine"),
    ({"data__max_images_per_prompt": 1}, {}, "--data.max_images_per_prompt: .* images would be lost"),
    ({"train__partial_rollout_enable": True}, {}, "--train.partial_rollout_enable changes weights in the middle"),
    ({"rollout__vllm_generate_batch_size": 8}, {}, "--rollout.vllm_generate_batch_size is not --rollout.batch_size"),
    ({"rollout__vllm_generate_batch_size": 2}, {}, "--rollout.vllm_generate_batch_size is not --rollout.batch_size"),
    ({"algo__advantage__is_correction_level": "off"}, {}, r"is_correction_level is off \(OpenRLHF's default\)"),
    ({"algo__advantage__is_correction_level": None}, {}, "has no --algo.advantage.is_correction_level"),
    ({"rollout__top_p": 0.9}, {}, r"--rollout.top_p 0.9 is not part of the log-probabilities"),
    ({"rollout__temperature": 0.0}, {}, "--rollout.temperature 0: greedy responses of a group are all equal"),
    ({"rollout__max_new_tokens": 200}, {}, "--rollout.max_new_tokens 200 leaves no room for a prompt"),
    ({}, {"allow_mismatch": True}, "april.allow_mismatch"),
    ({}, {"group_quorum": 0.5}, "april.group_quorum=0.5: .* groups are delivered whole"),
    ({}, {"on_failed_sample": "shrink"}, "april.on_failed_sample: shrink: .* so none may have fewer; use replace"),
    ({}, {"on_stale": "mask"}, "april.on_stale: mask"),
    ({}, {**OVER, "partial_rollout": False}, "set partial_rollout: true"),
    ({}, {"over_sampling_batch_size": 400}, "holds more groups than max_staleness=5"),
    ({}, {"rollout_batch_size": 4}, "april.rollout_batch_size is decided by --rollout.batch_size of OpenRLHF"),
    ({}, {"sampling": {"top_p": 0.9}}, "april.sampling is decided by --rollout.temperature"),
    ({}, {"sampling.top_p": 0.9}, "april.sampling.top_p is decided by --rollout.temperature"),
    ({}, {"engine": {"kind": "vllm"}}, "april.engine is decided by --vllm.num_engines"),
    ({}, {"epochs": 2}, "april.epochs is decided by --train.num_episodes"),
    ({}, {"max_stalenes": 2}, "max_stalenes: unknown setting; do you mean max_staleness"),
]


@pytest.mark.parametrize(("flags", "settings", "sentence"), WRONG)
def test_wrong_settings_are_refused(flags: Any, settings: Any, sentence: str) -> None:
    """One sentence, that names the flag."""
    with pytest.raises(ConfigError, match=sentence) as refusal:
        config_of(namespace(**flags), settings)
    assert "\n" not in str(refusal.value)


def test_what_the_flags_become() -> None:
    """OpenRLHF's numbers, and april's own beside them."""
    config = config_of(namespace(rollout__temperature=0.8), {**OVER, "refill": "sample", "group_quorum": 1})
    assert (config.rollout_batch_size, config.n_samples_per_prompt, config.over_sampling_batch_size) == (4, 2, 8)
    assert (config.max_response_len, config.sampling.temperature, config.seed) == (100, 0.8, 42)
    assert config_of(namespace(rollout__max_new_tokens=None), OVER).max_response_len == 199


def test_aprils_part_of_the_command_line(tmp_path: Path) -> None:
    """A file, and single settings above it; all else is OpenRLHF's and stays in its order."""
    file = tmp_path / "april.yaml"
    file.write_text("max_staleness: 3\nrefill: none\n")
    words = ["--a.b", "1", "--april.config", str(file), "--april.refill=sample", "--c", "--april.max_age", "7"]
    assert split_flags(words) == (["--a.b", "1", "--c"], {"max_staleness": 3, "refill": "sample", "max_age": 7})
    assert split_flags(["--april.partial_rollout", "false"])[1] == {"partial_rollout": False}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--april.config"], "--april.config needs a value"),
        (["--april.refill", "--train.seed", "1"], "--april.refill needs a value"),
        (["--april.config", "nowhere.yaml"], "cannot read nowhere.yaml"),
    ],
)
def test_wrong_flags(words: list[str], sentence: str) -> None:
    """Before OpenRLHF is imported."""
    with pytest.raises(ConfigError, match=sentence):
        split_flags(words)


def test_a_file_that_is_no_mapping(tmp_path: Path) -> None:
    """It is named."""
    (tmp_path / "april.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match=r"april.yaml: expected a mapping of april's settings, got list"):
        split_flags(["--april.config", str(tmp_path / "april.yaml")])


def test_without_openrlhf(capsys: pytest.CaptureFixture[str]) -> None:
    """The module imports, and its command ends with one sentence and a status."""
    done = subprocess.run(
        [sys.executable, "-m", "april.adapters.openrlhf", "--train.seed", "1"], capture_output=True, text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("april: april.adapters.openrlhf runs OpenRLHF, which is not installed here")
    assert done.stderr.count("\n") == 1
    with pytest.raises(SystemExit, match=r"april: --april\.config needs a value"):
        main(["--april.config"])


class Moved(SamplesGenerator):
    """Takes one argument more, as a later version may."""

    def _generate_vllm(self, dataloader_iter: Any, num_prompts: int, dynamic_filtering: Any, more: Any, **generate_kwargs: Any) -> Any:  # type: ignore[override]  # fmt: skip # noqa: E501
        return None


class Gone:
    """Has none of what is needed."""


def test_another_version_of_openrlhf() -> None:
    """What is missing or different is named, with the version that april was held against."""
    with installed():
        require_openrlhf()
    with installed(SamplesGenerator=Moved), pytest.raises(
        ConfigError, match=r"_generate_vllm of openrlhf .* takes \(.*more.*\), and april's adapter builds on"
    ):
        require_openrlhf()
    with installed(Executor=Gone), pytest.raises(ConfigError, match=r"_fetch_rewards_via_func of .* is not there"):
        require_openrlhf()
    with installed() as made:
        made["openrlhf.trainer.ppo_trainer"].PPOTrainer = Gone  # type: ignore[attr-defined]
        with pytest.raises(ConfigError, match="is not the Ray actor that april knows"):
            undecorated("openrlhf.trainer.ppo_trainer.PPOTrainer")
        del made["openrlhf.trainer.ppo_trainer"].PPOTrainer  # type: ignore[attr-defined]
        with pytest.raises(ConfigError, match=r"has no openrlhf.trainer.ppo_trainer.PPOTrainer that can be imported"):
            undecorated("openrlhf.trainer.ppo_trainer.PPOTrainer")


def test_prompts_are_cut_as_openrlhf_cuts_them() -> None:
    """They lose their beginning, so that the response has its room."""

    def tokenizer(text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": list(range(int(text)))}

    assert prompt_ids(tokenizer, "5", 20, 12) == [0, 1, 2, 3, 4]
    assert prompt_ids(tokenizer, "10", 20, 12) == list(range(2, 10))
    assert prompt_ids(tokenizer, "10", 20, None) == list(range(10))
    assert prompt_ids(tokenizer, "30", 20, None) == list(range(11, 30))


def test_rows_that_april_cannot_use() -> None:
    """Images, and loaders that give something else."""
    assert row_of((["source"], ["text"], ["label"], [None])) == ("text", "label")
    with pytest.raises(ConfigError, match="a prompt has images"):
        row_of((["source"], ["text"], ["label"], [["picture.png"]]))
    with pytest.raises(RolloutError, match="one of each"):
        row_of((["source"] * 2, ["text"] * 2, ["label"] * 2, [None] * 2))


def test_answers_of_reward_functions() -> None:
    """Numbers, lists and arrays of one; the score is the reward where there is none."""
    assert RewardResult.of({"rewards": [0.5], "extra_logs": {"a": [[2]]}}) == RewardResult(0.5, 0.5, {"a": 2.0})
    assert RewardResult.of({"rewards": 1, "scores": 0, "extra_logs": None}) == RewardResult(1.0, 0.0, {})
    for answer in (None, {}, {"rewards": None}, [0.5]):
        with pytest.raises(RolloutError, match="expected a mapping with rewards"):
            RewardResult.of(answer)
    for value in ([], "much", object()):
        with pytest.raises(RolloutError, match="where a number is needed"):
            RewardResult.of({"rewards": value})


def test_what_is_trained() -> None:
    """Runs of ones, behind the prompt."""
    assert trained_ranges([1, 1, 0, 1], 3) == [(3, 5), (6, 7)]
    assert trained_ranges([], 3) == trained_ranges([0], 3) == []
