"""Prompts in and samples out, as OpenRLHF's own executor of single turns has them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from april.core.batch import Batch, DeliveredSample
from april.core.tape import SegmentKind
from april.core.types import FinishReason, Prompt, SampleId
from april.driver.rewards import Response
from april.errors import ConfigError, RolloutError
from april.one_row import refuse_several_rows

OF_BATCH = ("off_policy_share", "staleness_mean", "staleness_max", "aborted_attempts", "resumed_attempts",
            "reprefill_tokens", "carried_groups", "surplus_groups", "held_tokens", "step_s", "trainer_wait_s",
            "bubble")  # fmt: skip
"""Metrics of april's batches that are written on each of its samples, as OpenRLHF logs means over samples."""


@dataclass(frozen=True, slots=True)
class RewardResult:
    """The answer of OpenRLHF's reward function or server about one response."""

    reward: float
    score: float
    logs: Mapping[str, float]
    behind: Sequence[int] = ()
    """tokens that an agent's environment added behind the last generated one"""

    @classmethod
    def of(cls, answer: Any) -> RewardResult:
        """Read ``{"rewards", "scores", "extra_logs"}``, each a number or a list or tensor of one; or RolloutError."""
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
"""The results of finished responses that are not delivered yet."""


def prompt_ids(tokenizer: Any, text: str, max_len: int, max_new_tokens: int | None) -> list[int]:
    """Token ids of a prompt, without special tokens; one too long loses its beginning, as OpenRLHF cuts it.

    Args:
        tokenizer: of Hugging Face.
        text: the prompt, its template applied.
        max_len: tokens of prompt and response together.
        max_new_tokens: room that is kept for the response; None means one token.
    """
    ids = tokenizer(text=text, add_special_tokens=False)["input_ids"]
    room = max(1, max_len - len(ids)) if max_new_tokens is None else max_new_tokens
    return list(ids[-(max_len - room) :])


def judged_text(tokenizer: Any, prompt: Prompt, response: Response) -> str:
    """The conversation as a reward function sees it: prompt and response, special tokens included."""
    text: str = tokenizer.decode([*prompt.token_ids.tolist(), *response.tokens.tolist()], skip_special_tokens=False)
    return text


def row_of(item: Any) -> tuple[str, Any, list[Any]]:
    """Prompt, label and images of one item of OpenRLHF's loader, whose batches are of one."""
    try:
        _, (prompt,), (label,), (images,) = item
    except (TypeError, ValueError):
        raise RolloutError(
            f"the loader of prompts gave {item!r}; expected sources, prompts, labels and images, one of each"
        ) from None
    several = images if isinstance(images, (list, tuple)) else [images]
    return str(prompt), label, [image for image in several if image is not None]


def responses_of(
    batch: Batch, scored: Held, *, with_rewards: bool, inputs_of: Callable[[DeliveredSample], Any] = lambda row: None
) -> Iterator[dict[str, Any]]:
    """Yield what OpenRLHF's executor would have returned, per sample, group by group.

    ``inputs_of``: what its model is trained on beside the tokens of a row.

    Raises RolloutError for a sample of several conversations, and for logs of the reward function that differ between
    responses: OpenRLHF cannot stack them.
    """
    refuse_several_rows(
        batch, "OpenRLHF", "rewards.reshape(-1, n_samples_per_prompt) in compute_advantages_and_returns"
    )
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
        prompt, behind = sample.prompt.token_ids.tolist(), [] if said is None else list(said.behind)
        yield {
            "prompt": sample.prompt.data["prompt"],
            "label": sample.prompt.data["label"],
            "images": sample.prompt.data.get(IMAGES),
            "mm_train_inputs": inputs_of(sample),
            "observation_tokens": prompt + sample.tokens.tolist() + behind,
            "action_ranges": trained_ranges(sample.loss_mask.tolist(), len(prompt)),
            "rollout_log_probs": [0.0] * len(prompt) + sample.logprobs.tolist() + [0.0] * len(behind),
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
    """Return where a sample's tokens come from, in numbers that OpenRLHF can average."""
    versions = [s.version.n for s in sample.segments if s.kind is SegmentKind.GENERATED]
    return {
        "april/versions": float(len(set(versions))),
        "april/version_first": float(min(versions, default=0)),
        "april/version_last": float(max(versions, default=0)),
        "april/staleness": float(sample.staleness),
        "april/resumes": float(sample.resumes),
    }


IMAGES = "its images"
"""The name in a prompt's data of its images, as OpenRLHF's loader gave them."""


class Prompts:
    """The present episode's prompts, for april, which draws them in its own thread.

    Args:
        encode: makes token ids of a text, which is whole if it has images.
        images: makes the images of a prompt values that a state can keep; None: prompts have none.
    """

    resumes = True
    """OpenRLHF's loader goes on by its own state."""

    def __init__(
        self, encode: Callable[[str, bool], list[int]], images: Callable[[list[Any]], list[Any]] | None = None
    ) -> None:
        self._encode, self._images = encode, images
        self._lock = threading.Lock()
        self._rows: Iterator[Any] = iter(())
        self._recent: deque[list[Any]] = deque()
        """Drawn last; those that april's state does not hold yet are saved from here."""
        self._ahead: deque[list[Any]] = deque()
        self.drawn = 0
        """Prompts handed out, those before a restart included."""
        self.ended = False
        """The present episode has no more."""

    def begin(self, rows: Iterator[Any]) -> None:
        """The prompts of an episode, or of the rest of one after a restart."""
        self._rows, self.ended = rows, False

    def __iter__(self) -> Prompts:
        return self

    def __next__(self) -> Any:
        with self._lock:
            if self._ahead:
                row = self._ahead.popleft()
            else:
                try:
                    row = list(row_of(next(self._rows)))
                    row[2] = self._kept(row[2])
                except StopIteration:
                    self.ended = True
                    raise
            self._recent.append(row)
            self.drawn += 1
        text, label, images = row
        drawn = {"token_ids": self._encode(text, bool(images)), "prompt": text, "label": label}
        return drawn | {"images": images, IMAGES: images} if images else drawn

    def _kept(self, images: list[Any]) -> list[Any]:
        if images and self._images is None:
            raise ConfigError(
                "a prompt has images, and --data.max_images_per_prompt is 0; set it to the most that a prompt has"
            )
        return self._images(images) if images and self._images is not None else []

    def save(self, position: int, loader_state: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The loader's state, and what was drawn from it and is not among the ``position`` prompts that april holds."""
        with self._lock:
            while len(self._recent) > self.drawn - position:
                self._recent.popleft()
            return loader_state(), {"ahead": [*self._recent, *self._ahead], "ended": self.ended}

    def go_on(self, position: int, saved: Mapping[str, Any]) -> None:
        """As before a restart, where april had drawn ``position``."""
        self.drawn = position
        self._ahead.extend(list(row) for row in saved["ahead"])
