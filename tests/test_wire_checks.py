"""No number from an engine is believed before it was looked at."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from april.core.numbers import LOGPROB_EPS
from april.core.versions import PolicyVersion
from april.driver.wire_checks import check_chunk
from april.engines.protocol import Chunk
from april.errors import EngineError, WireError

V = [PolicyVersion(0, 0), PolicyVersion(0, 1), PolicyVersion(1, 0)]


def chunk(tokens: Any = (1, 2, 3), logprobs: Any = (-0.5, -1.0, 0.0), version: PolicyVersion = V[1]) -> Chunk:
    return Chunk(np.array(tokens, np.int32), np.array(logprobs, np.float32), version)


def check(c: Chunk, vocab_size: int = 10, room: int = 5, oldest: PolicyVersion | None = None) -> None:
    check_chunk(c, vocab_size, room, oldest, V[1])


@pytest.mark.parametrize(
    "good",
    [
        chunk(),
        chunk([], []),
        chunk([], [], V[0]),
        chunk([0, 9], [-1e30, LOGPROB_EPS / 2]),
        chunk([5] * 5, [-0.0] * 5),
    ],
)
def test_what_can_be_true_passes(good: Chunk) -> None:
    """Empty chunks, the whole vocabulary, the last token of the budget, rounding just above 0."""
    check(good)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (chunk([1, 2], [-1.0]), "2 tokens came with 1 log-probabilities"),
        (chunk([1], [-1.0, -1.0]), "1 tokens came with 2 log-probabilities"),
        (chunk([], [-1.0]), "0 tokens came with 1"),
        (chunk([1] * 6, [-1.0] * 6), "6 tokens came where 5 were left of the budget"),
        (chunk([1, 10, 11]), "token id 10 is outside the vocabulary of 10"),
        (chunk([1, -1, 3]), "token id -1 is outside"),
        (chunk(logprobs=[-1, np.nan, -1]), "log-probability nan is not a finite number <= 0"),
        (chunk(logprobs=[-1, -1, 0.25]), "log-probability 0.25 is not"),
        (chunk(logprobs=[np.inf, -1, -1]), "log-probability inf"),
        (chunk(logprobs=[-np.inf, -1, -1]), "log-probability -inf"),
        (chunk(version=V[2]), r"policy version 1\.0 came where any to 0\.1 was possible"),
    ],
)
def test_what_cannot_be_true_is_refused(bad: Chunk, words: str) -> None:
    """A WireError, which is an EngineError, that names the number."""
    with pytest.raises(WireError, match=words) as caught:
        check(bad)
    assert isinstance(caught.value, EngineError)


def test_versions_between_the_tokens_before_and_the_present_one() -> None:
    """Not older than what the sample already has, not newer than the weights that april knows of."""
    check(chunk(version=V[0]))
    check(chunk(version=V[1]), oldest=V[1])
    with pytest.raises(WireError, match=r"policy version 0\.0 came where 0\.1 to 0\.1 was possible"):
        check(chunk(version=V[0]), oldest=V[1])


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (Chunk([1], np.zeros(1, np.float32), V[0]), "tokens must be a flat array of int32, got list"),
        (Chunk(np.ones(1, np.int64), np.zeros(1, np.float32), V[0]), "tokens must be a flat array of int32"),
        (Chunk(np.ones((1, 1), np.int32), np.zeros((1, 1), np.float32), V[0]), "tokens must be a flat array"),
        (Chunk(np.ones(1, np.int32), np.zeros(1, np.float64), V[0]), "must be a flat array of float32"),
        (Chunk(np.ones(1, np.int32), None, V[0]), "log-probabilities must be a flat array of float32, got NoneType"),
    ],
)
def test_the_types_of_the_protocol(bad: Any, words: str) -> None:
    """int32 and float32 arrays, so that packed tapes stay what they are."""
    with pytest.raises(WireError, match=words):
        check(bad)


@settings(derandomize=True, deadline=None)
@given(
    st.lists(st.integers(-3, 14), max_size=8),
    st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), max_size=8),
    st.integers(0, 8),
    st.sampled_from(V),
    st.sampled_from([None, *V[:2]]),
)
def test_exactly_the_true_chunks_pass(
    tokens: list[int], logprobs: list[float], room: int, version: PolicyVersion, oldest: PolicyVersion | None
) -> None:
    """Against a check written token by token."""
    possible = (
        len(tokens) == len(logprobs) <= room
        and all(0 <= t < 10 for t in tokens)
        and all(-np.inf < np.float32(p) <= LOGPROB_EPS for p in logprobs)
        and (not tokens or (version <= V[1] and (oldest is None or version >= oldest)))
    )
    try:
        check(chunk(tokens, logprobs, version), room=room, oldest=oldest)
    except WireError:
        assert not possible
    else:
        assert possible
