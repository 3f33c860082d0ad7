"""Advantages and loss weights: the papers' formulas, with and without a quorum.

That a batch has the cohort of those that finished first is seen by the random lives of trainers (trainer_books.py).
"""

from __future__ import annotations

import random
import re
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from several_rows import delivered

import april
from april.core.batch import Batch, DeliveredSample
from april.corrections.advantages import METHODS, first_others, process_advantages
from april.corrections.loss_weights import BatchShare


def textbook(method: str, own: float, others: Sequence[float], epsilon: float = 1e-6, ddof: int = 0) -> float:
    """One response against its siblings, as the papers write it, in plain Python."""
    if method == "rloo":
        return own - statistics.fmean(others)
    group = [own, *others]
    centred = own - statistics.fmean(group)
    if method == "dr_grpo" or len(group) == 1:
        return centred
    spread = (statistics.stdev if ddof else statistics.pstdev)(group)
    return centred / (spread + epsilon)


def compared_with(order: Sequence[int], k: int, index: int) -> list[int]:
    """The first k - 1 others, from the order of finishing."""
    found = []
    for other in order:
        if other != index and len(found) < k - 1:
            found.append(other)
    return found


def batch_of(samples: Sequence[DeliveredSample]) -> Batch:
    return Batch(id=0, version=april.PolicyVersion(1, 0), samples=tuple(samples), group_sizes=(), metrics={})


