"""Clients without an SDK: what they write in each dialect, and what they make of an answer, whole or as a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from april.testing.conformance.subject import Broken
from tests.gateway_suite.script import TOOL

Json = dict[str, Any]
SseEvent = tuple[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """An answer, alike in all dialects; ``finish`` is stop, length or tool_calls, or what else was said."""

    id: str
    text: str
    calls: tuple[tuple[str, str, str], ...]
    """(id, name, arguments as JSON text) of each tool call."""
    finish: str
    prompt_tokens: int
    completion_tokens: int

    @property
    def meaning(self) -> tuple[Any, ...]:
        """Everything but the ids."""
        calls = [(name, json.loads(arguments)) for _, name, arguments in self.calls]
        return self.text, calls, self.finish, self.prompt_tokens, self.completion_tokens


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation: texts of the user, answers, and (id of the call, result) of tools."""

    turns: tuple[str | Said | tuple[str, str], ...]
    system: str = ""
    tools: bool = False

    def then(self, *turns: str | Said | tuple[str, str]) -> Talk:
        """The conversation with these behind it."""
        return replace(self, turns=(*self.turns, *turns))


class Dialect(Protocol):
    """A way to ask and to read."""

    route: str

    def body(self, talk: Talk, max_tokens: int | None, *, rewritten: bool) -> Json:
        """The request; ``rewritten``: with nulls, "" for null, and arguments that are formatted anew."""
        ...

    def whole(self, body: Any) -> Said:
        """Read an answer."""
        ...

    def stream(self, events: Sequence[SseEvent]) -> Said:
        """Read a stream."""
        ...


def arguments_of(text: str, rewritten: bool) -> str:
    """A call's arguments as a client sends them back."""
    return json.dumps(json.loads(text), sort_keys=True, indent=1) if rewritten else text


class Chat:
    """OpenAI's chat completions."""

    route = "/chat/completions"

    def body(self, talk: Talk, max_tokens: int | None, *, rewritten: bool) -> Json:
        """The request."""
        messages: list[Json] = [{"role": "system", "content": talk.system}] if talk.system else []
        for turn in talk.turns:
            if isinstance(turn, str):
                messages.append({"role": "user", "content": turn})
            elif isinstance(turn, Said):
                calls = [
                    {"id": i, "type": "function", "function": {"name": n, "arguments": arguments_of(a, rewritten)}}
                    for i, n, a in turn.calls
                ]
                message: Json = {"role": "assistant", "content": turn.text or ("" if rewritten else None)}
                message |= {"tool_calls": calls} if calls else {}
                message |= {"refusal": None, "audio": None, "function_call": None} if rewritten else {}
                messages.append(message)
            else:
                messages.append({"role": "tool", "tool_call_id": turn[0], "content": turn[1]})
        tools = {"tools": [{"type": "function", "function": TOOL}]} if talk.tools else {}
        limit = {} if max_tokens is None else {"max_tokens": max_tokens}
        return {"model": "policy", "messages": messages, **tools, **limit}

    def whole(self, body: Any) -> Said:
        """Read a ``chat.completion``."""
        choice = body["choices"][0]
        return self._said(body["id"], choice["message"], choice["finish_reason"], body["usage"])

    @staticmethod
    def _said(name: str, message: Json, finish: str, usage: Json) -> Said:
        calls = [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ()]
        return Said(
            id=name, text=message.get("content") or "", calls=tuple(calls), finish=finish,
            prompt_tokens=usage["prompt_tokens"], completion_tokens=usage["completion_tokens"],
        )  # fmt: skip

    def stream(self, events: Sequence[SseEvent]) -> Said:
        """Read chunks."""
        name, text, finish, usage = "", "", "", {"prompt_tokens": 0, "completion_tokens": 0}
        calls: dict[int, list[str]] = {}
        for _, data in events:
            if data == "[DONE]":
                continue
            name, usage = data["id"], data.get("usage") or usage
            for choice in data["choices"]:
                text += choice["delta"].get("content") or ""
                finish = choice["finish_reason"] or finish
                for call in choice["delta"].get("tool_calls") or ():
                    parts = calls.setdefault(call["index"], ["", "", ""])
                    parts[0] += call.get("id") or ""
                    parts[1] += call["function"].get("name") or ""
                    parts[2] += call["function"].get("arguments") or ""
        if not events or events[-1][1] != "[DONE]":
            raise Broken(f"the stream of {self.route} does not end with [DONE]")
        made = [{"id": i, "function": {"name": n, "arguments": a}} for i, n, a in calls.values()]
        return self._said(name, {"content": text, "tool_calls": made}, finish, usage)


