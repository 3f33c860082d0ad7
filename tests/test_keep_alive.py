"""Servers that april starts itself keep idle connections for longer than a training step, whoever asks them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from real_engines.servers import Server

from benchmarks.slime_server import TimedSglangServer

ROOT = Path(__file__).parent.parent
STEP_S = 1_800
"""No training step of anybody's takes longer."""


def test_real_servers_are_started_with_it(tmp_path: Path) -> None:
    """In the environment of the process, as the servers read it; a test may say something else."""
    code = "import os; print(*(os.environ[f'{k}_KEEP_ALIVE'] for k in ('VLLM_HTTP_TIMEOUT', 'SGLANG_TIMEOUT')))"
    for more, expected in (({}, "3600 3600\n"), ({"SGLANG_TIMEOUT_KEEP_ALIVE": "5"}, "3600 5\n")):
        server = Server("said", [sys.executable, "-c", code], 0, tmp_path / "log", "/", more)
        server.log.unlink(missing_ok=True)
        server.start()
        assert isinstance(server._process, subprocess.Popen)
        server._process.wait(60)
        assert server.log.read_text("utf-8") == expected


def test_the_timed_server_of_benchmarks_has_it() -> None:
    assert TimedSglangServer._runner_options(TimedSglangServer.__new__(TimedSglangServer))["keepalive_timeout"] > STEP_S


@pytest.mark.parametrize("page", ["docs/servers.md", "examples/trl/train.sh", "examples/slime/train.sh"])
def test_what_is_recommended_is_as_long(page: str) -> None:
    found = re.findall(r'TIMEOUT_KEEP_ALIVE"?[=:] ?"?(\d+)', (ROOT / page).read_text("utf-8"))
    assert found
    assert all(int(seconds) > STEP_S for seconds in found)
