"""How far a batch is off its weights: effective sample size and KL against plain Python, ages, and the guard."""

from __future__ import annotations

import json
import math
import random
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pages import blocks_of, text_of
from several_rows import delivered

import april
from april.core.batch import Batch, DeliveredSample

Spans = list[tuple[april.PolicyVersion | None, int]]
"""(version, tokens); None: of a tool."""

V = april.PolicyVersion
NOW = V(0, 5)


def response(index: int, spans: Spans, rng: random.Random) -> DeliveredSample:
    """A response of these spans."""
    segments, start = [], 0
    for version, count in spans:
        kind = april.SegmentKind.ENVIRONMENT if version is None else april.SegmentKind.GENERATED
        segments.append(april.Segment(start, count, version or V(0, 0), kind, "a", "e", 1.0))
        start += count
    generated = np.repeat([v is not None for v, _ in spans], [c for _, c in spans])
    logprobs = np.array([-rng.expovariate(1) if g else 0.0 for g in generated], np.float32)
    mask = generated.astype(np.uint8)
    return delivered(0, index, start, logprobs=logprobs, loss_mask=mask, segments=tuple(segments))


def batch_of(rows: list[Spans], version: V = NOW, **changes: Any) -> Batch:
    rng = random.Random(3)
    samples = tuple(response(i, spans, rng) for i, spans in enumerate(rows))
    return Batch(id=4, version=version, samples=samples, group_sizes=(), **({"metrics": {}} | changes))


ROWS: list[Spans] = [
    [(V(0, 3), 4), (None, 2), (V(0, 5), 3)],
    [(V(0, 5), 6)],
    [(None, 3)],
    [(V(0, 4), 2), (V(0, 5), 1), (None, 1), (V(0, 5), 4)],
]


def recomputed(batch: Batch, spread: float = 0.5) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A trainer's log-probabilities, apart from those of the batch; NaN where they do not matter."""
    arrays = batch.padded()
    noise = np.random.default_rng(1).normal(0, spread, arrays["logprobs"].shape)
    return np.where(arrays["loss_mask"] == 1, np.minimum(arrays["logprobs"] + noise, 0.0), math.nan)


def kish(weights: list[float]) -> float:
    return sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))


def expected(batch: Batch, logprobs: Any) -> dict[str, float]:
    """The report in plain Python, token by token."""
    by_age: dict[int | None, list[float]] = {}
    rows_of: dict[int | None, list[int]] = {}
    products: dict[int, float] = {}
    for row, sample in enumerate(batch.samples):
        product, trained = 1.0, False
        for t in range(len(sample.tokens)):
            if not sample.loss_mask[t]:
                continue
            w = math.exp(float(logprobs[row, t])) / math.exp(float(sample.logprobs[t]))
            age = batch.trained_at.n - int(sample.versions[t, 1])
            by_age.setdefault(None, []).append(w)
            by_age.setdefault(age, []).append(w)
            rows_of.setdefault(None, []).append(row)
            rows_of.setdefault(age, []).append(row)
            product, trained = product * w, True
        if trained:
            products[row] = product
    found = {
        "ess_response": kish(list(products.values())),
        "weight_response": sum(min(product, 2.0) for product in products.values()) / len(products),
        "kl_response": sum(w - 1 - math.log(w) for w in by_age[None]) / len(products),
    }
    for age, ws in by_age.items():
        prefix = "" if age is None else f"age_{age}/"
        found |= {
            f"{prefix}ess_token": kish(ws), f"{prefix}tokens": len(ws),
            f"{prefix}kl_k1": sum(-math.log(w) for w in ws) / len(ws),
            f"{prefix}kl_k3": sum(w - 1 - math.log(w) for w in ws) / len(ws),
            f"{prefix}clip_share": sum(products[row] > 2.0 for row in rows_of[age]) / len(ws),
        }  # fmt: skip
    return found


