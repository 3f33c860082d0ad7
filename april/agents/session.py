"""Answers the API requests of one sample: recognises retries, and finds the conversation that each request continues.
``chat_template`` turns its messages into tokens.

Invariant: two equal requests share one generation only if the later one is a retry, or if no client waits for the
earlier one any more. Two clients that wait for the same request get two answers.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product, takewhile
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np

from april.agents.chat import (
    Answer,
    ChatRequest,
    Message,
    ReadMessages,
    RequestError,
    ToolCall,
    Tools,
    message_key,
    numbers_of_calls,
    results_in_order,
)
from april.agents.chat_template import ChatTemplate, ParsedAnswer
from april.agents.constraints import grammar_of, is_kept
from april.agents.dialects import read_messages, read_tools
from april.agents.message_images import MessageImages, refuse_images
from april.core.attachments import Placed
from april.core.tape import Float32, Int32
from april.core.types import FinishReason
from april.driver.llm import AnsweredCall, Completion
from april.errors import UsageError

GenerateFunction = Callable[[Int32, Mapping[str, Any], tuple[Placed, ...] | None], Awaitable[Completion]]
"""Generates a continuation of token ids: ``generate(token_ids, arguments of llm.generate, images)``. It returns when
the answer is complete, after any number of steps. None as ``images`` means the images of the earlier calls."""
MAX_ANSWERS_PER_TEXT = 8
"""Maximum number of answers with the same text, but different tokens, that are remembered for one conversation."""
MAX_RECENT_SEQUENCES = 16
"""Number of recent conversations in which to look for the beginning of a new one."""


@dataclass(slots=True, eq=False)
class _TokenBuffer:
    ids: Int32
    count: int


class _SharedSequences:
    """Stores token sequences; a sequence that continues another needs memory only for the tokens that it adds."""

    def __init__(self) -> None:
        self._buffers: deque[_TokenBuffer] = deque(maxlen=MAX_RECENT_SEQUENCES)

    def share(self, ids: Int32) -> Int32:
        """Return the same ids in a read-only array, whose memory other sequences share."""
        for buffer in reversed(self._buffers):
            common = min(buffer.count, len(ids))
            if common and np.array_equal(buffer.ids[:common], ids[:common]):
                return self._extended(buffer, ids)
        self._buffers.append(_TokenBuffer(ids, len(ids)))
        return _read_only(ids)

    @staticmethod
    def _extended(buffer: _TokenBuffer, ids: Int32) -> Int32:
        if len(ids) > len(buffer.ids):
            grown = np.empty(max(len(ids), 2 * len(buffer.ids)), np.int32)
            grown[: buffer.count] = buffer.ids[: buffer.count]
            buffer.ids = grown
        if len(ids) > buffer.count:
            buffer.ids[buffer.count : len(ids)] = ids[buffer.count :]
            buffer.count = len(ids)
        return _read_only(buffer.ids[: len(ids)])


def _read_only(ids: Int32) -> Int32:
    view = ids.view()
    view.flags.writeable = False
    return view


T = TypeVar("T")


class _PrefixCache(Generic[T]):
    """Values of recent sequences; a lookup finds the longest stored sequence with which the given one begins."""

    def __init__(self) -> None:
        self._values: list[tuple[list[Any], T]] = []

    def value_of_longest(self, items: list[Any]) -> T | None:
        """Return the value of the longest stored sequence with which ``items`` begin; None if there is none."""
        found = [entry for entry in self._values if entry[0] == items[: len(entry[0])]]
        return max(found, key=lambda entry: len(entry[0]))[1] if found else None

    def add(self, items: list[Any], value: T) -> None:
        """Store the value of a sequence, and remove the sequences with which it begins."""
        self._values = [entry for entry in self._values if entry[0] != items[: len(entry[0])]]
        self._values = [*self._values[1 - MAX_RECENT_SEQUENCES :], (items, value)]


class MessageReader:
    """Reads the messages of a session's requests; messages that were sent before, byte for byte, are read only once."""

    def __init__(self) -> None:
        self._known = _PrefixCache[tuple[int, ReadMessages, bytes]]()

    def read(
        self, dialect: Any, sent: Sequence[msgspec.Raw], read_one: Callable[[int, msgspec.Raw], Sequence[Message]]
    ) -> tuple[ReadMessages, bytes]:
        """Return the messages of a conversation, each as read by ``read_one``, and a digest of the bytes in ``sent``.

        ``dialect`` is part of the cache's key, because another dialect reads the same bytes in another way.
        """
        pieces = list(map(bytes, sent))
        hashes = [dialect, *map(hash, pieces)]
        count, messages, digest = self._known.value_of_longest(hashes) or (0, ReadMessages(), b"")
        messages = ReadMessages(messages)
        for i in range(count, len(pieces)):
            messages += read_one(i, sent[i])
            digest = hashlib.blake2b(digest + pieces[i], digest_size=32).digest()
        self._known.add(hashes, (len(pieces), messages, digest))
        return messages, digest


