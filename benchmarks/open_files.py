"""The limit of open files: one request in flight is one socket on each side."""

from __future__ import annotations

import resource

SPARE = 128
"""Files that the interpreter, the listening sockets and the pipes need besides the requests."""


def require_open_files(sockets: int) -> None:
    """Raise the soft limit to what ``sockets`` need; ends the program with the remedy if the hard limit forbids it."""
    needed = sockets + SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise SystemExit(
            f"{sockets} requests in flight need {needed} open files per process, but the hard limit is {hard}; "
            f"run `ulimit -Hn {needed}` as root first, or ask for at most {max(0, hard - SPARE)} requests"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
