"""Defines policy versions, and counts the weight updates between two versions, also across restarts.

``Leases.age`` in ``partial_buffer`` adds the batches that are not yet trained; that age is compared with limits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class PolicyVersion(NamedTuple):
    """Identifies weights: ``n`` grows by one with every weight update, ``incarnation`` by one with every restart."""

    incarnation: int
    n: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.n}"


FIRST_VERSION = PolicyVersion(0, 0)


class OnStale(StrEnum):
    """Policies for samples older than max_staleness. Except with DROP, steps wait for samples close to this limit.

    ``SampleLifecycle.restart_or_drop_stale`` applies RESTART and DROP to samples that are not delivered yet.
    ``RolloutCore._rows_of`` with ``batch.deliver_sample`` applies FINISH and MASK to the tokens of delivered samples.
    ``PartialBuffer.slacks`` applies the deadlines of a step.
    """

    FINISH = "finish"
    """The sample is generated first and the step waits for it; tokens that still get too old carry no loss."""
    RESTART = "restart"
    """The tokens are dropped and the sample begins again."""
    MASK = "mask"
    """Tokens that are too old carry no loss."""
    DROP = "drop"
    """The group is dropped and replaced."""


@dataclass(slots=True, eq=False)
class VersionClock:
    """Holds the current version, and computes how many weight updates have passed since an older version.

    A restart from a checkpoint at ``n = b`` abandons the updates after ``b``. The age of tokens generated
    between ``b`` and the restart is the number of updates from ``b`` to their version plus those since the restart.
    """

    current: PolicyVersion = FIRST_VERSION
    branches: dict[int, int] = field(default_factory=dict)
    """For each past incarnation, the ``n`` of the checkpoint from which the next incarnation began."""

    def advance(self) -> PolicyVersion:
        self.current = PolicyVersion(self.current.incarnation, self.current.n + 1)
        return self.current

    def restart(self, at: int) -> PolicyVersion:
        """Begin a new incarnation, whose first weights are those of version ``n = at`` of the present incarnation."""
        self.branches[self.current.incarnation] = at
        self.current = PolicyVersion(self.current.incarnation + 1, at)
        return self.current

    def staleness(self, version: PolicyVersion) -> int:
        """Return the number of weight updates between ``version`` and now; raises ValueError for a future version."""
        distance, top = 0, version.n
        for incarnation in range(version.incarnation, self.current.incarnation):
            branch = self.branches[incarnation]
            distance += max(0, top - branch)
            top = min(top, branch)
        distance += self.current.n - top
        if version > self.current or distance < 0:
            raise ValueError(f"version {version} is newer than the current version {self.current}")
        return distance
