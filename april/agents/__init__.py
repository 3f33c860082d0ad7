"""Agents that bring a client of their own: an endpoint per sample, over which partial rollouts cannot be seen."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from april.agents.sessions import Sessions
    from april.agents.verifiers import Verifiers
    from april.agents.wrap import ProgramResult, batched, program

_HOME_OF = {
    "Sessions": "april.agents.sessions",
    "Verifiers": "april.agents.verifiers",
    "ProgramResult": "april.agents.wrap",
    "batched": "april.agents.wrap",
    "program": "april.agents.wrap",
}
__all__ = ["ProgramResult", "Sessions", "Verifiers", "batched", "program"]


def __getattr__(name: str) -> Any:
    """Import what is asked for: the scheduler loads no web server for who has no agents."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)
