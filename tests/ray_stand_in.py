"""Actors without Ray: their methods run on a loop in a thread, and an actor can die."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from rank_threads import cut

import april
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.engine import SimulatedEngine
from april.processes.ranks import Ranks
from april.processes.ray_run import ActorScheduler, CoreActor

PATIENCE_S = 60.0
"""Of a test that would hang."""
CONFIG = april.Config(rollout_batch_size=2, n_samples_per_prompt=3, max_response_len=9)


class ActorDied(Exception):
    """As Ray's."""


class Reference:
    """What a call of an actor returns: it can be awaited on every loop."""

    def __init__(self, future: Future[Any]) -> None:
        self.future = future

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self.future).__await__()


class Method:
    """``actor.name``, for ``.remote(...)``."""

    def __init__(self, actor: Actor, name: str) -> None:
        self._actor = actor
        self._name = name

    def options(self, **_: Any) -> Method:
        """As Ray's."""
        return self

    def remote(self, *arguments: Any, **named: Any) -> Reference:
        """Call it; never waits."""
        reply: Future[Any] = Future()

        def begin() -> None:
            """Only what has begun is a coroutine: a loop that ends drops this, and nobody awaits it."""
            if self._actor.ends:
                _copy(None, reply)
                return
            task = self._actor.loop.create_task(self._call(*arguments, **named))
            task.add_done_callback(lambda _: _copy(task, reply))

        self._actor.unanswered.add(reply)
        reply.add_done_callback(self._actor.unanswered.discard)
        try:
            self._actor.loop.call_soon_threadsafe(begin)
        except RuntimeError:  # the loop has ended
            _copy(None, reply)
        return Reference(reply)

    async def _call(self, *arguments: Any, **named: Any) -> Any:
        return await getattr(self._actor.made, self._name)(*arguments, **named)


def _copy(task: asyncio.Task[Any] | None, reply: Future[Any]) -> None:
    """What became of a call, which may be answered already; None: its actor has ended."""
    with suppress(InvalidStateError):
        if task is None or task.cancelled():
            reply.set_exception(ActorDied())
        elif (error := task.exception()) is not None:
            reply.set_exception(error)
        else:
            reply.set_result(task.result())


class Actor:
    """A handle of an object whose methods are coroutines."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.unanswered: set[Future[Any]] = set()
        self.ends = False
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

        async def begin() -> None:
            self.made = make()

        asyncio.run_coroutine_threadsafe(begin(), self.loop).result(PATIENCE_S)

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)

    def stop(self) -> None:
        """Nothing of it runs any more."""

        async def end() -> None:
            self.ends = True
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.get_running_loop().shutdown_default_executor()

        asyncio.run_coroutine_threadsafe(end(), self.loop).result(PATIENCE_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
        for reply in self.unanswered.copy():
            _copy(None, reply)


def result(reference: Reference) -> Any:
    """As ``ray.get``."""
    return reference.future.result(PATIENCE_S)


GO_ON = threading.Event()
"""Rewards wait for it."""


def reward(prompt: april.Prompt, response: april.Response) -> float:
    """Differs inside of groups."""
    GO_ON.wait(PATIENCE_S)
    return float(response.sample_id.index)


def engine() -> SimulatedEngine:
    """Responses of 3 to 8 tokens, at once."""
    cost = DecodeCost(1e-4, 0.0, 0.0)
    return SimulatedEngine("e", cost, lambda r: 3 + sum(r.sample_key or (0, 0)) % 6, max_running=8)


class World:
    """The core's actor, with an engine of its own, and the ranks that attach to it."""

    def __init__(self, ranks: int = 2, config: april.Config = CONFIG, prompts: int = 8, **options: Any) -> None:
        group = Ranks(world_size=ranks, address="none", token="none", **{"rank_timeout_s": 30.0} | options)  # noqa: S106
        GO_ON.set()
        self.core = Actor(lambda: CoreActor("127.0.0.1"))
        seen = {"prompts": [[1 + i, 2] for i in range(prompts)], "reward": reward, "check": True}
        wrong = result(
            self.core.start.remote(
                config=config, ranks=group, split_by="samples", engines=lambda _: [engine()], hosts=[], options=seen
            )
        )
        assert wrong is None, wrong

    def attach(self, rank: int) -> ActorScheduler:
        """The scheduler of a rank."""
        seat = result(self.core.rank.remote(rank))
        if isinstance(seat, Exception):
            raise seat
        return ActorScheduler(*seat)

    def kill(self, rank: ActorScheduler) -> None:
        """The end of a rank's process: its connection ends, and nothing comes from it any more."""
        cut([rank._seat._link], rank._seat._thread)
        rank._seat._thread.stop()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *exc: object) -> None:
        result(self.core.close.remote())
        conductor = self.core.made.center.conductor
        conductor.join(PATIENCE_S)
        assert not conductor.is_alive(), "it hangs"
        self.core.stop()


def beside(*programs: Callable[[], Any]) -> list[Any]:
    """What each returns or raises, all at the same time."""
    outcomes: list[Any] = [None] * len(programs)

    def run(i: int, program: Callable[[], Any]) -> None:
        try:
            outcomes[i] = program()
        except BaseException as error:
            outcomes[i] = error

    threads = [threading.Thread(target=run, args=(i, p), daemon=True) for i, p in enumerate(programs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "it hangs"
    return outcomes


async def until(there: Callable[[], bool]) -> None:
    """Wait on a loop of april's until something is so."""
    while not there():  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0)
