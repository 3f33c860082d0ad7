"""Processes beside this one, which end with it: nothing that computes for nobody is left behind."""

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
"""Called as submit(function, *arguments), of which all can be sent to another process."""


@contextmanager
def process_pool(processes: int, set_up: Callable[..., object] | None = None, *arguments: Any) -> Iterator[Submit]:
    """Yield what hands work to so many processes, each of which begins with ``set_up(*arguments)``.

    An error or an interrupt in the block ends the processes at once. One from the keyboard reaches all of them, so they
    ignore it.
    """
    with ExitStack() as stack:
        before = set(active_children())
        executor = ProcessPoolExecutor(processes, get_context("spawn"), _begin, (set_up, arguments))
        stack.callback(executor.shutdown, cancel_futures=True)
        stack.push(lambda kind, *_: kind is not None and _end(set(active_children()) - before))
        yield executor.submit


@contextmanager
def undisturbed() -> Iterator[None]:
    """Make signals that end the program wait until this is over; only the main thread gets any.

    Work is handed over in it: a process that is half begun could neither be ended nor waited for.
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
def sigterm_unwinds() -> Iterator[None]:
    """Make SIGTERM end the program as an interrupt does: its processes end first, and leave no semaphores behind."""

    def unwind(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _begin(set_up: Callable[..., object] | None, arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if set_up is not None:
        set_up(*arguments)


def _end(processes: Iterable[BaseProcess]) -> bool:
    """End what computes for nobody any more; False: the error that ended the block goes on."""
    for process in processes:
        process.terminate()
    return False
