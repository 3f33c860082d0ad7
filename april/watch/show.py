"""``april watch`` on a terminal: the line, the latest steps, what was dropped, and the engines (rich).

Invariant: what stands in a record is text, never markup and never an escape sequence.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from april.server_text import said
from april.watch.follow import Follower, Seen
from april.watch.line import Line, short

LOOK_S = 0.5
"""Between two looks at the file."""
WINDOW_S = 60.0
"""Of tokens per second: a record has tokens when their request ends, many at a time."""
SILENT_S = 30.0
"""After which it is said that nothing was written."""
MOST_ENGINES = 16
COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("seconds", "step_s", lambda v: f"{v:.1f}"),
    ("busy", "engines_busy", lambda v: f"{v:.0%}"),
    ("tokens", "trained_tokens", short),
    ("off-policy", "off_policy_share", lambda v: f"{v:.0%}"),
    ("staleness", "staleness_mean", lambda v: f"{v:.2f}"),
    ("at most", "staleness_max", lambda v: f"{v:.0f}"),
    ("reward", "reward_mean", lambda v: f"{v:.3g}"),
)
"""Heading, metric, how it is shown."""
_ENGINE = "engine/"


class Screen:
    """A run as its record shows it."""

    def __init__(self, path: Path) -> None:
        self.follower = Follower(path)
        self._path = path
        self._line = Line(WINDOW_S)
        self._seen = self.follower.seen

    def look(self) -> bool:
        """Read on; whether there may be more at once. Raises RecordError."""
        more = self.follower.look()
        seen = self.follower.seen
        if seen is not self._seen:  # another run, in a file of the same name
            self._seen, self._line = seen, Line(WINDOW_S)
        for time_s, standing in seen.standings:
            self._line.take(time_s, standing)
        return more

    def drawn(self, silent_s: float = 0.0) -> RenderableType:
        """All of it; ``silent_s``: for so long nothing was written."""
        seen = self._seen
        if not self.follower.there:
            return Text(f"{said(self._path)} is not there yet")
        # a run that waits writes nothing down
        parts: list[RenderableType] = [Text(self._line.at(seen.seconds + silent_s) or "nothing was generated yet")]
        if seen.end is not None:
            parts = [_line(f"{said(seen.end)}, after {seen.seconds:.0f} s")]
        elif silent_s > SILENT_S:
            parts.append(_line(f"nothing was written for {silent_s:.0f} s: nothing happens, or the process has died"))
        if seen.batches:
            parts.append(steps(seen))
            if why := seen.batches[-1][2]:
                parts.append(Text(said(why)))
        if seen.dropped:
            given_up = ", ".join(f"{said(name, 60)} {count}" for name, count in sorted(seen.dropped.items()))
            parts.append(Text(f"so far: {given_up}"))
        if (table := engines(seen)) is not None:
            parts.append(table)
        return Group(*parts)


def steps(seen: Seen) -> Table:
    """The latest batches, one row each."""
    out = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    out.add_column("step", justify="right")
    for heading, _, _ in COLUMNS:
        out.add_column(heading, justify="right", no_wrap=True)
    for number, metrics, _ in seen.batches:
        cells = [show(metrics[name]) if name in metrics else "" for _, name, show in COLUMNS]
        out.add_row(str(number), *map(Text, cells))
    return out


def engines(seen: Seen) -> Table | None:
    """Requests in flight now, and what the last batch said of each engine; None: nothing is known of any."""
    if seen.standing is None or not seen.standing.engines:
        return None
    metrics = seen.batches[-1][1] if seen.batches else {}
    out = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for heading in ("engine", "in flight", "cap", "memory", "weights"):
        out.add_column(heading, justify="left" if heading == "engine" else "right", no_wrap=heading != "engine")
    names = sorted(seen.standing.engines)
    for name in names[:MOST_ENGINES]:
        cap, memory = metrics.get(f"{_ENGINE}{name}/cap"), metrics.get(f"{_ENGINE}{name}/kv_usage")
        unverified = metrics.get(f"{_ENGINE}{name}/unverified_weights")
        out.add_row(
            Text(said(name, 60)), f"{seen.standing.engines[name]}", "" if cap is None else f"{cap:.0f}",
            "" if memory is None else f"{memory:.0%}", "unverified" if unverified else "",
        )  # fmt: skip
    if len(names) > MOST_ENGINES:
        out.add_row(f"and {len(names) - MOST_ENGINES} more")
    return out


def _line(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")


def watch(
    path: Path,
    console: Console,
    *,
    once: bool = False,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> bool:
    """Follow a record until its end, or Ctrl-C; ``once``: show it and return. Whether there is a record.

    Raises:
        RecordError: the file is none, or damaged.
    """
    screen = Screen(path)
    try:
        if once:
            while screen.look():
                pass
            console.print(screen.drawn())
            return screen.follower.there
        with Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
            wrote, lines = now(), 0
            while True:
                more = screen.look()
                seen = screen.follower.seen
                if seen.lines != lines:
                    wrote, lines = now(), seen.lines
                live.update(screen.drawn(now() - wrote), refresh=True)
                if seen.end is not None and not more:
                    return True
                if not more:
                    sleep(LOOK_S)
    except KeyboardInterrupt:
        return True
    finally:
        screen.follower.close()
