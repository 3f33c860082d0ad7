"""The API format of OpenAI's ``/v1/responses``, with items instead of messages and a stream of named events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from april.agents.chat import Answer, ChatRequest, RequestError
from april.agents.client_fields import RESPONSES, RequestBody
from april.agents.constraints import read_format, read_tool_choice
from april.agents.dialects import Json, OpenAIChat, SseEvent, constraint_of, read_messages, read_tools


class OpenAIResponses(OpenAIChat):
    """The dialect of ``/v1/responses``; each request must have its whole conversation, since the server stores none."""

    history = ""

    def read(self, body: Json) -> ChatRequest:
        """Read a request."""
        b = RequestBody(body, RESPONSES)
        instructions = b.take("instructions", str)
        given = b.take("input", (str, list))
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        messages = [{"role": "system", "content": instructions}] if instructions else []
        messages += self._messages(items)
        tools = [self._tool(i, tool) for i, tool in enumerate(b.take("tools", list, []))]
        tools, demanded = read_tool_choice(b.take("tool_choice", (str, dict)), read_tools(tools))
        return b.request(
            messages=read_messages(messages),
            tools=tools,
            sampling=b.sampling(b.take("max_output_tokens", int), "stop"),
            constraint=constraint_of(demanded, read_format(b.take("text", dict, {}).get("format"), "text.format")),
        )

    @staticmethod
    def _tool(i: int, tool: Any) -> Json:
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise RequestError(f"tools[{i}] must be of type function; tools that run at the server are not supported")
        return {"type": "function", "function": {k: v for k, v in tool.items() if k not in ("type", "strict")}}

    @staticmethod
    def _messages(items: Any) -> list[Json]:
        """Convert items to messages; the text and the tool calls of one assistant turn become one message."""
        messages: list[Json] = []

        def assistant() -> Json:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            return messages[-1]

        for i, item in enumerate(items or ()):
            if not isinstance(item, dict):
                raise RequestError(f"input[{i}] must be an object")
            match item.get("type", "message"):
                case "message" if item.get("role") == "assistant" and messages and messages[-1].get("tool_calls"):
                    messages.append({"role": "assistant", "content": item.get("content")})
                case "message":
                    messages.append({"role": item.get("role"), "content": item.get("content")})
                case "function_call":
                    function = {"name": item.get("name"), "arguments": item.get("arguments")}
                    calls = assistant().setdefault("tool_calls", [])
                    calls.append({"id": item.get("call_id"), "type": "function", "function": function})
                case "function_call_output":
                    output = item.get("output")
                    messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
                case "reasoning":
                    pass
                case kind:
                    raise RequestError(f"input[{i}]: an item of type {kind!r} is not supported")
        return messages

    def response_body(self, answer: Answer, request: ChatRequest) -> Json:
        """Return the body of a ``response``."""
        cut = answer.finish == "length"
        prompt, completion = len(answer.prompt_ids), len(answer.tokens)
        return {
            "id": f"resp_{answer.id}", "object": "response", "created_at": 0, "model": request.model,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "error": None, "instructions": None, "metadata": {}, "parallel_tool_calls": True, "tool_choice": "auto",
            "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in request.tools],
            "temperature": None, "top_p": None, "output": self._items(answer),
            "usage": {
                "input_tokens": prompt, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": completion,
                "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": prompt + completion,
            },
        }  # fmt: skip

    @staticmethod
    def _items(answer: Answer) -> list[Json]:
        items: list[Json] = []
        status = "incomplete" if answer.finish == "length" else "completed"
        if answer.reasoning:
            text = {"type": "reasoning_text", "text": answer.reasoning}
            items.append({"type": "reasoning", "id": f"rs_{answer.id}", "summary": [], "content": [text]})
        if answer.text or not answer.tool_calls:
            part = {"type": "output_text", "text": answer.text, "annotations": []}
            message = {"type": "message", "id": f"msg_{answer.id}", "role": "assistant", "status": status}
            items.append({**message, "content": [part]})
        for call in answer.tool_calls:
            named = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
            items.append({"type": "function_call", "id": f"fc_{call.id}", "status": status, **named})
        return items

    def stream(self, answer: Answer, request: ChatRequest) -> Iterator[SseEvent]:
        """Yield the events of a response, with one delta for each item."""
        for number, (name, data) in enumerate(self._events(self.response_body(answer, request))):
            yield name, {"type": name, "sequence_number": number, **data}

    @staticmethod
    def _events(whole: Json) -> Iterator[tuple[str, Json]]:
        begun = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        yield "response.created", {"response": begun}
        yield "response.in_progress", {"response": begun}
        for index, item in enumerate(whole["output"]):
            at = {"output_index": index, "item_id": item["id"]}
            empty = {"status": "in_progress"} if "status" in item else {}
            if item["type"] == "message":
                (part,) = item["content"]
                yield "response.output_item.added", {"output_index": index, "item": {**item, **empty, "content": []}}
                at |= {"content_index": 0}
                yield "response.content_part.added", {**at, "part": {**part, "text": ""}}
                yield "response.output_text.delta", {**at, "delta": part["text"], "logprobs": []}
                yield "response.output_text.done", {**at, "text": part["text"], "logprobs": []}
                yield "response.content_part.done", {**at, "part": part}
            elif item["type"] == "function_call":
                yield "response.output_item.added", {"output_index": index, "item": {**item, **empty, "arguments": ""}}
                arguments = item["arguments"]
                yield "response.function_call_arguments.delta", {**at, "delta": arguments}
                yield "response.function_call_arguments.done", {**at, "arguments": arguments, "name": item["name"]}
            else:
                yield "response.output_item.added", {"output_index": index, "item": item}
            yield "response.output_item.done", {"output_index": index, "item": item}
        ended = "response.incomplete" if whole["status"] == "incomplete" else "response.completed"
        yield ended, {"response": whole}
