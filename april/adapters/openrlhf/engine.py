"""OpenRLHF's engine actors as april's engines: they also count transfers of weights, and ask for rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from april.engines.vllm.actor import ActorEngine, capabilities_of


class OpenRLHFEngine(ActorEngine):
    """Before one :class:`april.adapters.openrlhf.actors.AprilRolloutRayActor`."""

    async def pushes(self) -> int:
        """Complete transfers of weights by the trainer into this engine, ever."""
        return int(await self._call("april_pushes"))

    async def judge(self, query: str, prompt: str, label: Any) -> Any:
        """The answer of OpenRLHF's reward function or server, asked in the actor as OpenRLHF asks it."""
        return await self._call("april_judge", query, prompt, label)


async def connect(actors: Sequence[Any]) -> list[OpenRLHFEngine]:
    """An engine before each actor."""
    told = await asyncio.gather(*(actor.april_capabilities.remote() for actor in actors))
    pairs = enumerate(zip(actors, told, strict=True))
    return [OpenRLHFEngine(actor, f"vllm{i}", capabilities_of(plain)) for i, (actor, plain) in pairs]
