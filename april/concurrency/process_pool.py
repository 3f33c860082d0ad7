"""Runs a pool of worker processes that end with their parent, also after an error or a signal."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import active_children, get_context
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

Submit = Callable[..., Future[Any]]
"""Function that is called as submit(function, *arguments); all of these must be picklable."""


@contextmanager
def process_pool(processes: int) -> Iterator[Submit]:
    """Start a pool of worker processes; yields its submit function.

    An error or an interrupt in the block terminates the workers at once. They ignore Ctrl-C, which a terminal sends to
    them as well.
    """
    with ExitStack() as stack:
        before = set(active_children())
        executor = ProcessPoolExecutor(processes, get_context("spawn"), _ignore_interrupt)
        stack.callback(executor.shutdown, cancel_futures=True)
        stack.push(lambda kind, *_: kind is not None and _end(set(active_children()) - before))
        yield executor.submit


@contextmanager
def ignore_interrupts() -> Iterator[None]:
    """Delay SIGINT and SIGTERM until the end of the block; does nothing outside of the main thread.

    Work is submitted inside such a block, because a half-started process could neither be terminated nor waited for.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    late: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda number, frame: late.append(number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        for held_back in late:
            signal.raise_signal(held_back)


@contextmanager
def sigterm_as_exception() -> Iterator[None]:
    """Make SIGTERM raise SystemExit, so that the worker processes end first and leave no semaphores behind."""

    def unwind(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _ignore_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _end(processes: Iterable[BaseProcess]) -> bool:
    """Terminate worker processes; returns False, so that the error that ended the block propagates."""
    for process in processes:
        process.terminate()
    return False
