"""Prompts in and samples out, as OpenRLHF's own executor of single turns has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from april.core.batch import Batch, DeliveredSample
from april.core.tape import SegmentKind
from april.core.types import FinishReason, Prompt, SampleId
from april.driver.rewards import Response
from april.errors import ConfigError, RolloutError

OF_BATCH = ("off_policy_share", "staleness_mean", "staleness_max", "aborted_attempts", "resumed_attempts",
            "reprefill_tokens", "carried_groups", "surplus_groups", "held_tokens", "step_s", "trainer_wait_s",
            "bubble")  # fmt: skip
"""Metrics of april's batches that are written on each of its samples, as OpenRLHF logs means over samples."""


@dataclass(frozen=True, slots=True)
class RewardResult:
    """What OpenRLHF's reward function or server says of one response."""

    reward: float
    score: float
    logs: Mapping[str, float]

    @classmethod
    def of(cls, answer: Any) -> RewardResult:
        """From ``{"rewards", "scores", "extra_logs"}``, each a number or a list or tensor of one.

        Raises RolloutError where there is no reward in it.
        """
        if not isinstance(answer, Mapping) or answer.get("rewards") is None:
            raise RolloutError(f"the reward function answered {answer!r}; expected a mapping with rewards")
        reward = _number(answer["rewards"])
        scores = answer.get("scores")
        logs = {str(key): _number(value) for key, value in (answer.get("extra_logs") or {}).items()}
        return cls(reward, reward if scores is None else _number(scores), logs)


def _number(value: Any) -> float:
    """The first of a list or tensor, as OpenRLHF takes it."""
    try:
        return float(np.asarray(value, np.float64).reshape(-1)[0])
    except (TypeError, ValueError, IndexError):
        raise RolloutError(f"a reward function gave {value!r} where a number is needed") from None


Held = dict[SampleId, RewardResult]
"""Of finished responses that are not delivered yet."""


def prompt_ids(tokenizer: Any, text: str, max_len: int, max_new_tokens: int | None) -> list[int]:
    """Token ids of a prompt; one too long loses its beginning, as OpenRLHF cuts it.

    Args:
        tokenizer: of Hugging Face; no special tokens are added.
        text: the prompt, its template applied.
        max_len: tokens of prompt and response together.
        max_new_tokens: room that is kept for the response; None: one token.
    """
    ids = tokenizer(text=text, add_special_tokens=False)["input_ids"]
    room = max(1, max_len - len(ids)) if max_new_tokens is None else max_new_tokens
    return list(ids[-(max_len - room) :])


def judged_text(tokenizer: Any, prompt: Prompt, response: Response) -> str:
    """The conversation as a reward function sees it: prompt and response, special tokens included."""
    text: str = tokenizer.decode([*prompt.token_ids.tolist(), *response.tokens.tolist()], skip_special_tokens=False)
    return text


def row_of(item: Any) -> tuple[str, Any]:
    """Prompt and label of one item of OpenRLHF's loader of prompts, whose batches are of one.

    Raises:
        ConfigError: it has images.
        RolloutError: it is of another shape.
    """
    try:
        _, (prompt,), (label,), (images,) = item
    except (TypeError, ValueError):
        raise RolloutError(
            f"the loader of prompts gave {item!r}; expected sources, prompts, labels and images, one of each"
        ) from None
    if images:
        raise ConfigError("a prompt has images: april resumes by token ids alone, and they would be lost; use text")
    return str(prompt), label


def responses_of(batch: Batch, scored: Held, *, with_rewards: bool) -> Iterator[dict[str, Any]]:
    """What OpenRLHF's executor would have returned, per sample, group by group.

    Raises:
        RolloutError: the reward function logs different things about different responses, which OpenRLHF cannot stack.
    """
    shared = {f"april/{name}": batch.metrics[name] for name in OF_BATCH}
    logged: tuple[str, ...] | None = None
    for sample in batch.samples:
        said = scored[sample.id] if with_rewards else None
        logs = dict(said.logs) if said is not None else {}
        if logged is not None and tuple(sorted(logs)) != logged:
            raise RolloutError(
                f"extra_logs of the reward function are {sorted(logs)} for one response and {list(logged)} for "
                "another; OpenRLHF needs the same ones for all"
            )
        logged = tuple(sorted(logs))
        prompt = sample.prompt.token_ids.tolist()
        yield {
            "prompt": sample.prompt.data["prompt"],
            "label": sample.prompt.data["label"],
            "images": None,
            "mm_train_inputs": None,
            "observation_tokens": prompt + sample.tokens.tolist(),
            "action_ranges": trained_ranges(sample.loss_mask.tolist(), len(prompt)),
            "rollout_log_probs": [0.0] * len(prompt) + sample.logprobs.tolist(),
            "truncated": sample.finish is FinishReason.LENGTH,
            "reward": None if said is None else said.reward,
            "scores": None if said is None else said.score,
            "extra_logs": {**logs, **provenance(sample), **shared},
        }


def trained_ranges(mask: Sequence[int], offset: int) -> list[tuple[int, int]]:
    """[start, end) of the runs of ones, ``offset`` further."""
    ranges = []
    start = offset
    for trained, run in groupby(mask):
        end = start + sum(1 for _ in run)
        if trained:
            ranges.append((start, end))
        start = end
    return ranges


def provenance(sample: DeliveredSample) -> dict[str, float]:
    """Where a sample's tokens come from, in numbers that OpenRLHF can average."""
    versions = [s.version.n for s in sample.segments if s.kind is SegmentKind.GENERATED]
    return {
        "april/versions": float(len(set(versions))),
        "april/version_first": float(min(versions, default=0)),
        "april/version_last": float(max(versions, default=0)),
        "april/staleness": float(sample.staleness),
        "april/resumes": float(sample.resumes),
    }
