"""Weights at random: no token is named after weights that did not make it, and no wait is forgotten.

The lives and their oracle are in ``weight_lives.py``. More of them: ``make random``, or ``APRIL_RANDOM_LIVES=2000``.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from weight_lives import WeightLife

from april.core.types import GenerationMode
from april.testing import run_virtual

LIVES = int(os.environ.get("APRIL_RANDOM_LIVES", "32"))


@pytest.mark.no_cover
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_tokens_are_of_the_weights_that_their_version_names(mode: GenerationMode, tmp_path: Path) -> None:
    """Whatever happens to servers, links, updates and directories: right or dropped. Every wait ends or says why."""
    seen: Counter[str] = Counter()
    for number in range(LIVES // 2):
        directory = tmp_path / str(number)
        directory.mkdir()
        life = WeightLife(number, mode, directory)
        try:
            run_virtual(life.run())
        except BaseException as error:
            error.add_note(f"life {number}, {mode}")
            raise
        seen += life.seen
    for what in (
        "batches", "crashed while loading", "directory written over between two loads",
        "directory written over while loading", "host killed", "host left", "host outlived the trainer", "lied",
        "lied of a load", "link cut", "link cut while loading", "load hangs", "load late", "load refused", "load torn",
        "restored", "server started anew", "started anew between save and update", "transfer broke off",
    ):  # fmt: skip
        assert seen[what], f"no life had: {what}"
