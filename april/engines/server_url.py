"""Addresses of engines: only plain ones, from the configuration."""

from __future__ import annotations

from urllib.parse import urlsplit

from april.errors import ConfigError


def checked_url(url: str) -> str:
    """The URL without a trailing slash.

    Raises:
        ConfigError: it is not of the form http(s)://host:port.
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
        raise ConfigError(f"an engine's URL must look like http://host:port, got {shown!r}")
    return f"{parts.scheme}://{parts.netloc}"
