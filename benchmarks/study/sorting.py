"""Numbers to sort: ``number_sorting`` of reasoning-gym 0.1.25, one token per number.

A prompt is BOS, the numbers, a direction and an end. A response is any number of drafts and one answer::

    (DRAFT numbers)*  ANSWER numbers EOS

as in the demo's count-down. Questions and right answers are those of reasoning-gym; its score of an answer is the
reward. Lists are of lognormal length, and drafts of any number, so lengths have a tail between prompts and within.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.study.countdown import ANSWER_ID, BOS_ID, DRAFT_ID, EOS_ID

Int32 = NDArray[np.int32]

ASCENDING_ID: Final = 5
DESCENDING_ID: Final = 6
END_ID: Final = 7
NUMBERS: Final = 8
"""First of the ids of 0 to 99."""
VOCAB_SIZE: Final = NUMBERS + 100

MEDIAN, SIGMA, FEWEST, MOST = 4.0, 0.7, 2, 20
"""Numbers in a list, lognormal."""
LONG_FROM: Final = 7
"""A list of so many numbers is long."""
LONG_SHARE: Final = 0.24
"""Share of the lists that are; of 100,000 draws."""
DRAFT_PROBABILITY, SLIP_PROBABILITY = 0.35, 0.1
PROMPT_CAP: Final = MOST + 3
RESPONSE_CAP: Final = 200
QUESTIONS: Final = 300
"""Held-out lists, drawn once as prompts are."""

_TRAINING, _HELD_OUT, _DEMONSTRATION = 0, 1, 2


def entry(stream: int, seed: int, index: int) -> dict[str, Any]:
    """Entry of reasoning-gym, the first of a stream at this place that may be in it."""
    from reasoning_gym.algorithmic.number_sorting import NumberSortingConfig, NumberSortingDataset

    rng = np.random.default_rng([stream, seed, index])
    while True:
        count = int(np.clip(np.rint(MEDIAN * np.exp(SIGMA * rng.standard_normal())), FEWEST, MOST))
        config = NumberSortingConfig(
            min_numbers=count, max_numbers=count, min_decimals=0, max_decimals=0, min_value=0, max_value=99,
            seed=int(rng.integers(2**31)), size=1,
        )  # fmt: skip
        found: dict[str, Any] = NumberSortingDataset(config)[0]
        if is_held_out(_numbers(found, "original_numbers")) == (stream == _HELD_OUT):
            return found


def is_held_out(numbers: list[int]) -> bool:
    """True for the quarter of all lists, in any order, that training and warm-up never see."""
    return sum(numbers) % 4 == 1


def encode(found: dict[str, Any]) -> tuple[Int32, Int32]:
    """Prompt and right answer of an entry, as tokens."""
    direction = ASCENDING_ID if found["metadata"]["direction"] == "ascending" else DESCENDING_ID
    prompt = [BOS_ID, *(NUMBERS + n for n in _numbers(found, "original_numbers")), direction, END_ID]
    answer = [ANSWER_ID, *(NUMBERS + n for n in _numbers(found, "sorted_numbers")), EOS_ID]
    return np.array(prompt, np.int32), np.array(answer, np.int32)


def prompt_ids(seed: int, index: int) -> Int32:
    """Prompt ``index`` of the training stream of ``seed``."""
    return encode(entry(_TRAINING, seed, index))[0]


def questions() -> tuple[list[tuple[Int32, Int32]], list[tuple[Int32, Int32]]]:
    """Held-out prompts with their answers: the short and the long ones."""
    drawn = [encode(entry(_HELD_OUT, 0, index)) for index in range(QUESTIONS)]
    return [p for p in drawn if len(p[1]) < LONG_FROM + 2], [p for p in drawn if len(p[1]) >= LONG_FROM + 2]


def reward(prompt: Int32, response: Int32) -> float:
    """1.0 if the response ends with ANSWER, the numbers in order, and EOS; a second ANSWER or earlier EOS is wrong."""
    tokens = np.asarray(response)
    answers = np.flatnonzero(tokens == ANSWER_ID)
    if len(answers) != 1 or np.any(tokens[: answers[0]] == EOS_ID):
        return 0.0
    numbers, direction = np.asarray(prompt)[1:-2], int(prompt[-2])
    right = np.sort(numbers) if direction == ASCENDING_ID else np.sort(numbers)[::-1]
    return float(np.array_equal(tokens[answers[0] :], [ANSWER_ID, *right, EOS_ID]))


def demonstration(seed: int, index: int) -> tuple[Int32, Int32]:
    """Prompt and imperfect response ``index`` for the warm-up of ``seed``."""
    prompt, answer = encode(entry(_DEMONSTRATION, seed, index))
    rng = np.random.default_rng([_DEMONSTRATION, seed, index, 1])

    def slipping() -> list[int]:
        right = answer[1:-1]
        slips = rng.random(len(right)) < SLIP_PROBABILITY
        return [int(NUMBERS + rng.integers(100)) if slip else int(n) for n, slip in zip(right, slips, strict=True)]

    response: list[int] = []
    while rng.random() < DRAFT_PROBABILITY:
        response += [DRAFT_ID, *slipping()]
    return prompt, np.array([*response, ANSWER_ID, *slipping(), EOS_ID][:RESPONSE_CAP], np.int32)


def _numbers(found: dict[str, Any], key: str) -> list[int]:
    return [int(float(text)) for text in found["metadata"][key]]
