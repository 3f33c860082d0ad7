"""Functions that a user of slime names on its command line, for the tests of the adapter."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import Any

from adapters.slime_stand_in import DynamicFilterOutput, Sample

KEPT_LENGTH = 30
running: dict[int, asyncio.Event] = {}
"""By index of the sample: set it to cut the call of :func:`generate`."""
seen: list[Any] = []


async def group_reward(args: Namespace, samples: list[Sample], **kwargs: Any) -> list[float]:
    """The place among the siblings."""
    lengths = sorted(s.response_length for s in samples)
    return [float(lengths.index(s.response_length)) for s in samples]


async def group_length(args: Namespace, samples: list[Sample], **kwargs: Any) -> list[float]:
    """The number of response tokens of each."""
    return [float(s.response_length) for s in samples]


async def two_rewards(args: Namespace, sample: Sample, **kwargs: Any) -> dict[str, float]:
    """Several numbers; --reward-key names one."""
    return {"length": float(sample.response_length), "other": 0.0}


async def failing_reward(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """Never works."""
    raise ValueError("the judge is down")


def keep_short(args: Namespace, group: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """A reason with every verdict."""
    return DynamicFilterOutput(group[0].response_length < KEPT_LENGTH, reason="long")


def keep_none(args: Namespace, group: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """Rejects all, unless there would be too few."""
    return DynamicFilterOutput(False, reason="none", keep_when_insufficient=True)


def mark(args: Namespace, sample: Sample) -> None:
    """A sample hook."""
    sample.metadata["marked"] = sample.response_length


def all_samples(args: Namespace, groups: list[list[Sample]], data_source: Any) -> None:
    """Sees rejected groups too."""
    seen.append([g[0].group_index for g in groups])


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """A token per turn of the loop, up to 5 + 3 * index of them; cut by its event, and continued from its sample."""
    event = running.setdefault(sample.index or 0, asyncio.Event())
    goal = 5 + 3 * (sample.index or 0) % 40
    sample.tokens = sample.tokens or [1, 2]
    sample.rollout_log_probs = sample.rollout_log_probs or []
    sample.status = sample.Status.COMPLETED
    while sample.response_length < goal:
        if event.is_set():
            sample.status = sample.Status.ABORTED
            break
        sample.tokens.append(10 + sample.response_length)
        sample.rollout_log_probs.append(-0.25)
        sample.response_length += 1
        await asyncio.sleep(0)
    running.pop(sample.index or 0, None)
    return sample


async def several(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """One sample becomes two."""
    return [sample, sample]


async def one_argument(input: Any) -> Any:
    """Not what slime calls."""
