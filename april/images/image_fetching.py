"""Fetches images by http(s), from hosts that the settings allow by name.

Invariant: a connection is made only to allowed hosts, and to an address that is not public only if the settings name
that exact host. The connection goes to the very address that was checked.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from urllib.parse import SplitResult, urlsplit

from april.errors import ConfigError
from april.text.server_text import clean

TIMEOUT_S = 30.0
"""Longest time, in seconds, for fetching an image."""
_PIECE = 1 << 16
_WITH_IPV4 = tuple(map(ipaddress.IPv6Network, ("::/96", "::ffff:0:0/96", "::ffff:0:0:0/96", "64:ff9b::/96")))
"""IPv6 networks whose addresses end in an IPv4 address."""


def fetch_image(url: str, hosts: Sequence[str], max_bytes: int, where: str) -> bytes:
    """Return the bytes behind ``url``; raises ConfigError, whose message leaves out possible secrets in the URL."""
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").lower(), parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        host = ""
    if not host:
        raise ConfigError(f"{where} has a URL without a host; give a complete URL, or the image itself")
    named = host in hosts
    if not named and not any(h.startswith("*.") and host.endswith(h[1:]) for h in hosts):
        raise ConfigError(
            f"{where} is at {clean(host, 100)}, but images are fetched only from the hosts in images.hosts; add the "
            "host there, or give the image itself"
        )
    what = f"{where}, from {clean(host, 100)},"
    address = _address(host, port, what, private=named)
    if parts.username or parts.password:
        raise ConfigError(f"{what} has a user or a password in its URL; give the image itself")
    try:
        with closing(socket.create_connection((address, port), TIMEOUT_S)) as connection:
            return _read(connection, parts, host, max_bytes, what)
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{what} cannot be fetched: {clean(error, 100) or type(error).__name__}") from None


def _address(host: str, port: int, what: str, *, private: bool) -> str:
    """Return an address of a host; all addresses of the host must be public, unless ``private`` allows others."""
    try:
        found = [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{what} cannot be fetched: {clean(error, 100)}") from None
    for address in found:
        if not private and not _is_public(address):
            raise ConfigError(
                f"{what} is at {address}, which is not a public address; if that is intended, add this exact host to "
                "images.hosts"
            )
    return found[0]


def _is_public(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.is_site_local:
            return False
        # an IPv6 address that leads to an IPv4 address is public if the IPv4 address is
        last = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        ip = ip.sixtofour or (last if any(ip in net for net in _WITH_IPV4) else ip)
    return ip.is_global and not ip.is_multicast


def _read(connection: socket.socket, parts: SplitResult, host: str, max_bytes: int, what: str) -> bytes:
    sockets = [connection]  # the last socket is the one in use
    # the socket's own timeout starts again with every byte, so a timer limits the whole transfer
    late = threading.Timer(TIMEOUT_S, _close_late, (sockets,))
    late.daemon = True
    late.start()
    try:
        if parts.scheme == "https":
            sockets.append(ssl.create_default_context().wrap_socket(connection, server_hostname=host))
        speaker = http.client.HTTPConnection(host)
        speaker.sock = sockets[-1]
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        default = 443 if parts.scheme == "https" else 80
        at = f"[{host}]" if ":" in host else host
        port = parts.port or default
        speaker.request("GET", path, headers={"Host": at if port == default else f"{at}:{port}", "Accept": "image/*"})
        with closing(speaker.getresponse()) as response:
            if 300 <= response.status < 400:
                raise ConfigError(f"{what} was moved (HTTP {response.status}); give its final URL")
            if response.status != 200:
                raise ConfigError(f"{what} cannot be fetched: HTTP {response.status}")
            if (response.length or 0) > max_bytes:
                raise ConfigError(_too_large_message(what, max_bytes))
            data = bytearray()
            while piece := response.read(_PIECE):
                data += piece
                if len(data) > max_bytes:
                    raise ConfigError(_too_large_message(what, max_bytes))
            if response.length:
                raise ConfigError(f"{what} was interrupted after {len(data):,} bytes")
            return bytes(data)
    finally:
        late.cancel()
        with suppress(OSError):
            sockets[-1].close()


def _close_late(sockets: Sequence[socket.socket]) -> None:
    with suppress(OSError):
        sockets[-1].shutdown(socket.SHUT_RDWR)


def _too_large_message(what: str, max_bytes: int) -> str:
    return f"{what} has more bytes than images.max_bytes, {max_bytes:,}; make the image smaller, or raise the limit"
