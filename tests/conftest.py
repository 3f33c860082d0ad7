"""For every test: event loops that a stalled machine does not hurry, and reports that can go to another process."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Generator

import pytest
from steady_loop import SteadyPolicy

PATIENCE_S = 60.0
"""An async test that hangs ends then; nothing is judged by time."""

asyncio.set_event_loop_policy(SteadyPolicy())


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "on_virtual_time: an async test whose waiting takes no time")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """An ``async def`` test runs on a loop of its own, or on virtual time, and may leave no task behind."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj) or pyfuncitem.get_closest_marker("asyncio"):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    if pyfuncitem.get_closest_marker("on_virtual_time"):
        from virtual_rollouts import virtual

        virtual(lambda: pyfuncitem.obj(**arguments))
        return True

    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await pyfuncitem.obj(**arguments)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others, f"tasks are left: {others}"

    asyncio.run(bounded())
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What was logged may have half a character, which would end the whole run."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report
