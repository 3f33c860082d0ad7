"""The line of progress: there where somebody looks, gone with the wait, nothing in logs, and no batch is lost by it."""

from __future__ import annotations

import asyncio
import io
import re
import sys
from typing import Any

import pytest
from real_schedulers import scheduler
from rich.console import Console
from virtual_rollouts import RecordingEngine, Rollouts, on_virtual_time, table

import april
from april.core import events as ev
from april.core.types import Prompt
from april.errors import ConfigError
from april.record.standing import Standing, Waits, standing_of
from april.testing import rollouts
from april.view import progress
from april.view.progress import WINDOW_S, Line, Progress, progress_on, short

pytestmark = on_virtual_time


def standing(**changes: Any) -> Standing:
    """Some moment."""
    given: dict[str, Any] = {
        "step": 3, "ready": 2, "target": 8, "whole_groups": True, "in_flight": 40, "partials": 0, "oldest": 0,
        "observed": 1000, "waits": Waits.RESPONSES.value, "engines": {"e0": 40},
    }  # fmt: skip
    return Standing(**given | changes)


def terminal(**options: Any) -> Console:
    """One that nobody sees."""
    return Console(file=io.StringIO(), force_terminal=True, width=120, **options)


def written(console: Console) -> str:
    """All that was written there, escape sequences included."""
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_line_says_how_the_step_stands() -> None:
    """The step and what it has, how long, how fast; partials and what it waits for, if there is something to say."""
    line = Line()
    assert str(line) == ""
    line.add(10.0, standing())
    assert str(line) == "step 3  2/8 groups  0 s  40 in flight"
    line.add(14.0, standing(ready=5, observed=9000, partials=1, oldest=1, in_flight=0, waits=Waits.FUNCTIONS.value))
    assert str(line) == (
        "step 3  5/8 groups  4 s  2.0k tok/s  0 in flight  1 partial, oldest 1 update  waits for functions and rewards"
    )
    line.add(15.0, standing(step=4, observed=9000, whole_groups=False, partials=7, oldest=2))
    assert str(line).startswith("step 4  2/8 samples  0 s")
    assert "7 partial, oldest 2 updates" in str(line)


def test_tokens_per_second_are_those_of_lately() -> None:
    """What was long ago does not count, nor what stood there before another state was loaded."""
    line = Line()
    line.add(0.0, standing(observed=0))
    line.add(1.0, standing(observed=1_000_000))
    for second in range(2, 40):
        line.add(float(second), standing(observed=1_000_000 + 100 * second))
    assert line.tokens_per_s == pytest.approx(100)
    line.add(41.0, standing(observed=50))
    assert line.tokens_per_s is None
    line.add(42.0 + WINDOW_S, standing(observed=50))
    assert line.tokens_per_s == 0


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (999, "999"), (1234, "1.2k"), (123_456, "123k"), (4.56e6, "4.6M"), (2e9, "2.0G")]
)
def test_numbers_are_short(number: float, text: str) -> None:
    """About so many is what a line has room for."""
    assert short(number) == text


async def test_what_stands_there_is_what_the_core_has() -> None:
    """At every moment of a run: requests in flight, complete groups, tokens, and partials of older weights."""
    run = Rollouts(table({(0, 0): 3, (1, 0): 30, (2, 0): 40}, 5), n=1, over=3, max_staleness=5)
    core = run.driver.core
    assert standing_of(core) == Standing(
        step=0, ready=0, target=1, whole_groups=True, in_flight=0, partials=0, oldest=0, observed=0,
        waits=Waits.TRAINER.value, engines={"e0": 0},
    )  # fmt: skip
    asked = asyncio.create_task(run.driver.next_batch())
    await asyncio.sleep(2.5)
    now = standing_of(core)
    assert (now.in_flight, now.partials, now.waits, now.engines) == (3, 0, Waits.RESPONSES, {"e0": 3})
    assert now.observed == core.observed_tokens() == 0  # the engine hands over nothing before a request ends
    await asked
    assert (standing_of(core).step, standing_of(core).waits) == (1, Waits.TRAINER)
    assert standing_of(core).observed == core.observed_tokens() == 9
    await run.driver.update_weights()
    asked = asyncio.create_task(run.driver.next_batch())
    await asyncio.sleep(1.5)
    now = standing_of(core)
    assert (now.partials, now.oldest) == (2, 1)
    await asked
    run.driver.post(ev.PauseRequested())
    asked = asyncio.create_task(run.driver.next_batch())
    await asyncio.sleep(1)
    assert standing_of(core).waits == Waits.PAUSE
    run.driver.post(ev.Resumed())
    await asked


