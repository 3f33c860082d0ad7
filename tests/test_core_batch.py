"""What a trainer gets: tokens with exact segments, arrays of a batch, and the environment's tokens in them."""

from __future__ import annotations

import numpy as np
import pytest
from core_machine import EOS, CoreMachine, asked

from april.core import commands as do
from april.core import events as ev
from april.core.sampling import SamplingParams
from april.core.settings import EngineLimits
from april.core.tape import AttemptTape, SegmentKind, TokenTape, versions_of
from april.core.types import EngineFinish, SampleId
from april.core.versions import PolicyVersion
from april.errors import InvariantError

V0, V1, V2 = (PolicyVersion(0, n) for n in range(3))
GENERATED, ENVIRONMENT = SegmentKind

# ---------------------------------------------------------------- tapes


def tape_of(*spans: tuple[int, PolicyVersion], tape: TokenTape | None = None) -> TokenTape:
    """A tape with an attempt of chunks (count, version) at its end; tokens are numbered, temperature is 0.7."""
    tape, attempt = tape or TokenTape(), AttemptTape()
    for count, version in spans:
        tokens = np.arange(len(tape) + attempt.count, len(tape) + attempt.count + count, dtype=np.int32)
        attempt.append(tokens, (-1.0 / (1.0 + tokens)).astype(np.float32), version)
    tape.add_attempt(attempt, "a", "e", 0.7)
    return tape


def test_chunks_of_one_attempt_keep_their_own_versions() -> None:
    """Weights that change inside an attempt give segments at the exact token; they never go back."""
    tape = tape_of((3, V0), (2, V0), (4, V1))
    assert [(s.start, s.count, s.version) for s in tape.segments] == [(0, 5, V0), (5, 4, V1)]
    assert tape.tokens.tolist() == list(range(9))
    assert tape.logprobs.tolist() == (-1.0 / (1.0 + np.arange(9))).astype(np.float32).tolist()
    assert tape.segments[1].temperature == 0.7
    assert tape.check() is None
    with pytest.raises(ValueError, match="never decrease"):
        tape_of((2, V0), tape=tape)


def test_environment_tokens_have_no_loss_and_no_version_of_their_own_in_staleness() -> None:
    """What a tool wrote is in the tokens, masked, and does not count as generated; what is empty leaves no segment."""
    tape = tape_of((0, V0))
    tape.add_environment(np.empty(0, np.int32), V0)
    assert (len(tape), tape.segments, tape.oldest_version, tape.newest_version) == (0, [], None, None)
    assert versions_of(tape.segments).shape == (0, 2)

    tape.add_environment(np.array([90, 91], np.int32), V0)
    tape_of((3, V1), tape=tape)
    tape.add_environment(np.array([92], np.int32), V2)
    assert tape.loss_mask().tolist() == [0, 0, 1, 1, 1, 0]
    assert (tape.generated, tape.oldest_version, tape.newest_version) == (3, V1, V1)
    assert tape.logprobs[[0, 1, 5]].tolist() == [0, 0, 0]
    assert [s.kind for s in tape.segments] == [ENVIRONMENT, GENERATED, ENVIRONMENT]


# ---------------------------------------------------------------- batches


# ---------------------------------------------------------------- conversations

SAID = [5, 6, 10, 11, 12, 13]


def call(m: CoreMachine, token_ids: list[int] | None) -> list[do.Command]:
    """The next call, for 4 tokens."""
    ids = None if token_ids is None else np.array(token_ids, np.int32)
    commands = m.core.handle(ev.CallMade(SampleId(0, 0), SamplingParams(max_tokens=4), ids))
    m.in_flight |= {c.attempt.id: c.attempt for c in commands if isinstance(c, do.Submit)}
    return commands


def generate(m: CoreMachine) -> None:
    """Its 4 tokens come."""
    attempt = m.only
    m.tokens(attempt.id, 4)
    ended = ev.AttemptEnded.of(m.in_flight.pop(attempt.id), EngineFinish.LENGTH)
    assert any(isinstance(c, do.CallCompleted) for c in m.core.handle(ended))


def talking(max_response_len: int = 100, context: int = 4096, has_reward: bool = True) -> CoreMachine:
    """One sample whose calls the test makes; it has 4 tokens of its first call."""
    engines = (EngineLimits("a", context, None, (EOS,)),)
    m = asked(500, engines, max_response_len=max_response_len, has_reward=has_reward, auto_call=False)
    call(m, None)
    generate(m)
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
    call(m, None)
    with pytest.raises(InvariantError, match="returned while it was waiting for tokens"):
        m.core.handle(ev.SampleReturned(SampleId(0, 0)))
    with pytest.raises(InvariantError, match=r"there is no sample g9\.s0"):
        m.core.handle(ev.SampleReturned(SampleId(9, 0)))