@pytest.mark.parametrize("out", [0.0, 2.0])
def test_the_report_in_plain_python(out: float) -> None:
    """In all and by age; ages count from where the batch is trained, so batches that are out make tokens older."""
    batch = batch_of(ROWS, metrics={"batches_out": out})
    logprobs = recomputed(batch)
    report = april.off_policy_report(batch, logprobs)
    assert report == pytest.approx(expected(batch, logprobs), rel=1e-9)
    assert {name.partition("/")[0] for name in report if "/" in name} == {f"age_{a + int(out)}" for a in (0, 1, 2)}
    assert all(type(value) is float for value in report.values())
    json.dumps(report, allow_nan=False)
    flat = logprobs[batch.padded()["response_mask"] == 1]
    for given in (flat, torch.from_numpy(logprobs).requires_grad_(), torch.from_numpy(flat)):
        assert april.off_policy_report(batch, given) == report


def test_kl_of_a_known_distribution() -> None:
    """Both estimators of 200,000 tokens are the exact KL(q, p), not KL(p, q)."""
    q, p = np.array([0.7, 0.2, 0.1]), np.array([0.5, 0.1, 0.4])
    drawn = np.random.default_rng(5).choice(3, 200_000, p=q)
    batch = batch_of([[(V(0, 5), len(drawn))]])
    batch.samples[0].logprobs[:] = np.log(q)[drawn]
    with pytest.warns(UserWarning, match="do not belong to the tokens"):
        report = april.off_policy_report(batch, np.log(p)[drawn])
    exact = float((q * np.log(q / p)).sum())
    assert float((p * np.log(p / q)).sum()) > 1.3 * exact
    assert (report["kl_k1"], report["kl_k3"]) == pytest.approx((exact, exact), abs=0.006)
    assert report["ess_token"] == pytest.approx(1 / float((p * p / q).sum()), rel=0.01)


def test_log_probabilities_of_other_positions_are_noticed() -> None:
    """The commonest mistake of an own loop, at age 0; tokens of older weights may differ by as much."""
    for age, warns in ((0, True), (2, False)):
        batch = batch_of([[(V(0, 5 - age), 300)]])
        batch.samples[0].logprobs[:] = np.random.default_rng(1).uniform(-3, -0.01, 300)
        shifted = np.roll(batch.ragged()["logprobs"], 1)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            april.off_policy_report(batch, batch.ragged()["logprobs"])
            april.off_policy_report(batch, shifted)
        assert ["logits[:, :-1]" in str(w.message) and w.filename == __file__ for w in said] == [True] * warns


def test_log_probabilities_of_another_temperature_are_noticed() -> None:
    """They correlate, and differ by what rounding does not at age 0; tokens of older weights may differ by as much."""
    logits = np.random.default_rng(1).normal(0, 3, (300, 24))
    for age, temperature, warns in ((0, 0.6, True), (0, 1.0, False), (2, 0.6, False)):
        batch = batch_of([[(V(0, 5 - age), 300)]])
        sampled, own = (np.log(np.exp(z) / np.exp(z).sum(-1, keepdims=True)) for z in (logits / temperature, logits))
        batch.samples[0].logprobs[:] = sampled.max(-1)
        rounding = np.random.default_rng(2).normal(0, 0.05, 300)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            april.off_policy_report(batch, np.minimum(own.max(-1) + rounding, 0.0))
        assert ["by the temperature" in str(w.message) and w.filename == __file__ for w in said] == [True] * warns


def test_on_policy_and_nothing_to_train() -> None:
    """The same log-probabilities: everything counts, no KL. Without loss or rows: no tokens, and no guard."""
    batch = batch_of(ROWS)
    report = april.off_policy_report(batch, batch.padded()["logprobs"], min_effective_sample_size=1.0)
    assert [report[k] for k in ("ess_token", "ess_response", "weight_response")] == [1, 1, 1]
    assert [report[k] for k in ("kl_k1", "kl_k3", "kl_response")] == [0, 0, 0]
    for empty in (batch_of([[(None, 3)]]), batch_of([])):
        zeros = empty.padded()["logprobs"]
        assert april.off_policy_report(empty, zeros, min_effective_sample_size=1.0) == {"tokens": 0.0}
        assert empty.token_ages.tolist() == [0] * int(empty.lengths.sum())


