"""The calls of one link at the core's actor, as another process makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from april.processes.actor_link import CallingLink
from april.processes.frames import pack_frames, unpack_frames


class ActorCalls:
    """Implements :class:`april.processes.actor_link.Calls`.

    Args:
        core: handle of the core's actor.
        link: number of the link there.
    """

    def __init__(self, core: Any, link: int) -> None:
        self._core = core
        self._link = link

    async def poll(self) -> list[bytes] | None:
        """See Calls."""
        frames = await self._core.poll.remote(self._link)
        return None if frames is None else unpack_frames(frames)

    async def take(self, frames: Sequence[bytes]) -> bool:
        """See Calls."""
        return bool(await self._core.take.remote(self._link, pack_frames(frames)))

    async def leave(self) -> None:
        """See Calls."""
        await self._core.leave.remote(self._link)


def this_actor() -> list[Any]:
    """The handle of the actor that runs here, or nothing where none does; in a list, so that Ray passes it on as it
    is."""
    import ray

    try:
        return [ray.get_runtime_context().current_actor]
    except RuntimeError:
        return []


def link_of(core: Any, number: int) -> CallingLink:
    """The end that calls; must be made on the loop that it lives on."""
    return CallingLink(ActorCalls(core, number))
