"""Flags of an argparse trainer: one per setting, above a file; mistakes name the flag."""

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
    assert {f"april.{path}" for path in paths} <= dests


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
        "--on-stale {finish,restart,mask,drop} What happens to a sample that is older than max_staleness. With all "
        "choices but drop, steps wait for samples that are close to the limit. (default: finish)",
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

    found = {name: value for name, value in vars(args).items() if name.startswith("april.")}
    assert found == {"april.rollout_batch_size": 8, "april.max_response_len": 99, "april.refill": "group"}
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


def test_misuse_is_refused_with_one_sentence() -> None:
    """Twice, a group instead of a parser, an impossible prefix, a flag of the trainer, foreign namespaces."""
    refused = pytest.raises(april.ConfigError, match="already has april's flags; add them only once")
    with refused:
        april.add_april_arguments(parser_with())
    with pytest.raises(april.ConfigError, match=r"needs an argparse.ArgumentParser, got Namespace"):
        april.add_april_arguments(argparse.Namespace())  # type: ignore[arg-type]
    with pytest.raises(april.ConfigError, match=r"prefix '--april' cannot begin a flag; use something like 'april-'"):
        parser_with(prefix="--april")
    with pytest.raises(april.ConfigError, match=r"conflicting option string: --no-partial-rollout; give april's flags"):
        parser_with(("--no-partial-rollout", {"action": "store_true"}))
    sentence = r"that has no flags of april; call april.add_april_arguments\(parser\)"
    with pytest.raises(april.ConfigError, match=sentence):
        april.config_from_arguments(argparse.Namespace(rollout_batch_size=8))
