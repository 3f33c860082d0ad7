"""``python -m tests.real_engines.benchmark vllm``: a server of that kind, and april's schedules on it.

The server is started with a model that has no end-of-sequence token, ``benchmarks.real_engines`` is run against it, and
the server is stopped. Needs the machine for itself, and some ten minutes.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

import typer

from tests.real_engines.commands import sglang_server, vllm_server
from tests.real_engines.environments import ROOT, CannotInstall
from tests.real_engines.models import CONTEXT, make_models
from tests.real_engines.servers import ServerFailed, free_ports, running, until_ready

IN_FLIGHT = 64


def main(
    kind: Annotated[str, typer.Argument(help="vllm or sglang")],
    steps: Annotated[int, typer.Option(min=1, help="Counted steps of each arm.")] = 64,
) -> None:
    """The table goes to the terminal, everything else to runs/real_engines/KIND.json."""
    out = ROOT / "runs" / "real_engines"
    out.mkdir(parents=True, exist_ok=True)
    models = make_models(out / "models", eos=False)
    (port,) = free_ports(1)
    log = out / f"{kind}.log"
    try:
        if kind == "sglang":
            server = sglang_server(kind, models["first"], port, log, context=CONTEXT, in_flight=IN_FLIGHT)
        elif kind == "vllm":
            server = vllm_server(
                kind, models["first"], port, log, open_routes=True, context=CONTEXT, in_flight=IN_FLIGHT
            )
        else:
            raise typer.BadParameter(f"there are servers of kind vllm and sglang, not of kind {kind}")
        with running([server]):
            until_ready([server])
            command = [
                sys.executable, "-m", "benchmarks.real_engines", kind, server.url, "--steps", str(steps),
                "--weights", str(models["first"]), str(models["second"]), "--json", str(out / f"{kind}.json"),
            ]  # fmt: skip
            code = subprocess.run(command, check=False, cwd=ROOT).returncode
    except (CannotInstall, ServerFailed) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    raise typer.Exit(code)


if __name__ == "__main__":
    typer.run(main)
