"""Computes importance weights, which correct the loss for tokens sampled by older weights or by a different engine.

Let p be the trainer's probability of a token, q its probability at sampling, and T the number of tokens with loss in
the response. Ratios are computed at one of three levels:

=============  ==================================================  ====================================================
level          ratio                                               one ratio for
=============  ==================================================  ====================================================
`token`        p_t / q_t                                           each token t
`sequence`     product over t of p_t / q_t                         each response; exact, but soon huge or near 0
`geometric`    (product over t of p_t / q_t) ** (1 / T)            each response, as in GSPO, arXiv 2507.18071
=============  ==================================================  ====================================================

:func:`truncated_weights` (TIS) returns min(ratio, limit): Yao et al., "Your Efficient RL Framework Secretly Brings You
Off-Policy RL Training", 2025. :func:`masked_weights` (IcePop) returns the ratio inside [low, high] and 0 outside: Ling
Team, "Every Step Evolves", arXiv 2510.18855. Both papers use weights per token, without a gradient.
"""

from __future__ import annotations

import math
import sys
import warnings
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from april.corrections.arguments import ArrayOrTensor, array_of, number

Level = Literal["token", "sequence", "geometric"]
LEVELS: tuple[str, ...] = get_args(Level)

HALVES = ("float16", "bfloat16")
"""Types too coarse for log-probabilities: bfloat16 numbers near -10 are 0.06 apart, which is 6 % of a ratio."""
LIMIT = 2.0
"""Default limit of the weights."""
LARGEST = float(np.finfo(np.float32).max)
"""Largest possible weight: a larger number is infinite in float32, and infinity times a loss of 0 is NaN."""
ROUNDING = 0.01
"""Largest accepted log-probability; rounding errors may raise it above 0."""
JUDGED_TOKENS = 128
"""Smallest number of tokens with loss for which log-probabilities are checked for misalignment."""
MIN_CORRELATION, MAX_DIFFERENCE = 0.5, 0.2
"""The trainer's log-probabilities count as misaligned if their correlation with those at sampling is below the first
number and their mean absolute difference in nats is above the second. The hardest case measured is a random model with
a vocabulary of 24. With logits that are not shifted, correlation and difference are 0.18 and 0.10 at first, 0.24 and
0.24 later. With aligned logits they are 0.85 and 0.11 if tokens are up to five updates old (at a high learning rate),
and 0.87 and 0.06 with noise like bfloat16's. In pretrained models the two cases are further apart."""
MIN_CORRELATION_FRESH, MAX_DIFFERENCE_FRESH = 0.7, 0.05
"""The same thresholds for tokens that the current weights sampled; missing left padding gives them 0.38 and 0.07."""
MAX_ALIGNED_DIFFERENCE_FRESH = 0.2
"""If the mean difference for tokens of the current weights is above this number of nats, engine and trainer use other
distributions, even if the correlation is high: a forgotten temperature of 0.6 gives a difference of 0.31 at a
correlation of 0.997, and bfloat16 gives less than 0.06."""


def truncated_weights(
    logprobs: ArrayOrTensor, behaviour_logprobs: Any, loss_mask: Any, limit: float = LIMIT, *, level: Level = "token",
    dead_zone: float = 0.0, keep_gradient: bool = False,
) -> ArrayOrTensor:  # fmt: skip
    """Compute truncated importance weights (TIS), min(ratio, limit): float32 [B, T], 0 for tokens without loss.

    Args:
        logprobs: the trainer's log-probabilities in nats, float32 or float64 array or tensor [B, T]. The result is an
            array or a tensor accordingly.
        behaviour_logprobs: log-probabilities at sampling, [B, T]: ``batch.padded()["logprobs"]``.
        loss_mask: mask [B, T], not 0 where a token has loss. Values of other tokens are ignored.
        limit: largest weight, above 0.
        level: ``token``, ``sequence`` or ``geometric``; the table is at the top of this module. With ``sequence`` and
            ``geometric``, all tokens of a response have the same weight.
        dead_zone: largest absolute log of a token's ratio, in nats, that counts as 0. If nearly all rounding errors are
            smaller, they do not add up over long responses. Training moves the tokens that matter by more.
        keep_gradient: True to let the gradient flow through the weights (except truncated ones); needs a tensor. The
            paper's weights have no gradient, but the ratio in GSPO's loss has one.

    It is not settled which level is best: see docs/corrections.md.

    Raises ValueError for shapes that do not match, values of tokens with loss that are no log-probability (NaN,
    infinite, above 0), float16 and bfloat16, an unknown level, a limit that is not above 0 or too large for float32,
    and a dead zone that is negative or infinite.
    """
    who, behaviour = "truncated_weights", behaviour_logprobs
    weights: ArrayOrTensor = truncated(who, logprobs, behaviour, loss_mask, limit, level, keep_gradient, dead_zone)
    return weights


