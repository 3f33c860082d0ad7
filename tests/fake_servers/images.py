"""Images at a fake server: what stands for one becomes several tokens, and what follows depends on its bytes.

Invariant: whoever gets the features of an image that other weights have made, or those of another image, draws other
tokens than whoever gets the right ones.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

PLACEHOLDER, TOKENS_EACH = 400, 6


class Unknown(Exception):
    """An image was named whose bytes are not there."""


@dataclass
class FakeImages:
    """A model that sees, and what its server keeps: the bytes of images, and what its vision tower made of them.

    Args:
        each: tokens as which an image is read.
        keeps: bytes are found again by name.
    """

    each: int = TOKENS_EACH
    keeps: bool = True
    named: dict[str, bytes] = field(default_factory=dict)
    features: dict[str, str] = field(default_factory=dict)
    """Name -> what the vision tower has made of it."""
    received: list[str] = field(default_factory=list)
    """SHA-256 of everything that came with its bytes, in order."""
    misses: int = 0
    """Names that were refused."""

    def take(self, name: str, url: str | None) -> bytes:
        """The bytes of an image that came, or that was only named. A known name stands for what it was given first."""
        if url is not None:
            data = self.came(url)
            return self.named.setdefault(name, data) if self.keeps else data
        if name not in self.named:
            self.misses += 1
            raise Unknown(name)
        return self.named[name]

    def came(self, url: str) -> bytes:
        """The bytes of an image that came, and was not named."""
        data = base64.b64decode(url.partition(";base64,")[2], validate=True)
        self.received.append(hashlib.sha256(data).hexdigest())
        return data

    def look(self, name: str, data: bytes, weights: str) -> str:
        """What the vision tower makes of an image, or has made of that name."""
        return self.features.setdefault(name, features(data, weights))

    def expanded(self, ids: Sequence[int]) -> list[int]:
        """The prompt as the model reads it."""
        return [token for i in ids for token in [i] * (self.each if i == PLACEHOLDER else 1)]

    def forget(self) -> None:
        """What a new process does not have."""
        self.named.clear()
        self.features.clear()


def features(data: bytes, weights: str) -> str:
    """What a vision tower makes of an image, in a few characters."""
    return hashlib.sha256(data + weights.encode()).hexdigest()[:8]


def salt_of(seen: Sequence[str]) -> str:
    """What the features of a prompt's images do to the tokens that follow."""
    return hashlib.sha256(" ".join(seen).encode()).hexdigest()[:8] if seen else ""
