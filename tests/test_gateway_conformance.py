"""april's gateway keeps the twenty promises of the suite for gateways."""

from __future__ import annotations

import pytest

pytest.importorskip("renderers")
from april.testing import gateway


@pytest.mark.parametrize("promise", gateway.PROMISES, ids=str)
async def test_april_keeps(promise: gateway.Promise) -> None:
    """Each promise, on a scheduler of its own with two fake engines and a trainer that updates in mid-call."""
    verdict = await promise.on(gateway.AprilSubject)
    assert verdict.outcome is gateway.Outcome.PASSED, str(verdict)
