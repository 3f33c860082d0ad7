"""``python -m tests.real_engines.benchmark vllm``: a server of that kind, and april's schedules on it.

The server is started with a model that has no end-of-sequence token, ``benchmarks.real_engines`` and, if asked for,
``benchmarks.continuous`` are run against it, and the server is stopped.
Needs the machine for itself, and some ten minutes.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

import typer

from tests.real_engines.commands import server_of
from tests.real_engines.environments import ROOT
from tests.real_engines.models import CONTEXT, make_models
from tests.real_engines.servers import program, ready

IN_FLIGHT = 256
"""Room for requests; the schedules of real_engines need 64."""


def main(
    kind: Annotated[str, typer.Argument(help="vllm or sglang")],
    steps: Annotated[int, typer.Option(min=0, help="Counted steps of each arm; 0: no schedules.")] = 64,
    turns: Annotated[int, typer.Option(min=0, help="Turns of each schedule before a trainer that takes time.")] = 0,
    train: Annotated[float, typer.Option(min=0, help="Its time, in batches at the server's limit.")] = 1.0,
) -> None:
    """Tables go to the terminal, everything else to runs/real_engines/KIND.json and its like."""
    out = ROOT / "runs" / "real_engines"
    out.mkdir(parents=True, exist_ok=True)
    models = make_models(out / "models", eos=False)
    with program():
        server, code = server_of(kind, models["first"], out, context=CONTEXT, in_flight=IN_FLIGHT), 0
        with ready(server):
            if steps:
                code |= _run(
                    "real_engines", kind, server.url, "--steps", str(steps), "--weights", str(models["first"]),
                    str(models["second"]), "--json", str(out / f"{kind}.json"),
                )  # fmt: skip
            if turns:
                code |= _run(
                    "continuous", kind, server.url, "--turns", str(turns), "--train", str(train), "--weights",
                    str(models["first"]), str(models["second"]), "--json",
                    str(out / f"{kind}-continuous.json"),
                )  # fmt: skip
    raise typer.Exit(code)


def _run(benchmark: str, *arguments: str) -> int:
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", *arguments]
    return subprocess.run(command, check=False, cwd=ROOT).returncode


if __name__ == "__main__":
    typer.run(main)
