"""Extracts what trainers need from delivered samples: generated segments, spans of policy versions, images."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from april.core.attachments import Placed
from april.core.batch import DeliveredSample
from april.core.tape import Segment, SegmentKind
from april.core.versions import PolicyVersion
from april.engines.attachments import attachment_bytes

NOT_TRAINED = frozenset({"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"})
"""Processor outputs that are left out, because trainers compute them again for prompt and response together."""


def is_masked(row: DeliveredSample) -> bool:
    """Return True if the loss mask excludes any generated token of the row."""
    return int(np.count_nonzero(row.loss_mask)) < sum(s.count for s in generated_segments(row.segments))


def generated_segments(segments: Sequence[Segment]) -> list[Segment]:
    """Return the segments that the policy generated, without segments from tools or environments."""
    return [s for s in segments if s.kind is SegmentKind.GENERATED]


def spans_of(segments: Sequence[Segment]) -> list[tuple[int, int, PolicyVersion | None]]:
    """Return a response as spans (start, end, policy version), where tool results have the version None."""
    spans: list[tuple[int, int, PolicyVersion | None]] = []
    for s in segments:
        version = s.version if s.kind is SegmentKind.GENERATED else None
        if spans and spans[-1][2] == version:
            spans[-1] = (spans[-1][0], s.start + s.count, version)
        else:
            spans.append((s.start, s.start + s.count, version))
    return spans


def attached_pictures(attached: Sequence[Placed], mode: str | None = "RGB") -> list[Any]:
    """Return the images that were sent to the engines as PIL images, converted to ``mode`` unless it is None."""
    from PIL import Image

    opened = (Image.open(io.BytesIO(attachment_bytes(placed.attachment))) for placed in attached)
    return [image if mode is None else image.convert(mode) for image in opened]
