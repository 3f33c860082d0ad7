"""The recommended loss: its value and gradient against plain Python, parts of a batch, padding, and what is refused."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pages import blocks_of

import april
from benchmarks.study.design import read
from benchmarks.study.losses import LOSSES

Rows = list[list[float]]
CLIP, LIMIT = (0.2, 0.28), 2.0


def by_hand(
    now: Rows, p: Rows, q: Rows, mask: list[list[int]], advantages: Rows, negative_bound: float | None = 3.0,
    dead_zone: float = 0.0, geometric_bounds: tuple[float, float] | None = None,
) -> tuple[float, Rows]:  # fmt: skip
    """The loss and its derivative by each log-probability, token by token, as the formula has them."""
    tokens = max(sum(map(sum, mask)), 1)
    loss, gradient = 0.0, [[0.0] * len(row) for row in now]
    for i, row in enumerate(mask):
        trained = [t for t, m in enumerate(row) if m]
        apart = [p[i][t] - q[i][t] for t in trained]
        weight = min(math.prod(math.exp(a) for a in apart if abs(a) > dead_zone), LIMIT)
        mean = math.exp(sum(apart) / max(len(apart), 1))
        if geometric_bounds and not geometric_bounds[0] <= mean <= geometric_bounds[1]:
            weight = 0.0
        for t in trained:
            ratio, gain = math.exp(now[i][t] - p[i][t]), advantages[i][t]
            bounded = min(max(ratio, 1 - CLIP[0]), 1 + CLIP[1])
            if gain < 0 and negative_bound is not None and ratio > negative_bound:
                loss -= weight * negative_bound * gain / tokens
                continue
            loss -= weight * min(ratio * gain, bounded * gain) / tokens
            if ratio * gain <= bounded * gain:
                gradient[i][t] = -weight * ratio * gain / tokens
    return loss, gradient


def found(now: Any, p: Any, q: Any, mask: Any, advantages: Any, **others: Any) -> tuple[float, Rows]:
    """The same of april."""
    own = torch.tensor(now, dtype=torch.float64, requires_grad=True)
    loss = april.policy_loss(own, np.array(q), np.array(mask), advantages, proximal_logprobs=p, **others)
    assert loss.dtype == own.dtype  # nothing was rounded on the way
    (gradient,) = torch.autograd.grad(loss, own)
    return float(loss.detach()), gradient.tolist()


@st.composite
def batches(draw: st.DrawFn) -> tuple[Rows, Rows, Rows, list[list[int]], Rows]:
    """Log-probabilities apart by at most a factor of e, with rows without loss; and an advantage per token."""
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 5))

    def table(of: st.SearchStrategy[Any]) -> Any:
        return draw(st.lists(st.lists(of, min_size=width, max_size=width), min_size=rows, max_size=rows))

    apart = st.floats(-1, 1, width=32)
    now, p, q = ([[a - 2.0 for a in row] for row in table(apart)] for _ in range(3))
    return now, p, q, table(st.integers(0, 1)), table(apart)


@given(
    batches(), st.sampled_from([None, 1.28, 3.0]), st.sampled_from([0.0, 0.3, 1.5]),
    st.sampled_from([None, (0.8, 1.2), (0.0, 0.9)]),
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:policy_loss", "ignore:masked_weights")  # numbers at random belong to no tokens
def test_value_and_gradient_are_those_of_the_formula(
    batch: tuple[Rows, Rows, Rows, list[list[int]], Rows], negative_bound: float | None, dead_zone: float,
    geometric_bounds: tuple[float, float] | None,
) -> None:  # fmt: skip
    """With a proximal policy of its own, per token advantages, any mask and all options, to float32's rounding."""
    now, p, q, mask, advantages = batch
    options: dict[str, Any] = {
        "negative_bound": negative_bound, "dead_zone": dead_zone, "geometric_bounds": geometric_bounds,
    }  # fmt: skip
    means = [
        math.exp(sum((a - b) * m for a, b, m in zip(*rows, strict=True)) / max(sum(rows[2]), 1))
        for rows in zip(p, q, mask, strict=True)
    ]
    if geometric_bounds and min(abs(mean - bound) for mean in means for bound in geometric_bounds) < 1e-6:
        return  # at a bound, rounding decides whether a response has loss
    loss, gradient = by_hand(now, p, q, mask, advantages, **options)
    own_loss, own_gradient = found(now, p, q, mask, torch.tensor(advantages, dtype=torch.float64), **options)
    assert own_loss == pytest.approx(loss, rel=1e-6, abs=1e-6)
    bounds = [1 - CLIP[0], 1 + CLIP[1], negative_bound or 3.0]
    away = [abs(math.exp(a - b) - c) for x, y in zip(now, p, strict=True) for a, b in zip(x, y, strict=True)
            for c in bounds]  # fmt: skip
    if min(away) > 1e-9:  # at a bound there are two derivatives
        np.testing.assert_allclose(own_gradient, gradient, rtol=1e-6, atol=1e-9)


