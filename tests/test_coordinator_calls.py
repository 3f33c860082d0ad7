"""The rollout's half of the coordinator: what it sends, what it tells, and when."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from april.core import events as ev
from april.core.sampling import SamplingParams
from april.core.tape import AttemptTape, Int32
from april.core.types import Attempt, AttemptFailure, Chain, EngineFinish, GenerateCall, SampleId
from april.core.versions import PolicyVersion
from april.errors import RolloutError
from april.processes.coordinator.asked_host import take
from april.processes.coordinator.calls import SampleGivenUp, Session, generate
from april.processes.coordinator.messages import Done, GivenUp, Go, Message, Result
from april.testing import VirtualClockLoop

NOTHING = Result(offset=3, tokens=np.empty(0, np.int32), logprobs=np.empty(0, np.float32), label=0, aborted=True)
WHOLE = Result(offset=3, tokens=np.array([7], np.int32), logprobs=np.array([-1.0], np.float32), label=0, aborted=False)
GO = Go(np.array([1, 2, 3], np.int32), 5)
DONE = Done(tokens=WHOLE.tokens, logprobs=WHOLE.logprobs, spans=((3, 4, 0, 0),), resumes=0, by_length=False)


class Coordinator:
    """Answers from a list, each after so many seconds; remembers what it was told, and when."""

    def __init__(self, *answers: tuple[float, Message]) -> None:
        self._answers = list(answers)
        self.told: list[tuple[float, str]] = []

    async def _next(self, what: str) -> Message:
        self.told.append((asyncio.get_running_loop().time(), what))
        seconds, answer = self._answers.pop(0)
        await asyncio.sleep(seconds)
        return answer

    async def call(self, *words: Any) -> Message:
        return await self._next("call")

    async def ended(self, *words: Any) -> Message:
        return await self._next("ended")

    async def broke(self, *words: Any) -> Message:
        return await self._next(words[-1])


def run(coordinator: Coordinator, *results: Result | Exception) -> tuple[Any, list[float]]:
    """What the call came to, and when requests were sent."""
    sent: list[float] = []
    left = list(results)

    async def send(token_ids: Int32, max_tokens: int) -> Result:
        sent.append(asyncio.get_running_loop().time())
        result = left.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    loop = VirtualClockLoop()
    try:
        return loop.run_until_complete(generate(Session(coordinator, "u0", 0, 1), send, [1, 2, 3], 5, 1.0)), sent
    finally:
        loop.close()


def test_a_request_that_was_turned_away_is_told_at_once() -> None:
    """A step that waits for it is not held up; it is sent again when the coordinator says so, at once."""
    coordinator = Coordinator((0.0, GO), (60.0, GO), (0.0, DONE))
    done, sent = run(coordinator, NOTHING, WHOLE)
    assert done is DONE
    assert coordinator.told == [(0.0, "call"), (0.0, "ended"), (60.0, "ended")]
    assert sent == [0.0, 60.0]


def test_a_server_that_turns_everything_away_is_asked_less_and_less() -> None:
    """From 50 ms on, twice as long each time, at most a second."""
    answers = [(0.0, GO)] * 8
    _, sent = run(Coordinator(*answers, (0.0, DONE)), *[NOTHING] * 7, WHOLE)
    waits = [round(b - a, 6) for a, b in itertools.pairwise(sent)]
    assert waits == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_a_request_that_breaks_is_told_by_its_first_line() -> None:
    """The coordinator decides what becomes of it."""
    coordinator = Coordinator((0.0, GO), (0.0, GO), (0.0, DONE))
    done, _ = run(coordinator, OSError("gone\nand a trace"), WHOLE)
    assert done is DONE
    assert [what for _, what in coordinator.told] == ["call", "OSError: gone", "ended"]


def test_a_sample_that_goes_on_without_its_rollout_ends_it() -> None:
    """By what ``except Exception`` lets through."""
    with pytest.raises(SampleGivenUp, match="u0 goes on without this rollout"):
        run(Coordinator((0.0, GO), (0.0, GivenUp())), NOTHING)
    assert not issubclass(SampleGivenUp, Exception)


def test_one_call_at_a_time() -> None:
    """april continues one response per sample."""

    async def two() -> None:
        session = Session(Coordinator((1.0, DONE)), "u0", 0, 1)

        async def send(token_ids: Int32, max_tokens: int) -> Result:
            return WHOLE

        calls = [generate(session, send, [1, 2, 3], 5, 1.0) for _ in range(2)]
        await asyncio.gather(*calls)

    loop = VirtualClockLoop()
    with pytest.raises(RolloutError, match="called generate twice at the same time"):
        loop.run_until_complete(two())
    loop.run_until_complete(asyncio.sleep(2.0))
    loop.close()


def test_a_response_without_a_token_is_no_response() -> None:
    """A server that ends a request at once, unasked, has failed; one that was asked hands over what it has."""
    version = PolicyVersion(0, 0)
    sample: Any = SimpleNamespace(id=SampleId(0, 0))
    sample.chains = (Chain(sample, 0, GO.token_ids),)
    call = GenerateCall(sample.chains[0], SamplingParams(5), 0)
    attempt = Attempt(id="a", call=call, engine="e", token_ids=GO.token_ids, sampling=call.sampling, tape=AttemptTape())
    event = take(attempt, replace(NOTHING, aborted=False), version)
    assert isinstance(event, ev.AttemptFailed)
    assert event.kind is AttemptFailure.CORRUPT
    assert "ended (stop) without a token" in event.error
    assert take(attempt, NOTHING, version) == ev.AttemptEnded("a", EngineFinish.ABORT)
