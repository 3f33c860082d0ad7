"""Addresses of engines: only plain ones, from the configuration."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

from april.errors import ConfigError
from april.server_text import quoted, said

_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - refused here
"""A server that listens on these is reached under its machine's name."""


def checked_url(url: str) -> str:
    """The URL without a trailing slash.

    Raises:
        ConfigError: it is not of the form http(s)://host:port, or its host is no place where a server can be reached;
            the sentence says what to write instead.
    """
    try:
        parts = urlsplit(url)
    except ValueError:  # half of the brackets of an IPv6 address
        raise ConfigError(f"an engine's URL must look like http://host:port, got {quoted(_shown(url), 100)}") from None
    try:
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # the port
        right = False
    if not right or parts.path not in ("", "/") or parts.query or parts.fragment or parts.username or parts.password:
        instead = said(_instead(url, parts, right))
        raise ConfigError(f"an engine's URL must look like http://host:port, got {quoted(_shown(url), 100)}{instead}")
    if parts.hostname in _EVERYWHERE:
        port = "" if parts.port is None else f":{parts.port}"
        raise ConfigError(
            f"{parts.hostname} in {quoted(url, 100)} is where a server listens, not where it is reached; write "
            f"{parts.scheme}://127.0.0.1{port} if it is on this machine, or else the name of its machine"
        )
    return f"{parts.scheme}://{parts.netloc}"


def _shown(url: str) -> str:
    """Without what may be a secret: a user, a password, a query or a fragment."""
    rest = repr(url)[1:-1].rpartition("@")[2]  # white space at the end is what is wrong with some
    end = min((at for at in map(rest.find, "?#") if at >= 0), default=len(rest))
    return f"{rest[:end]}{rest[end : end + 1]}..." if end < len(rest) else rest


def _instead(url: str, parts: SplitResult, right: bool) -> str:
    """What to write in place of an address that is nearly one; nothing where a part of it may be a secret."""
    if parts.query or parts.fragment or "@" in url:
        return ""
    if "://" not in url:
        host, _, path = url.partition("/")
        beyond = f", without /{path}" if path else ""
        return f"; write http://{host}{beyond}" if ":" in host else f"; write http://{host or 'host'}:PORT{beyond}"
    if right:  # the path
        return f"; write {parts.scheme}://{parts.netloc}, without {parts.path}: april adds the routes"
    return ""
