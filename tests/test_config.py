"""One frozen configuration from every kind of source; one sentence for every mistake in it, and no key in any text."""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import traceback
from collections import OrderedDict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
import yaml
from omegaconf import OmegaConf
from pydantic import ValidationError
from real_schedulers import scheduler

import april
from april.config.engines import (
    OpenAIEngineConfig,
    ServerEngineConfig,
    SglangEngineConfig,
    SimulatedEngineConfig,
    TransformersEngineConfig,
    VllmEngineConfig,
)
from april.config.flags import settings_of
from april.config.settings import Config
from april.config.values import LONGEST_S, MOST
from april.core.sampling import SamplingParams
from april.core.types import OnLongPrompt, OnStale, Refill
from april.doctor.examine import Patience
from april.doctor.run import examine
from april.engines.http.server_probe import client_of
from april.engines.kinds.factory import create_engines
from april.engines.simulated.engine import SimulatedEngine
from april.errors import ConfigError

SMALL: dict[str, Any] = {"rollout_batch_size": 32, "max_response_len": 1000}
FULL: dict[str, Any] = {
    "rollout_batch_size": 32,
    "n_samples_per_prompt": 4,
    "over_sampling_batch_size": 48,
    "partial_rollout": True,
    "max_response_len": 16384,
    "refill": "group",
    "max_in_flight": 100,
    "sampling": {"temperature": 0.7, "top_p": 0.9, "min_tokens": 2, "stop_token_ids": [5, 6]},
    "max_staleness": 3,
    "on_stale": "restart",
    "on_long_prompt": "skip",
    "max_held_tokens": 1_000_000,
    "max_sample_tokens": 100_000,
    "max_chains": 9,
    "max_attempt_failures": 5,
    "abort_deadline_s": 12,
    "abort_resend_s": 0.5,
    "allow_mismatch": True,
    "seed": 7,
    "engine": {"kind": "simulated", "count": 2, "gpu": "mi300x", "max_len": 30000},
}


NEEDED = ["--rollout-batch-size", "32", "--max-response-len", "1000"]
URLS = ("http://127.0.0.1:8000", "http://127.0.0.1:8001")
CANARY = "sk-canary-5f3a9c"
SOURCES = ("keywords", "omegaconf", "yaml", "file of flags")


def write(path: Path, values: Any) -> Path:
    path.write_text(yaml.safe_dump(values), "utf-8")
    return path


def from_flags(*typed: str) -> Config:
    parser = april.add_april_arguments(argparse.ArgumentParser(prog="train"))
    return april.config_from_arguments(parser.parse_args(typed))


def load(source: str, values: Any, directory: Path) -> Config:
    """The configuration from one of SOURCES."""
    if source == "keywords":
        return Config(**values)
    if source == "omegaconf":
        return Config.from_mapping(OmegaConf.create(values))
    path = write(directory / "april.yaml", values)
    return Config.from_yaml(path) if source == "yaml" else from_flags("--april-config", str(path))


def test_every_source_gives_the_same_configuration(tmp_path: Path) -> None:
    """Keyword arguments, mappings, OmegaConf containers, YAML files and flags: one and the same frozen Config."""
    config = Config(**FULL)
    others = [
        *(load(source, FULL, tmp_path) for source in SOURCES),
        Config.from_mapping(MappingProxyType(FULL)),
        Config.from_mapping(OrderedDict(reversed(FULL.items()))),
        Config.from_mapping(OmegaConf.create({"n": 4, "april": {**FULL, "n_samples_per_prompt": "${n}"}}).april),
        Config.from_yaml(str(tmp_path / "april.yaml")),
    ]
    assert all(other == config for other in others)
    assert len({hash(other) for other in others} | {hash(config)}) == 1
    assert config.refill is Refill.GROUP
    assert config.on_stale is OnStale.RESTART
    assert config.on_long_prompt is OnLongPrompt.SKIP
    assert config.sampling.stop_token_ids == (5, 6)
    assert isinstance(config.engine, SimulatedEngineConfig)
    assert config.abort_deadline_s == 12.0


@pytest.mark.parametrize("kind", ["vllm", "sglang", "openai"])
def test_one_address_or_several_from_every_source(kind: str, tmp_path: Path) -> None:
    """A word or a list, in a file or as flags."""
    for urls in (URLS[0], [URLS[0] + "/"], list(URLS)):
        typed = [urls] if isinstance(urls, str) else urls
        values = {**SMALL, "engine": {"kind": kind, "urls": urls}}
        configs = [load(source, values, tmp_path) for source in SOURCES]
        configs.append(from_flags(*NEEDED, "--engine-kind", kind, "--engine-urls", *typed))
        assert len(set(configs)) == 1
        assert isinstance(configs[0].engine, ServerEngineConfig)
        assert configs[0].engine.kind == kind  # type: ignore[attr-defined]
        assert configs[0].engine.urls == URLS[: len(typed)]


