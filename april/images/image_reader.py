"""Reads and checks an image from a user or a client, and makes an attachment of it.

Invariant: an attached image was decoded once, so it is intact, and has a mode that all engines and trainers read alike.
The attachment's name is the hash of its bytes, never a name that a user gave.
"""

from __future__ import annotations

import base64
import io
import os
import re
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
from april.text.install_command import require
from april.text.server_text import clean

IMAGE = "image"
"""Kind of the attachments that this module makes."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Image formats that are read; PIL's decoders for other formats never see data from clients."""
_PLAIN_MODES = ("RGB", "L")
"""PIL modes that every reader converts to the same three channels."""
_ORIENTATION = 0x0112  # the EXIF tag
_IMAGE_FIELDS = ("image_url", "image", "input_image", "url", "source", "data")
"""Fields in which a content part holds its image, in chats of OpenAI, Anthropic and transformers."""
_CLIENT_FORMS = 'a data: URL in image_url, or a source of {"type": "base64", "data": ...}'
"""Forms in which clients send images, for error messages."""
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_NO_BASE64 = re.compile(rb"[^A-Za-z0-9+/]")
_attachments: weakref.WeakValueDictionary[tuple[str, bool], Attachment] = weakref.WeakValueDictionary()
_attachments_lock = threading.Lock()


class Picture(NamedTuple):
    """An image that was read, and the size from its header; 0 x 0 if ``placed_tokens`` are known."""

    attachment: Attachment
    height: int
    width: int
    placed_tokens: tuple[int, ...] = ()
    """Tokens that replaced the image's placeholder, if it was placed in a prompt before; otherwise empty."""


