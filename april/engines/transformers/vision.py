"""Prepares images for vision models of the embedded engine: pixels from the processor, and positions of image tokens.

Invariants:

* An image is identified by the digest of its bytes. In a conversation it has one placeholder token per image feature,
  and no other token stands for a part of an image.
* Nothing computed from weights is cached. Pixels are cached up to a limit; the vision tower runs in every prefill.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from april.core.attachments import Attachment, Placed
from april.engines.attachments import attachment_bytes
from april.errors import AttachmentError, ConfigError

IMAGE = "image"
PIXELS_KEPT = 1 << 28
"""Largest number of bytes of processed pixels that are cached for later requests with the same image."""


@dataclass(frozen=True, slots=True)
class _Family:
    """Model arguments through which models of one family receive images."""

    joined: Mapping[str, int]
    """Names of the model's arguments, with the dimension along which several images are concatenated."""
    grid: bool = False
    """True if image tokens have two-dimensional positions."""
    types: bool = False
    """True if the model must be told which tokens belong to images, because such tokens attend to each other."""


_GRID = _Family({"pixel_values": 0, "image_grid_thw": 0}, grid=True)
FAMILIES: Mapping[str, _Family] = {
    "qwen2_vl": _GRID,
    "qwen2_5_vl": _GRID,
    "qwen3_vl": _GRID,
    "qwen3_vl_moe": _GRID,
    "gemma3": _Family({"pixel_values": 0}, types=True),
}
"""Supported families, indexed by the model type of the configuration."""


@dataclass(frozen=True, slots=True)
class _Pixels:
    """The processor's output for one image."""

    tensors: Mapping[str, Tensor]
    count: int
    """Number of placeholder tokens that the image needs."""
    size: int
    """Size in bytes."""


@dataclass(frozen=True, slots=True)
class ProcessedImages:
    """The processed images of one conversation."""

    pixels: Sequence[_Pixels]
    positions: Tensor | None
    """Positions int64 [3, T], for models with a grid; None for others."""
    offset: int
    """Difference between the position and the index of every token after the conversation."""


class Vision:
    """Processes the images of requests for one model.

    Args:
        model: A model of one of the :data:`FAMILIES`.
        processor: The model's transformers processor.
    """

    def __init__(self, model: Any, processor: Any) -> None:
        self._family = FAMILIES[model.config.model_type]
        self.processor = processor
        self.image_id = int(model.config.image_token_id)
        """Id of the tokens that stand for parts of images."""
        self.no_image = 0 if self.image_id else 1
        """A token id other than ``image_id``, used for padding."""
        self._grid_of = next((m for m in model.modules() if hasattr(m, "get_rope_index")), None)
        self._kept: OrderedDict[str, _Pixels] = OrderedDict()

    def wrong_places(self, attached: Sequence[Placed]) -> str | None:
        """Explain why the model cannot read images at these places; None if it can."""
        for before, placed in pairwise(attached):
            if self._family.grid and placed.at == before.end:
                return (
                    f"the image at token {placed.at} follows another one immediately, and the model would read both as "
                    "one: put a token between them"
                )
        return None

    def process(self, tokens: NDArray[np.int32], attached: Sequence[Placed]) -> ProcessedImages:
        """Process a conversation's images; AttachmentError if an image is broken or does not match its tokens."""
        pixels = []
        for placed in attached:
            of_one = self._pixels_of(placed.attachment)
            count = int((tokens[placed.at : placed.end] == self.image_id).sum())
            if count != of_one.count:
                raise AttachmentError(
                    f"the image {_name(placed.attachment)} needs {of_one.count} placeholder tokens, but the "
                    f"conversation has {count} for it: expand prompts with the processor of the engine"
                )
            pixels.append(of_one)
        if not self._family.grid:
            return ProcessedImages(pixels, None, 0)
        assert self._grid_of is not None
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        grids = torch.cat([p.tensors["image_grid_thw"] for p in pixels])
        types = (ids == self.image_id).to(torch.int32)
        positions, offsets = self._grid_of.get_rope_index(ids, mm_token_type_ids=types, image_grid_thw=grids)
        return ProcessedImages(pixels, positions[:, 0], int(offsets[0, 0]))

    def arguments(
        self, seen: Sequence[ProcessedImages], ids: Tensor, positions: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return positions and further model arguments for a batch of conversations.

        Args:
            seen: Processed images of each conversation.
            ids: int64 [B, T], padded on the right with :attr:`no_image`.
            positions: int64 [B, T], positions as in text without images.
        """
        parts = {name: [p.tensors[name] for s in seen for p in s.pixels] for name in self._family.joined}
        made = {name: torch.cat(parts[name], dim).to(ids.device) for name, dim in self._family.joined.items()}
        if self._family.types:
            made["token_type_ids"] = (ids == self.image_id).to(torch.int64)
        if self._family.grid:
            positions = positions.expand(3, *positions.shape).clone()
            for i, of_one in enumerate(seen):
                assert of_one.positions is not None
                positions[:, i, : of_one.positions.shape[1]] = of_one.positions.to(ids.device)
        return positions, made

    def _pixels_of(self, attachment: Attachment) -> _Pixels:
        kept = self._kept.get(attachment.digest)
        if kept is not None:
            self._kept.move_to_end(attachment.digest)
            return kept
        made = self._process(attachment)
        self._kept[attachment.digest] = made
        held = sum(p.size for p in self._kept.values())
        while held > PIXELS_KEPT and len(self._kept) > 1:
            held -= self._kept.popitem(last=False)[1].size
        return made

    def _process(self, attachment: Attachment) -> _Pixels:
        from PIL import Image

        try:
            with Image.open(io.BytesIO(attachment_bytes(attachment))) as opened:
                image = opened.convert("RGB")
            made = self.processor(text=[self.processor.image_token], images=[image], return_tensors="pt")
        except AttachmentError:
            raise
        except Exception as error:
            raise AttachmentError(
                f"the image {_name(attachment)} cannot be read ({type(error).__name__}: {error})"
            ) from error
        tensors = {name: made[name] for name in self._family.joined}
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        return _Pixels(tensors, int((made["input_ids"] == self.image_id).sum()), size)


def _name(attachment: Attachment) -> str:
    return attachment.path or attachment.digest[:12]


def vision_of(model: Any, processor: Any) -> Vision | None:
    """Return the image processing of ``model``; None if no processor is given or the model reads no images.

    Raises ConfigError for a vision model of a family that this engine does not support.
    """
    if processor is None or not hasattr(model.config, "vision_config"):
        return None
    kind = model.config.model_type
    if kind not in FAMILIES:
        raise ConfigError(
            f"images of {kind}: the transformers engine only supports images of {', '.join(sorted(FAMILIES))}; use a "
            "served engine (vllm, sglang) for this model, or leave processor out if prompts are text alone"
        )
    if not hasattr(processor, "image_processor") or not hasattr(processor, "image_token"):
        raise ConfigError(
            f"processor is a {type(processor).__name__}, which makes no pixels of images: give the model's own "
            "processor, from AutoProcessor.from_pretrained"
        )
    return Vision(model, processor)
