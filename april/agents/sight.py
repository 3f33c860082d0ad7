"""The images of an agent's messages: read once, and placed among the tokens that a template writes for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from april.agents.chat import NOT_READ, Message, RequestError, has_images
from april.beside import in_thread
from april.core.attachments import Placed
from april.core.tape import Int32
from april.core.types import Prompt
from april.errors import ConfigError
from april.images.chats import is_image, of_part
from april.images.placing import Images
from april.images.reading import Picture, Reader

ASKED = "the request"


class Sight:
    """Reads the images of one sample's messages.

    Args:
        images: the model's.
        reader: what an image may be: a client's cannot be a path.
        prompt: the sample's; parts ``{"type": "image"}`` without content stand for its images, in order.
    """

    def __init__(self, images: Images, reader: Reader, prompt: Prompt) -> None:
        self._images = images
        self._reader = reader
        self._prompt = prompt

    async def read(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The same messages, with each image as a part that has its ``picture``; raises RequestError."""
        if not any(has_images(message.get("content")) for message in messages):
            return messages
        return await in_thread(self._read, messages)

    def _read(self, messages: Sequence[Message]) -> list[Message]:
        own = iter(self._images.of_prompt(self._prompt.token_ids, self._prompt.attached))
        items = [of_part(part) for message in messages for part in _images_in(message)]
        try:
            self._reader.check_count(len(items), ASKED)
            pictures = iter([
                _own(own, f"{ASKED}, image {i}") if item is None else self._reader.read(item, f"{ASKED}, image {i}")
                for i, item in enumerate(items, 1)
            ])  # fmt: skip
        except ConfigError as error:
            raise RequestError(str(error)) from error
        return [_with_pictures(message, pictures) for message in messages]

    def place(
        self, token_ids: Sequence[int], have: int, attached: Sequence[Placed], new: Sequence[Message]
    ) -> tuple[Int32, tuple[Placed, ...]]:
        """The tokens, and all that is attached to them; the images of ``new`` stand behind the first ``have``."""
        pictures = [part["picture"] for message in new for part in _images_in(message)]
        try:
            return self._images.place_behind(np.array(token_ids, np.int32), have, attached, pictures, ASKED)
        except ConfigError as error:
            raise RequestError(str(error)) from error


def _images_in(message: Message) -> list[dict[str, Any]]:
    content = message.get("content")
    return [part for part in content if is_image(part)] if has_images(content) else []


def _own(own: Any, where: str) -> Picture:
    picture: Picture | None = next(own, None)
    if picture is None:
        raise ConfigError(f"{where} has no content, and the prompt has no further image that it could stand for")
    return picture


def _with_pictures(message: Message, pictures: Any) -> Message:
    if not has_images(message.get("content")):
        return message
    content = [{"type": "image", "picture": next(pictures)} if is_image(part) else part for part in message["content"]]
    return {**message, "content": content}


def refuse_images(messages: Sequence[Message]) -> None:
    """Raise RequestError where there are images, and nobody to read them."""
    for message in messages:
        for part in _images_in(message):
            raise RequestError(NOT_READ.format(part.get("type")))
