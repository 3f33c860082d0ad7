"""Token tapes: packed, aligned, with exact segments."""

from __future__ import annotations

import numpy as np
import pytest

from april.core.tape import AttemptTape, SegmentKind, TokenTape
from april.core.versions import PolicyVersion

V0, V1, V2 = (PolicyVersion(0, n) for n in range(3))


def chunk(start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """``count`` tokens from ``start`` with log-probabilities -1/(1+token)."""
    tokens = np.arange(start, start + count, dtype=np.int32)
    return tokens, (-1.0 / (1.0 + tokens)).astype(np.float32)


def attempt(*spans: tuple[int, int, PolicyVersion]) -> AttemptTape:
    """An attempt with chunks (start, count, version)."""
    tape = AttemptTape()
    for start, count, version in spans:
        tape.append(*chunk(start, count), version)
    return tape


def test_chunks_of_one_attempt_keep_their_own_versions() -> None:
    """Weights that change inside an attempt give segments at the exact token."""
    tape = TokenTape()
    tape.add_attempt(attempt((0, 3, V0), (3, 2, V0), (5, 4, V1)), "a", "e", 0.7)

    assert [(s.start, s.count, s.version) for s in tape.segments] == [(0, 5, V0), (5, 4, V1)]
    assert tape.tokens.tolist() == list(range(9))
    assert tape.logprobs.tolist() == chunk(0, 9)[1].tolist()
    assert tape.segments[1].temperature == 0.7
    assert tape.check() is None


def test_environment_tokens_have_no_loss_and_no_version_of_their_own_in_staleness() -> None:
    """What a tool wrote is in the tokens, masked, and does not count as generated."""
    tape = TokenTape()
    tape.add_environment(np.array([90, 91], np.int32), V0)
    tape.add_attempt(attempt((0, 3, V1)), "a", "e", 1.0)
    tape.add_environment(np.array([92], np.int32), V2)

    assert tape.loss_mask().tolist() == [0, 0, 1, 1, 1, 0]
    assert tape.generated == 3
    assert (tape.oldest_version, tape.newest_version) == (V1, V1)
    assert tape.logprobs[[0, 1, 5]].tolist() == [0, 0, 0]
    assert [s.kind for s in tape.segments] == [
        SegmentKind.ENVIRONMENT, SegmentKind.GENERATED, SegmentKind.ENVIRONMENT,
    ]  # fmt: skip


def test_empty_chunks_and_attempts_leave_no_segment() -> None:
    """Nothing came: nothing is written."""
    tape = TokenTape()
    tape.add_attempt(attempt((0, 0, V0)), "a", "e", 1.0)
    tape.add_environment(np.empty(0, np.int32), V0)

    assert (len(tape), tape.segments, tape.oldest_version, tape.newest_version) == (0, [], None, None)
    assert tape.version_array().shape == (0, 2)


def test_versions_of_a_sample_never_decrease() -> None:
    """An engine with older weights than the sample's tokens is refused."""
    tape = TokenTape()
    tape.add_attempt(attempt((0, 2, V2)), "a", "e", 1.0)
    with pytest.raises(ValueError, match="never decrease"):
        tape.add_attempt(attempt((2, 2, V1)), "b", "e", 1.0)


@pytest.mark.parametrize("damage", ["tokens", "logprobs", "gap", "order"])
def test_check_finds_what_does_not_fit(damage: str) -> None:
    """Lengths, contiguous segments, versions: each contradiction is named."""
    tape = TokenTape()
    tape.add_attempt(attempt((0, 2, V0), (2, 2, V1)), "a", "e", 1.0)
    if damage == "tokens":
        tape.tokens, tape.logprobs = tape.tokens[:-1], tape.logprobs[:-1]
    elif damage == "logprobs":
        tape.logprobs = tape.logprobs[:-1]
    elif damage == "gap":
        del tape.segments[0]
    else:
        tape.segments[0], tape.segments[1] = (
            tape.segments[0].__class__(0, 2, V1, SegmentKind.GENERATED, "a", "e", 1.0),
            tape.segments[0].__class__(2, 2, V0, SegmentKind.GENERATED, "a", "e", 1.0),
        )
    expected = {"tokens": "cover 4 of 3", "logprobs": "4 tokens but 3", "gap": "not contiguous", "order": "after"}
    assert expected[damage] in str(tape.check())