class _Digest(NamedTuple):
    """Two digests of a conversation, made of the keys of its messages (:func:`message_key`)."""

    read: str
    """Digest that ignores what a human reader does not see."""
    exact: str


class _AnsweredConversation(NamedTuple):
    """A conversation that ends with an answer; ``exact`` is from its :class:`_Digest`."""

    ids: Int32
    prompt_length: int
    """Number of tokens before the answer."""
    attached: tuple[Placed, ...]
    exact: str
    call_ids: Sequence[str]
    """Ids of the answer's tool calls."""


TokenizedConversation = tuple[Int32, tuple[Placed, ...]]
"""A conversation as token ids, with the images at their positions in it."""
MessageBuilder = Callable[[str, Int32, Int32, Tools, Mapping[str, Any]], Message]
"""Makes the message that a client got as an answer, from the answer's id, prompt, tokens, tools and sampling."""


@dataclass(slots=True, eq=False, repr=False)
class Conversations:
    """Finds the conversation that a request continues, by the messages that the client sends back.

    The client's messages are compared with the text of earlier answers. An answer that is found keeps its sampled
    tokens, since rendering its text might give other tokens.
    """

    _template: ChatTemplate
    _earlier_answers: Sequence[AnsweredCall]
    _build_message: MessageBuilder
    _message_images: MessageImages | None = None
    _answered: dict[str, deque[_AnsweredConversation]] = field(default_factory=dict)
    """Conversations that end with an answer, the latest first, by ``_Digest.read``."""
    _without_stop: dict[str, str] = field(default_factory=dict)
    """Maps digests of conversations that end with an answer and a stop string to digests without the stop string."""
    _known_digests: _PrefixCache[list[_Digest]] = field(default_factory=_PrefixCache)

    def tokenize(self, messages: Sequence[Message], tools: Tools, sampling: Mapping[str, Any]) -> TokenizedConversation:
        """Return a request's tokens: those of the longest known conversation that it continues, and rendered new ones.

        Raises RequestError.
        """
        digests = self._digests(messages, tools)
        if self._earlier_answers:
            self._restore_earlier_answers(messages, tools, sampling, digests)
        return self._tokenize(messages, tools, digests)

    def _tokenize(self, messages: Sequence[Message], tools: Tools, digests: Sequence[_Digest]) -> TokenizedConversation:
        for count in range(len(messages) - 1, 0, -1):
            read, exact = digests[count - 1]
            known = self._answered.get(read, ())
            # several conversations may read alike: exact matches come first, then the latest conversation
            for ids, prompt, attached, _, call_ids in sorted(known, key=lambda answered: answered.exact != exact):
                new = _with_call_ids(messages[count:], messages[count - 1], call_ids)
                found = self._template.extend(ids, prompt, messages[:count], new, tools)
                if found is None:
                    continue
                if self._message_images is None:
                    return found, ()
                if np.array_equal(found[: len(ids)], ids):  # the images keep their positions
                    return self._message_images.place(found, len(ids), attached, new)
        rendered = np.array(self._template.render(messages, tools), np.int32)
        if self._message_images is None:
            return rendered, ()
        return self._message_images.place(rendered, 0, (), messages)

    def _restore_earlier_answers(
        self, messages: Sequence[Message], tools: Tools, sampling: Mapping[str, Any], digests: Sequence[_Digest]
    ) -> None:
        """Recognise answers from before a restart when a client that has received them sends them back."""
        for i, message in enumerate(messages):
            if message["role"] != "assistant" or not i or digests[i].read in self._answered:
                continue
            prompt, attached = self._tokenize(messages[:i], tools, digests[:i])
            candidates = [a.tokens[a.start : a.end] for a in self._earlier_answers if a.answers(prompt, attached)]
            client_key = message_key(message)
            for number, tokens in product(range(len(candidates)), candidates):
                answer = self._build_message(answer_id(prompt, number, attached), prompt, tokens, tools, sampling)
                if any(message_key(sent) == client_key for sent in _as_sent_back(answer, sampling)):
                    self._remember(digests[i], answer, np.concatenate((prompt, tokens)), len(prompt), attached)
                    break

    def remember(
        self, request: ChatRequest, answer: Message, ids: Int32, prompt_length: int, attached: tuple[Placed, ...] = ()
    ) -> None:
        """Remember a conversation that ends with a complete answer.

        ``ids`` are the conversation's tokens, and ``prompt_length`` is the number of tokens before the answer.
        ``attached`` lists the images at their positions.
        """
        before = self._digests(request.messages, request.tools)[-1]
        digest, *others = [_next_digest(before, sent) for sent in _as_sent_back(answer, request.sampling)]
        self._without_stop.update((other.read, digest.read) for other in others)
        self._remember(digest, answer, ids, prompt_length, attached)

    def _remember(
        self, digest: _Digest, answer: Message, ids: Int32, prompt_length: int, attached: tuple[Placed, ...]
    ) -> None:
        known = self._answered.setdefault(digest.read, deque(maxlen=MAX_ANSWERS_PER_TEXT))
        call_ids = [call["id"] for call in answer.get("tool_calls", ())]
        known.appendleft(_AnsweredConversation(ids, prompt_length, attached, digest.exact, call_ids))

    def _digests(self, messages: Sequence[Message], tools: Tools) -> list[_Digest]:
        """Return a digest for each prefix of the conversation.

        A client sends its whole conversation at every turn; only digests of messages that are new are computed.
        """
        start = hashlib.sha256(json.dumps(list(tools), sort_keys=True).encode()).hexdigest()
        known = self._known_digests.value_of_longest([start, *messages]) or []
        digests, last = list(known), known[-1] if known else _Digest(start, start)
        calls = next((m["tool_calls"] for m in reversed(messages[: len(digests)]) if m.get("tool_calls")), ())
        for message in messages[len(digests) :]:
            last = _next_digest(last, message, calls)
            calls = message.get("tool_calls") or calls
            last = _Digest(self._without_stop.get(last.read, last.read), last.exact)
            digests.append(last)
        self._known_digests.add([start, *messages], digests)
        return digests


