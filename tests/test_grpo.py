"""The demo's GRPO update, held against computations by hand."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from several_rows import delivered
from tiny_models import tiny_model

import april
from april.core.batch import Batch
from benchmarks.study import grpo
from benchmarks.study.grpo import SEQUENCE, Loss, Trainer, response_logprobs

GROUP = 3
LENGTHS = (5, 9, 2, 7, 4, 11)
NOW = april.PolicyVersion(0, 0)


@pytest.fixture
def model() -> Any:
    """A tiny Qwen3, fresh for every test."""
    return tiny_model(seed=2)


@pytest.fixture(autouse=True)
def whole_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is cut off them, so that they can be compared after the step."""
    monkeypatch.setattr(grpo, "MAX_GRAD_NORM", 1e9)


def batch(model: Any, rewards: list[float], shift: float = 0.0) -> Batch:
    """Two groups of three with responses of different lengths; behaviour = current policy + ``shift``."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 90, 4).astype(np.int32) for _ in range(2 * GROUP)]
    responses = [rng.integers(3, 90, n).astype(np.int32) for n in LENGTHS]
    logprobs = [(x + shift).astype(np.float32) for x in response_logprobs(model, prompts, responses)]
    samples = []
    for i, response in enumerate(responses):
        group, index = divmod(i, GROUP)
        cohort = tuple(enumerate(rewards[group * GROUP : (group + 1) * GROUP]))
        segment = april.Segment(0, len(response), NOW, april.SegmentKind.GENERATED, "a", "e", 1.0)
        sample = delivered(
            group, index, len(response), prompt=april.Prompt(prompts[i]), tokens=response, logprobs=logprobs[i],
            segments=(segment,), reward=rewards[i], cohort=cohort,
        )  # fmt: skip
        samples.append(sample)
    return Batch(id=0, version=NOW, samples=tuple(samples), group_sizes=(GROUP, GROUP), metrics={})


def changed(data: Batch, which: int, **arrays: Any) -> Batch:
    rows = list(data.samples)
    rows[which] = replace(rows[which], **arrays)
    return replace(data, samples=tuple(rows))


def trained(model: Any, data: Batch, loss: Loss = SEQUENCE) -> torch.Tensor:
    """The gradient of one update, as one vector; the model does not move."""
    Trainer(model, loss, learning_rate=0.0).update(data)
    return gradient(model)


def gradient(model: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def by_hand(model: Any, data: Batch, weights: list[float]) -> torch.Tensor:
    """The gradient of the mean over all tokens of weight x advantage x log-probability."""
    model.zero_grad()
    for sample, weight, advantage in zip(data.samples, weights, data.advantages("grpo", epsilon=1e-4), strict=True):
        ids = torch.from_numpy(np.concatenate((sample.prompt.token_ids, sample.tokens))).long()[None]
        logprobs = model(input_ids=ids[:, :-1]).logits.log_softmax(-1).gather(-1, ids[:, 1:, None])
        own = logprobs[0, len(sample.prompt.token_ids) - 1 :].sum()
        (-weight * float(advantage) * own / sum(LENGTHS)).backward()
    return gradient(model)


REWARDS = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0]


def test_the_mean_over_the_tokens_of_the_batch(model: Any) -> None:
    """With behaviour = current all weights are 1, and a token of a long response weighs as much as one of a short."""
    data = batch(model, REWARDS)
    assert torch.allclose(trained(model, data), by_hand(model, data, [1.0] * 6), atol=1e-5)


def test_the_weight_is_that_of_the_whole_response(model: Any) -> None:
    """Tokens that have become likelier: p / q multiplied over the response, at most 2; that has no gradient itself."""
    data = batch(model, REWARDS, shift=-0.1)
    weights = [min(2.0, float(np.exp(0.1 * length))) for length in LENGTHS]
    assert weights.count(2.0) == 3
    assert torch.allclose(trained(model, data), by_hand(model, data, weights), atol=1e-5)


def test_without_a_signal_nothing_changes(model: Any) -> None:
    """Advantages that are all zero leave weights and optimizer untouched."""
    before = copy.deepcopy(model.state_dict())
    trainer = Trainer(model, SEQUENCE, learning_rate=1.0)
    report = trainer.update(batch(model, [1, 1, 1, 0, 0, 0]))

    assert report["taught"] == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not trainer.optimizer.state


def test_masked_tokens_carry_no_gradient(model: Any) -> None:
    """A batch with tokens masked has the gradient of the batch in which their log-probabilities are anything."""
    data = batch(model, REWARDS)
    mask = data.samples[1].loss_mask.copy()
    mask[4:] = 0
    wild = data.samples[1].logprobs.copy()
    wild[4:] = -50.0
    expected = trained(model, changed(data, 1, loss_mask=mask))

    assert torch.equal(trained(model, changed(data, 1, loss_mask=mask, logprobs=wild)), expected)
