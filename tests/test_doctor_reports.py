"""What ``april doctor`` makes of what servers offer: verdicts, comparisons, configuration, text, JSON, exit codes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from raw_servers import Answer, http, raw_server
from typer.testing import CliRunner

import april
from april.cli import app
from april.core.engine_limits import Limit, LimitCode
from april.core.sampling import LogprobKind
from april.doctor import examine
from april.doctor.examine import TimeLimits, examine_config, examine_urls
from april.doctor.findings import Level, Report, Verdict, abilities, verdict_of
from april.engines.http.server_probe import ServerFacts
from april.engines.protocol import AbortMeans, Capabilities, OnWeightUpdate

GOOD = Capabilities(
    logprob_kind=LogprobKind.TEMPERATURE, vocab_size=512, max_context=4096, eos_token_ids=(2,), max_in_flight=64,
    updates_from_disk=True,
    in_flight_updates=(OnWeightUpdate.KEEP, OnWeightUpdate.RECOMPUTE),
)  # fmt: skip
WELL = ServerFacts(url="", model="tiny", software="0.32.0", label="0.0", capabilities=GOOD)
"""Of a server from which nothing is missing."""
RAW = Limit(
    LimitCode.RAW_LOGPROBS, "right only at temperature 1", "start the server with --logprobs-mode processed_logprobs",
    ("--logprobs-mode processed_logprobs",),
)  # fmt: skip
SMALL: dict[str, Any] = {"rollout_batch_size": 4, "max_response_len": 100}
PATIENT = TimeLimits(60.0, 60.0)
"""Nothing depends on how fast this machine is."""


def limit(code: LimitCode) -> Limit:
    """Of a server that can be mended."""
    return Limit(code, "It does not", "mend it")


def vllm_like(path: str) -> bytes:
    models = {"data": [{"id": "tiny", "owned_by": "vllm"}]}
    return {"/version": http(200, {"version": "0.32.0"}), "/v1/models": http(200, models)}.get(path, http(404))


def sglang_like(path: str) -> bytes:
    return {"/model_info": http(200, {"model_path": "tiny"}), "/ready": http(200)}.get(path, http(404))


@pytest.fixture
def servers() -> Iterator[Callable[[Answer], str]]:
    """Start servers that are closed after the test; returns their addresses."""
    with ExitStack() as stack:
        yield lambda answer: stack.enter_context(raw_server(answer)).url


@pytest.fixture
def offers(monkeypatch: pytest.MonkeyPatch) -> dict[str, ServerFacts]:
    """What the probe of each address says; the default is a good vLLM server."""
    said: dict[str, ServerFacts] = {}

    async def probe(client: Any, config: Any) -> ServerFacts:
        return said.get(client.url, WELL)

    monkeypatch.setattr(examine, "probe", probe)
    return said


def of_config(engine: dict[str, Any], **changes: Any) -> Report:
    return asyncio.run(examine_config(april.Config(**{**SMALL, **changes}, engine=engine), PATIENT))


def sentences(report: Report) -> list[str]:
    return [f.sentence for f in report.together if f.level is not Level.OK]


# ---------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    ("change", "subject", "level"),
    [
        ({}, "abort", Level.OK),
        ({"abort_means": AbortMeans.PAUSE}, "abort", Level.LIMITED),
        ({"abort_means": AbortMeans.CLOSE}, "abort", Level.LIMITED),
        ({"returns_partials": False}, "abort", Level.LIMITED),
        ({"version_spans": False}, "versions", Level.OK),
        ({"logprob_kind": LogprobKind.PROCESSED}, "log-probabilities", Level.OK),
        ({"logprob_kind": LogprobKind.RAW}, "log-probabilities", Level.LIMITED),
        ({"logprob_kind": LogprobKind.UNKNOWN}, "log-probabilities", Level.LIMITED),
        ({"updates_from_disk": False}, "new weights", Level.LIMITED),
        ({"streams": False}, "if it dies", Level.REMARK),
        ({"in_flight_updates": ()}, "in flight", Level.REMARK),
        ({"honours_seeds": False}, "seeds", Level.REMARK),
        ({"max_in_flight": None}, "size", Level.OK),
        ({"eos_token_ids": ()}, "ends", Level.LIMITED),
        ({"limits": (limit(LimitCode.CUMULATIVE_STREAMS),)}, "abort", Level.LIMITED),
        ({"limits": (limit(LimitCode.OTHER),)}, "seeds", Level.OK),
        ({"verifies_weights": False}, "versions", Level.LIMITED),
        # what no capability shows, such as copies behind one address, is one more finding, by the code alone
        ({"limits": (limit(LimitCode.SEVERAL_COPIES),)}, "copies", Level.LIMITED),
        ({"limits": (limit(LimitCode.SPECULATION),)}, "speculation", Level.LIMITED),
        ({"limits": (limit(LimitCode.CHUNKED_PREFILL),)}, "chunks", Level.LIMITED),
    ],
)
def test_each_capability_has_its_line(change: dict[str, Any], subject: str, level: Level) -> None:
    """One finding per subject, never less and never twice; seeds and streams do not touch exactness."""
    found = abilities(replace(GOOD, **change))

    usual = [f.subject for f in abilities(GOOD)]
    assert [f.subject for f in found if f.subject in usual] == usual
    (finding,) = [f for f in found if f.subject == subject]
    assert finding.level is level
    assert {f.level for f in found if f.subject != subject} == {Level.OK}
    assert verdict_of(found) is (Verdict.LIMITED if level is Level.LIMITED else Verdict.EXACT)
    assert all(bool(f.promise) is bool(f.advice) is (f.level is Level.LIMITED) for f in found)
    assert subject in usual or finding.advice == "mend it"


# ---------------------------------------------------------------- several servers, and the configuration


def test_servers_that_differ(servers: Any, offers: dict[str, ServerFacts]) -> None:
    """What must be equal is refused, what had better be is a limit, what will be is a remark."""
    one, two = servers(vllm_like), servers(vllm_like)
    cases = [
        (replace(WELL, capabilities=replace(GOOD, vocab_size=1024)), "vocabulary: 512", Verdict.UNUSABLE),
        (replace(WELL, model="other"), "model: tiny", Verdict.LIMITED),
        (replace(WELL, software="0.31.0"), "software version: 0.32.0", Verdict.LIMITED),
    ]
    for offer, words, verdict in cases:
        offers[two] = offer
        report = asyncio.run(examine_urls([one, two], None, PATIENT))
        (sentence,) = sentences(report)
        assert f"the servers differ in their {words} ({one}), " in sentence
        assert report.verdict is verdict
        assert len(report.not_promised) == (verdict is Verdict.LIMITED)
        assert all(report.not_promised)
    offers.clear()
    report = asyncio.run(examine_urls([one, two], None, PATIENT))
    assert (report.together, report.verdict) == ([], Verdict.EXACT)
    assert report.engine_settings == f"engine: {{kind: vllm, urls: [{one}, {two}]}}"


@pytest.mark.parametrize(
    ("change", "settings"),
    [
        ({"logprob_kind": LogprobKind.RAW}, {"sampling": {"temperature": 0.7}}),
        ({"logprob_kind": LogprobKind.UNKNOWN}, {"sampling": {"temperature": 0.7}}),
        ({"max_context": 100}, {}),
        ({"returns_partials": False}, {"over_sampling_batch_size": 8}),
        ({}, {"sampling": {"stop_token_ids": [512]}}),
    ],
)
def test_the_configuration_is_held_against_the_servers(
    change: dict[str, Any], settings: dict[str, Any], servers: Any, offers: dict[str, ServerFacts]
) -> None:
    """The very sentence with which the scheduler would refuse; without the setting the server is usable."""
    url = servers(vllm_like)
    capabilities = replace(GOOD, **change)
    offers[url] = replace(WELL, capabilities=capabilities)
    config = april.Config(**SMALL, **settings)

    class Engine:
        name = url.removeprefix("http://")

        def __init__(self) -> None:
            self.capabilities = capabilities

    report = of_config({"kind": "vllm", "urls": url}, **settings)

    with pytest.raises(april.ConfigError) as refusal:
        april.RolloutScheduler(config, prompts=[[1]], engines=[Engine()])  # type: ignore[list-item]
    assert sentences(report) == [str(refusal.value)]
    assert report.verdict is Verdict.UNUSABLE


def test_a_router_and_its_workers(servers: Any, offers: dict[str, ServerFacts]) -> None:
    """The router's list must be that of engine.urls: a worker more could not be aborted, one less gets no requests."""
    one, two = servers(sglang_like), servers(sglang_like)
    listed: list[str] = []
    router = servers(
        lambda path: http(200, {"workers": [{"url": u} for u in listed]}) if path == "/workers" else http(404)
    )
    engine = {"kind": "sglang", "urls": [one, two], "router": router}

    listed[:] = [one, two + "/"]
    report = of_config(engine)
    assert report.verdict is Verdict.EXACT
    assert report.servers[-1].findings[0].sentence.startswith("the router's workers are those of engine.urls")
    listed[:] = [one, two, "http://10.0.0.9:1"]
    assert "sends requests to http://10.0.0.9:1, which is missing in engine.urls" in only(of_config(engine))
    listed[:] = [one]
    assert f"engine.urls contains {two}, which the router {router} does not have" in only(of_config(engine))
    assert f"{one} has no /workers; it must be an sglang-router" in only(of_config({**engine, "router": one}))