def test_it_is_frozen() -> None:
    """Nothing in it can be changed after it was checked."""
    config = Config(**FULL)
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 8
    with pytest.raises(ValidationError, match="frozen"):
        config.sampling.temperature = 2.0
    with pytest.raises(ValidationError, match="frozen"):
        config.engine.count = 3


def test_every_setting_reaches_the_core() -> None:
    """What the user typed is what the core gets, under the same name."""
    settings = Config(**FULL).core_settings(has_reward=True, group_reward=True, run_id=99)
    for name in (
        "rollout_batch_size", "n_samples_per_prompt", "over_sampling_batch_size", "max_response_len", "max_in_flight",
        "refill", "max_staleness", "on_stale", "on_long_prompt", "max_held_tokens", "max_attempt_failures",
        "abort_deadline_s", "abort_resend_s", "max_sample_tokens", "max_chains",
    ):  # fmt: skip
        assert getattr(settings, name) == FULL[name], name
    assert (settings.run_seed, settings.run_id, settings.has_reward, settings.group_reward) == (7, 99, True, True)
    assert Config(**FULL).sampling_params() == SamplingParams(16384, 2, 0.7, 0.9, (5, 6), None)


@pytest.mark.parametrize(
    ("changes", "in_work", "in_flight", "leaves", "started"),
    [
        ({}, 5, 40, False, 5),
        ({"over_sampling_batch_size": 5}, 5, 40, False, 5),
        ({"over_sampling_batch_size": 8}, 8, 64, True, 8),
        ({"over_sampling_batch_size": 8, "max_in_flight": 7}, 8, 7, True, 8),
        ({"over_sampling_batch_size": 1}, 1, 40, False, 5),
        ({"over_sampling_batch_size": 2}, 2, 48, True, 6),
        ({"over_sampling_batch_size": 3}, 3, 48, True, 6),
        ({"over_sampling_batch_size": 3, "partial_rollout": False}, 5, 40, False, 5),
        ({"refill": "group"}, 5, 40, True, 5),
    ],
)
def test_places(changes: dict[str, Any], in_work: int, in_flight: int, leaves: bool, started: int) -> None:
    """N' defaults to N, the in-flight cap to max(N, N') * n, or what the portions that reach N come to.

    Portions that come to more than N leave unfinished responses like N' > N; without partial_rollout none do.
    """
    config = Config(rollout_batch_size=5, max_response_len=10, **changes)
    assert (config.groups_in_work, config.samples_in_flight, config.leaves_partials) == (in_work, in_flight, leaves)
    assert config.core_settings(has_reward=True, group_reward=False, run_id=0).groups_wanted == started


# ---------------------------------------------------------------- mistakes