@given(batches())
def test_with_one_step_the_present_policy_is_the_proximal_one(batch: tuple[Rows, Rows, Rows, Any, Rows]) -> None:
    """Left out, p is the log-probabilities themselves: a weighted policy gradient, that nothing clips."""
    now, _, q, mask, advantages = batch
    expected = by_hand(now, now, q, mask, advantages)
    for p in (None, now):
        loss, gradient = found(now, p, q, mask, torch.tensor(advantages))
        assert loss == pytest.approx(expected[0], rel=1e-5, abs=1e-6)
        np.testing.assert_allclose(gradient, expected[1], rtol=1e-5, atol=1e-7)


def test_published_losses_as_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """CISPO, GSPO, OPSM, M2PO and VCPO's learning rate equal their papers' formulas, token by token in plain Python."""
    monkeypatch.setattr(april, "off_policy_report", lambda batch, logprobs: {"ess_response": 0.25})
    now, q = np.random.default_rng(0).normal(-3, [[[0.5]], [[0.6]]], (2, 4, 5))
    now[2:] = q[2:] - np.array([[0.2], [0.05]])  # two responses with negative advantages: only the first drifted far
    mask, gains = np.array([[1, 1, 0, 1, 1], [1, 1, 1, 0, 0], [1] * 5, [1, 1, 1, 1, 0]]), [1.0, 0.4, -0.5, -0.8]
    own = torch.tensor(now, requires_grad=True)
    made = blocks_of("corrections.md")[1].run({
        "april": april, "logprobs": own, "q": torch.tensor(q), "mask": torch.tensor(mask),
        "gain": torch.tensor(gains)[:, None], "batch": None, "base_rate": 0.1,
    })  # fmt: skip
    places = [(i, t) for i, t in np.argwhere(mask).tolist()]
    apart = {(i, t): now[i, t] - q[i, t] for i, t in places}
    mean = [np.mean([a for (j, _), a in apart.items() if j == i]) for i in range(4)]
    ratios = np.exp(mean)
    clipped = np.minimum(ratios * gains, ratios.clip(1 - 3e-4, 1 + 4e-4) * gains)
    active = sorted((a**2, place) for place, a in apart.items() if a * gains[place[0]] > 0)
    while np.mean([square for square, _ in active]) > 0.04:
        active.pop()
    left = {place for _, place in active} | {place for place, a in apart.items() if a * gains[place[0]] <= 0}
    assert 0 < len(left) < len(places)
    expected = {
        "cispo": -sum(min(math.exp(a), 1.28) * gains[i] * now[i, t] for (i, t), a in apart.items()) / len(places),
        "gspo": -np.mean(clipped),
        "m2po": -sum(math.exp(apart[place]) * gains[place[0]] for place in left) / len(places),
        "opsm": by_hand(
            now.tolist(), now.tolist(), q.tolist(), (mask * [[1], [1], [0], [1]]).tolist(),
            np.repeat([gains], 5, 0).T.tolist(),
        )[0] * (len(places) - 5) / len(places),
    }  # fmt: skip
    for name, value in expected.items():
        assert float(made[name].detach()) == pytest.approx(value, rel=1e-6), name
    (gradient,) = torch.autograd.grad(made["cispo"], own)
    assert gradient[1, 0] == pytest.approx(-min(math.exp(apart[1, 0]), 1.28) * gains[1] / len(places))
    assert made["rate"] == pytest.approx(0.05)


