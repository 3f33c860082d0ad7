"""The traceback of an error that a user has caused ends at the user's line, or a frame or two behind it.

The frames inside april are in the log, at level DEBUG.
"""

from __future__ import annotations

import logging
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rank_threads import run_ranks
from real_schedulers import config, scheduler

import april
from april.driver.tracebacks import shorten
from april.errors import AprilError, EngineError, InvariantError
from april.processes.rank_scheduler import RankScheduler

MOST_FRAMES = 2
"""Frames of april's in a traceback."""


def judge(prompt: april.Prompt, response: april.Response) -> float:
    return 1 / 0


def free_port() -> int:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return int(door.getsockname()[1])


def next_batch(**changes: Any) -> april.Batch:
    with scheduler(**changes) as rollouts:
        return rollouts.next_batch()


def updated() -> Any:
    with scheduler() as rollouts:
        rollouts.next_batch()
        return rollouts.weight_update(trained=7)


def not_there() -> april.Config:
    return config(engine={"kind": "vllm", "urls": [f"http://127.0.0.1:{free_port()}"]})


MISTAKES: dict[str, Callable[[], Any]] = {
    "prompt": lambda: next_batch(prompts=[{"prompt": "hi"}]),
    "no prompts": lambda: next_batch(prompts=[]),
    "reward": lambda: next_batch(reward=judge),
    "record": lambda: next_batch(record="/"),
    "server": lambda: next_batch(engines=None, config=not_there()),
    "update": updated,
}


def files_of(error: BaseException) -> list[str]:
    return [Path(frame.filename).name for frame in traceback.extract_tb(error.__traceback__)]


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_traceback_shows_the_users_lines(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Beside them what was called; the log has the rest, and a cause only if it was raised by the user's own code."""
    caplog.set_level(logging.DEBUG, "april")
    with pytest.raises(AprilError) as raised:
        MISTAKES[kind]()
    files = files_of(raised.value)
    assert files[0] == Path(__file__).name
    aprils = [file for file in files if file not in (Path(__file__).name, "real_schedulers.py")]
    assert len(aprils) <= MOST_FRAMES, files
    assert raised.value.__suppress_context__
    cause = raised.value.__cause__
    assert (cause is not None) == (kind == "reward")
    if cause is not None:
        assert files_of(cause) == [Path(__file__).name]
    whole = [r.exc_info for r in caplog.records if r.levelno == logging.DEBUG and "whole" in r.message]
    assert len(whole) == ("prompt" not in kind)  # of which next to nothing was cut
    for found in whole:
        assert found is not None
        assert found[1] is raised.value
        assert len(list(traceback.walk_tb(found[2]))) > len(aprils)


async def test_the_async_face_is_as_short() -> None:
    """With the frame of ``anext_batch`` at most."""
    rollouts = scheduler(reward=judge)
    with pytest.raises(AprilError) as raised:
        await rollouts.anext_batch()
    assert files_of(raised.value) in ([Path(__file__).name], [Path(__file__).name, "scheduler.py"])
    await rollouts.__aexit__(None, None, None)


def test_the_ranks_are_as_short() -> None:
    """On the rank with the scheduler and on the other."""

    def program(rollouts: RankScheduler, rank: int) -> list[str]:
        with pytest.raises(AprilError, match="neither messages nor token_ids") as raised:
            rollouts.next_batch()
        return files_of(raised.value)

    for files in run_ranks(program, prompts=[{"prompt": "hi"}] * 4):
        assert files == [Path(__file__).name, *["rank_scheduler.py"] * MOST_FRAMES]


def raised_inside(error: Exception) -> Exception:
    try:
        raise error from ValueError("the reason")
    except AprilError:
        return error


def test_a_bug_of_aprils_keeps_everything() -> None:
    """Of an InvariantError the frames inside april are what matters."""
    bug, failure = raised_inside(InvariantError("books")), raised_inside(EngineError("gone"))
    for error in (bug, failure):
        shorten(error)
    assert (bug.__traceback__ is None, bug.__cause__ is None) == (False, False)
    assert (failure.__traceback__, failure.__cause__) == (None, None)
