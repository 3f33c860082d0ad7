"""Random lives with hosts: no prompt is settled twice, no token is lost or of the wrong weights, whatever hosts do.

More of them: ``APRIL_RANDOM_LIVES=1000`` before pytest.
"""

from __future__ import annotations

import os

import pytest
from protocol_lives import ProtocolLife

LIVES = int(os.environ.get("APRIL_RANDOM_LIVES", "40"))
BATCH = 10


@pytest.mark.parametrize("first", range(0, LIVES, BATCH))
def test_lives_with_hosts_that_join_die_hang_come_back_and_repeat_themselves(first: int) -> None:
    """Bound, ledgers and provenance hold over the wire; every prompt is settled once; nothing is kept for ever."""
    lost = joined = 0
    for seed in range(first, first + BATCH):
        life = ProtocolLife(seed)
        life.run()
        lost, joined = lost + life.lost_hosts, joined + life.joined
    assert lost > BATCH
    assert joined > BATCH
