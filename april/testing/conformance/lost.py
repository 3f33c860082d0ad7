"""What the witness saw against what the readings hold."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from april.engines.protocol import Int32
from april.testing.conformance.bench import Broken
from april.testing.conformance.subject import Witness
from april.testing.conformance.verdicts import Figures


def compare(wire: Witness | None, held: Iterable[tuple[str, Int32]]) -> Figures:
    """Figures ``lost`` and ``never read`` over (attempt id, tokens held); none without a witness.

    Lost: sent in an answer that the client read to its end, and not held. Never read: sent to a client that had hung
    up, which is how some engines abort.

    Raises:
        Broken: a token is lost, or what is held is not what was sent.
    """
    if wire is None:
        return {}
    lost = never_read = seen = 0
    first = ""
    for attempt_id, tokens in held:
        sent = np.asarray(wire.tokens(attempt_id), np.int32)
        seen += len(sent)
        if len(tokens) > len(sent) or not np.array_equal(sent[: len(tokens)], tokens):
            raise Broken(f"request {attempt_id} holds {len(tokens)} tokens that are not the {len(sent)} that were sent")
        if wire.closed_early(attempt_id):
            never_read += len(sent) - len(tokens)
        elif len(tokens) < len(sent):
            lost += len(sent) - len(tokens)
            first = first or f", the first of them by request {attempt_id}: {len(sent)} sent, {len(tokens)} held"
    if lost:
        raise Broken(f"{lost} of {seen} tokens are lost{first}")
    return {"lost": 0, "never read": never_read, "seen on the wire": seen}
