"""The tape of a conversation: exact segments, and tokens that are appended and never rewritten."""

from __future__ import annotations

import numpy as np
import pytest
from core_machine import A, CoreMachine, asked

from april.core import commands as do
from april.core import events as ev
from april.core.sampling import SamplingParams
from april.core.tape import AttemptTape, TokenTape
from april.core.types import EngineFinish, SampleId
from april.core.versions import PolicyVersion
from april.errors import InvariantError

V0, V1 = PolicyVersion(0, 0), PolicyVersion(0, 1)


def add(tape: TokenTape, *spans: tuple[int, PolicyVersion]) -> None:
    """Append an attempt of chunks (count, version); tokens are numbered, the temperature is 0.7."""
    attempt = AttemptTape()
    for count, version in spans:
        tokens = np.arange(len(tape) + attempt.count, len(tape) + attempt.count + count, dtype=np.int32)
        attempt.append(tokens, (-1.0 / (1.0 + tokens)).astype(np.float32), version)
    tape.add_attempt(attempt, "a", "e", 0.7)


def test_chunks_of_one_attempt_keep_their_own_versions() -> None:
    """Weights that change inside an attempt give segments at the exact token; they never go back."""
    tape = TokenTape()
    add(tape, (3, V0), (2, V0), (4, V1))
    assert [(s.start, s.count, s.version) for s in tape.segments] == [(0, 5, V0), (5, 4, V1)]
    assert tape.tokens.tolist() == list(range(9))
    assert tape.logprobs.tolist() == (-1.0 / (1.0 + np.arange(9))).astype(np.float32).tolist()
    assert tape.segments[1].temperature == 0.7
    assert tape.check() is None
    with pytest.raises(ValueError, match="never decrease"):
        add(tape, (2, V0))


SAID = [5, 6, 10, 11, 12, 13]


def call(m: CoreMachine, token_ids: list[int] | None = None) -> list[do.Command]:
    """The function's next call, for 4 tokens."""
    ids = None if token_ids is None else np.array(token_ids, np.int32)
    return m.core.handle(ev.CallMade(SampleId(0, 0), SamplingParams(max_tokens=4), ids))


def talking() -> CoreMachine:
    """One sample whose calls the test makes; it has the 4 tokens of its first call."""
    m = asked(500, (A,), auto_call=False)
    (submit,) = call(m)
    assert isinstance(submit, do.Submit)
    m.in_flight[submit.attempt.id] = submit.attempt
    m.tokens(submit.attempt.id, 4)
    m.core.handle(ev.AttemptEnded.of(m.in_flight.pop(submit.attempt.id), EngineFinish.LENGTH))
    return m


@pytest.mark.parametrize("token_ids", [[5], [5, 6, 10, 11, 12], [5, 6, 10, 11, 12, 99, 1], [9, *SAID[1:], 7]])
def test_conversation_is_appended_to_and_never_rewritten(token_ids: list[int]) -> None:
    """Tokens that do not begin with the prompt and everything generated are refused with a sentence."""
    m = talking()
    call(m, token_ids)
    assert m.prompts_dropped == {"failed": 1}
    assert "append to the conversation, and never rewrite it" in m.core.story(SampleId(0, 0))


def test_events_that_cannot_be_are_named() -> None:
    """A function that returns while it waits, and a sample that nobody holds."""
    m = talking()
    call(m)
    with pytest.raises(InvariantError, match="returned while it was waiting for tokens"):
        m.core.handle(ev.SampleReturned(SampleId(0, 0)))
    with pytest.raises(InvariantError, match=r"there is no sample g9\.s0"):
        m.core.handle(ev.SampleReturned(SampleId(9, 0)))
