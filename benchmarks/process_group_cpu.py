"""CPU time of a server and of all the processes that it has started."""

from __future__ import annotations

import os
from pathlib import Path

_GROUP, _OWN_TIMES = 2, slice(11, 15)
"""Of the fields of ``/proc/PID/stat`` behind the name: process group; utime, stime, cutime and cstime."""


def group_cpu_s(group: int) -> float:
    """Seconds of CPU that the living processes of a group have used, and the children that they waited for; Linux only.

    Raises:
        ProcessLookupError: the group has no process.
    """
    ticks = found = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # the name is in brackets, and may hold spaces and brackets
            fields = path.read_text("utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[_GROUP]) == group:
            found += 1
            ticks += sum(map(int, fields[_OWN_TIMES]))
    if not found:
        raise ProcessLookupError(f"no process is in group {group}")
    return ticks / os.sysconf("SC_CLK_TCK")
