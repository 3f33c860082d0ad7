"""Samples of several conversations in any order of events: forks, twins, losses, restarts, answers nobody hears."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from chain_lives import a_life
from seeds import seeds

LIVES = int(os.environ.get("APRIL_RANDOM_CHAINS", "10"))
"""Times 20 lives."""


@pytest.mark.parametrize("seed", seeds(LIVES))
def test_every_conversation_is_answered_and_trained_once(seed: int) -> None:
    """Each answer is that of the books, each generated token in one row of one batch or dropped by its name."""
    seen: Counter[str] = Counter()
    for life in range(20):
        seen += a_life(20 * seed + life)
    for what in ("asked again", "one of several", "another", "unheard", "dropped", "begins again", "rows", "restarts"):
        assert seen[what], what
    assert seen["batches"] >= 10
