"""Images of TRL's data set: which a row has, how TRL's messages show them, and back into the rows that TRL trains."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from april.adapters.trl.ranks import of_all_ranks
from april.attachments import attachment_bytes
from april.config.images import ImagesConfig
from april.core.attachments import Placed
from april.errors import ConfigError
from april.images.reading import Reader

COLUMNS = ("images", "image")
"""Names of columns, in the order in which TRL looks for them."""


def column_of(dataset: Any) -> str | None:
    """The column in which a data set has images; None: it has none."""
    names = getattr(dataset, "column_names", None) or ()
    return next((name for name in COLUMNS if name in names), None)


def tokenizer_of(trainer: Any) -> Any:
    """The tokenizer, which a processor has inside of it."""
    return getattr(trainer.processing_class, "tokenizer", trainer.processing_class)


def of_row(row: Mapping[str, Any]) -> list[Any]:
    """The images of a row."""
    if "images" in row:
        return list(row["images"] or ())
    return [] if row.get("image") is None else [row["image"]]


def shown(prompt: Any, images: Sequence[Any]) -> Any:
    """A prompt with its images among its messages, as TRL shows it to reward functions and templates.

    Raises ConfigError for what :func:`why_not_shown` says.
    """
    if (why := why_not_shown(prompt, images)) is not None:
        raise ConfigError(why)
    if not images:
        return prompt
    from trl.data_utils import prepare_multimodal_messages

    return prepare_multimodal_messages(prompt, images=list(images))


def why_not_shown(prompt: Any, images: Sequence[Any]) -> str | None:
    """Say why a prompt cannot be shown with its images; None: it can."""
    if isinstance(prompt, str):
        why = "a row of train_dataset has images and a prompt of plain text; TRL wants messages then"
        return why if images else None
    if any(_within(prompt)):
        return (
            "a prompt of train_dataset has an image in its messages, which TRL leaves out of its loss where a "
            "rollout_func generates; move it to a column image or images, and leave {'type': 'image'} in its place"
        )
    return None


def _within(messages: Sequence[Mapping[str, Any]]) -> Iterator[bool]:
    for message in messages:
        said = message.get("content")
        if isinstance(said, list):
            yield from (part.get("type") == "image" and part.get("image") is not None for part in said)


def put_back(row: dict[str, Any], attached: Sequence[Placed]) -> None:
    """Give a row the images that its responses were generated from, as april has read them."""
    if not attached:
        return
    from PIL import Image

    pictures = [Image.open(io.BytesIO(attachment_bytes(placed.attachment))) for placed in attached]
    if "images" in row:
        row["images"] = pictures
    else:
        row["image"] = pictures[0]


def evaluated(trainer: Any, rows: Sequence[list[int]], shown: Sequence[Sequence[Any] | None]) -> list[dict[str, Any]]:
    """Prompts of an evaluation, of all ranks, with their images; called on every rank.

    Args:
        trainer: this rank's.
        rows: token ids of all ranks.
        shown: images of this rank's.
    """
    reader = Reader(ImagesConfig())
    read = [
        [reader.read(image, f"row {i}, image {j}").attachment for j, image in enumerate(images or (), 1)]
        for i, images in enumerate(shown)
    ]
    mine = [[attachment_bytes(attachment) for attachment in row] for row in read]
    everywhere = [images for of_rank in of_all_ranks(trainer, mine) for images in of_rank]
    return [{"token_ids": ids, "images": images} for ids, images in zip(rows, everywhere, strict=True)]
