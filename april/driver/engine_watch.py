"""What engines say of themselves between requests: health probes after failures, load and weights while they work."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from april.core import commands as do
from april.core import events as ev
from april.core.state import RolloutCore
from april.driver.user_code import describe, own_cancellation
from april.driver.weight_updates import WeightUpdates
from april.engines.protocol import Engine, Health

log = logging.getLogger("april")

PROBE_INTERVAL_S = 1.0
"""Between two health probes of a quarantined engine."""
PROBE_TIMEOUT_S = 10.0
"""A probe without an answer for this long counts as unwell."""
LOOK_INTERVAL_S = 2.0
"""Between two looks at the load of an engine that works."""


class EngineWatch:
    """Asks the engines; ``post`` takes events, ``spawn`` starts background tasks."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        core: RolloutCore,
        post: Callable[[ev.Event], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        weights: WeightUpdates,
    ) -> None:
        self._engines = engines
        self._core = core
        self._post = post
        self._spawn = spawn
        self._weights = weights
        self._looking: set[str] = set()
        self._remote = [name for name, engine in engines.items() if engine.capabilities.remote]
        self.beside = dict.fromkeys(engines, 0)
        """Requests at each engine that are no attempts of the core: those of an evaluation."""

    # ---------------------------------------------------------------- engines that work

    def wake(self) -> None:
        """Something was sent: look at each server from time to time, as long as anything is in flight."""
        if len(self._looking) < len(self._remote):
            for name in self._remote:
                if name not in self._looking:
                    self._looking.add(name)
                    self._spawn(self._look(name))

    async def _look(self, name: str) -> None:
        try:
            while True:
                await asyncio.sleep(LOOK_INTERVAL_S)
                if not self._core.attempts and not any(self.beside.values()):
                    return
                if self._core.engines.states[name].in_flight or self.beside[name]:
                    await self._look_at(name)
        finally:
            self._looking.discard(name)

    def step_begins(self) -> None:
        """Look at all servers at once: one that was started anew while nobody used it has broken nothing."""
        for name in self._remote:
            self._spawn(self._look_at(name))

    async def look_at_all(self) -> None:
        """Ask all servers once for their load and their weights; what each says counts as soon as it comes."""
        await asyncio.gather(*map(self._look_at, self._remote))

    async def _look_at(self, name: str) -> None:
        state, moves = self._core.engines.states[name], self._weights.moves
        if state.quarantined:
            return
        step = self._core.step
        health = await self._ask(name)
        if step is not self._core.step:
            return  # between two steps the trainer may change weights, and says so afterwards
        # what does not answer here fails by its requests, one that was quarantined meanwhile is probed, and of a weight
        # update on its way nothing can be said
        if health is None or not health.ok or state.quarantined or moves != self._weights.moves or moves % 2:
            return
        self._note(name, health)

    def _note(self, name: str, health: Health) -> None:
        if not health.current:
            if self._core.engines.states[name].version is not None:
                log.warning("engine %s has not the weights that it was given: %s", name, health.detail)
                self._post(ev.EngineStale(name))
                self._post(ev.EngineFailed(name))
        elif (load := health.load) is not None:
            beside = self.beside[name]
            self._post(ev.EngineLoad(name, load.running, load.waiting, load.kv_usage, load.preemptions, beside))

    # ---------------------------------------------------------------- engines that failed

    def probe(self, command: do.ProbeEngine) -> None:
        """Probe a quarantined engine until it is well."""
        self._spawn(self._probe_until_well(command.engine))

    async def _probe_until_well(self, name: str) -> None:
        log.warning("engine %s is quarantined until a probe finds it well", name)
        state = self._core.engines.states[name]
        while True:
            await asyncio.sleep(PROBE_INTERVAL_S)
            moves = self._weights.moves
            health = await self._ask(name, warn=True)
            if moves != self._weights.moves or moves % 2:
                continue  # what it says of its weights is true no more
            # one that is between two versions says so, and is not well before it has whole ones
            if health is None or (health.current and not health.ok):
                continue
            if health.current and state.version == self._core.clock.current and self._weights.is_open(name):
                self._post(ev.EngineReady(name))
                return
            if await self._take_back(name, health.current):
                return

    async def _take_back(self, name: str, current: bool) -> bool:
        """An engine that is well and has other weights: it gets the present ones, or waits for the next update."""
        state = self._core.engines.states[name]
        if not current and state.version is not None:
            self._post(ev.EngineStale(name))
        if state.in_flight or self.beside[name]:
            return False  # first its requests end: they would go on under other weights
        try:
            version = await self._weights.mend(name, current=current)
        except Exception as error:
            log.warning("engine %s did not take the present weights: %s", name, describe(error))
            return False
        if version is None:
            log.warning("engine %s has not the present weights and waits for the next weight update", name)
        else:
            log.warning("engine %s has the weights of version %s", name, version)
        self._post(ev.EngineReady(name, version))
        return True

    async def _ask(self, name: str, *, warn: bool = False) -> Health | None:
        """None: no answer, or none in time."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                return await self._engines[name].health()
        except Exception as error:
            why = describe(error)
        except asyncio.CancelledError as error:
            why = str(own_cancellation(error))
        if warn:
            log.warning("probe of engine %s failed: %s", name, why)
        return None