class ImageReader:
    """Reads images, within limits.

    Args:
        limits: limits on images.
        allow_paths: True if an image may be given as a path; False for clients, which must send its bytes.
    """

    def __init__(self, limits: ImagesConfig, *, allow_paths: bool = True) -> None:
        require("an image", "PIL", extra="images")
        self._limits = limits
        self._allow_paths = allow_paths

    def for_clients(self) -> ImageReader:
        """Return the reader for images in client requests, which may not be file paths."""
        return ImageReader(self._limits, allow_paths=False)

    def check_count(self, count: int, where: str) -> None:
        """Raise ConfigError if a conversation has too many images."""
        if count > self._limits.max_per_prompt:
            raise ConfigError(
                f"{where} has {count:,} images, but images.max_per_prompt is {self._limits.max_per_prompt:,}; give "
                "fewer, or raise the limit"
            )

    def read(self, item: Any, where: str, *, decode: bool = True) -> Picture:
        """Make an attachment of an image in any form.

        Args:
            item: encoded bytes, a path, a ``PIL.Image``, a ``data:`` or ``file:`` URL,
                ``{"bytes": ..., "path": ...}``, or a content part of a chat.
            where: name of the image for error messages, such as ``prompt 3, image 1``.
            decode: False if the image was decoded before and only its hash is needed.

        Raises:
            ConfigError: the image cannot be used; the message says which image, why, and what to do.
        """
        if isinstance(item, Picture):
            return item
        if hasattr(item, "save") and hasattr(item, "getbands"):  # a PIL.Image, without importing it
            return self._make_picture(self._encode_pil_image(item, where), "", where, decode)
        if isinstance(item, (bytes, bytearray, memoryview)):
            return self._make_picture(bytes(item), "", where, decode)
        if isinstance(item, os.PathLike):
            return self._read_file(os.fspath(item), where, decode)
        if isinstance(item, str):
            return self._read_text(item, where, decode)
        if isinstance(item, Mapping):
            return self._read_mapping(item, where, decode)
        forms = "bytes, a path, a PIL.Image, a data: URL, or a mapping with bytes or path"
        forms = forms if self._allow_paths else _CLIENT_FORMS
        raise ConfigError(f"{where} is of type {type(item).__name__}; give {forms}")

    # ---------------------------------------------------------------- forms

    def _read_mapping(self, item: Mapping[str, Any], where: str, decode: bool) -> Picture:
        data, path = item.get("bytes"), item.get("path")
        if isinstance(data, (bytes, bytearray, memoryview)):
            return self._make_picture(bytes(data), "", where, decode)
        if isinstance(path, (str, os.PathLike)) and path:
            return self._read_file(os.fspath(path), where, decode)
        if item.get("type") == "base64" and isinstance(item.get("data"), str):
            return self._make_picture(self._decode_base64(item["data"], where), "", where, decode)
        for name in _IMAGE_FIELDS:
            if (inner := item.get(name)) is not None and not (isinstance(inner, Mapping) and inner is item):
                return self.read(inner, where, decode=decode)
        forms = 'bytes, {"bytes": ...}, {"path": ...}, or a content part with image_url or source'
        raise ConfigError(
            f"{where} is a mapping with {', '.join(clean(k, 32) for k in list(item)[:8]) or 'nothing in it'}; give "
            f"{forms if self._allow_paths else _CLIENT_FORMS}"
        )

    def _read_text(self, text: str, where: str, decode: bool) -> Picture:
        url = text.lstrip()
        scheme = url[:8].partition(":")[0].lower() if ":" in url[:8] else ""
        if scheme == "data":
            return self._make_picture(self._decode_data_url(url, where), "", where, decode)
        if scheme in ("http", "https"):
            forms = "its bytes or its path" if self._allow_paths else _CLIENT_FORMS
            raise ConfigError(
                f"{where} is an {scheme} address, but april fetches no images; download it first, and give {forms}"
            )
        if scheme == "file" and self._allow_paths:
            named = urlsplit(url)
            if named.netloc not in ("", "localhost"):
                raise ConfigError(f"{where}: {clean(text, 100)} is a file on another machine; give a path on this one")
            return self._read_file(url2pathname(named.path), where, decode)
        if not self._allow_paths:
            raise ConfigError(
                f"{where}: a client must send an image as a data: URL or in base64, not as {clean(text, 40)}"
            )
        return self._read_file(text, where, decode)

    def _decode_data_url(self, url: str, where: str) -> bytes:
        head, comma, body = url.partition(",")
        if not comma:
            raise ConfigError(f"{where} is a data: URL without a comma, so it has no content; was it truncated?")
        if "base64" in [parameter.strip() for parameter in head.lower().split(";")[1:]]:
            return self._decode_base64(body, where)
        self._check_size(len(body) // 3, where)
        return unquote_to_bytes(body)

    def _decode_base64(self, text: str, where: str) -> bytes:
        """Decode base64 in any common form: in lines, URL-safe, or without padding.

        A blank within a line is refused, because it may have been a plus sign.
        """
        raw = text.encode("utf-8", "replace")
        raw = b"".join(line.strip() for line in (unquote_to_bytes(raw) if b"%" in raw else raw).splitlines())
        coded = raw.rstrip(b"=")
        self._check_size(len(coded) * 3 // 4, where)
        if not (b"+" in coded or b"/" in coded):
            coded = coded.translate(_URL_SAFE)
        bad = _NO_BASE64.search(coded)
        if bad is not None:
            why = f"character {bad.start() + 1:,} is {clean(repr(chr(bad[0][0])), 16)}"
        elif len(coded) % 4 == 1:
            why = f"no text of {len(coded):,} characters is"
        elif len(raw) - len(coded) not in (0, -len(coded) % 4):
            why = f"{len(raw) - len(coded)} padding characters follow {len(coded):,} others"
        else:
            return base64.b64decode(coded + b"=" * (-len(coded) % 4))
        raise ConfigError(f"{where} is not base64; was it truncated, or encoded twice ({why})?")

    def _read_file(self, path: str, where: str, decode: bool) -> Picture:
        named = f"{where} ({clean(path, 100)})"
        if not self._allow_paths:
            raise ConfigError(f"{where}: a client must send an image as a data: URL or in base64, not as a path")
        try:
            with open(path, "rb") as file:
                about = os.fstat(file.fileno())
                if not stat.S_ISREG(about.st_mode):
                    raise ConfigError(f"{named} is not a file")
                self._check_size(about.st_size, named)
                data = file.read(self._limits.max_bytes + 1)
        except (OSError, ValueError) as error:  # ValueError: a null byte in the file's name
            if isinstance(error, ConfigError):
                raise
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise ConfigError(f"{named} cannot be read: {why}") from None
        return self._make_picture(data, str(Path(path).absolute()), named, decode)

    def _encode_pil_image(self, image: Any, where: str) -> bytes:
        width, height = image.size
        self._check_pixels(width, height, where)
        if _is_animated(image):
            raise ConfigError(_animated(where))
        return _as_png(image, where)

    # ---------------------------------------------------------------- content

    def _check_size(self, size: int, where: str) -> None:
        if size > self._limits.max_bytes:
            raise ConfigError(
                f"{where} has {size:,} bytes, but images.max_bytes is {self._limits.max_bytes:,}; make it smaller, or "
                "raise the limit"
            )

    def _check_pixels(self, width: int, height: int, where: str) -> None:
        if width < 1 or height < 1:
            raise ConfigError(f"{where} is empty: {width} x {height} pixels")
        if width * height > self._limits.max_pixels:
            raise ConfigError(
                f"{where} has {width:,} x {height:,} pixels, but images.max_pixels is {self._limits.max_pixels:,}; "
                "make it smaller, or raise the limit"
            )

    def _make_picture(self, data: bytes, path: str, where: str, decode: bool) -> Picture:
        self._check_size(len(data), where)
        data, path, (height, width) = self._check_content(data, path, where, decode)
        attachment = Attachment.of(IMAGE, data, path)
        if path and self._limits.in_state is InState.REFERENCE:
            attachment = Attachment(IMAGE, attachment.digest, attachment.size, None, path)
        with _attachments_lock:
            known = _attachments.setdefault((attachment.digest, attachment.data is None), attachment)
            return Picture(known, height, width)

    def _check_content(self, data: bytes, path: str, where: str, decode: bool) -> tuple[bytes, str, tuple[int, int]]:
        """Return the bytes (encoded again if readers differ), the path (empty if so), and (height, width)."""
        from PIL import Image, UnidentifiedImageError

        if not data:
            raise ConfigError(f"{where} is empty: 0 bytes")
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                self._check_pixels(*image.size, where)
                if _is_animated(image):
                    raise ConfigError(_animated(where))
                orientation = image.getexif().get(_ORIENTATION, 1)
                transparent = "transparency" in image.info
                (width, height) = image.size
                if image.mode not in _PLAIN_MODES or orientation != 1 or transparent:
                    on_side = orientation in (5, 6, 7, 8)
                    return _as_png(image, where), "", (width, height) if on_side else (height, width)
                if decode:
                    image.load()
                return data, path, (height, width)
        except ConfigError:
            raise
        except UnidentifiedImageError:
            raise ConfigError(
                f"{where} is not an image that can be read ({len(data):,} bytes beginning with {data[:8]!r}); give one "
                f"of {', '.join(FORMATS)}"
            ) from None
        except Image.DecompressionBombError:
            raise ConfigError(
                f"{where} has more pixels than images.max_pixels, {self._limits.max_pixels:,}, and than PIL accepts; "
                "make it smaller"
            ) from None
        except Exception as error:  # whatever a decoder raises on broken data
            raise _damaged(error, where) from None


def _is_animated(image: Any) -> bool:
    """Return True if the image has several frames, without counting them, which would be slow for TIFF files."""
    return getattr(image, "format", None) != "MPO" and bool(getattr(image, "is_animated", False))


def _animated(where: str) -> str:
    return f"{where} is animated, and different readers would use different frames of it; give one frame"


def _as_png(image: Any, where: str) -> bytes:
    """Return the image as lossless PNG: upright, with three channels or one, and white where it was transparent."""
    from PIL import Image, ImageOps

    if image.mode.startswith(("I", "F")):
        raise ConfigError(
            f"{where} has the mode {image.mode}, more than 8 bits per channel, which readers reduce in different ways; "
            'convert it to "RGB"'
        )
    buffer = io.BytesIO()
    try:
        upright = ImageOps.exif_transpose(image)
        if "A" in upright.getbands() or "transparency" in upright.info:
            white = Image.new("RGBA", upright.size, (255, 255, 255, 255))
            upright = Image.alpha_composite(white, upright.convert("RGBA"))
        upright = upright if upright.mode in _PLAIN_MODES else upright.convert("RGB")
        upright.info = {}
        upright.save(buffer, "PNG", compress_level=1)
    except Exception as error:
        raise _damaged(error, where) from None
    return buffer.getvalue()


def _damaged(error: Exception, where: str) -> ConfigError:
    return ConfigError(
        f"{where} is damaged or truncated: it cannot be decoded ({clean(error, 100)}); create the file again"
    )
