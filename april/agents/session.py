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
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple, Protocol

import numpy as np

from april.agents.chat import Answer, ChatRequest, Message, RequestError, ToolCall, Tools, key_of
from april.agents.dialects import messages_of, tools_of
from april.agents.sight import Sight, refuse_images
from april.agents.template import Parsed, Template
from april.core.attachments import Placed
from april.core.tape import Float32, Int32
from april.core.types import FinishReason
from april.driver.llm import Answered
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


class Generate(Protocol):
    """Continues token ids, with arguments of ``llm.generate``; however many steps that takes.

    ``attached`` is what is attached to them; None means what is known of them.
    """

    def __call__(
        self, ids: Int32, changes: Mapping[str, Any], attached: tuple[Placed, ...] | None = None
    ) -> Awaitable[Generated]: ...



SAME_TEXT = 8
"""Answers of the same text to the same conversation whose tokens are remembered."""


SHELVES = 16
"""Token sequences of which the end is looked for, to keep what goes on with one in the same array."""


@dataclass(slots=True, eq=False)
class _Shelf:
    ids: Int32
    count: int


class _Shelves:
    """Keeps token sequences; one that goes on with another takes the room of what it adds."""

    def __init__(self) -> None:
        self._latest: deque[_Shelf] = deque(maxlen=SHELVES)

    def keep(self, ids: Int32) -> Int32:
        """The same ids, in an array that others share; it must not be written into."""
        for shelf in reversed(self._latest):
            both = min(shelf.count, len(ids))
            if both and np.array_equal(shelf.ids[:both], ids[:both]):
                return self._on(shelf, ids)
        self._latest.append(_Shelf(ids, len(ids)))
        return ids

    @staticmethod
    def _on(shelf: _Shelf, ids: Int32) -> Int32:
        if len(ids) > len(shelf.ids):
            grown = np.empty(max(len(ids), 2 * len(shelf.ids)), np.int32)
            grown[: shelf.count] = shelf.ids[: shelf.count]
            shelf.ids = grown
        if len(ids) > shelf.count:
            shelf.ids[shelf.count : len(ids)] = ids[shelf.count :]
            shelf.count = len(ids)
        return shelf.ids[: len(ids)]


class _Known(NamedTuple):
    """A conversation that ended with an answer: its tokens, how many of them are the prompt's, what is attached."""

    ids: Int32
    prompt: int
    attached: tuple[Placed, ...] = ()


Written = tuple[Int32, tuple[Placed, ...]]
"""A conversation as tokens, and what is attached to them."""


MessageOf = Callable[[str, Int32, Int32, Tools, Mapping[str, Any]], Message]
"""Of the name of an answer, its prompt and tokens, the tools and the sampling: the message that the client has."""


