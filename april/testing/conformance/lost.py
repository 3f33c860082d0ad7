"""What the witness saw against what the readings hold."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from april.engines.protocol import AbortMeans, EngineFinish, Int32, Request
from april.testing.conformance.outcomes import Broken
from april.testing.conformance.subject import Answer, Witness
from april.testing.conformance.verdicts import Figures

Held = tuple[Request, Int32, EngineFinish | None]
"""A request, the tokens that are held of it, and how it ended."""


def compare(wire: Witness | None, held: Iterable[Held], means: AbortMeans) -> Figures:
    """Figures ``lost`` and ``never read``; none without a witness.

    Lost: sent in an answer that the client had to read to its end, and not held. Never read: sent to a client that hung
    up, which is how some engines abort (``means``).

    Raises:
        Broken: a token is lost, or what is held is not what was sent.
    """
    if wire is None:
        return {}
    all_held = list(held)
    count: dict[int, int] = {}
    for request, tokens, _ in all_held:
        if len(tokens):
            answer = _answer_of(wire.answers(request), tokens, count)
            if answer is None:
                sent = max((len(a.tokens) for a in wire.answers(request)), default=0)
                raise Broken(
                    f"request {request.attempt_id} holds {len(tokens)} tokens that are not the {sent} that were sent"
                )
            count[id(answer)] = len(tokens)
    seen = lost = never_read = 0
    looked_at: set[int] = set()
    for request, _, finish in all_held:
        for answer in wire.answers(request):
            if id(answer) in looked_at:
                continue
            looked_at.add(id(answer))
            seen += len(answer.tokens)
            more = len(answer.tokens) - count.get(id(answer), 0)
            if answer.closed_early or (means is AbortMeans.CLOSE and finish is EngineFinish.ABORT):
                never_read += more
            else:
                lost += more
    if lost:
        raise Broken(f"{lost} of {seen} tokens are lost: they were sent, and are not held")
    return {"lost": 0, "never read": never_read, "seen on the wire": seen}


def _answer_of(answers: Iterable[Answer], tokens: Int32, taken: dict[int, int]) -> Answer | None:
    """The answer that these tokens are from, or the beginning of; the one with the fewest others."""
    fits = [
        answer
        for answer in answers
        if id(answer) not in taken and np.array_equal(np.asarray(answer.tokens[: len(tokens)], np.int32), tokens)
    ]
    return min(fits, key=lambda answer: len(answer.tokens), default=None)