MISTAKES: list[tuple[dict[str, Any], list[str]]] = [
    # unknown, missing
    ({"rolout_batch_size": 3}, ["rolout_batch_size: unknown setting", "do you mean rollout_batch_size?"]),
    ({"sampling": {"top_q": 5}}, ["sampling.top_q: unknown setting"]),
    ({"sampling": {"top_k": 5}}, ["sampling.top_k: changes the distribution"]),
    ({"n": 5}, ["n: every sample of a group is a request of its own; set n_samples_per_prompt"]),
    ({"sampling": {"stop": ["a", ""]}}, ["sampling.stop: an empty stop string would end every response"]),
    ({"sampling": {"stop": "\ufffd"}}, ["sampling.stop: the stop string '\ufffd' has U+FFFD in it"]),
    ({"sampling": {"stop": [3]}}, ["sampling.stop.0: input should be a valid string"]),
    ({"engine": {"kind": "simulated", "gpus": 2}}, ["engine.gpus: unknown setting"]),
    ({"rollout_batch_size": ...}, ["rollout_batch_size: is required"]),
    ({"max_response_len": ...}, ["max_response_len: is required"]),
    # wrong type
    ({"rollout_batch_size": "many"}, ["rollout_batch_size", "valid integer", "'many'"]),
    ({"rollout_batch_size": 1.5}, ["rollout_batch_size", "fractional part", "1.5"]),
    ({"rollout_batch_size": True}, ["rollout_batch_size: must be a number, got True"]),
    ({"seed": False}, ["seed: must be a number, got False"]),
    ({"abort_deadline_s": True}, ["abort_deadline_s: must be a number, got True"]),
    ({"sampling": {"temperature": True}}, ["sampling.temperature: must be a number"]),
    ({"rollout_batch_size": None}, ["rollout_batch_size", "valid integer"]),
    ({"partial_rollout": "perhaps"}, ["partial_rollout", "valid boolean", "'perhaps'"]),
    ({"sampling": 3}, ["sampling", "mapping", "3"]),
    ({"sampling": {"stop_token_ids": 5}}, ["sampling.stop_token_ids", "valid tuple"]),
    ({"sampling": {"stop_token_ids": [1, "x"]}}, ["sampling.stop_token_ids.1", "valid integer"]),
    ({"engine": "vllm"}, ["engine", "mapping", "vllm"]),
    # out of range
    ({"rollout_batch_size": 0}, ["rollout_batch_size", "greater than or equal to 1", "got 0"]),
    ({"max_staleness": -1}, ["max_staleness", "greater than or equal to 0"]),
    ({"abort_deadline_s": 0}, ["abort_deadline_s", "greater than 0"]),
    ({"abort_resend_s": float("inf")}, ["abort_resend_s", "finite"]),
    ({"seed": -1}, ["seed", "greater than or equal to 0"]),
    ({"refill": "always"}, ["refill", "'none', 'group' or 'sample'", "'always'"]),
    ({"on_stale": "panic"}, ["on_stale", "'finish', 'restart', 'mask' or 'drop'"]),
    ({"on_long_prompt": "cut"}, ["on_long_prompt", "'error' or 'skip'"]),
    ({"sampling": {"temperature": -0.1}}, ["sampling.temperature", "greater than or equal to 0"]),
    ({"sampling": {"temperature": float("nan")}}, ["sampling.temperature", "finite"]),
    ({"sampling": {"top_p": 0}}, ["sampling.top_p", "greater than 0"]),
    ({"sampling": {"top_p": 1.1}}, ["sampling.top_p", "less than or equal to 1"]),
    ({"sampling": {"top_p": float("nan")}}, ["sampling.top_p"]),
    ({"sampling": {"stop_token_ids": [-1]}}, ["sampling.stop_token_ids.0", "greater than or equal to 0"]),
    ({"engine": {"kind": "simulated", "slots": 0}}, ["engine.slots", "greater than or equal to 1"]),
    ({"engine": {"kind": "simulated", "sigma_within": float("inf")}}, ["engine.sigma_within", "finite"]),
    ({"engine": {"kind": "transformers", "slots": 0}}, ["engine.slots", "greater than or equal to 1"]),
    ({"engine": {"kind": "simulated", "gpu": "b200"}}, ["engine.gpu", "'h100' or 'mi300x'"]),
    # engine kinds
    ({"engine": {"kind": "llamacpp"}}, ["engine.kind", "'llamacpp'", "'transformers', 'simulated', 'vllm', 'sglang'"]),
    ({"engine": {"slots": 3}}, ["engine.kind: is required"]),
    # contradictions
    (
        {"over_sampling_batch_size": 48, "partial_rollout": False},
        ["over_sampling_batch_size=48", "rollout_batch_size=32", "set partial_rollout: true"],
    ),
    (
        {"over_sampling_batch_size": 100, "max_staleness": 2},
        ["over_sampling_batch_size=100", "max_staleness=2", "which is 96", "raise max_staleness or set on_stale"],
    ),
    (
        {"refill": "sample", "partial_rollout": False},
        ["refill=sample", "partial_rollout=false", "set partial_rollout: true or refill: none"],
    ),
    (
        {"sampling": {"min_tokens": 1000}, "allow_mismatch": True},
        ["sampling.min_tokens=1000", "below max_response_len=1000"],
    ),
    (
        {"sampling": {"min_tokens": 30}, "max_sample_tokens": 30, "allow_mismatch": True},
        ["sampling.min_tokens=30", "below max_sample_tokens=30"],
    ),
    ({"abort_resend_s": 31}, ["abort_resend_s=31", "longer than abort_deadline_s=30"]),
    ({"sampling": {"top_p": 0.9}}, ["sampling.top_p=0.9", "recomputes", "set top_p: 1", "allow_mismatch: true"]),
    ({"sampling": {"min_tokens": 3}}, ["sampling.min_tokens=3", "set min_tokens: 0", "allow_mismatch: true"]),
    ({"sampling": {"temperature": 0}}, ["sampling.temperature=0", "positive temperature", "allow_mismatch: true"]),
    # auto
    ({"max_in_flight": "auto"}, ["set refill: sample, or over_sampling_batch_size: auto as well"]),
    ({"over_sampling_batch_size": "auto", "refill": "sample"}, ["set max_in_flight: auto"]),
    ({"over_sampling_batch_size": "auto", "generation": "continuous"}, ["set max_in_flight: auto"]),
    ({"max_in_flight": "auto", "refill": "group"}, ["between what refill: none and refill: sample can have"]),
    ({"group_quorum": "auto", "partial_rollout": False}, ["set partial_rollout: true"]),
    ({"max_off_policy_share": 0.5}, ["nothing is auto"]),
    ({"over_sampling_batch_size": "much"}, ["should be a valid integer"]),
]


