"""Samples of several conversations in any order of events: forks, twins, losses, restarts, answers nobody hears."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from chain_lives import a_life
from seeds import seeds

BATCH = 20
LIVES = int(os.environ.get("APRIL_RANDOM_LIVES", "200"))


@pytest.mark.parametrize("seed", seeds(LIVES // BATCH))
def test_every_conversation_is_answered_and_trained_once(seed: int) -> None:
    """Each answer is that of the books, each generated token in one row of one batch or dropped by its name."""
    seen: Counter[str] = Counter()
    for life in range(BATCH):
        seen += a_life(BATCH * seed + life)
    for what in ("asked again", "one of several", "another", "unheard", "dropped", "begins again", "rows", "restarts"):
        assert seen[what], what
    assert seen["batches"] >= 10
