"""The event pump: what has happened goes into the core, what the core wants is done, until nothing is left."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from april.core import events as ev
from april.core.commands import Command, Submit
from april.core.events import Event
from april.core.state import RolloutCore
from april.core.types import Attempt, SampleId


class Observer(Protocol):
    """Looks on as a core handles events; it changes nothing."""

    def before(self, event: Event, /) -> None:
        """Look at an event that the core has yet to handle."""

    def after(self, event: Event, commands: list[Command], error: BaseException | None, /) -> None:
        """Look at an event that the core has handled, or refused with an error."""


class Observed:
    """A core with observers."""

    def __init__(self, core: RolloutCore, observers: Sequence[Observer]) -> None:
        self._core, self._observers = core, tuple(observers)

    def handle(self, event: Event, /) -> list[Command]:
        """Let the core take one event, as the observers look on."""
        for observer in self._observers:
            observer.before(event)
        try:
            commands = self._core.handle(event)
        except BaseException as error:
            for observer in self._observers:
                observer.after(event, [], error)
            raise
        for observer in self._observers:
            observer.after(event, commands, None)
        return commands


class EventPump:
    """Events in the order in which they come, the commands of each carried out before the next one.

    Args:
        core: takes the events.
        executors: what carries out the commands of each type.
        ignored: types of command that need nothing done here.
        observers: look on as the core handles events.

    Raises:
        TypeError: a type of command has no executor and is not ignored, or has one and is.
    """

    def __init__(
        self,
        core: RolloutCore,
        executors: Mapping[type[Command], Callable[[Any], None]],
        ignored: Iterable[type[Command]] = (),
        observers: Sequence[Observer] = (),
    ) -> None:
        named = [*executors, *ignored]
        if wrong := [t.__name__ for t in {*Command.__subclasses__(), *named} if named.count(t) != 1]:
            raise TypeError(f"not carried out by exactly one executor: {', '.join(sorted(wrong))}")
        self._core = Observed(core, observers) if observers else core
        self._executors = {**executors, **dict.fromkeys(ignored, _nothing)}
        self._events: deque[Event] = deque()
        self.runs = False
        """True while commands are carried out."""

    def post(self, event: Event) -> None:
        """Take one event; one that an executor posts comes after those that wait already.

        An error of the core or of an executor ends this; the events that waited are dropped.
        """
        self._events.append(event)
        if self.runs:
            return
        self.runs = True
        try:
            while self._events:
                for command in self._core.handle(self._events.popleft()):
                    self._executors[type(command)](command)
        except BaseException:
            self._events.clear()
            raise
        finally:
            self.runs = False


def _nothing(command: Command) -> None:
    """Ignore a command."""


KEPT = 4096
"""Requests that are remembered per engine."""


class EndedRequest(NamedTuple):
    """A request that has ended.

    Attributes:
        engine: its name.
        sample: what it was for; of an evaluation, that one's.
        evaluation: it was of one.
        age: weight updates, when it was sent, since the oldest token of the sample; 0 without one.
        began_s, ended_s: when it was sent and when it ended, by the clock.
        context: tokens that were sent: prompt and response so far.
        generated: tokens that came.
    """

    engine: str
    sample: SampleId
    evaluation: bool
    age: int
    began_s: float
    ended_s: float
    context: int
    generated: int


@dataclass(slots=True)
class RequestSums:
    """The sums over requests of training on one engine.

    Attributes:
        generated: tokens that came.
        context: tokens that were sent.
        resident: tokens in the engine's memory, summed up over the decode steps of each request.
    """

    generated: int = 0
    context: int = 0
    resident: float = 0.0

    def add(self, ran: EndedRequest) -> None:
        count = ran.generated
        self.generated += count
        self.context += ran.context
        self.resident += count * (ran.context + count / 2)


class RequestLog:
    """Observes when requests were sent and what they brought.

    Args:
        core: whose requests are looked at.
        now: the clock, in seconds.
    """

    def __init__(self, core: RolloutCore, now: Callable[[], float]) -> None:
        self._core, self._now = core, now
        self._sent: dict[str, tuple[float, int]] = {}
        """(Time of sending, age) by attempt."""
        self._ended: dict[str, deque[EndedRequest]] = {}
        self._counts: dict[str, int] = {}
        self._brought: dict[str, RequestSums] = {}

    def before(self, event: Event) -> None:
        """Note a request that ends."""
        if type(event) is ev.AttemptEnded or type(event) is ev.AttemptFailed:
            attempt = self._core.context.attempts.get(event.attempt_id)
            if attempt is not None and (ran := self.ran(attempt, event.counts.tokens)) is not None:
                self._add(ran)
                del self._sent[attempt.id]

    def after(self, event: Event, commands: list[Command], error: BaseException | None) -> None:
        """Note requests that are sent."""
        for command in commands:
            if type(command) is Submit:
                attempts, oldest = self._core.context.attempts, command.attempt.call.chain.tape.oldest_version
                age = 0 if oldest is None else self._core.clock.staleness(oldest)
                self._sent[command.attempt.id] = (self._now(), age)
                if len(self._sent) > 2 * len(attempts) + KEPT:  # some were given up: nobody told how they ended
                    self._sent = {name: sent for name, sent in self._sent.items() if attempts.get(name) is not None}

    def ran(self, attempt: Attempt, generated: int) -> EndedRequest | None:
        """The entry of an attempt if it ended now; None if nobody saw it being sent."""
        if (sent := self._sent.get(attempt.id)) is None:
            return None
        sample = attempt.sample
        return EndedRequest(
            attempt.engine, sample.id, sample.evaluation is not None, sent[1], sent[0], self._now(),
            len(attempt.token_ids), generated,
        )  # fmt: skip

    def __iter__(self) -> Iterator[tuple[str, deque[EndedRequest]]]:
        """The latest requests that have ended, by engine."""
        return iter(self._ended.items())

    def count(self, engine: str) -> int:
        """Requests that have ended there so far."""
        return self._counts.get(engine, 0)

    def take(self) -> dict[str, RequestSums]:
        """Take the sums over the requests that ended since the last call, by engine, idle engines included.

        Requests of engines that have left, and had none since, are forgotten.
        """
        taken, self._brought = self._brought, {}
        there = self._core.engines.states
        for name in there:
            if name not in taken:  # its time passed, too
                taken[name] = RequestSums()
        for gone in self._ended.keys() - there.keys() - taken.keys():  # or engines that come and go would fill it
            del self._ended[gone], self._counts[gone]
        return taken

    def _add(self, ran: EndedRequest) -> None:
        name = ran.engine
        if name not in self._ended:
            self._ended[name], self._counts[name] = deque(maxlen=KEPT), 0
        self._ended[name].append(ran)
        self._counts[name] += 1
        if not ran.evaluation:
            brought = self._brought.get(name)
            if brought is None:
                brought = self._brought[name] = RequestSums()
            brought.add(ran)
