"""What a trainer's own rollouts send along with token ids, such as images: its content by hash, at its place.

The trainer keeps it and sends it itself; the core is told the hashes, so that a conversation that is continued, or
begun anew after a restart, is known to be the same one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from april.core.attachments import Attachment, Placed

KINDS = ("image", "video", "audio")
ELSEWHERE = "with the trainer"
"""In place of a path."""


def placed_media(
    token_ids: Sequence[int] | NDArray[Any], media: Mapping[str, Sequence[Any] | None], stands: Mapping[str, int]
) -> tuple[Placed, ...]:
    """Return what comes with a conversation whose tokens say where each is, by a run of one id.

    Args:
        token_ids: of the conversation, with as many ids for each as the model reads it as.
        media: by kind, in order.
        stands: by kind, the id that stands for it.

    A kind of which there are more or fewer runs than items, or items that have no bytes, is left out.
    """
    placed: list[Placed] = []
    for kind, items in media.items():
        if not items or (stand := stands.get(kind)) is None:
            continue
        runs = runs_of(np.asarray(token_ids), stand)
        digests = [digest_of(item) for item in items]
        if len(runs) == len(items) and None not in digests:
            for (at, end), digest in zip(runs, digests, strict=True):
                assert digest is not None
                placed.append(Placed(Attachment(kind, digest, 0, path=ELSEWHERE), at, end - at, (stand,)))
    return tuple(sorted(placed, key=lambda p: p.at))


def runs_of(token_ids: NDArray[Any], stand: int) -> list[tuple[int, int]]:
    """Where an id stands: [start, end) of each run of it."""
    there = np.concatenate(([0], token_ids == stand, [0])).astype(np.int8)
    edges = np.flatnonzero(np.diff(there))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def digest_of(item: Any) -> str | None:
    """SHA-256, in hexadecimal, of an image, an array, text, bytes, or several of them; None: it is something else."""
    found = hashlib.sha256()
    return found.hexdigest() if _add(found, item) else None


def _add(found: Any, item: Any) -> bool:
    if hasattr(item, "tobytes") and hasattr(item, "getbands"):  # a PIL.Image, without importing it
        found.update(f"{item.mode} {item.size}".encode())
        found.update(item.tobytes())
        return True
    if isinstance(item, (bytes, bytearray, memoryview)):
        found.update(item)
        return True
    if isinstance(item, Mapping):
        return all(_add(found, part) for pair in item.items() for part in pair)
    if isinstance(item, (list, tuple)):
        return all(_add(found, part) for part in item)
    if item is None or isinstance(item, (str, int, float)):
        found.update(repr(item).encode())
        return True
    if hasattr(item, "detach"):  # a tensor, without importing torch
        item = item.detach().cpu().numpy()
    if isinstance(item, np.ndarray) and item.dtype.kind in "iufb":
        found.update(f"{item.dtype} {item.shape}".encode())
        found.update(np.ascontiguousarray(item).tobytes())
        return True
    return False
