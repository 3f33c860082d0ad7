"""``april doctor`` where no engine can be used: every answer says what is wrong and what to do, within its time."""

from __future__ import annotations

import asyncio
import errno
import socket
from dataclasses import replace
from typing import Any

import pytest
from raw_servers import Answer, http, raw_server

from april.doctor import reach
from april.doctor.examine import TimeLimits, examine_urls
from april.doctor.findings import Finding, Level, Report, ServerReport, Verdict

LONG = TimeLimits(60.0, 60.0)
"""For servers that answer: nothing depends on how fast this machine is."""
SHORT = replace(LONG, each_s=0.2)
"""For servers that answer nothing, however long one waits."""
MODELS = {"object": "list", "data": [{"id": "tiny", "owned_by": "vllm", "max_model_len": 4096}]}


def report_of(*urls: str, key: str | None = None, patience: TimeLimits = LONG) -> Report:
    return asyncio.run(examine_urls(urls, key, patience))


def only(report: Report) -> tuple[ServerReport, Finding]:
    """The server and the one finding about it: april cannot use it."""
    (server,) = report.servers
    (finding,) = server.findings
    assert finding.level is Level.MISSING
    assert finding.advice
    assert report.verdict is Verdict.UNUSABLE
    return server, finding


def examined(answer: Answer, *, key: str | None = None, patience: TimeLimits = LONG) -> tuple[ServerReport, Finding]:
    with raw_server(answer) as server:
        return only(report_of(server.url, key=key, patience=patience))


def routes(**said: Any) -> Answer:
    """Answers by route (``v1_models`` is /v1/models), all others with 404."""
    by_path = {"/" + name.replace("v1_", "v1/"): answer for name, answer in said.items()}
    return lambda path: by_path.get(path, http(404, {"detail": "Not Found"}))


# ---------------------------------------------------------------- not reached


def test_a_closed_port() -> None:
    """Nothing listens there: start it, or another port; the address was free a moment ago."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    server, finding = only(report_of(f"http://127.0.0.1:{port}"))

    assert server.flags == []
    assert finding.sentence == f"nothing listens on port {port} of 127.0.0.1"
    assert "start the server, or correct the port" in finding.advice


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "engine-0 does not resolve (Name or"),
        (OSError(errno.EHOSTUNREACH, "No route to host"), "no connection to port 9 of engine-0 (No route to host)"),
        (TimeoutError(), "engine-0 does not answer on port 9 within 60 s"),
    ],
    ids=["a wrong name", "switched off", "behind a firewall that swallows what comes"],
)
def test_a_machine_that_is_not_there(error: OSError, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence says what is the mistake."""

    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(reach.asyncio, "open_connection", fails)
    _, finding = only(report_of("http://engine-0:9"))
    assert sentence in finding.sentence


def test_https_before_a_server_without_it() -> None:
    """The advice says what may be wrong with https."""
    with raw_server(lambda path: http(200, MODELS)) as server:
        _, finding = only(report_of(server.url.replace("http:", "https:")))
    assert "does not speak HTTP (" in finding.sentence
    assert "if the server does not use TLS, the address must" in finding.advice


# ---------------------------------------------------------------- reached, but no engine


PAGE = b"<html><h1>nginx</h1></html>"
ROOT = "is this the right port? the address must be the server's root, without /v1"


