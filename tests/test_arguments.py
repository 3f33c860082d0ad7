"""Flags of an argparse trainer: one per setting, below the trainer's own, above a file; mistakes name the flag."""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import pytest

import april
from april.config.agents import AgentsConfig
from april.config.engines import SimulatedEngineConfig, TransformersEngineConfig
from april.config.flags import settings_of
from april.config.images import ImagesConfig
from april.config.settings import SamplingConfig
from april.core.types import OnStale, Refill

NEEDED = ["--rollout-batch-size", "8", "--max-response-len", "99"]


def parser_with(*flags: tuple[str, dict[str, Any]], **options: Any) -> argparse.ArgumentParser:
    """A trainer's parser with ``flags`` of its own, then april's."""
    parser = argparse.ArgumentParser(prog="train")
    for flag, details in flags:
        parser.add_argument(flag, **details)
    return april.add_april_arguments(parser, **options)


def config_of(parser: argparse.ArgumentParser, *typed: str) -> april.Config:
    return april.config_from_arguments(parser.parse_args(list(typed)))


def sentence_of(parser: argparse.ArgumentParser, *typed: str) -> str:
    with pytest.raises(april.ConfigError) as caught:
        config_of(parser, *typed)
    return str(caught.value)


def test_every_setting_has_a_flag() -> None:
    """Fields added to the model get flags by themselves; none of today's is left out."""
    paths = {s.path for s in settings_of()}
    expected = set(april.Config.model_fields) - {"sampling", "engine", "images", "agents"}
    expected |= {f"sampling.{name}" for name in SamplingConfig.model_fields}
    expected |= {f"images.{name}" for name in ImagesConfig.model_fields}
    expected |= {f"agents.{name}" for name in AgentsConfig.model_fields}
    for engine in (TransformersEngineConfig, SimulatedEngineConfig):
        expected |= {f"engine.{name}" for name in engine.model_fields}
    assert expected <= paths
    dests = {action.dest for action in parser_with()._actions}
    assert {path.replace(".", "_") for path in paths} <= dests


def test_every_flag_says_what_it_is_and_its_default() -> None:
    """--help has the docstring, the default or ``required``, and the choices."""
    parser = parser_with()
    text = " ".join(parser.format_help().split())

    for part in (
        "--rollout-batch-size INT N: prompt groups per batch. (required)",
        "--n-samples-per-prompt INT n: responses per prompt. (default: 8)",
        "--partial-rollout, --no-partial-rollout Keep unfinished responses and continue them in the next step. "
        "False with N' > N means tail batching: unfinished prompts begin again in rounds of their own, and "
        "max_staleness is 0. (default: true)",
        "--on-stale {finish,restart,mask,drop} What happens to a sample that is older than max_staleness. Except with "
        "drop, steps wait for old samples so that none exceeds the limit. (default: finish)",
        "--engine-kind {transformers,simulated,vllm,sglang,openai,april}",
        "transformers: Sequences decoded at the same time. (default: 64); simulated:",
    ):
        assert part in text
    for action in parser._actions:
        assert action.help, action.dest
        assert action.default is argparse.SUPPRESS or action.dest == "help"


def test_flags_give_the_same_configuration_as_keywords() -> None:
    """Each kind of value: numbers, switches, choices, lists, none, sections, an engine of the other kind."""
    config = config_of(
        parser_with(), *NEEDED, "--over-sampling-batch-size", "16", "--refill", "sample", "--on-stale", "restart",
        "--sampling-temperature", "0.8", "--sampling-stop-token-ids", "5", "6", "--max-held-tokens", "none",
        "--allow-mismatch", "--abort-deadline-s", "12.5", "--engine-kind", "simulated", "--engine-count", "2",
        "--engine-model", "qwen3-8b",
    )  # fmt: skip

    assert config == april.Config(
        rollout_batch_size=8, max_response_len=99, over_sampling_batch_size=16, refill=Refill.SAMPLE,
        on_stale=OnStale.RESTART, sampling={"temperature": 0.8, "stop_token_ids": (5, 6)}, max_held_tokens=None,
        allow_mismatch=True, abort_deadline_s=12.5, engine={"kind": "simulated", "count": 2, "model": "qwen3-8b"},
    )  # fmt: skip
    assert config_of(parser_with(), *NEEDED) == april.Config(rollout_batch_size=8, max_response_len=99)
    assert config_of(parser_with(), *NEEDED, "--engine-slots", "3").engine == TransformersEngineConfig(slots=3)
    assert config_of(parser_with(), *NEEDED, "--no-partial-rollout").partial_rollout is False


