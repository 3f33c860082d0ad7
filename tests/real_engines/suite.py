"""The conformance suite on the real servers: which server serves which column of the reports, and in which order.

Invariant: a column's last check kills its server; the runner starts that one again while others have their turn.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from april.testing.conformance import Report, Subject, Verdict, Weights, hugging_face, run
from tests.real_engines.commands import VLLM_ON_CPU
from tests.real_engines.environments import ROOT, ROUTER_VERSION, SGLANG_VERSION, VLLM, VLLM_VERSION, environment
from tests.real_engines.models import EOS, VOCAB_SIZE
from tests.real_engines.recording_proxy import RecordingProxy
from tests.real_engines.servers import Server, ServerFailed, opened

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
    router: Server | None = None
    """In front of ``server``."""


def columns(open_vllm: Server, plain_vllm: Server, worker: Server, router: Server) -> list[Column]:
    """All columns that are asked over HTTP, in an order in which a killed server has time to come back."""
    vllm, sglang = f"vllm {VLLM_VERSION}", f"sglang {SGLANG_VERSION}"
    return [
        Column("sglang behind its router", "sglang", worker, f"{sglang}, router {ROUTER_VERSION}", router=router),
        Column("vllm", "vllm", open_vllm, f"{vllm}, all routes open"),
        Column("vllm plain", "vllm", plain_vllm, vllm),
        Column("sglang", "sglang", worker, sglang),
        Column("openai", "openai", plain_vllm, f"{vllm}, completions route"),
    ]


async def test_column(column: Column, models: dict[str, Path], aborts: int) -> Report:
    """The suite on one column; each verdict is told as it comes."""

    async def kill() -> None:
        column.server.kill()

    front = column.server if column.router is None else column.router
    now, other = (Weights(path, hugging_face(path)) for path in (str(models["first"]), str(models["second"])))
    async with RecordingProxy(front.url) as proxy:
        fields: dict[str, Any] = {"kind": column.kind, "urls": [proxy.url]}
        if column.router is not None:
            fields |= {"urls": [column.server.url], "router": proxy.url}
        if column.kind == "openai":
            fields |= OPENAI
        return await run(Subject(
            open=partial(opened, fields), name=column.name, version=column.version, now=now, other=other, kill=kill,
            compare_with_wire=proxy.compare,
            aborts=aborts, long_tokens=LONG_TOKENS[column.kind], patience_s=PATIENCE_S,
        ), watch=tell)  # fmt: skip


def tell(verdict: Verdict) -> None:
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
    found = msgspec.json.decode(report.read_bytes(), type=Report)
    for verdict in found.verdicts:
        tell(verdict)
    return found