async def shown(console: Console, own_loop: bool) -> april.Batch:
    """The batch of a scheduler whose rewards wait until a line is seen on the console, and of nothing else."""

    async def reward_when_seen(prompt: Prompt, response: Any) -> float:
        while "step 0" not in written(console):  # noqa: ASYNC110
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
    text = written(console)
    assert len(batch.samples) == 6
    assert re.search(r"step 0  \d/3 groups  0 s .*\d+ in flight", text)
    assert text.count("\n") <= 1
    assert text.endswith("\x1b[2K")
    assert text.index("\x1b[?25l") < text.index("\x1b[?25h")


def test_one_line_at_a_time() -> None:
    """A second wait in the process shows nothing, and waits."""
    console, second = terminal(), terminal()
    with Progress(console, lambda tell: None).shown(), Progress(second, lambda tell: None).shown():
        pass
    assert written(second) == ""
    assert written(console) != ""
    with Progress(second, lambda tell: None).shown():
        pass
    assert written(second) != ""


def test_a_loop_that_is_busy_is_not_asked_again() -> None:
    """One question is out at most, however often the line is drawn."""
    asked: list[progress.Tell] = []
    wait = progress._Wait(asked.append)
    assert [str(wait.drawn()) for _ in range(5)] == [""] * 5
    assert len(asked) == 1
    asked[0](1.0, standing())
    assert str(wait.drawn()) == "step 3  2/8 groups  0 s  40 in flight"
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


def test_an_interrupted_wait_leaves_no_line_and_loses_no_batch() -> None:
    """The next call has the batch, and a line of its own."""
    console = terminal()
    with pytest.raises(KeyboardInterrupt), Progress(console, lambda tell: None).shown():
        raise KeyboardInterrupt
    assert written(console).endswith("\x1b[2K") or written(console).endswith("\x1b[?25h")
    assert progress._SHOWN.acquire(blocking=False)
    progress._SHOWN.release()


def test_nothing_is_shown_where_nobody_looks(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Standard error is a file: no line, and FORCE_COLOR, as many CI machines set it, changes nothing."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    with scheduler() as run:
        run.next_batch()
    assert "step 0" not in capfd.readouterr().err
    assert progress_on(None, lambda tell: None) is None
    assert progress_on(True, lambda tell: None) is None
    monkeypatch.setattr(sys, "stderr", None)  # pythonw
    assert progress_on(None, lambda tell: None) is None


def test_where_it_is_shown_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal on standard error, if rich is there; not if it is dumb, nor if it is not wanted."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert progress_on(None, lambda tell: None) is not None
    assert progress_on(True, lambda tell: None) is not None
    assert progress_on(False, lambda tell: None) is None
    monkeypatch.setenv("TERM", "dumb")
    assert progress_on(None, lambda tell: None) is None
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "find_spec", lambda name: None)
    assert progress_on(None, lambda tell: None) is None


def test_what_progress_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so before anything starts; without rich, progress=True says how to get it."""
    with pytest.raises(ConfigError, match="progress must be True, False, None or a rich Console, got str"):
        scheduler(progress="yes")
    monkeypatch.setattr("april.extras.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="progress=True needs rich: pip install"):
        progress_on(True, lambda tell: None)


async def test_a_virtual_clock_shows_nothing() -> None:
    """rich's thread would not know its time."""
    console = terminal()
    run = rollouts(
        april.Config(rollout_batch_size=1, max_response_len=9), prompts=[[1, 2]] * 4,
        engines=[RecordingEngine(table({}))], progress=console,
    )  # fmt: skip
    await run.next_batch()
    await run.close()
    assert written(console) == ""
