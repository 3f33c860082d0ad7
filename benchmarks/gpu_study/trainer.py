"""GRPO on a real model, on one rank or under FSDP2, with the losses of ``benchmarks/study``.

Invariants: all ranks make the same forward and backward passes, so that no collective waits for ever; weights, moments
and gradients are float32, whatever is computed in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import april
from benchmarks.gpu_study.design import GpuSizes
from benchmarks.study.grpo import EPSILON, MAX_GRAD_NORM, RISING_STEPS
from benchmarks.study.losses import LOSSES
from benchmarks.study.training import Settings

LOGITS_AT_ONCE = 1024
"""Positions whose float32 logits are in memory at once."""
REPORTED = ("ess_token", "ess_response", "kl_k3")


def computing_in(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[Any]:
    """Return an autocast to ``dtype``, or nothing for float32."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


def load_model(sizes: GpuSizes, device: torch.device) -> Any:
    """Return the model in float32 on this rank's device, sharded if there are other ranks."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(sizes.model, dtype=torch.float32)
    model.to(device).eval()  # no dropout
    if sizes.recompute:
        enable = getattr(model, "activation_checkpointing_enable", None)  # of newer ones, which deprecate the other
        (enable or model.gradient_checkpointing_enable)()
        model.train()  # or it would have no effect
    ranks = dist.get_world_size()
    if ranks > 1:
        mesh = init_device_mesh(device.type, (ranks,))
        dtype = getattr(torch, sizes.dtype)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, output_dtype=dtype)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def chosen_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """Return log-probabilities [B, T] of the ids, float32, without all of the float32 logits in memory."""

    def some(logits: Tensor, ids: Tensor) -> Tensor:
        return logits.float().log_softmax(-1).gather(-1, ids[..., None])[..., 0]

    parts = [slice(at, at + LOGITS_AT_ONCE) for at in range(0, ids.shape[1], LOGITS_AT_ONCE)]
    found: list[Tensor] = [checkpoint(some, logits[:, p], ids[:, p], use_reentrant=False) for p in parts]
    return torch.cat(found, 1)


class RankTrainer:
    """One AdamW step per batch, with a rate that is constant after the first steps.

    Args:
        model: of :func:`load_model`; trained in place.
        settings: of the training.
        sizes: of its task.

    Raises:
        ValueError: the settings ask for what is made for small models only.
    """

    def __init__(self, model: Any, settings: Settings, sizes: GpuSizes) -> None:
        if settings.delay or settings.minibatches != 1:
            raise ValueError(
                "delays and minibatches are of benchmarks/study alone; here every batch is trained at once"
            )
        if settings.april.get("generation") == "continuous":
            raise ValueError("continuous generation would go on while evaluations are made, whose seconds do not count")
        self.model, self.settings, self.sizes = model, settings, sizes
        self.loss, self.device = LOSSES[settings.loss], next(model.parameters()).device
        self.ranks, self.updates = dist.get_world_size(), 0
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )

    def update(self, batch: april.Batch) -> dict[str, float]:
        """Train on this rank's share; return how far off the batch was, and the share of responses that taught."""
        rows = batch.padded(left_pad_prompts=True) | {"advantages": batch.advantages("grpo", epsilon=EPSILON)}
        arrays = april.to_torch(rows, device=self.device) if len(batch) else {}
        method: Literal["dapo", "grpo"] = "dapo" if self.settings.token_mean else "grpo"
        if arrays:
            arrays["share"] = april.loss_weights(arrays["loss_mask"], method, share=batch.share) * self.ranks
        p = np.zeros_like(rows["logprobs"])
        prompts = np.array([len(sample.prompt.token_ids) for sample in batch.samples], np.int64)
        parts = list(self._parts(batch.lengths, prompts.max(initial=0)))
        self.optimizer.zero_grad(set_to_none=True)
        for at in range(self._most(len(parts))):
            if at < len(parts):
                p[parts[at], : batch.lengths[parts[at]].max()] = self._pass(arrays, parts[at], batch.lengths, prompts)
            else:  # others have more
                nothing = 0.0 * self._logits(torch.zeros(1, 2, dtype=torch.int64, device=self.device), None, 1).sum()
                nothing.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * min(1.0, (self.updates + 1) / (RISING_STEPS + 1))
        self.optimizer.step()
        self.updates += 1
        report = april.off_policy_report(batch, p) if len(batch) else {}
        taught = float((rows["advantages"] != 0).mean()) if len(batch) else 0.0
        return self._mean({name: report.get(name, 0.0) for name in REPORTED} | {"taught": taught}, len(batch))

    def _parts(self, lengths: np.ndarray, prompt: int) -> Iterator[list[int]]:
        """Yield rows that are trained at once, of about the same length, longest first."""
        part: list[int] = []
        for row in np.argsort(-lengths, kind="stable").tolist():
            if part and (len(part) + 1) * (prompt + int(lengths[part[0]])) > self.sizes.tokens_at_once:
                yield part
                part = []
            part.append(row)
        if part:
            yield part

    def _pass(self, arrays: dict[str, Tensor], rows: list[int], lengths: np.ndarray, prompts: np.ndarray) -> np.ndarray:
        """Add the gradients of some rows; return their log-probabilities of before the step."""
        width = int(lengths[rows].max())
        part = {name: array[rows] for name, array in arrays.items()}
        ids, mask = part["response_ids"][:, :width], part["loss_mask"][:, :width]
        begin = part["input_ids"].shape[1] - part["response_ids"].shape[1]  # of the responses
        there = slice(begin - int(prompts[rows].max()), begin + width)  # without what is padding in all rows
        logits = self._logits(part["input_ids"][:, there], part["attention_mask"][:, there], width)
        now = chosen_logprobs(logits, ids)
        p, q = now.detach(), part["logprobs"][:, :width]
        weights = torch.ones_like(p)
        if self.loss.weights is not None:
            # of arrays, as everywhere in the study; padding is no log-probability
            given = torch.where(mask, p, 0.0), q, mask, part["advantages"]
            found = self.loss.weights(*(x.cpu().numpy() for x in given))
            weights = torch.as_tensor(found, device=self.device)
        reference = q if self.loss.to_behaviour else p
        objective = self.loss.objective(now, reference, weights, mask, part["advantages"][:, None])
        (-(objective * part["share"][:, :width]).sum()).backward()  # type: ignore[no-untyped-call]
        return p.cpu().numpy()

    def _logits(self, ids: Tensor, attention: Tensor | None, width: int) -> Tensor:
        """Return what predicts the last ``width`` tokens."""
        with computing_in(getattr(torch, self.sizes.dtype) if self.ranks == 1 else torch.float32, self.device):
            found: Tensor = self.model(ids, attention_mask=attention, logits_to_keep=width + 1, use_cache=False).logits
        return found[:, :-1]

    def _most(self, count: int) -> int:
        """Return the largest count of all ranks."""
        counts = torch.tensor(count, device=self.device)
        if self.ranks > 1:
            dist.all_reduce(counts, dist.ReduceOp.MAX)
        return int(counts)

    def _mean(self, figures: dict[str, float], rows: int) -> dict[str, float]:
        """Return the mean over the ranks, by their rows."""
        if self.ranks == 1:
            return figures
        sums = torch.tensor([*(rows * value for value in figures.values()), rows], device=self.device)
        dist.all_reduce(sums)
        return dict(zip(figures, (sums[:-1] / sums[-1]).tolist(), strict=True))
