"""``april watch``: a record that grows, is cut, is not there yet, or was written by somebody hostile."""

from __future__ import annotations

import asyncio
import fcntl
import io
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from real_schedulers import scheduler
from records import recorded, rewritten
from rich.console import Console
from typer.testing import CliRunner
from virtual_rollouts import Rollouts, on_virtual_time, table

import april
from april.cli import app
from april.core import events as ev
from april.core.types import Prompt
from april.record.file import lines_of
from april.record.replay import replay
from april.record.run_status import RunStatus, WaitReason, run_status
from april.view import progress
from april.view.bars import EVERY_S, bars
from april.view.progress import PrintedProgress, ProgressLine, RedrawnProgress, progress_on
from april.view.watch import SHOWN_BATCHES, RecordFollower, screen, watch

pytestmark = on_virtual_time

HOSTILE = "[bold red]x[/]\x1b[2J\x1b]0;owned\x07\u202e"


@pytest.fixture
def follower() -> Iterator[Callable[[Path], RecordFollower]]:
    with ExitStack() as opened:
        yield lambda path: opened.enter_context(closing(RecordFollower(path)))


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run of twelve steps, for the tests that only read it."""
    path = tmp_path_factory.mktemp("record") / "run.jsonl"
    recorded(path)
    return path


def screen_of(path: Path, silent_s: float = 0.0) -> str:
    """What somebody sees who looks at it."""
    console = Console(file=io.StringIO(), force_terminal=True, width=300)
    with closing(RecordFollower(path)) as follower:
        while follower.read_more():
            pass
        console.print(screen(follower, silent_s))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_how_the_run_stands_is_in_its_record(record: Path) -> None:
    """Every few seconds a line, which a replay passes over; the last is that of the end."""
    said = [line for line in lines_of(record, ["Standing"]) if line.kind == "Standing"]
    assert len(said) > 10
    times = [line.time_s for line in said]
    assert all(later - earlier >= 5.0 for earlier, later in pairwise(times))
    assert [line.fields["step"] for line in said] == sorted(line.fields["step"] for line in said)
    assert said[-1].fields["observed"] <= replay(record).core.observed_tokens()
    assert max(line.fields["in_flight"] for line in said) > 0
    assert max(line.fields["partials"] for line in said) > 0


def test_a_record_is_followed_as_it_grows(
    record: Path, tmp_path: Path, follower: Callable[[Path], RecordFollower]
) -> None:
    """In pieces of any size, cut anywhere, what is seen is what stands there; no line is read twice."""
    whole = follower(record)
    while whole.read_more():
        pass
    data, path = record.read_bytes(), tmp_path / "run.jsonl"
    growing = follower(path)
    assert not growing.read_more()
    assert not growing.exists
    with path.open("wb", buffering=0) as file:
        for at in range(0, len(data), 7919):
            file.write(data[at : at + 7919])
            growing.read_more()
    assert growing.seen.lines == whole.seen.lines == len(data.splitlines())
    assert growing.seen.batches == whole.seen.batches
    assert len(growing.seen.batches) == SHOWN_BATCHES
    assert growing.seen.end == whole.seen.end == "the run was closed"


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
    assert "does not exist yet" in " ".join(text.split())
    assert "in flight" in text
    assert "the run was closed" in text


def test_a_run_that_was_killed_waits_for_nothing(record: Path, tmp_path: Path) -> None:
    """While a process writes the record it holds a lock; without one, what it waited for is of the past."""
    path = tmp_path / "run.jsonl"
    lines = [line for line in record.read_bytes().splitlines(keepends=True) if b'"Closed"' not in line]
    path.write_bytes(b"".join(lines))
    with path.open("rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        text = screen_of(path, 20.0)
        assert "waits for " in text
        assert "killed" not in text
    text = screen_of(path, 20.0)
    assert "no process on this machine writes the record: the run was killed" in text
    assert "waited for " in text
    assert "waits for " not in text
    assert "killed" not in screen_of(record)


@pytest.mark.parametrize("killed", [False, True])
def test_what_is_not_there_is_said_before_a_pipe(record: Path, tmp_path: Path, killed: bool) -> None:
    """Where no screen is drawn: once, at the beginning."""
    path = tmp_path / "run.jsonl"
    if killed:
        path.write_bytes(record.read_bytes()[:90_000])
    console = Console(file=io.StringIO(), width=100)
    clock = Clock(*[lambda: None] * 10)
    assert watch(path, console, now=lambda: clock.now, sleep=clock.sleep)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert text.startswith("no process" if killed else f"{path} does not exist yet\n")
    assert " ".join(text.split()).count("not exist yet") == (0 if killed else 2)  # and what the last screen shows


@pytest.mark.parametrize("which", ["report", "replay", "watch --once"])
def test_a_missing_record_is_an_error(tmp_path: Path, which: str) -> None:
    """Nothing is among the results, and the exit code is the one that the page on the command line has."""
    result = CliRunner().invoke(app, [*which.split(), str(tmp_path / "mistyped.jsonl")])
    assert result.exit_code == 1
    if which == "watch --once":  # what the run's state is, is the result
        assert "does not exist yet" in result.stdout.replace("\n", "")
    else:
        assert not result.stdout
        assert "mistyped.jsonl cannot be read: No such file or directory" in result.stderr


# ----------------------------------------------------------------
# The line of progress: there where somebody looks, gone with the wait; long waits in logs; no batch is lost.


def standing(**changes: Any) -> RunStatus:
    given: dict[str, Any] = {
        "step": 3, "ready": 2, "target": 8, "whole_groups": True, "in_flight": 40, "partials": 0, "oldest": 0,
        "observed": 1000, "waits": WaitReason.RESPONSES.value, "engines": {"e0": 40},
    }  # fmt: skip
    return RunStatus(**given | changes)


def terminal(**options: Any) -> Console:
    """One that nobody sees."""
    return Console(file=io.StringIO(), force_terminal=True, width=120, **options)


def shown_on(console: Console) -> str:
    """All that was written there, escape sequences included."""
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_bars_become_lines_where_nothing_can_be_drawn() -> None:
    """Long work writes how far it is into a file or a pipe, at most every EVERY_S seconds; a terminal has its bar."""
    for terminal_there, lines in ((False, ["simulating: 2 of 8", "simulating: 5 of 9 slow"]), (True, [])):
        console = Console(file=io.StringIO(), force_terminal=terminal_there, width=80)
        seconds = iter([0.0, 1.0, EVERY_S, EVERY_S, EVERY_S + 1.0, 2 * EVERY_S, 2 * EVERY_S])
        with bars(console, now=seconds.__next__) as begin:
            update = begin("simulating", 8)
            update(1)
            update(2)
            update(3)
            update(5, total=9, note="slow")
        assert [line for line in shown_on(console).splitlines() if line.startswith("simulating:")] == lines


def test_the_line_says_how_the_step_stands() -> None:
    """The step and what it has, how long, how fast; partials and what it waits for, if there is something to say."""
    line = ProgressLine()
    assert str(line) == ""
    line.add(10.0, standing())
    assert str(line) == "step 3  2/8 groups  0 s  40 in flight"
    line.add(
        14.0, standing(ready=5, observed=9000, partials=1, oldest=1, in_flight=0, waits=WaitReason.FUNCTIONS.value)
    )
    assert str(line) == (
        "step 3  5/8 groups  4 s  2.0k tok/s  0 in flight  1 partial, oldest 1 update  waits for functions and rewards"
    )
    line.add(15.0, standing(step=4, observed=9000, whole_groups=False, partials=7, oldest=2))
    assert str(line).startswith("step 4  2/8 samples  0 s")
    assert "7 partial, oldest 2 updates" in str(line)


async def test_what_stands_there_is_what_the_core_has() -> None:
    """At every moment of a run: requests in flight, complete groups, tokens, and partials of older weights."""
    run = Rollouts(table({(0, 0): 3, (1, 0): 30, (2, 0): 40}, 5), n=1, over=3, max_staleness=5)
    core = run.driver.core
    assert run_status(core) == RunStatus(
        step=0, ready=0, target=1, whole_groups=True, in_flight=0, partials=0, oldest=0, observed=0,
        waits=WaitReason.TRAINER.value, engines={"e0": 0},
    )  # fmt: skip
    asked = asyncio.create_task(run.driver.next_batch())
    await asyncio.sleep(2.5)
    now = run_status(core)
    assert (now.in_flight, now.partials, now.waits, now.engines) == (3, 0, WaitReason.RESPONSES, {"e0": 3})
    assert now.observed == core.observed_tokens() == 0  # the engine hands over nothing before a request ends
    await asked
    assert (run_status(core).step, run_status(core).waits) == (1, WaitReason.TRAINER)
    assert run_status(core).observed == core.observed_tokens() == 9
    await run.driver.update_weights()
    asked = asyncio.create_task(run.driver.next_batch())
    await asyncio.sleep(1.5)
    now = run_status(core)
    assert (now.partials, now.oldest) == (2, 1)
    await asked
    run.driver.post(ev.PauseRequested())
    asked = asyncio.create_task(run.driver.next_batch())
    await asyncio.sleep(1)
    assert run_status(core).waits == WaitReason.PAUSE
    run.driver.post(ev.Resumed())
    await asked


async def shown(console: Console, own_loop: bool) -> april.Batch:
    """The batch of a scheduler whose rewards wait until a line is seen on the console, and of nothing else."""

    async def reward_when_seen(prompt: Prompt, response: Any) -> float:
        while "step 0" not in shown_on(console):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        return 1.0

    with scheduler(reward=reward_when_seen, progress=console) as run:
        return await run.anext_batch() if own_loop else run.next_batch()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PER_SECOND", 200.0)


@pytest.mark.parametrize("own_loop", [False, True])
def test_the_line_is_there_while_a_batch_is_waited_for(own_loop: bool) -> None:
    """It updates in place, and is erased when the batch is there; the cursor is back. Also in a trainer's own loop."""
    console = terminal()
    batch = asyncio.run(shown(console, own_loop))
    text = shown_on(console)
    assert len(batch.samples) == 6
    assert re.search(r"step 0  \d/3 groups  0 s .*\d+ in flight", text)
    assert text.count("\n") <= 1
    assert text.endswith("\x1b[2K")
    assert text.index("\x1b[?25l") < text.index("\x1b[?25h")