def test_only_what_was_typed_is_in_the_namespace() -> None:
    """A flag not typed leaves nothing behind; what is there survives JSON and a copy, as trainers need it."""
    args = parser_with().parse_args([*NEEDED, "--refill", "group"])

    found = {name: value for name, value in vars(args).items() if name != "april_arguments"}
    assert found == {"rollout_batch_size": 8, "max_response_len": 99, "refill": "group"}
    again = argparse.Namespace(**json.loads(json.dumps(vars(args))))
    assert april.config_from_arguments(again) == april.config_from_arguments(copy.deepcopy(args))


def test_flags_are_above_the_file_and_the_file_above_the_defaults(tmp_path: Path) -> None:
    """--april-config is merged setting by setting, also inside its sections."""
    file = tmp_path / "april.yaml"
    file.write_text(
        "rollout_batch_size: 4\nmax_response_len: 50\nmax_staleness: 3\npartial_rollout: false\n"
        "sampling: {temperature: 0.7}\nengine: {kind: simulated, count: 2, slots: 8}\n"
    )

    config = config_of(
        parser_with(), "--april-config", str(file), "--max-staleness", "1", "--partial-rollout",
        "--sampling-stop-token-ids", "7", "--engine-slots", "16",
    )  # fmt: skip

    assert (config.rollout_batch_size, config.max_response_len, config.max_staleness) == (4, 50, 1)
    assert config.partial_rollout
    assert config.sampling == SamplingConfig(temperature=0.7, stop_token_ids=(7,))
    assert config.engine == SimulatedEngineConfig(count=2, slots=16)


SLIME = (
    ("--rollout-batch-size", {"type": int, "required": True}),
    ("--n-samples-per-prompt", {"type": int, "default": 1}),
    ("--over-sampling-batch-size", {"type": int, "default": None}),
    ("--partial-rollout", {"action": "store_true", "default": False}),
    ("--rollout-temperature", {"type": float, "default": 1.0}),
    ("--rollout-max-response-len", {"type": int, "default": None}),
    ("--seed", {"type": int, "default": 1234}),
)
"""Flags of slime, with their defaults."""
RENAMED = {"max_response_len": "--rollout-max-response-len", "sampling.temperature": "--rollout-temperature"}


def test_the_trainers_own_flags_are_used_and_not_added_again() -> None:
    """slime's flags decide, typed or not, because slime goes by them; None decides nothing; the rest is april's."""
    parser = parser_with(*SLIME, trainer_flags=RENAMED)

    config = config_of(
        parser, "--rollout-batch-size", "8", "--rollout-max-response-len", "77", "--partial-rollout",
        "--rollout-temperature", "0.9", "--max-staleness", "2",
    )  # fmt: skip

    assert config == april.Config(
        rollout_batch_size=8, n_samples_per_prompt=1, max_response_len=77, sampling={"temperature": 0.9},
        max_staleness=2, seed=1234,
    )  # fmt: skip
    flags = [option for action in parser._actions for option in action.option_strings]
    assert len(flags) == len(set(flags))
    assert not {"--max-response-len", "--sampling-temperature"} & set(flags)


def test_flags_that_the_trainer_adds_later() -> None:
    """slime calls its hook for custom arguments before it adds its own: trainer_flags keeps april's out of the way."""
    same = ("rollout_batch_size", "n_samples_per_prompt", "over_sampling_batch_size", "partial_rollout")
    flags = RENAMED | {name: "--" + name.replace("_", "-") for name in same} | {"seed": "--seed"}
    parser = april.add_april_arguments(argparse.ArgumentParser(), trainer_flags=flags)
    for flag, details in SLIME:
        parser.add_argument(flag, **details)

    args = parser.parse_args(["--rollout-batch-size", "8", "--rollout-max-response-len", "77", "--partial-rollout"])
    args.over_sampling_batch_size = 16  # trainers fill in their defaults after parsing

    config = april.config_from_arguments(args)
    assert (config.rollout_batch_size, config.over_sampling_batch_size, config.seed) == (8, 16, 1234)


def test_a_flag_is_found_by_its_spelling_and_by_its_dest() -> None:
    """Underscores or dashes, another flag with the same dest, the same flag with another dest."""
    parser = parser_with(
        ("--max_staleness", {"type": int, "default": 2}),
        ("--batch", {"type": int, "dest": "rollout_batch_size"}),
        ("--max-response-len", {"type": int, "dest": "cap"}),
    )

    config = config_of(parser, "--batch", "8", "--max-response-len", "99")

    assert (config.max_staleness, config.rollout_batch_size, config.max_response_len) == (2, 8, 99)


