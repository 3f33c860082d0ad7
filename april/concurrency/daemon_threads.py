"""A pool of daemon threads, and an exit handler that waits a few seconds for functions that still run in them.

If a daemon thread returns from a native library while the interpreter shuts down, Python kills the thread there, and
C++ code answers that with ``abort()``: a successful run would end with code 134. So the exit handler waits, and logs
the functions for which it waits. It then raises SystemExit in the functions that still run. A function ends by this
when it returns to Python, and its thread then blocks for ever; a function that never returns to Python does no harm.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

log = logging.getLogger("april")

T = TypeVar("T")
_Job = tuple[Future[Any], Callable[[], Any]]

EXIT_PATIENCE_S, TELL_S, INTERRUPT_S = 10.0, 2.0, 2.0
"""The exit handler waits EXIT_PATIENCE_S seconds for functions before it interrupts them, and logs a warning after the
first TELL_S of these seconds. After the interrupt it waits up to INTERRUPT_S seconds more."""
_running: dict[int, Callable[..., Any]] = {}
"""Functions that run in april's threads now, by thread identifier."""
_over = threading.Event()
"""Set once the exit handler interrupts functions; no other function starts after that."""


class DaemonPool(ThreadPoolExecutor):
    """An executor whose threads are daemons and not joined at exit; asyncio accepts it as its default executor."""

    def __init__(self, name: str, max_workers: int | None = None) -> None:
        super().__init__(max_workers)
        self._name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._free = threading.Semaphore(0)
        """Semaphore that counts the threads waiting for a job."""
        self._workers: list[threading.Thread] = []
        self._numbers = itertools.count()
        self._over = False
        self._taking = threading.RLock()
        """Lock that keeps jobs from being queued after the shutdown; reentrant, as signal handlers may submit."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Queue a call of ``fn`` for a thread, and start another thread if none is free.

        Raises:
            RuntimeError: after :meth:`shutdown`, or if the system allows no more threads.
        """
        future: Future[T] = Future()
        with self._taking:
            if self._over:
                raise RuntimeError("cannot schedule new futures after shutdown")
            if not self._free.acquire(blocking=False) and len(self._workers) < self._max_workers:
                name = f"{self._name}_{next(self._numbers)}"
                worker = threading.Thread(target=_work, args=(self._jobs, self._free), name=name, daemon=True)
                worker.start()
                self._workers.append(worker)
            self._jobs.put((future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more jobs. The threads end after the queued jobs; ``wait`` means to wait for their end."""
        with self._taking:
            self._over = True
            if cancel_futures:
                with suppress(Empty):
                    while (job := self._jobs.get_nowait()) is not None:
                        job[0].cancel()
            for _ in self._workers:
                self._jobs.put(None)
        if wait:
            for worker in self._workers:
                worker.join()

    def join(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the threads to end after a :meth:`shutdown`; returns whether all have ended."""
        end = time.monotonic() + seconds
        for worker in self._workers:
            worker.join(max(0.0, end - time.monotonic()))
        return not any(worker.is_alive() for worker in self._workers)


def _work(jobs: SimpleQueue[_Job | None], free: threading.Semaphore) -> None:
    me = threading.get_ident()
    while (job := jobs.get()) is not None:
        future, function = job
        wanted, result, raised = future.set_running_or_notify_cancel(), None, None
        if wanted:
            try:
                _running[me] = function
                if not _over.is_set():
                    result = function()
            except BaseException as error:
                raised = error
            _running.pop(me, None)
            if _over.is_set():
                threading.Event().wait()  # block for ever: a thread that goes on now would be killed at exit
        free.release()  # before the result is set, so that a job submitted because of the result needs no new thread
        if raised is not None:
            future.set_exception(raised)
        elif wanted:
            future.set_result(result)
        del job, future, function, result, raised  # an idle thread must not keep these objects alive


def _wait() -> None:
    if not _ended_within(TELL_S):
        log.warning("the process ends when %s is done, after %g s at the latest", _names(), EXIT_PATIENCE_S)
    if not _ended_within(EXIT_PATIENCE_S - TELL_S):
        log.error("%s did not end; it is interrupted, and the process ends", _names())
        _over.set()  # before reading _running, so that functions which start later see it
        for thread in list(_running):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(SystemExit))
        _ended_within(INTERRUPT_S)


def _ended_within(seconds: float) -> bool:
    end = time.monotonic() + seconds
    while _running and time.monotonic() < end:
        time.sleep(0.01)
    return not _running


def _name(function: Any) -> str:
    """Return the name of the user's function; april's helpers are partials with that function as first argument."""
    while isinstance(function, partial):
        function = function.args[0] if function.args and callable(function.args[0]) else function.func
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _names() -> str:
    names = sorted(map(_name, _running.values()))
    return names[0] + (f" and {len(names) - 1} more" if names[1:] else "")


atexit.register(_wait)
os.register_at_fork(after_in_child=_running.clear)