@pytest.mark.parametrize(("change", "words"), MISTAKES, ids=lambda x: str(x)[:50])
@pytest.mark.parametrize("source", SOURCES[:3])
def test_one_sentence_names_the_setting_and_what_to_do(
    change: dict[str, Any], words: list[str], source: str, tmp_path: Path
) -> None:
    """From whichever source: a ConfigError of one line with the setting's name, what is wrong and what is possible."""
    values = {name: value for name, value in {**SMALL, **change}.items() if value is not ...}
    with pytest.raises(ConfigError) as caught:
        load(source, values, tmp_path)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message
    assert "pydantic" not in message
    if source == "yaml":
        assert message.startswith(str(tmp_path / "april.yaml"))


def test_several_mistakes_are_all_named() -> None:
    """Nobody has to run three times to learn of three mistakes."""
    with pytest.raises(ConfigError, match=r"refill.*; seed.*; colour: unknown setting"):
        Config(**SMALL, refill="x", seed=-1, colour="red")


@pytest.mark.parametrize(
    ("values", "words"),
    [([1, 2], "list"), (None, "NoneType"), ("a: 1", "str"), (OmegaConf.create([1]), "list")],
)
def test_something_else_than_a_mapping(values: Any, words: str) -> None:
    """The sentence says what was given."""
    with pytest.raises(ConfigError, match=f"expected a mapping of settings, got {words}"):
        Config.from_mapping(values)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_samples_per_prompt": "???"}, "n_samples_per_prompt"),
        ({"engine": {"kind": "transformers", "model": "???"}}, "Missing mandatory value.*engine.model"),
        ({"n_samples_per_prompt": "${nowhere}"}, "nowhere"),
    ],
    ids=str,
)
def test_unresolved_omegaconf_values(change: dict[str, Any], words: str) -> None:
    """A mandatory value that is missing or an interpolation that leads nowhere is a ConfigError that names it."""
    with pytest.raises(ConfigError, match=words) as caught:
        Config.from_mapping(OmegaConf.create({**SMALL, **change}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("!!python/object/apply:os.system ['exit 1']", "python/object/apply"),
        ("rollout_batch_size: !!python/object:collections.Counter {}", "python/object"),
        ("rollout_batch_size: !!python/name:os.system", "python/name"),
        ("rollout_batch_size: [1", "not valid YAML"),
        ("a: 1\n b: 2", "not valid YAML"),
        ("", "expected a mapping of settings, got NoneType"),
        ("- 1", "expected a mapping of settings, got list"),
    ],
)
def test_yaml_that_is_refused(text: str, words: str, tmp_path: Path) -> None:
    """YAML tags that would run code are refused like any other broken file, in one sentence that names the file."""
    path = tmp_path / "evil.yaml"
    path.write_text(text, "utf-8")
    with pytest.raises(ConfigError) as caught:
        Config.from_yaml(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A path that is not there, a directory, and bytes that are no text."""
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere\.yaml: No such file"):
        Config.from_yaml(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="cannot read"):
        Config.from_yaml(tmp_path)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00a")
    with pytest.raises(ConfigError, match=r"bytes\.yaml is not valid YAML"):
        Config.from_yaml(tmp_path / "bytes.yaml")


def test_yaml_without_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The sentence says what to install."""
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match=r"needs PyYAML: pip install '.+\[yaml\]'"):
        Config.from_yaml(tmp_path / "any.yaml")


# ---------------------------------------------------------------- limits

SIMULATED: dict[str, Any] = {"rollout_batch_size": 2, "max_response_len": 50, "engine": {"kind": "simulated"}}
LARGEST_SEED = 2**63 - 1


def counts_and_waits() -> list[tuple[str, str]]:
    """Each whole number and each number of seconds, those of the engines left out: (path, kind)."""
    found: list[tuple[str, str]] = []
    for setting in settings_of():
        name, kind = setting.path.rpartition(".")[2], str(setting.annotation)
        if not setting.path.startswith("engine."):
            if name.endswith("_s"):
                found.append((setting.path, "seconds"))
            elif "int" in kind and not name.endswith("_bytes"):
                found.append((setting.path, "count"))
    assert len({kind for _, kind in found}) == 2
    return found


