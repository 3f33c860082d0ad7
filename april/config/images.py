"""Settings for images: limits of their size and number, and how they are kept."""

from __future__ import annotations

from enum import StrEnum

from april.config.values import Model, PositiveInt


class InState(StrEnum):
    """Form in which an image that comes from a file is kept in memory and in saved states."""

    REFERENCE = "reference"
    """Path and hash. The file is read whenever its bytes are sent, and must not change."""
    VALUE = "value"
    """The bytes of the file."""


class ImagesConfig(Model):
    """Limits of images, which are checked before decoding, and how images are kept."""

    max_bytes: PositiveInt = 20_000_000
    """Largest size of an encoded image, in bytes."""
    max_pixels: PositiveInt = 50_000_000
    """Maximum number of pixels of an image."""
    max_per_prompt: PositiveInt = 64
    """Maximum number of images of a conversation."""
    in_state: InState = InState.REFERENCE
    """How an image from a file is kept in memory and in saved states: as path and hash (reference), or as its bytes
    (value)."""
