"""The conformance suite on the real servers: which server serves which column of the matrix, and in which order.

Invariant: a column's last check kills its server; the runner starts that one again while others have their turn.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from april.testing.conformance import Report, Verdict, run
from april.testing.conformance.servers import served
from tests.real_engines.commands import VLLM_ON_CPU
from tests.real_engines.environments import ROOT, ROUTER_VERSION, SGLANG_VERSION, VLLM, VLLM_VERSION, environment
from tests.real_engines.models import EOS, VOCAB_SIZE
from tests.real_engines.servers import Server, ServerFailed

LONG_TOKENS = {"vllm": 1200, "openai": 1200, "sglang": 1000}
"""By kind of engine: what is to be cut must still run when a busy client asks for it."""
OPENAI = {"vocab_size": VOCAB_SIZE, "eos_token_ids": (EOS,)}
"""What such a server does not say itself."""
IN_PROCESS_S = 900.0
PATIENCE_S = 240.0
"""Before an engine counts as hanging: 80 long responses on a CPU that others use too take their time."""


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    kind: str
    """Of the engine configuration."""
    server: Server
    """The one that is asked, and killed in the end."""
    version: str
    second: Server | None = None
    """Where the responses finish when ``server`` is killed."""
    router: Server | None = None
    """In front of ``server``."""

    @property
    def servers(self) -> tuple[Server, ...]:
        """Those that must be there before, without the router."""
        return (self.server,) if self.second is None else (self.server, self.second)


def columns(open_vllm: Server, plain_vllm: Server, worker: Server, router: Server) -> list[Column]:
    """All columns that are asked over HTTP, in an order in which a killed server has time to come back."""
    vllm, sglang = f"vllm {VLLM_VERSION}", f"sglang {SGLANG_VERSION}"
    return [
        Column("sglang behind its router", "sglang", worker, f"{sglang}, router {ROUTER_VERSION}", router=router),
        Column("vllm", "vllm", open_vllm, f"{vllm}, all routes open", second=plain_vllm),
        Column("vllm plain", "vllm", plain_vllm, vllm),
        Column("sglang", "sglang", worker, sglang),
        Column("openai", "openai", plain_vllm, f"{vllm}, completions route"),
    ]


async def test_column(column: Column, models: dict[str, Path], aborts: int) -> Report:
    """The suite on one column; each verdict is told as it comes."""

    async def kill() -> None:
        column.server.kill()

    options: dict[str, object] = dict(OPENAI) if column.kind == "openai" else {}
    if column.router is not None:
        options["router"] = column.router.url

    async with served(
        column.kind, [column.server.url], model=str(models["first"]), other=str(models["second"]), name=column.name,
        second=None if column.second is None else column.second.url, version=column.version,
        options=options, kill=kill, aborts=aborts, long_tokens=LONG_TOKENS[column.kind],
    ) as subject:  # fmt: skip
        return await run(replace(subject, patience_s=PATIENCE_S), watch=lambda check, text, verdict: tell(verdict))


def tell(verdict: Verdict | None) -> None:
    if verdict is not None:
        print(f"  {verdict} [{verdict.wall_s:.1f} s]", flush=True)


def test_in_process(models: dict[str, Path], aborts: int, out: Path) -> Report:
    """The suite on vLLM inside its own environment, where there is no server to be started.

    Raises:
        ServerFailed: the process ended without a report.
    """
    log = out / "vllm-in-process.log"
    report = out / "vllm-in-process.json"
    report.unlink(missing_ok=True)
    command = [
        str(environment(VLLM) / "bin" / "python"), "-m", "tests.real_engines.in_process", str(models["first"]),
        str(models["second"]), str(report), str(aborts),
    ]  # fmt: skip
    process = Server("vllm in process", command, 0, log, "", VLLM_ON_CPU | {"PYTHONPATH": str(ROOT)})
    process.start()
    try:
        process.join(IN_PROCESS_S)
    except subprocess.TimeoutExpired:
        raise ServerFailed(f"vllm in process had not ended after {IN_PROCESS_S:g} s:\n{process.last_lines()}") from None
    finally:
        process.kill()
    if not report.is_file():
        raise ServerFailed(f"vllm in process ended without a report:\n{process.last_lines()}")
    found = Report.from_json(report.read_bytes())
    for verdict in found.verdicts:
        tell(verdict)
    return found