def with_value(path: str, value: Any) -> dict[str, Any]:
    parent, _, name = path.rpartition(".")
    if name == "stop_token_ids":
        value = [value]
    return {**SIMULATED, parent: {name: value}} if parent else {**SIMULATED, name: value}


@pytest.mark.parametrize(("path", "kind"), counts_and_waits(), ids=lambda p: str(p))
def test_too_much_is_refused_by_name(path: str, kind: str) -> None:
    """Whatever is counted has a limit, and so has every wait; numbers that Python refuses to print have it too."""
    most = LARGEST_SEED if path == "seed" else MOST
    values = [LONGEST_S * 2, 1e300] if kind == "seconds" else [most + 1, 2**64, 10**5000]
    for value in values:
        with pytest.raises(ConfigError, match=path) as refused:
            Config(**with_value(path, value))
        assert len(str(refused.value)) < 300


def test_aborts_are_not_asked_for_without_end() -> None:
    """A thousandth of the longest wait is fine; what would be asked more than a million times is not."""
    Config(**SIMULATED, abort_deadline_s=30, abort_resend_s=0.001)
    for resend_s in (1e-9, 1e-300):
        with pytest.raises(ConfigError, match="would ask"):
            Config(**SIMULATED, abort_deadline_s=LONGEST_S, abort_resend_s=resend_s)


@pytest.mark.parametrize("changes", [{"abort_deadline_s": LONGEST_S, "abort_resend_s": LONGEST_S / 1e6}, {
    "outage_deadline_s": LONGEST_S, "function_timeout_s": LONGEST_S, "stall_timeout_s": LONGEST_S}])  # fmt: skip
def test_the_longest_waits_can_be_waited_for(changes: dict[str, float]) -> None:
    """They fit the clocks of the loop and of threads."""
    config = Config(rollout_batch_size=3, n_samples_per_prompt=2, max_response_len=100, **changes)
    with scheduler(config=config, reward=lambda prompt, response: float(len(response.tokens))) as rollouts:
        rollouts.next_batch()
        rollouts.weight_update()


def test_the_largest_numbers_go_into_a_checkpoint() -> None:
    """In msgpack too, in which adapters write it."""
    largest = {"seed": LARGEST_SEED, "max_in_flight": MOST, "max_staleness": MOST, "max_resumes": MOST}
    config = Config(rollout_batch_size=3, n_samples_per_prompt=2, max_response_len=100, **largest)
    with scheduler(config=config) as rollouts:
        rollouts.next_batch()
        rollouts.weight_update()
        msgspec.msgpack.encode(rollouts.state_dict())


@pytest.mark.parametrize("name", ["n_samples", "max_tokens"])
def test_evaluations_have_limits(name: str) -> None:
    with scheduler() as rollouts, pytest.raises(ConfigError, match=f"evaluate: {name} must be at most 2,147,483,647"):
        rollouts.evaluate([[1]], **{name: 10**5000})


# ---------------------------------------------------------------- engines


def no_loop(coroutine: Any) -> Any:
    """Engines in this process need no event loop to be made."""
    raise AssertionError("asked for a loop")


def test_simulated_engines_from_the_configuration() -> None:
    """As many as asked for, with names of their own and the numbers of the configuration; no model object."""
    config = SimulatedEngineConfig(count=3, slots=5, vocab_size=50, max_len=900)
    engines = create_engines(config, None, 1, no_loop)
    assert [e.name for e in engines] == ["simulated0", "simulated1", "simulated2"]
    assert all(isinstance(e, SimulatedEngine) for e in engines)
    c = engines[0].capabilities
    assert (c.max_in_flight, c.vocab_size, c.max_context) == (5, 50, 900)
    with pytest.raises(ConfigError, match="takes no model object"):
        create_engines(config, object(), 1, no_loop)


def test_the_embedded_engine_needs_a_model() -> None:
    """Neither a model object nor a directory: the sentence says where to put it."""
    with pytest.raises(ConfigError, match=r"model=\.\.\., or set engine.model"):
        create_engines(TransformersEngineConfig(), None, 0, no_loop)


# ---------------------------------------------------------------- servers


