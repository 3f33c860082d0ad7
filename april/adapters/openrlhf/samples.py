"""Converts OpenRLHF's prompts and images for april, and delivered samples to the form of OpenRLHF's executor."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from april.adapters.common.data_loader import RowQueue
from april.adapters.common.samples import NOT_TRAINED, attached_pictures, generated_segments
from april.config.images import ImagesConfig
from april.core.batch import Batch, DeliveredSample
from april.core.types import FinishReason, Prompt, SampleId
from april.driver.rewards import Response
from april.errors import ConfigError, RolloutError
from april.images.image_reader import ImageReader

OF_BATCH = ("off_policy_share", "staleness_mean", "staleness_max", "aborted_attempts", "resumed_attempts",
            "reprefill_tokens", "carried_groups", "surplus_groups", "held_tokens", "step_s", "trainer_wait_s",
            "bubble")  # fmt: skip
"""Batch metrics that are copied to each sample, because OpenRLHF logs means over samples."""
IMAGES = "its images"
"""Key in a prompt's data that holds the images for OpenRLHF's trainer, as paths, URLs or bytes."""
_BASE64_LENGTH = 256
"""Length above which OpenRLHF takes an image's text for base64 data, if all its characters are base64 characters."""


@dataclass(frozen=True, slots=True)
class RewardResult:
    """Reward of one response, from OpenRLHF's reward function, reward server or agent."""

    reward: float
    score: float
    logs: Mapping[str, float]
    behind: Sequence[int] = ()
    """Token ids that an agent's environment appended after the last generated token."""
    ranges: Sequence[Sequence[int]] | None = None
    """An agent's action ranges, [start, end) in prompt and response: only these tokens are trained. None: no agent."""
    truncated: bool = False

    @classmethod
    def of(cls, answer: Any) -> RewardResult:
        """Parse ``rewards``, ``scores`` and ``extra_logs``. Values are numbers, or lists or tensors of one number."""
        if not isinstance(answer, Mapping) or answer.get("rewards") is None:
            raise RolloutError(f"the reward function returned {answer!r}; expected a mapping with rewards")
        reward = _number(answer["rewards"])
        scores = answer.get("scores")
        logs = {str(key): _number(value) for key, value in (answer.get("extra_logs") or {}).items()}
        return cls(reward, reward if scores is None else _number(scores), logs)


def _number(value: Any) -> float:
    """Return a number, or the first element of a list or tensor, as OpenRLHF does."""
    try:
        if hasattr(value, "detach"):  # a tensor, whose type numpy may lack (bfloat16)
            value = value.detach().double().cpu()
        return float(np.asarray(value, np.float64).reshape(-1)[0])
    except (TypeError, ValueError, IndexError):
        raise RolloutError(f"a reward function returned {value!r} instead of a number") from None


Held = dict[SampleId, RewardResult]
"""Rewards of finished responses that are not delivered yet, by sample."""


def prompt_ids(tokenizer: Any, text: str, max_len: int, max_new_tokens: int | None) -> list[int]:
    """Tokenize a prompt without special tokens, cutting off the beginning of a long one as OpenRLHF does.

    At most ``max_len - max_new_tokens`` tokens are kept, or ``max_len - 1`` if ``max_new_tokens`` is None.
    """
    ids = tokenizer(text=text, add_special_tokens=False)["input_ids"]
    room = max(1, max_len - len(ids)) if max_new_tokens is None else max_new_tokens
    return list(ids[-(max_len - room) :])


def judged_text(tokenizer: Any, prompt: Prompt, response: Response) -> str:
    """Decode prompt and response, special tokens included, for a reward function."""
    text: str = tokenizer.decode([*prompt.token_ids.tolist(), *response.tokens.tolist()], skip_special_tokens=False)
    return text


def row_of(item: Any) -> tuple[str, Any, list[Any]]:
    """Return prompt, label and images of an item from OpenRLHF's loader, which is a batch of one row."""
    _, (prompt,), (label,), (images,) = item
    several = images if isinstance(images, (list, tuple)) else [images]
    return str(prompt), label, [image for image in several if image is not None]


