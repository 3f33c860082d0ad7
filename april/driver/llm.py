"""What a rollout function sees: ``llm.generate``, which looks as if it simply took long.

When a step ends in the middle of a call, april aborts the engine request and keeps its tokens; the coroutine
stays parked. In a later step the request is continued under newer weights, and the coroutine gets one
completed response with the version of every token.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from april.core.sampling import SamplingParams
from april.core.tape import Float32, Int32
from april.core.types import FinishReason, Prompt, Sample, SampleId


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of one ``llm.generate``.

    ``tokens`` int32 [T] (EOS included), ``logprobs`` float32 [T] in nats, ``versions`` int32 [T, 2]
    (incarnation, n), ``conversation`` int32 [P + ...]: everything so far, these tokens included.
    """

    tokens: Int32
    logprobs: Float32
    versions: Int32
    finish: FinishReason
    conversation: Int32


RolloutFunction = Callable[[Prompt, "LLM"], Awaitable[Any]]
GenerateFunction = Callable[[SamplingParams, Int32 | None], Awaitable[Completion]]


class LLM:
    """The policy, as one sample sees it."""

    __slots__ = ("_generate", "_sampling", "sample_id")

    def __init__(self, sample_id: SampleId, sampling: SamplingParams, generate: GenerateFunction) -> None:
        self.sample_id = sample_id
        self._sampling = sampling
        self._generate = generate

    async def generate(
        self,
        token_ids: Sequence[int] | Int32 | None = None,
        *,
        max_tokens: int | None = None,
        min_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        stop_token_ids: Sequence[int] | None = None,
    ) -> Completion:
        """Continue the conversation; returns when the response is complete, however many steps that takes.

        Args:
            token_ids: the conversation to continue: the prompt, everything generated so far, and what the
                environment adds (it becomes a segment without loss). None: as it stands.
            max_tokens: most tokens of this call; the budget of the whole response holds as well.
            min_tokens, temperature, top_p, stop_token_ids: override the configuration for this call.
        """
        changes: dict[str, Any] = {
            "max_tokens": max_tokens,
            "min_tokens": min_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "stop_token_ids": None if stop_token_ids is None else tuple(stop_token_ids),
        }
        changes = {name: value for name, value in changes.items() if value is not None}
        if "max_tokens" in changes and changes["max_tokens"] < 1:
            raise ValueError(f"llm.generate: max_tokens must be at least 1, got {max_tokens}")
        sampling = replace(self._sampling, **changes) if changes else self._sampling
        ids = None if token_ids is None else np.asarray(token_ids, np.int32)
        return await self._generate(sampling, ids)


def completion_of(sample: Sample, start: int) -> Completion:
    """What one complete generate call added to a sample, from response token ``start`` on."""
    assert sample.finish is not None
    tape = sample.tape
    return Completion(
        tape.tokens[start:],
        tape.logprobs[start:],
        tape.version_array()[start:],
        sample.finish,
        np.concatenate((sample.group.prompt.token_ids, tape.tokens)),
    )


async def single_turn(prompt: Prompt, llm: LLM) -> None:
    """The default rollout function: one response to the prompt."""
    await llm.generate()
