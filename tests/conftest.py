"""For every test: event loops that a stalled machine does not hurry, and reports that can go to another process."""

from __future__ import annotations

import asyncio
from collections.abc import Generator

import pytest
from steady_loop import SteadyPolicy

asyncio.set_event_loop_policy(SteadyPolicy())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What was logged may have half a character, which would end the whole run."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report
