"""``make demo-vllm``, ``make demo-sglang``: start a server with the demo's model, run the demo on it, stop it."""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from transformers import PreTrainedModel

from april.demo.arm import MAX_LEN, DemoSettings, Stage
from april.demo.run import run_and_show
from april.demo.warmup import build_model
from april.errors import AprilError
from tests.real_engines.commands import sglang_server, vllm_server
from tests.real_engines.demo_stage import ServerStage, write_model
from tests.real_engines.environments import ROOT, CannotInstall
from tests.real_engines.servers import Server, ServerFailed, free_ports, running, until_ready

CONTEXT = 512
assert CONTEXT >= MAX_LEN, "the demo's longest response must fit"


def settings_on(kind: str) -> DemoSettings:
    """Return settings smaller than those of `april demo`, as the server shares two cores with the trainer."""
    return DemoSettings(engine=kind, steps=12, seeds=1, held_out=256, held_out_between=64, evaluate_every=4)


def main(kind: Annotated[str, typer.Argument(help="vllm or sglang")]) -> None:
    """Run the demo; exit code 1 if a check does not hold."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that the server is stopped then, too
    settings, out = settings_on(kind), ROOT / "runs" / f"demo-{kind}"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    # its weights are replaced before the first token; what counts is the shape
    write_model(build_model(0, for_servers=True), out / "model")
    try:
        server = _server(kind, out, settings.slots)
        with running([server]):
            until_ready([server])

            def stage_of(settings: DemoSettings, model: PreTrainedModel, seed: int) -> Stage:
                return ServerStage(settings, model, server.url, out / "weights")

            holds = False
            try:
                holds = run_and_show(settings, out, stage_of)
            except AprilError as error:
                print(f"the demo failed: {error}", file=sys.stderr)
            log = server.last_lines()
    except (CannotInstall, ServerFailed) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    if not holds:
        print(f"the end of the server's log:\n{log}", file=sys.stderr)
        raise typer.Exit(1)


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
