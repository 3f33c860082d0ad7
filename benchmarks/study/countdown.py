"""The demo's task: count down from a number, after as much rough work as one likes.

A prompt is BOS, a number digit by digit, and how far to count: to the multiple of ten below it (short) or of a
hundred (long). A response is any number of draft passes and one answer::

    (DRAFT m m-1 ... 0)*  ANSWER n n-1 ... round number EOS

with three digit tokens per number. The verifier judges the answer alone: drafts are free reasoning. So lengths have
a long tail: some prompts ask for a very long answer, and drafts of any length make the samples of one group differ.

Invariant: a number is either a training prompt or a held-out one, never both; demonstrations are made for training
numbers only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]

BOS_ID: Final = 0
EOS_ID: Final = 1
PAD_ID: Final = 2
DRAFT_ID: Final = 3
ANSWER_ID: Final = 4
DIGITS: Final = 5
"""First of the 30 ids of written digits: ten for the hundreds, ten for the tens, ten for the ones."""
PROMPT_DIGITS: Final = 35
"""First of the 30 ids of the prompt's digits, in the same order."""
TO_TEN_ID: Final = 65
TO_HUNDRED_ID: Final = 66
VOCAB_SIZE: Final = 67

PROMPT_LENGTH: Final = 5
RESPONSE_CAP: Final = 400
"""Most tokens of a response, EOS included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Which questions are asked, and how the demonstrations answer them."""

    long_share: float = 0.1
    """Share of the prompts that are long."""
    long_from: int = 30
    long_to: int = 69
    """Long answers have this many numbers after the first."""
    short_to: int = 5
    """Short answers have 1 to this many."""
    draft_probability: float = 0.35
    """Probability of a draft, and of each further one; it counts down from a lognormal number."""
    draft_median: float = 10.0
    draft_sigma: float = 1.0
    draft_max: int = 99
    slip_probability: float = 0.1
    """Demonstrations slip in this share of the written numbers; it is what the reward teaches to avoid."""


WIDE: Final = Sizes()
"""Long answers that are hardly ever right: benchmarks/trl_demo.py."""
TAIL: Final = Sizes(slip_probability=0.04, long_share=0.25, long_from=15, long_to=49)
"""Long answers that can be learned, a quarter of the prompts: the demo."""

_TRAINING, _HELD_OUT, _DEMONSTRATION = 0, 1, 2