def test_every_setting_of_a_server_but_its_key_is_a_flag() -> None:
    """Numbers, words and lists; the key is none, as command lines are seen by everybody on the machine."""
    config = from_flags(*NEEDED,
        "--engine-kind", "vllm", "--engine-urls", *URLS, "--engine-api-key-env", "KEY", "--engine-max-in-flight", "64",
        "--max-in-flight", "100", "--engine-max-token-loss", "0", "--engine-vocab-size", "512", "--engine-max-len",
        "4096", "--engine-eos-token-ids", "2", "3", "--engine-logprobs", "processed", "--engine-connect-timeout-s",
        "2.5", "--engine-probe-timeout-s", "20", "--engine-model", "tiny", "--engine-expert-shape", "3", "2",
    )  # fmt: skip

    assert config.max_in_flight == 100
    assert config.engine == VllmEngineConfig(
        urls=URLS, api_key_env="KEY", max_in_flight=64, max_token_loss=0, vocab_size=512, max_len=4096,
        eos_token_ids=(2, 3), logprobs="processed", connect_timeout_s=2.5, probe_timeout_s=20, model="tiny",
        expert_shape=(3, 2),
    )  # fmt: skip
    given = {name for name in VllmEngineConfig.model_fields if getattr(config.engine, name) is not None}
    assert given == set(VllmEngineConfig.model_fields) - {"api_key"}
    router = from_flags(*NEEDED, "--engine-kind", "sglang", "--engine-urls", URLS[0], "--engine-router", URLS[1])
    assert router.engine == SglangEngineConfig(urls=URLS[:1], router=URLS[1])
    parser = april.add_april_arguments(argparse.ArgumentParser())
    assert "--engine-api-key " not in parser.format_help()


def test_both_limits_on_requests_in_flight_are_told_apart() -> None:
    """One is over all engines, the other for one server; each says so and names no default of the other."""
    text = " ".join(april.add_april_arguments(argparse.ArgumentParser()).format_help().split())
    assert "--max-in-flight INT|auto Samples generated at the same time, on all engines together." in text
    assert "Most requests at one server at the same time, within the max_in_flight of all together." in text


REQUIRED = "the addresses of the servers, such as http://127.0.0.1:8000"
LOOKS = "an engine's URL must look like http://host:port, got"
ONE = {"kind": "vllm", "urls": URLS[0]}
ENGINE_MISTAKES: list[tuple[Any, str]] = [
    ({"kind": "vllm"}, f"engine.urls is required for engine.kind vllm: {REQUIRED}"),
    ({"kind": "openai", "urls": []}, f"engine.urls is required for engine.kind openai: {REQUIRED}"),
    ("vllm", "engine: expected a mapping of settings, got 'vllm'; write engine: {kind: vllm}"),
    # settings of another kind, of another program, misspelt
    ({**ONE, "slots": 3}, "engine.slots belongs to engine.kind transformers or simulated, not to vllm"),
    ({**ONE, "router": URLS[0]}, "engine.router belongs to engine.kind sglang, not to vllm"),
    (
        {"kind": "simulated", "urls": URLS},
        "engine.urls belongs to engine.kind vllm or sglang or openai, not to simulated",
    ),
    ({**ONE, "base_url": "x"}, "engine.base_url: unknown setting; do you mean engine.urls?"),
    ({**ONE, "url": "x"}, "engine.url: unknown setting; do you mean engine.urls?"),
    ({**ONE, "max_model_len": 9}, "engine.max_model_len: unknown setting; do you mean engine.max_len?"),
    (
        {"kind": "sglang", "urls": URLS, "colour": 1},
        "engine.colour: unknown setting; engine.kind sglang has urls, api_key, api_key_env, max_in_flight, "
        "max_token_loss, vocab_size, max_len, eos_token_ids, logprobs, connect_timeout_s, probe_timeout_s, model, "
        "expert_shape, router",
    ),
    # addresses
    ({**ONE, "urls": "localhost:8000"}, f"engine.urls.0: {LOOKS} 'localhost:8000'; write http://localhost:8000"),
    ({**ONE, "urls": "h:8/v1"}, f"engine.urls.0: {LOOKS} 'h:8/v1'; write http://h:8, without /v1"),
    (
        {**ONE, "urls": "http://0.0.0.0:8000"},
        "engine.urls.0: 0.0.0.0 in 'http://0.0.0.0:8000' is where a server listens, not where it is reached; write "
        "http://127.0.0.1:8000 if it is on this machine, or else the name of its machine",
    ),
    (
        {**ONE, "urls": "https://[::]"},
        "engine.urls.0: :: in 'https://[::]' is where a server listens, not where it is reached; write "
        "https://127.0.0.1 if it is on this machine, or else the name of its machine",
    ),
    ({**ONE, "urls": [URLS[0], "ftp://h"]}, f"engine.urls.1: {LOOKS} 'ftp://h'"),
    (
        {**ONE, "urls": "http://h:8/v1"},
        f"engine.urls.0: {LOOKS} 'http://h:8/v1'; write http://h:8, without /v1: april adds the routes",
    ),
    (
        {**ONE, "urls": "https://h:8/v1/"},
        f"engine.urls.0: {LOOKS} 'https://h:8/v1/'; write https://h:8, without /v1/: april adds the routes",
    ),
    ({**ONE, "urls": "http://h:8?key=1"}, f"engine.urls.0: {LOOKS} 'http://h:8?...'"),
    ({**ONE, "urls": "http://h:99999"}, f"engine.urls.0: {LOOKS} 'http://h:99999'"),
    ({**ONE, "urls": ["http://h", "http://h/"]}, "engine.urls names http://h twice; each server is one engine"),
    ({**ONE, "urls": 8000}, "engine.urls: input should be a valid tuple, got 8000"),
    ({"kind": "sglang", "urls": URLS, "router": "h"}, f"engine.router: {LOOKS} 'h'; write http://h:PORT"),
    # ranges
    (
        {**ONE, "api_key": "key\n"},
        "engine.api_key: the key of the server begins or ends with white space or a line break; take that away",
    ),
    ({**ONE, "api_key": 5512345}, "engine.api_key: input should be a valid string"),  # digits without quotes in YAML
    ({**ONE, "max_in_flight": 0}, "engine.max_in_flight: input should be greater than or equal to 1, got 0"),
    ({**ONE, "max_token_loss": -1}, "engine.max_token_loss: input should be greater than or equal to 0, got -1"),
    ({**ONE, "logprobs": "some"}, "engine.logprobs: input should be 'temperature', 'processed' or 'raw', got 'some'"),
]