def only(report: Report) -> str:
    """The one thing that makes it unusable."""
    assert report.verdict is Verdict.UNUSABLE
    (finding,) = [f for server in report.servers for f in server.findings if f.level is Level.MISSING]
    return finding.sentence


# ---------------------------------------------------------------- the command


def call(*arguments: str, **environment: str) -> tuple[int, str]:
    """Exit code and all output, with line ends taken off."""
    env = {"COLUMNS": "100", "NO_COLOR": "1", **environment}
    result = CliRunner().invoke(app, ["doctor", *arguments], env=env)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, re.sub(r"[│\s]+", " ", result.output)


def test_the_verdict_is_the_first_line(servers: Any, offers: dict[str, ServerFacts]) -> None:
    """Then what it can, what to change, and the settings to copy; exit code 0."""
    url = servers(vllm_like)
    why = replace(RAW, consequence="is raw", server=url)
    raw = replace(GOOD, logprob_kind=LogprobKind.RAW, limits=(why,))
    offers[url] = replace(WELL, capabilities=raw)

    code, text = call(url)

    assert code == 0
    assert text.startswith(
        "usable, with limits: april can use this server, but does not promise that "
        "- log-probabilities are right at temperatures other than 1 "
        f"{url} vllm 0.32.0 model tiny ok abort each"
    )
    assert "limit log-probabilities It is raw" in text
    assert "-> start the server with --logprobs-mode processed_logprobs" in text
    assert text.count("is raw") == 1
    assert "Flags and variables that exact results need: --logprobs-mode processed_logprobs" in text
    assert text.rstrip().endswith(f"In april's configuration: engine: {{kind: vllm, urls: [{url}]}}")


