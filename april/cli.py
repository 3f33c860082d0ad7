"""The command line (typer)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    name="april", help="Active partial rollouts for LLM reinforcement learning.", no_args_is_help=True,
    pretty_exceptions_enable=False,
)  # fmt: skip


@app.callback()
def root() -> None:
    """Keeps ``april demo`` a sub-command while it is the only one."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Directory for summary.json and demo.png.")] = Path("runs/demo"),
    steps: Annotated[int, typer.Option(min=1, help="Training steps per mode and seed.")] = 40,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds, each with its own warm-up.")] = 3,
    held_out: Annotated[int, typer.Option(min=2, help="Held-out prompts at start and end.")] = 2048,
) -> None:
    """Train a tiny language model on this CPU three times: sync, april (N' = 2N) and refill."""
    from april.demo.run import run_demo
    from april.demo.settings import DemoSettings
    from april.demo.show import LiveProgress, table, verdict

    console = Console()
    settings = DemoSettings(steps=steps, seeds=seeds, held_out=held_out)
    with LiveProgress(console) as watcher:
        summary = run_demo(settings, out, watcher)
    console.print(table(summary))
    for line in verdict(summary):
        console.print(line, highlight=False)
    console.print(f"wrote {out / 'summary.json'} and {out / 'demo.png'}", highlight=False, soft_wrap=True)
    if not summary["all_checks_hold"]:
        raise typer.Exit(1)
