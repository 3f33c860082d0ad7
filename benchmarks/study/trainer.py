"""Updates from april's batches, with any of the losses.

Invariant: an update depends on the weights, the optimizer's state and the batch alone.
"""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel

import april
from april.demo.grpo import MAX_GRAD_NORM, chunks, response_logprobs, token_logprobs
from benchmarks.study.losses import Loss

EPSILON = 1e-4
"""Of the advantages, as in the demo."""
RISING_STEPS = 2
"""Updates over which the rate rises; then it is constant."""


class Trainer:
    """AdamW with a constant rate.

    Args:
        model: trained in place.
        loss: see ``losses.py``.
        learning_rate: after the first updates.
        minibatches: optimizer steps per batch, each on a part of its responses; their order is of ``seed``.
        token_mean: the mean over the tokens of the batch (DAPO's), or of the means over each response's (GRPO's).
        seed: of the order.
    """

    def __init__(
        self, model: PreTrainedModel, loss: Loss, *, learning_rate: float, minibatches: int = 1,
        token_mean: bool = True, seed: int = 0,
    ) -> None:  # fmt: skip
        self.model, self.loss, self.learning_rate = model, loss, learning_rate
        self.minibatches, self.token_mean, self.seed = minibatches, token_mean, seed
        self.updates = 0
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)

    def update(self, batch: april.Batch) -> dict[str, float]:
        """Train on a batch; return april's report on how far off it was, and the share of responses that taught."""
        prompts, responses = [s.prompt.token_ids for s in batch.samples], [s.tokens for s in batch.samples]
        arrays = batch.padded()
        q, mask = arrays["logprobs"], arrays["loss_mask"] != 0
        p = np.zeros_like(q)
        for row, found in zip(p, response_logprobs(self.model, prompts, responses), strict=True):
            row[: len(found)] = found
        report = april.off_policy_report(batch, p)
        weights = np.ones_like(p) if self.loss.weights is None else self.loss.weights(p, q, mask)
        share = april.loss_weights(mask, "dapo" if self.token_mean else "grpo")
        reference = q if self.loss.to_behaviour else p
        advantages = batch.advantages("grpo", epsilon=EPSILON)
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
        return kept | {"taught": len(active) / len(mask)}

    def _logprobs(self, prompts: list[np.ndarray], responses: list[np.ndarray]) -> torch.Tensor:
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