def test_ratios_that_overflow_stay_numbers() -> None:
    """One token at e^1000 times its probability: it is the whole sample, and every figure is finite."""
    batch = batch_of([[(V(0, 5), 4)]])
    batch.samples[0].logprobs[:] = [-1000.0, -1.0, -1.0, -1.0]
    report = april.off_policy_report(batch, np.full((1, 4), -1.0))
    assert report["ess_token"] == pytest.approx(0.25)
    assert all(map(math.isfinite, report.values()))


def test_ages_over_a_restart() -> None:
    """Tokens of the abandoned branch: the way back to the branch point, and the way since."""
    batch = batch_of([[(V(0, 4), 1), (V(0, 7), 2), (None, 1), (V(1, 5), 1), (V(1, 6), 1)]], V(1, 6), branches={0: 5})
    assert batch.token_ages.tolist() == [2, 3, 3, 0, 1, 0]


def test_the_guard() -> None:
    """Below the limit the trainer stops, with a sentence that names batch, limit and ages; the report comes with it."""
    batch = batch_of(ROWS)
    logprobs = recomputed(batch)
    report = april.off_policy_report(batch, logprobs)
    found = report["ess_token"]
    assert april.off_policy_report(batch, logprobs, min_effective_sample_size=found) == report
    with pytest.raises(april.OffPolicyError, match=r"batch 4 .*0\.\d{3} of its tokens.*at age 0, .*max_staleness") as e:
        april.off_policy_report(batch, logprobs, min_effective_sample_size=found + 1e-9)
    assert e.value.report == report
    assert f"{report['age_2/ess_token']:.3f} at age 2" in str(e.value)


def report_of(kl_k3: float, tokens: float = 8.0) -> dict[str, float]:
    """As of a batch with this divergence."""
    return {"kl_k3": kl_k3, "tokens": tokens}


def test_the_drift_guard_looks_at_the_mean_over_batches() -> None:
    """Not before there are enough; at the limit not yet; after an alarm it begins anew."""
    guard = april.DriftGuard(limit=0.02, batches=3)
    said = [guard.exceeded(report_of(value)) for value in (1.0, 0.0, 0.0)]
    assert said == [False, False, True]
    assert guard.recent == []
    said = [guard.exceeded(report_of(value)) for value in (0.0625, 0.0, 0.0, 0.0, 0.03125, 0.03125)]
    assert said == [False, False, True, False, False, True]
    guard = april.DriftGuard(limit=0.25, batches=2)
    assert [guard.exceeded(report_of(value)) for value in (0.25, 0.25, 0.375)] == [False, False, True]


def test_the_drift_guard_passes_over_batches_without_trained_tokens() -> None:
    """They neither count as on-policy nor end a row of others; a guard sees reports of the real thing."""
    batch, empty = batch_of([[(V(0, 3), 400)]] * 4), batch_of([[(None, 3)]])
    far = april.off_policy_report(batch, recomputed(batch, 3.0))
    nothing = april.off_policy_report(empty, empty.padded()["logprobs"])
    guard = april.DriftGuard()
    assert [guard.exceeded(r) for r in (far, nothing, far, nothing, nothing, far)] == [False] * 5 + [True]
    with pytest.raises(ValueError, match=r"give the report that april\.off_policy_report returned"):
        guard.exceeded({"kl_k3": 0.1})
    with pytest.raises(ValueError, match=r"give the report that april\.off_policy_report returned"):
        guard.exceeded({"tokens": 3.0})


def test_a_drift_guard_goes_on_with_what_another_had_seen() -> None:
    """Over a checkpoint of plain floats; without it, it needs as many batches as at the start."""
    first = april.DriftGuard()
    assert not any(first.exceeded(report_of(0.03)) for _ in range(2))
    recent = json.loads(json.dumps(first.recent))
    assert not april.DriftGuard().exceeded(report_of(0.03))
    assert april.DriftGuard(recent=recent).exceeded(report_of(0.03))
    assert first.recent == [0.03, 0.03]


