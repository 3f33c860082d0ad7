"""Keys of servers: what a header can hold, and hidden from every text from the moment on that april has one."""

from __future__ import annotations

from april.errors import ConfigError
from april.server_text import hide


def checked_key(key: str) -> str:
    """The same key.

    Raises:
        ConfigError: a header cannot hold it; the key is not in the message.
    """
    hide(key)
    if key.strip() != key:
        raise ConfigError("the key of the server begins or ends with white space or a line break; take that away")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            "the key of the server has characters that no HTTP header can hold (line breaks, control characters, "
            "spaces, or what is not ASCII); was something else copied along with it?"
        )
    return key
