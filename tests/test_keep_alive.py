"""The pages and examples recommend to keep idle connections for longer than a training step."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STEP_S = 1_800
"""No training step of anybody's takes longer."""


@pytest.mark.parametrize("page", ["docs/servers.md", "examples/trl/train.sh", "examples/slime/train.sh"])
def test_what_is_recommended_is_as_long(page: str) -> None:
    found = re.findall(r'TIMEOUT_KEEP_ALIVE"?[=:] ?"?(\d+)', (ROOT / page).read_text("utf-8"))
    assert found
    assert all(int(seconds) > STEP_S for seconds in found)
