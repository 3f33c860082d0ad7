"""Decides when a failure counts as a bug in the user's function, which would fail for all samples.

``function_results`` receives the failures; ``SampleLifecycle`` decides whether a sample whose function failed is
retried, replaced or dropped (``retry_or_give_up``, ``replace_or_drop``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from april.core.settings import CoreSettings
from april.core.types import Sample, SampleId

CERTAIN_AFTER_GROUPS = 4
CERTAIN_AFTER_SAMPLES = 8
"""Numbers of groups and of samples with the same failure that make it certain that the function fails for all."""


class FunctionKind(StrEnum):
    """Kinds of user functions that the core waits for."""

    ROLLOUT = "rollout function"
    REWARD = "reward function"
    FILTER = "filter"


class BugVerdict(NamedTuple):
    """Says whether a failure is likely to be a bug in the user's function, and whether that is certain."""

    likely: bool
    certain: bool


class BugDetector:
    """Counts the failures of the user's functions by kind (exception and line), to recognise bugs in them."""

    def __init__(self, settings: CoreSettings) -> None:
        self.groups = max(2, min(settings.over_sampling_batch_size, CERTAIN_AFTER_GROUPS))
        """Number of prompts for which a function must fail in the same way before a bug is certain."""
        self._samples = min(self.groups * settings.n_samples_per_prompt, CERTAIN_AFTER_SAMPLES)
        self._succeeded: set[FunctionKind] = set()
        self._failed: defaultdict[tuple[FunctionKind, str], set[SampleId]] = defaultdict(set)

    def record_success(self, function: FunctionKind) -> None:
        """Record a successful call of this function for training; from now on, its failures do not count as bugs."""
        self._succeeded.add(function)

    def record_failure(
        self, function: FunctionKind, kind: str, samples: Iterable[Sample], others: Iterable[Sample] = ()
    ) -> BugVerdict:
        """Record a failed call for these samples. An empty ``kind`` marks a failure that may be temporary.

        ``others`` are samples whose calls have not ended; while they outnumber the failures, no bug is certain.
        """
        if not kind or function in self._succeeded:
            return BugVerdict(likely=False, certain=False)
        failed = self._failed[function, kind]
        failed.update(sample.id for sample in samples)
        enough = len(failed) >= self._samples and len({group for group, _ in failed}) >= self.groups
        return BugVerdict(likely=True, certain=enough and sum(s.id not in failed for s in others) <= len(failed))
