"""Trainers that do not wait, at random: they fetch ahead, train several batches at once, cancel, evaluate, crash.

Each life is chosen by its number alone, stepwise and continuous. The core checks its own books after every event, and
``trainer_books`` are kept outside of it: tokens as servers sent them, under the weights that these really had; each
prompt is settled once in the history that is kept; nothing is trained too old, and nothing cut, masked, dropped or kept
waiting without a reason. More lives: ``make random``, or ``APRIL_RANDOM_LIVES=2000`` before pytest.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from trainer_lives import Life

from april.core.types import GenerationMode

LIVES = int(os.environ.get("APRIL_RANDOM_LIVES", "160"))
PARTS = 8


def live(number: int, mode: GenerationMode) -> Life:
    """One life, to its good end."""
    life = Life(number, mode)
    life.happen(300)
    life.end_well()
    return life


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_any_trainer_gets_all_it_should(mode: GenerationMode, part: int) -> None:
    """Every promise of the books, after every event, to the last prompt."""
    for number in range(part, LIVES // 2, PARTS):
        live(number, mode)


def test_the_lives_are_full_of_events() -> None:
    """What they are said to contain happens in a few dozen of them; without that the test above says little."""
    seen: Counter[str] = Counter()
    for number in range(24):
        seen += live(number, GenerationMode.CONTINUOUS).seen
    for what in (
        "batches beside others", "one update of several", "committed without an update", "of several versions",
        "restarted", "the other mode", "other settings refused", "evaluated", "evaluation failed",
        "cancelled, loads=False", "cancelled, loads=True", "update: adopted=False", "handed over, broken=True",
        "died", "lost its weights", "stalled", "fenced", "failed", "function failed", "group dropped: filtered",
        "group dropped: failed", "request: broke_off", "request: busy", "request: refused", "request: corrupt",
    ):  # fmt: skip
        assert seen[what], f"no life had: {what}"
