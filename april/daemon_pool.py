"""A thread pool that does not keep the process alive: a function that hangs costs its thread and nothing else."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class DaemonPool(ThreadPoolExecutor):
    """As its base class, which asyncio insists on for its default executor; but nobody joins the threads at exit."""

    def __init__(self, name: str, max_workers: int | None = None) -> None:
        super().__init__(max_workers)
        self._name = name
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._free = threading.Semaphore(0)
        """Threads that wait for a job."""
        self._workers: list[threading.Thread] = []
        self._numbers = itertools.count()
        self._over = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Call ``fn`` in one of the threads.

        Raises:
            RuntimeError: after :meth:`shutdown`, or the system gives no more threads.
        """
        if self._over:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[T] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        if not self._free.acquire(blocking=False) and len(self._workers) < self._max_workers:
            name = f"{self._name}_{next(self._numbers)}"
            worker = threading.Thread(target=_work, args=(self._jobs, self._free), name=name, daemon=True)
            worker.start()
            self._workers.append(worker)
        self._jobs.put(job)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take nothing more; the threads end after what they have, and with ``wait`` this returns when they have."""
        self._over = True
        if cancel_futures:
            while not self._jobs.empty():
                self._jobs.get_nowait()
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


def _work(jobs: SimpleQueue[Callable[[], None] | None], free: threading.Semaphore) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # it must not live on in an idle thread
        free.release()
