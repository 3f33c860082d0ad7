"""What the witness saw against what the readings hold."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from april.engines.protocol import Int32, Request
from april.testing.conformance.bench import Broken
from april.testing.conformance.subject import Answer, Witness
from april.testing.conformance.verdicts import Figures


def compare(wire: Witness | None, held: Iterable[tuple[Request, Int32]]) -> Figures:
    """Figures ``lost`` and ``never read`` over (request, tokens held); none without a witness.

    Lost: sent in an answer that the client read to its end, and not held. Never read: sent to a client that had hung
    up, which is how some engines abort.

    Raises:
        Broken: a token is lost, or what is held is not what was sent.
    """
    if wire is None:
        return {}
    all_held = list(held)
    # answer -> tokens of it that are held
    matched: dict[int, int] = {}
    for request, tokens in all_held:
        if len(tokens):
            answer = _answer_of(wire.answers(request), tokens, matched)
            if answer is None:
                sent = max((len(a.tokens) for a in wire.answers(request)), default=0)
                raise Broken(
                    f"request {request.attempt_id} holds {len(tokens)} tokens that are not the {sent} that were sent"
                )
            matched[id(answer)] = len(tokens)
    answers = {id(a): a for request, _ in all_held for a in wire.answers(request)}
    seen = lost = never_read = 0
    for key, answer in answers.items():
        more = len(answer.tokens) - matched.get(key, 0)
        seen += len(answer.tokens)
        if answer.closed_early:
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
