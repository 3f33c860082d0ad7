"""``april doctor`` against fake servers that speak as the real ones do: each is known, probed, and left as it was."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_servers.images import FakeImages
from fake_servers.openai import FakeOpenAIServer
from fake_servers.sglang import FakeSglangServer
from fake_servers.vllm import FakeVllmServer
from raw_servers import Answer, http, raw_server
from server_fixtures import listening

import april
from april.core.sampling import LogprobKind
from april.doctor.examine import TimeLimits, examine_config, examine_urls
from april.doctor.findings import Level, Report, Verdict
from april.engines.openai.wire import TokenShape

PATIENT = TimeLimits(60.0, 60.0, 60.0)
"""Nothing depends on how fast this machine is."""


def report_of(server: Any, temperature: float = 1.0, **settings: Any) -> Report:
    """Of one fake server, on the loop that it lives on; as part of a configuration if ``settings`` of it are given."""

    async def program() -> Report:
        async with asyncio.timeout(60), listening(server) as url:
            if not settings:
                return await examine_urls([url], None, PATIENT)
            config = april.Config(
                rollout_batch_size=4, over_sampling_batch_size=8, max_response_len=99,
                sampling={"temperature": temperature}, engine={"urls": [url], **settings},
            )  # fmt: skip
            return await examine_config(config, PATIENT)

    return asyncio.run(program())


def limits(report: Report) -> list[str]:
    return [f.subject for s in report.servers for f in s.findings if f.level in (Level.LIMITED, Level.MISSING)]


@pytest.mark.parametrize(
    ("lacks", "verdict", "limited", "flags"),
    [
        ({}, Verdict.EXACT, [], []),
        ({"incremental": False}, Verdict.LIMITED, ["abort"], ["--incremental-streaming-output"]),
        ({"spans": False}, Verdict.EXACT, [], []),
        ({"labels": False}, Verdict.LIMITED, ["versions"], []),
        ({"loads": False}, Verdict.EXACT, [], []),
        ({"intervals": False}, Verdict.EXACT, [], []),
        ({"logprobs": "raw"}, Verdict.EXACT, [], []),  # at temperature 1
    ],
    ids=str,
)
def test_sglang(lacks: dict[str, Any], verdict: Verdict, limited: Sequence[str], flags: Sequence[str]) -> None:
    """With everything, and without one thing each; nothing forbidden is asked, and nothing is left running."""
    server = FakeSglangServer(**lacks)

    report = report_of(server, kind="sglang", eos_token_ids=[2])

    (found,) = report.servers
    assert found.kind == "sglang"
    assert report.verdict is verdict
    assert limits(report) == limited
    assert found.flags == flags
    # always: seeds
    assert "--enable-deterministic-inference" in found.optional_flags
    assert (len(found.changes) > 1) is bool(lacks)
    assert server.violations == []
    assert (server.updates, server.aborts, server.pause_mode) == ([], [], None)


OPENAI: dict[str, Any] = {"kind": "openai", "vocab_size": 512, "eos_token_ids": [2], "max_len": 4096}


@pytest.mark.parametrize("shape", list(TokenShape))
@pytest.mark.parametrize("kind", [LogprobKind.RAW, LogprobKind.TEMPERATURE, LogprobKind.PROCESSED])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_openai(shape: TokenShape, kind: LogprobKind, temperature: float) -> None:
    """Usable within limits: it is stopped by closing streams, and the trainer hands the weights over."""
    report = report_of(FakeOpenAIServer(shape, kind=kind), temperature, **OPENAI)

    wrong = kind is LogprobKind.RAW and temperature != 1
    assert report.verdict is (Verdict.UNUSABLE if wrong else Verdict.LIMITED)
    assert limits(report) == ["abort", "versions", *["log-probabilities"] * wrong, "new weights"]
    assert [f.subject for f in report.together] == ["configuration"] * wrong


@pytest.mark.parametrize(
    ("server", "words"),
    [
        (FakeOpenAIServer(None), "returns no token ids with log-probabilities in any way that april knows"),
        (FakeOpenAIServer(strips=frozenset({2})), "leaves EOS (2) out"),
    ],
    ids=["text only", "no EOS"],
)
def test_openai_that_cannot_be_used(server: FakeOpenAIServer, words: str) -> None:
    """The probe's own sentence is the finding."""
    report = report_of(server, **OPENAI)

    assert report.verdict is Verdict.UNUSABLE
    assert words in report.servers[0].findings[0].sentence


PROCESSED = "processed_logprobs"
SENDING = ["--weight-transfer-config"]


def vllm_server(
    *, developer: bool, scale_out: bool, mode: str = "raw_logprobs", processes: int = 1, root: str = "nowhere",
    sends: bool = False,
) -> Answer:  # fmt: skip
    """The routes that the probe of a vLLM server asks, as vLLM 0.32 answers them with these flags."""
    config = {
        "model_config": {"logprobs_mode": mode}, "device_config": {"device": "cuda"},
        "scheduler_config": {"max_num_seqs": 128, "policy": "fcfs", "enable_chunked_prefill": True},
        "parallel_config": {"data_parallel_size": 1, "_api_process_count": processes},
        "weight_transfer_config": {"backend": "nccl"} if sends else None,
    }  # fmt: skip
    models = {"data": [{"id": "tiny", "owned_by": "vllm", "root": root, "max_model_len": 4096}]}
    answers = {"/version": http(200, {"version": "0.32.0"}), "/v1/models": http(200, models)}
    for route in ("/inference/v1/generate", "/inference/v1/abort_requests"):
        answers |= {route: http(405), f"POST {route}": http(400 if scale_out else 403)}
    if developer:
        answers |= {route: http(405) for route in ("/abort_requests", "/collective_rpc", "/pause", "/resume")}
        answers["/server_info?config_format=json"] = http(200, {"vllm_config": config})
        answers["/weight_info"] = http(200, {"weight_version": "default"})
        answers["/is_paused"] = http(200, {"is_paused": False})

    def answer(path: str) -> bytes:
        route, _, text = path.partition("\n")
        if route != "POST /v1/completions":
            return answers.get(route, http(404, {"detail": "Not Found"}))
        body = json.loads(text)
        if "logit_bias" in body:
            return http(400, {"error": {"message": "token_id(s) [2147483646] ... Vocabulary size: 512"}})
        narrow = mode == PROCESSED and body["temperature"] > 0
        logprobs = {"token_logprobs": [0.0 if narrow else -1.5]}
        return http(200, {"choices": [{"token_ids": [7], "logprobs": logprobs}]})

    return answer


