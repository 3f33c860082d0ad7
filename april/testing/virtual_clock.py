"""An asyncio event loop on virtual time: waiting takes no time, and the same program always runs in the same order.

Invariant: ``loop.time()`` moves only when no callback is ready, and then to the exact time of the next timer; no
callback runs before its time. So a timer one float above t runs after everything that happens at t.

A virtual loop has no sockets, pipes, signals, processes or other threads to wait for. Where a real loop would hang
because nothing is scheduled, it raises ``VirtualDeadlock`` and names the tasks that wait.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NoReturn, TypeVar

from april.errors import AprilError

_T = TypeVar("_T")
_TASKS_NAMED = 12


class VirtualDeadlock(AprilError, RuntimeError):
    """Every task waits for something that nothing scheduled can bring about, or the time limit is over."""


class _NoFiles(selectors.BaseSelector):
    """The selector of a loop that never sleeps: it moves the clock instead."""

    def __init__(self, loop: VirtualClockLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout > 0:
            self._loop._jump()
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> NoReturn:
        raise NotImplementedError("a virtual loop waits for no socket or pipe; use in-memory fakes, or a real loop")

    def unregister(self, fileobj: Any) -> NoReturn:
        raise KeyError(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return {}


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """Event loop whose clock starts at ``start_s`` and jumps to the next timer.

    Overrides private hooks of asyncio's base loop (``_make_self_pipe``, ``_scheduled``); tested on Python 3.11 to 3.13.
    """

    threads_wake_it = False
    """Other threads may not call something on it while it waits: it never does."""

    def __init__(self, start_s: float = 0.0, limit_s: float = math.inf) -> None:
        self._virtual_now = start_s
        self._virtual_end = start_s + limit_s
        super().__init__(_NoFiles(self))
        self._set_resolution()

    def time(self) -> float:
        """Virtual seconds."""
        return self._virtual_now

    def _jump(self) -> None:
        """Nothing is ready: go to the next timer, or say what everybody waits for."""
        timers: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]  # base loop's heap
        if not timers:
            raise VirtualDeadlock(
                f"nothing is scheduled at virtual time {self._virtual_now} s, and threads or sockets cannot wake a "
                f"virtual loop; {self._who_waits()}"
            )
        when = timers[0].when()
        if when > self._virtual_end:
            raise VirtualDeadlock(
                f"the limit of virtual time is over at {self._virtual_now} s, next timer at {when} s; raise limit_s "
                f"if the program really takes that long; {self._who_waits()}"
            )
        self._virtual_now = max(self._virtual_now, when)
        self._set_resolution()

    def _set_resolution(self) -> None:
        # The base loop runs timers with when < time() + resolution: this makes it exactly when <= time().
        self._clock_resolution = math.ulp(self._virtual_now)

    def _who_waits(self) -> str:
        tasks = sorted(asyncio.all_tasks(self), key=lambda task: task.get_name())
        if not tasks:
            return "no task is left"
        lines = []
        for task in tasks[:_TASKS_NAMED]:
            stack = task.get_stack(limit=1)
            where = f"{stack[0].f_code.co_qualname} line {stack[0].f_lineno}" if stack else "its start"
            lines.append(f"{task.get_name()} in {where}")
        more = f" and {len(tasks) - _TASKS_NAMED} more" if len(tasks) > _TASKS_NAMED else ""
        return f"{len(tasks)} tasks wait: {'; '.join(lines)}{more}"

    def _make_self_pipe(self) -> None:
        """No pipe: nobody can wake a loop that never sleeps."""

    def _close_self_pipe(self) -> None:
        """Nothing to close."""

    async def subprocess_exec(self, *args: Any, **options: Any) -> NoReturn:
        """Not supported, as on Windows with a selector loop; refused before there is a process."""
        raise NotImplementedError("a virtual loop waits for no process")

    subprocess_shell = subprocess_exec

    def add_signal_handler(self, sig: int, callback: Callable[..., object], *args: object) -> None:
        """Not supported, as on Windows."""
        raise NotImplementedError("a virtual loop handles no signals")

    def _write_to_self(self) -> None:
        """``call_soon_threadsafe`` has queued the callback already; the loop is running, so it will see it."""


def run_virtual(coro: Coroutine[Any, Any, _T], *, start_s: float = 0.0, limit_s: float = 30 * 86_400.0) -> _T:
    """Run ``coro`` to its end on a new virtual loop, as ``asyncio.run`` would on a real one, and return its result.

    Raises:
        VirtualDeadlock: all tasks wait and nothing is scheduled, or ``limit_s`` virtual seconds have passed.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualClockLoop(start_s, limit_s)) as runner:
        return runner.run(coro)
