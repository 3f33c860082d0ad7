"""Types and helpers for chat requests and their answers, which all API formats of the agents' endpoint share.
``chat_template`` turns them into tokens.

Messages have OpenAI's format: dicts of ``role``, ``content`` and, by role, ``tool_calls``, ``tool_call_id``, ``name``
and ``reasoning_content``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard
from unicodedata import normalize

from april.core.tape import Float32, Int32
from april.errors import ConfigError
from april.images.chat_images import is_image, text_of_part

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]


class ReadMessages(list[Message]):
    """Messages that are already checked and converted to OpenAI's format, so that nobody converts them again."""


Finish = Literal["stop", "length", "tool_calls"]
COMMIT_S = 5.0
"""Seconds after which a slow answer begins with status 200 and keep-alive bytes; a later error keeps that status."""
KEEPALIVE_S = 10.0
"""Seconds between two writes that keep the connection of a slow answer alive."""
DISTRIBUTION: Mapping[str, Sequence[Any]] = {
    "temperature": (), "top_p": (), "top_k": (-1, 0), "min_p": (0,), "top_a": (0,), "typical_p": (1,),
    "min_tokens": (0,), "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,),
    "logit_bias": ({},), "seed": (),
}  # fmt: skip
"""Request fields that change the sampling distribution, each with the values that have no effect."""


class RequestError(Exception):
    """A request that cannot be answered.

    ``status`` is the HTTP status, and ``kind`` is OpenAI's error type. ``retry`` is True if the same request may
    succeed later; ``retry_s`` is the number of seconds to wait before that, or 0 if the client chooses it.
    """

    def __init__(
        self, message: str, status: int = 400, kind: str = "invalid_request_error", *, retry: bool = False,
        retry_s: int = 0,
    ):  # fmt: skip
        super().__init__(message)
        self.retry_s = retry_s
        self.status = status
        self.kind = kind
        self.retry = retry


@dataclass(frozen=True, slots=True)
class Constraint:
    """The form that a client demands of an answer: tool calls, or text that matches a JSON schema.

    Attributes:
        tools: names of the allowed tools if the answer must call at least one; empty if no call is demanded.
        schema: JSON schema that the text of an answer without tool calls must match; None if any text is allowed.
    """

    tools: tuple[str, ...] = ()
    schema: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A request to answer a conversation, or to continue token ids.

    Attributes:
        messages: conversation to answer; empty if ``token_ids`` are given.
        token_ids: prompt of ``/v1/completions`` as token ids; () if that prompt is text, None for a chat.
        sampling: sampling settings from the client: arguments of ``llm.generate``, and fields of DISTRIBUTION.
        usage: True if the stream ends with token counts.
        return_token_ids: True if prompt and answer are wanted as token ids, too.
    """

    messages: Sequence[Message] = ()
    tools: Tools = ()
    token_ids: Sequence[int] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    constraint: Constraint | None = None
    stream: bool = False
    usage: bool = False
    logprobs: bool = False
    return_token_ids: bool = False
    model: str = ""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of an answer; ``arguments`` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to a request.

    ``id`` is made of a hash of the prompt and the number of earlier answers to that prompt, so a restart keeps it.
    ``tokens`` is int32 [T], ``logprobs`` is float32 [T] in nats. ``prompt_ids`` is read-only: later answers share it.
    """

    id: str
    prompt_ids: Int32
    tokens: Int32
    logprobs: Float32
    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    finish: Finish
    stopped_by: str | None = None
    """Stop string that ended the answer; None if no stop string ended it."""

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of the assistant."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text or None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in self.tool_calls
            ]
        return message


def checked_content(content: Any) -> Any:
    """Return a message's content as text, or as parts if it has images; text parts then have the type ``text``.

    The parts are copies, because a caller of ``llm.chat`` may edit its own later. Raises RequestError for a part that
    is neither text nor an image.
    """
    if content is None or isinstance(content, str):
        return content
    if not has_images(content):
        return text_of(content)
    return [
        dict(part) if isinstance(part, dict) and is_image(part) else {"type": "text", "text": text_of([part])}
        for part in content
    ]


