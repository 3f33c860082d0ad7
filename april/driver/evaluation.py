"""Evaluation rollouts: the same engines, their own sampling, no carry and no count of training touched."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from april.core import commands as do
from april.core import events as ev
from april.core.sampling import SamplingParams
from april.core.types import AttemptFailure, Prompt
from april.driver.rewards import Response
from april.driver.rollout_driver import RolloutDriver
from april.errors import EngineError, RequestRefused, RolloutError, WireError

ERRORS = {
    None: RolloutError, AttemptFailure.CORRUPT: WireError, AttemptFailure.REFUSED: RequestRefused,
    AttemptFailure.NO_TEXT: RolloutError,
}  # fmt: skip
"""What is raised, by what is to blame; for all else an EngineError."""


@dataclass(frozen=True)
class EvaluationResult:
    """Responses and rewards of an evaluation, prompt by prompt."""

    responses: tuple[tuple[Response, ...], ...]
    """``[prompts][n]``"""
    rewards: NDArray[np.float64]
    """float64 [prompts, n]"""

    @property
    def reward_mean(self) -> float:
        """Mean over everything."""
        return float(self.rewards.mean())

    @property
    def reward_standard_error(self) -> float:
        """Standard error of the mean, over prompts."""
        means = self.rewards.mean(axis=1)
        return float(means.std(ddof=1) / np.sqrt(len(means))) if len(means) > 1 else 0.0


class Evaluator:
    """Evaluations on a driver, whose core runs them while training waits."""

    def __init__(self, driver: RolloutDriver) -> None:
        self._driver = driver

    async def evaluate(
        self, prompts: Sequence[Prompt], n_samples: int, sampling: SamplingParams, seed: int
    ) -> EvaluationResult:
        """``n_samples`` responses to each prompt, scored by the training's reward function.

        Raises:
            RolloutError: no reward function, or a rollout or reward failed; the prompt is named.
            EngineError: no engine is left; a request that breaks off begins again on another one, with the same seed.
        """
        driver, local = self._driver, self._driver.local
        if local.functions.reward is None and local.functions.group_reward is None:
            raise RolloutError("evaluate needs a reward function; give the scheduler reward= or group_reward=")
        await driver.ask_engines()
        number, end = driver.begin_evaluation(prompts, n_samples, sampling, seed)
        try:
            ended = await asyncio.shield(end)
            groups = () if isinstance(ended, do.EvaluationFailed) else ended.groups
            responses = local.samples.evaluated(number, groups)
        except asyncio.CancelledError:
            driver.post(ev.EvaluationCancelled(number))
            await asyncio.wait([end])  # its requests end, within the deadline for aborts
            await local.samples.cleaned_up()
            raise
        finally:
            raised = local.samples.raised.pop(number, None)
            local.samples.elsewhere.pop(number, None)
        if isinstance(ended, do.EvaluationFailed):
            await local.samples.cleaned_up()
            error = ERRORS.get(ended.kind, EngineError)
            raise error(ended.error) from (raised if error is RolloutError else None)
        if driver._pending.batch is None:  # no batch is being made: the trainer has its model again
            await driver.quiet()
        return EvaluationResult(responses, np.array([[s.reward for s in g.samples] for g in ended.groups], np.float64))