@pytest.mark.parametrize("name", [read().recommended, "behaviour"])
@given(batches())
def test_it_is_the_loss_that_the_study_tried(name: str, batch: tuple[Rows, Rows, Rows, Any, Rows]) -> None:
    """Of benchmarks/study ``sequence``, and ``behaviour`` with q for p, so that its figures speak of this function.

    The study's losses have no bound for negative advantages; one optimizer step per batch, as there, never reaches it.
    """
    now, p, q, mask, advantages = (torch.tensor(rows) for rows in batch)
    tried = LOSSES[name]
    reference = q if tried.to_behaviour else p
    arrays = p.numpy(), q.numpy(), mask.numpy(), advantages.numpy()
    weights = np.ones(p.shape) if tried.weights is None else tried.weights(*arrays)
    gain = tried.objective(now, reference, torch.from_numpy(weights), mask != 0, advantages)
    expected = -float((gain * april.loss_weights(mask, "dapo")).sum())
    loss = april.policy_loss(now, q, mask, advantages, proximal_logprobs=reference, negative_bound=None)
    assert float(loss) == pytest.approx(expected, rel=1e-5, abs=1e-6)


NOW = [[-1.0, -0.5, -2.0], [-0.3, -1.2, -0.7]]
THEN = [[-1.5, -0.6, -1.0], [-0.3, -1.0, -0.9]]
MASK = [[1, 0, 1], [1, 1, 0]]


def test_the_loss_of_the_parts_is_that_of_the_batch() -> None:
    """Micro-batches and ranks that divide by the tokens of the whole batch add up to it, in value and gradient."""
    gains = np.array([0.7, -1.1], np.float32)
    whole, gradient = found(NOW, None, THEN, MASK, gains)
    parts = [found(NOW[i : i + 1], None, THEN[i : i + 1], MASK[i : i + 1], gains[i : i + 1], tokens=4) for i in (0, 1)]
    assert sum(loss for loss, _ in parts) == pytest.approx(whole)
    np.testing.assert_allclose([row for _, rows in parts for row in rows], gradient)
    for tokens in (torch.tensor(8), torch.tensor([8.0]), np.array([4, 4], np.uint8).sum()):  # the last is a uint64
        assert found(NOW, None, THEN, MASK, gains, tokens=tokens)[0] == pytest.approx(whole / 2)
    own = torch.tensor(NOW)
    assert april.policy_loss(own, THEN, MASK, gains, tokens=8.0).dtype == own.dtype


@pytest.mark.filterwarnings("ignore:policy_loss. the weights")
@pytest.mark.parametrize(("length", "without", "within"), [(1_000, 0.55, 1.0), (32_000, 0.0, 0.95)])
def test_a_dead_zone_keeps_rounding_out_of_long_responses(length: int, without: float, within: float) -> None:
    """Under equal weights, bfloat16's noise makes the product vanish; with a dead zone of 0.4 it keeps its size."""
    random = np.random.default_rng(0)
    deviation = np.where(random.random((40, length)) < 0.8, 0.02, 0.11)  # as measured with SmolLM2
    q = random.uniform(-3.0, -0.5, deviation.shape)
    now = torch.tensor(q + random.normal(-(deviation**2) / 2, deviation), requires_grad=True)
    mask, gains = np.ones_like(q), np.ones(len(q))
    found = [-float(april.policy_loss(now, q, mask, gains, dead_zone=zone).detach()) for zone in (0.0, 0.4)]
    assert found == pytest.approx([without, within], abs=0.15)


