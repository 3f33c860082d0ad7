"""GRPO updates from april's batches: losses that correct for older weights, and a trainer with a constant rate.

p is a token's probability before the first optimizer step of a batch, q the one it was sampled with. The loss that the
demo trains with multiplies PPO's clipped ratio to p (clipped as in DAPO, arXiv 2503.14476) by a weight that stands for
p / q over the whole response and has no gradient. It is the mean over all tokens of the batch, so that a token of a
long response weighs as much as one of a short one.

Invariant: an update depends on the weights, the optimizer's state and the batch alone; a batch whose advantages are all
zero changes nothing at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from april.core.batch import Batch
from april.corrections.advantages import Method
from april.corrections.importance import Level, truncated_weights
from april.corrections.loss_weights import loss_weights
from april.corrections.off_policy import off_policy_report

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]

CHUNK_TOKENS = 2048
"""Most padded tokens of one forward pass."""
MAX_GRAD_NORM = 1.0
EPSILON = 1e-4
"""Of the advantages."""
RISING_STEPS = 2
"""Updates over which the rate rises; then it is constant."""

CLIP = (0.2, 0.28)
"""The ratio is clipped to [1 - low, 1 + high] (DAPO, arXiv 2503.14476)."""

DEAD_ZONE = 0.4
"""Size in nats up to which a log ratio counts as 0 in the products of the loss with a dead zone."""

Weights = Callable[[Float32, Float32, NDArray[Any], Float32], Float32]
"""(log p, log q, loss mask), each [B, T], and advantages, [B], to the weights."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss.

    Attributes:
        weights: constant weight of each token; None means 1.
        to_behaviour: whether the ratio is to q, not to p.
        per_response: whether it is the geometric mean over the response.
        clip: bounds of the ratio.
        negative_bound: largest ratio that counts where the advantage is negative (dual clip, arXiv 1912.09729).
        product: whether a weight is a product over its response, so that it depends on how long the response is.
    """

    weights: Weights | None = None
    to_behaviour: bool = False
    per_response: bool = False
    clip: tuple[float, float] = CLIP
    negative_bound: float | None = None
    product: bool = False

    def objective(self, now: Tensor, reference: Tensor, weights: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
        """Return what is maximised, [rows, T]; ``reference`` is log q or log p, as ``to_behaviour`` says."""
        drift = torch.where(mask, now - reference, 0.0)
        if self.per_response:
            mean = drift.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
            # the response's ratio, with the gradient of each token in its own place (the paper's GSPO-token)
            drift = mean.detach() + torch.where(mask, now - now.detach(), 0.0)
        ratio = drift.exp()
        low, high = self.clip
        bounded = ratio.clamp(1.0 - low, 1.0 + high)
        gain = torch.minimum(ratio * advantages, bounded * advantages)
        if self.negative_bound is not None:
            gain = torch.maximum(gain, self.negative_bound * advantages.clamp(max=0.0))
        return weights * gain


@dataclass(frozen=True, slots=True)
class Noise:
    """A noise on log-probabilities at sampling, as an engine has that rounds to bfloat16.

    The standard deviation of a token's noise grows with sqrt(1 - q) + 0.1, as rounding moves uncertain tokens most. The
    ratio p / q that the noise alone makes has the mean 1. So some noisy q are above 1; only their ratios are used.

    Attributes:
        kl: mean KL divergence in nats per token; 0 means no noise.
        length: responses count as long as this in products: the noise of the tokens that they lack enters the weights.
    """

    kl: float = 0.0
    length: int = 0

    def added(
        self, p: Float32, q: Float32, mask: NDArray[Any], rng: np.random.Generator, lengthened: bool
    ) -> tuple[Float32, tuple[Float32, Float32, NDArray[Any]]]:
        """Return noisy q, float32 [B, T], and p, noisy q and mask for the weights, with lacking tokens if wanted.

        For the weights both p and q of a token are divided by its q where that is above 1.
        """
        variance = np.where(mask, np.sqrt(np.clip(1 - np.exp(q), 0, 1)) + 0.1, 0.0) ** 2
        variance *= 2 * self.kl / variance[mask].mean()
        noisy = q - _noise(variance, rng)
        lacking = np.maximum(0, self.length - mask.sum(1)) * lengthened
        more = np.arange(lacking.max(initial=0)) < lacking[:, None]
        drawn = _noise(np.where(more, rng.choice(variance[mask], more.shape), 0.0), rng)
        # tokens that are lacking have p = 1/e: only their ratio is of meaning
        wide_p = np.concatenate([p, np.where(more, -1.0, 0.0)], 1)
        wide_q = np.concatenate([noisy, np.where(more, -1.0, 0.0) - drawn], 1)
        above = np.maximum(wide_q, 0.0)
        given = (wide_p - above).astype(np.float32), (wide_q - above).astype(np.float32)
        return noisy.astype(np.float32), (*given, np.concatenate([mask, more], 1))


def _noise(variance: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw noise of log(p / q) whose exponential has the mean 1."""
    return rng.normal(size=variance.shape) * np.sqrt(variance) - variance / 2


