"""Images of OpenRLHF's prompts (``--data.max_images_per_prompt``): for april's requests, and for its own training."""

from __future__ import annotations

import base64
import io
import re
from typing import Any

from april.attachments import attachment_bytes
from april.config.images import ImagesConfig
from april.core.batch import DeliveredSample
from april.errors import ConfigError, RolloutError
from april.images.reading import Reader

NOT_TRAINED = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})
"""What a processor makes that OpenRLHF's model makes anew, for prompt and response together."""
_BARE = 256
"""Characters from which on OpenRLHF takes text without a scheme for base64, if its first ones could be."""


class ShownImages:
    """The images of a run.

    Args:
        processor: what OpenRLHF has for its tokenizer, where the model sees.
        limits: april's settings of images.

    Raises:
        ConfigError: it is no processor of images.
    """

    def __init__(self, processor: Any, limits: ImagesConfig) -> None:
        if not hasattr(processor, "image_processor"):
            raise ConfigError(
                "--data.max_images_per_prompt is for models that see, and this one has no image processor; leave it out"
            )
        self.processor, self.tokenizer = processor, processor.tokenizer
        self._reader = Reader(limits)
        self._last: tuple[int, Any] | None = None

    def kept(self, images: list[Any]) -> list[Any]:
        """Those of a prompt as paths, URLs and bytes, which a state can keep."""
        return [self._kept(image) for image in images]

    def _kept(self, image: Any) -> Any:
        if isinstance(image, str):
            bare = len(image) > _BARE and re.fullmatch(r"[A-Za-z0-9+/\n\r]+=*", image[: 2 * _BARE])
            return base64.b64decode(image) if bare else image
        return image if isinstance(image, bytes) else self._reader.read(image, "an image of a prompt").attachment.data

    def inputs_of(self, row: DeliveredSample) -> dict[str, Any] | None:
        """What OpenRLHF's model is trained on beside the tokens of a row, made by its processor as OpenRLHF does."""
        if not row.attached:
            return None
        if self._last is None or self._last[0] != row.id.group:  # the rows of a group are next to each other
            self._last = row.id.group, self._made(row)
        inputs: dict[str, Any] = self._last[1]
        return inputs

    def _made(self, row: DeliveredSample) -> dict[str, Any]:
        from PIL import Image

        shown = [Image.open(io.BytesIO(attachment_bytes(placed.attachment))).convert("RGB") for placed in row.attached]
        made = self.processor(
            text=[row.prompt.data["prompt"]], images=shown, add_special_tokens=False, return_tensors="pt"
        )
        if made["input_ids"][0].tolist() != row.prompt.token_ids.tolist():
            raise RolloutError(
                f"the processor makes other tokens of prompt {row.prompt.position} than were generated from, so its "
                "images would be trained at other places"
            )
        return {name: value for name, value in made.items() if name not in NOT_TRAINED}