def test_a_loop_that_is_busy_is_not_asked_again() -> None:
    """One question is out at most, however often the line is drawn."""
    asked: list[progress.StatusReceiver] = []
    wait = progress._WaitDisplay(asked.append)
    assert [str(wait.render()) for _ in range(5)] == [""] * 5
    assert len(asked) == 1
    asked[0](1.0, standing())
    assert str(wait.render()) == "step 3  2/8 groups  0 s  40 in flight"
    assert len(asked) == 2


class _Broken(io.StringIO):
    """A terminal that was closed."""

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_terminal_that_is_gone_loses_no_batch() -> None:
    """The wait goes on without a line."""
    with scheduler(progress=Console(file=_Broken(), force_terminal=True)) as run:
        assert len(run.next_batch().samples) == 6


def test_nothing_is_drawn_where_nobody_looks(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Standard error is a file: a short wait leaves no line, FORCE_COLOR or not, which many CI machines set."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    with scheduler() as run:
        run.next_batch()
    assert "step 0" not in capfd.readouterr().err
    assert isinstance(progress_on(None, lambda tell: None), PrintedProgress)
    assert isinstance(progress_on(True, lambda tell: None), PrintedProgress)
    monkeypatch.setattr(sys, "stderr", None)  # pythonw
    assert isinstance(progress_on(None, lambda tell: None), PrintedProgress)


def test_a_long_wait_writes_lines_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where no line can be drawn: the first after WRITTEN_AFTER_S, each next one after twice as long."""
    pauses: list[float] = []

    class GoesOn:
        """Is let go after the pause before the fourth line; each pause of this wait takes no time."""

        def acquire(self, *, timeout: float) -> bool:
            pauses.append(timeout)
            return len(pauses) > 6

    answers = iter(range(100))
    lines = PrintedProgress(lambda tell: tell(float(next(answers)), standing()))
    goes_on: Any = GoesOn()
    lines._wait_lock = goes_on
    lines._write(goes_on)
    assert pauses == [
        10.0, progress.STATE_TIMEOUT_S, 20.0, progress.STATE_TIMEOUT_S, 40.0, progress.STATE_TIMEOUT_S, 80.0
    ]
    written = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[:2] for line in written] == [["april: step 3", "2/8 groups"]] * 3


def test_where_it_is_shown_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal on standard error, if rich is there; lines now and then if it is dumb; nothing if it is not wanted."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert isinstance(progress_on(True, lambda tell: None), RedrawnProgress)
    assert progress_on(False, lambda tell: None) is None
    assert isinstance(progress_on(None, lambda tell: None), RedrawnProgress)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(progress_on(None, lambda tell: None), PrintedProgress)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "find_spec", lambda name: None)
    assert isinstance(progress_on(None, lambda tell: None), PrintedProgress)
