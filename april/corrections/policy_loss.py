"""Computes the loss that april recommends for batches with tokens from older weights.

Let q_t be the probability with which token t of response i was sampled, p_t its probability under the trained weights
before the first optimizer step of the batch, and r_t = (current probability) / p_t:

    loss = - sum over i, t of  w_i min(r_t A_i, clip(r_t, 1 - low, 1 + high) A_i)  /  number of tokens with loss
    w_i  = min(product over t of p_t / q_t, limit), a constant in the gradient

* The ratio is taken relative to p and clipped, and the weight is p / q, as in decoupled PPO (Hilton et al.,
  arXiv 2110.00641; in AReaL, arXiv 2505.24298, with a weight per token).
* Each response has one truncated weight, as in Liu et al., "When Speed Kills Stability: Demystifying RL Collapse from
  the Training-Inference Mismatch", 2025; it is truncated as in TIS (``importance.py``).
* The clip has two bounds, and the mean is taken over the tokens of the batch, as in DAPO, arXiv 2503.14476.

The product is only useful if engine and trainer agree under equal weights. With a KL divergence of k nats per token
between them, a response of T tokens has a weight of about e^(-kT); if that is near 0, nothing is learned from it. If q
is given in place of p, w_i is 1, and the ratio relative to q is clipped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from april.corrections.importance import LIMIT, as_tensor, check_logprobs, check_type, truncated

if TYPE_CHECKING:
    import torch

LARGEST_DRIFT = 20.0
"""Largest log of the ratio r_t, in nats. A larger ratio is clamped, so that it cannot overflow; it has no gradient."""


def policy_loss(
    logprobs: torch.Tensor, behaviour_logprobs: Any, loss_mask: Any, advantages: Any, *,
    proximal_logprobs: Any = None, clip: tuple[float, float] = (0.2, 0.28), limit: float = LIMIT, tokens: Any = None,
) -> torch.Tensor:  # fmt: skip
    """Compute the loss to minimise, a scalar tensor with the gradient of ``logprobs``; see above for the formula.

    Args:
        logprobs: log-probabilities of the response tokens under the current weights, in nats; float32 or float64
            tensor [B, T].
        behaviour_logprobs: log-probabilities at sampling, array or tensor [B, T]: ``batch.padded()["logprobs"]``.
        loss_mask: mask [B, T], not 0 where a token has loss. Other tokens are ignored in all arguments.
        advantages: advantages [B], one per response, or [B, T]: ``batch.advantages(...)``.
        proximal_logprobs: ``logprobs`` [B, T] before the first optimizer step of the batch. None means ``logprobs``
            without gradient, which is the same if there is only one step. If ``weight_response`` of
            ``off_policy_report`` is far below 1 although all tokens are from the current weights, engine and trainer
            disagree: then give ``behaviour_logprobs`` here.
        clip: bounds (low, high) of the clip, each at least 0, low at most 1.
        limit: largest weight of a response.
        tokens: number of tokens by which the sum is divided; None means those with loss in ``loss_mask``. For
            micro-batches and ranks, give the number in the whole batch, ``batch.share.loss_tokens``: then the losses
            add up to the loss of the batch. As DDP and FSDP average over ranks, multiply by ``batch.share.ranks``
            there.

    Each row counts as a response. If no token has loss, the loss is 0.

    Raises ValueError for ``logprobs`` that are not a tensor, shapes that do not match, tokens with loss whose
    log-probability is impossible (NaN, infinite, above 0) or whose advantage is not finite, float16 and bfloat16
    log-probabilities, bounds and limits out of range, and ``tokens`` below the number of tokens with loss.
    """
    import torch

    who = "policy_loss"
    if not isinstance(logprobs, torch.Tensor):
        raise ValueError(f"{who}: logprobs must be a tensor, got {type(logprobs).__name__}; arrays have no gradient")
    low, high = clip
    if not (0 <= low <= 1 and 0 <= high < float("inf")):
        raise ValueError(f"{who}: clip must be (low, high) with 0 <= low <= 1 and high at least 0, got {clip!r}")
    now = logprobs if logprobs.dtype == torch.float64 else logprobs.float()
    check_type(who, "logprobs", logprobs)
    proximal = now.detach()
    weights = truncated(who, now, behaviour_logprobs, loss_mask, limit, "sequence", False)
    counted = as_tensor(loss_mask, now.device) != 0
    if proximal_logprobs is not None:
        check_type(who, "proximal_logprobs", proximal_logprobs)
        proximal = as_tensor(proximal_logprobs, now.device).detach().to(now.dtype)
        if proximal.shape != now.shape:
            raise ValueError(
                f"{who}: proximal_logprobs have the shape {list(proximal.shape)}, and logprobs {list(now.shape)}"
            )
        check_logprobs(who, "proximal_logprobs", proximal, counted)
        weights = truncated(who, proximal, behaviour_logprobs, loss_mask, limit, "sequence", False)
    gain = _advantages(who, advantages, counted).to(now.dtype)
    ratio = torch.where(counted, now - proximal, 0.0).clamp(max=LARGEST_DRIFT).exp()
    objective = weights * torch.minimum(ratio * gain, ratio.clamp(1.0 - low, 1.0 + high) * gain)
    trained = counted.sum()
    whole = trained if tokens is None else as_tensor(tokens, now.device)
    check_values(who, gain, trained, whole)
    loss: torch.Tensor = -objective.sum() / whole.clamp(min=1)
    return loss


def check_values(who: str, gain: torch.Tensor, trained: torch.Tensor, whole: torch.Tensor) -> None:
    """Raise ValueError for advantages that are not finite, or ``whole`` below the number of tokens with loss."""
    if not bool(gain.isfinite().all()):
        raise ValueError(f"{who}: an advantage is not finite where there is loss")
    if whole < trained:
        raise ValueError(f"{who}: tokens={whole:g}, but {trained:g} have loss here; give the number of the whole batch")


def _advantages(who: str, advantages: Any, counted: torch.Tensor) -> torch.Tensor:
    """Return the advantages as a tensor [B, T], 0 for tokens without loss."""
    import torch

    given = as_tensor(advantages, counted.device).detach()
    wide = given[:, None] if given.ndim == 1 else given
    if wide.ndim != 2 or len(wide) != len(counted) or wide.shape[1] not in (1, counted.shape[1]):
        raise ValueError(
            f"{who}: advantages have the shape {list(given.shape)}; give [{len(counted)}], or {list(counted.shape)}"
        )
    return torch.where(counted, wide, 0.0)
