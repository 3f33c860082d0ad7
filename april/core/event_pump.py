"""Passes events to the scheduling core and executes the commands that the core returns, until no event is left."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from april.core import events as ev
from april.core.commands import Command, Submit
from april.core.events import Event
from april.core.rollout_core import RolloutCore
from april.core.types import Attempt, SampleId


class Observer(Protocol):
    """Protocol of observers, which are called before and after each event and must not change the core."""

    def before(self, event: Event, /) -> None:
        """Called before the core handles an event."""

    def after(self, event: Event, commands: list[Command], error: BaseException | None, /) -> None:
        """Called after the core has handled an event; ``error`` is what the core raised, or None."""


class ObservedCore:
    """Wraps a core and calls observers around each event."""

    def __init__(self, core: RolloutCore, observers: Sequence[Observer]) -> None:
        self._core, self._observers = core, tuple(observers)

    def handle(self, event: Event, /) -> list[Command]:
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
    """Handles events in the order of posting; the commands of each are executed before the next event.

    ``executors`` has the function that executes commands, for each command type; TypeError if one is missing.
    """

    def __init__(
        self,
        core: RolloutCore,
        executors: Mapping[type[Command], Callable[[Any], None]],
        observers: Sequence[Observer] = (),
    ) -> None:
        if missing := sorted(kind.__name__ for kind in {*Command.__subclasses__()} - executors.keys()):
            raise TypeError(f"nothing executes {', '.join(missing)}")
        self._core = ObservedCore(core, observers) if observers else core
        self._executors = executors
        self._events: deque[Event] = deque()
        self.handled = 0
        """Number of events handled plus number of commands executed."""
        self.running = False
        """True while events are handled and commands executed."""

    def post(self, event: Event) -> None:
        """Handle an event and its commands, then all events that executors post meanwhile, which are queued.

        If the core or an executor raises an error, the queued events are dropped.
        """
        self._events.append(event)
        if self.running:
            return
        self.running = True
        try:
            while self._events:
                commands = self._core.handle(self._events.popleft())
                self.handled += 1 + len(commands)
                for command in commands:
                    self._executors[type(command)](command)
        except BaseException:
            self._events.clear()
            raise
        finally:
            self.running = False


KEPT_REQUESTS = 4096
"""Number of ended requests that are remembered per engine."""


class EndedRequest(NamedTuple):
    """Record of a request that has ended.

    Attributes:
        age: number of weight updates between the oldest generated token sent and the sending; 0 without such a token.
        began_s, ended_s: times of sending and end, in seconds of the log's clock.
        context: number of tokens sent: prompt and response so far.
        generated: number of tokens received in response.
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
    """Sums over the training requests of one engine; ``generated`` and ``context`` as in :class:`EndedRequest`."""

    generated: int = 0
    context: int = 0
    resident: float = 0.0
    """Number of tokens in key-value memory, summed over the decode steps of all requests."""

    def add(self, ran: EndedRequest) -> None:
        count = ran.generated
        self.generated += count
        self.context += ran.context
        self.resident += count * (ran.context + count / 2)


class RequestLog:
    """Observer that records when each request was sent, when it ended (seconds of ``now``), and its tokens."""

    def __init__(self, core: RolloutCore, now: Callable[[], float]) -> None:
        self._core, self._now = core, now
        self._sent: dict[str, tuple[float, int]] = {}
        """(Time of sending, age) by attempt id, for requests in flight."""
        self._ended: dict[str, deque[EndedRequest]] = {}
        self._counts: dict[str, int] = {}
        self._sums: dict[str, RequestSums] = {}

    def before(self, event: Event) -> None:
        """Record the request that this event ends, if it ends one."""
        if type(event) is ev.AttemptEnded or type(event) is ev.AttemptFailed:
            attempt = self._core.context.attempts.get(event.attempt_id)
            if attempt is not None and (ran := self.record_of(attempt, event.counts.tokens)) is not None:
                self._add(ran)
                del self._sent[attempt.id]

    def after(self, event: Event, commands: list[Command], error: BaseException | None) -> None:
        """Note the requests that the commands send."""
        for command in commands:
            if type(command) is Submit:
                attempts, oldest = self._core.context.attempts, command.attempt.call.chain.tape.oldest_version
                age = 0 if oldest is None else self._core.clock.staleness(oldest)
                self._sent[command.attempt.id] = (self._now(), age)
                if len(self._sent) > 2 * len(attempts) + KEPT_REQUESTS:  # drop requests that ended without an event
                    self._sent = {name: sent for name, sent in self._sent.items() if attempts.get(name) is not None}

    def record_of(self, attempt: Attempt, generated: int) -> EndedRequest | None:
        """Return the record of an attempt as if it ended now; None if its sending was not observed."""
        if (sent := self._sent.get(attempt.id)) is None:
            return None
        sample = attempt.sample
        return EndedRequest(
            attempt.engine, sample.id, sample.evaluation is not None, sent[1], sent[0], self._now(),
            len(attempt.request.token_ids), generated,
        )  # fmt: skip

    def __iter__(self) -> Iterator[tuple[str, deque[EndedRequest]]]:
        return iter(self._ended.items())

    def count(self, engine: str) -> int:
        return self._counts.get(engine, 0)

    def take_sums(self) -> dict[str, RequestSums]:
        """Return the sums over requests that ended since the last call, by engine, idle engines included; reset them.

        Records of engines that have left are deleted if none of their requests ended since the last call.
        """
        taken, self._sums = self._sums, {}
        there = self._core.engines.states
        for name in there:
            if name not in taken:  # an idle engine has sums of 0, so that its idle time counts
                taken[name] = RequestSums()
        # without this, the records of engines that come and go would pile up
        for gone in self._ended.keys() - there.keys() - taken.keys():
            del self._ended[gone], self._counts[gone]
        return taken

    def _add(self, ran: EndedRequest) -> None:
        name = ran.engine
        if name not in self._ended:
            self._ended[name], self._counts[name] = deque(maxlen=KEPT_REQUESTS), 0
        self._ended[name].append(ran)
        self._counts[name] += 1
        if not ran.evaluation:
            self._sums.setdefault(name, RequestSums()).add(ran)
