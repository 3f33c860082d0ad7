"""``make demo-vllm``, ``make demo-sglang``: start a server with the demo's model, run the demo on it, stop it."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from april.demo.served_model import write_model
from april.demo.settings import DemoSettings
from april.demo.stage import MAX_LEN
from april.demo.warmup import build_model
from tests.real_engines.commands import sglang_server, vllm_server
from tests.real_engines.environments import ROOT, CannotInstall
from tests.real_engines.servers import Server, ServerFailed, free_ports, running, until_ready

CONTEXT = 512
assert CONTEXT >= MAX_LEN, "the demo's longest response must fit"


def main(kind: Annotated[str, typer.Argument(help="vllm or sglang")]) -> None:
    """Every option of the demo has the default that it has on a server."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that the server is stopped then, too
    out = ROOT / "runs" / f"demo-{kind}"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    # its weights are replaced before the first token; what counts is the shape
    write_model(build_model(0, for_servers=True), out / "model")
    try:
        server = _server(kind, out, DemoSettings().slots)
        with running([server]):
            until_ready([server])
            command = [sys.executable, "-m", "april", "demo", "--engine", kind, "--url", server.url, "--out", str(out)]
            done = subprocess.run(command, check=False)
            log = server.last_lines()
    except (CannotInstall, ServerFailed) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    if done.returncode:
        print(f"the end of the server's log:\n{log}", file=sys.stderr)
    raise typer.Exit(done.returncode)


def _server(kind: str, out: Path, slots: int) -> Server:
    (port,) = free_ports(1)
    if kind == "sglang":
        return sglang_server(kind, out / "model", port, out / "server.log", context=CONTEXT, in_flight=slots)
    if kind == "vllm":
        return vllm_server(
            kind, out / "model", port, out / "server.log", open_routes=True, context=CONTEXT, in_flight=slots
        )
    raise typer.BadParameter(f"the demo runs on vllm or sglang, not on {kind}")


if __name__ == "__main__":
    typer.run(main)
