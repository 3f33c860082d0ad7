"""Reads the images in an agent's messages once, and places them among the tokens that a template writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from april.agents.chat import NOT_READ, Message, RequestError, has_images
from april.concurrency.worker_threads import in_thread
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
        images: places images among tokens, as the model's processor does.
        reader: reads images in the forms that the sender may use; a client may not send paths.
        prompt: prompt of the sample; parts ``{"type": "image"}`` without content stand for its images, in order.
    """

    def __init__(self, images: Images, reader: Reader, prompt: Prompt) -> None:
        self._images = images
        self._reader = reader
        self._prompt = prompt

    async def read(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages, in which each image part now has its ``picture``; raises RequestError."""
        if not any(has_images(message.get("content")) for message in messages):
            return messages
        return await in_thread(self._read, messages)

    def _read(self, messages: Sequence[Message]) -> list[Message]:
        own = iter(self._images.of_prompt(self._prompt.token_ids, self._prompt.attached))
        parts = [part for message in messages for part in _images_in(message)]
        try:
            self._reader.check_count(len(parts), ASKED)
            pictures = iter([self._picture(part, own, f"{ASKED}, image {i}") for i, part in enumerate(parts, 1)])
        except ConfigError as error:
            raise RequestError(str(error)) from error
        return [_with_pictures(message, pictures) for message in messages]

    def _picture(self, part: Message, own: Iterator[Picture], where: str) -> Picture:
        item = of_part(part, where)
        return _own(own, where) if item is None else self._reader.read(item, where)

    def place(
        self, token_ids: Sequence[int], have: int, attached: Sequence[Placed], new: Sequence[Message]
    ) -> tuple[Int32, tuple[Placed, ...]]:
        """Return the tokens and everything attached to them; images of ``new`` go behind the first ``have`` tokens."""
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
        raise ConfigError(f"{where} has no content, but the prompt has no more images to which it could refer")
    return picture


def _with_pictures(message: Message, pictures: Any) -> Message:
    if not has_images(message.get("content")):
        return message
    content = [{"type": "image", "picture": next(pictures)} if is_image(part) else part for part in message["content"]]
    return {**message, "content": content}


def refuse_images(messages: Sequence[Message]) -> None:
    """Raise RequestError if a message has an image, for a model without an image reader."""
    for message in messages:
        for part in _images_in(message):
            raise RequestError(NOT_READ.format(part.get("type")))
