"""``april watch``: a record that grows, is cut, is not there yet, or was written by somebody hostile."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from records import recorded, rewritten
from rich.console import Console
from typer.testing import CliRunner

from april.cli import app
from april.errors import RecordError
from april.record.file import lines_of
from april.record.replay import replay
from april.view.watch import KEPT, SILENT_S, Follower, Screen, watch

HOSTILE = "[bold red]x[/]\x1b[2J\x1b]0;owned\x07\u202e"


@pytest.fixture
def follower() -> Iterator[Callable[[Path], Follower]]:
    """Makes some, and closes them."""
    with ExitStack() as opened:
        yield lambda path: opened.enter_context(closing(Follower(path)))


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run of twelve steps, for the tests that only read it."""
    path = tmp_path_factory.mktemp("record") / "run.jsonl"
    recorded(path)
    return path


def screen_of(path: Path, silent_s: float = 0.0) -> str:
    """What somebody sees who looks at it."""
    screen = Screen(path)
    while screen.look():
        pass
    console = Console(file=io.StringIO(), force_terminal=True, width=300)
    console.print(screen.drawn(silent_s))
    screen.follower.close()
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_how_the_run_stands_is_in_its_record(record: Path) -> None:
    """Every few seconds a line, which a replay passes over; the last is that of the end."""
    said = [line for line in lines_of(record, ["Standing"]) if line.what == "Standing"]
    assert len(said) > 10
    times = [line.time_s for line in said]
    assert all(later - earlier >= 5.0 for earlier, later in pairwise(times))
    assert [line.parts["step"] for line in said] == sorted(line.parts["step"] for line in said)
    assert said[-1].parts["observed"] <= replay(record).core.observed_tokens()
    assert max(line.parts["in_flight"] for line in said) > 0
    assert max(line.parts["partials"] for line in said) > 0


def test_a_record_is_followed_as_it_grows(record: Path, tmp_path: Path, follower: Callable[[Path], Follower]) -> None:
    """In pieces of any size, cut anywhere, what is seen is what stands there; no line is read twice."""
    whole = follower(record)
    while whole.look():
        pass
    data, path = record.read_bytes(), tmp_path / "run.jsonl"
    growing = follower(path)
    assert not growing.look()
    assert not growing.exists
    with path.open("wb", buffering=0) as file:
        for at in range(0, len(data), 7919):
            file.write(data[at : at + 7919])
            growing.look()
    assert growing.seen.lines == whole.seen.lines == len(data.splitlines())
    assert growing.seen.batches == whole.seen.batches
    assert len(growing.seen.batches) == KEPT
    assert growing.seen.end == whole.seen.end == "the run was closed"


def test_a_new_run_in_the_same_file_is_followed_from_its_start(
    record: Path, tmp_path: Path, follower: Callable[[Path], Follower]
) -> None:
    """The old record was put aside, or written over."""
    data, path = record.read_bytes(), tmp_path / "run.jsonl"
    path.write_bytes(data)
    followed = follower(path)
    while followed.look():
        pass
    path.rename(tmp_path / "run.jsonl.1")
    assert not followed.look()  # nothing is there for a moment
    path.write_bytes(data[:20_000])
    followed.look()
    assert followed.seen.lines == data[:20_000].count(b"\n")
    assert followed.seen.end is None
    path.write_bytes(data[:5_000])
    followed.look()
    assert followed.seen.lines == data[:5_000].count(b"\n")


def test_what_is_seen(record: Path) -> None:
    """The latest steps with their figures, the engines, and how it ended; before the end the line of progress."""
    text = screen_of(record)
    batches = [line.parts for line in lines_of(record, ["Batch"]) if line.what == "Batch"]
    assert "the run was closed, after" in text
    for batch in batches[-KEPT:]:
        assert f"{batch['metrics']['step_s']:.1f}" in text
        assert f"{batch['metrics']['off_policy_share']:.0%}" in text
    assert "engine0" in text
    assert "engine1" in text


