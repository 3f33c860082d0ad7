"""Bars on a terminal for what takes a while (rich)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Begin = Callable[[str, int], Callable[..., None]]
"""Begin something of so many steps: the result is called with the steps done, and ``total=`` and ``note=`` if known."""


@contextmanager
def bars(console: Console, width: int = 14, *, transient: bool = True) -> Iterator[Begin]:
    """Draw a bar for everything that is begun, behind its name of ``width`` characters."""
    with Progress(
        TextColumn(f"{{task.description:<{width}}}"), BarColumn(bar_width=28), MofNCompleteColumn(),
        TimeElapsedColumn(), TextColumn("{task.fields[note]}"), console=console, transient=transient,
    ) as progress:  # fmt: skip

        def begin(what: str, total: int) -> Callable[..., None]:
            bar = progress.add_task(what, total=total or None, note="")

            def update(done: int, total: int | None = None, note: str = "") -> None:
                progress.update(bar, completed=done, total=total, note=note)

            return update

        yield begin
