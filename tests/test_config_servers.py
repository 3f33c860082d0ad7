"""Settings of engines behind servers: every way to give them, one sentence per mistake, and no key anywhere."""

from __future__ import annotations

import argparse
import json
import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

import april
from april.config.engines import OpenAIEngineConfig, ServerEngineConfig, SglangEngineConfig, VllmEngineConfig
from april.doctor.examine import Patience
from april.doctor.run import examine
from april.engines.http.server_probe import client_of

SMALL: dict[str, Any] = {"rollout_batch_size": 8, "max_response_len": 99}
NEEDED = ["--rollout-batch-size", "8", "--max-response-len", "99"]
URLS = ("http://127.0.0.1:8000", "http://127.0.0.1:8001")
CANARY = "sk-canary-5f3a9c"


def from_flags(*typed: str) -> april.Config:
    parser = april.add_april_arguments(argparse.ArgumentParser(prog="train"))
    return april.config_from_arguments(parser.parse_args([*NEEDED, *typed]))


def sentence_for(engine: Any) -> str:
    with pytest.raises(april.ConfigError) as caught:
        april.Config(**SMALL, engine=engine)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------- every way to give them


@pytest.mark.parametrize("kind", ["vllm", "sglang", "openai"])
def test_one_address_or_several_from_every_source(kind: str, tmp_path: Path) -> None:
    """A word or a list; keywords, OmegaConf, YAML and flags give the same frozen configuration."""
    for urls in (URLS[0], [URLS[0] + "/"], list(URLS)):
        values = {**SMALL, "engine": {"kind": kind, "urls": urls}}
        file = tmp_path / "april.yaml"
        file.write_text(yaml.safe_dump(values), "utf-8")
        typed = [urls] if isinstance(urls, str) else urls
        expected = URLS if len(typed) == 2 else URLS[:1]

        config = april.Config(**values)

        assert isinstance(config.engine, ServerEngineConfig)
        assert config.engine.kind == kind  # type: ignore[attr-defined]
        assert config.engine.urls == expected
        others = [
            april.Config.from_mapping(OmegaConf.create(values)),
            april.Config.from_yaml(file),
            from_flags("--engine-kind", kind, "--engine-urls", *typed),
        ]
        assert all(other == config and hash(other) == hash(config) for other in others)


def test_every_setting_of_a_server_but_its_key_is_a_flag() -> None:
    """Numbers, words and lists; the key is none, as command lines are seen by everybody on the machine."""
    config = from_flags(
        "--engine-kind", "vllm", "--engine-urls", *URLS, "--engine-api-key-env", "KEY", "--engine-max-in-flight", "64",
        "--max-in-flight", "100", "--engine-max-token-loss", "0", "--engine-vocab-size", "512", "--engine-max-len",
        "4096", "--engine-eos-token-ids", "2", "3", "--engine-logprobs", "processed", "--engine-connect-timeout-s",
        "2.5", "--engine-probe-timeout-s", "20", "--engine-model", "tiny",
    )  # fmt: skip

    assert config.max_in_flight == 100
    assert config.engine == VllmEngineConfig(
        urls=URLS, api_key_env="KEY", max_in_flight=64, max_token_loss=0, vocab_size=512, max_len=4096,
        eos_token_ids=(2, 3), logprobs="processed", connect_timeout_s=2.5, probe_timeout_s=20, model="tiny",
    )  # fmt: skip
    given = {name for name in VllmEngineConfig.model_fields if getattr(config.engine, name) is not None}
    assert given == set(VllmEngineConfig.model_fields) - {"api_key"}
    router = from_flags("--engine-kind", "sglang", "--engine-urls", URLS[0], "--engine-router", URLS[1])
    assert router.engine == SglangEngineConfig(urls=URLS[:1], router=URLS[1])
    parser = april.add_april_arguments(argparse.ArgumentParser())
    assert "--engine-api-key " not in parser.format_help()


