"""Settings for the endpoints of agents: where they listen, how agents reach them, and which clients may connect."""

from __future__ import annotations

import re
from contextlib import suppress
from ipaddress import IPv6Address, ip_network
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from april.config.engines import ANY_ADDRESS, THIS_MACHINE
from april.config.mistakes import contradiction
from april.config.values import Model, Number, one_or_more


def _network(network: str) -> str:
    try:
        return str(ip_network(network))
    except ValueError as error:
        raise ValueError(f"expected addresses such as 172.17.0.0/16 or 10.0.0.7, got {network!r}: {error}") from None


def _reached_at(name: str) -> str:
    with suppress(ValueError):
        return f"[{IPv6Address(name)}]"
    try:
        parts = urlsplit(f"http://{name}")
        readable = not name or (parts.netloc == name and parts.hostname and parts.port != 0)
    except ValueError:  # a port that is no number, or unbalanced brackets
        readable = False
    if not readable or re.search(r"[^\w.:\[\]-]|:$", name):
        raise ValueError(f"expected a host or host:port, such as host.docker.internal, got {name!r}")
    return name


class AgentsConfig(Model):
    """Where the endpoints of ``llm.base_url`` listen, how agents reach them, and which clients may connect."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 means all addresses of this machine."""
    port: Annotated[int, Field(ge=0, lt=1 << 16), Number] = 0
    """Port to listen on; 0 means any free one."""
    reached_at: Annotated[str, AfterValidator(_reached_at)] = ""
    """Host, or host:port, by which agents reach this machine, for `llm.base_url`; empty means `host`."""
    clients: Annotated[tuple[Annotated[str, AfterValidator(_network)], ...], BeforeValidator(one_or_more)] = ()
    """Networks whose clients may connect, such as 172.17.0.0/16. Clients on this machine always may."""

    @model_validator(mode="after")
    def _check_reachable(self) -> Self:
        if self.host not in THIS_MACHINE and not self.clients:
            raise contradiction(self, (
                f"{{agents.clients}}: other machines can connect to {self.host}; name the networks that may, such as "
                "172.17.0.0/16 for Docker's containers on this machine"
            ))
        if self.host in ANY_ADDRESS and not self.reached_at:
            raise contradiction(self, (
                f"{{agents.reached_at}}: no client can connect to {self.host}, which is an address to listen on; give "
                "the name or address by which agents reach this machine, such as host.docker.internal"
            ))
        return self
