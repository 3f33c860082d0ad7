"""Importance weights: TIS and IcePop at each level against plain Python, in arrays and tensors, and what is refused."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch

import april
from april.corrections.importance import LEVELS

Rows = list[list[float]]


def ratios(own: Rows, other: Rows, mask: list[list[int]], level: str) -> Rows:
    """p / q of each token, or of its whole response, as the papers write it; 0 where there is no loss."""
    found = []
    for ps, qs, ms in zip(own, other, mask, strict=True):
        of_tokens = [math.exp(p) / math.exp(q) if m else 0.0 for p, q, m in zip(ps, qs, ms, strict=True)]
        trained = [r for r, m in zip(of_tokens, ms, strict=True) if m]
        if level == "token":
            found.append(of_tokens)
            continue
        whole = math.prod(trained)
        if level == "geometric":
            whole = whole ** (1 / max(len(trained), 1))
        found.append([whole if m else 0.0 for m in ms])
    return found


def drawn(rows: int = 40, width: int = 12) -> tuple[Rows, Rows, list[list[int]]]:
    """Log-probabilities apart by up to a factor of some ten; environment tokens, padding, rows without loss."""
    rng = random.Random(7)
    own = [[-rng.expovariate(1) for _ in range(width)] for _ in range(rows)]
    other = [[min(0.0, p + rng.gauss(0, 0.7)) for p in row] for row in own]
    mask = [[int(rng.random() < 0.7 and t < 4 + row % 9) for t in range(width)] for row in range(rows)]
    mask[3] = [0] * width
    return own, other, mask


def both(own: Any, other: Any, mask: Any) -> list[tuple[Any, Any, Any]]:
    arrays = np.array(own), np.array(other), np.array(mask, np.uint8)
    return [arrays, tuple(torch.from_numpy(a) for a in arrays)]


@pytest.mark.parametrize("level", LEVELS)
def test_the_papers_formulas(level: Any) -> None:
    """Truncated: min(ratio, limit). Masked: the ratio inside the bounds, else 0. Both 0 where there is no loss."""
    own, other, mask = drawn()
    expected = np.array(ratios(own, other, mask, level))
    assert (expected > 1.5).any()
    assert ((expected > 0) & (expected < 0.8)).any()
    for given in both(own, other, mask):
        truncated = april.truncated_weights(*given, 1.5, level=level)
        masked = april.masked_weights(*given, 0.8, 1.5, level=level)
        assert type(truncated) is type(masked) is type(given[0])
        assert str(truncated.dtype) in ("float32", "torch.float32")
        np.testing.assert_allclose(np.asarray(truncated), np.minimum(expected, 1.5), rtol=1e-6)
        inside = np.where((expected >= 0.8) & (expected <= 1.5), expected, 0.0)
        np.testing.assert_allclose(np.asarray(masked), inside, rtol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_ratios_that_overflow(level: Any) -> None:
    """A token that was sampled at e^-1000 and is now certain: the limit, or nothing; no inf, no NaN, no warning."""
    for own, other, mask in both([[0.0, -0.1], [-900.0, -0.1]], [[-1000.0, -0.1], [0.0, -0.1]], [[1, 1], [1, 1]]):
        truncated = april.truncated_weights(own, other, mask, level=level)
        masked = april.masked_weights(own, other, mask, level=level)
        assert float(truncated[0, 0]) == 2.0
        assert float(masked[0, 0]) == float(truncated[1, 0]) == float(masked[1, 0]) == 0.0
        assert float(truncated[0, 1]) == (1.0 if level == "token" else 2.0)


@pytest.mark.parametrize("level", LEVELS)
def test_no_weight_is_infinite_where_there_is_no_bound(level: Any) -> None:
    """A loss of 0 times infinity is NaN; the weight is the largest that float32 has, without a warning or gradient."""
    for own, other, mask in both([[-0.5]], [[-1000.0]], [[1]]):
        found = april.masked_weights(own, other, mask, 0.0, math.inf, level=level)
        assert float(found[0, 0]) == np.finfo(np.float32).max
    own = torch.tensor([[-0.5]], requires_grad=True)
    found = april.masked_weights(own, [[-1000.0]], [[1]], 0.0, math.inf, level=level, keep_gradient=True)
    (gradient,) = torch.autograd.grad(found.sum(), own)
    assert gradient.tolist() == [[0.0]]


def test_arrays_that_may_not_be_written_are_taken_as_they_are() -> None:
    """As they come out of shared memory: torch warns of those."""
    own, other, mask = both([[-1.0, -0.5]], [[-1.0, -1.0]], [[1, 0]])[0]
    for array in (other, mask):
        array.setflags(write=False)
    assert april.truncated_weights(torch.from_numpy(own), other, mask).tolist() == [[1.0, 0.0]]


def test_long_responses_in_float32() -> None:
    """16,384 tokens: the product of a float32 tensor's ratios is that of float64 to a thousandth."""
    rng = np.random.default_rng(0)
    own = -rng.exponential(1, (2, 16384)).astype(np.float32)
    other = np.minimum(own + rng.normal(0, 0.01, own.shape).astype(np.float32), 0)
    mask = np.ones(own.shape, np.uint8)
    exact = np.exp((own.astype(np.float64) - other).sum(1))
    found = april.truncated_weights(torch.from_numpy(own), other, mask, 1e6, level="sequence")
    np.testing.assert_allclose(found[:, 0].numpy(), exact, rtol=1e-3)


