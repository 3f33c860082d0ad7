"""What the calls of ranks carry arrives as it was: evaluations, and what rank 0 gives to a scheduler elsewhere."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from april.core.attachments import Attachment, Placed
from april.core.types import EngineFinish, FinishReason, Prompt, SampleId
from april.driver.rewards import Conversation, EvaluationResult, Response
from april.processes.rank_packing import pack_call, unpack_call, with_detokenizer
from april.serialization.own_values import pack, unpack
from april.serialization.plain_values import why_not_plain

PICTURE = Attachment.of("image", bytes(50_000))


def test_an_evaluation_keeps_all_conversations_of_a_response() -> None:
    """Responses of another rank have the conversations that those of rank 0 have, in their order."""

    def conversation(*prompt: int) -> Conversation:
        tokens = np.array([*prompt, 5], np.int32)
        mask = np.ones(len(tokens), np.uint8)
        return Conversation(np.array(prompt, np.int32), tokens, np.zeros(len(tokens), np.float32), mask)

    def response(index: int, *conversations: Conversation) -> Response:
        return Response(SampleId(0, index), conversations, FinishReason.STOP, {"x": 1}, 1.0)

    several = response(0, conversation(1, 2), conversation(3), conversation(4, 4))
    sent = EvaluationResult(((several, response(1, conversation(1, 2))),), np.array([[1.0, 0.0]]))
    ((first, second),) = unpack(pack(with_detokenizer(sent, None)), EvaluationResult).responses
    for come, was in ((first, several), (second, sent.responses[0][1])):
        assert len(come.conversations) == len(was.conversations)
        for a, b in zip(come.conversations, was.conversations, strict=True):
            assert all(np.array_equal(x, y) and x.dtype == y.dtype for x, y in zip(a, b, strict=True))
        assert come.conversations[0].tokens is come.tokens


def test_a_prompt_that_ranks_evaluate_keeps_its_images() -> None:
    """Their arguments travel to the core's actor; a file travels as its path."""
    there = Attachment("image", "ab" * 32, 9, None, "/data/a.png")
    attached = (Placed(PICTURE, 0, 1, (5,)), Placed(there, 1, 2, (5,)))
    prompt = Prompt(np.array([1, 2, 3], np.int32), {"x": 1}, attached=attached)
    _, arguments = unpack_call(pack_call("evaluate", {"prompts": [prompt], "n_samples": 2}), lambda: None)
    (come,) = arguments["prompts"]
    assert come.attached == attached
    assert [p.attachment.data for p in come.attached] == [PICTURE.data, None]
    assert come.attached[1].attachment.path == "/data/a.png"


CYCLE: list[Any] = []
CYCLE.append(CYCLE)
ODD = {
    "a tuple": ({"pair": [(1, 2)]}, r"data\['pair'\]\[0\] is a tuple"),
    "a set": ({"x": {1}}, r"data\['x'\] is a set"),
    "an array": ({"x": np.zeros(2)}, r"data\['x'\] is a ndarray"),
    "a number of numpy's": ({"x": np.int64(3)}, r"data\['x'\] is a int64"),
    "a deeper key": ({"x": {(1, 2): 3}}, r"data\['x'\] has a key of type tuple"),
    "a large number": ({"x": 1 << 70}, r"data\['x'\] is a number of more than 64 bits"),
    "a large key": (
        {"x": [{"deep": {1 << 70: 1}}]}, r"the key 118\d+ of data\['x'\]\[0\]\['deep'\] is a number of more",
    ),
    "half a character": ({"x": "caf\udce9"}, r"data\['x'\] is text with half a character"),
    "half a character of a key": ({"x": {"\ud800": 1}}, r"the key '\\ud800' of data\['x'\] is text with half"),
    "a cycle": ({"x": CYCLE}, r"data\['x'\]\[0\].* \.\.\. has more than 100 levels"),
    "an enum": ({"x": EngineFinish.STOP}, r"data\['x'\] is a EngineFinish"),
}  # fmt: skip


@pytest.mark.parametrize(("data", "why"), ODD.values(), ids=ODD)
def test_data_that_would_arrive_as_another_thing_does_not_travel(data: dict[str, Any], why: str) -> None:
    """A function of another rank sees what it would see at rank 0, or does not run; and the user reads why."""
    assert re.search(why, str(why_not_plain(data, "data")))
    plain = {"a": [1, -2.5, None, True, "\u20ac", b"\xff"], "b": {"c": {1: float("inf")}}}
    assert why_not_plain(plain, "data") is None
