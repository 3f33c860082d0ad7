"""The requests of one sample: which of them are retries, which conversation each continues, and their answers.

Invariant: two equal requests share one generation only if the later is a retry of the earlier; two clients that send
the same request get two answers.
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
from april.driver.llm import AnsweredCall
from april.errors import UsageError


class Generated(Protocol):
    """The result of ``generate``: ``tokens`` int32 [T], ``logprobs`` float32 [T], finish reason, and call number."""

    @property
    def tokens(self) -> Int32: ...

    @property
    def logprobs(self) -> Float32: ...

    @property
    def finish(self) -> FinishReason: ...

    @property
    def number(self) -> int: ...


class Generate(Protocol):
    """Continues token ids, with arguments of ``llm.generate``; returns when complete, however many steps that takes.

    ``attached`` lists what is attached to the token ids; None means what april already knows to be attached.
    """

    def __call__(
        self, ids: Int32, changes: Mapping[str, Any], attached: tuple[Placed, ...] | None = None
    ) -> Awaitable[Generated]: ...



SAME_TEXT = 8
"""Most answers that are remembered for one conversation and one answer text, as their tokens may differ."""


SHELVES = 16
"""Number of recent token arrays that are searched for one that a new sequence continues."""


@dataclass(slots=True, eq=False)
class _Shelf:
    ids: Int32
    count: int


class _Shelves:
    """Stores token sequences; a sequence that continues another needs memory only for what it adds."""

    def __init__(self) -> None:
        self._latest: deque[_Shelf] = deque(maxlen=SHELVES)

    def keep(self, ids: Int32) -> Int32:
        """Return the same ids in an array that other sequences share; it must not be modified."""
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
    """A conversation that ended with an answer: all its tokens, the number of prompt tokens, and its attachments."""

    ids: Int32
    prompt: int
    attached: tuple[Placed, ...] = ()


Written = tuple[Int32, tuple[Placed, ...]]
"""A conversation as tokens, with what is attached to them."""


MessageOf = Callable[[str, Int32, Int32, Tools, Mapping[str, Any]], Message]
"""Makes the message that the client has, from an answer's id, prompt and tokens, the tools and the sampling."""