def truncated(limit: float, level: Level, dead_zone: float = 0.0) -> Weights:
    """Return :func:`april.truncated_weights` with a limit, per token or per response."""
    return lambda p, q, mask, _: truncated_weights(p, q, mask, limit, level=level, dead_zone=dead_zone)


SEQUENCE = Loss(truncated(2.0, "sequence"), product=True)
"""The weight of the whole response, at most 2: the demo's."""


def response_logprobs(model: PreTrainedModel, prompts: Sequence[Int32], responses: Sequence[Int32]) -> list[Float32]:
    """Return log_softmax(logits) of every response token under the present weights: float32 [T_i]."""
    result: list[Float32] = [np.empty(0, dtype=np.float32)] * len(responses)
    with torch.no_grad():
        for rows in chunks(range(len(responses)), prompts, responses):
            chunk = [prompts[i] for i in rows], [responses[i] for i in rows]
            found = token_logprobs(model, *chunk).numpy()
            for row, i in enumerate(rows):
                first = len(prompts[i]) - 1
                result[i] = found[row, first : first + len(responses[i])].copy()
    return result


class Trainer:
    """AdamW with a constant rate.

    Args:
        model: trained in place.
        loss: what is maximised.
        learning_rate: after the first updates.
        minibatches: optimizer steps per batch, each on a part of its responses; their order is of ``seed``.
        token_mean: the mean over the tokens of the batch (DAPO's), or of the means over each response's (GRPO's).
            GSPO has its own.
        seed: of the order, and of the noise.
        noise: on what the engine gave.
    """

    def __init__(
        self, model: PreTrainedModel, loss: Loss, *, learning_rate: float, minibatches: int = 1,
        token_mean: bool = True, seed: int = 0, noise: Noise = Noise(),
    ) -> None:  # fmt: skip
        self.model, self.loss, self.learning_rate = model, loss, learning_rate
        self.minibatches, self.token_mean, self.seed, self.noise = minibatches, token_mean, seed, noise
        self.updates = 0
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)

    def update(self, batch: Batch) -> dict[str, float]:
        """Train on a batch; return april's report on how far off it was, and the share of responses that taught."""
        prompts, responses = [s.prompt.token_ids for s in batch.samples], [s.tokens for s in batch.samples]
        arrays = batch.padded()
        q, mask = arrays["logprobs"], arrays["loss_mask"] != 0
        p = np.zeros_like(q)
        for row, found in zip(p, response_logprobs(self.model, prompts, responses), strict=True):
            row[: len(found)] = found
        report = off_policy_report(batch, p)
        given = p, q, mask
        if self.noise.kl and mask.any():
            rng = np.random.default_rng([self.seed, self.updates, 1])
            q, given = self.noise.added(p, q, mask, rng, self.loss.product)
        advantages = batch.advantages("grpo", epsilon=EPSILON)
        weights = np.ones_like(p)
        if self.loss.weights is not None:
            weights = self.loss.weights(*given, advantages)[:, : p.shape[1]]
        mean: Method = "gspo" if self.loss.per_response else "dapo" if self.token_mean else "grpo"
        share = loss_weights(mask, mean)
        reference = q if self.loss.to_behaviour else p
        active = np.flatnonzero((advantages != 0) & mask.any(1))
        parts = [active]
        if self.minibatches > 1:
            order = np.random.default_rng([self.seed, self.updates]).permutation(active)
            parts = [part for part in np.array_split(order, self.minibatches) if len(part)]
        for part in parts if len(active) else []:
            self.optimizer.zero_grad(set_to_none=True)
            for rows in chunks([int(i) for i in part], prompts, responses):
                now = self._logprobs([prompts[i] for i in rows], [responses[i] for i in rows])
                width = now.shape[1]
                there = torch.from_numpy(mask[rows, :width])
                objective = self.loss.objective(
                    now, torch.from_numpy(reference[rows, :width]), torch.from_numpy(weights[rows, :width]), there,
                    torch.from_numpy(advantages[rows])[:, None],
                )  # fmt: skip
                scaled = torch.from_numpy(share[rows, :width]) * (self.minibatches if self.minibatches > 1 else 1)
                (-(objective * scaled).sum()).backward()  # type: ignore[no-untyped-call]
            self._step()
        self.updates += 1
        kept = {key: report[key] for key in ("ess_token", "ess_response", "kl_k3")}
        counted = weights[mask].astype(np.float64) if mask.any() else np.ones(1)
        kept["weight_response"] = float(counted.mean())
        kept["weight_effective"] = float(counted.sum() ** 2 / max(1e-300, len(counted) * (counted**2).sum()))
        return kept | kl_of_responses(p, q, mask) | {"taught": len(active) / len(mask)}

    def _logprobs(self, prompts: list[Int32], responses: list[Int32]) -> Tensor:
        """Return the log-probabilities of response tokens, [rows, longest response]; padding has no meaning."""
        found = token_logprobs(self.model, prompts, responses)
        first = torch.tensor([len(prompt) - 1 for prompt in prompts])
        width = max(len(response) for response in responses)
        places = (first[:, None] + torch.arange(width)).clamp(max=found.shape[1] - 1)
        return found.gather(1, places)

    def _step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * min(1.0, (self.updates + 1) / (RISING_STEPS + 1))
        self.optimizer.step()


