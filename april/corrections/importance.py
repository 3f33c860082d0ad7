"""Importance weights: what a token counts in the loss when other weights, or another engine, generated it.

With p the trainer's probability of a token and q the one it was sampled with, the ratio is

=============  ==================================================  ====================================================
level          ratio                                               of
=============  ==================================================  ====================================================
`token`        p_t / q_t                                           each token
`sequence`     product over t of p_t / q_t                         a response: exact, and soon huge or 0
`geometric`    (product over t of p_t / q_t) ** (1 / T)            a response, by its length T: GSPO, arXiv 2507.18071
=============  ==================================================  ====================================================

over the T tokens with loss. :func:`truncated_weights` (TIS) is min(ratio, limit): Yao et al., "Your Efficient RL
Framework Secretly Brings You Off-Policy RL Training", 2025. :func:`masked_weights` (IcePop) is the ratio inside [low,
high] and 0 outside: Ling Team, "Every Step Evolves", arXiv 2510.18855. Both papers have them per token, as constants in
the gradient.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Float32 = NDArray[np.float32]

Level = Literal["token", "sequence", "geometric"]
LEVELS: tuple[str, ...] = get_args(Level)

HALVES = ("float16", "bfloat16")
"""Types in which a log-probability is too coarse: in bfloat16 one of -10 is known to 0.06, its ratio to 6 %."""
LIMIT = 2.0
"""The default of the largest weight."""
LARGEST = float(np.finfo(np.float32).max)
"""The largest weight: above it float32 has infinity, which makes NaN of a loss of 0."""
ROUNDING = 0.01
"""Log-probabilities above 0 by less are rounding."""


@overload
def truncated_weights(
    logprobs: torch.Tensor, behaviour_logprobs: Any, loss_mask: Any,
    limit: float = ..., *, level: Level = ..., keep_gradient: bool = ...,
) -> torch.Tensor: ...  # fmt: skip
@overload
def truncated_weights(
    logprobs: NDArray[Any], behaviour_logprobs: Any, loss_mask: Any,
    limit: float = ..., *, level: Level = ..., keep_gradient: bool = ...,
) -> Float32: ...  # fmt: skip
def truncated_weights(
    logprobs: Any, behaviour_logprobs: Any, loss_mask: Any,
    limit: float = LIMIT, *, level: Level = "token", keep_gradient: bool = False,
) -> Any:  # fmt: skip
    """Truncated importance weights (TIS), min(ratio, limit): float32 [B, T], 0 where there is no loss.

    Args:
        logprobs: float32 or float64 [B, T], the trainer's, in nats; an array, or a tensor, and then the result is one.
        behaviour_logprobs: [B, T], as sampled: ``batch.padded()["logprobs"]``.
        loss_mask: [B, T], not 0 where a token has loss. What the others hold does not matter.
        limit: largest weight, above 0.
        level: ``token``, ``sequence`` or ``geometric``; the table is at the top of this module. With the last two, all
            tokens of a response have the same weight.
        keep_gradient: whether the weights of a tensor carry the gradient of its ratios (0 where they are truncated).
            The paper's do not; GSPO's ratio does in its own loss.

    Which level is best is not settled: docs/corrections.md.

    Raises ValueError for shapes that do not fit, numbers that are no log-probabilities (NaN, infinite, above 0) where
    there is loss, float16 and bfloat16, another level, and a limit that is not above 0 or that float32 does not hold.
    """
    return truncated("truncated_weights", logprobs, behaviour_logprobs, loss_mask, limit, level, keep_gradient)


@overload
def masked_weights(
    logprobs: torch.Tensor, behaviour_logprobs: Any, loss_mask: Any,
    low: float = ..., high: float = ..., *, level: Level = ..., keep_gradient: bool = ...,
) -> torch.Tensor: ...  # fmt: skip
@overload
def masked_weights(
    logprobs: NDArray[Any], behaviour_logprobs: Any, loss_mask: Any,
    low: float = ..., high: float = ..., *, level: Level = ..., keep_gradient: bool = ...,
) -> Float32: ...  # fmt: skip
def masked_weights(
    logprobs: Any, behaviour_logprobs: Any, loss_mask: Any,
    low: float = 0.5, high: float = 5.0, *, level: Level = "token", keep_gradient: bool = False,
) -> Any:  # fmt: skip
    """Masked importance weights (IcePop): the ratio where low <= ratio <= high, else 0: float32 [B, T].

    A masked token still counts in whatever the loss divides by, as in the paper; 0 is no loss, not no token.

    Args:
        logprobs, behaviour_logprobs, loss_mask, level, keep_gradient: as for :func:`truncated_weights`.
        low, high: the paper's alpha and beta, 0 <= low <= high; 0 and ``math.inf`` are no bound. A ratio that float32
            does not hold is cut to the largest number that it does.

    Raises ValueError as :func:`truncated_weights`, and for another order of low and high.
    """
    if not 0 <= low <= high or high == 0:
        raise ValueError(f"masked_weights: give 0 <= low <= high and high above 0, got low={low!r} and high={high!r}")
    who = "masked_weights"
    xp, ratios, counted = _log_ratios(who, logprobs, behaviour_logprobs, loss_mask, level, keep_gradient)
    kept = counted & (ratios >= (math.log(low) if low else -math.inf)) & (ratios <= math.log(high))
    # exp(0) in the place of what is masked: its overflow would be NaN in the gradient
    weights = xp.exp(xp.clip(xp.where(kept, ratios, 0.0), None, math.log(LARGEST)))
    return _float32(xp.where(kept, xp.clip(weights, None, LARGEST), 0.0))


def truncated(
    who: str, logprobs: Any, behaviour: Any, loss_mask: Any, limit: float, level: Level, keep_gradient: bool
) -> Any:
    """Compute :func:`truncated_weights` for ``who``, whose name is in what is raised."""
    if not 0 < limit <= LARGEST:
        raise ValueError(f"{who}: limit must be a number above 0 that float32 holds, got {limit!r}")
    xp, ratios, counted = _log_ratios(who, logprobs, behaviour, loss_mask, level, keep_gradient)
    weights = xp.exp(xp.clip(ratios, None, math.log(limit)))  # cut before exp, which could overflow
    return _float32(xp.where(counted, xp.clip(weights, None, limit), 0.0))


def float64_logprobs(who: str, what: str, values: Any) -> NDArray[np.float64]:
    """An array, or a tensor of any device, as float64; refuses types that are too coarse."""
    check_type(who, what, values)
    return np.asarray(values.detach().double().cpu() if hasattr(values, "detach") else values, np.float64)


def check_logprobs(who: str, what: str, values: Any, counted: Any) -> None:
    """Refuse what is no log-probability, where there is loss."""
    wrong = counted & ~((values <= ROUNDING) & (values > -math.inf))
    if bool(wrong.any()):
        raise ValueError(
            f"{who}: {what} holds {values[wrong][0].item():g} for one of {int(wrong.sum())} tokens with loss; give "
            "log-probabilities: finite, and at most 0"
        )


def _log_ratios(who: str, logprobs: Any, behaviour: Any, loss_mask: Any, level: Level, keep_gradient: bool) -> Any:
    """(numpy or torch, log of the ratios and 0 where there is no loss, where there is loss)."""
    if level not in LEVELS:
        raise ValueError(f"{who}: level must be one of {', '.join(LEVELS)}, got {level!r}")
    own: Any
    other: Any
    if hasattr(logprobs, "detach"):
        import torch

        check_type(who, "logprobs", logprobs)
        check_type(who, "behaviour_logprobs", behaviour)
        xp: Any = torch
        own = logprobs if keep_gradient else logprobs.detach()
        own = own if own.dtype == torch.float64 else own.float()
        other = as_tensor(behaviour, own.device).detach().to(own.dtype)
        counted = as_tensor(loss_mask, own.device) != 0
    else:
        if keep_gradient:
            raise ValueError(f"{who}: keep_gradient=True needs logprobs as a tensor; arrays have no gradient")
        xp = np
        own = float64_logprobs(who, "logprobs", logprobs)
        other = float64_logprobs(who, "behaviour_logprobs", behaviour)
        counted = np.asarray(loss_mask.cpu() if hasattr(loss_mask, "cpu") else loss_mask) != 0
    if own.ndim != 2 or own.shape != other.shape or own.shape != counted.shape:
        raise ValueError(
            f"{who}: logprobs have the shape {list(own.shape)}, behaviour_logprobs {list(other.shape)} and loss_mask "
            f"{list(counted.shape)}; give three of the same [B, T], T the longest response"
        )
    check_logprobs(who, "logprobs", own, counted)
    check_logprobs(who, "behaviour_logprobs", other, counted)
    ratios = xp.where(counted, own, 0.0) - xp.where(counted, other, 0.0)
    if level != "token":
        total = ratios.sum(-1)
        if level == "geometric":
            total = total / counted.sum(-1).clip(1)
        ratios = xp.where(counted, total[:, None], 0.0)
    return xp, ratios, counted


def as_tensor(values: Any, device: Any) -> Any:
    """A tensor on this device; arrays are copied, as torch warns of those that nobody may write into."""
    import torch

    return values.to(device) if hasattr(values, "detach") else torch.tensor(np.asarray(values), device=device)


def check_type(who: str, what: str, values: Any) -> None:
    """Refuse types in which a ratio means nothing."""
    kind = str(getattr(values, "dtype", "")).removeprefix("torch.")
    if kind in HALVES:
        raise ValueError(
            f"{who}: {what} are {kind}, too coarse for ratios; compute log_softmax in float32 (logits.float())"
        )


def _float32(weights: Any) -> Any:
    return weights.astype(np.float32) if isinstance(weights, np.ndarray) else weights.float()
