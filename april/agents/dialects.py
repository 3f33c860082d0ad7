"""The API formats (dialects) of the endpoint: OpenAI's chat and text completions, and Anthropic's messages.

Each dialect reads a body into a ChatRequest, writes an Answer as one body or as a stream, and formats errors as its
clients expect. The table in ``client_fields`` says how each request field is treated; none is dropped silently.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from april.agents.chat import (
    Answer,
    ChatRequest,
    Constraint,
    Message,
    ReadMessages,
    RequestError,
    checked_content,
    has_images,
    text_of,
)
from april.agents.client_fields import CHAT, MESSAGES, TEXT, RequestBody
from april.agents.constraints import read_format, read_tool_choice
from april.images.chat_images import MARK, MEDIA_FIELDS, media_field

Json = dict[str, Any]
SseEvent = tuple[str, Any]
"""A server-sent event: its name (empty for none), and the data, which is JSON unless it is a string."""


def read_messages(value: Any) -> list[Message]:
    """Return a conversation in OpenAI's format; raises RequestError."""
    if not isinstance(value, list) or not value:
        raise RequestError("messages must be a list that is not empty")
    return value if isinstance(value, ReadMessages) else [read_message(i, given) for i, given in enumerate(value)]


def read_message(i: int, given: Any) -> Json:
    """Return message ``i`` of a conversation in OpenAI's format; raises RequestError."""
    if not isinstance(given, dict) or given.get("role") not in ROLES:
        raise RequestError(f"messages[{i}] must be an object whose role is one of {', '.join(ROLES)}")
    message = {**given, "role": "system" if given["role"] == "developer" else given["role"]}
    message["content"] = checked_content(message.get("content"))
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise RequestError(f"messages[{i}].tool_calls must be a list")
    if message.get("function_call"):
        raise RequestError(f"messages[{i}].function_call is not supported; use tool_calls")
    if not MEDIA_FIELDS.isdisjoint(message) and (name := media_field(message)) is not None:
        raise RequestError(f"messages[{i}].{name} is not supported; images are parts of the content")
    for name in TEXT_FIELDS:
        if not isinstance(message.get(name), str | None):
            raise RequestError(f"messages[{i}].{name} must be a string")
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"messages[{i}].tool_calls: each must have a function with a name")
        if not isinstance(function.get("arguments"), (str, dict)):
            raise RequestError(f"messages[{i}].tool_calls: arguments must be JSON text")
        if not isinstance(call.get("id"), str | None):
            raise RequestError(f"messages[{i}].tool_calls: an id must be a string")
    if calls:
        message["tool_calls"] = [_with_exact_arguments(call) for call in calls]
    return message


class ExactArguments(dict[str, Any]):
    """Arguments of a tool call that a client sent as an object; compared as JSON, because in Python 1 equals True.

    The JSON is made at once, since callers of ``llm.chat`` may edit nested values later.
    """

    def __init__(self, arguments: Json) -> None:
        super().__init__(arguments)
        self.text = json.dumps(arguments)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExactArguments) and self.text == other.text

    def __ne__(self, other: object) -> bool:
        return not self == other


def _with_exact_arguments(call: Json) -> Json:
    given = call["function"]["arguments"]
    exact = ExactArguments(given) if isinstance(given, dict) else given
    return {**call, "function": {**call["function"], "arguments": exact}}


TEXT_FIELDS = ("name", "tool_call_id", "reasoning_content")
ROLES = ("system", "developer", "user", "assistant", "tool")


def read_tools(value: Any) -> list[Json]:
    """Return tool definitions in OpenAI's format; raises RequestError."""
    tools = []
    for i, tool in enumerate(value or ()):
        function = tool.get("function") if isinstance(tool, dict) else None
        named = isinstance(function, dict) and isinstance(function.get("name"), str)
        if not named or tool.get("type") != "function":
            raise RequestError(f"tools[{i}] must be of type function, with a name; others are not supported")
        tools.append(tool)
    return tools


def constraint_of(tools: tuple[str, ...], schema: Any) -> Constraint | None:
    """Return the demand for a call of one of ``tools``, or for JSON of ``schema``; None without a demand."""
    return None if not tools and schema is None else Constraint(tools, schema)


