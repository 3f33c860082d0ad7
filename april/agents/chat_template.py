"""Converts messages to tokens and back, with the package ``renderers`` (extra ``agents``).

Invariant: generated tokens are never tokenised again. To continue a conversation, april keeps its tokens and appends
the tokens that the template writes for the new messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from april.agents.chat import Message, RequestError, Tools, has_images, image_parts, text_of
from april.core.tape import Int32
from april.errors import ConfigError
from april.images.chat_images import MARK, is_image
from april.text.install_command import require

if TYPE_CHECKING:
    from april.images.image_placer import ImagePlacer


LAST_TURN_TOKENS = 1 << 11
"""Number of tokens at the end of a prompt that are searched first for the beginning of its last message."""
LATEST_MESSAGES = 8
"""Minimum number of messages at the end of a long conversation that are rendered in place of the whole conversation."""


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """The content of generated tokens: text, reasoning, and tool calls as (id or None, name, arguments as JSON)."""

    text: str
    reasoning: str
    calls: tuple[tuple[str | None, str, str], ...]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a template writes an answer that is one tool call whose arguments are a JSON object.

    The answer is ``begin``, the tool's name, ``middle``, the arguments, and ``end``. ``marks`` maps the special tokens
    in these texts, such as ``<tool_call>``, to their ids, because a model could also spell them with ordinary tokens.
    """

    begin: str
    middle: str
    end: str
    marks: Mapping[str, int] = field(default_factory=dict)

    def form(self, name: str, schema: Any) -> dict[str, Any]:
        """Return the part of a structural tag that allows calls of the tool with this name, and nothing else."""
        arguments = {"type": "json_schema", "json_schema": schema}
        before, after = self._forms(f"{self.begin}{name}{self.middle}"), self._forms(self.end)
        return {"type": "sequence", "elements": [*before, arguments, *after]}

    def _forms(self, text: str) -> list[dict[str, Any]]:
        parts = re.split(f"({'|'.join(map(re.escape, self.marks))})", text) if self.marks else [text]
        return [
            {"type": "const_string", "value": part} if (token := self.marks.get(part)) is None
            else {"type": "token", "token": token}
            for part in parts if part
        ]  # fmt: skip


