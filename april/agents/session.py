"""One sample's requests: which of them are the same, which conversation each continues, and what is answered.

Invariant: equal requests are one generation only where the later one is a retry of the earlier; two clients that ask
the same have two answers.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from april.agents.chat import Answer, ChatRequest, Message, RequestError, ToolCall, Tools, key_of
from april.agents.dialects import messages_of, tools_of
from april.agents.template import Parsed, Template
from april.core.tape import Float32, Int32
from april.core.types import FinishReason
from april.errors import UsageError


class Generated(Protocol):
    """What ``generate`` returns: ``tokens`` int32 [T], ``logprobs`` float32 [T], and the reason of the end."""

    @property
    def tokens(self) -> Int32: ...

    @property
    def logprobs(self) -> Float32: ...

    @property
    def finish(self) -> FinishReason: ...

    @property
    def number(self) -> int: ...


Generate = Callable[[Int32, Mapping[str, Any]], Awaitable[Generated]]
"""Continues token ids, with arguments of ``llm.generate``; however many steps that takes."""

SAME_TEXT = 8
"""Answers of the same text to the same conversation whose tokens are remembered."""


@dataclass(slots=True)
class _Known:
    """A conversation that ended with an answer."""

    prompt: list[int]
    completion: list[int]


class Conversations:
    """The conversations of a sample, found again by the messages that the client sends back.

    They are matched on messages as they were answered, not on text that is rendered anew: what was sampled may be
    rendered otherwise.
    """

    def __init__(self, template: Template) -> None:
        self._template = template
        self._known: dict[str, deque[_Known]] = {}

    def ids_of(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """The tokens of a request: those of the longest known conversation that it goes on with, or all rendered anew.

        Raises RequestError.
        """
        digests = self._digests(messages, tools)
        for count in range(len(messages) - 1, 0, -1):
            for known in reversed(self._known.get(digests[count - 1], ())):
                ids = self._template.extend(known.prompt, known.completion, messages[:count], messages[count:], tools)
                if ids is not None:
                    return ids
        return self._template.render(messages, tools)

    def remember(self, messages: Sequence[Message], tools: Tools, prompt: list[int], completion: list[int]) -> None:
        """``completion`` was answered, whose message is the last one; a partial answer is never remembered."""
        digest = self._digests(messages, tools)[-1]
        self._known.setdefault(digest, deque(maxlen=SAME_TEXT)).append(_Known(prompt, completion))

    @staticmethod
    def _digests(messages: Sequence[Message], tools: Tools) -> list[str]:
        """A digest of each beginning of the conversation."""
        so_far = hashlib.sha256(json.dumps(list(tools), sort_keys=True).encode())
        digests = []
        for message in messages:
            so_far.update(key_of(message).encode() + b"\0")
            digests.append(so_far.hexdigest())
        return digests


@dataclass(slots=True, eq=False)
class Asked:
    """A request, and the task that answers it."""

    task: asyncio.Task[Answer] = field(init=False)
    clients: int = 0
    """Connections that wait for the answer or are reading it."""
    heard: bool = False
    """True once a client has been sent the whole answer."""
    sending: list[asyncio.WriteTransport] = field(default_factory=list)
    """Connections to which the whole answer has been given, and which may not have sent all of it."""
    number: int | None = None
    """Number of the call that generated the answer; None before that."""

    @property
    def reached(self) -> bool:
        """Whether a client has the whole answer, as far as this side can see: one that does not read has not."""
        return self.heard or any(not to.get_write_buffer_size() for to in list(self.sending))


@dataclass(slots=True)
class Session:
    """The requests of one sample. Must be used on one loop.

    Args:
        generate: continues token ids.
        template: the model's; None refuses messages and texts, and takes token ids.
        sampling: arguments of ``llm.generate`` of a client that does not set them.
    """

    generate: Generate
    template: Template | None
    conversations: Conversations | None = field(init=False)
    asked: dict[str, list[Asked]] = field(default_factory=dict)
    """By digest of the body: each request that is no retry of another."""
    closed: str = ""
    """The reason why nothing is answered any more; empty while it is."""
    _counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.conversations = None if self.template is None else Conversations(self.template)

    def ask(self, request: ChatRequest, digest: str, *, retry: bool) -> Asked:
        """The request's answer to come: that of the request which this one repeats, or a new one.

        It repeats an equal one if it says that it is a retry, or if nobody is left who hears that one.
        """
        if self.closed:
            raise RequestError(self.closed, 410, "session_closed")
        for earlier in self.asked.get(digest, ()):
            if not earlier.reached and (retry or not earlier.clients) and not _failed(earlier.task):
                return earlier
        if retry:  # of an answer that was heard after all, as far as this side can see
            for earlier in reversed(self.asked.get(digest, ())):
                if earlier.task.done() and not _failed(earlier.task):
                    return earlier
        asked = Asked()
        asked.task = asyncio.get_running_loop().create_task(self._answer(request, asked))
        self.asked.setdefault(digest, []).append(asked)
        return asked

    def count(self, request: ChatRequest) -> int:
        """The tokens of a request; raises RequestError."""
        return len(self._ids_of(request))

    def unheard(self) -> list[int]:
        """The numbers of calls whose answers no client has heard. May be called from any thread."""
        every = [a for several in list(self.asked.values()) for a in list(several)]
        return [a.number for a in every if a.number is not None and not a.reached]

    def close(self, why: str) -> None:
        """Answer nothing any more, for this reason; what is being answered is cancelled."""
        self.closed = why
        for asked in [a for several in self.asked.values() for a in several]:
            asked.task.cancel()

    async def _answer(self, request: ChatRequest, asked: Asked) -> Answer:
        ids = self._ids_of(request)
        prompt = np.array(ids, np.int32)
        done = await self.generate(prompt, request.sampling)
        asked.number = done.number
        tokens = done.tokens.tolist()
        name = hashlib.sha256(prompt.tobytes()).hexdigest()[:16]
        number = self._counts[name] = self._counts.get(name, -1) + 1
        answer = self._read(request, f"{name}{number:02x}", prompt, done, tokens)
        if self.conversations is not None and request.token_ids is None and answer.finish != "length":
            self.conversations.remember([*request.messages, answer.message], request.tools, ids, tokens)
        return answer

    def _ids_of(self, request: ChatRequest) -> list[int]:
        if request.token_ids:
            return list(request.token_ids)
        if self.template is None or self.conversations is None:
            raise RequestError("messages and texts need the model's tokenizer: give the scheduler tokenizer=...")
        if request.token_ids is not None:
            return self.template.encode(str(request.messages[0]["content"]))
        return self.conversations.ids_of(request.messages, request.tools)

    def _read(self, request: ChatRequest, name: str, prompt: Int32, done: Generated, tokens: list[int]) -> Answer:
        """What was generated, as the client sees it."""
        cut = done.finish is FinishReason.LENGTH
        text, reasoning, calls = "", "", Parsed("", "", ()).calls
        if self.template is not None and request.token_ids is not None:
            text = self.template.decode(tokens)
        elif self.template is not None:
            parsed = self.template.parse(tokens, prompt.tolist(), request.tools)
            text, reasoning, calls = parsed.text, parsed.reasoning, parsed.calls
        stops = request.sampling.get("stop") or ()
        found = [(text.find(stop), stop) for stop in stops if stop in text]
        stopped_by = None
        if found and not cut:
            at, stopped_by = min(found)
            text = text[:at]
        answered = tuple(
            ToolCall(number or f"call_{name}_{i}", called, said if isinstance(said, str) else json.dumps(said))
            for i, (number, called, said) in enumerate(calls)
        )
        return Answer(
            id=name, prompt_ids=prompt, tokens=done.tokens, logprobs=done.logprobs, text=text, reasoning=reasoning,
            tool_calls=answered, stopped_by=stopped_by,
            # a cut is "length" even behind a complete tool call: the client must not take it for a finished turn
            finish="length" if cut else "tool_calls" if answered else "stop",
        )  # fmt: skip


@dataclass(slots=True)
class Chat:
    """``llm.chat`` of one sample: a session whose only client is the rollout function, which never asks twice."""

    session: Session
    _asked: int = 0

    async def ask(self, messages: Sequence[Message], tools: Tools, sampling: Mapping[str, Any]) -> Answer:
        """The answer to a conversation; raises UsageError for one that cannot be asked."""
        self._asked += 1
        try:
            request = ChatRequest(
                messages=messages_of(list(messages)), tools=tools_of(tools), sampling=sampling
            )
            asked = self.session.ask(request, f"chat {self._asked}", retry=False)
            answer = await asyncio.shield(asked.task)  # who waits no longer has not heard it
        except RequestError as error:
            raise UsageError(f"llm.chat: {error}") from None
        asked.heard = True
        return answer

    def close(self) -> list[int]:
        """Answer nothing any more; returns the numbers of calls whose answers the function has not got."""
        self.session.close("its rollout function has ended")
        return self.session.unheard()


def _failed(task: asyncio.Task[Answer]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
