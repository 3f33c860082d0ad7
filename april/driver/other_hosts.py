"""What a driver asks of hosts in other processes; ``april.hosts`` has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from april.core import commands as do
from april.core import events as ev
from april.core.settings import EngineLimits
from april.core.state import RolloutCore
from april.core.types import Group, SampleId
from april.driver.local_host import LocalHost


class OtherHosts(Protocol):
    """All of them, those that come later included."""

    @property
    def first_engines(self) -> Sequence[EngineLimits]:
        """With which a core begins."""

    @property
    def servers(self) -> list[str]:
        """Engines that do not read the trainer's own model."""

    def attach(
        self,
        core: RolloutCore,
        local: LocalHost,
        post: Callable[[ev.Event], None],
        failed: Callable[[int, BaseException], None],
    ) -> Mapping[type[do.Command], Callable[[Any], None]]:
        """They belong to this core from now on: what carries out commands, there or in the ``local`` host.

        ``post`` and ``failed`` are those of the local one.
        """

    def delivered(self, samples: Iterable[SampleId]) -> None:
        """These are in a batch."""

    def settled(self, group: Group) -> None:
        """Nothing is left to do for it."""

    def evaluated(self, evaluation: int) -> None:
        """An evaluation is over."""

    async def quiet(self) -> None:
        """Until none of their engines computes on the trainer's model any more."""

    async def catch_up(self) -> None:
        """Until the tapes have what running requests had brought when this was called."""

    async def probed(self) -> None:
        """Until each of their engines that was asked how it is has answered."""

    async def close(self) -> None:
        """Tell them that it is over."""
