"""The event pump: what has happened goes into the core, what the core wants is done, until nothing is left."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, get_args

from april.core.commands import Command
from april.core.events import Event


class Core(Protocol):
    """The core, or what passes its events on to it."""

    def handle(self, event: Event, /) -> list[Command]:
        """Take one event; returns what is to be done, in order."""


class EventPump:
    """Events in the order in which they come, the commands of each carried out before the next one.

    Args:
        core: takes the events.
        executors: what carries out the commands of each type.
        ignored: types of command that need nothing done here.

    Raises:
        TypeError: a type of command has no executor and is not ignored, or has one and is.
    """

    def __init__(
        self,
        core: Core,
        executors: Mapping[type[Command], Callable[[Any], None]],
        ignored: Iterable[type[Command]] = (),
    ) -> None:
        named = [*executors, *ignored]
        if wrong := [t.__name__ for t in {*get_args(Command), *named} if named.count(t) != 1]:
            raise TypeError(f"not carried out by exactly one executor: {', '.join(sorted(wrong))}")
        self._core = core
        self._executors = {**executors, **dict.fromkeys(ignored, _nothing)}
        self._events: deque[Event] = deque()
        self._runs = False

    def post(self, event: Event) -> None:
        """Take one event; one that an executor posts comes after those that wait already.

        An error of the core or of an executor ends this; the events that waited are dropped.
        """
        self._events.append(event)
        if self._runs:
            return
        self._runs = True
        try:
            while self._events:
                for command in self._core.handle(self._events.popleft()):
                    self._executors[type(command)](command)
        except BaseException:
            self._events.clear()
            raise
        finally:
            self._runs = False


def _nothing(command: Command) -> None:
    """It needs nothing done."""