def test_a_record_that_was_cut(record: Path, tmp_path: Path) -> None:
    """In the middle of a line: what stands before it is shown, and after a while that nothing comes."""
    path = tmp_path / "cut.jsonl"
    path.write_bytes(record.read_bytes()[: record.stat().st_size // 3])
    assert "in flight" in screen_of(path)
    assert "process has died" not in screen_of(path)
    assert "process has died" in screen_of(path, SILENT_S + 1)
    path.write_bytes(record.read_bytes()[:10])  # not even one line
    assert "nothing was generated yet" in screen_of(path)


def hostile(line: list[Any]) -> list[Any]:
    """Names and sentences that would do something on a terminal."""
    time_s, what, parts, digest = line
    if what == "Standing":
        parts = parts | {"engines": {HOSTILE: 1}, "waits": HOSTILE}
    if what == "Batch":
        metrics = parts["metrics"] | {f"engine/{HOSTILE}/cap": 2.0, f"groups_dropped_{HOSTILE}": 1.0}
        parts = parts | {"bottleneck": HOSTILE, "metrics": metrics}
    if what == "Closed":
        return [time_s, "Over", {"why": HOSTILE}, digest]
    return [time_s, what, parts, digest]


def test_hostile_text_does_nothing(record: Path, tmp_path: Path) -> None:
    """Names of engines and sentences with escape sequences and markup are shown as what they are."""
    for end in (None, -1):
        path = rewritten(record, tmp_path / "hostile.jsonl", hostile)
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:end]))
        text = screen_of(path)
        assert text.count("[bold red]x[/]") > 2
        for wrong in ("\x1b[2J", "\x1b]0", "\x07", "\u202e"):
            assert wrong not in text
    result = CliRunner().invoke(app, ["watch", "--once", str(path)])
    assert result.exit_code == 0, result.output
    assert "\x1b[2J" not in result.output


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"waits": 7}, "Expected `str`, got `int`"),
        ({"engines": {"e": "many"}}, "Expected `int`, got `str`"),
        ({"step": 1e300}, "Expected `int`, got `float`"),
    ],
)
def test_a_line_that_cannot_be_is_named(
    record: Path, tmp_path: Path, follower: Callable[[Path], Follower], parts: dict[str, Any], why: str
) -> None:
    """Its sums are right, its content is not."""

    def wrong(line: list[Any]) -> list[Any]:
        return [*line[:2], line[2] | parts, line[3]] if line[1] == "Standing" else line

    followed = follower(rewritten(record, tmp_path / "wrong.jsonl", wrong))
    with pytest.raises(RecordError, match=rf"line \d+ of .* is not valid: .*{why}"):
        followed.look()


def test_a_line_without_an_end_is_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no record at all is not read whole."""
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"x" * 1000)
    monkeypatch.setattr("april.view.watch.PIECE", 900)
    result = CliRunner().invoke(app, ["watch", "--once", str(path)])
    assert result.exit_code == 1, result.output
    assert "one of its lines does not end" in " ".join(result.output.split())


class Clock:
    """Time that passes where somebody sleeps; ``then`` happens at each of these moments."""

    def __init__(self, *then: Callable[[], object]) -> None:
        self.now, self.sleeps, self._then = 0.0, 0, list(then)

    def sleep(self, seconds: float) -> None:
        """Something happens meanwhile; when nothing is left to, Ctrl-C."""
        self.now += seconds
        self.sleeps += 1
        if not self._then:
            raise KeyboardInterrupt
        self._then.pop(0)()


def watched(path: Path, clock: Clock) -> str:
    """What a terminal was sent until it was over."""
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    assert watch(path, console, now=lambda: clock.now, sleep=clock.sleep)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_it_is_watched_until_the_run_has_ended(record: Path, tmp_path: Path) -> None:
    """The file is not there yet, then grows, then says that the run was closed: nobody has to press a key."""
    path, data = tmp_path / "run.jsonl", record.read_bytes()
    clock = Clock(lambda: path.write_bytes(data[:90_000]), lambda: path.write_bytes(data), lambda: None)
    text = watched(path, clock)
    assert clock.sleeps == 2
    assert "is not there yet" in text
    assert "in flight" in text
    assert "the run was closed" in text


def test_ctrl_c_ends_it(record: Path, tmp_path: Path) -> None:
    """And only it, if the process was killed: then it is said for how long nothing was written."""
    path = tmp_path / "run.jsonl"
    path.write_bytes(record.read_bytes()[:90_000])
    clock = Clock(*[lambda: None] * 100)
    text = watched(path, clock)
    assert clock.sleeps == 101
    assert "nothing was written for 50 s" in text
    assert text.rstrip("\n").endswith("\x1b[?25h")  # the cursor is back


def test_lines_of_other_events_need_not_be_understood(record: Path, tmp_path: Path) -> None:
    """Only a few kinds of lines are looked into, so a long record is read quickly."""

    def odd(line: list[Any]) -> list[Any]:
        return line if line[1] in ("Record", "Batch", "Standing", "Closed") else [line[0], line[1], {"odd": 1}, line[3]]

    path = rewritten(record, tmp_path / "odd.jsonl", odd)
    assert json.loads(path.read_bytes().splitlines()[1])[2] == {"odd": 1}
    assert screen_of(path) == screen_of(record)