class Conversations:
    """Finds the conversation that a request continues, by the messages that the client sends back.

    Messages are compared as they were answered, not as text that is rendered anew, since rendering an answer may give
    other tokens than those that were sampled.
    """

    def __init__(
        self, template: Template, answered: Sequence[AnsweredCall], message_of: MessageOf, sight: Sight | None = None
    ) -> None:
        self._template = template
        self._sight = sight
        self._known: dict[str, deque[_Known]] = {}
        self._answered = answered
        self._message_of = message_of

    def ids_of(self, messages: Sequence[Message], tools: Tools, sampling: Mapping[str, Any]) -> Written:
        """Return the tokens of a request, which continue the longest known conversation, or are all rendered anew.

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
                if np.array_equal(found[: len(ids)], ids):  # the attachments keep their places
                    return self._sight.place(found, len(ids), attached, messages[count:])
        found = self._template.render(messages, tools)
        if self._sight is None:
            return np.array(found, np.int32), ()
        return self._sight.place(found, 0, (), messages)

    def _recall(
        self, messages: Sequence[Message], tools: Tools, sampling: Mapping[str, Any], digests: Sequence[str]
    ) -> None:
        """Recognise answers from before a restart when a client that has received them sends them back."""
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
        """Remember a conversation that ends with an answer; partial answers are never remembered.

        ``ids`` are its tokens, and ``prompt`` is the number of tokens before the answer. ``digest`` is that of the
        conversation, the answer's message included. ``attached`` lists what is attached to the tokens.
        """
        self._known.setdefault(digest, deque(maxlen=SAME_TEXT)).append(_Known(ids, prompt, attached))

    def digest(self, messages: Sequence[Message], tools: Tools) -> str:
        """Return the digest of a conversation."""
        return self._digests(messages, tools)[-1]

    @staticmethod
    def _digests(messages: Sequence[Message], tools: Tools) -> list[str]:
        """Return a digest for each prefix of the conversation."""
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
    """True once the whole answer was sent to a client."""
    left: bool = False
    """True once its clients have left for good; later requests do not share its answer."""
    sending: list[asyncio.WriteTransport] = field(default_factory=list)
    """Connections to which the whole answer was written, but which may not have sent all of it yet."""
    number: int | None = None
    """Number of the call that generated the answer; None before that."""

    @property
    def reached(self) -> bool:
        """True if a client has received the whole answer, as far as the write buffers of its connection show."""
        return self.heard or any(not to.get_write_buffer_size() for to in list(self.sending))


@dataclass(slots=True)
class Session:
    """The requests of one sample. Must be used on one event loop.

    Args:
        generate: function that continues token ids; cancelling it gives the call up.
        template: chat template of the model; None means that messages and texts are refused, and only token ids taken.
        max_context: number of tokens that the engines have room for.
        answered: answers from before a restart, which a client may have received.
        sight: reads the images in messages; None means that they are refused.
    """

    generate: Generate
    template: Template | None
    max_context: int
    answered: Sequence[AnsweredCall] = ()
    sight: Sight | None = None
    conversations: Conversations | None = field(init=False)
    asked: dict[str, list[Asked]] = field(default_factory=dict)
    """Requests by the digest of their body; retries are not listed again."""
    closed: str = ""
    """Reason why requests are no longer answered; empty while they are."""
    _counts: dict[str, int] = field(default_factory=dict)
    _shelves: _Shelves = field(default_factory=_Shelves)

    def __post_init__(self) -> None:
        if self.template is None:
            self.conversations = None
        else:
            self.conversations = Conversations(self.template, self.answered, self._message_of, self.sight)

    def ask(self, request: ChatRequest, digest: str, *, retry: bool) -> Asked:
        """Return the pending answer to a request: that of an earlier equal request, or a new one.

        The earlier one is shared if this request says that it is a retry, or if no client waits for the earlier one any
        more.
        """
        if self.closed:
            raise RequestError(self.closed, 410, "session_closed")
        for earlier in self.asked.get(digest, ()):
            over = earlier.reached or earlier.left or _failed(earlier.task)
            if not over and (retry or not earlier.clients):
                return earlier
        if retry:  # the client may have lost an answer that looks delivered from here
            for earlier in reversed(self.asked.get(digest, ())):
                if earlier.task.done() and not _failed(earlier.task):
                    return earlier
        asked = Asked()
        asked.task = asyncio.get_running_loop().create_task(self._answer(request, asked))
        same = self.asked.setdefault(digest, [])
        same.append(asked)
        # forget a failed request: an equal one starts anew, and the failure would keep its arguments in memory
        asked.task.add_done_callback(lambda task: same.remove(asked) if _failed(task) else None)
        return asked

    async def count(self, request: ChatRequest) -> int:
        """Return the number of tokens of a request; raises RequestError."""
        return len(self._ids_of(await self._seen(request))[0])

    def heard(self) -> list[int]:
        """Return the numbers of calls whose answers a client has received. May be called from any thread."""
        every = [a for several in list(self.asked.values()) for a in list(several)]
        return [a.number for a in every if a.number is not None and a.reached]

    def leave(self, asked: Asked) -> None:
        """Cancel a request that is not answered yet, if no client waits for it any more."""
        if not asked.clients and not asked.task.done():
            asked.left = True
            asked.task.cancel()

    def close(self, why: str) -> None:
        """Stop answering for this reason, and cancel the requests in progress."""
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
        """Return the request with its images read; raises RequestError."""
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
        """Return the generated tokens as the answer that the client gets."""
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
            ToolCall(number or f"call_{name}_{i}", called, said) for i, (number, called, said) in enumerate(calls)
        )
        return Answer(
            id=name, prompt_ids=prompt, tokens=done.tokens, logprobs=done.logprobs, text=text, reasoning=reasoning,
            tool_calls=answered, stopped_by=stopped_by,
            # a cut answer is "length" even after a complete tool call: the client must not take it for a finished turn
            finish="length" if cut else "tool_calls" if answered else "stop",
        )  # fmt: skip


@dataclass(slots=True)
class Chat:
    """``llm.chat`` of one sample: a session whose only client is the rollout function, which never retries."""

    session: Session
    _asked: int = 0

    async def ask(self, messages: Sequence[Message], tools: Tools, sampling: Mapping[str, Any]) -> Answer:
        """Return the answer to a conversation; raises UsageError if the request is refused."""
        self._asked += 1
        try:
            request = ChatRequest(
                messages=messages_of(list(messages)), tools=tools_of(tools), sampling=sampling
            )
            asked = self.session.ask(request, f"chat {self._asked}", retry=False)
            answer = await asyncio.shield(asked.task)  # a caller that is cancelled has not received the answer
        except RequestError as error:
            raise UsageError(f"llm.chat: {error}") from None
        asked.heard = True
        return answer

    def close(self) -> list[int]:
        """Stop answering; returns the numbers of calls whose answers the function has received."""
        self.session.close("its rollout function has ended")
        return self.session.heard()


class _Recalled(NamedTuple):
    tokens: Int32
    logprobs: Float32
    finish: FinishReason = FinishReason.STOP
    number: int = 0


def name_of(prompt: Int32, number: int | None = None, attached: Sequence[Placed] = ()) -> str:
    """Return the id of an answer, made of its prompt and its number among the prompt's answers; restarts keep it."""
    asked = prompt.tobytes() + "".join(placed.attachment.digest for placed in attached).encode()
    return hashlib.sha256(asked).hexdigest()[:16] + ("" if number is None else f"{number:02x}")


def _failed(task: asyncio.Task[Answer]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