def masked_weights(
    logprobs: ArrayOrTensor, behaviour_logprobs: Any, loss_mask: Any, low: float = 0.5, high: float = 5.0, *,
    level: Level = "token", keep_gradient: bool = False,
) -> ArrayOrTensor:  # fmt: skip
    """Compute masked importance weights (IcePop): the ratio if low <= ratio <= high, else 0; float32 [B, T].

    Masked tokens have no loss, but as in the paper, they still count in the number by which the loss is divided.

    Args:
        logprobs, behaviour_logprobs, loss_mask, level, keep_gradient: see :func:`truncated_weights`.
        low, high: the paper's alpha and beta, 0 <= low <= high; 0 and ``math.inf`` mean no bound. Ratios too large for
            float32 are cut to the largest float32 number.

    Raises ValueError as :func:`truncated_weights` does, and for bounds other than 0 <= low <= high with high above 0.
    """
    who, behaviour = "masked_weights", behaviour_logprobs
    weights: ArrayOrTensor = masked(who, logprobs, behaviour, loss_mask, low, high, level, keep_gradient)
    return weights


def masked(
    who: str, logprobs: Any, behaviour: Any, loss_mask: Any, low: float, high: float, level: Level,
    keep_gradient: bool,
) -> Any:  # fmt: skip
    """Compute :func:`masked_weights`; ``who`` is the name of the public function, for messages."""
    low, high = number(who, "low", low), number(who, "high", high)
    if not 0 <= low <= high or high == 0:
        raise ValueError(f"{who}: give 0 <= low <= high and high above 0, got low={low!r} and high={high!r}")
    xp, ratios, counted = _log_ratios(who, logprobs, behaviour, loss_mask, level, keep_gradient)
    kept = counted & (ratios >= (math.log(low) if low else -math.inf)) & (ratios <= math.log(high))
    # exp is taken of 0 in place of a masked ratio, as an overflow there would make the gradient NaN
    weights = xp.exp(xp.clip(xp.where(kept, ratios, 0.0), None, math.log(LARGEST)))
    return _float32(xp.where(kept, xp.clip(weights, None, LARGEST), 0.0))


def truncated(
    who: str, logprobs: Any, behaviour: Any, loss_mask: Any, limit: float, level: Level, keep_gradient: bool,
    dead_zone: float,
) -> Any:  # fmt: skip
    """Compute :func:`truncated_weights`; ``who`` is the name of the public function, for messages."""
    limit, dead_zone = number(who, "limit", limit), number(who, "dead_zone", dead_zone)
    if not 0 < limit <= LARGEST:
        raise ValueError(f"{who}: limit must be a number above 0 that float32 holds, got {limit!r}")
    if not 0 <= dead_zone < math.inf:
        raise ValueError(f"{who}: dead_zone must be a finite number of nats, at least 0, got {dead_zone!r}")
    xp, ratios, counted = _log_ratios(who, logprobs, behaviour, loss_mask, level, keep_gradient, dead_zone)
    weights = xp.exp(xp.clip(ratios, None, math.log(limit)))  # cut before exp, which could overflow
    return _float32(xp.where(counted, xp.clip(weights, None, limit), 0.0))


def float64_logprobs(who: str, what: str, values: Any) -> NDArray[np.float64]:
    """Convert an array, or a tensor on any device, to a float64 array. Raises ValueError for types in HALVES."""
    check_type(who, what, values)
    return np.asarray(array_of(who, what, values), np.float64)


def check_logprobs(who: str, what: str, values: Any, counted: Any) -> None:
    """Raise ValueError if a value of a token with loss is no log-probability."""
    wrong = counted & ~((values <= ROUNDING) & (values > -math.inf))
    if bool(wrong.any()):
        raise ValueError(
            f"{who}: {what} holds {values[wrong][0].item():g} for one of {int(wrong.sum())} tokens with loss; give "
            "log-probabilities: finite, and at most 0"
        )


