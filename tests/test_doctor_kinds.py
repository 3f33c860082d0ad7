"""``april doctor`` against fake servers that speak as the real ones do: each is known, probed, and left as it was."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from april.doctor.examine import Patience, examine_urls
from april.doctor.findings import Level, Report, Verdict
from april.testing.fake_sglang_server import FakeSglangServer


def report_of(server: Any) -> Report:
    """Of one fake server, on the loop that it lives on."""

    async def program() -> Report:
        url = await server.start()
        try:
            return await examine_urls([url], None, Patience())
        finally:
            await server.close()

    return asyncio.run(program())


def limits(report: Report) -> list[str]:
    """Subjects of what is not as it should be."""
    return [f.subject for s in report.servers for f in s.findings if f.level in (Level.LIMITED, Level.MISSING)]


@pytest.mark.parametrize(
    ("lacks", "verdict", "limited", "flags"),
    [
        ({}, Verdict.EXACT, [], ["--enable-deterministic-inference"]),
        ({"incremental": False}, Verdict.LIMITED, ["if it dies"], ["--incremental-streaming-output"]),
        ({"spans": False}, Verdict.EXACT, [], []),
        ({"loads": False}, Verdict.EXACT, [], []),
        ({"logprobs": "raw"}, Verdict.LIMITED, ["log-probabilities"], []),
    ],
    ids=str,
)
def test_sglang(lacks: dict[str, Any], verdict: Verdict, limited: Sequence[str], flags: Sequence[str]) -> None:
    """With everything, and without one thing each; nothing forbidden is asked, and nothing is left running."""
    server = FakeSglangServer(**lacks)

    report = report_of(server)

    (found,) = report.servers
    assert found.kind == "sglang"
    assert report.verdict is verdict
    assert limits(report) == limited
    assert set(flags) <= set(found.flags)
    # always: seeds, and EOS of a model whose files are elsewhere
    assert (len(found.changes) > 2) is bool(lacks)
    assert report.engine_settings == f"engine: {{kind: sglang, urls: [{found.url}]}}"
    assert server.violations == []
    assert (server.updates, server.aborts, server.pause_mode) == ([], [], None)


def test_sglang_that_is_paused() -> None:
    """Found before a request is made that would wait for ever; it stays paused."""
    server = FakeSglangServer()
    server.pause_mode = "abort"

    report = report_of(server)

    assert limits(report) == ["paused"]
    assert server.runs == []
    assert server.pause_mode == "abort"
