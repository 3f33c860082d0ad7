"""Runs the scheduler on the caller's own event loop, so that tests of user functions can use virtual time.

The scheduler is the real one; only its background thread is left out.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial, wraps
from typing import Any, Self, TypeVar

from april.config.settings import Config
from april.core.batch import Batch
from april.core.event_pump import RequestLog
from april.core.versions import PolicyVersion
from april.driver.llm import RolloutFunction, single_turn
from april.driver.loop_thread import LoopThread, Reply, Work
from april.driver.rewards import EvaluationResult
from april.driver.user_code import inside_user_code, is_async, name_of, refuse_inside_user_code
from april.engines.protocol import Engine
from april.errors import ConfigError, RolloutError, SchedulerClosed
from april.scheduler import RolloutScheduler, check_functions
from april.testing.auditing import Audit, LoadedState, audit
from april.testing.fake_engine import FakeEngine
from april.testing.virtual_clock import VirtualClockLoop

T = TypeVar("T")

_CLOSED = "the rollouts are closed; create new ones"


class _SameLoop(LoopThread):
    """Replaces the scheduler's background thread and runs everything on the caller's loop."""

    threads_wake_it = False

    def __init__(self, *, relax_gc: bool = False) -> None:
        self._open = True
        self._running: dict[asyncio.Task[Any], asyncio.Future[None]] = {}
        """Future for each task that waits in a call; the future is done when the call has ended."""
        self._cancelled: set[asyncio.Task[Any]] = set()
        """Tasks whose calls :meth:`end` has cancelled."""

    @property
    def alive(self) -> bool:
        return self._open

    @property
    def in_own_process(self) -> bool:
        return True

    def blocked(self) -> tuple[float, str]:
        return 0.0, ""

    def refuse_waiting(self) -> None:
        raise RolloutError("a blocking call would stop the loop that it waits for; await the methods of Rollouts")

    def submit(self, work: Work[T], *on_done: Callable[[Reply[T]], object]) -> Reply[T]:
        self.refuse_waiting()
        raise AssertionError("unreachable")

    async def run_async(self, work: Work[T]) -> T:
        refuse_inside_user_code()
        if not self._open:
            raise SchedulerClosed(_CLOSED)
        me = asyncio.current_task()
        assert me is not None
        ended = self._running[me] = asyncio.get_running_loop().create_future()
        try:
            return await work()
        except asyncio.CancelledError:
            # if nobody except ``end`` has cancelled this task, its caller should see a closed scheduler
            if me in self._cancelled and me.uncancel() == 0:
                raise SchedulerClosed(_CLOSED) from None
            raise
        finally:
            del self._running[me]
            ended.set_result(None)

    async def end(self) -> None:
        """Cancel the running calls and wait until they end; their callers get SchedulerClosed."""
        calls = dict(self._running)
        self._cancelled.update(calls)
        for task in calls:
            task.cancel()
        if calls:
            await asyncio.wait(calls.values())

    def call(self, function: Callable[[], T]) -> T:
        return function()

    def run_or_call(self, work: Callable[[], Coroutine[Any, Any, T]], at_once: Callable[[], T]) -> T:
        return at_once()

    def call_later(self, function: Callable[[], object]) -> None:
        if self._open:
            function()

    def stop(self, *, answers: bool = True, last: Callable[[], Awaitable[None]] | None = None) -> None:
        self._open = False

    def request_stop(self, last: Callable[[], Awaitable[None]] | None = None) -> None:
        self._open = False


class _SameLoopScheduler(RolloutScheduler):
    _loop_type = _SameLoop


class Rollouts:
    """The methods of :class:`april.RolloutScheduler`, awaited on the current loop; created by :func:`rollouts`."""

    def __init__(self, scheduler: _SameLoopScheduler) -> None:
        assert isinstance(scheduler._thread, _SameLoop)
        self._scheduler = scheduler
        self._driver = scheduler._driver
        self._loop = scheduler._thread
        self.batches: list[Batch] = []
        """Every batch that :meth:`next_batch` has returned."""
        self._loaded: LoadedState | None = None

    @property
    def requests(self) -> RequestLog:
        """Log of the latest requests: their times and tokens."""
        return self._driver.requests

    async def next_batch(self) -> Batch:
        """Return the next batch; errors and cancellation are as in ``RolloutScheduler.anext_batch``."""
        batch = await self._scheduler.anext_batch()
        self.batches.append(batch)
        return batch

    async def weight_update(
        self, path: str | None = None, transfer: Callable[[], Any] | None = None, trained: int | None = None,
        label: int | None = None,
    ) -> PolicyVersion:  # fmt: skip
        """Update the weights of all engines; the policy version rises by one, or to ``label``.

        ``trained`` is the last batch on which the weights were trained (None means the oldest delivered batch without
        an update). ``transfer``, a plain or async function, runs while the engines are paused.

        Raises:
            ConfigError: an engine is behind a server, but neither path nor transfer is given; nothing has happened.
            EngineError: an engine could not pause or load the weights; the version stays, and the call may be repeated.
        """

        async def hand_over() -> None:
            assert transfer is not None
            with inside_user_code():
                result = transfer()
                if inspect.isawaitable(result):
                    await result

        update = None if transfer is None else hand_over
        return await self._loop.run_async(partial(self._driver.update_weights, path, update, trained, label=label))

    async def load_state_dict(self, state: dict[str, Any], path: str | None = None) -> PolicyVersion:
        """Load a state as ``RolloutScheduler.load_state_dict`` does; call it before the first batch."""
        version = await self._loop.run_async(partial(self._driver.load_state_dict, state, path))
        self._loaded = LoadedState(self._driver.core)
        return version

    async def evaluate(self, prompts: Iterable[Any], **sampling: Any) -> EvaluationResult:
        """Evaluate as ``RolloutScheduler.evaluate`` does."""
        return await self._scheduler.aevaluate(prompts, **sampling)

    def audit(self) -> Audit:
        """Run :func:`april.testing.audit` on all batches so far, with the ledger; all engines must be FakeEngines.

        Raises:
            AuditError: the batches or the ledger differ from the tokens that the engines yielded.
        """
        engines = [engine for engine in self.engines if isinstance(engine, FakeEngine)]
        if len(engines) < len(self.engines):
            raise ConfigError("an audit needs the records of fake engines, but these rollouts also have others")
        return audit(self.batches, engines, self.ledger(), loaded=self._loaded)

    @property
    def scheduler(self) -> RolloutScheduler:
        """The underlying scheduler; its blocking calls raise RolloutError."""
        return self._scheduler

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute from the scheduler, such as ``version``, ``engines``, ``ledger`` or ``story``."""
        return getattr(self._scheduler, name)

    def __repr__(self) -> str:
        return f"<Rollouts {self._driver.core!r}>"

    async def close(self) -> None:
        """End all requests, functions and engines; idempotent."""
        self._loop.stop()
        await self._driver.close()
        await self._loop.end()
        self._scheduler._observers.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self.close()


