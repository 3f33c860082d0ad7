"""Describes the images, videos and audio of a conversation by their hashes and the positions of their placeholders.

For trainers that themselves send the media to the servers. april needs only the hashes, to recognise a conversation
that is continued, or repeated after a restart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from april.core.attachments import Attachment, Placed

MEDIA_KINDS = ("image", "video", "audio")
WITH_TRAINER = "with the trainer"
"""Placeholder for the path of an attachment that only the trainer has."""


def placed_media(
    token_ids: Sequence[int] | NDArray[Any], media: Mapping[str, Sequence[Any] | None],
    placeholder_ids: Mapping[str, int],
) -> tuple[Placed, ...]:  # fmt: skip
    """Return the media of a conversation as attachments, each at its run of consecutive placeholder tokens.

    ``media`` holds the items of each kind, in order. A kind is left out if the numbers of its items and of its
    placeholder runs differ, or if an item cannot be hashed.
    """
    placed: list[Placed] = []
    for kind, items in media.items():
        if not items or (placeholder_id := placeholder_ids.get(kind)) is None:
            continue
        runs = runs_of(np.asarray(token_ids), placeholder_id)
        digests = [digest_of(item) for item in items]
        if len(runs) == len(items) and None not in digests:
            for (at, end), digest in zip(runs, digests, strict=True):
                assert digest is not None
                placed.append(Placed(Attachment(kind, digest, 0, path=WITH_TRAINER), at, end - at, (placeholder_id,)))
    return tuple(sorted(placed, key=lambda p: p.at))


def runs_of(token_ids: NDArray[Any], placeholder_id: int) -> list[tuple[int, int]]:
    """Return [start, end) of each run of consecutive placeholder ids."""
    there = np.concatenate(([0], token_ids == placeholder_id, [0])).astype(np.int8)
    edges = np.flatnonzero(np.diff(there))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def digest_of(item: Any) -> str | None:
    """Return the hex SHA-256 of an image, array, text, bytes, or a list or dict of them; None for other objects."""
    try:
        return hashlib.sha256(msgspec.msgpack.encode(item, enc_hook=_encodable)).hexdigest()
    except (TypeError, ValueError, OverflowError):
        return None


def _encodable(item: Any) -> Any:
    """Convert an image, a tensor, an array or a number of numpy for msgpack. Raises TypeError for other objects."""
    if hasattr(item, "getpalette"):  # a PIL.Image, without importing it
        return [item.mode, item.size, item.getpalette(), item.tobytes()]
    if hasattr(item, "detach"):  # a tensor, without importing torch
        item = item.detach().cpu().numpy()
    if isinstance(item, (np.ndarray, np.generic)) and item.dtype.kind in "iufb":
        return [item.dtype.str, item.shape, item.tobytes()]
    raise TypeError(f"a {type(item).__name__} cannot be hashed")
