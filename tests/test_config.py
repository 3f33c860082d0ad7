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
from real_schedulers import scheduler

import april
from april.adapters.common.refusals import own_settings
from april.config.engines import (
    ServerEngineConfig,
    SglangEngineConfig,
    SimulatedEngineConfig,
    VllmEngineConfig,
)
from april.config.flags import settings_of
from april.config.settings import Config
from april.config.values import LARGEST_INT, LONGEST_S
from april.core.sampling import SamplingParams
from april.core.types import OnLongPrompt, OnStale, Refill
from april.doctor.examine import TimeLimits
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
    """Nothing in it can be changed after it was checked; the error is april's, with what to do instead."""
    config = Config(**FULL)
    sentence = "^{}: a configuration cannot be changed; make another april.Config with the new value$"
    with pytest.raises(ConfigError, match=sentence.format("seed")):
        config.seed = 8
    with pytest.raises(ConfigError, match=sentence.format("temperature")):
        config.sampling.temperature = 2.0
    with pytest.raises(ConfigError, match=sentence.format("count")):
        config.engine.count = 3
    with pytest.raises(ConfigError, match=sentence.format("seed")):
        del config.seed
    assert config == Config(**FULL)


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
        ({"over_sampling_batch_size": 7, "partial_rollout": False}, 7, 56, False, 7),
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

@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1, 2], "list"), (None, "NoneType"), ("april.yaml", "str; Config.from_yaml reads files"),
        (OmegaConf.create([1]), "list"),
    ],
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
    most = LARGEST_SEED if path == "seed" else LARGEST_INT
    values = [LONGEST_S * 2, 1e300] if kind == "seconds" else [most + 1, 2**64, 10**5000]
    for value in values:
        with pytest.raises(ConfigError, match=path) as refused:
            Config(**with_value(path, value))
        assert len(str(refused.value)) < 300


def test_aborts_are_not_asked_for_without_end() -> None:
    """A thousandth of the longest wait is fine; what would be asked more than a million times is not."""
    Config(**SIMULATED, abort_deadline_s=30, abort_resend_s=0.001)
    for resend_s in (1e-9, 1e-300):
        with pytest.raises(ConfigError, match="would send the same abort"):
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
    largest = {
        "seed": LARGEST_SEED, "max_in_flight": LARGEST_INT, "max_staleness": LARGEST_INT, "max_resumes": LARGEST_INT
    }
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
    with pytest.raises(ConfigError, match="accepts no model object"):
        create_engines(config, object(), 1, no_loop)


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
        {"kind": "vllm", "urls": f"http://host:80/?user=a@b.example&key={CANARY}"},
        {"kind": "vllm", "urls": f"http://host:80?key=a@{CANARY}"},
        {"kind": "vllm", "urls": f"http://user:{CANARY}#x@host:80"},
        {"kind": "vllm", "urls": f"http://user:{CANARY}/x?y@host:80"},
        {"kind": "vllm", "urls": URLS, "api_key_env": CANARY},
        {"kind": f"http://host:80?key={CANARY}", "urls": URLS},
        f"http://host:80/?key={CANARY}",
        f"host:80?key={CANARY}",
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


def test_a_key_as_a_flag_is_refused_and_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """argparse would take the flag for an abbreviation of --engine-api-key-env, and the key for a variable's name."""
    for typed in ([f"--engine-api-key={CANARY}"], ["--engine-api-key-env", CANARY], ["--engine-kind", f"h?{CANARY}"]):
        with pytest.raises(SystemExit):
            from_flags(*NEEDED, "--engine-urls", *URLS, *typed)
        printed = capsys.readouterr().err.splitlines()[-1]
        assert f"argument {typed[0].partition('=')[0]}: " in printed
        assert CANARY not in printed


def test_off_in_yaml_is_off(tmp_path: Path) -> None:
    """YAML reads the word as false."""
    file = tmp_path / "april.yaml"
    file.write_text(
        f"rollout_batch_size: 2\nmax_response_len: 9\nengine: {{kind: vllm, urls: {URLS[0]}, routing_key: off}}\n"
    )
    config = Config.from_yaml(file)
    assert isinstance(config.engine, ServerEngineConfig)
    assert config.engine.routing_key == "off"
    with pytest.raises(ConfigError, match=r"engine\.routing_key: input should be 'sample', 'group' or 'off', got True"):
        Config(**SMALL, engine={"kind": "vllm", "urls": URLS, "routing_key": True})


def test_a_broken_file_does_not_show_its_lines(tmp_path: Path) -> None:
    """The sentence says what is wrong and in which line, not what stands there."""
    file = tmp_path / "april.yaml"
    file.write_text(f'engine:\n  kind: vllm\n  api_key: "{CANARY}\n', "utf-8")
    with pytest.raises(ConfigError) as caught:
        Config.from_yaml(file)
    assert str(caught.value) == f"{file} is not valid YAML: found unexpected end of stream in line 4"


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
        examine([URLS[0]], None, "KEY_OF_A_TEST", TimeLimits())


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


@pytest.mark.parametrize(
    ("command", "not_loaded"),
    [
        ("--version", "april.cli april.core april.config april.text typer rich numpy"),
        ("--help", "april.config april.core.types numpy msgspec pydantic importlib.metadata"),
    ],
)
def test_what_the_command_line_loads(command: str, not_loaded: str) -> None:
    """``april --version`` and ``april --help`` load nothing that only commands need; the text is typer's."""
    code = (
        "import sys, atexit; from april.__main__ import main; "
        f"atexit.register(lambda: print([m for m in {not_loaded.split()!r} if m in sys.modules], file=sys.stderr)); "
    )
    plain = "from april.cli import app; app(prog_name='april')"
    runs = [
        subprocess.run([sys.executable, "-c", f"{code}sys.argv[0] = 'april'; {call}", command],
                       capture_output=True, text=True, check=True)
        for call in ("main()", plain)
    ]  # fmt: skip
    assert runs[0].stderr == "[]\n"
    assert runs[0].stdout == runs[1].stdout != ""


def test_every_public_name_is_there() -> None:
    """All of __all__ can be fetched, dir() shows it, and an unknown name is an AttributeError."""
    for name in april.__all__:
        assert getattr(april, name).__name__ == name
    assert set(april.__all__) <= set(dir(april))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        april.Nothing  # noqa: B018


def test_settings_without_defaults_make_the_same_configuration() -> None:
    """Also where a setting has another default than otherwise: refill, with continuous generation."""
    for given in ({}, {"generation": "continuous"}, {"generation": "continuous", "refill": "none"}):
        made = Config(rollout_batch_size=2, n_samples_per_prompt=2, max_response_len=9, **given)
        assert Config.from_mapping(made.to_mapping(defaults=False)) == made


def test_null_in_a_trainers_file_is_no_limit_or_the_default() -> None:
    """No limit for the settings that have one otherwise; the default for all others."""
    given = {"function_timeout_s": None, "stall_timeout_s": None, "max_age": None, "max_in_flight": 5}
    assert own_settings(given, "verl", {}) == {"function_timeout_s": None, "stall_timeout_s": None, "max_in_flight": 5}
