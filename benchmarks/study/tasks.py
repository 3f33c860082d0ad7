"""The tasks of the study: prompts, a verifiable reward, a model that has begun to learn, held-out questions.

Invariant: no question that is held out is ever a prompt or a demonstration, of any seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.study import countdown, sorting
from benchmarks.study.countdown import Question
from benchmarks.study.warmup import build_model, imitate

Int32 = NDArray[np.int32]

_TRAINING, _DEMONSTRATION = 0, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task.

    Attributes:
        name: as the design calls it.
        response_cap: most tokens of a response, EOS included.
        prompt_cap: most tokens of a prompt.
        prompt: prompt ``index`` of the training stream of ``seed``.
        reward: of a prompt and a response: 1 if it is right, else 0.
        demonstration: prompt and imperfect response ``index`` for the warm-up of ``seed``.
        short, long: held-out questions.
        long_share: share of the prompts that are long.
        warm_up_steps, warm_up_tokens: batches of demonstrations, and padded tokens of each.
        vocab_size, context: of the model.
    """

    name: str
    response_cap: int
    prompt_cap: int
    prompt: Callable[[int, int], Int32]
    reward: Callable[[Int32, Int32], float]
    demonstration: Callable[[int, int], tuple[Int32, Int32]]
    short: Sequence[Question]
    long: Sequence[Question]
    long_share: float
    warm_up_steps: int
    warm_up_tokens: int
    drafts: bool = True
    """Whether responses may begin with drafts."""
    vocab_size: int = countdown.VOCAB_SIZE
    context: int = 512

    @property
    def max_len(self) -> int:
        """Most tokens of a prompt and its response."""
        return self.prompt_cap + self.response_cap

    def start(self, seed: int, warm_up_steps: int | None = None, for_servers: bool = False) -> Any:
        """Return the model from which all arms of ``seed`` begin."""
        model = self.untrained(seed, for_servers)
        steps = self.warm_up_steps if warm_up_steps is None else warm_up_steps
        imitate(model, seed, self.demonstration, steps, tokens_per_step=self.warm_up_tokens)
        return model

    def untrained(self, seed: int, for_servers: bool = False) -> Any:
        """Return the model before its warm-up."""
        return build_model(seed, for_servers, vocab_size=self.vocab_size, context=self.context)


# ---------------------------------------------------------------- the demo's task, with a tail that can be learned


def _tail() -> Task:
    sizes = countdown.TAIL
    held_out = countdown.questions(sizes)
    return Task(
        name="tail", response_cap=countdown.RESPONSE_CAP, prompt_cap=countdown.PROMPT_LENGTH,
        prompt=lambda seed, index: countdown.prompt_ids(seed, index, sizes=sizes), reward=countdown.reward,
        demonstration=lambda seed, index: countdown.demonstration(seed, index, sizes),
        short=held_out.short, long=held_out.long, long_share=held_out.long_share, warm_up_steps=550, warm_up_tokens=768,
    )  # fmt: skip


# ---------------------------------------------------------------- more than a thousand tokens

LONG_NUMBERS = range(320, 430)
"""Counting down from them to zero takes 960 to 1,290 tokens."""
LONG_SLIPS = 0.0015
LONG_DEMONSTRATIONS = 0.1
"""Share of the demonstrations that are long."""
_COUNTING = replace(countdown.TAIL, slip_probability=LONG_SLIPS, draft_probability=0.0)
_TO_ZERO = 1000


def _long_numbers(held_out: bool) -> list[int]:
    return [n for n in LONG_NUMBERS if n % 10 and countdown.is_held_out(n) == held_out]


def _long_prompt(stream: int, seed: int, index: int) -> tuple[np.random.Generator, int]:
    rng = np.random.default_rng([stream, seed, index])
    numbers = _long_numbers(held_out=False)
    return rng, numbers[int(rng.integers(len(numbers)))]


def _long_question(number: int) -> Int32:
    """The prompt: the number, and in the place of the unit what no prompt of the demo has there."""
    prompt = countdown.encode_prompt(number, 100)
    prompt[-1] = countdown.DRAFT_ID
    return prompt


def _long_answer(number: int) -> Int32:
    return np.array(countdown.answer_ids(number, _TO_ZERO), np.int32)


def _long_demonstration(seed: int, index: int) -> tuple[Int32, Int32]:
    """Mostly those of the tail: counting is learned on short ones, and that it goes on for long on the others."""
    rng, number = _long_prompt(_DEMONSTRATION, seed, index)
    if rng.random() > LONG_DEMONSTRATIONS:
        return countdown.demonstration(seed, index, _COUNTING)
    right = countdown.answer_ids(number, _TO_ZERO)
    counted = countdown.written(countdown.slipping(rng, number - 1, 0, LONG_SLIPS))
    response = [*right[: 1 + 3], *counted, countdown.EOS_ID]
    return _long_question(number), np.array(response[:LONG_CAP], np.int32)


LONG_CAP = 1400
"""A slip that adds numbers still ends within it, mostly."""


def _long_reward(prompt: Int32, response: Int32) -> float:
    hundreds, tens, ones = (int(t) - countdown.PROMPT_DIGITS - 10 * place for place, t in enumerate(prompt[1:4]))
    return float(np.array_equal(response, _long_answer(100 * hundreds + 10 * tens + ones)))


def _long() -> Task:
    """Count down from 300 to 499 to zero, without a draft: all responses are long, so the tail is light."""
    held_out = [Question(_long_question(n), _long_answer(n)) for n in _long_numbers(held_out=True)]
    return Task(
        name="long", response_cap=LONG_CAP, prompt_cap=countdown.PROMPT_LENGTH,
        prompt=lambda seed, index: _long_question(_long_prompt(_TRAINING, seed, index)[1]),
        reward=_long_reward, demonstration=_long_demonstration, short=[], long=held_out, long_share=1.0,
        warm_up_steps=900, warm_up_tokens=2048, drafts=False, context=1536,
    )  # fmt: skip


# ---------------------------------------------------------------- numbers to sort, of reasoning-gym


def _sorting() -> Task:
    short, long = ([Question(*pair) for pair in part] for part in sorting.questions())
    return Task(
        name="sorting", response_cap=sorting.RESPONSE_CAP, prompt_cap=sorting.PROMPT_CAP,
        prompt=sorting.prompt_ids, reward=sorting.reward, demonstration=sorting.demonstration,
        short=short, long=long, long_share=sorting.LONG_SHARE, warm_up_steps=2000, warm_up_tokens=1536,
        vocab_size=sorting.VOCAB_SIZE,
    )  # fmt: skip


TASKS: dict[str, Callable[[], Task]] = {"tail": _tail, "sorting": _sorting, "long": _long}
