"""The conformance suite on engines of another process: what they promise at home they promise behind a server, too."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conformance_subjects import embedded_subject, fake_subject
from served_process import ServedProcess

from april.config.engines import AprilEngineConfig
from april.engines.protocol import Engine
from april.engines.served.client import connect_april
from april.testing import conformance
from april.testing.conformance import Outcome, Report, Subject


def outcomes(report: Report, outcome: Outcome) -> set[str]:
    return {v.check for v in report.verdicts if v.outcome is outcome}


def of_processes(kind: str, base: Subject, interval_s: float, only: set[str] | None = None) -> Report:
    """The report on an engine in a process, with ``kill -9`` at the end."""
    process = ServedProcess(kind)
    url = process.wait()

    async def opened() -> Engine:
        config: Any = {"urls": (url,), "api_key": "key", "interval_s": interval_s}
        (engine,) = await connect_april(AprilEngineConfig(**config))
        return engine

    async def kill() -> None:
        process.process.kill()

    try:
        changes: dict[str, Any] = {"open": opened, "kill": kill, "patience_s": 60.0}
        checks = [check for check in conformance.CHECKS if only is None or check.name in only]
        return asyncio.run(conformance.run(replace(base, **changes), checks))
    finally:
        process.kill()


def test_the_fake_engine_of_another_process_keeps_every_promise() -> None:
    """All of them, with tokens handed over while they are made; the process is killed at the end."""
    report = of_processes("fake", fake_subject(long_tokens=400, aborts=200), 0.02)

    assert not report.failed, list(map(str, report.failed))
    no_model = {"logprobs", "logprobs_temperature", "logprobs_top_p", "attached_after_an_update"}
    assert outcomes(report, Outcome.NOT_TESTED) == no_model
    assert outcomes(report, Outcome.NOT_OFFERED) == {"adapter_versions", "sent_weights"}


IN_ONE_PIECE = {"budgets", "seeds", "version_exactness", "extras"}
WITH_A_MODEL = {"logprobs", "abort_running", "cut_and_resume", "version_exactness", "sent_weights", "update_under_way"}


def test_answers_in_one_piece_are_the_same() -> None:
    """Nothing is handed over before its end, and every promise that this concerns is kept."""
    report = of_processes("fake", fake_subject(long_tokens=120), 600.0, IN_ONE_PIECE)

    assert outcomes(report, Outcome.PASSED) == IN_ONE_PIECE, list(map(str, report.verdicts))


def test_the_embedded_engine_of_another_process_has_the_weights_that_it_was_given(tmp_path: Path) -> None:
    """From a directory and as tensors; log-probabilities are held to Hugging Face. The whole suite was run by hand."""
    pytest.importorskip("torch")
    report = of_processes("embedded", embedded_subject(tmp_path, in_flight=16), 0.02, WITH_A_MODEL)

    assert outcomes(report, Outcome.PASSED) == WITH_A_MODEL, list(map(str, report.verdicts))
    assert report.verdict("sent_weights").figures["responses changed"] == 6
    assert report.verdict("version_exactness").figures["responses changed"] == 6
