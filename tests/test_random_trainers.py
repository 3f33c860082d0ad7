"""Trainers that do not wait, at random: they fetch ahead, train several batches at once, cancel, evaluate, crash.

Each life is chosen by its number alone, stepwise and continuous. The core checks its own books after every event, and
``trainer_books`` are kept outside of it: tokens as servers sent them, under the weights that these really had; each
prompt is settled once in the history that is kept, and with a quorum each group has one cohort for ever; nothing is
trained too old, and nothing cut, masked, dropped or kept waiting without a reason. More lives: ``make random``, or
``APRIL_RANDOM_LIVES=2000`` before pytest.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

import pytest
from seeds import seeds
from trainer_lives import Life

from april.core.settings import CoreSettings
from april.core.types import GenerationMode, OnFailedSample

LIVES = int(os.environ.get("APRIL_RANDOM_LIVES", "160"))
PARTS = 8
FIRST = 48
"""Lives whose events are counted."""


def shrinks_with_a_quorum(settings: CoreSettings) -> bool:
    """Groups count in part, and go on with fewer samples."""
    return not settings.whole_groups and settings.on_failed_sample is OnFailedSample.SHRINK


def live(number: int, mode: GenerationMode, wanted: Callable[[CoreSettings], bool] = lambda settings: True) -> Life:
    """One life, to its good end."""
    life = Life(number, mode, wanted)
    life.happen(300)
    life.end_well()
    return life


@pytest.mark.no_cover
def test_the_first_lives_are_full_of_events() -> None:
    """Those that the tests below leave out: what lives are said to contain happens in a few dozen of them."""
    seen: Counter[str] = Counter()
    for number in range(FIRST):
        seen += live(number, GenerationMode.CONTINUOUS).seen
    for number in range(FIRST):
        seen += live(number, GenerationMode.CONTINUOUS, shrinks_with_a_quorum).seen
    for what in (
        "batches beside others", "one update of several", "committed without an update", "of several versions",
        "restarted", "the other mode", "other settings refused", "evaluated", "evaluation failed",
        "cancelled, loads=False", "cancelled, loads=True", "update: adopted=False", "handed over, broken=True",
        "died", "lost its weights", "stalled", "fenced", "failed", "function failed", "group dropped: filtered",
        "group dropped: failed", "part of a group", "straggler", "straggler given up", "sample replaced",
        "group shrunk", "bound lowered", "request: broke_off", "request: busy", "request: refused", "request: corrupt",
    ):  # fmt: skip
        assert seen[what], f"no life had: {what}"


@pytest.mark.parametrize("part", seeds(PARTS))
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_any_trainer_gets_all_it_should(mode: GenerationMode, part: int) -> None:
    """Every promise of the books, after every event, to the last prompt."""
    for number in range(part, LIVES // 2, PARTS):
        if mode is GenerationMode.STEPWISE or number >= FIRST:
            live(number, mode)


@pytest.mark.parametrize("part", seeds(PARTS))
def test_quorum_and_shrunk_groups_while_the_trainer_trains(part: int) -> None:
    """All three at once, until a restart brings other settings."""
    for number in range(FIRST + part, LIVES, PARTS):
        live(number, GenerationMode.CONTINUOUS, shrinks_with_a_quorum)