def _as_sent_back(answer: Message, sampling: Mapping[str, Any]) -> list[Message]:
    """Return the messages as which a client may send an answer back: unchanged, or with a stop string at the end."""
    stops = sampling.get("stop") or ()
    return [answer, *({**answer, "content": f"{answer['content'] or ''}{stop}"} for stop in stops)]


def _with_call_ids(new: Sequence[Message], sent_back: Message, call_ids: Sequence[str]) -> list[Message]:
    """Return the messages after an answer, with the answer's own call ids in tool results, as some templates write ids.

    ``sent_back`` is the answer as the client sent it back, perhaps with other ids.
    """
    results = list(takewhile(lambda message: message["role"] == "tool", new))
    numbers = numbers_of_calls(sent_back.get("tool_calls") or (), results)
    named = zip(numbers, results, strict=True)
    return [*({**m, "tool_call_id": call_ids[n]} if n >= 0 else m for n, m in named), *new[len(results) :]]


def _next_digest(before: _Digest, message: Message, calls: Sequence[Mapping[str, Any]] = ()) -> _Digest:
    """Return the digest of a conversation that continues the one with the digest ``before`` by one message.

    ``calls`` are the latest tool calls before the message.
    """
    keys = message_key(message, calls=calls), message_key(message, exact=True)
    texts = [f"{b}{key}".encode(errors="surrogatepass") for b, key in zip(before, keys, strict=True)]
    return _Digest(*(hashlib.sha256(text).hexdigest() for text in texts))