@pytest.mark.parametrize(("engine", "sentence"), ENGINE_MISTAKES, ids=lambda x: str(x)[:50])
def test_one_sentence_per_mistake(engine: Any, sentence: str) -> None:
    """Where, what is wrong, what to write."""
    with pytest.raises(ConfigError) as caught:
        Config(**SMALL, engine=engine)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        (
            ["--engine-kind", "vllm"],
            "--engine-urls is required for --engine-kind vllm: the addresses of the servers, such as "
            "http://127.0.0.1:8000",
        ),
        (
            ["--engine-urls", URLS[0]],
            "--engine-urls belongs to --engine-kind vllm or sglang or openai, not to transformers",
        ),
        (
            ["--engine-kind", "vllm", "--engine-urls", URLS[0], "--engine-slots", "3"],
            "--engine-slots belongs to --engine-kind transformers or simulated, not to vllm",
        ),
    ],
)
def test_mistakes_on_the_command_line_name_the_flags(typed: list[str], sentence: str) -> None:
    """The same sentences in the words of the command line."""
    with pytest.raises(ConfigError) as caught:
        from_flags(*NEEDED, *typed)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("localhost:8000", "'localhost:8000'; write http://localhost:8000"),
        (f"http://user:{CANARY}@host:80", "'host:80'"),
    ],
)
def test_a_wrong_address_on_the_command_line(url: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused by argparse with the flag and april's own sentence, which has no password."""
    with pytest.raises(SystemExit):
        from_flags(*NEEDED, "--engine-kind", "vllm", "--engine-urls", URLS[0], url)
    error = capsys.readouterr().err
    assert CANARY not in error
    assert error.strip().splitlines()[-1] == f"train: error: argument --engine-urls: {LOOKS} {shown}"


# ---------------------------------------------------------------- keys


def test_a_key_is_in_no_text_of_the_configuration(caplog: pytest.LogCaptureFixture) -> None:
    """repr, str, JSON, dumps and logs show stars; the engine's client gets the key itself."""
    config = Config(**SMALL, engine={"kind": "vllm", "urls": URLS, "api_key": CANARY})
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("trainer").info("config %s %r %s", config, config.engine, config.model_dump())

    texts = [repr(config), str(config), config.model_dump_json(), caplog.text, str(config.model_dump(mode="json"))]
    texts.append(json.dumps(config.engine.model_json_schema()))
    assert [text for text in texts if CANARY in text] == []
    assert isinstance(config.engine, VllmEngineConfig)
    assert config.engine.api_key is not None
    assert config.engine.api_key.get_secret_value() == CANARY


@pytest.mark.parametrize(
    "engine",
    [
        {"kind": "vllm", "api_key": CANARY},
        {"kind": "vllm", "urls": URLS, "api_key": CANARY, "api_key_env": "KEY"},
        {"kind": "vllm", "urls": URLS, "api_key": CANARY, "slots": 3},
        {"kind": "vllm", "urls": URLS, "api_key": [CANARY]},
        {"kind": "vllm", "urls": URLS, "api_key": {"key": CANARY}},
        {"kind": "vllm", "urls": {"api_key": CANARY}},
        {"kind": "vllm", "urls": f"http://user:{CANARY}@host:80"},
        {"kind": "vllm", "urls": f"ftp://{CANARY}@host"},
        {"kind": "vllm", "urls": f"http://host:80?key={CANARY}"},
        {"kind": "vllm", "urls": f"http://host:80#{CANARY}"},
        {"kind": "vllm", "urls": f"http://host:80/#?{CANARY}"},
        {"kind": "vllm", "urls": f"http://[host:80#{CANARY}"},
        {"kind": "vllm", "urls": URLS, "api_key": f"{CANARY}\nX-More: 1"},
        {"kind": "vllm", "urls": URLS, "api_key": f"{CANARY}\x00"},
        {"kind": "vllm", "urls": URLS, "api_key": f"{CANARY}\u2713"},
        {"kind": "vllm", "urls": URLS, "api_key": f" {CANARY}"},
        {"kind": "simulated", "api_key": CANARY},
        {"kind": "nobody", "api_key": CANARY},
        {"api_key": CANARY},
        [{"kind": "vllm", "api_key": CANARY}],
    ],
    ids=str,
)
@pytest.mark.parametrize("source", SOURCES)
def test_a_key_is_in_no_sentence(engine: Any, source: str, tmp_path: Path) -> None:
    """Whatever else is wrong beside it, or with it, and wherever it stands."""
    with pytest.raises(ConfigError) as caught:
        load(source, {**SMALL, "engine": engine}, tmp_path)
    assert CANARY not in "".join(traceback.format_exception(caught.value))


def test_a_broken_file_does_not_show_its_lines(tmp_path: Path) -> None:
    """The sentence says what is wrong and in which line, not what stands there."""
    file = tmp_path / "april.yaml"
    file.write_text(f'engine:\n  kind: vllm\n  api_key: "{CANARY}\n', "utf-8")
    with pytest.raises(ConfigError) as caught:
        Config.from_yaml(file)
    assert str(caught.value) == f"{file} is not valid YAML: found unexpected end of stream in line 4"


def test_no_kind_has_a_setting_of_its_own_for_what_others_have() -> None:
    """A user changes ``kind`` and nothing else: what all servers share is in all three."""
    for engine in (VllmEngineConfig, SglangEngineConfig, OpenAIEngineConfig):
        assert set(ServerEngineConfig.model_fields) < set(engine.model_fields)


@pytest.mark.parametrize("key", ["a\r\nX-More: 1", "a\n", "\ta", "a\x00b", "a\u2713", "a b", "a\x7f"])
@pytest.mark.parametrize("kind", ["vllm", "sglang", "openai"])
def test_a_key_that_no_header_can_hold(key: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before anything is sent, where it is given and where the environment has it."""
    key = f"{CANARY}{key}{CANARY}"
    with pytest.raises(ConfigError, match=r"engine\.api_key: the key of the server has characters"):
        Config(**SMALL, engine={"kind": kind, "urls": URLS, "api_key": key})
    if "\x00" in key:
        return  # no environment can hold it either
    monkeypatch.setenv("KEY_OF_A_TEST", key)
    config = Config(**SMALL, engine={"kind": kind, "urls": URLS, "api_key_env": "KEY_OF_A_TEST"})
    assert isinstance(config.engine, ServerEngineConfig)
    with pytest.raises(ConfigError, match="the key of the server") as caught:
        client_of(URLS[0], config.engine)
    assert CANARY not in str(caught.value)
    with pytest.raises(ConfigError, match="the key of the server"):
        examine([URLS[0]], None, "KEY_OF_A_TEST", Patience())


# ---------------------------------------------------------------- import april

@pytest.mark.parametrize(
    ("used", "not_loaded"),
    [
        ("april.__all__", "torch numpy transformers aiohttp pydantic yaml omegaconf msgspec rich typer"),
        ("april.Config; april.RolloutScheduler", "torch transformers aiohttp omegaconf yaml"),
        ("import april.engines.transformers.engine", "torch transformers"),
    ],
)
def test_what_importing_loads(used: str, not_loaded: str) -> None:
    """`import april` in a fresh interpreter loads no other package; configuration and core need none of an engine.

    The embedded engine loads torch when one is made.
    """
    code = f"import sys, april; {used}; print([m for m in {not_loaded.split()!r} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def test_every_public_name_is_there() -> None:
    """All of __all__ can be fetched, dir() shows it, and an unknown name is an AttributeError."""
    for name in april.__all__:
        assert getattr(april, name).__name__ == name
    assert set(april.__all__) <= set(dir(april))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        april.Nothing  # noqa: B018
