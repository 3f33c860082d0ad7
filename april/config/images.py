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
        raise ValueError(
            f"a host must be a name such as a.example.com, or *.example.com for its subdomains, got {host!r}"
        )
    return f"*.{name}" if host.strip().startswith("*.") else name


class ImagesConfig(Model):
    """Limits of images, which are checked before decoding, and hosts from which images may be fetched."""

    max_bytes: PositiveInt = 20_000_000
    """Largest size of an encoded image, in bytes."""
    max_pixels: PositiveInt = 50_000_000
    """Maximum number of pixels of an image."""
    max_per_prompt: PositiveInt = 64
    """Maximum number of images of a conversation."""
    hosts: Annotated[tuple[Annotated[str, AfterValidator(_host)], ...], BeforeValidator(one_or_more)] = ()
    """Hosts from which images may be fetched by http(s); `*.example.com` means its subdomains with public addresses."""
    in_state: InState = InState.REFERENCE
    """How an image from a file is kept in memory and in saved states: as path and hash (reference), or as its bytes
    (value)."""