def rollouts(
    config: Config,
    *,
    engines: Sequence[Engine],
    prompts: Iterable[Any],
    reward: Callable[..., Any] | None = None,
    group_reward: Callable[..., Any] | None = None,
    filter: Callable[..., Any] | None = None,
    rollout: RolloutFunction = single_turn,
    check: bool = True,
    **options: Any,
) -> Rollouts:
    """Create the real scheduler on the running loop, virtual or real; arguments as for :class:`april.RolloutScheduler`.

    Use it as ``async with rollouts(...)``. Reward functions and filters that are not async run directly on the loop,
    because a virtual clock cannot wait for threads. For the same reason a rollout function must be async on a virtual
    clock. With ``check``, april cross-checks its whole state after every event.

    Raises:
        ConfigError: as for RolloutScheduler; or the rollout function is not async, on a virtual clock.
    """
    if isinstance(config, Config):
        check_functions(config, rollout, reward, group_reward, filter)  # check the functions before they are wrapped
    if isinstance(asyncio.get_running_loop(), VirtualClockLoop) and not is_async(rollout):
        raise ConfigError(
            f"rollout: {name_of(rollout)} is a plain function, which runs in a thread, but a virtual clock waits for "
            "no thread; make it async, or use a real loop"
        )
    scheduler = _SameLoopScheduler(
        config,
        prompts=prompts,
        reward=_on_the_loop(reward),
        group_reward=_on_the_loop(group_reward),
        filter=_on_the_loop(filter),
        rollout=rollout,
        engines=engines,
        check=check,
        **options,
    )
    return Rollouts(scheduler)


def _on_the_loop(function: Callable[..., Any] | None) -> Callable[..., Awaitable[Any]] | None:
    """Wrap a plain function as a coroutine function; anything not callable is returned as it is, and refused later."""
    if function is None or not callable(function):
        return function

    @wraps(function, updated=())
    async def on_the_loop(*args: Any) -> Any:
        result = function(*args)
        return await result if inspect.isawaitable(result) else result

    return on_the_loop