@pytest.mark.parametrize(
    ("server", "verdict", "limited", "flags", "optional"),
    [
        (
            {"developer": False, "scale_out": False}, Verdict.LIMITED,
            ["abort", "versions", "log-probabilities", "new weights", "chunks"],
            ["VLLM_SERVER_DEV_MODE=1", "--logprobs-mode processed_logprobs"], ["--enable-scale-out"],
        ),
        (
            {"developer": False, "scale_out": True}, Verdict.LIMITED,
            ["versions", "log-probabilities", "new weights", "chunks"],
            ["VLLM_SERVER_DEV_MODE=1", "--logprobs-mode processed_logprobs"], [],
        ),
        (
            {"developer": True, "scale_out": True}, Verdict.LIMITED, ["log-probabilities"],
            ["--logprobs-mode processed_logprobs"], SENDING,
        ),
        (
            {"developer": True, "scale_out": True, "mode": PROCESSED, "processes": 2}, Verdict.LIMITED,
            ["abort"], ["--api-server-count 1"], SENDING,
        ),
        (
            {"developer": True, "scale_out": False, "mode": PROCESSED}, Verdict.EXACT, [], [],
            ["--enable-scale-out", *SENDING],
        ),
        ({"developer": True, "scale_out": True, "mode": PROCESSED}, Verdict.EXACT, [], [], SENDING),
        ({"developer": True, "scale_out": True, "mode": PROCESSED, "sends": True}, Verdict.EXACT, [], [], []),
    ],
    ids=["plain", "scale-out", "developer mode", "two processes", "no scale-out", "no transfers", "everything"],
)  # fmt: skip
def test_vllm(
    server: dict[str, Any], verdict: Verdict, limited: list[str], flags: list[str], optional: list[str], tmp_path: Path
) -> None:
    """From a server without any flag to one with all of them: each that is missing is named, and no other."""
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}', "utf-8")
    with raw_server(vllm_server(**server, root=str(tmp_path))) as serving_it:
        report = asyncio.run(examine_urls([serving_it.url], None, PATIENT))

    (found,) = report.servers
    assert (found.kind, found.version, found.model) == ("vllm", "0.32.0", "tiny")
    assert report.verdict is verdict
    assert limits(report) == limited
    assert (found.flags, found.optional_flags) == (flags, optional)
    changing = ("POST /pause", "POST /resume", "POST /abort_requests", "POST /collective_rpc", "POST /update")
    assert [path for path in serving_it.asked if path.startswith(changing)] == []


@pytest.mark.parametrize(
    ("options", "subject", "flag"),
    [
        ({"device": "cpu", "chunked_prefill": True}, "chunks", "--no-enable-chunked-prefill"),
        ({"copies": 2}, "copies", None),
        ({"speculation": {"method": "ngram", "num_speculative_tokens": 4}}, "speculation", None),
        ({"device": "cpu"}, "new weights", None),
    ],
    ids=["chunked prefill on a CPU", "data-parallel copies", "speculation", "tied embeddings on a CPU"],
)
@pytest.mark.parametrize("there", [True, False], ids=["there", "not there"])
def test_vllm_with_a_trap(options: dict[str, Any], subject: str, flag: str | None, there: bool, tmp_path: Path) -> None:
    """A server with every flag is not exact with one of them, and is without; what it shows tells them apart."""
    tied = subject == "new weights" and there
    files = {"eos_token_id": 2, "vocab_size": 512, "tie_word_embeddings": tied}
    (tmp_path / "config.json").write_text(json.dumps(files), "utf-8")
    harmless = {"device": "cpu"} if "device" in options else {}
    server = FakeVllmServer(root=str(tmp_path), **(options if there else harmless))

    report = report_of(server)

    assert report.verdict is (Verdict.LIMITED if there else Verdict.EXACT)
    assert limits(report) == [subject] * there
    assert (flag in report.servers[0].flags) == (there and flag is not None)


def images_of(report: Report) -> list[tuple[Level, str]]:
    return [(f.level, f.sentence) for s in report.servers for f in s.findings if f.subject == "images"]


def test_images(tmp_path: Path) -> None:
    """Of servers that take them, of those that could, with what is missing, and not a word of text models."""
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": {}, "eos_token_id": 2}))
    root = str(tmp_path)
    for takes in (FakeVllmServer(images=FakeImages(), root=root), FakeSglangServer(images=FakeImages())):
        ((level, sentence),) = images_of(report_of(takes))
        assert level is Level.OK
        assert "never generates" in sentence
    for could, need in (
        (FakeVllmServer(images=FakeImages(), root=root, scale_out=False), "start the server with --enable-scale-out"),
        (FakeSglangServer(images=FakeImages(), names_images=False), "upgrade SGLang"),
    ):
        ((level, sentence),) = images_of(report_of(could))
        assert level is Level.REMARK
        assert sentence.endswith(need)
    assert not images_of(report_of(FakeSglangServer()))