def test_weights_that_vanish_are_told() -> None:
    """A warning of eight responses whose products are below 0.1; none of seven, within a dead zone, or with q for p."""
    q = np.linspace(-3, -1, 8 * 300).reshape(8, 300)
    mask, gains = np.ones_like(q), np.ones(8)
    with pytest.warns(UserWarning, match=r"below 0\.1 in the mean, .* give dead_zone=0\.4"):
        april.policy_loss(torch.tensor(q - 0.01), q, mask, gains)
    with pytest.warns(UserWarning, match=r"next to nothing\. Rounding often exceeds the dead_zone, or the"):
        april.policy_loss(torch.tensor(q - 0.5).clamp(max=0), q, mask, gains, dead_zone=0.4)
    for rows, options in ((7, {}), (8, {"dead_zone": 0.4}), (8, {"proximal_logprobs": q})):
        april.policy_loss(torch.tensor(q[:rows] - 0.01), q[:rows], mask[:rows], gains[:rows], **options)


def test_what_has_no_loss_may_hold_anything() -> None:
    """NaN and infinities in the padding are in no value and no gradient; without a token with loss both are 0."""
    nan, inf = math.nan, math.inf
    args = [[-1.0, nan], [-inf, 3.0]], [[-1.1, inf], [nan, nan]], [[-1.2, nan], [inf, -inf]], [[1, 0], [0, 0]]
    loss, gradient = found(*args, np.array([[1.0, nan], [inf, nan]]))
    assert loss == pytest.approx(by_hand([[-1.0]], [[-1.1]], [[-1.2]], [[1]], [[1.0]])[0])
    assert gradient[0][0] != 0
    assert gradient[0][1] == gradient[1][0] == gradient[1][1] == 0
    assert found(*args[:3], np.zeros((2, 2)), [1.0, 1.0]) == (0.0, [[0.0] * 2] * 2)
    rows = torch.zeros(0, 3, requires_grad=True)
    assert float(april.policy_loss(rows, rows, rows, torch.zeros(0)).detach()) == 0.0


def test_a_token_that_was_all_but_impossible_is_no_nan() -> None:
    """Its response has weight 0, and its ratio overflows: the product stays a number, as does what has a weight."""
    for p, q, advantage in ((-900.0, -0.1, -1.0), (-900.0, -900.0, -1.0), (-0.1, -900.0, 1.0)):
        loss, gradient = found([[-0.5, -0.5]], [[p, -0.5]], [[q, -0.5]], [[1, 1]], [advantage])
        assert math.isfinite(loss)
        assert np.isfinite(gradient).all()


