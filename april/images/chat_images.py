"""Takes images out of chat messages, leaving a mark in place of each image; refuses other media.

A mark is a content part ``{"type": "image"}``, which chat templates know. Content parts are read in the formats of
OpenAI, Anthropic, transformers and data sets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from april.errors import ConfigError
from april.text.server_text import clean

MARK: Mapping[str, Any] = {"type": "image"}
_IMAGE_TYPES = ("image", "image_url", "input_image")
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of text parts, each with the field that holds the text."""
_IMAGE_FIELDS = ("image_url", "image", "source", "url", "path", "bytes", "base64", "data")
MEDIA_FIELDS = frozenset((
    *_IMAGE_TYPES, "images", "image_urls", "audio", "audio_url", "input_audio", "video", "videos", "video_url", "file",
    "files", "attachments",
))  # fmt: skip
"""Fields in which other software accepts media next to the content of a message or the text of a part; here they are
refused."""
NOT_READ = "a part of type {!r} is not supported; april takes text, and images with processor= of the model"


def is_image(part: Mapping[str, Any]) -> bool:
    """Return True if a content part is an image."""
    kind = part.get("type")
    return kind in _IMAGE_TYPES if kind is not None else any(part.get(name) is not None for name in _IMAGE_TYPES)


def media_field(fields: Mapping[str, Any]) -> str | None:
    """Return the name of a field of MEDIA_FIELDS that is neither null nor empty; None if there is none."""
    for name in sorted(MEDIA_FIELDS.intersection(fields)):
        value = fields[name]
        if value is not None and (not hasattr(value, "__len__") or len(value)):
            return name
    return None


def text_of_part(part: Any, where: str) -> str:
    """Return the text of a content part that is not an image; a part without a type is a text part.

    Raises ConfigError for a part of another type, a text part without a text, and media next to the text.
    """
    if not isinstance(part, Mapping):
        raise ConfigError(f"{where}: a part must have a type and a text or an image, got {type(part).__name__}")
    kind = "text" if part.get("type") is None else part["type"]
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise ConfigError(f"{where}: {NOT_READ.format(kind)}")
    if (name := media_field(part)) is not None:
        raise ConfigError(f"{where}: a text part has {name!r}; april takes text, and images in parts of their own")
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise ConfigError(f"{where}: the text of a part must be a string, got {type(text).__name__}")
    return text


def image_of_part(part: Mapping[str, Any], where: str) -> Any:
    """Return the image of a content part, in one of the forms that ImageReader reads.

    Returns None for ``{"type": "image"}`` without other fields, which stands for an image of the prompt.

    Raises:
        ConfigError: the part has a text, too, or it has other fields, but none with an image.
    """
    if part.get("text"):
        raise ConfigError(f"{where}: a part has an image and a text; give each a part of its own")
    for name in _IMAGE_FIELDS:
        if (found := part.get(name)) is not None:
            if name in ("base64", "data"):
                return {"type": "base64", "data": found}
            return {"bytes": part.get("bytes"), "path": part.get("path")} if name in ("bytes", "path") else found
    if part == MARK:
        return None
    fields = [f"{clean(name, 32)}{' of null' if part[name] is None else ''}" for name in part if name != "type"]
    raise ConfigError(
        f"{where}: a part of type {clean(part.get('type'), 32)} has {', '.join(fields[:8]) or 'no other field'} and no "
        'image; give it as a data: URL in image_url, or in base64 in source ({"type": "image"} alone stands for an '
        "image of the prompt)"
    )


def extract_images(
    messages: Sequence[Mapping[str, Any]], images: Iterable[Any], where: str
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return the messages with marks in place of images, and all images in their order.

    Args:
        messages: messages of a chat.
        images: images for the parts without an image of their own, in order. If there are no such parts, these images
            are put at the beginning of the first message of the user.
        where: name of the prompt for error messages.

    Raises:
        ConfigError: there are more or fewer images than parts, a part is neither text nor an image, or a message has
            media next to its content.
    """
    rest = list(images)
    given_count, used_count, has_marks = len(rest), 0, False
    found: list[Any] = []
    plain: list[dict[str, Any]] = []
    for message in messages:
        if not isinstance(message, Mapping):
            raise ConfigError(f"{where}: messages must be mappings with role and content, got {type(message).__name__}")
        if (name := media_field(message)) is not None:
            raise ConfigError(f"{where}: a message has {name!r}; images are parts of the content")
        copied = {name: value for name, value in message.items() if value is not None}
        if isinstance(content := message.get("content"), (list, tuple)):
            parts: list[Any] = []
            for part in content:
                if isinstance(part, str):
                    parts.append({"type": "text", "text": part})
                elif isinstance(part, Mapping) and is_image(part):
                    # data sets add null fields to parts, and some number their images
                    fields = {n: v for n, v in part.items() if v is not None and (n, v) != ("index", used_count)}
                    item = image_of_part(fields, where)
                    if item is None:
                        has_marks, used_count = True, used_count + 1
                        item = rest.pop(0) if rest else None
                    found.append(item)
                    parts.append(dict(MARK))
                else:
                    parts.append({"type": "text", "text": text_of_part(part, where)})
            copied["content"] = parts
        plain.append(copied)
    if given_count and not has_marks and not found and _put_first(plain, given_count):
        return plain, rest
    if used_count != given_count:
        raise ConfigError(
            f'{where} has {counted(given_count, "image")} in "images", but '
            f'{counted(used_count, "part")} {{"type": "image"}} in its '
            "messages; give one part for each image"
        )
    return plain, found


def _put_first(plain: list[dict[str, Any]], count: int) -> bool:
    """Put ``count`` marks at the beginning of the first user message; returns False if there is none."""
    for message in plain:
        if message.get("role") == "user":
            content = message.get("content")
            said = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
            message["content"] = [*(dict(MARK) for _ in range(count)), *said]
            return True
    return False


def counted(count: int, what: str) -> str:
    """Return a count with its noun: ``no images``, ``1 image``, ``2 images``."""
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"