@pytest.mark.parametrize(
    ("answer", "patience", "sentence", "advice"),
    [
        (None, SHORT, "{url} accepts connections but does not answer within 0.2 s", "look at its log"),
        (http(200, b"{", length=100), SHORT, "{url} accepts connections but does not answer within 0.2 s", "look at"),
        (None, replace(LONG, total_s=0.2), "{url} did not report its features within 0.2 s", "look at its log"),
        (http(404, PAGE, "Content-Type: text/html"), LONG, "a web server answers here, but not an inference", ROOT),
        (http(200, PAGE, "Content-Type: text/html"), LONG, "a web server answers here, but not an inference", ROOT),
        (http(503, b"Service Unavailable"), LONG, (
            "the server answers every request with 502, 503 or 504"
        ), "wait until"),
        (b"-ERR unknown command\r\n", LONG, "{url} does not speak HTTP", "is this the right port?"),
    ],
    ids=["silent", "half an answer", "no time", "404 page", "page for all", "proxy alone", "database"],
)
def test_the_same_answer_to_everything(answer: Any, patience: TimeLimits, sentence: str, advice: str) -> None:
    """Hung, drowned, another web server, a proxy whose server is down, no web server at all: each has its sentence."""
    server, finding = examined(lambda path: answer, patience=patience)
    assert finding.sentence.startswith(sentence.format(url=server.url))
    assert advice in finding.advice


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_not_followed(status: int) -> None:
    """The finding names where it leads; nothing is asked there, and no key sent."""
    with raw_server(lambda path: http(200, MODELS)) as elsewhere:
        location = f"{elsewhere.url}/v1/models"
        _, finding = examined(lambda path: http(status, b"", f"Location: {location}?token=secret"), key="sk-1")

        assert f"answered with a redirect ({status}) to {location}, which april does not follow" in finding.sentence
        assert "secret" not in finding.sentence
        assert elsewhere.asked == []


# ---------------------------------------------------------------- an engine, but not now, or not so


def test_a_key_is_wanted() -> None:
    """Everything is locked (SGLang), or all but the version (vLLM); with a wrong key the advice is another."""
    locked = http(401, {"error": "Unauthorized"})
    for answer, kind in (
        (lambda path: locked, "needs a key"),
        (routes(version=http(200, {"version": "0.32.0"}), v1_models=locked), "vllm"),
    ):
        server, finding = examined(answer)
        assert server.kind == kind
        assert finding.sentence == f"{server.url} requires a key (it answers 401 or 403)"
        assert "april doctor --api-key-env NAME" in finding.advice
        assert "engine.api_key_env: NAME" in finding.advice

        with raw_server(answer) as closed:
            server, finding = only(report_of(closed.url, key="sk-canary"))
            assert finding.sentence == f"{server.url} refuses the key"
            assert all("Authorization: Bearer sk-canary" in head for head in closed.heads)


VLLM = {"version": http(200, {"version": "0.32.0"}), "v1_models": http(200, MODELS)}
SGLANG = {"model_info": http(200, {"model_path": "some/model", "weight_version": "default"})}


@pytest.mark.parametrize(
    ("said", "words", "resume"),
    [
        (VLLM | {"is_paused": http(200, {"is_paused": True})}, "/is_paused says", "resume"),
        (VLLM | {"is_sleeping": http(200, {"is_sleeping": True})}, "/is_sleeping says", "resume"),
        # /health, which would block for 20 s, is not asked
        (SGLANG | {"ready": http(503), "health": None, "health_generate": None}, "paused, asleep or loading",
         "continue_generation -H 'Content-Type: application/json' -d"),
    ],
    ids=["vllm, paused", "vllm, asleep", "sglang"],
)  # fmt: skip
def test_a_server_that_is_paused(said: dict[str, Any], words: str, resume: str) -> None:
    """It takes requests and answers none: found at once, before any request is made."""
    with raw_server(routes(**said)) as server:
        _, finding = only(report_of(server.url))

    assert finding.subject == "paused"
    assert words in finding.sentence
    assert f"curl -X POST {server.url}/{resume}" in finding.advice
    assert all(head.startswith("GET ") for head in server.heads)
    assert not {"/health", "/health_generate", "/generate"} & set(server.asked)


def test_a_router_alone() -> None:
    """Its workers are listed, and the configuration that april needs is ready to copy."""
    workers = {"workers": [{"url": "http://10.0.0.1:30000/"}, {"url": "http://10.0.0.2:30000"}], "total": 2}
    with raw_server(routes(workers=http(200, workers), v1_models=http(200, MODELS))) as server:
        report = report_of(server.url)

    found, finding = only(report)
    assert found.kind == "sglang-router"
    assert "its workers: http://10.0.0.1:30000/, http://10.0.0.2:30000" in finding.sentence
    assert finding.advice == "give april the workers' addresses too, as seen from here"
    assert report.engine_settings == (
        f"engine: {{kind: sglang, router: {server.url}, urls: [http://10.0.0.1:30000, http://10.0.0.2:30000]}}"
    )
