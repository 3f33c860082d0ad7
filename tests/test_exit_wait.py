"""The end of a process in which functions of the user still run in threads."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest

from april import daemon_pool
from april.daemon_pool import DaemonPool

CHILD = """
import atexit, sys, threading, time
from april import daemon_pool
from april.daemon_pool import DaemonPool
daemon_pool.EXIT_PATIENCE_S, daemon_pool.TELL_S, daemon_pool.INTERRUPT_S = {patience}, 0.0, 60.0
begun, go_on = threading.Event(), threading.Event()
def judge():
    begun.set()
    while not go_on.is_set():
        sum(range(100))
    print("judged", flush=True)
DaemonPool("test").submit(judge)
begun.wait()
if {ends}:
    atexit.register(go_on.set)
{last}
"""


@pytest.mark.parametrize(
    ("ends", "last", "code"),
    [(True, "", 0), (False, "", 0), (False, "sys.exit(3)", 3), (False, "raise ValueError('mine')", 1)],
)
def test_a_function_that_still_runs_cannot_abort_the_process(ends: bool, last: str, code: int) -> None:
    """It is waited for, by its name, and then interrupted: the code is that of the run."""
    child = CHILD.format(patience=60 if ends else 0, ends=ends, last=last)
    done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    assert ("judged" in done.stdout) is ends
    assert ("judge did not end; it is interrupted" in done.stderr) is not ends
    assert ("ValueError: mine" in done.stderr) is ("mine" in last)


def test_what_has_ended_is_not_waited_for() -> None:
    """Whether it returned or raised; and names are those of the user's own functions."""

    def fails() -> None:
        assert daemon_pool._names().endswith("fails")
        raise ValueError

    pool = DaemonPool("test")
    with pytest.raises(ValueError, match=r"^$"):
        pool.submit(partial(lambda function: function(), fails)).result()
    pool.shutdown()
    assert not daemon_pool._running


QUEUE = """
import asyncio, sys, threading, time
from contextvars import copy_context
from april import daemon_pool
from april.driver.user_calls import WorkerThreads
daemon_pool.EXIT_PATIENCE_S, daemon_pool.TELL_S = 0.0, 0.0
begun, threads = threading.Event(), WorkerThreads()
def judge(name):
    print(name, flush=True)
    begun.set()
    while True:
        sum(range(100))
def loop():
    async def main():
        def heard(outcome):
            print("answered", outcome, flush=True)
            threads.run(copy_context(), judge, ("second",), heard)
        threads.run(copy_context(), judge, ("first",), heard)
        await asyncio.sleep(600)
    asyncio.run(main())
threading.Thread(target=loop, daemon=True).start()
begun.wait()
"""


def test_nothing_begins_once_what_ran_was_interrupted() -> None:
    """The interrupted function is answered to nobody, so no other one takes its place and is torn out."""
    done = subprocess.run([sys.executable, "-c", QUEUE], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "first\n"), done.stderr
