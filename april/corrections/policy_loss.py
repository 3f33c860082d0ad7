"""Computes the loss that april recommends for batches with tokens from older weights.

Let q_t be the probability with which token t of response i was sampled, p_t its probability under the trained weights
before the first optimizer step of the batch, r_t = (current probability) / p_t, and A_i the advantage:

    loss = - sum over i, t of  w_i g(r_t, A_i)  /  number of tokens with loss
    g    = min(r_t A_i, clip(r_t, 1 - low, 1 + high) A_i), and at least negative_bound * A_i where A_i < 0
    w_i  = min(product over t of p_t / q_t, limit), a constant in the gradient

* The ratio is taken relative to p and clipped, and the weight is p / q, as in decoupled PPO (Hilton et al.,
  arXiv 2110.00641; in AReaL, arXiv 2505.24298, with a weight per token).
* Each response has one truncated weight, as in Liu et al., "When Speed Kills Stability: Demystifying RL Collapse from
  the Training-Inference Mismatch", 2025; it is truncated as in TIS (``importance.py``).
* The clip has two bounds, and the mean is taken over the tokens of the batch, as in DAPO, arXiv 2503.14476.
* Negative advantages are bounded, as in "dual clip", Ye et al., arXiv 1912.09729: without the bound, one token that
  became much likelier can outweigh a batch.

w_i is only useful if engine and trainer compute nearly equal probabilities with equal weights. If they differ by a KL
divergence of k nats per token, w_i is about e^(-kT) for T tokens, and a long response teaches nothing. A call with at
least 8 responses warns of this; for smaller micro-batches see ``weight_response`` of ``off_policy_report``. Two
remedies: ``dead_zone`` treats ratios p_t / q_t near 1 as 1, so that rounding errors do not add up. Or pass the
log-probabilities at sampling as ``proximal_logprobs``: q then takes the place of p, w_i is 1, and the clip limits the
ratio to q.

Apart from that, ``geometric_bounds`` can remove the loss of responses whose mean ratio p_t / q_t is far from 1:
"Geo-Mask" of Liu et al. above, ``seq-mask-tis`` in NeMo-RL.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from april.corrections.arguments import number, pair
from april.corrections.importance import LIMIT, as_tensor, check_logprobs, check_type, masked, truncated

if TYPE_CHECKING:
    import torch

VANISHED, JUDGED_RESPONSES = 0.1, 8
"""Mean weight below which :func:`policy_loss` warns, and the minimum number of responses with loss for the warning."""
LARGEST_DRIFT = 20.0
"""Largest log of the ratio r_t, in nats; larger ones are clamped, so exp cannot overflow, and have no gradient."""


def policy_loss(
    logprobs: torch.Tensor, behaviour_logprobs: Any, loss_mask: Any, advantages: Any, *,
    proximal_logprobs: Any = None, clip: tuple[float, float] = (0.2, 0.28), negative_bound: float | None = 3.0,
    limit: float = LIMIT, dead_zone: float = 0.0, geometric_bounds: tuple[float, float] | None = None,
    tokens: Any = None,
) -> torch.Tensor:  # fmt: skip
    """Compute the loss to minimise, a scalar tensor with the gradient of ``logprobs``; see above for the formula.

    Args:
        logprobs: log-probabilities of the response tokens under the current weights, in nats; float32 or float64
            tensor [B, T].
        behaviour_logprobs: log-probabilities at sampling, array or tensor [B, T]: ``batch.padded()["logprobs"]``.
        loss_mask: mask [B, T], not 0 where a token has loss. Other tokens are ignored in all arguments.
        advantages: advantages [B], one per response, or [B, T]: ``batch.advantages(...)``.
        proximal_logprobs: log-probabilities [B, T] before the first optimizer step of the batch (log p_t). None means
            ``logprobs`` without gradient, which is the same if there is only one step. Give ``behaviour_logprobs`` here
            if engine and trainer compute different probabilities, which you see by a ``weight_response`` of
            ``off_policy_report`` far below 1 for tokens of the current weights.
        clip: bounds (low, high) of the clip, each at least 0, low at most 1.
        negative_bound: largest ratio r_t that counts where the advantage is negative, at least 1 + high; tokens with a
            larger ratio have no gradient. None means no bound.
        limit: largest weight of a response.
        dead_zone: largest absolute log of p_t / q_t, in nats, that counts as 0 in the product; 0 changes nothing. With
            bfloat16, 0.3 to 0.4 keeps the weights of long responses near 1 if engine and trainer have equal weights.
        geometric_bounds: bounds (low, high) of the geometric mean of p_t / q_t over a response, such as (0.99, 1.01).
            Responses outside have no loss, but their tokens still count in ``tokens``. None means no bounds.
        tokens: number of tokens by which the sum is divided; None means those with loss in ``loss_mask``. For
            micro-batches and ranks, give the number in the whole batch, ``batch.share.loss_tokens``: the losses then
            add up to that of the batch. As DDP and FSDP average over ranks, multiply by ``batch.share.ranks`` there.

    Each row counts as a response. If no token has loss, the loss is 0.

    Raises ValueError for ``logprobs`` that are not a tensor, shapes that do not match, tokens with loss whose
    log-probability is impossible (NaN, infinite, above 0) or whose advantage is not finite, float16 and bfloat16
    log-probabilities, bounds and limits out of range, and ``tokens`` below the number of tokens with loss.
    """
    import torch

    who = "policy_loss"
    if not isinstance(logprobs, torch.Tensor):
        raise ValueError(f"{who}: logprobs must be a tensor, got {type(logprobs).__name__}; arrays have no gradient")
    low, high = pair(who, "clip", clip)
    if not (0 <= low <= 1 and 0 <= high < float("inf")):
        raise ValueError(f"{who}: clip must be (low, high) with 0 <= low <= 1 and high at least 0, got {clip!r}")
    now = logprobs if logprobs.dtype == torch.float64 else logprobs.float()
    check_type(who, "logprobs", logprobs)
    proximal = now.detach()
    weights = truncated(who, now, behaviour_logprobs, loss_mask, limit, "sequence", False, dead_zone)
    bound = None if negative_bound is None else number(who, "negative_bound", negative_bound)
    if bound is not None and not 1 + high <= bound < float("inf"):
        raise ValueError(
            f"{who}: negative_bound must be finite and at least {1 + high:g}, the upper end of the clip, got "
            f"{negative_bound!r}"
        )
    counted = as_tensor(who, "loss_mask", loss_mask, now.device) != 0
    if proximal_logprobs is not None:
        check_type(who, "proximal_logprobs", proximal_logprobs)
        proximal = as_tensor(who, "proximal_logprobs", proximal_logprobs, now.device).detach().to(now.dtype)
        if proximal.shape != now.shape:
            raise ValueError(
                f"{who}: proximal_logprobs have the shape {list(proximal.shape)}, and logprobs {list(now.shape)}"
            )
        check_logprobs(who, "proximal_logprobs", proximal, counted)
        weights = truncated(who, proximal, behaviour_logprobs, loss_mask, limit, "sequence", False, dead_zone)
    responses = counted.any(-1)
    if not weights.is_meta and responses.sum() >= JUDGED_RESPONSES and weights.amax(-1)[responses].mean() < VANISHED:
        cause = "If engine or trainer compute in bfloat16, give dead_zone=0.4; else the responses are too old"
        if dead_zone:
            cause = "Rounding often exceeds the dead_zone, or the responses are too old"
        warnings.warn(
            f"{who}: the weights of the responses are below {VANISHED} in the mean, so they teach next to nothing. "
            f"{cause} for this loss",
            stacklevel=2,
        )
    if geometric_bounds is not None:
        low_mean, high_mean = pair(who, "geometric_bounds", geometric_bounds)
        if not 0 <= low_mean <= high_mean or high_mean == 0:
            raise ValueError(
                f"{who}: geometric_bounds must be (low, high) with 0 <= low <= high and high above 0, got "
                f"{geometric_bounds!r}"
            )
        means = masked(who, proximal, behaviour_logprobs, loss_mask, low_mean, high_mean, "geometric", False)
        weights = torch.where(means > 0, weights, 0.0)
    gain = _advantages(who, advantages, counted).to(now.dtype)
    ratio = torch.where(counted, now - proximal, 0.0).clamp(max=LARGEST_DRIFT).exp()
    objective = torch.minimum(ratio * gain, ratio.clamp(1.0 - low, 1.0 + high) * gain)
    if bound is not None:
        objective = torch.maximum(objective, bound * gain.clamp(max=0.0))
    trained = counted.sum()
    whole: Any = trained if tokens is None else number(who, "tokens", tokens)
    check_values(who, gain, trained, whole)
    loss: torch.Tensor = -(weights * objective).sum() / (trained.clamp(min=1) if tokens is None else max(whole, 1.0))
    return loss


def check_values(who: str, gain: torch.Tensor, trained: torch.Tensor, whole: torch.Tensor | float) -> None:
    """Raise ValueError for advantages that are not finite, or ``whole`` below the number of tokens with loss."""
    if not bool(gain.isfinite().all()):
        raise ValueError(f"{who}: an advantage is not finite where there is loss")
    if not trained <= whole < float("inf"):  # also catches NaN
        raise ValueError(f"{who}: tokens={whole:g}, but {trained:g} have loss here; give the number of the whole batch")


def _advantages(who: str, advantages: Any, counted: torch.Tensor) -> torch.Tensor:
    """Return the advantages as a tensor [B, T], 0 for tokens without loss."""
    import torch

    given = as_tensor(who, "advantages", advantages, counted.device).detach()
    wide = given[:, None] if given.ndim == 1 else given
    if wide.ndim != 2 or len(wide) != len(counted) or wide.shape[1] not in (1, counted.shape[1]):
        raise ValueError(
            f"{who}: advantages have the shape {list(given.shape)}; give [{len(counted)}], or {list(counted.shape)}"
        )
    return torch.where(counted, wide, 0.0)
