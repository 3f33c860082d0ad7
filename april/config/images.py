"""Settings for images: limits of their size, and the hosts from which they may be fetched."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from april.config.values import Model, PositiveInt, one_or_more


class InState(StrEnum):
    """Form in which an image that comes from a file is kept in memory and in saved states."""

    REFERENCE = "reference"
    """Path and hash. The file is read whenever its bytes are sent, and must not change."""
    VALUE = "value"
    """The bytes of the file."""


def _host(host: str) -> str:
    name = host.strip().lower().removeprefix("*.")
    if not name or any(c in name for c in "/@?#* ") or name.count(":") == 1 or "[" in name:
        raise ValueError(f"a host is a name such as a.example.com, or *.example.com for those below it, got {host!r}")
    return f"*.{name}" if host.strip().startswith("*.") else name


class ImagesConfig(Model):
    """Limits of images, which are checked before decoding, and hosts from which images may be fetched."""

    max_bytes: PositiveInt = 20_000_000
    """Most bytes of an image, encoded."""
    max_pixels: PositiveInt = 50_000_000
    """Most pixels of an image."""
    max_per_prompt: PositiveInt = 64
    """Most images of a conversation."""
    hosts: Annotated[tuple[Annotated[str, AfterValidator(_host)], ...], BeforeValidator(one_or_more)] = ()
    """Hosts from which images may be fetched by http(s); `*.example.com` means those below it that are public."""
    in_state: InState = InState.REFERENCE
    """What is held and saved of an image in a file: its path and hash (reference), or its bytes (value)."""
