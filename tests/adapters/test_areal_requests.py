"""One call of a workflow under AReaL: what is sent, which versions come back, and what nobody can know."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from adapters import stand_in_areal as areal
from april.core.types import DropReason
from april.errors import RolloutError
from april.processes.coordinator.calls import CURRENT, Session
from april.processes.coordinator.messages import Done, Go, Message, Result
from april.testing import run_virtual


class Coordinator:
    """Gives these answers; remembers the results it was told."""

    def __init__(self, *answers: Message) -> None:
        self.answers = list(answers)
        self.results: list[Result] = []

    async def call(self, uid: str, index: int, life: int, token_ids: Any, most: int, temperature: float) -> Message:
        self.asked = token_ids.tolist(), most, temperature
        return self.answers.pop(0)

    async def ended(self, uid: str, index: int, life: int, result: Result) -> Message:
        self.results.append(result)
        return self.answers.pop(0)

    async def broke(self, uid: str, index: int, life: int, error: str) -> Message:
        self.error = error
        return self.answers.pop(0)


def call(monkeypatch: pytest.MonkeyPatch, coordinator: Coordinator, inner: Any, pauses: list[int], **more: Any) -> Any:
    """The response to a prompt of two tokens, by AReaL's engine as a workflow has it."""
    areal.install(monkeypatch)
    module = importlib.import_module("april.adapters.areal.executor")
    sampling: dict[str, Any] = {"n_samples": 1, "max_tokens": 10, "max_new_tokens": 20, "temperature": 0.7}
    gconfig = SimpleNamespace(**{**sampling, **more})
    gconfig.new = lambda **new: SimpleNamespace(**{**sampling, **new})

    async def program() -> Any:
        CURRENT.set(Session(coordinator, "p0", 0, 1))
        return await module.Engine(inner, lambda: pauses[0]).agenerate(areal.request([50, 3], gconfig))

    return run_virtual(program())


def go(ids: list[int], most: int) -> Go:
    return Go(np.array(ids, np.int32), most)


def done(count: int, *spans: tuple[int, int, int, int]) -> Done:
    tokens = np.arange(count, dtype=np.int32)
    return Done(tokens=tokens, logprobs=tokens * np.float32(-0.5), spans=spans, resumes=1, by_length=False)


def test_versions_are_those_of_the_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """The response of two requests under two weights; the room is that of the smaller limit."""
    areal.SERVER[:] = [areal.Server(lambda row: 4, lambda row, so_far: False)]
    inner = areal.RemoteInfEngine(SimpleNamespace(request_timeout=1.0))
    coordinator = Coordinator(go([50, 3], 8), done(4, (2, 5, 0, 6), (5, 6, 0, 7)))
    made = call(monkeypatch, coordinator, inner, [0])
    assert coordinator.asked == ([50, 3], 8, 0.7)
    assert made.output_versions == [6, 6, 6, 7]
    assert made.output_logprobs == [0.0, -0.5, -1.0, -1.5]
    assert made.stop_reason == "stop"
    assert (coordinator.results[0].label, coordinator.results[0].offset) == (0, 2)


def test_tokens_that_came_after_a_pause_have_no_known_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights may have changed before they were written: they are counted and not kept, under no version."""
    areal.SERVER[:] = [areal.Server(lambda row: 4, lambda row, so_far: False)]
    inner, pauses = areal.RemoteInfEngine(SimpleNamespace(request_timeout=1.0)), [0]
    answer = areal.SERVER[0].answer

    async def late(payload: Any) -> Any:
        pauses[0] += 1
        return await answer(payload)

    areal.SERVER[0].answer = late  # type: ignore[method-assign]
    coordinator = Coordinator(go([50, 3], 8), done(4, (2, 6, 0, 7)))
    call(monkeypatch, coordinator, inner, pauses)
    (result,) = coordinator.results
    assert (len(result.tokens), len(result.logprobs), result.aborted) == (0, 0, True)
    assert result.unused == (4, DropReason.UNKNOWN_WEIGHTS)


def test_an_error_does_not_repeat_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """AReaL's own text has the whole payload in it."""
    areal.SERVER[:] = [areal.Server(lambda row: 4, lambda row, so_far: False)]
    areal.SERVER[0].fails = [OSError("gone")]
    inner = areal.RemoteInfEngine(SimpleNamespace(request_timeout=1.0))
    coordinator = Coordinator(go([50, 3], 8), go([50, 3], 8), done(4, (2, 6, 0, 0)))
    call(monkeypatch, coordinator, inner, [0])
    assert coordinator.error == "RolloutError: server here:1: OSError('gone')"


@pytest.mark.parametrize(("more", "message"), [
    ({"n_samples": 2}, "a request for 2 samples: ask once per sample"),
    ({"max_tokens": 2}, "a prompt of 2 tokens leaves no room for a response: max_tokens=2"),
])  # fmt: skip
def test_requests_that_cannot_be(monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], message: str) -> None:
    """They fail their sample with a sentence."""
    with pytest.raises(RolloutError, match=message):
        call(monkeypatch, Coordinator(), areal.RemoteInfEngine(SimpleNamespace()), [0], **more)


def test_what_is_not_aprils_is_areals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of a training rollout, and for everything but agenerate."""
    areal.install(monkeypatch)
    engine = importlib.import_module("april.adapters.areal.executor").Engine
    inner = areal.RemoteInfEngine(SimpleNamespace())
    assert engine(inner, lambda: 0).choose_server() == "here:1"
    with pytest.raises(AssertionError, match="AReaL's own"):
        run_virtual(engine(inner, lambda: 0).agenerate(areal.request([1], None)))