def is_held_out(number: int) -> bool:
    """True for the quarter of all numbers that training and warm-up never see as a prompt."""
    return (7 * (number // 10) + 3 * (number % 10)) % 4 == 1


def prompt_ids(seed: int, index: int, held_out: bool = False, sizes: Sizes = WIDE) -> Int32:
    """Prompt ``index`` of the training stream of ``seed``, or of its held-out stream: int32 [PROMPT_LENGTH].

    Depends on nothing but the arguments. Raises ValueError for a negative seed or index.
    """
    rng = np.random.default_rng([_HELD_OUT if held_out else _TRAINING, seed, index])
    return encode_prompt(*_question(rng, held_out, sizes))


def encode_prompt(number: int, unit: int = 10) -> Int32:
    """The prompt that asks to count down from ``number`` to the multiple of ``unit`` below it: int32 [PROMPT_LENGTH].

    Raises ValueError unless 1 <= number <= 999, not a multiple of ten, and unit is 10 or 100.
    """
    if not 1 <= number <= 999 or number % 10 == 0 or unit not in (10, 100):
        raise ValueError(f"cannot ask for {number} by {unit}: need 1..999, not a multiple of ten, and unit 10 or 100")
    unit_id = TO_TEN_ID if unit == 10 else TO_HUNDRED_ID
    return np.array([BOS_ID, *_digits(number, PROMPT_DIGITS), unit_id], dtype=np.int32)


def decode_prompt(prompt: Int32) -> tuple[int, int]:
    """(number, unit) that a prompt asks for; raises ValueError for ids that are not a prompt of this task."""
    if len(prompt) == PROMPT_LENGTH:
        hundreds, tens, ones = (int(token) - PROMPT_DIGITS - 10 * place for place, token in enumerate(prompt[1:4]))
        number = 100 * hundreds + 10 * tens + ones
        unit = 10 if prompt[4] == TO_TEN_ID else 100
        if 1 <= number <= 999 and number % 10 and np.array_equal(prompt, encode_prompt(number, unit)):
            return number, unit
    raise ValueError(f"not a prompt of the count-down task: {list(prompt)}")


def answer_ids(number: int, unit: int = 10) -> list[int]:
    """The one right end of a response: ANSWER, the number, those below it down to the round one, EOS."""
    stop = number // unit * unit
    return [ANSWER_ID, *_digits(number, PROMPT_DIGITS), *written(range(number - 1, stop - 1, -1)), EOS_ID]


def reward(prompt: Int32, response: Int32) -> float:
    """1.0 if the response ends with ANSWER, exactly the asked numbers and EOS, else 0.0.

    What comes before ANSWER is not judged, but a second ANSWER or an earlier EOS is wrong.
    """
    tokens = np.asarray(response)
    answers = np.flatnonzero(tokens == ANSWER_ID)
    if len(answers) != 1 or np.any(tokens[: answers[0]] == EOS_ID):
        return 0.0
    return float(np.array_equal(tokens[answers[0] :], answer_ids(*decode_prompt(prompt))))


def demonstration(seed: int, index: int, sizes: Sizes = WIDE) -> tuple[Int32, Int32]:
    """Prompt and imperfect response ``index`` for the warm-up of ``seed``; at most RESPONSE_CAP response tokens."""
    rng = np.random.default_rng([_DEMONSTRATION, seed, index])
    number, unit = _question(rng, held_out=False, sizes=sizes)
    response: list[int] = []
    while rng.random() < sizes.draft_probability:
        size = sizes.draft_median * np.exp(sizes.draft_sigma * rng.standard_normal())
        start = int(np.clip(np.rint(size), 1, sizes.draft_max))
        response += [DRAFT_ID, *written(slipping(rng, start, 0, sizes.slip_probability))]
    counted = written(slipping(rng, number - 1, number // unit * unit, sizes.slip_probability))
    response += [ANSWER_ID, *_digits(number, PROMPT_DIGITS), *counted, EOS_ID]
    return encode_prompt(number, unit), np.array(response[:RESPONSE_CAP], dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Question:
    """A held-out prompt and the one right end of a response to it, from ANSWER to EOS."""

    prompt: Int32
    answer: Int32


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """Held-out questions, which are the same for every seed.

    Attributes:
        short, long: those with short and with long answers.
        long_share: share of the prompts that are long.
        response_cap: most tokens of a response, EOS included.
    """

    short: list[Question]
    long: list[Question]
    long_share: float
    response_cap: int = RESPONSE_CAP


def questions(sizes: Sizes = WIDE) -> Questions:
    """All held-out questions, each once."""
    numbers = [number for number in range(1, 1000) if number % 10 and is_held_out(number)]
    return Questions(
        short=[_right(number, 10) for number in numbers if number % 10 <= sizes.short_to],
        long=[_right(number, 100) for number in numbers if sizes.long_from <= number % 100 <= sizes.long_to],
        long_share=sizes.long_share,
    )


def _right(number: int, unit: int) -> Question:
    return Question(encode_prompt(number, unit), np.array(answer_ids(number, unit), np.int32))


def _question(rng: np.random.Generator, held_out: bool, sizes: Sizes) -> tuple[int, int]:
    """A number and a unit: mostly short answers, some very long ones."""
    long = rng.random() < sizes.long_share
    while True:
        number = 10 * int(rng.integers(0, 100)) + int(rng.integers(1, 10))
        fits = sizes.long_from <= number % 100 <= sizes.long_to if long else number % 10 <= sizes.short_to
        if fits and is_held_out(number) == held_out:
            return number, 100 if long else 10


def _digits(number: int, first_id: int) -> tuple[int, int, int]:
    return first_id + number // 100, first_id + 10 + number // 10 % 10, first_id + 20 + number % 10


def written(numbers: Iterable[int]) -> list[int]:
    """The digit tokens of numbers, three of each."""
    return [token for number in numbers for token in _digits(number, DIGITS)]


def slipping(rng: np.random.Generator, start: int, stop: int, probability: float) -> list[int]:
    """Count from start to stop, writing a wrong last digit now and then and counting on from what was written."""
    numbers: list[int] = []
    number = start
    while True:
        if rng.random() < probability:
            number = number - number % 10 + int(rng.integers(0, 10))
        numbers.append(number)
        if number == stop:
            return numbers
        number -= 1
