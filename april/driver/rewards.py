"""Rewards: sync or async, per sample or per group, computed beside generation.

Async functions run on april's loop; plain functions run in threads, so that a slow one delays nobody.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from april.core.tape import Float32, Int32
from april.core.types import FinishReason, Prompt, Sample, SampleId
from april.errors import RolloutError


@dataclass(frozen=True, slots=True)
class Response:
    """A finished response, as a reward function sees it."""

    sample_id: SampleId
    tokens: Int32
    """int32 [T], EOS included"""
    logprobs: Float32
    """float32 [T]"""
    loss_mask: NDArray[np.uint8]
    """uint8 [T], 0 for tokens of the environment"""
    finish: FinishReason
    output: Any
    """what the rollout function returned"""


RewardFunction = Callable[[Prompt, Response], float | Awaitable[float]]
GroupRewardFunction = Callable[[Prompt, Sequence[Response]], Sequence[float] | Awaitable[Sequence[float]]]


def response_of(sample: Sample, output: Any) -> Response:
    """The finished sample as a Response."""
    assert sample.finish is not None
    tape = sample.tape
    return Response(sample.id, tape.tokens, tape.logprobs, tape.loss_mask(), sample.finish, output)


async def call_user(function: Callable[..., Any], *args: Any) -> Any:
    """Call a user's function: a coroutine function on this loop, a plain one in a thread."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        return await function(*args)
    result = await asyncio.to_thread(function, *args)
    return await result if inspect.isawaitable(result) else result


def checked_reward(value: Any, sample_id: SampleId) -> float:
    """``value`` as a finite float; raises RolloutError naming the sample."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise RolloutError(
            f"the reward of {sample_id} is {value!r} ({type(value).__name__}); expected a number"
        ) from None
    if not math.isfinite(number):
        raise RolloutError(f"the reward of {sample_id} is {number}; expected a finite number")
    return number


def checked_rewards(values: Any, sample_ids: Sequence[SampleId]) -> list[float]:
    """One finite float per sample of a group; raises RolloutError naming the group."""
    try:
        count = len(values)
    except TypeError:
        count = -1
    if count != len(sample_ids):
        raise RolloutError(
            f"the group reward of group {sample_ids[0].group} returned {values!r}; "
            f"expected {len(sample_ids)} numbers, one per sample"
        )
    return [checked_reward(v, s) for v, s in zip(values, sample_ids, strict=True)]
