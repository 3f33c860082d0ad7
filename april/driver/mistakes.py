"""Functions that were written wrongly: they fail for every sample, so the step ends at once and says why.

What a function raises for one prompt costs that prompt; a function that has worked once was not written wrongly.
"""

from __future__ import annotations

from typing import NamedTuple

from april.errors import UsageError

KINDS = (UsageError, TypeError, AttributeError, NameError, ImportError, NotImplementedError)
"""What such functions raise; other errors may come from what they ask."""
GROUPS_OF_A_MISTAKE = 2
"""Prompts for which a function has failed so, and for none it has worked."""


class Mistake(NamedTuple):
    """What a failure says of its function."""

    likely: bool
    sure: bool


class Mistakes:
    """Failures of a run's functions, by kind of function (reward, rollout, filter)."""

    def __init__(self) -> None:
        self._worked: set[str] = set()
        self._groups: dict[str, set[int]] = {}

    def worked(self, function: str) -> None:
        """A call has come to its end."""
        self._worked.add(function)

    def made(self, function: str, error: BaseException, group: int) -> Mistake:
        """A call for a sample of this group has failed."""
        if function in self._worked or not isinstance(error, KINDS):
            return Mistake(False, False)
        groups = self._groups.setdefault(function, set())
        groups.add(group)
        return Mistake(True, len(groups) >= GROUPS_OF_A_MISTAKE)
