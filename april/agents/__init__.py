"""Agents that bring a client of their own: an endpoint per sample, over which partial rollouts cannot be seen."""

from april.agents.sessions import Sessions
from april.agents.wrap import ProgramResult, batched, program

__all__ = ["ProgramResult", "Sessions", "batched", "program"]
