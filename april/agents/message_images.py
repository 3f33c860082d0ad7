"""Reads the images in an agent's messages, and inserts their placeholder tokens among the tokens of a template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from april.agents.chat import Message, RequestError, has_images, image_parts
from april.concurrency.worker_threads import run_in_thread
from april.core.attachments import Placed
from april.core.tape import Int32
from april.core.types import Prompt
from april.errors import ConfigError
from april.images.chat_images import NOT_READ, image_of_part, is_image
from april.images.image_placer import ImagePlacer
from april.images.image_reader import ImageReader, Picture

REQUEST = "the request"


@dataclass(frozen=True, slots=True)
class MessageImages:
    """Reads the images of one sample's messages.

    Message parts ``{"type": "image"}`` without content refer to the images of the ``prompt`` in order. The ``reader``
    for clients refuses file paths.
    """

    images: ImagePlacer
    reader: ImageReader
    prompt: Prompt

    async def read(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Read all images and return the messages, with each image in its part's field ``picture``.

        Raises RequestError for images that cannot be read.
        """
        if not image_parts(messages):
            return messages
        return await run_in_thread(self._read, messages)

    def _read(self, messages: Sequence[Message]) -> list[Message]:
        prompt_pictures = iter(self.images.prompt_pictures(self.prompt.token_ids, self.prompt.attached))
        parts = image_parts(messages)
        try:
            self.reader.check_count(len(parts), REQUEST)
            read = [self._read_part(part, prompt_pictures, f"{REQUEST}, image {i}") for i, part in enumerate(parts, 1)]
            pictures = iter(read)
        except ConfigError as error:
            raise RequestError(str(error)) from error
        return [_with_pictures(message, pictures) for message in messages]

    def _read_part(self, part: Message, prompt_pictures: Iterator[Picture], where: str) -> Picture:
        item = image_of_part(part, where)
        picture = next(prompt_pictures, None) if item is None else self.reader.read(item, where)
        if picture is None:
            raise ConfigError(f"{where} has no content, but the prompt has no more images to which it could refer")
        return picture

    def place(
        self, token_ids: Int32, placed_tokens: int, attached: Sequence[Placed], new_messages: Sequence[Message]
    ) -> tuple[Int32, tuple[Placed, ...]]:
        """Place images of ``new_messages`` behind ``placed_tokens`` tokens; return all tokens and all attachments."""
        pictures = [part["picture"] for part in image_parts(new_messages)]
        try:
            return self.images.place_after(token_ids, placed_tokens, attached, pictures, REQUEST)
        except ConfigError as error:
            raise RequestError(str(error)) from error


def _with_pictures(message: Message, pictures: Any) -> Message:
    if not has_images(message.get("content")):
        return message
    content = [{"type": "image", "picture": next(pictures)} if is_image(part) else part for part in message["content"]]
    return {**message, "content": content}


def refuse_images(messages: Sequence[Message]) -> None:
    """Raise RequestError if a message has an image, for a model without an image reader."""
    for part in image_parts(messages):
        raise RequestError(f"content: {NOT_READ.format(part.get('type'))}")
