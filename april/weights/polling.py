"""Polls conditions that send no signal, such as the arrival of the other members of a process group."""

from __future__ import annotations

import time
from collections.abc import Callable

SHORTEST_S, LONGEST_S = 0.0002, 0.02


def poll_until(condition: Callable[[], bool], check: Callable[[], None]) -> None:
    """Poll ``condition`` at growing intervals until it is true, and call ``check`` each time, which may raise."""
    pause_s = SHORTEST_S
    while not condition():
        check()
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, LONGEST_S)
