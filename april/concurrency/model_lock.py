"""A fair lock on a model from which april generates, shared by its decoder and the user (``april.hold_model``).

The decoder takes the lock for a few decoding steps at a time. Invariant: there is one owner at most, and waiting owners
get the lock in the order of their requests. A ``with`` block notes its ownership in a ``contextvars`` variable. Tasks
and ``asyncio.to_thread`` inherit it, so code in them may take the lock again. This module does not import torch.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Self

from april.errors import ConfigError, RolloutError, UsageError

log = logging.getLogger("april")

WARN_AFTER_S = 10.0
"""Seconds that the engine waits for a held model before it logs a warning."""
_held: ContextVar[tuple[tuple[FairModelLock, object], ...]] = ContextVar("april_held_models", default=())
"""Locks that the current context owns, each with the object that marks the owner."""
_locks: weakref.WeakKeyDictionary[Any, FairModelLock] = weakref.WeakKeyDictionary()
_locks_lock = threading.RLock()


class FairModelLock:
    """A reentrant first-come-first-served lock on one model, for threads and event loops."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner: object | None = None
        self._depth = 0
        self._queue: deque[tuple[object, Callable[[], None], str]] = deque()
        self.holder = ""
        """Function and line of the code that holds the lock; empty for a decoder or nobody."""

    def request(self, owner: object, wake: Callable[[], None], where: str = "") -> bool:
        """Acquire the lock for ``owner`` if it is free; otherwise queue ``owner``. Returns whether it has the lock now.

        As soon as a queued owner has the lock, ``wake`` is called, from any thread.
        """
        with self._lock:
            if self._owner is None or self._owner is owner:
                self._owner, self.holder = owner, where or self.holder
                self._depth += 1
                return True
            self._queue.append((owner, wake, where))
            return False

    def release(self, owner: object) -> None:
        """Release the lock if ``owner`` has it, or remove ``owner`` from the queue."""
        with self._lock:
            if self._owner is not owner:
                self._queue = deque(entry for entry in self._queue if entry[0] is not owner)
                return
            self._depth -= 1
            while self._depth == 0:
                self._owner, self.holder = None, ""
                if not self._queue:
                    return
                self._owner, wake, self.holder = self._queue.popleft()
                try:
                    wake()
                except RuntimeError:  # the owner's event loop has ended
                    continue
                self._depth = 1

    def owned_by(self, owner: object) -> bool:
        """Return whether ``owner`` has the lock."""
        return self._owner is owner

    def excuse(self, owner: object) -> None:
        """Remove ``owner`` from the queue and wake it, so that its :meth:`wait` returns False without the lock."""
        with self._lock:
            wakes = [wake for waiting, wake, _ in self._queue if waiting is owner]
            self._queue = deque(entry for entry in self._queue if entry[0] is not owner)
        for wake in wakes:
            wake()

    async def wait(self, owner: object, where: str = "") -> bool:
        """Wait until ``owner`` has the lock; False after :meth:`excuse`. A cancelled call releases the lock."""
        loop = asyncio.get_running_loop()
        woken = loop.create_future()
        try:
            if not self.request(owner, lambda: _wake(loop, woken), where):
                await woken
        except BaseException:
            self.release(owner)
            raise
        return self.owned_by(owner)

    async def free(self, name: str) -> None:
        """Wait until nobody holds the lock; logs a warning for engine ``name`` after WARN_AFTER_S."""
        telling = asyncio.get_running_loop().call_later(
            WARN_AFTER_S,
            lambda: log.warning(
                "%s: the model is held by april.hold_model() in %s for more than %g s; then the trainer gets it",
                name,
                self.holder,
                WARN_AFTER_S,
            ),
        )
        me = object()
        try:
            await self.wait(me)
            self.release(me)
        finally:
            telling.cancel()


def _wake(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    loop.call_soon_threadsafe(lambda: None if future.done() else future.set_result(None))


def model_lock_of(model: Any) -> FairModelLock:
    """Return the lock of ``model``; modules that contain each other share one lock."""
    with _locks_lock:
        lock = _locks.get(model)
        if lock is None:
            inside = set(map(id, model.modules()))
            related = (k for m, k in _locks.items() if id(m) in inside or any(part is model for part in m.modules()))
            lock = _locks[model] = next(related, None) or FairModelLock()
        return lock


class hold_model:
    """Use a model exclusively while april generates from it: ``with april.hold_model(model): ...``.

    Use it in rewards, rollout functions, filters and threads that temporarily change the embedded engine's model (its
    adapter, mode or dtype). Generation pauses inside the block, and no batch is delivered before its end, so restore
    the model by then. Blocks run in the order in which they began to wait, and may be nested. In a coroutine, use
    ``async with``. Calls that wait for generation (``llm.generate``, ``next_batch``) are refused inside.

    Args:
        model: Model of the engine, or a module that contains it or is contained in it.
    """

    def __init__(self, model: Any) -> None:
        if not callable(getattr(model, "modules", None)):
            raise ConfigError(f"hold_model: model must be a torch module, got {type(model).__name__}")
        self._lock = model_lock_of(model)

    def __enter__(self) -> Self:
        owner = self._mine()
        if owner is None:
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                pass
            else:
                raise UsageError("hold_model: use `async with` in a coroutine, so that its event loop can go on")
            owner, woken = object(), threading.Event()
            try:
                if not self._lock.request(owner, woken.set, _caller()):
                    woken.wait()
            except BaseException:
                self._lock.release(owner)
                raise
        else:
            self._lock.request(owner, lambda: None)  # succeeds at once, because this owner has the lock
        _held.set((*_held.get(), (self._lock, owner)))
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        held = _held.get()
        at = max(i for i, (lock, _) in enumerate(held) if lock is self._lock)
        _held.set((*held[:at], *held[at + 1 :]))
        self._lock.release(held[at][1])

    async def __aenter__(self) -> Self:
        owner = self._mine()
        if owner is None:
            owner = object()
            await self._lock.wait(owner, _caller())
        else:
            self._lock.request(owner, lambda: None)  # succeeds at once, because this owner has the lock
        _held.set((*_held.get(), (self._lock, owner)))
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.__exit__(kind, error, trace)

    def _mine(self) -> object | None:
        """Return the owner object by which this context already has the lock, or None."""
        return next((o for lock, o in _held.get() if lock is self._lock and lock.owned_by(o)), None)


def _caller() -> str:
    code = (frame := sys._getframe(2)).f_code
    return f"{code.co_qualname} ({code.co_filename}, line {frame.f_lineno})"


def refuse_while_held(what: str) -> None:
    """Raise RolloutError if the calling context holds a model, because the call ``what`` would deadlock."""
    if any(lock.owned_by(owner) for lock, owner in _held.get()):
        raise RolloutError(
            f"{what}: it would wait for generation, which is paused inside april.hold_model(); call it outside"
        )