def test_both_limits_on_requests_in_flight_are_told_apart() -> None:
    """One is over all engines, the other for one server; each says so and names no default of the other."""
    text = " ".join(april.add_april_arguments(argparse.ArgumentParser()).format_help().split())
    assert "--max-in-flight INT|auto Samples generated at the same time, on all engines together." in text
    assert "Most requests at one server at the same time, within the max_in_flight of all servers together." in text


# ---------------------------------------------------------------- mistakes

REQUIRED = "the addresses of the servers, such as http://127.0.0.1:8000"
LOOKS = "an engine's URL must look like http://host:port, got"
ONE = {"kind": "vllm", "urls": URLS[0]}
MISTAKES: list[tuple[Any, str]] = [
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
        "router",
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


@pytest.mark.parametrize(("engine", "sentence"), MISTAKES, ids=lambda x: str(x)[:50])
def test_one_sentence_per_mistake(engine: Any, sentence: str) -> None:
    """Where, what is wrong, what to write."""
    assert sentence_for(engine) == sentence


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
    with pytest.raises(april.ConfigError) as caught:
        from_flags(*typed)
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
        from_flags("--engine-kind", "vllm", "--engine-urls", URLS[0], url)
    error = capsys.readouterr().err
    assert CANARY not in error
    assert error.strip().splitlines()[-1] == f"train: error: argument --engine-urls: {LOOKS} {shown}"


# ---------------------------------------------------------------- keys


def test_a_key_is_in_no_text_of_the_configuration(caplog: pytest.LogCaptureFixture) -> None:
    """repr, str, JSON, dumps and logs show stars; the engine's client gets the key itself."""
    config = april.Config(**SMALL, engine={"kind": "vllm", "urls": URLS, "api_key": CANARY})
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
@pytest.mark.parametrize("source", ["keywords", "omegaconf", "yaml", "file of flags"])
def test_a_key_is_in_no_sentence(engine: Any, source: str, tmp_path: Path) -> None:
    """Whatever else is wrong beside it, or with it, and wherever it stands."""
    values = {**SMALL, "engine": engine}
    file = tmp_path / "april.yaml"
    file.write_text(json.dumps(values), "utf-8")
    load: Callable[[], april.Config] = {
        "keywords": lambda: april.Config(**values),
        "omegaconf": lambda: april.Config.from_mapping(OmegaConf.create(values)),
        "yaml": lambda: april.Config.from_yaml(file),
        "file of flags": lambda: from_flags("--april-config", str(file)),
    }[source]
    with pytest.raises(april.ConfigError) as caught:
        load()
    assert CANARY not in "".join(traceback.format_exception(caught.value))


def test_a_broken_file_does_not_show_its_lines(tmp_path: Path) -> None:
    """The sentence says what is wrong and in which line, not what stands there."""
    file = tmp_path / "april.yaml"
    file.write_text(f'engine:\n  kind: vllm\n  api_key: "{CANARY}\n', "utf-8")
    with pytest.raises(april.ConfigError) as caught:
        april.Config.from_yaml(file)
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
    with pytest.raises(april.ConfigError, match=r"engine\.api_key: the key of the server has characters"):
        april.Config(**SMALL, engine={"kind": kind, "urls": URLS, "api_key": key})
    if "\x00" in key:
        return  # no environment can hold it either
    monkeypatch.setenv("KEY_OF_A_TEST", key)
    config = april.Config(**SMALL, engine={"kind": kind, "urls": URLS, "api_key_env": "KEY_OF_A_TEST"})
    assert isinstance(config.engine, ServerEngineConfig)
    with pytest.raises(april.ConfigError, match="the key of the server") as caught:
        client_of(URLS[0], config.engine)
    assert CANARY not in str(caught.value)
    with pytest.raises(april.ConfigError, match="the key of the server"):
        examine([URLS[0]], None, "KEY_OF_A_TEST", Patience())