@dataclass(slots=True, eq=False)
class AnswerTask:
    """A request, and the task that answers it."""

    task: asyncio.Task[Answer] = field(init=False)
    clients: int = 0
    """Number of connections that wait for the answer or are reading it."""
    retries: int = 0
    """Number of retries that got this answer."""
    grace_timer: asyncio.TimerHandle | None = None
    """Timer that cancels the task some time after its latest client has disconnected."""
    answer_sent: bool = False
    """True once the whole answer was sent to a client."""
    abandoned: bool = False
    """True once the task was cancelled because no client came back; later requests do not share its answer."""
    sending_connections: list[asyncio.WriteTransport] = field(default_factory=list)
    """Connections to which the whole answer was written, but which may not have sent all of it yet."""
    call_number: int | None = None
    """Number of the call that generated the answer; None until it has ended."""

    @property
    def was_received(self) -> bool:
        """True if a client has received the whole answer, as far as the write buffers of its connection show."""
        return self.answer_sent or any(not to.get_write_buffer_size() for to in list(self.sending_connections))


@dataclass(slots=True)
class Session:
    """The requests of one sample. Must be used on one event loop.

    Args:
        generate: function that continues token ids; cancelling it ends the generation.
        template: chat template of the model; None means that only token ids are accepted, not messages and texts.
        max_context: maximum number of tokens of a conversation.
        earlier_answers: answers from before a restart, which a client may have received.
        message_images: reads the images in messages; None means that they are refused.
        constraints: see :attr:`april.Config.constraints`.
        stop: stop strings of the requests that have none of their own.
    """

    generate: GenerateFunction
    template: ChatTemplate | None
    max_context: int
    earlier_answers: Sequence[AnsweredCall] = ()
    message_images: MessageImages | None = None
    constraints: str = "hint"
    stop: Sequence[str] = ()
    note_checked: Callable[[bool], Any] = lambda kept: None
    """Function that is called for each answer whose form the client demanded, with True if the answer has the form."""
    conversations: Conversations | None = field(init=False)
    requests: dict[str, list[AnswerTask]] = field(default_factory=dict)
    """Requests by the digest of their body; retries are not listed again."""
    reader: MessageReader = field(default_factory=MessageReader)
    close_reason: str = ""
    """Reason why requests are no longer answered; empty while they are."""
    _answer_counts: dict[str, int] = field(default_factory=dict)
    _shared_sequences: _SharedSequences = field(default_factory=_SharedSequences)

    def __post_init__(self) -> None:
        if self.template is None:
            self.conversations = None
        else:
            answers, images = self.earlier_answers, self.message_images
            self.conversations = Conversations(self.template, answers, self._build_message, images)

    def submit(self, request: ChatRequest, digest: str, *, retry: int) -> AnswerTask:
        """Return the pending answer to a request: that of an earlier equal request, or a new one.

        The earlier answer is shared if this request says that it is a retry, or if no client waits for the earlier
        answer any more. ``retry`` is the number of the retry, from 1 on; 0 means that the request is none.
        """
        if self.close_reason:
            raise RequestError(self.close_reason, 410, "session_closed")
        if request.constraint is not None and self.constraints == "refuse":
            raise RequestError(
                "the request demands a tool call or JSON (tool_choice, response_format), which the setting "
                "constraints: refuse does not allow; leave it out, or set constraints: hint or enforce"
            )
        equal_requests = self.requests.setdefault(digest, [])
        earlier = _answer_to_share(equal_requests, retry)
        if earlier is not None:
            earlier.retries += retry > 0
            return earlier
        answer_task = AnswerTask()
        answer_task.task = asyncio.get_running_loop().create_task(self._answer(request, answer_task))
        equal_requests.append(answer_task)
        # forget a failed request: an equal request starts again, and the failure would keep its arguments in memory
        answer_task.task.add_done_callback(lambda task: equal_requests.remove(answer_task) if _failed(task) else None)
        return answer_task

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of tokens of a request; raises RequestError."""
        return len(self._tokenize(await self._prepared(request))[0])

    def received_calls(self) -> list[int]:
        """Return the numbers of calls whose answers a client has received. May be called from any thread."""
        every = [a for several in list(self.requests.values()) for a in list(several)]
        return [a.call_number for a in every if a.call_number is not None and a.was_received]

    def cancel_if_abandoned(self, answer_task: AnswerTask) -> None:
        """Cancel a request that is not answered yet, if no client waits for it any more."""
        if not answer_task.clients and not answer_task.task.done():
            answer_task.abandoned = True
            answer_task.task.cancel()

    def close(self, why: str) -> None:
        """Stop answering for this reason, and cancel the requests in progress."""
        self.close_reason = why
        for answer_task in [a for several in self.requests.values() for a in several]:
            answer_task.task.cancel()

    async def _answer(self, request: ChatRequest, answer_task: AnswerTask) -> Answer:
        request = await self._prepared(request)
        prompt, attached = self._tokenize(request)
        sampling = request.sampling
        if request.constraint is not None and self.constraints == "enforce":
            call_format = None if self.template is None else self.template.call_format(request.tools)
            sampling = {**sampling, "grammar": grammar_of(request.constraint, request.tools, call_format)}
        generated = await self.generate(prompt, sampling, attached)
        answer_task.call_number = generated.number
        conversation_ids = self._shared_sequences.share(np.concatenate((prompt, generated.tokens)))
        prompt = conversation_ids[: len(prompt)]
        name = answer_id(prompt, None, attached or ())
        number = self._answer_counts[name] = self._answer_counts.get(name, -1) + 1
        made = generated.tokens, generated.logprobs
        answer = self._parse_answer(request, f"{name}{number:02x}", prompt, *made, generated.finish)
        if request.constraint is not None:
            self.note_checked(is_kept(request.constraint, answer))
        if self.conversations is not None and request.token_ids is None and answer.finish != "length":
            self.conversations.remember(request, answer.message, conversation_ids, len(prompt), attached or ())
        return answer

    def _build_message(
        self, name: str, prompt: Int32, tokens: Int32, tools: Tools, sampling: Mapping[str, Any]
    ) -> Message:
        request = ChatRequest(tools=tools, sampling=sampling)
        return self._parse_answer(request, name, prompt, tokens, np.empty(0, np.float32), FinishReason.STOP).message

    async def _prepared(self, request: ChatRequest) -> ChatRequest:
        """Return the request with its stop strings, its images read, and tool results in order; raises RequestError."""
        messages = request.messages
        if self.message_images is None:
            refuse_images(messages)
        else:
            messages = await self.message_images.read(messages)
        named = self.template is not None and self.template.names_results
        sampling = {"stop": self.stop, **request.sampling}
        return replace(request, messages=results_in_order(messages, named=named), sampling=sampling)

    def _tokenize(self, request: ChatRequest) -> tuple[Int32, tuple[Placed, ...] | None]:
        if request.token_ids:
            return np.array(request.token_ids, np.int32), None
        if self.template is None or self.conversations is None:
            raise RequestError("messages and texts need the model's tokenizer: give the scheduler tokenizer=...")
        if request.token_ids is not None:
            return np.array(self.template.encode(str(request.messages[0]["content"])), np.int32), None
        return self.conversations.tokenize(request.messages, request.tools, request.sampling)

    def _parse_answer(
        self, request: ChatRequest, name: str, prompt: Int32, tokens: Int32, logprobs: Float32, finish: FinishReason
    ) -> Answer:
        truncated = finish is FinishReason.LENGTH
        parsed = ParsedAnswer("", "", ())
        if self.template is not None and request.token_ids is not None:
            parsed = ParsedAnswer(self.template.decode(tokens.tolist()), "", ())
        elif self.template is not None:
            parsed = self.template.parse(tokens.tolist(), prompt, request.tools)
        text, stopped_by = parsed.text, None
        stops = request.sampling.get("stop")
        if stops and not truncated:
            # the tokens of an answer with tool calls have texts, such as marks, that no client gets as text
            decoded = text if parsed.calls or self.template is None else self.template.decode(tokens.tolist())
            text, stopped_by = _before_stop(text, decoded, stops)
        tool_calls = tuple(
            ToolCall(number or f"call_{name}_{i}", tool, arguments)
            for i, (number, tool, arguments) in enumerate(parsed.calls)
        )
        return Answer(
            id=name, prompt_ids=prompt, tokens=tokens, logprobs=logprobs, text=text, reasoning=parsed.reasoning,
            tool_calls=tool_calls, stopped_by=stopped_by,
            # a cut answer ends with "length" even after a complete tool call, because the turn is not finished
            finish="length" if truncated else "tool_calls" if tool_calls else "stop",
        )  # fmt: skip


def _before_stop(text: str, decoded: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Return an answer's text before its stop string, and that string; the whole text and None if it has none.

    ``decoded`` is the text of the answer's tokens, with the white space that renderers strip from ``text``. A stop
    string may begin or end with it.
    """
    for searched in (text, decoded):
        if found := [(searched.find(stop), stop) for stop in stops if stop in searched]:
            at, stop = min(found)
            if searched is text:
                return text[:at], stop
            return "" if text == stop.strip() else text.removesuffix(stop.rstrip()), stop
    return text, None