# ---------------------------------------------------------------- formulas


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("quorum", [1.0, 0.5])
def test_the_textbook_on_random_groups(method: Any, quorum: float) -> None:
    """Against a slow reference: groups of 2 to 9, in parts, in any order of finishing and of rows."""
    rng = random.Random(f"{method} {quorum}")
    samples, expected = [], []
    for group in range(200):
        n = rng.randint(2, 9)
        k = max(2, round(quorum * n))
        rewards = [rng.choice([0.0, 0.1, 1.0, rng.gauss(0, 3)]) for _ in range(n)]
        order = rng.sample(range(n), n)
        cohort = tuple((i, rewards[i]) for i in order[:k])
        for index in rng.sample(range(n), rng.randint(1, n)):
            samples.append(delivered(group, index, reward=rewards[index], cohort=cohort))
            others = [rewards[i] for i in compared_with(order, k, index)]
            assert samples[-1].baseline_rewards.tolist() == np.array(others, np.float32).tolist()
            expected.append(textbook(method, rewards[index], others))
    rows = rng.sample(range(len(samples)), len(samples))
    found = batch_of([samples[r] for r in rows]).advantages(method)
    assert found.dtype == np.float32
    assert found == pytest.approx(np.array(expected)[rows], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("ddof", [0, 1])
def test_whole_groups_are_the_textbook_of_the_group(ddof: int) -> None:
    """(r - mean) / std over each group, as a matrix, with numpy's own mean and std; ddof=1 is torch's."""
    rewards = np.random.default_rng(0).normal(size=(64, 8))
    cohorts = [tuple(enumerate(row)) for row in rewards.tolist()]
    samples = [delivered(g, i, reward=rewards[g, i], cohort=cohorts[g]) for g in range(64) for i in range(8)]
    found = batch_of(samples).advantages(epsilon=1e-4, ddof=ddof).reshape(64, 8)
    centred = rewards - rewards.mean(1, keepdims=True)
    assert found == pytest.approx(centred / (rewards.std(1, ddof=ddof, keepdims=True) + 1e-4), rel=1e-5)
    as_torch = torch.from_numpy(centred) / (torch.from_numpy(rewards).std(1, keepdim=True) + 1e-4)
    assert (ddof == 1) == np.allclose(found, as_torch.numpy(), rtol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_equal_rewards_have_no_advantage_at_all(method: Any) -> None:
    """Exactly 0, with rewards that no float holds exactly, groups of any size, and epsilon 0."""
    for k in (2, 3, 5, 7):
        cohort = tuple((i, 0.1) for i in range(k))
        batch = batch_of([delivered(0, i, reward=0.1, cohort=cohort) for i in range(k + 2)])
        assert batch.advantages(method, epsilon=0.0).tolist() == [0.0] * (k + 2)


def test_rewards_whose_spread_is_no_number() -> None:
    """So near to each other that their squares are 0, and no epsilon: no division by it."""
    assert april.group_advantages([1e-200, 0.0], [[0.0], [1e-200]], epsilon=0.0).tolist() == [0.0, 0.0]


def test_without_siblings() -> None:
    """A group of one: the textbook's r - mean is 0; rloo has nothing to compare with, and says what to do."""
    cohorts = ((0, 1.0), (1, 0.0)), ((0, 1.0),)
    batch = batch_of([delivered(group, 0, reward=1.0, cohort=cohort) for group, cohort in enumerate(cohorts)])
    assert [batch.advantages(m)[1] for m in ("grpo", "dr_grpo", "dapo", "gspo")] == [0.0] * 4
    with pytest.raises(ValueError, match=r"response 1 has no sibling, .* set n_samples_per_prompt .* to at least 2"):
        batch.advantages("rloo")


def test_tensors_give_tensors() -> None:
    """Of any type and layout; what needs a gradient does not get one through its advantage."""
    rewards, others = [1.0, 0.0, 0.5], [[0.0, 0.5], [1.0], [1.0, 0.0]]
    expected = april.group_advantages(rewards, [np.array(o, np.float32) for o in others])
    filled = [[0.0, 0.5], [1.0, float("nan")], [1.0, 0.0]]
    for given in (filled, np.array(filled), torch.tensor(filled), torch.tensor(filled, dtype=torch.bfloat16)):
        found = april.group_advantages(torch.tensor(rewards, requires_grad=True), given)
        assert isinstance(found, torch.Tensor)
        assert (found.dtype, found.requires_grad) == (torch.float32, False)
        assert found.tolist() == expected.tolist()
    ragged = np.empty(3, object)
    ragged[:] = [np.array(o) for o in others]
    assert april.group_advantages(np.array(rewards), ragged).tolist() == expected.tolist()
    assert april.group_advantages([], []).shape == april.group_advantages(np.zeros(0), np.zeros(0)).shape == (0,)
    for one_each in (np.array([0.0, 2.0]), [0.0, 2.0]):
        assert april.group_advantages([1.0, 0.0], one_each, "rloo").tolist() == [1.0, -2.0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([1.0], [[0.0]], "ppo"), r"one of grpo, dr_grpo, rloo, dapo, gspo, got 'ppo'"),
        (([1.0, 2.0], [[0.0]]), r"shape \[2\] and baseline_rewards \[1, 1\]; give one reward and one row"),
        (([[1.0]], [[0.0]]), r"shape \[1, 1\]"),
        (([1.0], np.zeros((1, 1, 1))), r"baseline_rewards \[1, 1, 1\]"),
        ((1.0, np.float64(0.0)), r"shape \[\] and baseline_rewards \[\]"),
        (([1.0, float("nan")], [[0.0], [0.0]]), r"response 1 has the reward nan .* give finite numbers"),
        (([1.0, 0.0], [[0.0], [float("inf")]]), r"response 1 has the reward 0.0 among \[inf\]; give finite"),
        ((["1", "2"], [[0.0], [0.0]]), r"group_advantages: rewards must be an array or tensor of numbers, got \['1'"),
        (([1.0, 2.0], [["0"], [0.0]]), "group_advantages: baseline_rewards must be an array or tensor of numbers"),
    ],
)
def test_what_is_refused(arguments: Any, words: str) -> None:
    """Each with a sentence that says what to give instead."""
    with pytest.raises(ValueError, match=words):
        april.group_advantages(*arguments)
    for wrong in ({"ddof": 2}, {"epsilon": -1.0}, {"epsilon": float("nan")}, {"epsilon": float("inf")}):
        for function in (april.group_advantages, process_advantages):
            with pytest.raises(ValueError, match="ddof must be 0 or 1, epsilon at least 0"):
                function([1.0], [[0.0]], **wrong)  # type: ignore[operator]