def kl_of_responses(p: Float32, q: Float32, mask: NDArray[Any]) -> dict[str, float]:
    """Return the mean KL divergence per response (k3), of all its tokens and of those outside the dead zone."""
    log_ratios = np.where(mask, p.astype(np.float64) - q, 0.0)
    k3 = np.expm1(np.minimum(log_ratios, 300.0)) - log_ratios
    far = np.where(np.abs(log_ratios) > DEAD_ZONE, k3, 0.0)
    return {"kl_response": float(k3.sum(1).mean()), "kl_response_far": float(far.sum(1).mean())}


def chunks(which: Sequence[int], prompts: Sequence[Int32], responses: Sequence[Int32]) -> Iterator[list[int]]:
    """Yield indices ``which``, longest first; no chunk has more than CHUNK_TOKENS padded tokens, or one row."""
    lengths = {i: len(prompts[i]) + len(responses[i]) for i in which}
    left = sorted(which, key=lambda i: -lengths[i])
    while left:
        rows = max(1, CHUNK_TOKENS // lengths[left[0]])
        yield left[:rows]
        left = left[rows:]


def token_logprobs(model: PreTrainedModel, prompts: Sequence[Int32], responses: Sequence[Int32]) -> Tensor:
    """Return log-probabilities of all tokens but the first, float32 [rows, longest - 1]; padding has no meaning.

    Padding is on the right, where causal attention never looks from a real token, so no attention mask is needed.
    """
    length = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
    ids = np.zeros((len(prompts), length), dtype=np.int64)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        ids[row, : len(prompt) + len(response)] = np.concatenate([prompt, response])
    tokens = torch.from_numpy(ids)
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits.float()
    logprobs: Tensor = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    return logprobs
