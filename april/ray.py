"""Runs april on Ray: the scheduler in an actor that a trainer's ranks call, functions in actors (docs/processes.md)."""

from __future__ import annotations

from april.processes.ray_functions import remote
from april.processes.ray_run import ActorScheduler, Run, attach, scheduler

__all__ = ["ActorScheduler", "Run", "attach", "remote", "scheduler"]
