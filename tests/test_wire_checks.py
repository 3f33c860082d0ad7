"""No number from an engine is believed before it was looked at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from april.core.sampling import SamplingParams
from april.core.value_checks import LEAST_LOGPROB, LOGPROB_EPS
from april.core.versions import PolicyVersion
from april.driver.wire_checks import check_chunk, check_end
from april.engines.protocol import Chunk, EngineFinish, Request
from april.errors import EngineError, WireError

V = [PolicyVersion(0, 0), PolicyVersion(0, 1), PolicyVersion(1, 0)]


def chunk(tokens: Any = (1, 2, 3), logprobs: Any = (-0.5, -1.0, 0.0), version: PolicyVersion = V[1]) -> Chunk:
    return Chunk(np.array(tokens, np.int32), np.array(logprobs, np.float32), version)


def check(c: Chunk, vocab_size: int = 10, room: int = 5, oldest: PolicyVersion | None = None) -> None:
    check_chunk(c, vocab_size, room, oldest, V[1])


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (chunk([1, 2], [-1.0]), "2 tokens came with 1 log-probabilities"),
        (chunk([1], [-1.0, -1.0]), "1 tokens came with 2 log-probabilities"),
        (chunk([], [-1.0]), "0 tokens came with 1"),
        (chunk([1] * 6, [-1.0] * 6), "6 tokens came, but only 5 were left of the budget"),
        (chunk([1, 10, 11]), "token id 10 is outside the vocabulary of 10"),
        (chunk([1, -1, 3]), "token id -1 is outside"),
        (chunk(logprobs=[-1, np.nan, -1]), "log-probability nan is not a finite number <= 0"),
        (chunk(logprobs=[-1, -1, 0.25]), "log-probability 0.25 is not"),
        (chunk(logprobs=[np.inf, -1, -1]), "log-probability inf"),
        (chunk(logprobs=[-np.inf, -1, -1]), "log-probability -inf"),
        (chunk(logprobs=[-1, -9999, -1]), "log-probability -9999 stands for minus infinity"),
        (chunk(logprobs=[-1, -1, np.finfo(np.float32).min]), "-3.40282e\\+38 stands for minus infinity"),
        (chunk(logprobs=[-746, -1, -1]), "log-probability -746 stands for minus infinity"),
        (chunk(version=V[2]), r"policy version 1\.0 came, but only any to 0\.1 are possible"),
    ],
)
def test_what_cannot_be_true_is_refused(bad: Chunk, words: str) -> None:
    """A WireError, which is an EngineError, that names the number."""
    with pytest.raises(WireError, match=words) as caught:
        check(bad)
    assert isinstance(caught.value, EngineError)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (Chunk([1], np.zeros(1, np.float32), V[0]), "tokens must be a flat array of int32, got list"),
        (Chunk(np.ones(1, np.int64), np.zeros(1, np.float32), V[0]), "tokens must be a flat array of int32"),
        (Chunk(np.ones((1, 1), np.int32), np.zeros((1, 1), np.float32), V[0]), "tokens must be a flat array"),
        (Chunk(np.ones(1, np.int32), np.zeros(1, np.float64), V[0]), "must be a flat array of float32"),
        (Chunk(np.ones(1, np.uint16), np.zeros(1, np.float32), V[0]), r"got ndarray of uint16, shape \(1,\)"),
        (Chunk(np.ones(1, np.int32), np.zeros(1, np.float16), V[0]), r"got ndarray of float16, shape \(1,\)"),
        (Chunk(np.ones(1, np.int32), SimpleNamespace(dtype="torch.float32", ndim=1), V[0]), "got SimpleNamespace"),
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
    st.lists(
        st.floats(width=32, allow_nan=True, allow_infinity=True) | st.sampled_from([-9999.0, -745.0, -744.0, -104.0]),
        max_size=8,
    ),
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
        and all(LEAST_LOGPROB <= np.float32(p) <= LOGPROB_EPS for p in logprobs)
        and (not tokens or (version <= V[1] and (oldest is None or version >= oldest)))
    )
    try:
        check(chunk(tokens, logprobs, version), room=room, oldest=oldest)
    except WireError:
        assert not possible
    else:
        assert possible


def test_the_least_log_probability_of_what_can_be_sampled() -> None:
    """In 32 bits, as engines sample, and in 64: a token of probability 0 was never drawn."""
    for dtype in (np.float32, np.float64):
        least = np.log(np.nextafter(dtype(0), dtype(1), dtype=dtype))
        check(chunk([1], [least]))
    assert np.exp(np.float64(LEAST_LOGPROB - 1)) == 0.0


# ---------------------------------------------------------------- ends


def ended(
    finish: EngineFinish, *, count: int = 4, last: int = 5, stopped_at: int | str | None = None,
    eos: tuple[int, ...] = (2, 3), context: int = 100, prompt: int = 10, **sampling: Any,
) -> None:  # fmt: skip
    """The check of a response of ``count`` tokens."""
    end = Chunk(np.empty(0, np.int32), np.empty(0, np.float32), V[0], finish, stopped_at)
    params = SamplingParams(**({"max_tokens": 20, "stop_token_ids": (7,)} | sampling))
    check_end(
        end, Request(attempt_id="a", token_ids=np.ones(prompt, np.int32), sampling=params), count, last, context, eos
    )


def test_ends_that_fit_are_believed() -> None:
    """The budget or the context used up; EOS, a stop token, or what the engine says where EOS is not known; a cut."""
    ended(EngineFinish.LENGTH, count=20)
    ended(EngineFinish.LENGTH, count=4, prompt=96)
    for last in (2, 3, 7):
        ended(EngineFinish.STOP, last=last)
        ended(EngineFinish.STOP, last=last, stopped_at=last)
    ended(EngineFinish.STOP, last=2, min_tokens=4)
    ended(EngineFinish.STOP, last=5, eos=())
    ended(EngineFinish.STOP, last=5, stopped_at=5, eos=())
    ended(EngineFinish.ABORT)
    # a response may fill its budget with a stop token: engines call it either way
    ended(EngineFinish.STOP, count=20, last=2)
    ended(EngineFinish.LENGTH, count=20, last=2)


@pytest.mark.parametrize(
    ("finish", "changes", "words"),
    [
        ("length", {"count": 19}, r'for lack of room \("length"\) after 19 of 20 tokens.*set engine.max_len'),
        ("length", {"count": 4, "prompt": 95}, "after 4 of 20 tokens"),
        ("stop", {"last": 5}, r"last token \(5\) is neither EOS nor a stop token.*engine.eos_token_ids \(\[2, 3\]\)"),
        ("stop", {"last": 5, "stopped_at": 5}, "is neither EOS nor a stop token"),
        ("stop", {"last": 5, "count": 20}, "is neither EOS nor a stop token"),
        ("stop", {"last": 2, "stopped_at": 3}, "stopped at token 3, but its last token is 2"),
        ("stop", {"last": 5, "stopped_at": 6, "eos": ()}, "stopped at token 6, but its last token is 5"),
        ("stop", {"last": 2, "stopped_at": "NaN happened"}, "stopped at the text 'NaN happened'"),
        ("stop", {"last": 2, "min_tokens": 5}, "stopped after 4 tokens, but min_tokens is 5"),
    ],
)
def test_ends_that_fit_nothing_are_not_believed(finish: str, changes: dict[str, Any], words: str) -> None:
    """Length before budget and context are used up; a stop without a stop token, at another, at a text, too early."""
    with pytest.raises(WireError, match=words):
        ended(EngineFinish(finish), **changes)
