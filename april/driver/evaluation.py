"""Evaluation rollouts: the same engines, their own sampling, no carry and no count of training touched."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from april.core.sampling import SamplingParams, attempt_seed
from april.core.tape import Int32
from april.core.types import FinishReason, Group, Prompt, RecordedCall, Sample
from april.driver.evaluation_requests import EvaluationPool, EvaluationRequest
from april.driver.llm import AFTER_ITS_END, LLM, Completion, checked_call, completion_of
from april.driver.rewards import Response, checked_reward, checked_rewards, response_of
from april.driver.rollout_driver import RolloutDriver
from april.driver.stop_strings import StopMatcher
from april.driver.user_calls import Call, PendingCall
from april.driver.user_code import describe
from april.engines.protocol import Request
from april.errors import EngineError, RolloutError

T = TypeVar("T")

EVALUATION_MARK = 0xFFFF
"""Stands where attempt ids have the incarnation, so that no id of an evaluation is one of training."""


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
    """Runs evaluations on a driver whose training is paused meanwhile."""

    def __init__(self, driver: RolloutDriver) -> None:
        self._driver = driver
        self._numbers = itertools.count(1)

    async def evaluate(
        self, prompts: Sequence[Prompt], n_samples: int, sampling: SamplingParams, seed: int
    ) -> EvaluationResult:
        """``n_samples`` responses to each prompt, scored by the training's reward function.

        Raises:
            RolloutError: no reward function, or a rollout or reward failed; the prompt is named.
            EngineError: no engine is left; a request that breaks off begins again on another one, with the same seed.
        """
        functions, calls = self._driver.functions, self._driver.calls
        if functions.reward is None and functions.group_reward is None:
            raise RolloutError("evaluate needs a reward function; give the scheduler reward= or group_reward=")
        settings = self._driver.core.settings
        places = asyncio.Semaphore(settings.max_in_flight)
        # a thread each is dear: no more of them than can generate
        plain = self._driver.rollout is not functions.rollout
        threads = asyncio.Semaphore(settings.max_in_flight) if plain else nullcontext()
        pool = EvaluationPool(self._driver)

        async def one(sample: Sample) -> Response:
            call: Call

            async def generate(params: SamplingParams, token_ids: Int32 | None) -> Completion:
                if call.over:
                    raise RolloutError(AFTER_ITS_END)
                call.stop_clock()
                try:
                    return await respond(params, token_ids)
                finally:
                    call.start_clock()

            async def respond(params: SamplingParams, token_ids: Int32 | None) -> Completion:
                async with places:
                    return await self._generate(pool, sample, params, token_ids, seed)

            arguments = (sample.group.prompt, LLM(sample.id, sampling, generate))
            waiting = PendingCall()
            async with threads:
                call = calls.begin_async(self._driver.rollout, arguments, sample.id, waiting.answered)
                try:
                    output = await waiting.wait(call)
                except SystemExit as error:
                    raise RolloutError(f"the rollout function raised {describe(error)}") from error
            if sample.finish is None:
                raise RolloutError("the rollout function generated nothing")
            return response_of(sample, output, self._driver.detokenizer)

        async def rewards(prompt: Prompt, responses: list[Response]) -> list[float]:
            ids = [r.sample_id for r in responses]
            if functions.group_reward is not None:
                return checked_rewards(await calls.call(functions.group_reward, prompt, responses, where=ids[0]), ids)
            assert functions.reward is not None
            values = [await calls.call(functions.reward, prompt, r, where=r.sample_id) for r in responses]
            return [checked_reward(v, i) for v, i in zip(values, ids, strict=True)]

        async def group(number: int, prompt: Prompt) -> tuple[tuple[Response, ...], list[float]]:
            work = Group(number, prompt, n_samples)
            what = "the rollout function"
            try:
                responses = await _all(one(s) for s in work.samples)
                what = "the reward function"
                return tuple(responses), await rewards(prompt, responses)
            except EngineError:
                raise
            except RolloutError as error:
                raise RolloutError(f"evaluation prompt {number}: {error}") from error
            except (Exception, SystemExit) as error:
                raise RolloutError(f"evaluation prompt {number}: {what} raised {describe(error)}") from error

        async with self._driver.paused():
            self._driver.raise_if_half_updated()
            await self._driver.engine_calls.ask_all()
            results = await _all(group(i, p) for i, p in enumerate(prompts))
        return EvaluationResult(
            tuple(responses for responses, _ in results), np.array([rewards for _, rewards in results], np.float64)
        )

    async def _generate(
        self, pool: EvaluationPool, sample: Sample, sampling: SamplingParams, token_ids: Int32 | None, seed: int
    ) -> Completion:
        core, detokenizer = self._driver.core, self._driver.detokenizer
        prompt, tape = sample.group.prompt.token_ids, sample.tape
        longest = min(len(prompt) + core.settings.max_response_len, core.engines.max_context)
        token_ids = checked_call(sample, sampling, token_ids, pool.vocab_size, longest, detokenizer is not None)
        if token_ids is not None:
            have = len(prompt) + len(tape)
            tape.add_environment(token_ids[have:], core.clock.current)
        start = len(tape)
        room = longest - len(prompt) - start
        if room <= 0:
            if start == 0:
                raise RolloutError(f"it has {len(prompt)} tokens, which leaves no room for a response")
            return _complete(sample, start, FinishReason.LENGTH)
        params = sampling.after(0, attempt_seed(seed, sample.id.group, sample.id.index, start))
        params = params.capped(min(room, params.max_tokens))
        ids = np.concatenate((prompt, tape.tokens))

        def begin() -> EvaluationRequest:
            attempt_id = f"{core.settings.run_id:016x}{EVALUATION_MARK:04x}{next(self._numbers):012x}"
            stops = None
            if params.stop and detokenizer is not None:
                stops = StopMatcher(detokenizer.text, params.stop, ids, 0, params.min_tokens)
            sent = replace(params, stop=())
            return EvaluationRequest(
                self._driver, Request(attempt_id, ids, sent, sample_key=sample.id, stream=stops is not None), stops
            )

        request, engine, finish = await pool.respond(begin)
        tape.add_attempt(request.tape, request.request.attempt_id, engine, params.temperature)
        return _complete(sample, start, FinishReason(str(finish)))


def _complete(sample: Sample, start: int, finish: FinishReason) -> Completion:
    sample.finish = finish
    return completion_of(sample, RecordedCall(start, len(sample.tape), finish))


async def _all(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order; the first error ends all the others."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(c) for c in coroutines]
    except ExceptionGroup as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from first.__cause__
    return [task.result() for task in running]
