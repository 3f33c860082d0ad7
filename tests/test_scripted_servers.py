"""The scripted model inside real servers says what the script says, from wherever a request begins."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")
from tests.gateway_suite.script import TOKENIZER, reply, says
from tests.real_engines import scripted
from tests.real_engines.scripted import Line

CHAT = "<|im_start|>user\nplease #{word}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
TEXT = "before #hello please #{word}"


@pytest.mark.parametrize("asked_for", [CHAT, TEXT], ids=["chat", "text"])
@pytest.mark.parametrize("word", ["hello", "long", "longadd", "add", "split"])
@pytest.mark.parametrize("cut", [0, 1, 5])
def test_the_answer_goes_on_where_the_request_begins(word: str, cut: int, asked_for: str) -> None:
    """A request that has the beginning of an answer gets the rest, its end included, and then the model's own."""
    asked = TOKENIZER.encode(asked_for.format(word=word))
    whole = reply(asked)
    line = Line([*asked, *whole[:cut]])
    said = [line.next(count) for count in range(len(whole) - cut + 1)] if cut < len(whole) else []

    assert said == ([*whole[cut:], None] if cut < len(whole) else [])
    assert line.long == (cut < len(whole) and word in ("long", "longadd"))


@pytest.mark.parametrize(
    "prompt",
    [[7, 8, 9], TOKENIZER.encode(CHAT.format(word="nothing")), TOKENIZER.encode("no #hello here"), [500, 1, 300]],
)
def test_what_asks_for_nothing_is_left_alone(prompt: list[int]) -> None:
    """Requests of april's probes, conversations without a word of the script, and tokens that it has not."""
    assert Line(prompt).next(0) is None


def test_one_answer_for_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable of the environment answers every conversation, and nothing that is none."""
    monkeypatch.setenv(scripted.ANSWER, "5,6,2")
    scripted._answer.cache_clear()
    try:
        found: Any = [Line([1, 400]).next(count) for count in range(4)]
        other = Line([400]).next(0)
    finally:
        scripted._answer.cache_clear()

    assert found == [5, 6, 2, None]
    assert other is None
    assert says("hello") == "hi"