def responses_of(
    batch: Batch, scored: Held, *, with_rewards: bool, inputs_of: Callable[[DeliveredSample], Any] = lambda row: None
) -> Iterator[dict[str, Any]]:
    """Yield, for each sample, the dict that OpenRLHF's executor would return, group by group.

    ``inputs_of`` makes further training inputs of a row, such as the processor's outputs for images. Raises
    RolloutError if ``extra_logs`` of two responses have different names.
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
        prompt, behind = sample.prompt.token_ids.tolist(), [] if said is None else list(said.behind)
        trained, truncated = sample.loss_mask, sample.finish is FinishReason.LENGTH
        if said is not None and said.ranges is not None:
            trained, truncated = trained & mask_of(said.ranges, len(prompt), len(trained)), said.truncated
        yield {
            "prompt": sample.prompt.data["prompt"],
            "label": sample.prompt.data["label"],
            "images": sample.prompt.data.get(IMAGES),
            "mm_train_inputs": inputs_of(sample),
            "observation_tokens": prompt + sample.tokens.tolist() + behind,
            "action_ranges": trained_ranges(trained.tolist(), len(prompt)),
            "rollout_log_probs": [0.0] * len(prompt) + sample.logprobs.tolist() + [0.0] * len(behind),
            "truncated": truncated,
            "reward": None if said is None else said.reward,
            "scores": None if said is None else said.score,
            "extra_logs": {**logs, **provenance(sample), **shared},
        }


def mask_of(ranges: Sequence[Sequence[int]], offset: int, length: int) -> NDArray[np.uint8]:
    """Return uint8 [length], 1 for each token at ``offset`` and later that is in one of ``ranges`` ([start, end))."""
    mask = np.zeros(offset + length, np.uint8)
    for start, end in ranges:
        mask[start:end] = 1
    return mask[offset:]


def trained_ranges(mask: Sequence[int], offset: int) -> list[tuple[int, int]]:
    """Return [start, end) of each run of ones in ``mask``, shifted by ``offset``."""
    ranges = []
    start = offset
    for trained, run in groupby(mask):
        end = start + sum(1 for _ in run)
        if trained:
            ranges.append((start, end))
        start = end
    return ranges


def provenance(sample: DeliveredSample) -> dict[str, float]:
    """Return metrics of the weights that generated a sample, as numbers that OpenRLHF can average."""
    versions = {s.version for s in generated_segments(sample.segments)}
    return {
        "april/versions": float(len(versions)),
        "april/staleness": float(sample.staleness),
        "april/resumes": float(sample.resumes),
    }


class OpenRLHFPrompts:
    """Iterates over the prompts of the current episode, in april's own thread.

    ``encode(text, whole)`` returns token ids, cut to the length limit unless ``whole`` is true. ``images`` converts an
    image to a value that a checkpoint can hold; it is None if prompts have no images.
    """

    resumes = True
    """True tells april not to restore the position in the prompts: OpenRLHF's loader does that itself."""

    def __init__(
        self, encode: Callable[[str, bool], list[int]], images: Callable[[Any], Any] | None = None
    ) -> None:
        self._encode, self._images = encode, images
        self._rows: Iterator[Any] = iter(())
        self.carried = RowQueue(self._next)
        self.ended = False
        """True once the current episode has no more prompts."""

    def begin(self, rows: Iterator[Any]) -> None:
        """Start an episode, or the rest of one after a restart."""
        self._rows, self.ended = rows, False

    def __iter__(self) -> OpenRLHFPrompts:
        return self

    def __next__(self) -> Any:
        text, label, images = self.carried.draw()
        drawn = {"token_ids": self._encode(text, bool(images)), "prompt": text, "label": label}
        return drawn | {"images": images, IMAGES: images} if images else drawn

    def _next(self) -> list[list[Any]]:
        try:
            text, label, images = row_of(next(self._rows))
        except StopIteration:
            self.ended = True
            raise
        return [[text, label, self._kept(images)]]

    def _kept(self, images: list[Any]) -> list[Any]:
        if images and self._images is None:
            raise ConfigError(
                "a prompt has images, but --data.max_images_per_prompt is 0; set it to the largest number that a "
                "prompt has"
            )
        return [] if self._images is None else [self._images(image) for image in images]

    def save(self, position: int, loader_state: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the loader's state, and the prompts after the first ``position``, which april's state lacks."""
        theirs, ahead = self.carried.save(position, loader_state)
        return theirs, {"ahead": ahead, "ended": self.ended}

    def restore(self, position: int, saved: Mapping[str, Any]) -> None:
        """Restore the prompts that were read after the first ``position``."""
        self.carried.restore(position, [list(row) for row in saved["ahead"]])


class PromptImages:
    """Prepares the images of prompts (``--data.max_images_per_prompt``) for april's requests and for training.

    Raises ConfigError if ``processor``, which is OpenRLHF's tokenizer for vision models, does not process images.
    """

    def __init__(self, processor: Any, limits: ImagesConfig) -> None:
        if not hasattr(processor, "image_processor"):
            raise ConfigError(
                "--data.max_images_per_prompt is for vision models, but this one has no image processor; leave it out"
            )
        self.processor, self.tokenizer = processor, processor.tokenizer
        self._reader = ImageReader(limits)
        self._last: tuple[int, Any] | None = None

    def kept(self, image: Any) -> Any:
        """Return an image of a prompt as path, URL or bytes, which a checkpoint can hold."""
        if isinstance(image, str):
            bare = len(image) > _BASE64_LENGTH and re.fullmatch(r"[A-Za-z0-9+/\n\r]+=*", image[: 2 * _BASE64_LENGTH])
            return base64.b64decode(image) if bare else image
        return image if isinstance(image, bytes) else self._reader.read(image, "an image of a prompt").attachment.data

    def inputs_of(self, row: DeliveredSample) -> dict[str, Any] | None:
        """Return the training inputs for a row's images, made by OpenRLHF's processor; None without images."""
        if not row.attached:
            return None
        if self._last is None or self._last[0] != row.id.group:  # cached, since the rows of a group follow each other
            self._last = row.id.group, self._made(row)
        inputs: dict[str, Any] = self._last[1]
        return inputs

    def _made(self, row: DeliveredSample) -> dict[str, Any]:
        made = self.processor(
            text=[row.prompt.data["prompt"]], images=attached_pictures(row.attached), add_special_tokens=False,
            return_tensors="pt",
        )  # fmt: skip
        if made["input_ids"][0].tolist() != row.prompt.token_ids.tolist():
            raise RolloutError(
                f"the processor turns prompt {row.prompt.position} into other tokens than those of the generation, so "
                "its images would be trained at wrong positions"
            )
        return {name: value for name, value in made.items() if name not in NOT_TRAINED}