class Text:
    """OpenAI's text completions: a conversation is its texts, one behind the other."""

    route = "/completions"

    def body(self, talk: Talk, max_tokens: int | None, *, rewritten: bool) -> Json:
        """The request; without a limit an answer would have 16 tokens."""
        turns = (talk.system, *talk.turns)
        texts = [turn if isinstance(turn, str) else turn.text if isinstance(turn, Said) else turn[1] for turn in turns]
        return {"model": "policy", "prompt": "\n".join(filter(None, texts)), "max_tokens": max_tokens or 2000}

    def whole(self, body: Any) -> Said:
        """Read a ``text_completion``."""
        choice, usage = body["choices"][0], body["usage"]
        return Said(
            id=body["id"], text=choice["text"], calls=(), finish=choice["finish_reason"],
            prompt_tokens=usage["prompt_tokens"], completion_tokens=usage["completion_tokens"],
        )  # fmt: skip

    def stream(self, events: Sequence[SseEvent]) -> Said:
        """Read chunks."""
        if not events or events[-1][1] != "[DONE]":
            raise Broken(f"the stream of {self.route} does not end with [DONE]")
        chunks = [data for _, data in events[:-1]]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        finishes = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        whole = {"text": "".join(choice["text"] for choice in choices), "finish_reason": finishes[-1]}
        return self.whole({"id": chunks[-1]["id"], "choices": [whole], "usage": chunks[-1]["usage"]})


