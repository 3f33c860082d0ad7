"""Parses, opens and formats the address at which rank 0 listens for the other ranks, and makes their access token."""

from __future__ import annotations

import secrets
import socket
from typing import Any

from april.errors import ConfigError, LinkError


def new_token() -> str:
    """Return a random token of 64 hexadecimal digits. Any process that has the token can join the ranks."""
    return secrets.token_hex(32)


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of "host:port" or "[ipv6]:port"; raises ConfigError."""
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not host or not (port.isascii() and port.isdecimal()) or int(port) >= 1 << 16:
        raise ConfigError(f'address: expected "host:port", such as "127.0.0.1:0" for any free port, got {address!r}')
    return host.removeprefix("[").removesuffix("]"), int(port)


def listening_socket(address: str) -> socket.socket:
    """Return a socket that already listens, so that no other program can take its address; raises LinkError."""
    host, port = split_address(address)
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise LinkError(f"cannot listen at {address}: {error.strerror or error}") from None


def format_address(address: tuple[Any, ...]) -> str:
    """Return a socket's address as "host:port"."""
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