def test_drift_guards_that_cannot_be() -> None:
    """A limit that is none, and no batches; infinities in a report are an alarm, never silence."""
    for limit, batches in ((0.0, 3), (math.nan, 3), (math.inf, 3), (0.1, 0), (0.1, 2.5)):
        with pytest.raises(ValueError, match="give a limit above 0 and a whole number of batches from 1"):
            april.DriftGuard(limit, batches)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="DriftGuard: each of recent must be a number, got 'a'"):
        april.DriftGuard(recent=["a"])  # type: ignore[list-item]
    for value in (math.nan, math.inf):
        assert april.DriftGuard(batches=1).exceeded(report_of(value))


def test_what_is_refused() -> None:
    """Other shapes, what is no log-probability, halves, limits: one sentence each."""
    batch = batch_of(ROWS)
    right = recomputed(batch)
    with pytest.raises(ValueError, match=r"shape \[4, 8\]; give \[4, 9\] as .* or \[26\] as"):
        april.off_policy_report(batch, right[:, :-1])
    for wrong in (math.nan, -math.inf, 0.5):
        with pytest.raises(ValueError, match=f"logprobs holds {wrong:g} for one of 1 tokens"):
            april.off_policy_report(batch, np.where(np.arange(9) + np.arange(4)[:, None] == 0, wrong, right))
    with pytest.raises(ValueError, match="too coarse"):
        april.off_policy_report(batch, torch.from_numpy(right).bfloat16())
    for limit in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match=r"must be in \[0, 1\]"):
            april.off_policy_report(batch, right, min_effective_sample_size=limit)


def test_corrections_as_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks run as they stand: on-policy, the loss is minus the mean advantage of the tokens; the guard lowers the
    bound at the third batch, and with the lowest one it ends the run; the keys of the report are those on the page.
    """
    block, _, guard = blocks_of("corrections.md")
    batch = batch_of(ROWS, metrics={"staleness_bound": 1.0})
    monkeypatch.setattr(Batch, "advantages", lambda self, method: np.arange(len(self), dtype=np.float32))
    space: dict[str, Any] = {
        "april": april, "batch": batch, "model": None,
        "log_probabilities": lambda model, arrays: arrays["logprobs"].clone().requires_grad_(),
    }  # fmt: skip
    block.run(space)
    tokens = batch.padded()["loss_mask"].sum(1)
    assert float(space["loss"].detach()) == pytest.approx(-float(tokens @ np.arange(len(batch)) / tokens.sum()))
    assert space["loss"].requires_grad
    lowered: list[str] = []
    far = batch_of([[(V(0, 3), 400)]] * 4, metrics={"staleness_bound": 1.0})
    rollouts = SimpleNamespace(lower_staleness=lambda: lowered.append("once"))
    space |= {"batch": far, "logprobs": recomputed(far, 3.0), "rollouts": rollouts}
    before, step = (replace(guard, text=text) for text in guard.text.split("\n\n"))
    before.run(space)
    for _ in range(3):
        assert lowered == []
        step.run(space)
    assert lowered == ["once"]
    space["batch"] = batch_of([[(V(0, 3), 400)]] * 4, metrics={"staleness_bound": 0.0})
    step.run(space)
    step.run(space)
    with pytest.raises(SystemExit, match="the youngest tokens"):
        step.run(space)
    assert lowered == ["once"]
    page = text_of("corrections.md")
    assert {n for n in space["metrics"] if "/" not in n or n.startswith("age_2")} == {
        name for name in ("ess_token", "ess_response", "weight_response", "kl_k1", "kl_k3", "tokens", "age_2/ess_token",
                              "kl_response", "clip_share", "age_2/clip_share",
                          "age_2/kl_k1", "age_2/kl_k3", "age_2/tokens") if f"`{name}`" in page
    }  # fmt: skip
