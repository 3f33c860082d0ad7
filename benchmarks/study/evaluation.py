"""The expected reward on held-out questions: drafts are sampled, the rest is computed.

Where a response answers at once, the probability of the right answer is exact. Where it may write drafts first, these
are sampled with random numbers that are the same in all arms and at all times, up to the answer; then the probability
of the right answer is exact again. So the noise is that of the drafts alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from april.engines.transformers.model_support import cache_argument
from benchmarks.study.countdown import ANSWER_ID, EOS_ID, Question
from benchmarks.study.grpo import response_logprobs

SEED = 12_345


class HeldOut(Protocol):
    """Held-out questions."""

    @property
    def short(self) -> Sequence[Question]:
        """Those with short answers."""

    @property
    def long(self) -> Sequence[Question]:
        """Those with long ones."""

    @property
    def long_share(self) -> float:
        """Share of the prompts that are long."""

    @property
    def response_cap(self) -> int:
        """Most tokens of a response, EOS included."""


def evaluate(model: Any, task: HeldOut, repeats: int = 1, drafts: bool = True) -> dict[str, float]:
    """Return the expected reward of prompts as they are drawn (``reward``), and of short and long ones.

    Args:
        model: the model.
        task: its questions.
        repeats: drafts per question.
        drafts: False: only responses that answer at once count, which needs no sampling.
    """
    found: dict[str, float] = {}
    parts = {"short": task.short, "long": task.long}
    for number, (name, questions) in enumerate(parts.items()):
        if questions:
            asked = [question for question in questions for _ in range(repeats)]
            values = expected(model, task, asked, number) if drafts else right_at_once(model, asked)
            found[name] = float(values.mean())
    return found | {"reward": _as_drawn(task, found)}


def evaluate_together(model: Any, task: HeldOut) -> dict[str, float]:
    """Return what :func:`evaluate` does, in half of the time: short and long ones share a batch, and random numbers."""
    values = expected(model, task, [*task.short, *task.long], 0)
    count = len(task.short)
    found = {"short": float(values[:count].mean()), "long": float(values[count:].mean())}
    return found | {"reward": _as_drawn(task, found)}


def _as_drawn(task: HeldOut, found: dict[str, float]) -> float:
    share = task.long_share
    return sum(found[name] * weight for name, weight in (("short", 1 - share), ("long", share)) if weight)


def right_at_once(model: Any, questions: Sequence[Question]) -> NDArray[np.float64]:
    """Return the probability of the right answer of each question, without a draft before it."""
    found = response_logprobs(model, [q.prompt for q in questions], [q.answer for q in questions])
    return np.array([np.exp(row.astype(np.float64).sum()) for row in found])


def expected(model: Any, task: HeldOut, questions: Sequence[Question], stream: int) -> NDArray[np.float64]:
    """Return the probability of the right answer of each question, after a draft that is sampled."""
    before = sampled_drafts(model, task, questions, stream)
    values = np.zeros(len(questions))
    right = [i for i, draft in enumerate(before) if draft is not None]
    responses = [np.concatenate([_there(before[i]), questions[i].answer]) for i in right]
    fits = [k for k, response in enumerate(responses) if len(response) <= task.response_cap]
    rows = response_logprobs(model, [questions[right[k]].prompt for k in fits], [responses[k] for k in fits])
    for k, row in zip(fits, rows, strict=True):
        drawn = len(_there(before[right[k]])) + 1  # ANSWER itself was drawn, too
        values[right[k]] = np.exp(row[drawn:].astype(np.float64).sum())
    return values


@torch.no_grad()
def sampled_drafts(model: Any, task: HeldOut, questions: Sequence[Question], stream: int) -> list[list[int] | None]:
    """Return what is written before ANSWER, None where there is none; row i always has the same random numbers."""
    generator = torch.Generator().manual_seed(SEED + stream)
    count = len(questions)
    drafts: list[list[int]] = [[] for _ in questions]
    answered: list[bool] = [False] * count
    # prompts of one length go through the model together, so that no padding is seen
    length = {i: len(q.prompt) for i, q in enumerate(questions)}
    numbers = torch.rand((task.response_cap, count), generator=generator)
    for size in sorted(set(length.values())):
        rows = np.array([i for i in range(count) if length[i] == size])
        ids = torch.from_numpy(np.stack([questions[i].prompt for i in rows]).astype(np.int64))
        cache = DynamicCache(config=model.config)
        cached = {"use_cache": True, cache_argument(model): cache}
        logits = model(input_ids=ids, **cached).logits
        for place in range(task.response_cap):
            total = logits[:, -1].float().softmax(-1).cumsum(-1)
            drawn = numbers[place, torch.from_numpy(rows)][:, None] * total[:, -1:]
            token = (total < drawn).sum(-1).clamp(max=total.shape[-1] - 1)
            written = token.numpy()
            for i in rows[written == ANSWER_ID]:
                answered[i] = True
            keep = np.flatnonzero((written != ANSWER_ID) & (written != EOS_ID))
            for k in keep:
                drafts[rows[k]].append(int(written[k]))
            if not len(keep) or place == task.response_cap - 1:
                break
            index = torch.from_numpy(keep)
            if len(keep) < len(rows):
                cache.batch_select_indices(index)
            rows = rows[keep]
            logits = model(input_ids=token[index][:, None], **cached).logits
    return [draft if done else None for draft, done in zip(drafts, answered, strict=True)]


def _there(draft: list[int] | None) -> list[int]:
    assert draft is not None
    return draft