def test_the_gradient_is_that_of_the_first_factor_alone() -> None:
    """The weight is a constant, and so are advantages and the proximal policy, whatever they are made of."""
    made = [torch.tensor(rows, dtype=torch.float64, requires_grad=True) for rows in (NOW, THEN, THEN)]
    gains = torch.tensor([1.0, -1.0], requires_grad=True)
    loss = april.policy_loss(made[0], made[1], torch.tensor(MASK), gains, proximal_logprobs=made[2])
    loss.backward()  # type: ignore[no-untyped-call]
    assert made[0].grad is not None
    assert made[1].grad is made[2].grad is gains.grad is None


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_halves_are_refused(kind: torch.dtype) -> None:
    """In each of the three places, by name."""
    own, mask = torch.tensor(NOW), torch.tensor(MASK)
    gains = torch.ones(2)
    with pytest.raises(ValueError, match=r"policy_loss: logprobs are .*float16, too coarse .*logits.float"):
        april.policy_loss(own.to(kind), own, mask, gains)
    with pytest.raises(ValueError, match=r"policy_loss: behaviour_logprobs are"):
        april.policy_loss(own, own.to(kind), mask, gains)
    with pytest.raises(ValueError, match=r"policy_loss: proximal_logprobs are"):
        april.policy_loss(own, own, mask, gains, proximal_logprobs=own.to(kind))


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 0.5])
def test_numbers_that_cannot_be_are_refused_where_there_is_loss(wrong: float) -> None:
    """Each by the name of its argument."""
    own, mask, gains = torch.tensor(NOW), torch.tensor(MASK), torch.ones(2)
    bad = own.clone()
    bad[1, 1] = wrong
    places = {"logprobs": (bad, own, own), "behaviour_logprobs": (own, bad, own), "proximal_logprobs": (own, own, bad)}
    for name, (now, q, p) in places.items():
        with pytest.raises(ValueError, match=f"policy_loss: {name} holds {wrong:g} for one of 1 tokens with loss"):
            april.policy_loss(now, q, mask, gains, proximal_logprobs=p)
    if not math.isfinite(wrong):
        with pytest.raises(ValueError, match="an advantage is not finite where there is loss"):
            april.policy_loss(own, own, mask, torch.tensor([0.0, wrong]))


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"logprobs": np.array(NOW)}, "logprobs must be a tensor, got ndarray"),
    ({"behaviour_logprobs": np.zeros((2, 2))}, r"behaviour_logprobs \[2, 2\]"),
    ({"loss_mask": np.ones(2)}, r"loss_mask \[2\]"),
    ({"advantages": np.zeros(3)}, r"advantages have the shape \[3\]; give \[2\], or \[2, 3\]"),
    ({"proximal_logprobs": np.zeros((2, 1))}, r"proximal_logprobs have the shape \[2, 1\], and logprobs \[2, 3\]"),
    ({"clip": (-0.1, 0.2)}, r"clip must be \(low, high\)"),
    ({"clip": (0.2, math.nan)}, r"clip must be \(low, high\)"),
    ({"negative_bound": 1.2}, "negative_bound must be finite and at least 1.28, the upper end of the clip, got 1.2"),
    ({"dead_zone": -0.1}, "policy_loss: dead_zone must be a finite number of nats, at least 0, got -0.1"),
    ({"geometric_bounds": (1.1, 0.9)}, "geometric_bounds must be .low, high. with 0 <= low <= high"),
    ({"limit": 0.0}, "policy_loss: limit must be a number above 0"),
    ({"tokens": 3}, "tokens=3, but 4 have loss here; give the number of the whole batch"),
    ({"tokens": math.nan}, "tokens=nan, but 4 have loss here"),
    ({"tokens": np.array([4, 4])}, r"policy_loss: tokens must be a number, got array\(\[4, 4\]\)"),
    ({"clip": 0.2}, r"policy_loss: clip must be \(low, high\), got 0.2"),
    ({"clip": ("0.2", 0.28)}, "policy_loss: low of clip must be a number, got '0.2'"),
    ({"advantages": ["1", "2"]}, r"policy_loss: advantages must be an array or tensor of numbers, got \['1', '2'\]"),
    ({"proximal_logprobs": "q"}, "policy_loss: proximal_logprobs must be an array or tensor of numbers, got 'q'"),
])  # fmt: skip
def test_arguments_that_cannot_be(changes: dict[str, Any], sentence: str) -> None:
    """One sentence each."""
    right: dict[str, Any] = {
        "logprobs": torch.tensor(NOW), "behaviour_logprobs": np.array(THEN), "loss_mask": np.array(MASK),
        "advantages": np.ones(2),
    }  # fmt: skip
    april.policy_loss(**right)
    with pytest.raises(ValueError, match=sentence):
        april.policy_loss(**right | changes)


@pytest.mark.parametrize(
    ("own", "warns"),
    [
        ("as sampled", False), ("bfloat16", False), ("older weights", False), ("few tokens", False),
        ("shifted", True), ("of another prompt", True),
    ],
)  # fmt: skip
def test_log_probabilities_of_other_tokens_are_noticed(own: str, warns: bool) -> None:
    """One warning with the likely cause, at the line of the user's loss; rounding and older weights are no cause."""
    random = np.random.default_rng(0)
    sampled = random.normal(-1.5, 0.6, (4, 40 if own != "few tokens" else 20)).clip(-6, -0.01)
    changes = {
        "as sampled": sampled,
        "bfloat16": sampled + random.normal(0, 0.08, sampled.shape),
        "older weights": sampled + random.normal(0, 0.3, sampled.shape),
        "shifted": np.roll(sampled, 1, axis=1),
        "of another prompt": 0.3 * sampled + random.normal(-1.2, 0.5, sampled.shape),
        "few tokens": np.roll(sampled, 1, axis=1),
    }
    now = torch.tensor(changes[own].clip(-9, 0), requires_grad=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for _ in range(3):
            april.policy_loss(now, sampled, np.ones_like(sampled), np.ones(4)).backward()
    assert [("padded(left_pad_prompts=True)" in str(w.message), w.filename) for w in said] == [(True, __file__)] * warns
