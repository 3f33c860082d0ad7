"""What is right: a row of a batch against the engine's own record, and a run against the one without cuts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from april.core.batch import DeliveredSample
from april.testing.records import AttemptRecord
from tests.gateway_suite.script import TOKENIZER


class Wrong(Exception):
    """A promise is broken; the message says which."""


class Figures(NamedTuple):
    tokens: int
    versions: int
    cuts: int


def figures_of(rows: Sequence[DeliveredSample], attempts: Sequence[AttemptRecord]) -> Figures:
    """Tokens that are trained, their versions, and calls that were cut by a weight update in their middle.

    Raises Wrong unless each token that left the engine is trained once, behind the tokens that it was generated behind,
    with the log-probability and the version that the engine wrote down.
    """
    made: dict[tuple[bytes, int], list[tuple[int, float, tuple[int, int]]]] = {}
    count = 0
    for attempt in attempts:
        ids = attempt.request.token_ids.tolist()
        parts = zip(attempt.tokens.tolist(), attempt.logprobs.tolist(), attempt.versions.tolist(), strict=True)
        for token, logprob, version in parts:
            made.setdefault(_behind(ids), []).append((token, logprob, tuple(version)))
            ids.append(token)
            count += 1
    trained, versions = 0, set()
    for row in rows:
        ids = row.prompt.token_ids.tolist()
        parts = zip(row.tokens.tolist(), row.logprobs.tolist(), row.versions.tolist(), row.loss_mask, strict=True)
        for token, logprob, version, mask in parts:
            if mask:
                there = made.get(_behind(ids), [])
                mine = (token, logprob, tuple(version))
                if mine not in there:
                    raise Wrong(f"token {len(ids)} of a row is {mine}, and the engine's record has {there}")
                there.remove(mine)
                trained += 1
                versions.add(tuple(version))
            ids.append(token)
    if trained != count:
        raise Wrong(f"{count} tokens left the engine, and {trained} are trained")
    cuts = sum(_cut(a, b) for a, b in _continued(attempts))
    return Figures(trained, len(versions), cuts)


def _behind(ids: list[int]) -> tuple[bytes, int]:
    # contexts of the same length and end are told apart by their whole
    return np.array(ids, np.int32).tobytes(), len(ids)


def _continued(attempts: Sequence[AttemptRecord]) -> list[tuple[AttemptRecord, AttemptRecord]]:
    """Attempts with the one that goes on from where they ended."""
    by_context = {tuple(a.request.token_ids.tolist()): a for a in attempts if a.request.response_offset}
    pairs = []
    for attempt in attempts:
        follower = by_context.get((*attempt.request.token_ids.tolist(), *attempt.tokens.tolist()))
        if follower is not None and attempt.count:
            pairs.append((attempt, follower))
    return pairs


def _cut(earlier: AttemptRecord, later: AttemptRecord) -> bool:
    """Whether the weights have changed between two attempts of one answer."""
    return later.count > 0 and tuple(earlier.versions[-1].tolist()) < tuple(later.versions[0].tolist())


def plain_rows(rows: Sequence[DeliveredSample]) -> list[str]:
    """The rows as text, each token with its mask, without what a cut changes: versions and log-probabilities."""
    found = []
    for row in rows:
        ends = np.flatnonzero(np.diff(row.loss_mask)) + 1
        runs = [TOKENIZER.decode(part.tolist()) for part in np.split(row.tokens, ends)]
        found.append("\n---\n".join([TOKENIZER.decode(row.prompt.token_ids.tolist()), str(row.loss_mask[0]), *runs]))
    return found
