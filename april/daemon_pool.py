"""A thread pool that keeps the process alive for seconds only: a function that hangs costs a thread, nothing else."""

from __future__ import annotations

import atexit
import ctypes
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_Job = tuple[Future[Any], Callable[[], Any]]


class DaemonPool(ThreadPoolExecutor):
    """As its base class, which asyncio insists on for its default executor; but its threads are not joined at exit."""

    def __init__(self, name: str, max_workers: int | None = None) -> None:
        super().__init__(max_workers)
        self._name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._free = threading.Semaphore(0)
        """Threads that wait for a job."""
        self._workers: list[threading.Thread] = []
        self._numbers = itertools.count()
        self._over = False
        self._taking = threading.RLock()
        """No job comes behind the words that end the threads; a signal handler may be inside it again."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Call ``fn`` in one of the threads.

        Raises:
            RuntimeError: after :meth:`shutdown`, or the system gives no more threads.
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
        """Take nothing more; the threads end after what they have, and with ``wait`` this returns when they have."""
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
        """Whether all threads have ended within ``seconds``, after a :meth:`shutdown`."""
        end = time.monotonic() + seconds
        for worker in self._workers:
            worker.join(max(0.0, end - time.monotonic()))
        return not any(worker.is_alive() for worker in self._workers)


def _work(jobs: SimpleQueue[_Job | None], free: threading.Semaphore) -> None:
    while (job := jobs.get()) is not None:
        future, function = job
        if future.set_running_or_notify_cancel():
            try:
                with waited_for(function):
                    result = function()
                future.set_result(result)
                del result
            except BaseException as error:
                future.set_exception(error)
        del job, future, function  # they must not live on in an idle thread
        free.release()


log = logging.getLogger("april")

EXIT_PATIENCE_S, TELL_S, INTERRUPT_S = 10.0, 2.0, 2.0
"""How long the end of the process waits for functions, when it says so, and how long for those it has interrupted."""
_running: dict[int, Callable[..., Any]] = {}
"""What runs in threads of april, by thread."""
_over = threading.Event()
"""What still ran was interrupted: the process ends now."""


@contextmanager
def waited_for(function: Callable[..., Any]) -> Iterator[None]:
    """The calling thread runs a function of the user."""
    me = threading.get_ident()
    _running[me] = function
    try:
        yield
    finally:
        _running.pop(me, None)


def stay_if_over() -> None:
    """Does not return once what ran was interrupted: nobody hears its answer, and what begins now would be torn out."""
    if _over.is_set():
        _running.pop(threading.get_ident(), None)
        threading.Event().wait()


def _wait() -> None:
    if not _ended_within(TELL_S):
        log.warning("the process ends when %s is done, after %g s at the latest", _names(), EXIT_PATIENCE_S)
    if not _ended_within(EXIT_PATIENCE_S - TELL_S):
        log.error("%s did not end; it is interrupted, and the process ends", _names())
        _over.set()  # before the look: what begins later sees it
        for thread in list(_running):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(SystemExit))
        _ended_within(INTERRUPT_S)


def _ended_within(seconds: float) -> bool:
    end = time.monotonic() + seconds
    while _running and time.monotonic() < end:
        time.sleep(0.01)
    return not _running


def _name(function: Any) -> str:
    """Of what is called in the end: partials and helpers are given it as their first argument."""
    while isinstance(function, partial):
        function = function.args[0] if function.args and callable(function.args[0]) else function.func
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _names() -> str:
    names = sorted(map(_name, _running.values()))
    return names[0] + (f" and {len(names) - 1} more" if names[1:] else "")


atexit.register(_wait)
os.register_at_fork(after_in_child=_running.clear)
