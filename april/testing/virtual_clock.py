"""An asyncio event loop on virtual time: waiting takes no real time, and a program always runs in the same order.

Invariant: ``loop.time()`` advances only when no callback is ready, and then to the exact time of the next timer; no
callback runs before its time. So even a timer at the next float after t runs after everything that happens at t.

A virtual loop cannot wait for sockets, pipes, signals, processes or other threads. If nothing is scheduled, so that a
real loop would hang, it raises ``VirtualDeadlock`` and names the waiting tasks.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NoReturn, TypeVar

from april.errors import AprilError

_T = TypeVar("_T")
_MAX_NAMED_TASKS = 12


class VirtualDeadlock(AprilError, RuntimeError):
    """Raised if all tasks wait and nothing is scheduled, or if the time limit is exceeded."""


class _ClockSelector(selectors.BaseSelector):
    """A selector that never sleeps, but advances the virtual clock instead."""

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

    Overrides private hooks of asyncio's base loop (``_make_self_pipe``, ``_scheduled``); tested on Python 3.11 to
    3.13.
    """

    threads_wake_it = False
    """False, because this loop never sleeps, so other threads cannot wake it by scheduling a callback."""

    def __init__(self, start_s: float = 0.0, limit_s: float = math.inf) -> None:
        self._virtual_now = start_s
        self._virtual_end = start_s + limit_s
        super().__init__(_ClockSelector(self))
        self._set_resolution()

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._virtual_now

    def _jump(self) -> None:
        """Advance to the next timer when nothing is ready; raise VirtualDeadlock if there is none."""
        timers: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]  # base loop's heap
        if not timers:
            raise VirtualDeadlock(
                f"nothing is scheduled at virtual time {self._virtual_now} s, and threads or sockets cannot wake a "
                f"virtual loop; {self._waiting_tasks()}"
            )
        when = timers[0].when()
        if when > self._virtual_end:
            raise VirtualDeadlock(
                f"the limit of virtual time is reached at {self._virtual_now} s, and the next timer is at {when} s; "
                f"raise limit_s if the program really takes that long; {self._waiting_tasks()}"
            )
        self._virtual_now = max(self._virtual_now, when)
        self._set_resolution()

    def _set_resolution(self) -> None:
        # asyncio runs the timers with when < time() + resolution; with this resolution, those with when <= time()
        self._clock_resolution = math.ulp(self._virtual_now)

    def _waiting_tasks(self) -> str:
        tasks = sorted(asyncio.all_tasks(self), key=lambda task: task.get_name())
        if not tasks:
            return "no task is left"
        lines = []
        for task in tasks[:_MAX_NAMED_TASKS]:
            stack = task.get_stack(limit=1)
            where = f"{stack[0].f_code.co_qualname} line {stack[0].f_lineno}" if stack else "its start"
            lines.append(f"{task.get_name()} in {where}")
        more = f" and {len(tasks) - _MAX_NAMED_TASKS} more" if len(tasks) > _MAX_NAMED_TASKS else ""
        return f"{len(tasks)} tasks wait: {'; '.join(lines)}{more}"

    def _make_self_pipe(self) -> None:
        """Create no pipe, because a loop that never sleeps is never woken."""

    def _close_self_pipe(self) -> None:
        """Do nothing: there is no pipe."""

    async def subprocess_exec(self, *args: Any, **options: Any) -> NoReturn:
        """Refuse before a process is started, as asyncio's selector loop does on Windows."""
        raise NotImplementedError("a virtual loop waits for no process")

    subprocess_shell = subprocess_exec

    def add_signal_handler(self, sig: int, callback: Callable[..., object], *args: object) -> None:
        """Refuse, as asyncio does on Windows."""
        raise NotImplementedError("a virtual loop handles no signals")

    def _write_to_self(self) -> None:
        """Do nothing: ``call_soon_threadsafe`` has queued the callback, and the running loop will find it."""


def run_virtual(coro: Coroutine[Any, Any, _T], *, start_s: float = 0.0, limit_s: float = 30 * 86_400.0) -> _T:
    """Run ``coro`` on a new virtual loop, as ``asyncio.run`` does on a real one, and return its result.

    Raises:
        VirtualDeadlock: all tasks wait and nothing is scheduled, or ``limit_s`` virtual seconds have passed.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualClockLoop(start_s, limit_s)) as runner:
        return runner.run(coro)
