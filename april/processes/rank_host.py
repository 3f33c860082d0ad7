"""The engines and functions that a rank brings to rank 0's scheduler, as a host."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from april.config.engines import EngineConfig
from april.config.settings import Config
from april.driver.llm import single_turn
from april.driver.loop_thread import LoopThread
from april.engines.kinds.factory import create_engines, part_of_process
from april.engines.protocol import Engine
from april.errors import LinkError
from april.processes.host import Host
from april.processes.ranks import Ranks

FUNCTIONS = ("rollout", "reward", "group_reward", "filter")


@dataclass(frozen=True, kw_only=True)
class Brought:
    """The part of one rank in what the scheduler has, from the arguments that the rank was given.

    An engine of the rank's own model, or engine objects, always; the rest only where the work is ``spread``.
    """

    config: Config
    ranks: Ranks
    spread: bool
    model: Any
    engines: Sequence[Engine] | None
    tokenizer: Any
    processor: Any = None
    functions: Mapping[str, Any] = field(default_factory=dict)
    """by their names, those that were given"""
    agents: Mapping[str, Any] = field(default_factory=dict)
    """options of the endpoint, by their names"""

    def __str__(self) -> str:
        """Describe what the ranks must have alike."""
        given = ", ".join(sorted(self.functions)) or "no functions"
        return f"spread=True with {given}" if self.spread else f"spread={self.spread!r}"

    @property
    def engine(self) -> EngineConfig | None:
        """The configuration of its engines, where they are not given; None means that it has none."""
        if not self.spread:
            return self.config.engine if self.ranks.rank == 0 or self.model is not None else None
        return part_of_process(self.config.engine, self.model, self.ranks.rank, self.ranks.world_size)

    @property
    def own_config(self) -> Config:
        """The configuration with this rank's engines only."""
        if not self.spread or self.engine is None:
            return self.config
        return self.config.model_copy(update={"engine": self.engine})

    @property
    def lends(self) -> bool:
        """True if the other ranks may be hosts: rank 0, which has an engine then, takes them."""
        return self.model is not None or self.engines is not None or (self.spread and self.engine is not None)

    @property
    def anything(self) -> bool:
        """True if there is something for a host."""
        return self.engines is not None or self.engine is not None or self.runs_functions

    @property
    def runs_functions(self) -> bool:
        """True if the rank runs functions."""
        return self.spread and any(f is not None and f is not single_turn for f in self.functions.values())

    def open(self, run: Callable[[Coroutine[Any, Any, list[Engine]]], list[Engine]]) -> list[Engine]:
        """The engines; ``run`` as for :func:`april.engines.kinds.factory.create_engines`, which says what it raises."""
        if self.engines is not None:
            return list(self.engines)
        if self.engine is None:
            return []
        return create_engines(self.engine, self.model, self.config.seed, run, self.processor)


class RankHost:
    """The host of a rank other than 0, on a loop of its own.

    Args:
        address: where rank 0's scheduler takes hosts.
        token: the same as for ranks.

    Raises:
        ConfigError: the engines cannot be had, or a function cannot be called.
        EngineError: a server could not be asked.
        LinkError: the scheduler does not take it.
    """

    def __init__(self, brought: Brought, address: str, token: str) -> None:
        name = f"rank{brought.ranks.rank}"
        self.engines: list[Engine] = []
        self._host: Host | None = None
        self._thread = LoopThread(f"april-{name}")
        try:
            self.engines = brought.open(self._thread.run)
            self._host = Host(
                name, engines=self.engines, tokenizer=brought.tokenizer, address=address, token=token,
                **brought.agents, **(brought.functions if brought.runs_functions else {}),
            )  # fmt: skip
            self._thread.run(self._host.astart)
        except BaseException:
            self.close()
            raise

    def run(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Run a coroutine on the engines' loop, and wait for it."""
        return self._thread.run(work)

    def close(self, farewell_s: float = 0.0) -> None:
        """Leave the scheduler, which may end first for ``farewell_s``, and end the engines; idempotent."""
        ended = False
        try:
            if self._thread.alive and self._thread.here:
                self._thread.run(partial(self._end, farewell_s))
                ended = True
        finally:  # an interrupt ends only the wait
            self._thread.begin_to_stop(None if ended else partial(self._end, 0.0))
            self._thread.stop()

    async def _end(self, farewell_s: float) -> None:
        if self._host is not None:
            if farewell_s:
                with suppress(TimeoutError, LinkError):
                    async with asyncio.timeout(farewell_s):
                        await self._host.aend()
            await self._host.aclose()
        else:
            for engine in self.engines:
                await engine.close()