def test_what_has_no_loss_may_hold_anything() -> None:
    """NaN and -inf in the padding change no weight and no gradient; nothing but padding, and no rows, are fine."""
    nan, inf = math.nan, math.inf
    for own, other, mask in both([[-1.0, nan], [-inf, 3.0]], [[-1.0, -inf], [nan, inf]], [[1, 0], [0, 0]]):
        for weights in (april.truncated_weights, april.masked_weights):
            assert weights(own, other, mask).tolist() == [[1.0, 0.0], [0.0, 0.0]]
            assert weights(own, other, mask, level="geometric").tolist() == [[1.0, 0.0], [0.0, 0.0]]
            assert weights(own[:0], other[:0], mask[:0]).shape == (0, 2)
    own = torch.tensor([[-1.0, nan]], requires_grad=True)
    for weights in (april.truncated_weights, april.masked_weights):
        (gradient,) = torch.autograd.grad(
            weights(own, torch.tensor([[-1.0, nan]]), torch.tensor([[1, 0]]), keep_gradient=True).sum(), own
        )
        assert gradient.tolist() == [[1.0, 0.0]]


def test_the_gradient_is_asked_for() -> None:
    """None as in the papers; with keep_gradient d(ratio) = ratio inside, 0 where truncated or masked, overflow too."""
    other = torch.tensor([[-1.0, -1.0, -900.0]])
    mask = torch.ones(1, 3)
    own = torch.tensor([[-0.9, -0.1, -0.5]], requires_grad=True)
    for weights, last in ((april.truncated_weights, 2.0), (april.masked_weights, 0.0)):
        assert not weights(own, other, mask).requires_grad
        found = weights(own, other, mask, keep_gradient=True)
        (gradient,) = torch.autograd.grad(found.sum(), own)
        second = 0.0 if last else math.exp(0.9)
        assert gradient[0].tolist() == pytest.approx([math.exp(0.1), second, 0.0])
        assert float(found[0, 2].detach()) == last
    found = april.truncated_weights(own[:, :1], other[:, :1], mask[:, :1], level="geometric", keep_gradient=True)
    assert found.requires_grad


def test_the_bounds_belong_to_what_is_kept() -> None:
    """A ratio of exactly low or high stays; 0 and inf are no bound."""
    half = math.log(0.5)
    own, other, mask = both([[half, 0.0, -50.0]], [[0.0, half, 0.0]], [[1, 1, 1]])[0]
    assert april.masked_weights(own, other, mask, 0.5, 2.0).tolist() == [[0.5, 2.0, 0.0]]
    assert april.masked_weights(own, other, mask, 0.0, math.inf)[0, 2] == np.float32(math.exp(-50))


def test_arguments_that_cannot_be() -> None:
    """Shapes, levels and limits: one sentence each."""
    own = np.zeros((2, 3))
    with pytest.raises(ValueError, match=r"shape \[2, 3\], behaviour_logprobs \[2, 2\] and loss_mask \[2, 3\]"):
        april.truncated_weights(own, own[:, :2], own)
    with pytest.raises(ValueError, match="give three of the same"):
        april.masked_weights(own[0], own[0], own[0])
    with pytest.raises(ValueError, match="level must be one of token, sequence, geometric, got 'word'"):
        april.truncated_weights(own, own, own, level="word")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="arrays have no gradient"):
        april.masked_weights(own, own, own, keep_gradient=True)
    for limit in (0.0, -1.0, math.nan, math.inf, 1e39):
        with pytest.raises(ValueError, match="limit must be a number above 0"):
            april.truncated_weights(own, own, own, limit)
    for low, high in ((-1.0, 2.0), (2.0, 1.0), (0.0, 0.0), (math.nan, 1.0)):
        with pytest.raises(ValueError, match="0 <= low <= high"):
            april.masked_weights(own, own, own, low, high)
