"""The fake server as a process of its own, so that its CPU is not counted as the client's."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec

from benchmarks.generate_wire import ServerStats

ROOT = Path(__file__).resolve().parent.parent


@contextlib.contextmanager
def server_process(release_at: int, response_tokens: int) -> Iterator[str]:
    """Start the server, yield its URL, end it; raises RuntimeError when it does not start."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.fake_generate_server",
        "--port=0",
        f"--release-at={release_at}",
        f"--response-tokens={response_tokens}",
        "--with-parent",
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"the fake server did not start (exit status {process.wait()}); see its stderr")
            yield f"http://127.0.0.1:{json.loads(line)['port']}"
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()


def server_stats(url: str) -> ServerStats:
    """What the server counted; raises OSError when it does not answer within 30 s."""
    with urllib.request.urlopen(f"{url}/stats", timeout=30.0) as reply:  # noqa: S310 - our own loopback server
        return msgspec.json.decode(reply.read(), type=ServerStats)
