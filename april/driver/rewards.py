"""Defines the responses that reward functions receive, and checks the rewards and verdicts that they return.

``core/function_results.py`` decides what happens when a function raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from inspect import isawaitable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from april.core.tape import Float32, Int32
from april.core.types import FinishReason, Prompt, Sample, SampleId
from april.core.value_checks import wrong_reward
from april.driver.detokenizer import Detokenizer
from april.errors import UsageError


class Conversation(NamedTuple):
    """One conversation of a response, which becomes a row of the batch.

    ``prompt_ids`` int32 [P], ``tokens`` int32 [T], ``logprobs`` float32 [T], ``loss_mask`` uint8 [T].
    """

    prompt_ids: Int32
    tokens: Int32
    logprobs: Float32
    loss_mask: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Response:
    """A finished response, as reward functions and filters receive it.

    ``tokens``, ``logprobs`` and ``loss_mask`` are those of the first conversation.
    """

    sample_id: SampleId
    tokens: Int32
    """Response tokens, int32 [T], EOS included."""
    logprobs: Float32
    """Log-probabilities of the tokens, float32 [T]."""
    loss_mask: NDArray[np.uint8]
    """Loss mask, uint8 [T]: 0 for tokens of the environment, 1 for generated tokens."""
    finish: FinishReason
    output: Any
    """Return value of the rollout function."""
    reward: float | None = None
    """Reward of the sample, for filters; None for reward functions."""
    conversations: tuple[Conversation, ...] = field(default=(), repr=False)
    """All conversations, in the order in which they began; usually only one."""
    detokenizer: Detokenizer | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        return f"<Response {self.sample_id} of {len(self.tokens)} tokens, finish={self.finish}, reward={self.reward}>"

    def text(self, special_tokens: bool = False) -> str:
        """Return the whole response as text, tool results included, with or without special tokens such as EOS.

        Raises UsageError without a tokenizer.
        """
        if self.detokenizer is None:
            raise UsageError("response.text() needs a tokenizer; give the scheduler tokenizer=...")
        return self.detokenizer.text_of(self.tokens, special_tokens)


@dataclass(frozen=True)
class EvaluationResult:
    """Responses and rewards of an evaluation, prompt by prompt."""

    responses: tuple[tuple[Response, ...], ...]
    """Responses by prompt and sample, ``[prompts][n]``."""
    rewards: NDArray[np.float64]
    """Rewards, float64 [prompts, n]."""

    @property
    def reward_mean(self) -> float:
        """Mean of all rewards."""
        return float(self.rewards.mean())

    @property
    def reward_standard_error(self) -> float:
        """Standard error of the mean reward, computed over prompts; 0 for one prompt."""
        means = self.rewards.mean(axis=1)
        return float(means.std(ddof=1) / np.sqrt(len(means))) if len(means) > 1 else 0.0


def response_of(
    sample: Sample, output: Any, detokenizer: Detokenizer | None = None, reward: float | None = None
) -> Response:
    """Return a finished sample as a Response; its arrays are copies, which the user's functions may change."""
    assert sample.finish is not None
    chains = [c for c in sample.chains if c.tape.generated] or sample.chains[:1]
    conversations = tuple(
        Conversation(c.prompt.copy(), c.tape.tokens.copy(), c.tape.logprobs.copy(), c.tape.loss_mask()) for c in chains
    )
    _, tokens, logprobs, mask = conversations[0]
    return Response(sample.key, tokens, logprobs, mask, sample.finish, output, reward, conversations, detokenizer)


def rewards_differ(prompt: Prompt, responses: Sequence[Response]) -> bool:
    """Accept a group if its rewards differ: the filter of DAPO's dynamic sampling (arXiv 2503.14476, section 3.2)."""
    return len({r.reward for r in responses}) > 1


def checked_verdict(value: Any, group: int) -> bool:
    """Return a filter's verdict as a bool; raises UsageError naming the group for another type."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise UsageError(
        f"the filter of group {group} returned {value!r} ({type(value).__name__}); expected True or False"
    )


def checked_reward(value: Any, sample_id: SampleId) -> float:
    """Return a reward as a finite float within the range of float32; raises UsageError naming the sample."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        what = "a coroutine that was not awaited" if isawaitable(value) else f"{value!r} ({type(value).__name__})"
        raise UsageError(f"the reward of {sample_id} is {what}; expected a number") from None
    if wrong := wrong_reward(number):
        raise UsageError(f"the reward of {sample_id} is {wrong}")
    return number


def checked_rewards(values: Any, sample_ids: Sequence[SampleId]) -> list[float]:
    """Return the rewards of a group, one finite float per sample; raises UsageError naming the group."""
    # iterating over these types would give keys, characters, or an undefined order
    unordered = isinstance(values, (Mapping, Set, str, bytes))
    try:
        count = len(values)
    except TypeError:
        count = -1
    if unordered or count != len(sample_ids):
        raise UsageError(
            f"the group reward of group {sample_ids[0].group} returned {values!r}; "
            f"expected {len(sample_ids)} numbers, one per sample"
        )
    return [checked_reward(v, s) for v, s in zip(values, sample_ids, strict=True)]