class Conversations:
    """The conversations of a sample, found again by the messages that the client sends back.

    They are matched on messages as they were answered, not on text that is rendered anew: what was sampled may be
    rendered otherwise.
    """

    def __init__(
        self, template: Template, answered: Sequence[Answered], message_of: MessageOf, sight: Sight | None = None
    ) -> None:
        self._template = template
        self._sight = sight
        self._known: dict[str, deque[_Known]] = {}
        self._answered = answered
        self._message_of = message_of

    def ids_of(self, messages: Sequence[Message], tools: Tools, sampling: Mapping[str, Any]) -> Written:
        """The tokens of a request: those of the longest known conversation that it goes on with, or all rendered anew.

        Raises RequestError.
        """
        digests = self._digests(messages, tools)
        if self._answered:
            self._recall(messages, tools, sampling, digests)
        return self._ids_of(messages, tools, digests)

    def _ids_of(self, messages: Sequence[Message], tools: Tools, digests: Sequence[str]) -> Written:
        for count in range(len(messages) - 1, 0, -1):
            for ids, prompt, attached in reversed(self._known.get(digests[count - 1], ())):
                known = ids[:prompt].tolist(), ids[prompt:].tolist()
                found = self._template.extend(*known, messages[:count], messages[count:], tools)
                if found is None:
                    continue
                if self._sight is None:
                    return np.array(found, np.int32), ()
                if np.array_equal(found[: len(ids)], ids):  # what is attached to them stays where it is
                    return self._sight.place(found, len(ids), attached, messages[count:])
        found = self._template.render(messages, tools)
        if self._sight is None:
            return np.array(found, np.int32), ()
        return self._sight.place(found, 0, (), messages)

    def _recall(
        self, messages: Sequence[Message], tools: Tools, sampling: Mapping[str, Any], digests: Sequence[str]
    ) -> None:
        """Know again what was answered before a restart and is repeated now, by a client that has heard it."""
        for i, message in enumerate(messages):
            if message["role"] != "assistant" or not i or digests[i] in self._known:
                continue
            prompt, attached = self._ids_of(messages[:i], tools, digests[:i])
            same = [a.tokens[a.start : a.end] for a in self._answered if a.answers(prompt, attached)]
            said = key_of(message)
            for number, tokens in product(range(len(same)), same):
                name = name_of(prompt, number, attached)
                if key_of(self._message_of(name, prompt, tokens, tools, sampling)) == said:
                    self.remember(digests[i], np.concatenate((prompt, tokens)), len(prompt), attached)
                    break

    def remember(self, digest: str, ids: Int32, prompt: int, attached: tuple[Placed, ...] = ()) -> None:
        """These ``ids`` are a conversation that ends with an answer; a partial answer is never remembered.

        ``prompt``: how many are before the answer. ``digest``: of the conversation, the answer's message included.
        ``attached``: what is attached to them.
        """
        self._known.setdefault(digest, deque(maxlen=SAME_TEXT)).append(_Known(ids, prompt, attached))

    def digest(self, messages: Sequence[Message], tools: Tools) -> str:
        """The digest of a conversation."""
        return self._digests(messages, tools)[-1]

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
    left: bool = False
    """Its client has left for good: nobody joins it any more."""
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
        generate: continues token ids; one that is cancelled is given up.
        template: the model's; None refuses messages and texts, and takes token ids.
        max_context: tokens that the engines have room for.
        answered: the answers of before a restart, which a client may have heard.
        sight: reads images in messages; None refuses them.
    """

    generate: Generate
    template: Template | None
    max_context: int
    answered: Sequence[Answered] = ()
    sight: Sight | None = None
    conversations: Conversations | None = field(init=False)
    asked: dict[str, list[Asked]] = field(default_factory=dict)
    """By digest of the body: each request that is no retry of another."""
    closed: str = ""
    """The reason why nothing is answered any more; empty while it is."""
    _counts: dict[str, int] = field(default_factory=dict)
    _shelves: _Shelves = field(default_factory=_Shelves)

    def __post_init__(self) -> None:
        if self.template is None:
            self.conversations = None
        else:
            self.conversations = Conversations(self.template, self.answered, self._message_of, self.sight)

    def ask(self, request: ChatRequest, digest: str, *, retry: bool) -> Asked:
        """The request's answer to come: that of the request which this one repeats, or a new one.

        It repeats an equal one if it says that it is a retry, or if nobody is left who hears that one.
        """
        if self.closed:
            raise RequestError(self.closed, 410, "session_closed")
        for earlier in self.asked.get(digest, ()):
            over = earlier.reached or earlier.left or _failed(earlier.task)
            if not over and (retry or not earlier.clients):
                return earlier
        if retry:  # of an answer that was heard after all, as far as this side can see
            for earlier in reversed(self.asked.get(digest, ())):
                if earlier.task.done() and not _failed(earlier.task):
                    return earlier
        asked = Asked()
        asked.task = asyncio.get_running_loop().create_task(self._answer(request, asked))
        same = self.asked.setdefault(digest, [])
        same.append(asked)
        # what has failed is asked anew, and holds on to all that it was asked with
        asked.task.add_done_callback(lambda task: same.remove(asked) if _failed(task) else None)
        return asked

    async def count(self, request: ChatRequest) -> int:
        """The tokens of a request; raises RequestError."""
        return len(self._ids_of(await self._seen(request))[0])

    def heard(self) -> list[int]:
        """The numbers of calls whose answers a client has heard. May be called from any thread."""
        every = [a for several in list(self.asked.values()) for a in list(several)]
        return [a.number for a in every if a.number is not None and a.reached]

    def leave(self, asked: Asked) -> None:
        """Give up a request that nobody waits for any more, unless it was answered or somebody does."""
        if not asked.clients and not asked.task.done():
            asked.left = True
            asked.task.cancel()

    def close(self, why: str) -> None:
        """Answer nothing any more, for this reason; what is being answered is cancelled."""
        self.closed = why
        for asked in [a for several in self.asked.values() for a in several]:
            asked.task.cancel()

    async def _answer(self, request: ChatRequest, asked: Asked) -> Answer:
        request = await self._seen(request)
        prompt, attached = self._ids_of(request)
        done = await self.generate(prompt, request.sampling, attached)
        asked.number = done.number
        whole = self._shelves.keep(np.concatenate((prompt, done.tokens)))
        prompt = whole[: len(prompt)]
        name = name_of(prompt, None, attached or ())
        number = self._counts[name] = self._counts.get(name, -1) + 1
        named = name_of(prompt, number, attached or ())
        answer = self._read(request, named, prompt, done, done.tokens.tolist())
        if self.conversations is not None and request.token_ids is None and answer.finish != "length":
            digest = self.conversations.digest([*request.messages, answer.message], request.tools)
            self.conversations.remember(digest, whole, len(prompt), attached or ())
        return answer

    def _message_of(
        self, name: str, prompt: Int32, tokens: Int32, tools: Tools, sampling: Mapping[str, Any]
    ) -> Message:
        done = _Recalled(tokens, np.empty(0, np.float32))
        return self._read(ChatRequest(tools=tools, sampling=sampling), name, prompt, done, tokens.tolist()).message

    async def _seen(self, request: ChatRequest) -> ChatRequest:
        """The request with its images read; raises RequestError."""
        if self.sight is None:
            refuse_images(request.messages)
            return request
        return replace(request, messages=await self.sight.read(request.messages))

    def _ids_of(self, request: ChatRequest) -> tuple[Int32, tuple[Placed, ...] | None]:
        if request.token_ids:
            return np.array(request.token_ids, np.int32), None
        if self.template is None or self.conversations is None:
            raise RequestError("messages and texts need the model's tokenizer: give the scheduler tokenizer=...")
        if request.token_ids is not None:
            return np.array(self.template.encode(str(request.messages[0]["content"])), np.int32), None
        return self.conversations.ids_of(request.messages, request.tools, request.sampling)

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
        """Answer nothing any more; returns the numbers of calls whose answers the function has got."""
        self.session.close("its rollout function has ended")
        return self.session.heard()


class _Recalled(NamedTuple):
    tokens: Int32
    logprobs: Float32
    finish: FinishReason = FinishReason.STOP
    number: int = 0


def name_of(prompt: Int32, number: int | None = None, attached: Sequence[Placed] = ()) -> str:
    """The id of an answer, which is the same after a restart: of its prompt, and which of the answers to it it is."""
    asked = prompt.tobytes() + "".join(placed.attachment.digest for placed in attached).encode()
    return hashlib.sha256(asked).hexdigest()[:16] + ("" if number is None else f"{number:02x}")


def _failed(task: asyncio.Task[Answer]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
