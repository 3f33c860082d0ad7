"""One sample out of a snapshot: its tape, its calls and its counts, each looked at before it is believed."""

from __future__ import annotations

import math
import string
from collections import deque
from typing import Any

import numpy as np

from april.core.engine_table import EngineTable
from april.core.numbers import count_of, held_reward, wrong_ids, wrong_logprobs, wrong_reward
from april.core.sealed import State
from april.core.tape import Segment, SegmentKind, TokenTape
from april.core.types import FinishReason, Group, RecordedCall, Replay, Sample, SampleId, SampleState
from april.core.versions import PolicyVersion
from april.errors import CheckpointError

ID_LENGTH = 32
"""Of an attempt."""


def restored_sample(
    engines: EngineTable, sample_id: SampleId, group: Group, state: State, *, keeps_finished: bool
) -> Sample:
    """One that is finished, if it was and ``keeps_finished``; else one that is new.

    Raises:
        CheckpointError: it has tokens that these engines do not know.
        ValueError, LookupError, TypeError: it cannot be true.
    """
    if type(state["finished"]) is not bool:
        raise ValueError(f"{sample_id}: finished is {state['finished']!r}")
    keeps = state["finished"] and keeps_finished
    sample = Sample(sample_id, group, SampleState.FINISHED if keeps else SampleState.NEW)
    _tape_in(sample.tape, state)
    sample.attempts, sample.failures = count_of(state["attempts"]), count_of(state["failures"])
    sample.resumes, sample.restarts = count_of(state["resumes"]), count_of(state["restarts"])
    calls = [
        RecordedCall(count_of(start), count_of(end), FinishReason(finish)) for start, end, finish in state["calls"]
    ]
    open_call = None if state["open_call"] is None else count_of(state["open_call"])
    wrong = (
        _wrong_tape(sample.tape)
        or _wrong_calls(sample.tape, calls, open_call)
        or _wrong_ends(sample.tape, calls, engines)
        or _wrong_counts(sample)
    )
    if wrong is not None:
        raise ValueError(f"{sample.id}: {wrong}")
    if wrong := wrong_ids(sample.tape.tokens, engines.vocab_size):
        raise CheckpointError(f"{sample.id} of the state does not fit these engines: {wrong}")
    if state["finished"]:
        reward = float(state["reward"])
        if wrong := wrong_reward(reward):
            raise ValueError(f"{sample.id}: its reward is {wrong}")
        if open_call is not None or not calls or calls[-1].finish is not FinishReason(state["finish"]):
            raise ValueError(f"{sample.id}: it is finished, and its last call is not")
        if keeps:
            sample.finish, sample.reward = calls[-1].finish, held_reward(reward)
    if calls or open_call is not None:
        sample.replay = Replay(deque(calls), open_call)
    return sample


def _tape_in(tape: TokenTape, state: State) -> None:
    start = 0
    for count, incarnation, n, kind, attempt_id, engine, temperature in state["segments"]:
        where = (SegmentKind(kind), _text(attempt_id), _text(engine), float(temperature))
        tape.segments.append(Segment(start, count_of(count), version_of((incarnation, n)), *where))
        start += count
    tape.tokens, tape.logprobs = array_of(state["tokens"], "<i4"), array_of(state["logprobs"], "<f4")


def _wrong_tape(tape: TokenTape) -> str | None:
    if wrong := tape.check() or wrong_logprobs(tape.logprobs):
        return wrong
    for s in tape.segments:
        if not (math.isfinite(s.temperature) and s.temperature >= 0):
            return f"a temperature of {s.temperature}"
        if s.kind is SegmentKind.ENVIRONMENT:
            if tape.logprobs[s.start : s.start + s.count].any():
                return "tokens of the environment have log-probabilities"
        elif len(s.attempt_id) != ID_LENGTH or not set(s.attempt_id) <= set(string.hexdigits) or not s.engine:
            return f"tokens of attempt {s.attempt_id[:40]!r} on engine {s.engine[:40]!r}"
    return None


def _wrong_calls(tape: TokenTape, calls: list[RecordedCall], open_call: int | None) -> str | None:
    """Calls come one after the other, and what they brought, and nothing else, was generated."""
    spans = [(call.start, call.end) for call in calls] + ([] if open_call is None else [(open_call, len(tape))])
    asked = np.zeros(len(tape), np.uint8)
    at = 0
    for start, end in spans:
        if not at <= start <= end <= len(tape):
            return f"a call of tokens {start} to {end} after {at}, of {len(tape)}"
        asked[start:end] = 1
        at = end
    if not np.array_equal(asked, tape.loss_mask()):
        return "it has tokens that nobody asked for"
    return None


def _wrong_ends(tape: TokenTape, calls: list[RecordedCall], engines: EngineTable) -> str | None:
    """An end-of-sequence token of its engine ends a call; nothing was generated behind it."""
    ends = {call.end for call in calls} | {len(tape)}
    for s in tape.segments:
        stops = engines.ends_of(s.engine)
        if s.kind is SegmentKind.GENERATED and stops:
            found = s.start + np.flatnonzero(np.isin(tape.tokens[s.start : s.start + s.count], list(stops)))
            for position in found.tolist():
                if position + 1 not in ends:
                    return f"tokens behind the end-of-sequence token at {position}"
    return None


def _wrong_counts(sample: Sample) -> str | None:
    ids = {s.attempt_id for s in sample.tape.segments if s.kind is SegmentKind.GENERATED}
    if len(ids) > sample.attempts or sample.resumes > sample.attempts:
        return f"{len(ids)} attempts and {sample.resumes} resumptions of {sample.attempts} attempts"
    return None


# -------------------------------------------------------------------- plain forms


def array_of(data: bytes | None, dtype: str) -> Any:
    """What a snapshot has as little-endian bytes; None: empty."""
    if data is not None and not isinstance(data, bytes):
        raise TypeError(f"expected bytes, found a {type(data).__name__}")
    return np.frombuffer(data or b"", dtype).astype(dtype[1:])


def version_of(pair: Any) -> PolicyVersion:
    """(incarnation, n)."""
    incarnation, n = pair
    return PolicyVersion(count_of(incarnation), count_of(n))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, found {value!r}")
    return value
