"""Draws progress bars on a terminal (with rich), or prints lines if there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Begin = Callable[[str, int], Callable[..., None]]
"""Function that starts a bar for (name, total number of steps) and returns ``update(done, total=None, note="")``."""

EVERY_S = 10.0
"""Seconds between two printed lines if no bar can be drawn."""


@contextmanager
def bars(console: Console, *, now: Callable[[], float] = time.monotonic) -> Iterator[Begin]:
    """Yield a function that starts a progress bar and returns its update function.

    If the console is not a terminal, a line is printed every EVERY_S seconds. ``now`` is a clock in seconds.
    """
    with Progress(
        TextColumn("{task.description:<14}"), BarColumn(bar_width=28), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"), console=console, transient=True,
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
