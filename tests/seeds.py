"""Seeds of random tests, of which coverage is measured with the first only: it makes the core three times as slow."""

from __future__ import annotations

from typing import Any

import pytest


def seeds(count: int, *before: Any) -> list[Any]:
    """0 to ``count`` - 1 for ``parametrize``, each with the same arguments before it; ``no_cover`` is pytest-cov's."""
    return [pytest.param(*before, n, marks=[pytest.mark.no_cover] * bool(n)) for n in range(count)]
