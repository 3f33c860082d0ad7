"""Policy versions, and how far apart two of them are, restarts included.

Too-old tokens lose their loss in ``batch.deliver_sample``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class PolicyVersion(NamedTuple):
    """Which weights: ``n`` grows by one with every weight update, ``incarnation`` with every restart."""

    incarnation: int
    n: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.n}"


FIRST_VERSION = PolicyVersion(0, 0)


@dataclass(slots=True, eq=False)
class VersionClock:
    """The current version, and the distance from it to any older one.

    After a restart from a checkpoint at ``n = b`` a token of the abandoned branch (same incarnation as
    before, n > b) is as far away as the way back to the branch point plus the way since.
    """

    current: PolicyVersion = FIRST_VERSION
    branches: dict[int, int] = field(default_factory=dict)
    """incarnation -> the n at which a later incarnation branched off from it"""

    def advance(self) -> PolicyVersion:
        """Count a weight update."""
        self.current = PolicyVersion(self.current.incarnation, self.current.n + 1)
        return self.current

    def restart(self, at: int) -> PolicyVersion:
        """A new incarnation, whose first weights are those of version ``at`` of the present one."""
        self.branches[self.current.incarnation] = at
        self.current = PolicyVersion(self.current.incarnation + 1, at)
        return self.current

    def staleness(self, version: PolicyVersion) -> int:
        """Weight updates between ``version`` and now; raises ValueError for a version of the future."""
        distance, top = 0, version.n
        for incarnation in range(version.incarnation, self.current.incarnation):
            branch = self.branches[incarnation]
            distance += max(0, top - branch)
            top = min(top, branch)
        distance += self.current.n - top
        if version > self.current or distance < 0:
            raise ValueError(f"version {version} is newer than the current version {self.current}")
        return distance
