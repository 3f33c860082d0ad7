"""Messages to tokens and back, by the package ``renderers`` (extra ``agents``).

Invariant: what the model generated is never tokenised again. A conversation that goes on is the token ids so far and
what its template writes behind them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from april.agents.chat import Message, RequestError, Tools, has_images, text_of
from april.errors import ConfigError
from april.extras import require
from april.images.chats import MARK, is_image

if TYPE_CHECKING:
    from april.images.placing import Images


@dataclass(frozen=True, slots=True)
class Parsed:
    """What generated tokens say: text, reasoning, and tool calls (id of the format or None, name, arguments)."""

    text: str
    reasoning: str
    calls: tuple[tuple[str | None, str, Any], ...]


class Template:
    """The chat template of a model.

    Args:
        tokenizer: the model's, with ``apply_chat_template`` unless ``renderers`` knows the model.
        config: a ``renderers.RendererConfig``; None means the one for the tokenizer's name.
        images: writes messages that have images, by the chat template of the model's processor.
    """

    def __init__(self, tokenizer: Any, config: Any = None, images: Images | None = None) -> None:
        require("an agent's messages", "renderers", extra="agents")
        import renderers

        self._tokenizer = tokenizer
        self._images = images
        try:
            self._renderer: Any = renderers.create_renderer(tokenizer, config)
        except Exception:
            if images is None or config is not None:
                raise
            # a model that reads images and has no renderer of its own
            self._renderer = renderers.create_renderer(tokenizer, renderers.DefaultRendererConfig())
        self._ok = renderers.ToolCallParseStatus.OK
        self._writes_tools: dict[str, bool] = {}
        self._bridges = not isinstance(self._renderer, renderers.DefaultRenderer)

    def render(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """The token ids of a conversation, up to where the assistant begins to write.

        Raises RequestError for messages or tools that the template does not take.
        """
        plain = [_plain(m) for m in messages]
        if self._images is not None and _shows(messages):
            return self._with_images(plain, tools)
        try:
            ids: list[int] = self._renderer.render_ids(plain, tools=list(tools) or None, add_generation_prompt=True)
            if tools:
                self._require_tools(plain, tools, ids)
        except RequestError:
            raise
        except Exception as error:
            raise RequestError(f"the chat template does not take these messages: {error}") from error
        return ids

    def _with_images(self, plain: list[dict[str, Any]], tools: Tools) -> list[int]:
        """The tokens of messages with images: one placeholder for each."""
        assert self._images is not None
        try:
            ids: list[int] = self._images.render(plain, list(tools) or None, "the request").tolist()
            blind = not tools or ids != self._images.render(plain, None, "the request").tolist()
        except ConfigError as error:
            raise RequestError(str(error)) from error
        if not blind:
            raise RequestError(NO_TOOLS)
        return ids

    def _require_tools(self, messages: list[dict[str, Any]], tools: Tools, ids: list[int]) -> None:
        if ids == self._renderer.render_ids(messages, tools=None, add_generation_prompt=True):
            raise RequestError(NO_TOOLS)

    def extend(
        self, prompt: list[int], completion: list[int], said: Sequence[Message], new: Sequence[Message], tools: Tools
    ) -> list[int] | None:
        """``prompt + completion`` and what the template writes for the ``new`` messages behind them.

        ``said`` are the messages before, the completion's own the last of them. None means that the template would
        write the earlier turns otherwise, once these follow.
        """
        plain = [_plain(m) for m in new]
        if any(m["role"] == "assistant" for m in plain):
            return None
        if self._bridges and not _shows(new):
            bridged = self._renderer.bridge_to_next_turn(prompt, completion, plain, tools=list(tools) or None)
            return None if bridged is None else list(bridged.token_ids)
        return self._by_difference(prompt, completion, [_plain(m) for m in said], plain, tools)

    def _by_difference(
        self,
        prompt: list[int],
        completion: list[int],
        said: list[dict[str, Any]],
        new: list[dict[str, Any]],
        tools: Tools,
    ) -> list[int] | None:
        """What the template writes behind the last answer, as text that it writes with ``new`` and not without."""
        mark = "\u241e answer \u241e"  # stands for the answer; a template may strip white space, but not this
        before = [*said[:-1], {"role": "assistant", "content": mark}]
        without, whole = self._text(before, tools, False), self._text([*before, *new], tools, True)
        if without is None or whole is None or whole.count(mark) != 1:
            return None
        close = without[without.index(mark) + len(mark) :]
        head = without[: len(without) - len(close)]
        if not whole.startswith(head + close):
            return None
        tail = self._tokenizer.encode(whole[len(head) :], add_special_tokens=False)
        if completion and tail and completion[-1] == tail[0]:
            tail = tail[1:]  # the model has ended its turn itself
        return [*prompt, *completion, *tail]

    def _text(self, messages: list[dict[str, Any]], tools: Tools, go_on: bool) -> str | None:
        try:
            if self._images is not None:
                return self._images.text(messages, list(tools) or None, go_on=go_on)
            text: str = self._tokenizer.apply_chat_template(
                messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=go_on
            )
        except Exception:  # whatever a template raises: it does not take these messages
            return None
        return text

    def parse(self, tokens: list[int], prompt: list[int], tools: Tools) -> Parsed:
        """Read what was generated; a call that is malformed stays text, as it was written."""
        parsed = self._renderer.parse_response(tokens, tools=list(tools) or None, prompt_ids=prompt)
        good = [c for c in parsed.tool_calls if c.status is self._ok]
        raw = "".join(c.raw for c in parsed.tool_calls if c.status is not self._ok)
        return Parsed(
            text=parsed.content + raw,
            reasoning=parsed.reasoning_content or "",
            calls=tuple((c.id, c.name, c.arguments) for c in good),
        )

    def encode(self, text: str) -> list[int]:
        """Text as it stands, as token ids (``/v1/completions``)."""
        return list(self._tokenizer.encode(text))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


def _plain(message: Message) -> dict[str, Any]:
    """A message with its content as text, and without what is null."""
    plain = {name: value for name, value in message.items() if value is not None}
    content = message.get("content")
    plain["content"] = [_marked(part) for part in content] if has_images(content) else text_of(content)
    return plain


def _marked(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """A content part as templates know it; of an image, that there is one."""
    return MARK if is_image(part) else part


def _shows(messages: Sequence[Message]) -> bool:
    """Return whether there are images in these messages."""
    return any(has_images(message.get("content")) for message in messages)


NO_TOOLS = (
    "the model's chat template does not write tools, so the model would not see them; describe them in the system "
    "message, or use a model whose template has tools"
)
