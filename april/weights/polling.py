"""Polling for conditions that no lock signals, such as the arrival of the other members of a group."""

from __future__ import annotations

import time
from collections.abc import Callable

SHORTEST_S, LONGEST_S = 0.0002, 0.02


def poll_until(condition: Callable[[], bool], goes_on: Callable[[], None]) -> None:
    """Poll ``condition`` at growing intervals until it is true; ``goes_on``, called each time, may raise to stop."""
    rest_s = SHORTEST_S
    while not condition():
        goes_on()
        time.sleep(rest_s)
        rest_s = min(rest_s * 1.5, LONGEST_S)