class OpenAIChat:
    """The dialect of ``/v1/chat/completions``."""

    ping = b": ping\n\n"
    """Bytes that keep a stream alive."""
    history = "messages"
    """Name of the field with messages that ``read_one`` can read one by one; empty if the format has no such field."""

    def read_one(self, i: int, message: Any) -> list[Json]:
        """Read message ``i`` of ``history``; raises RequestError."""
        return [read_message(i, message)]

    def read(self, body: Json) -> ChatRequest:
        """Read a request, whose messages may be parsed already (ReadMessages). Raises RequestError."""
        b = RequestBody(body, CHAT)
        messages = read_messages(b.take("messages", list))
        tools, demanded = read_tool_choice(b.take("tool_choice", (str, dict)), read_tools(b.take("tools", list)))
        limit, older_limit = b.take("max_completion_tokens", int), b.take("max_tokens", int)
        options = b.take("stream_options", dict, {})
        return b.request(
            messages=messages,
            tools=tools,
            sampling=b.sampling(older_limit if limit is None else limit, "stop"),
            constraint=constraint_of(demanded, read_format(b.take("response_format", dict), "response_format")),
            usage=bool(options.get("include_usage")),
            logprobs=b.take("logprobs", bool, False),
            return_token_ids=b.take("return_token_ids", bool, False),
        )

    def response_body(self, answer: Answer, request: ChatRequest) -> Json:
        """Return the body of a ``chat.completion``."""
        choice: Json = {"index": 0, "message": {"refusal": None, **answer.message}, "finish_reason": answer.finish}
        choice["logprobs"] = {"content": self._logprobs(answer)} if request.logprobs else None
        found = {**self._head(answer, request, "chat.completion"), "choices": [choice], "usage": token_usage(answer)}
        if request.return_token_ids:
            found["prompt_token_ids"] = answer.prompt_ids.tolist()
            choice["token_ids"] = answer.tokens.tolist()
        return found

    def stream(self, answer: Answer, request: ChatRequest) -> Iterator[SseEvent]:
        """Yield chunks: the text, each tool call, the finish reason, and token counts if wanted."""
        head = self._head(answer, request, "chat.completion.chunk")
        delta = answer.message
        calls = delta.pop("tool_calls", ())
        choice: Json = {"index": 0, "delta": delta, "finish_reason": None}
        if request.logprobs:
            choice["logprobs"] = {"content": self._logprobs(answer)}
        if request.return_token_ids:
            head["prompt_token_ids"] = answer.prompt_ids.tolist()
            choice["token_ids"] = answer.tokens.tolist()
        usage: Json = {"usage": None} if request.usage else {}
        yield "", {**head, "choices": [choice], **usage}
        for index, call in enumerate(calls):  # each alone, since some clients read only the first call of a chunk
            delta = {"tool_calls": [{"index": index, **call}]}
            yield "", {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}], **usage}
        yield "", {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": answer.finish}], **usage}
        if request.usage:
            yield "", {**head, "choices": [], "usage": token_usage(answer)}
        yield "", "[DONE]"

    def error(self, error: RequestError) -> Json:
        """Return the body of an OpenAI error."""
        return {"error": {"message": str(error), "type": error.kind, "param": None, "code": None}}

    @staticmethod
    def _head(answer: Answer, request: ChatRequest, kind: str) -> Json:
        return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": 0, "model": request.model}

    @staticmethod
    def _logprobs(answer: Answer) -> list[Json]:
        pairs = zip(answer.tokens.tolist(), answer.logprobs.tolist(), strict=True)
        return [{"token": f"token_id:{t}", "logprob": p, "bytes": None, "top_logprobs": []} for t, p in pairs]


def token_usage(answer: Answer) -> Json:
    """Return the token counts in OpenAI's format."""
    prompt, completion = len(answer.prompt_ids), len(answer.tokens)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class OpenAIText(OpenAIChat):
    """The dialect of ``/v1/completions``, which continues text or token ids without a chat template."""

    history = ""

    def read(self, body: Json) -> ChatRequest:
        """Read a request."""
        b = RequestBody(body, TEXT)
        prompt = b.take("prompt", (str, list))
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        ids = isinstance(prompt, list) and bool(prompt) and all(type(i) is int and 0 <= i < 1 << 31 for i in prompt)
        if not ids and not (isinstance(prompt, str) and prompt):
            raise RequestError("prompt must be one non-empty text or one non-empty list of token ids")
        logprobs = b.take("logprobs", int)
        if logprobs is not None and logprobs > 1:
            raise RequestError("logprobs: only the log-probabilities of the sampled tokens are available (0 or 1)")
        options = b.take("stream_options", dict, {})
        return b.request(
            messages=() if ids else ({"role": "user", "content": prompt},),
            token_ids=prompt if ids else (),
            sampling=b.sampling(b.take("max_tokens", int, 16), "stop"),
            constraint=constraint_of((), read_format(b.take("response_format", dict), "response_format")),
            usage=bool(options.get("include_usage")),
            logprobs=logprobs is not None,
            return_token_ids=b.take("return_token_ids", bool, False),
        )

    def response_body(self, answer: Answer, request: ChatRequest) -> Json:
        """Return the body of a ``text_completion``."""
        return {**self._text(answer, request, answer.finish), "usage": token_usage(answer)}

    def stream(self, answer: Answer, request: ChatRequest) -> Iterator[SseEvent]:
        """Yield the text in one chunk, and the token counts if wanted."""
        yield "", self._text(answer, request, answer.finish)
        if request.usage:
            yield "", {**self._text(answer, request, answer.finish), "choices": [], "usage": token_usage(answer)}
        yield "", "[DONE]"

    @staticmethod
    def _text(answer: Answer, request: ChatRequest, finish: str) -> Json:
        choice: Json = {"index": 0, "text": answer.text, "finish_reason": finish, "logprobs": None}
        if request.logprobs:
            choice["logprobs"] = {
                "tokens": [f"token_id:{t}" for t in answer.tokens.tolist()],
                "token_logprobs": answer.logprobs.tolist(),
                "top_logprobs": None,
                "text_offset": [],
            }
        if request.return_token_ids:
            choice |= {"token_ids": answer.tokens.tolist(), "prompt_token_ids": answer.prompt_ids.tolist()}
        head = {"id": f"cmpl-{answer.id}", "object": "text_completion", "created": 0, "model": request.model}
        return {**head, "choices": [choice]}


def refuse_image_marks(i: int, blocks: Iterable[Any]) -> None:
    """Raise RequestError for an image block without a source, which in Anthropic's format must hold the image."""
    if any(block == MARK for block in blocks):
        raise RequestError(f"messages[{i}]: an image has no source; give its content in base64 in source")


class Anthropic:
    """The dialect of ``/v1/messages``."""

    ping = b'event: ping\ndata: {"type": "ping"}\n\n'
    history = "messages"

    def read_one(self, i: int, message: Any) -> list[Json]:
        """Read message ``i`` of ``messages``; each tool result in it becomes a message of its own."""
        return [read_message(i, converted) for converted in self._message(i, message)]

    def read(self, body: Json) -> ChatRequest:
        """Read a request."""
        b = RequestBody(body, MESSAGES)
        system = text_of(b.take("system", (str, list)))
        messages = ReadMessages([{"role": "system", "content": system}] if system else [])
        given = b.take("messages", list, [])
        if isinstance(given, ReadMessages):
            messages += given
        else:
            messages += [message for i, sent in enumerate(given) for message in self.read_one(i, sent)]
        tools = [self._tool(i, tool) for i, tool in enumerate(b.take("tools", list, []))]
        tools, demanded = read_tool_choice(b.take("tool_choice", dict), read_tools(tools))
        older, config = b.take("output_format", dict), b.take("output_config", dict, {})
        return b.request(
            messages=read_messages(messages),
            tools=tools,
            sampling=b.sampling(b.take("max_tokens", int), "stop_sequences"),
            constraint=constraint_of(demanded, read_format(config.get("format") or older, "output_config.format")),
        )

    @staticmethod
    def _tool(i: int, tool: Any) -> Json:
        if not isinstance(tool, dict) or not isinstance(tool.get("name"), str) or "input_schema" not in tool:
            wants = "a name and an input_schema"
            raise RequestError(f"tools[{i}] must have {wants}; tools that run at the server are not supported")
        description = tool.get("description", "")
        function = {"name": tool["name"], "description": description, "parameters": tool["input_schema"]}
        return {"type": "function", "function": function}

    @staticmethod
    def _message(i: int, message: Any) -> Iterator[Json]:
        """Convert one message to OpenAI's format, in which tool results are messages of their own."""
        if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
            raise RequestError(f"messages[{i}] must be an object whose role is user, assistant or system")
        content = message.get("content")
        if isinstance(content, str):
            yield {"role": message["role"], "content": content}
            return
        if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
            raise RequestError(f"messages[{i}].content must be a string or a list of blocks")
        refuse_image_marks(i, content)
        parts: list[Json] = []
        reasoning, calls, results = "", [], 0
        for part in content:
            match part.get("type"):
                case "text" | "image":
                    parts.append(part)
                case "thinking":
                    reasoning += text_of([{"type": "text", "text": part.get("thinking")}])
                case "redacted_thinking":
                    pass
                case "tool_use":
                    given = part.get("input", {})
                    if not isinstance(given, dict):
                        raise RequestError(f"messages[{i}]: input of a tool_use block must be an object")
                    function = {"name": part.get("name"), "arguments": json.dumps(given)}
                    calls.append({"id": part.get("id"), "type": "function", "function": function})
                case "tool_result":
                    results += 1
                    result = part.get("content")
                    refuse_image_marks(i, result if isinstance(result, list) else ())
                    result = result if has_images(result) else text_of(result)
                    yield {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": result}
                case kind:
                    raise RequestError(f"messages[{i}]: a block of type {kind!r} is not supported")
        said = parts if has_images(parts) else text_of(parts)
        if said or calls or not results:
            found: Json = {"role": message["role"], "content": said}
            found |= {"tool_calls": calls} if calls else {}
            yield found | ({"reasoning_content": reasoning} if reasoning else {})

    def response_body(self, answer: Answer, request: ChatRequest) -> Json:
        """Return the body of a ``message``."""
        stop = "stop_sequence" if answer.stopped_by is not None else STOP_REASONS[answer.finish]
        usage = {"input_tokens": len(answer.prompt_ids), "output_tokens": len(answer.tokens)}
        return {
            "id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": request.model,
            "content": self._blocks(answer), "stop_reason": stop, "stop_sequence": answer.stopped_by, "usage": usage,
        }  # fmt: skip

    @staticmethod
    def _blocks(answer: Answer) -> list[Json]:
        thinking = [{"type": "thinking", "thinking": answer.reasoning, "signature": ""}] if answer.reasoning else []
        text = [{"type": "text", "text": answer.text}] if answer.text else []
        uses = [
            {"type": "tool_use", "id": c.id, "name": c.name, "input": json.loads(c.arguments)}
            for c in answer.tool_calls
        ]
        return [*thinking, *text, *uses]

    def stream(self, answer: Answer, request: ChatRequest) -> Iterator[SseEvent]:
        """Yield the events of a message, with one delta for each block."""
        whole = self.response_body(answer, request)
        start = {**whole, "content": [], "stop_reason": None, "stop_sequence": None}
        yield named_event(type="message_start", message={**start, "usage": {**whole["usage"], "output_tokens": 1}})
        for i, block in enumerate(whole["content"]):
            empty, delta = EMPTY[block["type"]](block)
            yield named_event(type="content_block_start", index=i, content_block=empty)
            yield named_event(type="content_block_delta", index=i, delta=delta)
            yield named_event(type="content_block_stop", index=i)
        end = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
        yield named_event(type="message_delta", delta=end, usage=whole["usage"])
        yield named_event(type="message_stop")

    def error(self, error: RequestError) -> Json:
        """Return the body of an Anthropic error."""
        kind = ANTHROPIC_KINDS.get(error.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(error)}}


STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ANTHROPIC_KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
Dialect = OpenAIChat | Anthropic
"""An API format of the endpoint; OpenAIText and OpenAIResponses are subclasses of OpenAIChat."""
EMPTY: Mapping[str, Any] = {
    "text": lambda b: ({**b, "text": ""}, {"type": "text_delta", "text": b["text"]}),
    "thinking": lambda b: ({**b, "thinking": ""}, {"type": "thinking_delta", "thinking": b["thinking"]}),
    "tool_use": lambda b: ({**b, "input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(b["input"])}),
}
"""For each block type, a function that returns the block without its content, and the delta with the content."""


def named_event(**data: Any) -> SseEvent:
    return data["type"], data
