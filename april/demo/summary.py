"""From arms to ``summary.json``: means over seeds, spreads, comparisons with sync, and the checks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from april.core.ledger import Ledger
from april.demo.arm import ArmResult
from april.demo.settings import DemoSettings

LOGPROB_BOUND = 1e-4
LARGEST = ("staleness_max", "max_abs_logprob_error")
"""Figures of which the largest over the seeds is reported instead of the mean."""


def arm_figures(arm: ArmResult, start: NDArray[np.float64]) -> dict[str, float]:
    """The figures of one arm."""
    return {
        "steps": arm.steps,
        "decode_steps": arm.decode_steps,
        "rollout_cpu_s": arm.rollout_cpu_s,
        "rollout_wall_s": arm.rollout_wall_s,
        "train_cpu_s": arm.train_cpu_s,
        "trained_tokens": arm.trained_tokens,
        "generated_tokens": arm.generated_tokens,
        "reprefill_tokens": arm.reprefill_tokens,
        "bubble": 1.0 - arm.busy_slot_steps / arm.slot_steps,
        "off_policy_share": arm.stale_tokens / arm.trained_tokens,
        "staleness_mean": float(np.mean(arm.staleness)),
        "staleness_max": float(max(arm.staleness)),
        "held_out_reward_start": float(start.mean()),
        "held_out_reward_end": float(arm.held_out.mean()),
        "held_out_prompts": len(arm.held_out),
        "max_abs_logprob_error": arm.max_abs_logprob_error,
        "compared_tokens": arm.compared_tokens,
        "longest_over_median": float(np.mean([max(row) / np.median(row) for row in arm.lengths])),
        "length_variation_in_group": float(np.mean(arm.group_spread)),
        "decode_steps_per_trained_token": arm.decode_steps / arm.trained_tokens,
        "rollout_cpu_s_per_trained_token": arm.rollout_cpu_s / arm.trained_tokens,
    }


def mode_figures(arms: Sequence[ArmResult], starts: Sequence[NDArray[np.float64]]) -> dict[str, Any]:
    """Means over seeds (ledger: totals), with minimum, maximum and standard deviation under ``spread``."""
    rows = [arm_figures(a, s) for a, s in zip(arms, starts, strict=True)]
    out: dict[str, Any] = {}
    spread: dict[str, Any] = {}
    for name in rows[0]:
        values = np.array([row[name] for row in rows], np.float64)
        out[name] = float(values.max() if name in LARGEST else values.mean())
        spread[name] = {
            "min": float(values.min()),
            "max": float(values.max()),
            "std": float(values.std(ddof=1)) if len(values) > 1 else 0.0,
        }
    out["ledger"] = _total(a.tokens for a in arms)
    out["prompt_ledger"] = _total(a.prompts for a in arms) | {"drawn_at_source": sum(a.drawn for a in arms)}
    out["engine_count"] = {
        "tokens_handed_over": sum(a.witnessed for a in arms),
        "tokens_generated": sum(a.generated_tokens for a in arms),
        "delivered_tokens_that_differ": sum(a.disagreements for a in arms),
    }
    out["spread"] = spread
    return out


def _total(ledgers: Any) -> dict[str, Any]:
    total = Ledger()
    for ledger in ledgers:
        total.observed += ledger.observed
        total.delivered += ledger.delivered
        total.held += ledger.held
        total.dropped += Counter(ledger.dropped)
    return total.as_dict()


def against_sync(
    mode: dict[str, Any], sync: dict[str, Any], arms: Sequence[ArmResult], sync_arms: Sequence[ArmResult]
) -> dict[str, float]:
    """Ratios to sync in the same run, and the difference in held-out reward (same prompts, same seeds)."""
    per_seed = [a.held_out - b.held_out for a, b in zip(arms, sync_arms, strict=True)]
    pairs = np.concatenate(per_seed)
    seeds = np.array([d.mean() for d in per_seed])
    return {
        "decode_steps_per_trained_token": (
            mode["decode_steps_per_trained_token"] / sync["decode_steps_per_trained_token"]
        ),
        "rollout_cpu_s_per_trained_token": (
            mode["rollout_cpu_s_per_trained_token"] / sync["rollout_cpu_s_per_trained_token"]
        ),
        "rollout_wall_s": mode["rollout_wall_s"] / sync["rollout_wall_s"],
        "held_out_reward_difference": float(pairs.mean()),
        "held_out_reward_difference_standard_error": float(pairs.std(ddof=1) / math.sqrt(len(pairs))),
        "held_out_reward_difference_standard_error_over_seeds": (
            float(seeds.std(ddof=1) / math.sqrt(len(seeds))) if len(seeds) > 1 else 0.0
        ),
    }


def checks(modes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What must hold exactly, mode by mode; each with the figures it was judged by."""
    found = {}
    for name, m in modes.items():
        tokens, prompts, count = m["ledger"], m["prompt_ledger"], m["engine_count"]
        accounted = tokens["delivered"] + tokens["held"] + sum(tokens["dropped"].values())
        settled = prompts["delivered"] + prompts["held"] + sum(prompts["dropped"].values())
        found[name] = {
            "tokens_balance": _check(tokens["observed"] == accounted, tokens["observed"], accounted),
            "engine_agrees": _check(
                count["tokens_handed_over"] == count["tokens_generated"] == tokens["observed"],
                count["tokens_handed_over"],
                tokens["observed"],
            ),
            "prompts_balance": _check(
                prompts["drawn_at_source"] == prompts["observed"] == settled, prompts["drawn_at_source"], settled
            ),
            "delivered_as_generated": _check(
                count["delivered_tokens_that_differ"] == 0, count["delivered_tokens_that_differ"], 0
            ),
            "logprobs_match_their_version": _check(
                m["max_abs_logprob_error"] <= LOGPROB_BOUND, m["max_abs_logprob_error"], LOGPROB_BOUND
            ),
            "every_token_compared": _check(
                m["compared_tokens"] == m["trained_tokens"],
                m["compared_tokens"],
                m["trained_tokens"],
            ),
        }
    return found


def _check(holds: bool, value: float, expected: float) -> dict[str, Any]:
    return {"holds": bool(holds), "value": value, "expected": expected}


def summarise(
    settings: DemoSettings,
    arms: dict[str, list[ArmResult]],
    starts: list[NDArray[np.float64]],
    warm_up_cpu_s: float,
    wall_s: float,
) -> dict[str, Any]:
    """The whole of ``summary.json``."""
    modes = {name: mode_figures(rows, starts) for name, rows in arms.items()}
    judged = checks(modes)
    return {
        "settings": asdict(settings) | {"slots": settings.slots},
        "modes": modes,
        "against_sync": {
            name: against_sync(modes[name], modes["sync"], arms[name], arms["sync"]) for name in arms if name != "sync"
        },
        "checks": judged,
        "all_checks_hold": all(check["holds"] for group in judged.values() for check in group.values()),
        "warm_up_cpu_s": warm_up_cpu_s,
        "wall_s": wall_s,
        "notes": {
            "means": "means over seeds; of staleness_max and max_abs_logprob_error the largest; of ledgers the total",
            "bubble": "1 - busy slot-steps / (slots x decode steps); slots are the same in every mode",
            "cpu": "process CPU seconds; on a CPU a decode step costs nearly as much per sequence as per batch, so "
            "seconds gain less than decode steps do",
        },
    }
