"""april in an actor of Ray, which trainer's ranks on any node ask by the name of the run. See docs/processes.md."""

from __future__ import annotations

from april.processes.ray_run import ActorScheduler, Run, attach, scheduler

__all__ = ["ActorScheduler", "Run", "attach", "scheduler"]
