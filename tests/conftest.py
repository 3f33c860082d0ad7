"""For every test: event loops that a stalled machine does not hurry, and reports that can go to another process."""

from __future__ import annotations

import asyncio
import gc
import inspect
import warnings
from collections.abc import Generator
from contextlib import suppress

import pytest
from steady_loop import SteadyPolicy

PATIENCE_S = 60.0
"""An async test that hangs ends then; nothing is judged by time."""

asyncio.set_event_loop_policy(SteadyPolicy())


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "on_virtual_time: an async test whose waiting takes no time")
    with suppress(ImportError):  # not in every environment
        from hypothesis import settings

        settings.register_profile("untimed", deadline=None)  # by default an example of 200 ms fails
        settings.load_profile("untimed")


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


@pytest.fixture(autouse=True)
def keys_of_one_test() -> Generator[None, None, None]:
    """Forget the keys of servers after each test: april removes them from all texts, and tests use words as keys."""
    from april.text import server_text

    before = dict(server_text._hidden)
    yield
    server_text._hidden.clear()
    server_text._hidden.update(before)


@pytest.fixture
def nothing_left_behind() -> Generator[None, None, None]:
    """No thread of a scheduler lives on after the test."""
    from real_schedulers import assert_nothing_is_left

    yield
    assert_nothing_is_left()


@pytest.fixture
def client_left_open() -> Generator[None, None, None]:
    """For a test of a program whose samples share an HTTP client: once april's loop has ended, nobody can close it."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def one_thread() -> Generator[None, None, None]:
    """torch has one thread, as in the workers of the study: two wait for each other longer than tiny models compute."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What was logged may have half a character, which would end the whole run."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report
