"""Timers: what the core waits for when it waits for time."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class TimerKind(StrEnum):
    """What is to be done when a timer fires."""

    ABORTS = "aborts"
    """Ask again for the end of attempts, and fence those that are too late."""
    RETRY = "retry"
    """Ask a reward function or filter again."""
    OUTAGE = "outage"
    """Fail the step, if there is still no engine to go on with."""
    REST = "rest"
    """An engine that was busy may take requests again."""
    PROBE = "probe"
    """Ask a quarantined engine whether it is well."""
    CHECK = "check"
    """Ask an engine that works for its load and its weights."""


class Timer(NamedTuple):
    """One timer. It is void when whoever started it waits for another one, or for none."""

    kind: TimerKind
    number: int
    """Unique among timers of its kind."""
    engine: str = ""
    """Of a rest, a probe, a check."""