@dataclass(slots=True)
class FunctionChat:
    """``llm.chat`` of one sample: a session whose only client is the rollout function, which never retries."""

    session: Session
    _request_count: int = 0

    async def ask(self, messages: Sequence[Message], tools: Tools, sampling: Mapping[str, Any]) -> Answer:
        """Return the answer to a conversation; raises UsageError if the request is refused."""
        self._request_count += 1
        try:
            request = ChatRequest(messages=read_messages(list(messages)), tools=read_tools(tools), sampling=sampling)
            answer_task = self.session.submit(request, f"chat {self._request_count}", retry=0)
            answer = await asyncio.shield(answer_task.task)  # a caller that is cancelled has not received the answer
        except RequestError as error:
            raise UsageError(f"llm.chat: {error}") from None
        answer_task.answer_sent = True
        return answer

    def close(self) -> list[int]:
        """Stop answering; returns the numbers of calls whose answers the function has received."""
        self.session.close("its rollout function has ended")
        return self.session.received_calls()


def _answer_to_share(equal_requests: Sequence[AnswerTask], retry: int) -> AnswerTask | None:
    """Return the answer to an earlier equal request that a new request gets, too; None if it gets one of its own.

    Clients that wait for several equal requests may retry them all; each of the retries gets another answer.
    """
    pending = [task for task in equal_requests if not (task.was_received or task.abandoned or _failed(task.task))]
    if pending:
        found = min(pending, key=lambda task: task.clients)
        return found if retry or not found.clients else None
    # the client of a retry may have lost an answer that counts as received here
    finished = [task for task in reversed(equal_requests) if retry and task.task.done() and not _failed(task.task)]
    return next((task for task in finished if task.retries < retry), finished[0] if finished else None)


def answer_id(prompt: Int32, number: int | None = None, attached: Sequence[Placed] = ()) -> str:
    """Return an answer's id: a hash of the prompt, and the answer's number among those to the prompt, if given."""
    prompt_bytes = prompt.tobytes() + "".join(placed.attachment.digest for placed in attached).encode()
    return hashlib.sha256(prompt_bytes).hexdigest()[:16] + ("" if number is None else f"{number:02x}")


def _failed(task: asyncio.Task[Answer]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
