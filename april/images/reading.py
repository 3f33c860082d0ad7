"""From what a user or a client gives as an image to an attachment.

Invariant: an attachment is an image that was decoded once, in a mode that all engines and trainers read alike; its name
is the hash of its bytes, never one that somebody gave it.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import stat
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes, urlsplit
from urllib.request import url2pathname

from april.config.images import ImagesConfig, InState
from april.core.attachments import Attachment
from april.errors import ConfigError
from april.extras import require
from april.images.fetching import fetched
from april.server_text import clean

IMAGE = "image"
"""The kind of these attachments."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that are read; other readers of the package are never reached by what a stranger sends."""
_SAME_EVERYWHERE = ("RGB", "L")
"""Modes that every reader makes the same three channels of."""
_ORIENTATION = 0x0112
_PARTS = ("image_url", "image", "input_image", "url", "source", "data")
"""Names under which a content part has its image, in chats of OpenAI, Anthropic and transformers."""
_known: weakref.WeakValueDictionary[tuple[str, bool], Attachment] = weakref.WeakValueDictionary()
_knowing = threading.Lock()


class Picture(NamedTuple):
    """An image that was read, and the size that its header says; 0 x 0 where ``stand_in`` is known."""

    attachment: Attachment
    height: int
    width: int
    stand_in: tuple[int, ...] = ()
    """The tokens that the model reads it as, where it was placed before."""


