"""Where hosts come in: over TCP, or however somebody else brings their links."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from april.errors import ConfigError
from april.hosts.link import Link
from april.hosts.sockets import Listener, SocketLink, bound, told_address

log = logging.getLogger("april")

HOST = "host"
"""Purpose of a connection that a host makes."""


class HostDoor:
    """Links of hosts for a scheduler, which somebody else has made, on the scheduler's loop: give it each by
    :meth:`accept`.

    Args:
        deadline_s: a host that has said nothing for so long is lost.
        first_s: how long a scheduler without engines of its own waits for the first ones.
    """

    def __init__(self, *, deadline_s: float = 30.0, first_s: float = 600.0) -> None:
        for name, value in (("deadline_s", deadline_s), ("first_s", first_s)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise ConfigError(f"{name}: expected seconds above 0, got {value!r}")
        self.deadline_s = deadline_s
        self.first_s = first_s
        self.where = "the scheduler"
        """For messages."""
        self._accepted: Callable[[Link], None] | None = None
        self._early: list[Link] = []

    def open(self, accepted: Callable[[Link], None]) -> None:
        """Called by the scheduler, once, on its loop: from now on ``accepted`` gets the links."""
        if self._accepted is not None:
            raise ConfigError("hosts: this is another scheduler's already; make one for each")
        self._accepted = accepted
        for link in self._early:
            accepted(link)
        self._early.clear()

    def accept(self, link: Link) -> None:
        """A host's link."""
        if self._accepted is None:
            self._early.append(link)
        else:
            self._accepted(link)

    async def close(self) -> None:
        """No host comes in any more."""


class HostListener(HostDoor):
    """Hosts join over TCP, if they have the token.

    Args:
        token: 64 hexadecimal digits, as ``secrets.token_hex(32)`` makes them. Whoever has it can join: it is never sent
            and never logged; what is said is not encrypted.
        address: "host:port"; port 0: any free one, see :attr:`address`. The default is for this machine only.
        deadline_s: a host that has said nothing for so long is lost.
        first_s: how long a scheduler without engines of its own waits for the first ones.

    Raises:
        ConfigError: an argument has a wrong form.
        LinkError: the address cannot be listened at.
    """

    def __init__(
        self, token: str, address: str = "127.0.0.1:0", *, deadline_s: float = 30.0, first_s: float = 600.0
    ) -> None:
        super().__init__(deadline_s=deadline_s, first_s=first_s)
        self._listener = Listener(token, self._joined)
        self._socket = bound(address)
        self.address = self.where = told_address(self._socket.getsockname())
        """Where it listens, with the port."""
        self._opening: asyncio.Task[str] | None = None

    def __repr__(self) -> str:
        return f"<HostListener at {self.address}>"

    def open(self, accepted: Callable[[Link], None]) -> None:
        """See :class:`HostDoor`."""
        super().open(accepted)
        self._opening = asyncio.get_running_loop().create_task(self._listener.open(self._socket))

    def _joined(self, link: SocketLink) -> None:
        assert link.hello is not None
        if link.hello.purpose == HOST:
            self.accept(link)
        else:
            log.warning("a connection from %s was refused: it is no host's", link.peer)
            link.close()

    def discard(self) -> None:
        """There is no scheduler for it after all."""
        self._socket.close()

    async def close(self) -> None:
        """See :class:`HostDoor`."""
        if self._opening is not None:
            await asyncio.wait([self._opening])  # the end of the loop may have cancelled it
            await self._listener.close()
        self._socket.close()
