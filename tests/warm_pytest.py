"""``python warm_pytest.py``: runs of pytest, each in a process of its own, with what all of them import already there.

Each line on standard input is a JSON object: ``directory``, ``arguments``, ``environment`` and ``out``, a path for what
is printed. For each, one line comes back: the exit code. Neither april nor its tests are imported here.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import resource
import signal
import sys
from contextlib import suppress
from typing import Any

NOT_RUN = 70
"""Exit code of a run that did not come to its end: none of pytest's."""
MOST_CPU_S = 900
"""CPU seconds after which a run is killed, as with a bug a test may never end."""
MOST_S = 300
"""Seconds after which a test that waits fails, for the same reason."""


def main() -> None:
    """Serve until standard input ends."""
    import aiohttp  # noqa: F401
    import hypothesis.strategies  # noqa: F401
    import numpy  # noqa: F401
    import pydantic  # noqa: F401
    import torch  # noqa: F401
    import transformers.models.auto  # noqa: F401

    for plugin in importlib.metadata.entry_points(group="pytest11"):
        plugin.load()
    gc.freeze()  # runs end with a collection, which need not look at what stands here

    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if not child:
            code = NOT_RUN
            resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S))
            signal.signal(signal.SIGALRM, _fail)
            signal.alarm(MOST_S)
            try:
                code = _run(asked)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _fail(*_: Any) -> None:
    raise TimeoutError(f"the tests have not ended within {MOST_S} s")


def _run(asked: dict[str, Any]) -> int:
    """In the child."""
    import pytest

    out = os.open(asked["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, onto in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(number, onto)
    os.chdir(asked["directory"])
    os.environ.update(asked["environment"])
    sys.dont_write_bytecode = False  # what pytest makes of a file of tests is the same for the next run
    sys.path.insert(0, asked["directory"])
    outcome = _Outcome()
    # pytest raises at its own end if a failed test has left an engine open
    with suppress(Exception):
        # what is there already was not rewritten, and has no assertions that a test shows
        pytest.main(["-W", "ignore::pytest.PytestAssertRewriteWarning", *asked["arguments"]], plugins=[outcome])
    return outcome.code


class _Outcome:
    code = NOT_RUN

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Keep what pytest says of all tests."""
        self.code = int(exitstatus)


if __name__ == "__main__":
    main()
