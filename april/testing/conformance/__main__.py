"""Tests a server: ``python -m april.testing.conformance http://127.0.0.1:8000 --kind vllm``."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from april.errors import AprilError
from april.testing.conformance.bench import Check
from april.testing.conformance.run import CHECKS, check_named, run, semantics_matrix
from april.testing.conformance.servers import served
from april.testing.conformance.subject import Report, Verdict


def main(
    urls: Annotated[list[str], typer.Argument(help=(
        "Address of the server; with a router, the addresses of all its workers."
    ))],
    kind: Annotated[str, typer.Option(help="Engine kind: vllm, sglang, openai.")],
    model: Annotated[str | None, typer.Option(help="Directory of the server's weights, for the reference.")] = None,
    other: Annotated[str | None, typer.Option(help=(
        "Directory of other weights, which the checks load and replace again."
    ))] = None,
    second: Annotated[str | None, typer.Option(help="Another server with the same weights.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Checks to run (default: all).")] = None,
    aborts: Annotated[int, typer.Option(min=1, help="Number of aborted requests in the check for lost tokens.")] = 1000,
    long_tokens: Annotated[int, typer.Option(min=40, help="Length of a long response, in tokens.")] = 1000,
    patience: Annotated[float, typer.Option(min=1, help="Seconds after which an engine counts as hanging.")] = 60.0,
    option: Annotated[list[str] | None, typer.Option(help="Setting of the engine, as name=value.")] = None,
    gives_up: Annotated[list[str] | None, typer.Option(help=(
        "check=why: a promise that the engine does not make."
    ))] = None,
    name: Annotated[str, typer.Option(help="Column of the matrix.")] = "",
    version: Annotated[str, typer.Option(help="Version of the server's software, for the report.")] = "",
    out: Annotated[Path | None, typer.Option(help="File for the report, JSON.")] = None,
    matrix: Annotated[bool, typer.Option("--matrix", help="Print the semantics matrix as Markdown.")] = False,
) -> None:
    """Test a server that nobody else uses: it is paused, gets new weights, and has thousands of requests aborted."""
    console = Console()
    checks = [check_named(n) for n in only] if only else list(CHECKS)
    subject: dict[str, Any] = {
        "aborts": aborts, "long_tokens": long_tokens, "patience_s": patience, "version": version,
        "gives_up": _pairs(gives_up),
    }  # fmt: skip
    options = {key: _value(text) for key, text in _pairs(option).items()}
    try:
        report = asyncio.run(_run(console, checks, kind, urls, model, other, second, name, options, subject))
    except AprilError as error:
        console.print(f"{type(error).__name__}: {error}", style="red", markup=False)
        raise typer.Exit(2) from None
    if out is not None:
        out.write_bytes(report.json())
    if matrix:
        console.print(semantics_matrix([report]), soft_wrap=True, markup=False, highlight=False)
    else:
        console.print(report.table())
    console.print(f"{report.wall_s:.1f} s, {report.cpu_s:.1f} s of CPU in this process", highlight=False)
    raise typer.Exit(1 if report.failed else 0)


async def _run(
    console: Console, checks: list[Check], kind: str, urls: list[str], model: str | None, other: str | None,
    second: str | None, name: str, options: dict[str, Any], fields: dict[str, Any],
) -> Report:  # fmt: skip
    task_here = asyncio.current_task()
    assert task_here is not None
    # SIGTERM cancels the suite, which then restores the server's weights
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task_here.cancel)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("opening", total=len(checks))

        def watch(check: Check, text: str, verdict: Verdict | None) -> None:
            progress.update(task, description=f"{check.name} {text}".strip(), advance=0 if verdict is None else 1)
            if verdict is not None:
                progress.console.print(str(verdict), markup=False, highlight=False)

        async with served(
            kind, urls, model=model, other=other, second=second, name=name, options=options, **fields
        ) as subject:  # fmt: skip
            return await run(subject, checks, watch)


def _pairs(texts: list[str] | None) -> dict[str, str]:
    pairs = [text.partition("=")[::2] for text in texts or ()]
    return dict(pairs)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    typer.run(main)