def has_images(content: Any) -> TypeGuard[list[Any]]:
    """Return True if a message's content has images."""
    return isinstance(content, list) and any(isinstance(part, dict) and is_image(part) for part in content)


def image_parts(messages: Sequence[Message]) -> list[Message]:
    """Return the parts of messages that are images, in order."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part for part in parts if isinstance(part, dict) and is_image(part)]


def text_of(content: Any) -> str:
    """Return the text of a message's content, which is a string, None, or a list of text parts.

    Raises RequestError for a part that is not text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"content must be a string or a list of parts, got {type(content).__name__}")
    try:
        return "".join([text_of_part(part, "content") for part in content])
    except ConfigError as error:
        raise RequestError(str(error)) from error


def message_key(message: Message, *, calls: Sequence[Mapping[str, Any]] = (), exact: bool = False) -> str:
    """Return a key of a message that stays the same when a client sends the message back.

    Clients add nulls, write "" for null, reformat arguments and drop the reasoning; the key ignores these changes.
    Unless ``exact``, the key also ignores white space around the text and at line ends, the Unicode normalization form,
    and the ids of tool calls, which some clients replace. ``calls`` are the tool calls before the message: a tool
    result whose id is among them gets the index of its call in the key, in place of the id.
    """
    own = [
        (call.get("id") if exact else "", call["function"]["name"], _parsed_arguments(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    answered = message.get("tool_call_id")
    if answered is not None and not exact:
        answered = next((number for number, call in enumerate(calls) if call.get("id") == answered), answered)
    content = message.get("content")
    if not has_images(content):
        content = text_of(content)
        content = content if exact else "\n".join([line.rstrip() for line in content.strip().splitlines()])
    else:
        content = [{"image": part["picture"].attachment.digest} if is_image(part) else part["text"] for part in content]
    parts = [message["role"], content, own, answered]
    if message["role"] != "assistant":
        parts.append(message.get("name"))  # some templates render it; in answers, frameworks add names of their own
    key = json.dumps(parts, sort_keys=True, ensure_ascii=False)
    return key if exact else normalize("NFC", key)


def results_in_order(messages: Sequence[Message], *, named: bool = False) -> list[Message]:
    """Return the messages with the results of parallel tool calls in the order of the calls.

    A client may send results in the order in which its tools finish. Many templates do not render call ids, so only the
    order tells the model which call a result answers. ``named`` adds the tool's name to each result.
    """
    found = list(messages)
    for i, message in enumerate(messages):
        if not (calls := message.get("tool_calls")):
            continue
        end = i + 1
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        results = messages[i + 1 : end]
        pairs = sorted(zip(numbers_of_calls(calls, results), results, strict=True), key=lambda pair: pair[0])
        if not pairs or pairs[0][0] < 0:
            continue  # the client's ids do not tell which call a result answers
        for place, (number, result) in enumerate(pairs, i + 1):
            unnamed = named and not result.get("name")
            found[place] = {**result, "name": calls[number]["function"]["name"]} if unnamed else result
    return found


def numbers_of_calls(calls: Sequence[Mapping[str, Any]], results: Sequence[Message]) -> list[int]:
    """Return for each tool result the index of the call that it answers; -1 if no call has the result's id.

    If several calls share an id, the results with that id answer them in order.
    """
    left: dict[str | None, list[int]] = {}
    for number, call in enumerate(calls):
        left.setdefault(call.get("id"), []).append(number)
    found = []
    for result in results:
        numbers = left.get(result.get("tool_call_id"), [-1])
        found.append(numbers.pop(0) if len(numbers) > 1 else numbers[0])
    return found


def _parsed_arguments(arguments: Any) -> Any:
    """Return the arguments as a value if they are JSON, otherwise unchanged."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
