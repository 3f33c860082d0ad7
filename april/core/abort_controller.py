"""Aborts attempts (engine requests): sends the abort of each attempt again and again until the attempt has ended.

An engine may acknowledge an abort and still generate, so the abort is sent again every ``resend_s`` seconds until the
attempt has ended. An attempt that has not ended at the deadline, or at most one interval later, is *fenced*: april
keeps its tokens so far and accepts no more. The engine of a fenced attempt is not used until a health probe succeeds.

``rollout_core`` (``_advance`` and ``_stop_everything``) decides which attempts end when a batch is delivered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from april.core.commands import Abort, Command, Fence, StartTimer
from april.core.types import Attempt, Timer, TimerKind


class AbortController:
    """Tracks attempts from their first abort to their end; one timer serves all of them."""

    def __init__(self, deadline_s: float, resend_s: float) -> None:
        self._rounds = max(1, round(deadline_s / resend_s))
        self._resend_s = resend_s
        self._pending: dict[str, tuple[Attempt, int]] = {}
        """(Attempt, number of the timer that fences it), by attempt id, for attempts whose abort was sent."""
        self._timer = 0
        self._timer_running = False

    @property
    def pending(self) -> int:
        """Number of attempts whose abort was sent and whose end is awaited."""
        return len(self._pending)

    def __contains__(self, attempt_id: str) -> bool:
        return attempt_id in self._pending

    def new(self, attempts: Iterable[Attempt]) -> list[Attempt]:
        pending = self._pending
        return [attempt for attempt in attempts if attempt.id not in pending]

    def stop(self, new: list[Attempt], in_flight: dict[str, int]) -> list[Command]:
        """Return the commands that abort ``new`` attempts, and track these attempts.

        ``in_flight`` has the number of all attempts per engine. An engine all of whose attempts are aborted gets one
        abort of everything. Pass an empty mapping if attempts may start meanwhile, as that abort would end them, too.
        """
        last = self._timer + self._rounds  # a running timer does not count, as part of its interval has passed
        self._pending.update({attempt.id: (attempt, last) for attempt in new})
        commands = self._abort_commands(new, in_flight)
        if new and not self._timer_running:
            commands.append(self._start_timer())
        return commands

    def ended(self, attempt_id: str) -> None:
        self._pending.pop(attempt_id, None)

    def timer_fired(self, timer: Timer, in_flight: dict[str, int]) -> tuple[list[Command], list[Attempt]]:
        """Send aborts again and fence late attempts; return (commands, attempts that are fenced now)."""
        if timer.number != self._timer or not self._timer_running:
            return [], []
        self._timer_running = False
        waiting, late = list[Attempt](), list[Attempt]()
        for attempt, last in self._pending.values():
            (waiting if last > timer.number else late).append(attempt)
        commands = self._abort_commands(waiting, in_flight)
        fenced: dict[str, list[str]] = {}
        for attempt in late:
            fenced.setdefault(attempt.engine, []).append(attempt.id)
        commands += [Fence(engine, tuple(ids)) for engine, ids in fenced.items()]
        if waiting:
            commands.append(self._start_timer())
        return commands, late

    def _abort_commands(self, attempts: Iterable[Attempt], in_flight: dict[str, int]) -> list[Command]:
        by_engine = defaultdict[str, list[str]](list)
        for attempt in attempts:
            by_engine[attempt.engine].append(attempt.id)
        return [Abort(e, tuple(ids), len(ids) == in_flight.get(e, 0)) for e, ids in by_engine.items()]

    def _start_timer(self) -> StartTimer:
        self._timer += 1
        self._timer_running = True
        return StartTimer(Timer(TimerKind.ABORTS, self._timer), self._resend_s)