class Reader:
    """Reads images, within limits.

    Args:
        limits: the settings.
        paths: files may be named; False for what comes from clients, who may send bytes and allowed URLs alone.
    """

    def __init__(self, limits: ImagesConfig, *, paths: bool = True) -> None:
        require("an image", "PIL", extra="images")
        self._limits = limits
        self._paths = paths

    def strangers(self) -> Reader:
        """The reader of what clients send."""
        return Reader(self._limits, paths=False)

    def check_count(self, count: int, where: str) -> None:
        """Raise ConfigError if a conversation has too many images."""
        if count > self._limits.max_per_prompt:
            raise ConfigError(
                f"{where} has {count:,} images, and images.max_per_prompt is {self._limits.max_per_prompt:,}; give it "
                "fewer, or raise that"
            )

    def read(self, item: Any, where: str, *, decode: bool = True) -> Picture:
        """Make an attachment of an image in any form.

        Args:
            item: encoded bytes, a path, a ``PIL.Image``, a ``data:`` URL, an http(s) URL of an allowed host,
                ``{"bytes": ..., "path": ...}``, or a content part of a chat.
            where: what it is, for messages: ``prompt 3, image 1``.
            decode: False where it was decoded before, and its content is compared by its hash.

        Raises:
            ConfigError: in one sentence, what is wrong with which image, and what to do.
        """
        if isinstance(item, Picture):
            return item
        if hasattr(item, "save") and hasattr(item, "getbands"):  # a PIL.Image, without importing it
            return self._of_data(self._encoded(item, where), "", where, decode)
        if isinstance(item, (bytes, bytearray, memoryview)):
            return self._of_data(bytes(item), "", where, decode)
        if isinstance(item, os.PathLike):
            return self._of_file(os.fspath(item), where, decode)
        if isinstance(item, str):
            return self._of_text(item, where, decode)
        if isinstance(item, Mapping):
            return self._of_mapping(item, where, decode)
        raise ConfigError(
            f"{where} is of type {type(item).__name__}; give bytes, a path, a PIL.Image, a data: URL, or a mapping "
            "with bytes or path"
        )

    # ---------------------------------------------------------------- forms

    def _of_mapping(self, item: Mapping[str, Any], where: str, decode: bool) -> Picture:
        data, path = item.get("bytes"), item.get("path")
        if isinstance(data, (bytes, bytearray, memoryview)):
            return self._of_data(bytes(data), "", where, decode)
        if isinstance(path, (str, os.PathLike)) and path:
            return self._of_file(os.fspath(path), where, decode)
        if item.get("type") == "base64" and isinstance(item.get("data"), str):
            return self._of_data(self._of_base64(item["data"], where), "", where, decode)
        for name in _PARTS:
            if (inner := item.get(name)) is not None and not (isinstance(inner, Mapping) and inner is item):
                return self.read(inner, where, decode=decode)
        raise ConfigError(
            f"{where} is a mapping with {', '.join(clean(k, 32) for k in list(item)[:8]) or 'nothing in it'}; give "
            'bytes, {"bytes": ...}, {"path": ...}, or a content part with image_url or source'
        )

    def _of_text(self, text: str, where: str, decode: bool) -> Picture:
        scheme = text[:8].partition(":")[0].lower() if ":" in text[:8] else ""
        if scheme == "data":
            return self._of_data(self._of_data_url(text, where), "", where, decode)
        if scheme in ("http", "https"):
            limits = self._limits
            return self._of_data(fetched(text, limits.hosts, limits.max_bytes, where), "", where, decode)
        if scheme == "file" and self._paths:
            url = urlsplit(text)
            if url.netloc not in ("", "localhost"):
                raise ConfigError(f"{where}: {clean(text, 100)} is a file of another machine; give a path of this one")
            return self._of_file(url2pathname(url.path), where, decode)
        if not self._paths:
            raise ConfigError(f"{where}: a client sends an image as a data: URL or in base64, not as {clean(text, 40)}")
        return self._of_file(text, where, decode)

    def _of_data_url(self, url: str, where: str) -> bytes:
        head, comma, body = url.partition(",")
        if not comma:
            raise ConfigError(f"{where} is a data: URL without a comma, which has no content; was it cut?")
        if head.lower().endswith(";base64"):
            return self._of_base64(body, where)
        self._check_size(len(body) // 3, where)
        return unquote_to_bytes(body)

    def _of_base64(self, text: str, where: str) -> bytes:
        self._check_size(len(text) // 4 * 3 - 2, where)
        try:
            return base64.b64decode(unquote_to_bytes(text) if "%" in text else text, validate=True)
        except (binascii.Error, ValueError):
            raise ConfigError(f"{where} is no base64; was it cut, or encoded twice?") from None

    def _of_file(self, path: str, where: str, decode: bool) -> Picture:
        named = f"{where} ({clean(path, 100)})"
        if not self._paths:
            raise ConfigError(f"{where}: a client sends an image as a data: URL or in base64, not as a path")
        try:
            with open(path, "rb") as file:
                about = os.fstat(file.fileno())
                if not stat.S_ISREG(about.st_mode):
                    raise ConfigError(f"{named} is no file")
                self._check_size(about.st_size, named)
                data = file.read(self._limits.max_bytes + 1)
        except (OSError, ValueError) as error:  # ValueError: a null byte in its name
            if isinstance(error, ConfigError):
                raise
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise ConfigError(f"{named} cannot be read: {why}") from None
        return self._of_data(data, str(Path(path).absolute()), named, decode)

    def _encoded(self, image: Any, where: str) -> bytes:
        width, height = image.size
        self._check_pixels(width, height, where)
        if _is_animated(image):
            raise ConfigError(_animated(where))
        return _as_png(image, where)

    # ---------------------------------------------------------------- content

    def _check_size(self, size: int, where: str) -> None:
        if size > self._limits.max_bytes:
            raise ConfigError(
                f"{where} has {size:,} bytes, and images.max_bytes is {self._limits.max_bytes:,}; make it smaller, or "
                "raise that"
            )

    def _check_pixels(self, width: int, height: int, where: str) -> None:
        if width < 1 or height < 1:
            raise ConfigError(f"{where} is empty: {width} x {height} pixels")
        if width * height > self._limits.max_pixels:
            raise ConfigError(
                f"{where} has {width:,} x {height:,} pixels, and images.max_pixels is {self._limits.max_pixels:,}; "
                "make it smaller, or raise that"
            )

    def _of_data(self, data: bytes, path: str, where: str, decode: bool) -> Picture:
        self._check_size(len(data), where)
        data, path, (height, width) = self._checked(data, path, where, decode)
        attachment = Attachment.of(IMAGE, data, path)
        if path and self._limits.in_state is InState.REFERENCE:
            attachment = Attachment(IMAGE, attachment.digest, attachment.size, None, path)
        with _knowing:
            return Picture(_known.setdefault((attachment.digest, attachment.data is None), attachment), height, width)

    def _checked(self, data: bytes, path: str, where: str, decode: bool) -> tuple[bytes, str, tuple[int, int]]:
        """The bytes, encoded anew where readers would differ, the file that has them, and (height, width)."""
        from PIL import Image, UnidentifiedImageError

        if not data:
            raise ConfigError(f"{where} is empty: 0 bytes")
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                self._check_pixels(*image.size, where)
                if _is_animated(image):
                    raise ConfigError(_animated(where))
                orientation = image.getexif().get(_ORIENTATION, 1)
                clear = "transparency" in image.info
                (width, height) = image.size
                if image.mode not in _SAME_EVERYWHERE or orientation != 1 or clear:
                    lies = orientation in (5, 6, 7, 8)
                    return _as_png(image, where), "", (width, height) if lies else (height, width)
                if decode:
                    image.load()
                return data, path, (height, width)
        except ConfigError:
            raise
        except UnidentifiedImageError:
            raise ConfigError(
                f"{where} is no image that can be read ({len(data):,} bytes beginning with {data[:8]!r}); give one of "
                f"{', '.join(FORMATS)}"
            ) from None
        except Image.DecompressionBombError:
            raise ConfigError(
                f"{where} has more pixels than images.max_pixels, {self._limits.max_pixels:,}, and than PIL takes; "
                "make it smaller"
            ) from None
        except Exception as error:  # whatever a decoder raises on what is broken
            raise ConfigError(
                f"{where} is broken, or was cut: it cannot be decoded ({clean(error, 100)}); make it anew"
            ) from None


def _is_animated(image: Any) -> bool:
    """Return whether it has several frames; to count those of a TIFF file takes the square of their number."""
    return getattr(image, "format", None) != "MPO" and bool(getattr(image, "is_animated", False))


def _animated(where: str) -> str:
    return f"{where} is animated, and readers would differ in which of its frames they take; give one frame"


def _as_png(image: Any, where: str) -> bytes:
    """The image as processors see it, without loss: upright, in three channels or one, over white where it is clear."""
    from PIL import Image, ImageOps

    if image.mode.startswith(("I", "F")):
        raise ConfigError(
            f"{where} has the mode {image.mode}, more than 8 bits per channel, which readers make differently small; "
            'convert it to "RGB"'
        )
    buffer = io.BytesIO()
    try:
        upright = ImageOps.exif_transpose(image)
        if "A" in upright.getbands() or "transparency" in upright.info:
            white = Image.new("RGBA", upright.size, (255, 255, 255, 255))
            upright = Image.alpha_composite(white, upright.convert("RGBA"))
        upright = upright if upright.mode in _SAME_EVERYWHERE else upright.convert("RGB")
        upright.info = {}
        upright.save(buffer, "PNG", compress_level=1)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{where} is broken, or was cut: it cannot be decoded ({clean(error, 100)}); make it anew"
        ) from None
    return buffer.getvalue()