def test_json_says_the_same(servers: Any, offers: dict[str, ServerFacts]) -> None:
    """Machine-readable, nothing else on the output; usable and exit code agree."""
    good, other = servers(vllm_like), servers(lambda path: http(404))
    why = Limit(LimitCode.OTHER, "has no spans", "add it", ("--enable-scale-out",), server=good)
    offers[good] = replace(WELL, capabilities=replace(GOOD, limits=(why,)))

    code, text = call(good, "--json")
    report = json.loads(text)
    assert (code, report["usable"], report["verdict"]) == (0, True, "exact")
    (server,) = report["servers"]
    told = {"url": good, "kind": "vllm", "version": "0.32.0", "model": "tiny", "verdict": "exact"}
    assert told.items() <= server.items()
    assert (server["flags"], report["not_promised"]) == ([], [])
    assert server["limits"] == [
        {
            "code": "other", "consequence": "has no spans", "remedy": "add it",
            "flags": ["--enable-scale-out"], "server": good,
        }
    ]  # fmt: skip
    assert {"subject": "abort", "level": "ok"}.items() <= server["findings"][0].items()
    assert 0 <= report["seconds"] < 15

    code, text = call(good, other, "--json")
    report = json.loads(text)
    assert (code, report["usable"], report["verdict"]) == (1, False, "not usable")
    assert [s["verdict"] for s in report["servers"]] == ["exact", "not usable"]


def test_a_configuration_file(servers: Any, offers: dict[str, ServerFacts], tmp_path: Path) -> None:
    """--config examines the servers that it names; keys come from the environment and are shown nowhere."""
    file = tmp_path / "april.yaml"
    url = servers(vllm_like)
    engine = {"kind": "vllm", "urls": [url], "api_key_env": "APRIL_TEST_KEY"}
    file.write_text(yaml.safe_dump({**SMALL, "engine": engine}), "utf-8")

    code, text = call("--config", str(file))
    assert code == 1
    assert "the environment variable APRIL_TEST_KEY is not set" in text
    for arguments in (["--config", str(file)], ["--config", str(file), "--json"]):
        code, text = call(*arguments, APRIL_TEST_KEY="sk-canary")
        assert code == 0
        assert "sk-canary" not in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give servers (april doctor http://127.0.0.1:8000) or a configuration (--config april.yaml)"),
        (["http://h:1", "--config", "x.yaml"], "give servers (april doctor http://127.0.0.1:8000) or a configuration"),
        (["h:1"], "an engine's URL must look like http://host:port, got 'h:1'"),
        (["http://user:sk-canary@h:1"], "an engine's URL must look like http://host:port, got 'h:1'"),
        (["--config", "nowhere.yaml"], "cannot read nowhere.yaml: No such file"),
        (["http://h:1", "--api-key-env", "APRIL_NO_KEY"], "the environment variable APRIL_NO_KEY is not set"),
        (["http://h:1", "--api-key-env", "sk-canary"], "the variable that holds the key, not the key itself"),
        (["--config", "x.yaml", "--api-key-env", "KEY"], "in a configuration, set engine.api_key_env"),
        (["http://h:1", "--timeout", "16"], "less than or equal to 15"),
    ],
)
def test_a_wrong_command_line(arguments: list[str], words: str) -> None:
    """Exit code 2 and one sentence, before anything is asked."""
    code, text = call(*arguments)
    assert code == 2
    assert words in text
    assert "sk-canary" not in text


def test_a_key_of_a_server_named_by_its_address(servers: Any, offers: dict[str, ServerFacts]) -> None:
    """Sent to that server, from the environment, and shown nowhere."""
    with raw_server(vllm_like) as server:
        code, text = call(server.url, "--api-key-env", "APRIL_TEST_KEY", APRIL_TEST_KEY="sk-canary")
        assert code == 0
        assert all("Authorization: Bearer sk-canary" in head for head in server.heads)
    assert "sk-canary" not in text
