"""Servers of april at random, on a virtual clock with real sockets: ``served_lives.py`` has the engines and the oracle.

They are killed and start anew, their connections break, they join and leave, updates fail and tear, and another client
takes an engine for a while. More lives: ``APRIL_RANDOM_LIVES=2000`` before pytest.
"""

from __future__ import annotations

import logging
import os
from collections import Counter

import pytest
from served_lives import live
from socket_clock import run_with_sockets

LIVES = int(os.environ.get("APRIL_RANDOM_LIVES", "12"))


def test_every_token_has_the_version_of_the_weights_that_made_it(caplog: pytest.LogCaptureFixture) -> None:
    """No token is lost, doubled or of other weights than its version's, and no wait is without an end."""
    caplog.set_level(logging.CRITICAL, "april")
    seen: Counter[str] = Counter()
    for seed in range(LIVES):
        life = run_with_sockets(live(seed))
        assert not life.wrong, (seed, life.wrong[:3])
        seen += life.seen
    assert min(seen[what] for what in ("kill", "tear", "join", "leave", "cut", "rival", "failed updates")) >= 1, seen
    assert seen["of several versions"] > 20