class ChatTemplate:
    """The chat template of a model.

    Args:
        tokenizer: tokenizer of the model; it needs ``apply_chat_template`` if ``renderers`` does not know the model.
        config: a ``renderers.RendererConfig``; None means the one for the tokenizer's name.
        images: renders messages with images by the chat template of the model's processor; None if there are no images.
    """

    def __init__(self, tokenizer: Any, config: Any = None, images: ImagePlacer | None = None) -> None:
        require("an agent's messages", "renderers", "jsonschema", extra="agents")
        import renderers

        self._tokenizer = tokenizer
        self._images = images
        try:
            self._renderer: Any = renderers.create_renderer(tokenizer, config)
        except Exception:
            if images is None or config is not None:
                raise
            # the package has no renderer for this vision model
            self._renderer = renderers.create_renderer(tokenizer, renderers.DefaultRendererConfig())
        self._ok = renderers.ToolCallParseStatus.OK
        self._bridges = not isinstance(self._renderer, renderers.DefaultRenderer)
        self.names_results: bool = isinstance(self._renderer, (renderers.GptOssRenderer, renderers.InklingRenderer))
        """True if each tool result must have its tool's name, because the renderer writes names instead of call ids."""
        self._turn_ends = np.array(self._renderer.get_stop_token_ids(), np.int32)
        self._whole_conversations = False
        """True once the template wrote other tokens after a whole conversation than after only its latest turns."""
        self._compared: dict[tuple[Any, ...], int] = {}
        """Number of messages up to which :meth:`_tokens_after` need not check, by the roles of the next messages."""

    def render(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Return the token ids of a conversation, up to the start of the assistant's answer.

        Raises RequestError for messages or tools that the template does not accept.
        """
        plain = [_plain(m) for m in messages]
        if self._images is not None and image_parts(messages):
            return self._with_images(plain, tools)
        try:
            ids: list[int] = self._renderer.render_ids(plain, tools=list(tools) or None, add_generation_prompt=True)
            if tools and ids == self._renderer.render_ids(plain, tools=None, add_generation_prompt=True):
                raise RequestError(NO_TOOLS)
        except RequestError:
            raise
        except Exception as error:
            raise RequestError(f"the chat template rejects these messages: {error}") from error
        return ids

    def _with_images(self, plain: list[dict[str, Any]], tools: Tools) -> list[int]:
        """Return the tokens of messages with images, with one placeholder for each image."""
        assert self._images is not None
        try:
            ids: list[int] = self._images.render(plain, list(tools) or None, "the request").tolist()
            blind = not tools or ids != self._images.render(plain, None, "the request").tolist()
        except ConfigError as error:
            raise RequestError(str(error)) from error
        if not blind:
            raise RequestError(NO_TOOLS)
        return ids

    def extend(
        self, ids: Int32, prompt_length: int, earlier: Sequence[Message], new: Sequence[Message], tools: Tools
    ) -> Int32 | None:
        """Return ``ids`` followed by the tokens that the template writes for the ``new`` messages.

        ``ids`` are the tokens of the ``earlier`` messages: a prompt of ``prompt_length`` tokens, and an answer. None is
        returned if the template would write the earlier messages differently once the new ones follow.
        """
        plain = [_plain(m) for m in new]
        if any(m["role"] == "assistant" for m in plain):
            return None
        if self._bridges and not image_parts(new):
            start = self._last_turn(ids[:prompt_length])
            prompt, answer = ids[start:prompt_length].tolist(), ids[prompt_length:].tolist()
            bridged = self._renderer.bridge_to_next_turn(prompt, answer, plain, tools=list(tools) or None)
            return None if bridged is None else np.concatenate((ids[:start], np.array(bridged.token_ids, np.int32)))
        tail = self._tokens_after(earlier, plain, tools)
        if tail and prompt_length < len(ids) and ids[-1] == tail[0]:
            tail = tail[1:]  # the token that ends the turn is already there: the model has generated it
        return None if tail is None else np.concatenate((ids, np.array(tail, np.int32)))

    def _last_turn(self, prompt: Int32) -> int:
        """Return the index of the last but one end-of-turn token, where a prompt's last message begins; 0 if none.

        Renderers need only this end of a prompt, so the cost of a turn does not grow with the conversation.
        """
        for start in (max(0, len(prompt) - LAST_TURN_TOKENS), 0):
            ends = np.flatnonzero((prompt[start:, None] == self._turn_ends).any(1))
            if len(ends) > 1:
                return start + int(ends[-2])
        return 0

    def _tokens_after(self, earlier: Sequence[Message], new: list[dict[str, Any]], tools: Tools) -> list[int] | None:
        """Return the tokens that follow the last of the ``earlier`` messages, an answer, when ``new`` is appended.

        To save time, only the system messages and the latest turns of a long conversation are rendered. This is allowed
        if the template writes the same tokens after the whole conversation, and after one that is twice as long: a
        template may number messages or images, or change its output at some number of messages. The check is made for
        each new combination of roles, and again whenever the conversation has doubled.
        """
        short = 0 if self._whole_conversations else _latest_turns(earlier)
        if not short:
            return self._difference(earlier, new, tools)
        found = self._difference([*(m for m in earlier[:short] if m["role"] == "system"), *earlier[short:]], new, tools)
        kinds = (*(m["role"] for m in new), bool(image_parts(new)), bool(image_parts(earlier[:short])), bool(tools))
        if found is not None and len(earlier) <= self._compared.get(kinds, 0):
            return found
        begin = next((i for i, message in enumerate(earlier) if message["role"] == "user"), 0)
        turns = list(earlier[begin:short])
        longer = [*earlier[:short], *turns * (len(earlier) // max(1, len(turns)) + 1), *earlier[short:]]
        whole = self._difference(earlier, new, tools)
        self._whole_conversations |= not whole == found == self._difference(longer, new, tools)
        self._compared[kinds] = len(longer)
        return whole

    def _difference(self, earlier: Sequence[Message], new: list[dict[str, Any]], tools: Tools) -> list[int] | None:
        mark = "\u241e answer \u241e"  # placeholder for the answer, which no template strips as it strips white space
        before = [*(_plain(m) for m in earlier[:-1]), {"role": "assistant", "content": mark}]
        without, whole = self._text(before, tools, False), self._text([*before, *new], tools, True)
        if without is None or whole is None or whole.count(mark) != 1:
            return None
        close = without[without.index(mark) + len(mark) :]
        head = without[: len(without) - len(close)]
        if not whole.startswith(head + close):
            return None
        return list(self._tokenizer.encode(whole[len(head) :], add_special_tokens=False))

    def _text(self, messages: list[dict[str, Any]], tools: Tools, go_on: bool) -> str | None:
        try:
            if self._images is not None:
                return self._images.text(messages, list(tools) or None, add_answer_start=go_on)
            text: str = self._tokenizer.apply_chat_template(
                messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=go_on
            )
        except Exception:  # whatever a template raises, it does not accept these messages
            return None
        return text

    def call_format(self, tools: Tools) -> CallFormat | None:
        """Return how the template writes a tool call; None if it does not write the arguments as one JSON object."""
        name, argument = "tool_20_name", "argument_20_name"  # placeholders to find in the rendered text
        asked = {"role": "user", "content": "?"}
        function = {"name": name, "arguments": {argument: 1}}
        calls = [{"id": "0", "type": "function", "function": function}]
        call = {"role": "assistant", "content": "", "tool_calls": calls}
        try:
            prompt = self.render([asked], tools)
            whole = self._renderer.render_ids([asked, call], tools=list(tools) or None, add_generation_prompt=False)
        except Exception:  # whatever a template raises, it does not support this call
            return None
        ends = self._renderer.get_stop_token_ids()
        answer = list(takewhile(lambda token: token not in ends, whole[len(prompt) :]))
        text = str(self._tokenizer.decode(answer))
        arguments = re.search(rf'\{{\s*"{argument}":\s*1\s*\}}', text)
        if whole[: len(prompt)] != prompt or arguments is None or text.count(name) != 1:
            return None
        at = text.index(name)
        added: dict[str, int] = getattr(self._tokenizer, "get_added_vocab", dict)()
        marks = {mark: token for mark, token in added.items() if token in answer}
        return CallFormat(text[:at], text[at + len(name) : arguments.start()], text[arguments.end() :], marks)

    def parse(self, tokens: list[int], prompt: Int32, tools: Tools) -> ParsedAnswer:
        """Parse generated tokens; a malformed tool call stays in the text unchanged."""
        last_turn = prompt[self._last_turn(prompt) :].tolist()
        try:
            parsed = self._renderer.parse_response(tokens, tools=list(tools) or None, prompt_ids=last_turn)
        except (ValueError, RecursionError):  # raised for numbers with thousands of digits, or deep nesting
            return ParsedAnswer(self._tokenizer.decode(tokens[:-1]), "", ())
        text, calls = parsed.content, []
        for call in parsed.tool_calls:
            arguments = json_object(call.arguments) if call.status is self._ok else None
            if arguments is None or not (isinstance(call.name, str) and call.name) or not json_object({call.name: 1}):
                text += call.raw
            else:
                calls.append((call.id, call.name, arguments))
        return ParsedAnswer(text=text, reasoning=parsed.reasoning_content or "", calls=tuple(calls))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text without any chat template (``/v1/completions``)."""
        return list(self._tokenizer.encode(text))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


def json_object(arguments: Any) -> str | None:
    """Return the arguments of a tool call as strict JSON, or None if they are not a JSON object.

    Python's parser also accepts NaN, 1e400 and half of a surrogate pair, which clients cannot read.
    """
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    return arguments if isinstance(arguments, str) else json.dumps(value)


def _latest_turns(messages: Sequence[Message]) -> int:
    """Return the index of the last user message that is followed by at least LATEST_MESSAGES - 1 other messages.

    0 means that the conversation is too short to render only its latest turns.
    """
    before = range(len(messages) - LATEST_MESSAGES, LATEST_MESSAGES, -1)
    return next((i for i in before if messages[i]["role"] == "user"), 0)


def _plain(message: Message) -> dict[str, Any]:
    """Return a message without null fields, with its content as text, or as parts if it has images."""
    plain = {name: value for name, value in message.items() if value is not None}
    content = message.get("content")
    # chat templates know images as {"type": "image"}
    marked = [MARK if is_image(part) else part for part in content] if has_images(content) else None
    plain["content"] = text_of(content) if marked is None else marked
    return plain


NO_TOOLS = (
    "the model's chat template ignores tools, so the model would not see them; describe them in the system message, or "
    "use a model whose template supports tools"
)
