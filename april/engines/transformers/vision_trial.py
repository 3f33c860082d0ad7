"""Test prompts for ``model_check.py``: tokens, and for a vision model also images with the processor's output."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from april.core.attachments import Attachment, Placed
from april.engines.protocol import Int32
from april.engines.transformers.vision import IMAGE, Vision
from april.errors import ConfigError

_SIZES = ((64, 96), (100, 60), (48, 48))
"""Heights and widths for which most processors make different numbers of tokens."""
_PER_TOKEN = ("mm_token_type_ids", "token_type_ids")
"""Outputs of a processor with one value per token; generated tokens get 0."""


@dataclass(frozen=True)
class TrialPrompt:
    """A prompt, and the additional inputs of a full forward pass."""

    tokens: Int32
    attached: tuple[Placed, ...] = ()
    given: Mapping[str, Tensor] = field(default_factory=dict)
    """Output of the processor for the prompt."""
    banned: tuple[int, ...] = ()

    def images(self, length: int) -> dict[str, Tensor]:
        """Return the model's additional inputs for a sequence of ``length`` tokens."""
        more = length - self.tokens.size
        return {
            name: torch.nn.functional.pad(tensor, (0, more)) if name in _PER_TOKEN else tensor
            for name, tensor in self.given.items()
        }


def prompts_with_images(model: Any, vision: Vision, longest: int) -> list[TrialPrompt]:
    """Make three prompts: one image, two images of other sizes, and the first prompt's tokens with another image.

    Raises ConfigError if a prompt is longer than ``longest`` tokens.
    """
    first, *others = (_picture(height, width, seed) for seed, (height, width) in enumerate(_SIZES))
    prompts = [_prompt(vision, images) for images in ([first], others, [_picture(*_SIZES[0], seed=9)])]
    if (needed := max(prompt.tokens.size for prompt in prompts)) > longest:
        raise ConfigError(
            f"{model.config.model_type} reads small images as {needed} tokens, but max_len leaves {longest}: raise it, "
            "or leave processor out if prompts are text alone"
        )
    return prompts


def _prompt(vision: Vision, images: Sequence[bytes]) -> TrialPrompt:
    from PIL import Image

    processor = vision.processor
    tokenizer = processor.tokenizer
    word = tokenizer.decode([next(i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids)])
    text = f" {processor.image_token} ".join([word] * (len(images) + 1))
    pictures = [Image.open(io.BytesIO(data)) for data in images]
    made = processor(text=[text], images=pictures, return_tensors="pt")
    tokens = made["input_ids"][0].numpy().astype(np.int32)
    given = {name: tensor for name, tensor in made.items() if name not in ("input_ids", "attention_mask")}
    placed = _placed(tokens, vision.image_id, images)
    if placed is None:
        raise ConfigError(
            f"processor: {type(processor).__name__} turns an image into tokens other than {vision.image_id}, the "
            "model's image_token_id; give the model's own processor: transformers.AutoProcessor.from_pretrained(...)"
        )
    return TrialPrompt(tokens, placed, given, (vision.image_id,))


def _placed(tokens: Int32, image_id: int, images: Sequence[bytes]) -> tuple[Placed, ...] | None:
    """Assign each image to one run of successive image tokens; None if their numbers differ."""
    ours = np.concatenate([[False], tokens == image_id, [False]])
    edges = np.flatnonzero(ours[1:] != ours[:-1]).reshape(-1, 2).tolist()
    if len(edges) != len(images):
        return None
    return tuple(
        Placed(Attachment.of(IMAGE, data), begin, end - begin, (image_id,))
        for data, (begin, end) in zip(images, edges, strict=True)
    )


def _picture(height: int, width: int, seed: int) -> bytes:
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()