def warn_if_misaligned(who: str, own: Any, other: Any, counted: Any, *, fresh: bool = False) -> None:
    """Warn if the trainer's log-probabilities seem to belong to other positions, prompts or distributions.

    ``own`` and ``other`` are the trainer's and those at sampling, of any one shape, and ``counted`` masks the tokens to
    compare. ``fresh`` means that the current weights sampled all of these, so that the thresholds are stricter.
    """
    if getattr(own, "is_meta", False):
        return  # a meta tensor has shapes but no values
    own, other = ((v.detach() if hasattr(v, "detach") else v)[counted] for v in (own, other))
    if len(own) < JUDGED_TOKENS:
        return
    difference = float(abs(own - other).mean())
    own, other = own - own.mean(), other - other.mean()
    spread = float((own * own).sum() * (other * other).sum())
    correlation = float((own * other).sum()) / math.sqrt(spread) if spread > 0 else 1.0
    min_correlation = MIN_CORRELATION_FRESH if fresh else MIN_CORRELATION
    if correlation < min_correlation and difference > (MAX_DIFFERENCE_FRESH if fresh else MAX_DIFFERENCE):
        warnings.warn(
            # the text does not depend on the data, so that Python shows it once per line of the caller
            f"{who}: the trainer's log-probabilities do not belong to the tokens that were sampled: their correlation "
            f"with those sampled is below {min_correlation}, where rounding and a few updates leave 0.85. Token t "
            "needs the logits of position t - 1 (logits[:, :-1]); rows of padded() whose prompts have several lengths "
            "need padded(left_pad_prompts=True) and its attention_mask",
            stacklevel=_frames_of_april(),
        )
    elif fresh and difference > MAX_ALIGNED_DIFFERENCE_FRESH:
        warnings.warn(
            f"{who}: where the weights are the same, the trainer's log-probabilities differ from those sampled by more "
            f"than {MAX_ALIGNED_DIFFERENCE_FRESH} nats per token, which rounding does not. Divide the logits by the "
            "temperature of sampling before log_softmax, give the model the attention_mask, and switch dropout off "
            "(model.eval())",
            stacklevel=_frames_of_april(),
        )


def _frames_of_april() -> int:
    """Return the ``stacklevel`` with which a warning shows the line of the user's code that called this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__package__") == __package__:
        level, frame = level + 1, frame.f_back
    return level


def _log_ratios(
    who: str, logprobs: Any, behaviour: Any, loss_mask: Any, level: Level, keep_gradient: bool, dead_zone: float = 0.0
) -> Any:
    """Return (the module numpy or torch, log ratios with 0 for tokens without loss, mask of the tokens with loss)."""
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
        other = as_tensor(who, "behaviour_logprobs", behaviour, own.device).detach().to(own.dtype)
        counted = as_tensor(who, "loss_mask", loss_mask, own.device) != 0
    else:
        if keep_gradient:
            raise ValueError(f"{who}: keep_gradient=True needs logprobs as a tensor; arrays have no gradient")
        xp = np
        own = float64_logprobs(who, "logprobs", logprobs)
        other = float64_logprobs(who, "behaviour_logprobs", behaviour)
        counted = array_of(who, "loss_mask", loss_mask) != 0
    if own.ndim != 2 or own.shape != other.shape or own.shape != counted.shape:
        raise ValueError(
            f"{who}: logprobs have the shape {list(own.shape)}, behaviour_logprobs {list(other.shape)} and loss_mask "
            f"{list(counted.shape)}; give three of the same [B, T], T the longest response"
        )
    check_logprobs(who, "logprobs", own, counted)
    check_logprobs(who, "behaviour_logprobs", other, counted)
    warn_if_misaligned(who, own, other, counted)
    ratios = xp.where(counted, own, 0.0) - xp.where(counted, other, 0.0)
    if dead_zone:
        ratios = xp.where(abs(ratios) > dead_zone, ratios, 0.0)
    if level != "token":
        total = ratios.sum(-1)
        if level == "geometric":
            total = total / counted.sum(-1).clip(1)
        ratios = xp.where(counted, total[:, None], 0.0)
    return xp, ratios, counted


def as_tensor(who: str, what: str, values: Any, device: Any) -> Any:
    """Return values as a tensor on the device. Arrays are copied, as torch warns about read-only arrays."""
    import torch

    return values.to(device) if hasattr(values, "detach") else torch.tensor(array_of(who, what, values), device=device)


def check_type(who: str, what: str, values: Any) -> None:
    """Raise ValueError for types in HALVES, which are too coarse for ratios."""
    kind = str(getattr(values, "dtype", "")).removeprefix("torch.")
    if kind in HALVES:
        raise ValueError(
            f"{who}: {what} are {kind}, too coarse for ratios; compute log_softmax in float32 (logits.float())"
        )


def _float32(weights: Any) -> Any:
    return weights.astype(np.float32) if isinstance(weights, np.ndarray) else weights.float()
