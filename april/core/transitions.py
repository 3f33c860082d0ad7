"""The legal changes of state, of samples, calls, attempts and groups; all others are a bug and raise.

:meth:`april.core.context.CoreContext.to` is the only place where a state is changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Protocol, TypeVar

from april.core.types import AttemptState, CallState, GroupState, SampleId, SampleState

State = TypeVar("State", SampleState, CallState, AttemptState, GroupState)


class Stateful(Protocol[State]):
    """A sample, a call, an attempt or a group."""

    state: State

    @property
    def owner(self) -> SampleId:
        """Whose story tells of it."""


LEGAL: Mapping[StrEnum, tuple[StrEnum, ...]] = {
    SampleState.NEW: (
        SampleState.RUNNING,
        SampleState.NEW,  # what it had generated before a restart is dropped
        SampleState.DROPPED,
    ),
    SampleState.RUNNING: (SampleState.SCORING, SampleState.NEW, SampleState.DROPPED),
    SampleState.SCORING: (SampleState.FINISHED, SampleState.NEW, SampleState.DROPPED),
    SampleState.FINISHED: (SampleState.LEASED, SampleState.NEW, SampleState.DROPPED),
    SampleState.LEASED: (),
    SampleState.DROPPED: (),
    CallState.QUEUED: (
        CallState.IN_FLIGHT,
        CallState.DONE,  # saved between its last token and the end of its attempt, or nothing is left of its budget
    ),
    CallState.IN_FLIGHT: (CallState.QUEUED, CallState.DONE),
    CallState.DONE: (),
    AttemptState.WANTED: (AttemptState.SILENT, AttemptState.DOUBTFUL, AttemptState.ABANDONED),
    AttemptState.SILENT: (AttemptState.DOUBTFUL, AttemptState.ABANDONED),
    AttemptState.DOUBTFUL: (AttemptState.ABANDONED,),
    AttemptState.ABANDONED: (),
    GroupState.OPEN: (GroupState.JUDGED, GroupState.READY),
    GroupState.JUDGED: (
        GroupState.READY,
        GroupState.JUDGED,  # the filter failed and is asked again
        GroupState.OPEN,
    ),
    GroupState.READY: (GroupState.OPEN,),
}  # fmt: skip
