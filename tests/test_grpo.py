"""The demo's GRPO update, held against computations by hand."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_model

from april.demo.grpo import GrpoBatch, GrpoTrainer, response_logprobs

GROUP = 3


@pytest.fixture
def model() -> Any:
    """A tiny Qwen3, fresh for every test."""
    return tiny_model(seed=2)


def batch(model: Any, rewards: list[float], shift: float = 0.0) -> GrpoBatch:
    """Two groups of three with responses of different lengths; behaviour = current policy + ``shift``."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 90, 4).astype(np.int32) for _ in range(2) for _ in range(GROUP)]
    responses = [rng.integers(3, 90, n).astype(np.int32) for n in (5, 9, 2, 7, 4, 11)]
    logprobs = [(x + shift).astype(np.float32) for x in response_logprobs(model, prompts, responses)]
    return GrpoBatch(
        prompts=prompts, responses=responses, behaviour_logprobs=logprobs,
        loss_masks=[np.ones(len(r), np.uint8) for r in responses],
        advantages=centred(rewards),
    )  # fmt: skip


def centred(rewards: list[float]) -> np.ndarray:
    """Rewards less the mean of their group."""
    rows = np.array(rewards, np.float32).reshape(-1, GROUP)
    return (rows - rows.mean(1, keepdims=True)).ravel()


def gradient(model: Any) -> torch.Tensor:
    """All gradients as one vector."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


REWARDS = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0]


def test_the_mean_over_the_tokens_of_the_batch(model: Any) -> None:
    """With behaviour = current the ratio is 1, and the gradient that of the mean of advantage x log-probability."""
    data = batch(model, REWARDS)
    GrpoTrainer(model).accumulate(data)
    found = gradient(model)
    model.zero_grad()
    for prompt, response, advantage in zip(data.prompts, data.responses, data.advantages, strict=True):
        ids = torch.from_numpy(np.concatenate((prompt, response))).long()[None]
        logprobs = model(input_ids=ids[:, :-1]).logits.log_softmax(-1).gather(-1, ids[:, 1:, None])
        (-float(advantage) * logprobs[0, len(prompt) - 1 :].sum() / sum(map(len, data.responses))).backward()

    assert torch.allclose(found, gradient(model), atol=1e-6)


def test_without_a_signal_nothing_changes(model: Any) -> None:
    """Advantages that are all zero leave weights and optimizer untouched."""
    before = copy.deepcopy(model.state_dict())
    trainer = GrpoTrainer(model)
    metrics = trainer.update(batch(model, [1, 1, 1, 0, 0, 0]))

    assert metrics["trained_sequences"] == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not trainer.optimizer.state


def test_behaviour_logprobs_are_what_the_ratio_is_taken_against(model: Any) -> None:
    """Other behaviour log-probabilities, another loss: exp(0.1) on every token within the clip range."""
    plain = GrpoTrainer(model).accumulate(batch(model, REWARDS))
    shifted = GrpoTrainer(model).accumulate(batch(model, REWARDS, shift=-0.1))

    assert plain["drift_mean"] == pytest.approx(0.0, abs=1e-6)
    assert shifted["drift_mean"] == pytest.approx(0.1, abs=1e-5)
    assert shifted["clip_share"] == 0.0


def test_clipping_stops_what_has_moved_too_far(model: Any) -> None:
    """With the ratio far above the range positive advantages have no gradient; far below, negative ones."""
    data = batch(model, REWARDS, shift=-2.0)  # ratio e^2
    advantages = data.advantages
    metrics = GrpoTrainer(model).accumulate(data)
    tokens = np.array([len(r) for r in data.responses])
    assert metrics["clip_share"] == pytest.approx(tokens[advantages > 0].sum() / tokens.sum())

    data = batch(model, REWARDS, shift=2.0)  # ratio e^-2
    metrics = GrpoTrainer(model).accumulate(data)
    assert metrics["clip_share"] == pytest.approx(tokens[advantages < 0].sum() / tokens.sum())


def test_masked_tokens_carry_no_gradient(model: Any) -> None:
    """A batch with a token masked has the gradient of the batch in which that token's log-probability is anything."""
    data = batch(model, REWARDS)
    masks = [m.copy() for m in data.loss_masks]
    masks[1][4:] = 0
    wild = [x.copy() for x in data.behaviour_logprobs]
    wild[1][4:] = -50.0
    GrpoTrainer(model).accumulate(replace(data, loss_masks=masks))
    expected = gradient(model)
    model.zero_grad()
    GrpoTrainer(model).accumulate(replace(data, loss_masks=masks, behaviour_logprobs=wild))

    assert torch.equal(expected, gradient(model))


def test_learning_rate_rises_and_falls(model: Any) -> None:
    """Up over rising_steps, then linearly to zero over total_steps."""
    trainer = GrpoTrainer(model, learning_rate=1.0, total_steps=10, rising_steps=1)
    rates = []
    for _ in range(10):
        rates.append(trainer._rate())
        trainer.updates += 1
    assert rates == pytest.approx([0.5, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1])