def test_cohorts_of_different_sizes_side_by_side() -> None:
    """A shrunk group of 2 beside one of 4: what fills its row is not looked at."""
    members = [[0, 1, -1], [0, 1, -1], [2, 1, 3], [2, 1, 0]]
    found = first_others([0, 5, 1, 3], members, [[1, 2, 9], [1, 2, 9], [3, 4, 5], [3, 4, 5]])
    assert [[r for r in row if r == r] for row in found.tolist()] == [[2], [1], [3, 5], [3, 4]]


# ---------------------------------------------------------------- weights of tokens


MASK = np.array([[1, 1, 1, 1, 0, 0], [1, 0, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]], np.uint8)


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_the_weights_make_the_losses_of_the_papers(kind: Any) -> None:
    """Sum of weight x loss against loops over responses; a response without loss counts as one of zero."""
    loss = np.random.default_rng(0).normal(size=MASK.shape)
    rows = [loss[i][MASK[i] == 1] for i in range(len(MASK))]
    per_sequence = sum(row.mean() for row in rows if len(row)) / 4
    expected = {
        "grpo": per_sequence, "gspo": per_sequence, "dapo": np.concatenate(rows).mean(),
        "dr_grpo": sum(row.sum() / 10 for row in rows) / 4, "rloo": sum(row.sum() for row in rows) / 4,
    }  # fmt: skip
    for method in METHODS:
        weights = april.loss_weights(kind(MASK), method, max_response_len=10)  # type: ignore[arg-type]
        assert type(weights) is type(kind(MASK))
        assert str(weights.dtype).endswith("float32")
        assert float((np.asarray(weights) * loss).sum()) == pytest.approx(expected[method], rel=1e-6)
        halves = (np.asarray(weights)[half] * loss[half] for half in (slice(2), slice(2, None)))
        assert sum(h.sum() for h in halves) == pytest.approx(expected[method], rel=1e-6)
        share = BatchShare(rank=0, ranks=2, samples=4, loss_tokens=int(MASK.sum()))
        parts = [(april.loss_weights(kind(MASK[p]), method, max_response_len=10, share=share), loss[p])
                 for p in (slice(3), slice(3, None), slice(0))]  # type: ignore[arg-type]  # fmt: skip
        assert sum(float((np.asarray(w) * part).sum()) for w, part in parts) == pytest.approx(expected[method], 1e-6)
    assert april.loss_weights(MASK[:0], "dapo").shape == (0, 6)
    assert not np.any(april.loss_weights(np.zeros_like(MASK), "dapo"))


def test_weights_that_cannot_be() -> None:
    """Unknown method, no constant, no rectangle."""
    with pytest.raises(ValueError, match=r"dr_grpo divides by a constant, .* got max_response_len=None"):
        april.loss_weights(MASK, "dr_grpo")
    with pytest.raises(ValueError, match="method must be one of"):
        april.loss_weights(MASK, "mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=re.escape("has the shape [6]; give [B, T]")):
        april.loss_weights(MASK[0])
    with pytest.raises(ValueError, match="give one number per row"):
        april.loss_weights(MASK, samples=[0])


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_samples_may_have_any_numbers(kind: Any) -> None:
    """Those of a micro-batch need not begin at 0; rows of the same sample are one response."""
    expected = [[1 / 16] * 4, [1 / 4, 0, 1 / 4, 0], [0] * 4, [1 / 16] * 4]
    for numbers in ([7, -3, -3, 7], torch.tensor([7, 5, 5, 7])):
        found = april.loss_weights(kind(MASK[:, :4]), samples=numbers)
        assert type(found) is type(kind(MASK))
        assert found.tolist() == expected
