"""GRPO updates from delivered batches of plain arrays.

Given advantages (the demo's are GRPO's, arXiv 2402.03300), the ratio taken against the **behaviour** log-probabilities
that the engine stored with every token (so tokens of older policy versions are corrected), asymmetric clipping
and the mean over all tokens (both DAPO, arXiv 2503.14476).

Invariant: an update depends on the weights, the optimizer's state and the batch, on nothing else; a batch whose
advantages are all zero changes nothing at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]

CHUNK_TOKENS = 2048
"""Most padded tokens of one forward pass."""
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
"""The ratio is clipped to [1 - CLIP_LOW, 1 + CLIP_HIGH]."""
MAX_GRAD_NORM = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoBatch:
    """A batch of B responses.

    Attributes:
        prompts: B arrays int32 [P_i].
        responses: B arrays int32 [T_i], T_i >= 1.
        behaviour_logprobs: B arrays float32 [T_i], nats, of each response token when it was sampled.
        loss_masks: B arrays [T_i]; a token whose entry is 0 carries no loss.
        advantages: float32 [B], one per response.
    """

    prompts: Sequence[Int32]
    responses: Sequence[Int32]
    behaviour_logprobs: Sequence[Float32]
    loss_masks: Sequence[NDArray[np.generic]]
    advantages: Float32


def response_logprobs(
    model: PreTrainedModel, prompts: Sequence[Int32], responses: Sequence[Int32]
) -> list[Float32]:
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


class GrpoTrainer:
    """AdamW on a causal language model; one gradient step per batch, the weights written in place.

    The loss is the mean over the tokens of the batch, so that a token of a long sequence weighs as much as one of a
    short one.

    Args:
        model: model to train in place, in the mode it is in (no dropout is assumed).
        learning_rate: peak of the schedule.
        total_steps: number of updates over which the rate falls linearly to zero.
        rising_steps: number of updates over which the rate rises to its peak at the start.
    """

    def __init__(
        self, model: PreTrainedModel, learning_rate: float = 1e-3, total_steps: int = 100, rising_steps: int = 0
    ) -> None:
        self.model = model
        self.learning_rate, self.total_steps, self.rising_steps = learning_rate, total_steps, rising_steps
        self.updates = 0
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )

    def update(self, batch: GrpoBatch) -> dict[str, float]:
        """Take one step on ``batch`` and return its metrics; weights and optimizer are untouched without a signal."""
        rate = self._rate()
        self.updates += 1
        self.optimizer.zero_grad(set_to_none=True)
        metrics = self.accumulate(batch)
        if metrics["trained_sequences"]:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        return metrics

    def accumulate(self, batch: GrpoBatch) -> dict[str, float]:
        """Add the gradient of the batch's loss to the parameters and return the loss and what describes it.

        Sequences with zero advantage or nothing unmasked have no gradient: they are skipped, yet counted in the mean.
        """
        advantages = batch.advantages
        count = len(advantages)
        active = [i for i in range(count) if advantages[i] != 0 and np.any(batch.loss_masks[i])]
        mean_length = torch.tensor(sum(np.count_nonzero(m) for m in batch.loss_masks) / count)
        loss_sum = clipped = drift_sum = tokens = 0.0
        for rows in chunks(active, batch.prompts, batch.responses):
            prompts, responses = [batch.prompts[i] for i in rows], [batch.responses[i] for i in rows]
            now = token_logprobs(self.model, prompts, responses)
            behaviour = _placed(prompts, [batch.behaviour_logprobs[i] for i in rows], now.shape[1])
            masks = [np.asarray(batch.loss_masks[i], dtype=np.float32) != 0 for i in rows]
            mask = _placed(prompts, masks, now.shape[1])
            advantage = torch.from_numpy(advantages[rows])[:, None]
            drift = torch.where(mask > 0, now - behaviour, 0.0)
            ratio = drift.exp()
            plain = ratio * advantage
            bounded = ratio.clamp(1.0 - CLIP_LOW, 1.0 + CLIP_HIGH) * advantage
            per_sequence = (torch.minimum(plain, bounded) * mask).sum(1) / mean_length
            loss = -per_sequence.sum() / count
            loss.backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.item()
            clipped += ((bounded < plain) & (mask > 0)).sum().item()
            drift_sum += drift.detach().abs().sum().item()
            tokens += mask.sum().item()
        return {
            "loss": loss_sum,
            "trained_sequences": float(len(active)),
            "clip_share": clipped / max(1.0, tokens),
            "drift_mean": drift_sum / max(1.0, tokens),
        }

    def _rate(self) -> float:
        rising = (self.updates + 1) / (self.rising_steps + 1)
        return self.learning_rate * min(1.0, rising, max(0.0, 1.0 - self.updates / self.total_steps))


def chunks(which: Sequence[int], prompts: Sequence[Int32], responses: Sequence[Int32]) -> Iterator[list[int]]:
    """Yield indices ``which``, longest first; no chunk has more than CHUNK_TOKENS padded tokens, or one row."""
    lengths = {i: len(prompts[i]) + len(responses[i]) for i in which}
    left = sorted(which, key=lambda i: -lengths[i])
    while left:
        rows = max(1, CHUNK_TOKENS // lengths[left[0]])
        yield left[:rows]
        left = left[rows:]


def token_logprobs(
    model: PreTrainedModel, prompts: Sequence[Int32], responses: Sequence[Int32]
) -> Tensor:
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


def _placed(prompts: Sequence[Int32], values: Sequence[NDArray[np.generic]], width: int) -> Tensor:
    """Return values per response token at the columns of :func:`token_logprobs`, else 0: float32 [rows, width]."""
    placed = np.zeros((len(prompts), width), dtype=np.float32)
    for row, (prompt, value) in enumerate(zip(prompts, values, strict=True)):
        placed[row, len(prompt) - 1 : len(prompt) - 1 + len(value)] = value
    return torch.from_numpy(placed)
