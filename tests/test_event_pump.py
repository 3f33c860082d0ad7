"""One pump for all who drive a core; every event and every command is known wherever it can occur."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from core_machine import CoreMachine, settings

from april.core import commands as do
from april.core import events as ev
from april.core.event_pump import EventPump

PACKAGE = Path(__file__).parent.parent / "april"
EVENTS = {t.__name__ for t in ev.Event.__subclasses__()}
COMMANDS = {t.__name__ for t in do.Command.__subclasses__()}


def calls(tree: ast.AST) -> set[str]:
    """Names of all that is called, with or without what stands before a dot; of ``X.of(...)`` the X."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Attribute) and function.attr == "of":
                function = function.value
            found.add(function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", ""))
    return found


def test_the_core_handles_every_event() -> None:
    """One handler for each type, and none for anything else."""
    core = CoreMachine(settings(), lambda g, i: 5).core
    assert {t.__name__ for t in core._handlers} == EVENTS


def test_every_event_is_told_and_every_command_is_given_by_somebody() -> None:
    """An event that nobody posts, or a command that the core never gives, is dead."""
    trees = {path: ast.parse(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")}
    told = set().union(*(calls(tree) for path, tree in trees.items() if path.parent.name != "core"))
    given = set().union(*(calls(tree) for path, tree in trees.items() if path.parent.name == "core"))
    assert told >= EVENTS
    assert given >= COMMANDS


def test_a_command_without_an_executor_is_noticed_at_once() -> None:
    """Not when it comes for the first time, perhaps after hours."""
    core = CoreMachine(settings(), lambda g, i: 5).core
    executors = dict.fromkeys(do.Command.__subclasses__(), print)
    del executors[do.Fence]
    with pytest.raises(TypeError, match="nothing executes Fence"):
        EventPump(core, executors)


class Scripted:
    """Stands in for a core: each event, a number here, is answered by as many commands."""

    def __init__(self) -> None:
        self.handled: list[int] = []

    def handle(self, event: Any) -> list[do.Command]:
        self.handled.append(event)
        return [do.DrawPrompts(event)] * event


def pump_of(core: Any, draw: Callable[[do.DrawPrompts], None]) -> EventPump:
    return EventPump(core, {**dict.fromkeys(do.Command.__subclasses__(), print), do.DrawPrompts: draw})


def test_what_an_executor_posts_comes_after_what_waits() -> None:
    """The commands of one event are all carried out before the next event, in the order in which events came."""
    core, seen = Scripted(), []

    def draw(command: do.DrawPrompts) -> None:
        seen.append(command.count)
        pump.post(command.count - 1)

    pump = pump_of(core, draw)
    pump.post(2)
    assert core.handled == [2, 1, 1, 0, 0]
    assert seen == [2, 2, 1, 1]


def test_an_error_ends_the_run_of_the_pump_and_the_next_event_begins_anew() -> None:
    """It reaches whoever posted; what waited behind it is dropped, and nothing hangs."""
    core, fails = Scripted(), [True]

    def draw(command: do.DrawPrompts) -> None:
        pump.post(0)
        if fails.pop():
            raise OSError("gone")

    pump = pump_of(core, draw)
    with pytest.raises(OSError, match="gone"):
        pump.post(1)
    fails.append(False)
    pump.post(1)
    assert core.handled == [1, 1, 0]
