"""Images of slime's samples: taken out of what its data source gives, put back where its hooks and its actor look.

Invariant: while april holds a sample, its images are in the prompt's attachments alone, once per group; a file has
them there, too.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from april.adapters.slime.framework import Framework
from april.attachments import attachment_bytes
from april.core.attachments import Placed
from april.core.batch import DeliveredSample
from april.errors import ConfigError

INPUTS, TRAIN_INPUTS = "multimodal_inputs", "multimodal_train_inputs"
"""Fields of a sample: what the data set gives, and what the trainer's processor makes of it."""
NOT_FOR_THE_ACTOR = frozenset({"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"})
_MOST_OPEN = 16
"""Groups whose images are kept open, as their samples are scored one after the other."""


def images_of(sample: Any) -> list[Any]:
    """The images that a sample of the data source has; raises ConfigError for other media."""
    given = getattr(sample, INPUTS, None) or {}
    if others := [name for name, value in given.items() if value is not None and name != "images"]:
        raise ConfigError(
            f"sample {sample.index} has {', '.join(others)}, and april takes text and images; let slime itself talk to "
            "the servers: --custom-generate-function-path slime.rollout.sglang_rollout.generate"
        )
    return list(given.get("images") or ())


def take_out(group: Sequence[Any]) -> None:
    """The samples of a group are without the images that its prompt has."""
    for sample in group:
        given = sample.get(INPUTS) if isinstance(sample, Mapping) else getattr(sample, INPUTS, None)
        bare = dict.fromkeys(given) if given else given
        if isinstance(sample, dict):
            sample[INPUTS] = bare
        else:
            setattr(sample, INPUTS, bare)


def as_bytes(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What a sample has of media as plain values, where april does not have its images."""
    return None if given is None else _changed(given, _png)


def as_images(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The way back."""
    return None if given is None else _changed(given, _opened)


def _changed(given: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    images = given.get("images")
    return {**dict.fromkeys(given), **({"images": [change(image) for image in images]} if images else {})}


def _png(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()


def _opened(data: bytes) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(data)).convert("RGB")


class SampleImages:
    """Puts images into samples, and what the trainer's processor makes of them.

    Args:
        processor: of the trainer, by ``--hf-checkpoint``.
    """

    def __init__(self, framework: Framework, processor: Any) -> None:
        self._options = framework.get("utils.processing_utils.build_processor_kwargs")
        self.processor = processor
        self._open: OrderedDict[tuple[str, ...], list[Any]] = OrderedDict()

    @classmethod
    def of(cls, framework: Framework, args: Any) -> SampleImages | None:
        """Those of a run whose data set has images; None: it has none. Raises ConfigError without a processor."""
        if not getattr(args, "multimodal_keys", None):
            return None
        load = framework.get("utils.processing_utils.load_processor")
        processor = load(args.hf_checkpoint, trust_remote_code=True)
        if processor is None:
            raise ConfigError(
                f"--multimodal-keys names images, and {framework.name} finds no processor for them at --hf-checkpoint "
                f"{args.hf_checkpoint}"
            )
        return cls(framework, processor)

    def put_back(self, sample: Any, attached: Sequence[Placed]) -> None:
        """As the data source gave it."""
        if attached:
            setattr(sample, INPUTS, {**(getattr(sample, INPUTS, None) or {}), "images": self._pictures(attached)})

    def finish(self, sample: Any, delivered: DeliveredSample, made: dict[tuple[str, ...], Any]) -> None:
        """Add what the actor reads; ``made``: what was made for other samples of the batch, which share it."""
        if not delivered.attached:
            return
        self.put_back(sample, delivered.prompt.attached)
        names = _names(delivered.attached)
        if names not in made:
            made[names] = self._train_inputs(delivered.attached)
        setattr(sample, TRAIN_INPUTS, made[names])

    def _train_inputs(self, attached: Sequence[Placed]) -> dict[str, Any] | None:
        """By the trainer's processor, of images alone: their tokens are in the sample already."""
        pictures = self._pictures(attached)
        text = str(self.processor.image_token) * len(pictures)
        made = self.processor(text=text, **self._options({"images": pictures}))
        return {name: value for name, value in made.items() if name not in NOT_FOR_THE_ACTOR} or None

    def _pictures(self, attached: Sequence[Placed]) -> list[Any]:
        """The images as the engines were sent them."""
        names = _names(attached)
        found = self._open.pop(names, None)
        if found is None:
            found = [_opened(attachment_bytes(placed.attachment)) for placed in attached]
        self._open[names] = found
        while len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)
        return found


def _names(attached: Sequence[Placed]) -> tuple[str, ...]:
    return tuple(placed.attachment.digest for placed in attached)