class Messages:
    """Anthropic's messages."""

    route = "/messages"

    def body(self, talk: Talk, max_tokens: int | None, *, rewritten: bool) -> Json:
        """The request."""
        messages: list[Json] = []
        for turn in talk.turns:
            if isinstance(turn, str):
                messages.append({"role": "user", "content": [{"type": "text", "text": turn}] if rewritten else turn})
            elif isinstance(turn, Said):
                nulls = {"citations": None} if rewritten else {}
                text = [{"type": "text", "text": turn.text, **nulls}] if turn.text else []
                uses = [
                    {"type": "tool_use", "id": i, "name": n, "input": json.loads(arguments_of(a, rewritten))}
                    for i, n, a in turn.calls
                ]
                messages.append({"role": "assistant", "content": [*text, *uses]})
            else:
                result = {"type": "tool_result", "tool_use_id": turn[0], "content": turn[1]}
                messages.append({"role": "user", "content": [result]})
        system = {"system": talk.system} if talk.system else {}
        tool = {"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}
        tools = {"tools": [tool]} if talk.tools else {}
        return {"model": "policy", "max_tokens": max_tokens or 2000, "messages": messages, **system, **tools}

    def whole(self, body: Any) -> Said:
        """Read a ``message``."""
        blocks = body["content"]
        finishes = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
        return Said(
            id=body["id"], text="".join(b["text"] for b in blocks if b["type"] == "text"),
            calls=tuple((b["id"], b["name"], json.dumps(b["input"])) for b in blocks if b["type"] == "tool_use"),
            finish=finishes.get(body["stop_reason"], str(body["stop_reason"])),
            prompt_tokens=body["usage"]["input_tokens"], completion_tokens=body["usage"]["output_tokens"],
        )  # fmt: skip

    def stream(self, events: Sequence[SseEvent]) -> Said:
        """Read the events of a message."""
        message: Json = {"usage": {}}
        blocks: dict[int, Json] = {}
        for name, data in events:
            match name:
                case "message_start":
                    message = {**data["message"]}
                case "content_block_start":
                    blocks[data["index"]] = {**data["content_block"], "json": ""}
                case "content_block_delta" if data["delta"]["type"] == "text_delta":
                    blocks[data["index"]]["text"] += data["delta"]["text"]
                case "content_block_delta" if data["delta"]["type"] == "input_json_delta":
                    blocks[data["index"]]["json"] += data["delta"]["partial_json"]
                case "message_delta":
                    message |= data["delta"] | {"usage": {**message["usage"], **data["usage"]}}
        if not events or events[-1][0] != "message_stop":
            raise Broken("the stream of /messages does not end with message_stop")
        for block in blocks.values():
            if block["type"] == "tool_use":
                block["input"] = json.loads(block["json"] or "{}")
        return self.whole({**message, "content": list(blocks.values())})


class Responses:
    """OpenAI's responses."""

    route = "/responses"

    def body(self, talk: Talk, max_tokens: int | None, *, rewritten: bool) -> Json:
        """The request."""
        items: list[Json] = []
        for turn in talk.turns:
            if isinstance(turn, str):
                content: Any = [{"type": "input_text", "text": turn}] if rewritten else turn
                items.append({"type": "message", "role": "user", "content": content})
            elif isinstance(turn, Said):
                if turn.text:
                    nulls = {"annotations": None} if rewritten else {}
                    part: Json = {"type": "output_text", "text": turn.text, **nulls}
                    items.append({"type": "message", "role": "assistant", "content": [part]})
                items += [
                    {"type": "function_call", "call_id": i, "name": n, "arguments": arguments_of(a, rewritten)}
                    for i, n, a in turn.calls
                ]
            else:
                items.append({"type": "function_call_output", "call_id": turn[0], "output": turn[1]})
        limit = {} if max_tokens is None else {"max_output_tokens": max_tokens}
        system = {"instructions": talk.system} if talk.system else {}
        return {"model": "policy", "input": items, **system, **limit} | (
            {"tools": [{"type": "function", **TOOL}]} if talk.tools else {}
        )

    def whole(self, body: Any) -> Said:
        """Read a ``response``."""
        texts, calls = [], []
        for item in body["output"]:
            if item["type"] == "message":
                texts += [part["text"] for part in item["content"]]
            elif item["type"] == "function_call":
                calls.append((item["call_id"], item["name"], item["arguments"]))
        cut = body["status"] == "incomplete"
        return Said(
            id=body["id"], text="".join(texts), calls=tuple(calls),
            finish="length" if cut else "tool_calls" if calls else "stop",
            prompt_tokens=body["usage"]["input_tokens"], completion_tokens=body["usage"]["output_tokens"],
        )  # fmt: skip

    def stream(self, events: Sequence[SseEvent]) -> Said:
        """Read the events of a response: its end has all of it, which the deltas must agree with."""
        if not events or events[-1][0] not in ("response.completed", "response.incomplete"):
            raise Broken("the stream of /responses does not end with response.completed or response.incomplete")
        said = self.whole(events[-1][1]["response"])
        deltas = "".join(d["delta"] for name, d in events if name == "response.output_text.delta")
        if deltas != said.text:
            raise Broken(f"the deltas of /responses say {deltas!r}, its end {said.text!r}")
        return said


DIALECTS: Mapping[str, Dialect] = {"chat": Chat(), "text": Text(), "messages": Messages(), "responses": Responses()}


@dataclass(slots=True)
class Reply:
    """What came back: status, headers, and all bytes so far."""

    status: int
    headers: Mapping[str, str]
    raw: bytearray = field(default_factory=bytearray)
    cut: str = ""
    """The error with which the connection ended; empty where it ended well."""

    @property
    def text(self) -> str:
        """The body as text."""
        return self.raw.decode(errors="replace")

    @property
    def json(self) -> Any:
        """The body as JSON; None where it is none."""
        try:
            return json.loads(self.raw)
        except ValueError:
            return None

    def events(self) -> Iterator[SseEvent]:
        """The body as server-sent events, without what keeps the connection alive."""
        for block in self.text.replace("\r\n", "\n").split("\n\n"):
            lines = [line.partition(":")[::2] for line in block.split("\n")]
            name = "".join(value.strip() for field_, value in lines if field_ == "event")
            data = "\n".join(value.removeprefix(" ") for field_, value in lines if field_ == "data")
            if data and name != "ping":
                yield name, data if data == "[DONE]" else json.loads(data)
