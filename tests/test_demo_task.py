"""The demo's task: prompts, verifier and demonstrations."""

from __future__ import annotations

import numpy as np
import pytest

from april.demo import task


def response(*parts: list[int]) -> np.ndarray:
    """Parts of a response as one array."""
    return np.array([token for part in parts for token in part], np.int32)


PROMPT = task.encode_prompt(123)
RIGHT = task.answer_ids(123)
DRAFT = [task.DRAFT_ID, *task.answer_ids(45)[1:-1]]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (response(RIGHT), 1.0),
        (response(DRAFT, RIGHT), 1.0),
        (response(DRAFT, DRAFT, [task.DRAFT_ID, task.PAD_ID], RIGHT), 1.0),
        (response(RIGHT[:-1]), 0.0),
        (response(RIGHT, [task.EOS_ID]), 0.0),
        (response([task.EOS_ID], RIGHT), 0.0),
        (response(RIGHT[:-1], RIGHT), 0.0),
        (response(task.answer_ids(124)), 0.0),
        (response(task.answer_ids(123, 100)), 0.0),
        (response(RIGHT[:4], RIGHT[7:]), 0.0),
        (response(DRAFT), 0.0),
        (response([]), 0.0),
    ],
    ids=[
        "right", "draft then right", "drafts are not judged", "no EOS", "two EOS", "EOS too early", "two answers",
        "other number", "other unit", "a number left out", "draft only", "empty",
    ],
)  # fmt: skip
def test_only_the_exact_answer_earns_the_reward(tokens: np.ndarray, expected: float) -> None:
    """The reward is verifiable: the answer's tokens, exactly, and EOS."""
    assert task.reward(PROMPT, tokens) == expected


def test_answer_counts_down_to_the_round_number() -> None:
    """123 by ten: 122, 121, 120; by hundred: down to 100."""
    digits = [(t - task.DIGITS) % 10 for t in task.answer_ids(123)[4:-1]]
    assert digits == [1, 2, 2, 1, 2, 1, 1, 2, 0]
    assert len(task.answer_ids(123, 100)) == 1 + 3 + 3 * 23 + 1


@pytest.mark.parametrize("unit", [10, 100])
def test_prompts_can_be_read_back(unit: int) -> None:
    """decode_prompt is the inverse of encode_prompt, and refuses anything else."""
    for number in (1, 99, 123, 999):
        assert task.decode_prompt(task.encode_prompt(number, unit)) == (number, unit)
    with pytest.raises(ValueError, match="not a prompt"):
        task.decode_prompt(np.array([0, 1, 2, 3, 4], np.int32))
    with pytest.raises(ValueError, match="cannot ask"):
        task.encode_prompt(120, unit)


def test_prompts_depend_on_seed_and_index_only_and_held_out_ones_are_never_trained() -> None:
    """The same arguments give the same prompt; the two streams share no number."""
    train = [task.prompt_ids(3, i) for i in range(300)]
    held_out = [task.prompt_ids(3, i, held_out=True) for i in range(300)]

    assert np.array_equal(task.prompt_ids(3, 17), train[17])
    assert {task.decode_prompt(p)[0] for p in train}.isdisjoint({task.decode_prompt(p)[0] for p in held_out})
    assert not np.array_equal(np.stack(train), np.stack([task.prompt_ids(4, i) for i in range(300)]))


def test_demonstrations_fit_the_cap_and_are_imperfect() -> None:
    """They teach the form and leave something to learn: between half and nine tenths earn the reward."""
    pairs = [task.demonstration(0, i) for i in range(500)]
    rewards = [task.reward(prompt, tokens) for prompt, tokens in pairs]

    assert max(len(tokens) for _, tokens in pairs) <= task.RESPONSE_CAP
    assert all(0 <= tokens.min() <= tokens.max() < task.VOCAB_SIZE for _, tokens in pairs)
    assert 0.5 < np.mean(rewards) < 0.9


def test_lengths_have_a_long_tail() -> None:
    """Longest over median of 64 demonstrations is at least 8 on average."""
    lengths = np.array([len(task.demonstration(1, i)[1]) for i in range(64 * 20)]).reshape(20, 64)
    assert np.mean(lengths.max(axis=1) / np.median(lengths, axis=1)) >= 8
