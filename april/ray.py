"""april on Ray: a scheduler in an actor, called by a trainer's ranks; functions in actors. See docs/processes.md."""

from __future__ import annotations

from april.processes.ray_functions import remote
from april.processes.ray_run import ActorScheduler, Run, attach, scheduler

__all__ = ["ActorScheduler", "Run", "attach", "remote", "scheduler"]
