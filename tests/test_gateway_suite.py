"""april's gateway keeps the promises of the suite for gateways; with a defect planted it breaks one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("renderers")
from april.agents import endpoint, session
from april.agents.chat import RequestError
from april.agents.chat_template import ChatTemplate
from april.agents.dialects import OpenAIChat, OpenAIText
from april.testing.conformance import Outcome
from tests.gateway_suite.bench import Promise
from tests.gateway_suite.promises import PROMISES
from tests.gateway_suite.subject import Row, Subject

NAMED = {promise.name: promise for promise in PROMISES}


@pytest.mark.parametrize("promise", PROMISES, ids=str)
async def test_april_keeps(promise: Promise) -> None:
    """Each promise, on a scheduler of its own with two fake engines and a trainer that updates in mid-call."""
    verdict = await promise.on(Subject)
    assert verdict.outcome is Outcome.PASSED, str(verdict)


class Impatient(Subject):
    """What does not come at once does not come."""

    patience_s: ClassVar[float] = 3.0
    dialects: ClassVar[Sequence[str]] = ("chat",)


Patch = pytest.MonkeyPatch
DEFECTS: dict[str, Callable[[Patch], None]] = {}


def breaks(*names: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """The promises that a defect breaks."""

    def made(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        DEFECTS.update(dict.fromkeys(names, plant))
        return plant

    return made


def read_as(patch: Patch, change: Callable[[Any], Any]) -> None:
    """Change each answer before a client has it."""
    read = session.Session._parse_answer
    patch.setattr(session.Session, "_parse_answer", lambda self, *rest: change(read(self, *rest)))


def row_as(patch: Patch, **change: Callable[[Row], Any]) -> None:
    """Change what would be trained."""
    row = Subject._row

    def changed(sample: Any) -> Row:
        right = row(sample)
        return replace(right, **{name: value(right) for name, value in change.items()})

    patch.setattr(Subject, "_row", staticmethod(changed))


@breaks("aborts_are_no_answers", "deaths_lose_nothing")
def a_partial_is_an_answer(patch: Patch) -> None:
    read_as(patch, lambda answer: replace(answer, text=answer.text[:8]))


@breaks("refusals_are_waited_for")
def a_refusal_is_handed_on(patch: Patch) -> None:
    async def answer(self: Any, *_: Any) -> Any:
        raise RequestError("the engine is paused", 503, retry=True)

    patch.setattr(session.Session, "_answer", answer)


@breaks("tokens_have_versions")
def versions_are_not_noted(patch: Patch) -> None:
    row_as(patch, versions=lambda row: [])


@breaks("tokens_are_the_engines")
def a_token_is_doubled(patch: Patch) -> None:
    row_as(patch, tokens=lambda row: [*row.tokens[:3], row.tokens[2], *row.tokens[4:]])


@breaks("logprobs_are_those_of_versions")
def versions_are_those_of_the_end(patch: Patch) -> None:
    row_as(patch, versions=lambda row: [row.versions[-1]] * len(row.tokens))


@breaks("turns_append", "sampled_tokens_stay")
def history_is_written_anew(patch: Patch) -> None:
    patch.setattr(ChatTemplate, "extend", lambda self, *_: None)


@breaks("cut_calls_are_no_calls")
def a_cut_is_an_end(patch: Patch) -> None:
    read_as(patch, lambda answer: replace(answer, finish="stop"))


@breaks("cuts_are_not_continued")
def a_cut_answer_is_gone_on_with(patch: Patch) -> None:
    answer = session.Session._answer

    async def remembered(self: Any, request: Any, asked: Any) -> Any:
        found = await answer(self, request, asked)
        ids = np.concatenate((found.prompt_ids, found.tokens))
        self.conversations.remember(request, found.message, ids, len(found.prompt_ids))
        return found

    patch.setattr(session.Session, "_answer", remembered)


@breaks("retries_join", "answers_are_kept")
def every_request_is_new(patch: Patch) -> None:
    ask, numbers = session.Session.submit, itertools.count()
    patch.setattr(
        session.Session, "submit", lambda self, r, digest, retry: ask(self, r, str(next(numbers)), retry=False)
    )


@breaks("equal_requests_are_two")
def equal_requests_join(patch: Patch) -> None:
    ask = session.Session.submit
    patch.setattr(
        session.Session, "submit", lambda self, request, digest, retry: ask(self, request, digest, retry=True)
    )


@breaks("silence_is_bounded")
def nothing_keeps_a_connection(patch: Patch) -> None:
    async def silent(self: Any, request: Any, dialect: Any, wanted: Any, asked: Any) -> Any:
        await asked.task
        return await reply(self, request, dialect, wanted, asked)

    reply = endpoint.Endpoint._send_answer
    patch.setattr(endpoint.Endpoint, "_send_answer", silent)


@breaks("failures_are_no_answers")
def a_stream_just_ends(patch: Patch) -> None:
    event = endpoint._encode_event
    patch.setattr(endpoint, "_encode_event", lambda said: b"" if said[0] == "error" else event(said))


@breaks("gone_clients_are_named")
def nobody_asks_who_heard(patch: Patch) -> None:
    patch.setattr(session.Session, "received_calls", lambda self: range(1000))


@breaks("conversations_are_rows")
def each_row_has_the_reward(patch: Patch) -> None:
    row_as(patch, sample=lambda row: object())


@breaks("restarts_lose_nothing")
def ids_are_drawn(patch: Patch) -> None:
    numbers = itertools.count()
    read_as(patch, lambda answer: replace(answer, id=f"{next(numbers)}"))


@breaks("refusals_have_names")
def any_number_of_messages(patch: Patch) -> None:
    patch.setattr(endpoint, "MAX_MESSAGES", 10**9)


@breaks("shapes_agree")
def a_stream_counts_nothing(patch: Patch) -> None:
    stream = OpenAIChat.stream
    patch.setattr(OpenAIChat, "stream", lambda self, a, r: stream(self, a, replace(r, usage=False)))


class Texts(Impatient):
    """Asked for text completions, too; conversations need messages."""

    dialects: ClassVar[Sequence[str]] = ("chat", "text")


def a_text_is_cut(patch: Patch) -> None:
    text = OpenAIText._text
    patch.setattr(OpenAIText, "_text", lambda self, answer, *rest: text(replace(answer, text=answer.text[:-1]), *rest))


def a_text_stream_counts_nothing(patch: Patch) -> None:
    stream = OpenAIText.stream
    patch.setattr(OpenAIText, "stream", lambda self, a, r: stream(self, a, replace(r, usage=False)))


@pytest.mark.parametrize(
    ("name", "plant"), [("aborts_are_no_answers", a_text_is_cut), ("shapes_agree", a_text_stream_counts_nothing)]
)
async def test_a_defect_of_text_completions_is_caught(name: str, plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """``/v1/completions`` is held to the promises that need no messages."""
    plant(monkeypatch)
    verdict = await NAMED[name].on(Texts)
    assert verdict.outcome is Outcome.FAILED, str(verdict)
    assert "text" in verdict.detail or "hm" in verdict.detail, verdict.detail


def test_every_promise_has_a_defect() -> None:
    """No promise is kept by whatever a gateway does."""
    assert DEFECTS.keys() == NAMED.keys()


@pytest.mark.parametrize("name", DEFECTS)
async def test_a_defect_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the promise that it breaks."""
    DEFECTS[name](monkeypatch)
    verdict = await NAMED[name].on(Impatient)
    assert verdict.outcome is Outcome.FAILED, str(verdict)
    assert "raised" not in verdict.detail, verdict.detail
