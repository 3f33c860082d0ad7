"""A chat request and its answer, as every dialect of the endpoint reads and writes them.

Messages have OpenAI's shape: dicts of ``role``, ``content`` and, by role, ``tool_calls``, ``tool_call_id``, ``name``
and ``reasoning_content``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard

from april.core.tape import Float32, Int32
from april.images.chats import is_image

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]
Finish = Literal["stop", "length", "tool_calls"]
NOT_READ = "content: a part of type {!r} is not supported; april takes text, and images with processor= of the model"
COMMIT_S = 5.0
"""Seconds in which an error still has its own status; then 200 is sent, and what keeps the connection alive."""
ALIVE_S = 10.0
"""The longest silence of an answer that takes long."""


class RequestError(Exception):
    """A request that cannot be answered.

    ``status`` is that of HTTP, ``kind`` is OpenAI's type of the error; ``retry`` says whether the same request may
    succeed later, which the client is told, and ``retry_s`` after how many seconds (0: it may choose).
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A request to answer a conversation, or to continue token ids.

    Attributes:
        messages: the conversation; empty where ``token_ids`` are given.
        tools: OpenAI's tool definitions.
        token_ids: the tokens to continue as they are (``/v1/completions``).
        sampling: the arguments of ``llm.generate`` that the client sets.
        stream: the answer is wanted as server-sent events.
        usage: the stream ends with the counts of tokens.
        logprobs: each token's log-probability is wanted.
        return_token_ids: prompt and answer are wanted as token ids, too.
        model: the name of the model, which is sent back.
    """

    messages: Sequence[Message] = ()
    tools: Tools = ()
    token_ids: Sequence[int] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
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

    ``id`` depends on the prompt's tokens and on which of the equal requests this is, so that it is the same after a
    restart. ``tokens`` int32 [T], ``logprobs`` float32 [T] in nats.
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
    """The stop string that ended the answer; None where it ended otherwise."""

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
    """A message's content: text, or a list of parts where there are images among them.

    Raises RequestError for a part that is neither.
    """
    if not has_images(content):
        text_of(content)
        return content
    return [part if is_image(part) else {"type": "text", "text": text_of([part])} for part in content]


def has_images(content: Any) -> TypeGuard[list[Any]]:
    """Return whether a message's content has images."""
    return isinstance(content, list) and any(isinstance(part, dict) and is_image(part) for part in content)


def text_of(content: Any) -> str:
    """The text of a message's content: a string, None, or a list of text parts.

    Raises RequestError for a part that is no text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"content must be a string or a list of parts, got {type(content).__name__}")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS:
            raise RequestError(NOT_READ.format(kind))
        texts.append(str(part.get(TEXT_PARTS[kind]) or ""))
    return "".join(texts)


TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of content parts that are text, and the field that holds it."""


def key_of(message: Message) -> str:
    """What a client keeps of a message when it sends it back.

    Clients add nulls, write "" for null, format arguments anew and drop the reasoning: none of that is a change.
    """
    calls = [
        (call.get("id"), call["function"]["name"], _plain(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    said = [message["role"], _said(message.get("content")), calls, message.get("tool_call_id")]
    return json.dumps(said, sort_keys=True, ensure_ascii=False)


def _said(content: Any) -> Any:
    """The text, or what is said and shown: an image by the hash of its content."""
    if not has_images(content):
        return text_of(content)
    return [{"image": part["picture"].attachment.digest} if is_image(part) else part["text"] for part in content]


def _plain(arguments: Any) -> Any:
    """Arguments as a value, if they are JSON."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments
