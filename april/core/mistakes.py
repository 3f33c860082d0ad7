"""Functions that were written wrongly: they fail alike for every sample, so the step ends at once and says why.

What a function raises for one prompt costs that prompt; a function that has worked once was not written wrongly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from april.core.settings import CoreSettings
from april.core.types import Sample, SampleId

MOST_GROUPS = 4
MOST_SAMPLES = 8
"""Failures of so many are believed to be those of all."""


class Function(StrEnum):
    """The user's functions, by what they are asked for."""

    ROLLOUT = "rollout function"
    REWARD = "reward function"
    FILTER = "filter"


class Mistake(NamedTuple):
    """What a failure says of its function."""

    likely: bool
    sure: bool


class Mistakes:
    """Failures of a run's functions, wherever they run, by their kind: what was raised in which line."""

    def __init__(self, settings: CoreSettings) -> None:
        self.groups = max(2, min(settings.over_sampling_batch_size, MOST_GROUPS))
        """Prompts for which a function must fail alike."""
        self._samples = min(self.groups * settings.n_samples_per_prompt, MOST_SAMPLES)
        self._worked: set[Function] = set()
        self._failed: defaultdict[tuple[Function, str], set[SampleId]] = defaultdict(set)

    def worked(self, function: Function) -> None:
        """A call for training has come to its end."""
        self._worked.add(function)

    def made(self, function: Function, kind: str, samples: Iterable[Sample], others: Iterable[Sample] = ()) -> Mistake:
        """A call for these samples has failed. ``kind``: empty if that may pass.

        ``others``: for which it may be about to work; more of them than have failed are waited for.
        """
        if not kind or function in self._worked:
            return Mistake(likely=False, sure=False)
        failed = self._failed[function, kind]
        failed.update(sample.id for sample in samples)
        enough = len(failed) >= self._samples and len({group for group, _ in failed}) >= self.groups
        return Mistake(likely=True, sure=enough and sum(s.id not in failed for s in others) <= len(failed))
