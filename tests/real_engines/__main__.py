"""``make test-engines``: install, start, put every engine to the test, print the verdicts, stop everything.

Writes into ``runs/engines``: a JSON report per engine, ``minutes.json`` and the logs of the servers.
Ends with status 1 if a promise is broken or a server does not start.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from april.errors import AprilError
from april.testing.conformance import Report
from tests.real_engines.commands import router_server, sglang_server, vllm_server
from tests.real_engines.environments import ROOT, SGLANG, VLLM, environment
from tests.real_engines.kill import kill_one
from tests.real_engines.models import CONTEXT, make_models
from tests.real_engines.servers import NotKept, Server, emptied, end, program, ready, running, until_ready
from tests.real_engines.suite import columns, test_column, test_in_process

IN_PROCESS = "vllm in process"
KILL = "kill -9"


class Clock:
    """Minutes that each part took."""

    def __init__(self) -> None:
        self.minutes: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Announce and time what is done inside."""
        print(f"== {name}", flush=True)
        began = time.monotonic()
        try:
            yield
        finally:
            took = (time.monotonic() - began) / 60
            self.minutes[name] = round(self.minutes.get(name, 0.0) + took, 2)


def main(
    only: Annotated[list[str] | None, typer.Option(help="Columns of the reports, 'vllm in process', 'kill'.")] = None,
    aborts: Annotated[int, typer.Option(min=1, help="Aborted requests per engine.")] = 1000,
    out: Annotated[Path, typer.Option(help="Where reports and logs go.")] = ROOT / "runs" / "engines",
) -> None:
    """vLLM over HTTP with and without developer routes and in process, SGLang, its router, and the OpenAI route."""
    emptied(out)
    clock = Clock()
    with program():
        reports, wrong = _everything(only, aborts, out.resolve(), clock)
    (out / "minutes.json").write_text(json.dumps(clock.minutes, indent=1) + "\n", "utf-8")
    print("minutes: " + ", ".join(f"{part} {minutes:.1f}" for part, minutes in clock.minutes.items()))
    wrong += [f"{r.engine}: {v}" for r in reports for v in r.failed]
    end(wrong)


def _everything(only: list[str] | None, aborts: int, out: Path, clock: Clock) -> tuple[list[Report], list[str]]:
    """Reports of all columns, and what is wrong besides."""
    with clock.part("install"):
        environment(VLLM), environment(SGLANG)
    with clock.part("models"):
        models = make_models(out / "models")
    model = models["first"]
    open_vllm = vllm_server("vllm-open", model, out, open_routes=True, context=CONTEXT)
    plain_vllm = vllm_server("vllm-plain", model, out, open_routes=False, context=CONTEXT)
    worker = sglang_server("sglang", model, out, context=CONTEXT)
    router = router_server("sglang-router", worker, out)
    pending = [c for c in columns(open_vllm, plain_vllm, worker, router) if not only or c.name in only]
    uses = [(c.server,) for c in pending] + ([(open_vllm, plain_vllm)] if not only or KILL in only else [])
    reports: list[Report] = []
    wrong: list[str] = []
    with running({s.name: s for row in uses for s in row}.values()):
        while uses:
            needed = uses.pop(0)
            with clock.part("starts"):
                until_ready(needed)
            if not pending:
                with clock.part(KILL):
                    wrong += _kill(open_vllm, plain_vllm, out)
                continue
            column = pending.pop(0)
            with ready(*([router] if column.router else [])), clock.part(column.name):
                try:
                    reports.append(_written(asyncio.run(test_column(column, models, aborts)), out))
                except AprilError as error:  # the server has died of a check, say
                    wrong.append(f"{column.name}: {error}\n{column.server.last_lines()}")
                    column.server.kill()
            # its last check has killed the server
            if any(column.server in later for later in uses):
                column.server.start()
    if not only or IN_PROCESS in only:
        with clock.part(IN_PROCESS):
            reports.append(_written(test_in_process(models, aborts, out), out))
    return reports, wrong


def _written(report: Report, out: Path) -> Report:
    name = "-".join(report.engine.replace(",", "").split())
    (out / f"{name}.json").write_bytes(msgspec.json.encode(report))
    return report


def _kill(dies: Server, lives: Server, out: Path) -> list[str]:
    """What is wrong; the figures are printed and written."""
    try:
        figures = asyncio.run(kill_one(dies, lives))
    except (NotKept, AprilError, TimeoutError) as error:
        return [f"{KILL} of one of two servers: {type(error).__name__} {error}"]
    print("  all responses finished on the other server:", figures, flush=True)
    (out / "kill.json").write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
    return []


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