def test_a_prefix_keeps_out_of_the_trainers_way() -> None:
    """With a prefix all flags are april's own, whatever the trainer has; the file flag keeps its name."""
    parser = parser_with(*SLIME, prefix="april-")

    config = config_of(
        parser, "--rollout-batch-size", "3", "--april-rollout-batch-size", "8", "--april-max-response-len", "99",
        "--no-april-partial-rollout", "--april-sampling-temperature", "0.5",
    )  # fmt: skip

    assert config == april.Config(
        rollout_batch_size=8, max_response_len=99, partial_rollout=False, sampling={"temperature": 0.5}
    )
    assert sentence_of(parser_with(prefix="april-")).startswith("--april-rollout-batch-size: is required; --april-max")
    dotted = parser_with(prefix="april.")
    assert config_of(dotted, "--april.rollout-batch-size", "8", "--april.max-response-len", "9").max_response_len == 9
    assert "--april-config" in dotted.format_help()


def test_mistakes_in_the_file_keep_the_names_of_the_file(tmp_path: Path) -> None:
    """What stands in the file is named as it stands there; the sentence ends with the file."""
    file = tmp_path / "april.yaml"
    file.write_text("rollout_batch_size: 8\nmax_response_len: 99\npartial_rollout: false\nmax_staleness: 2\n")
    flags = ["--april-config", str(file)]

    sentence = sentence_of(parser_with(), *flags, "--over-sampling-batch-size", "16")
    assert sentence == (
        "max_staleness=2 lets tokens become older than their weights, but partial_rollout=false with "
        "--over-sampling-batch-size 16 trains every batch with the weights that generated it; leave out max_staleness, "
        f"or set partial_rollout: true (with --april-config {file})"
    )
    file.write_text("rollout_batchsize: 8\n")
    assert sentence_of(parser_with(), *flags, *NEEDED).startswith(
        "rollout_batchsize: unknown setting; do you mean rollout_batch_size?"
    )
    file.write_text("- 1\n")
    assert sentence_of(parser_with(), *flags) == f"{file}: expected a mapping of settings, got list"
    file.write_text("sampling: 3\n")
    assert sentence_of(parser_with(), *flags) == f"{file}: sampling must be a mapping of settings, got 3"
    missing = str(tmp_path / "none.yaml")
    assert sentence_of(parser_with(), "--april-config", missing) == f"cannot read {missing}: No such file or directory"


def test_a_trainer_and_a_file_that_disagree_are_refused(tmp_path: Path) -> None:
    """The trainer would train on another number than april delivers; saying the same twice is fine."""
    file = tmp_path / "april.yaml"
    file.write_text("n_samples_per_prompt: 8\nover_sampling_batch_size: 16\nmax_response_len: 99\n")
    parser = parser_with(*SLIME)
    typed = ["--rollout-batch-size", "8", "--april-config", str(file), "--partial-rollout"]

    assert sentence_of(parser, *typed) == (
        f"--n-samples-per-prompt is 1 in the trainer, but {file} says n_samples_per_prompt: 8; make them equal"
    )
    assert config_of(parser, *typed, "--n-samples-per-prompt", "8").over_sampling_batch_size == 16


def test_a_switch_of_the_trainer_without_a_no_is_named_as_it_is() -> None:
    """slime has --partial-rollout and no --no-partial-rollout."""
    parser = parser_with(*SLIME)
    sentence = sentence_of(
        parser, "--rollout-batch-size", "8", "--max-response-len", "9", "--refill", "sample"
    )
    assert "and leaving out --partial-rollout would throw them away; set --partial-rollout" in sentence


def test_misuse_is_refused_with_one_sentence() -> None:
    """Twice, a group instead of a parser, an impossible prefix, unknown settings and flags, foreign namespaces."""
    refused = pytest.raises(april.ConfigError, match="already has april's flags; add them only once")
    with refused:
        april.add_april_arguments(parser_with())
    with pytest.raises(april.ConfigError, match=r"needs an argparse.ArgumentParser, got Namespace"):
        april.add_april_arguments(argparse.Namespace())  # type: ignore[arg-type]
    with pytest.raises(april.ConfigError, match=r"prefix '--april' cannot begin a flag; use something like 'april-'"):
        parser_with(prefix="--april")
    with pytest.raises(april.ConfigError, match="trainer_flags: april has no setting 'max_len'"):
        parser_with(trainer_flags={"max_len": "--rollout-max-response-len"})
    with pytest.raises(april.ConfigError, match=r"conflicting option string: --no-partial-rollout; give april's flags"):
        parser_with(("--no-partial-rollout", {"action": "store_true"}))
    sentence = r"that has no flags of april; call april.add_april_arguments\(parser\)"
    with pytest.raises(april.ConfigError, match=sentence):
        april.config_from_arguments(argparse.Namespace(rollout_batch_size=8))
    parser = parser_with(trainer_flags={"seed": "--rollout-seed"})
    assert sentence_of(parser, *NEEDED).startswith("trainer_flags names --rollout-seed for seed, but this")
