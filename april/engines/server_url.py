"""Addresses of engines: only plain ones, from the configuration."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

from april.errors import ConfigError

_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - refused here
"""A server that listens on these is reached under its machine's name."""


def checked_url(url: str) -> str:
    """The URL without a trailing slash.

    Raises:
        ConfigError: it is not of the form http(s)://host:port, or its host is no place where a server can be reached;
            the sentence says what to write instead.
    """
    parts = urlsplit(url)
    try:
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # the port
        right = False
    if not right or parts.path not in ("", "/") or parts.query or parts.fragment or parts.username or parts.password:
        # a user, a password or a query may be a secret
        shown, query, _ = url.rpartition("@")[2].partition("?")
        shown += f"{query}..." if query else ""
        instead = _instead(url, parts, right)
        raise ConfigError(f"an engine's URL must look like http://host:port, got {shown!r}{instead}")
    if parts.hostname in _EVERYWHERE:
        port = "" if parts.port is None else f":{parts.port}"
        raise ConfigError(
            f"{parts.hostname} in {url!r} is where a server listens, not where it is reached; write "
            f"{parts.scheme}://127.0.0.1{port} if it is on this machine, or else the name of its machine"
        )
    return f"{parts.scheme}://{parts.netloc}"


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
