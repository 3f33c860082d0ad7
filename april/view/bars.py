"""Bars on a terminal for what takes a while (rich)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Begin = Callable[[str, int], Callable[..., None]]
"""Begin something of so many steps: the result is called with the steps done, and ``total=`` and ``note=`` if known."""

EVERY_S = 10.0
"""Time between two lines where no bar can be drawn."""


@contextmanager
def bars(
    console: Console, width: int = 14, *, transient: bool = True, now: Callable[[], float] = time.monotonic
) -> Iterator[Begin]:
    """Draw a bar for everything that is begun, behind its name of ``width`` characters; a line now and then where
    standard output is no terminal. ``now`` is a clock in seconds.
    """
    with Progress(
        TextColumn(f"{{task.description:<{width}}}"), BarColumn(bar_width=28), MofNCompleteColumn(),
        TimeElapsedColumn(), TextColumn("{task.fields[note]}"), console=console, transient=transient,
    ) as progress:  # fmt: skip

        def begin(what: str, total: int) -> Callable[..., None]:
            bar = progress.add_task(what, total=total or None, note="")
            said_s = now()

            def update(done: int, total: int | None = None, note: str = "") -> None:
                nonlocal said_s
                progress.update(bar, completed=done, total=total, note=note)
                if not console.is_terminal and now() - said_s >= EVERY_S:
                    said_s = now()
                    most = progress.tasks[bar].total
                    of = "" if most is None else f" of {most:.0f}"
                    console.print(f"{what}: {done}{of} {note}".rstrip(), markup=False, highlight=False)

            return update

        yield begin
