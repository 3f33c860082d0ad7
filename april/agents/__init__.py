"""Serves the policy to agent programs over HTTP, in the formats of OpenAI and Anthropic, at one endpoint per sample."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from april.agents.rollout_functions import ProgramResult, program
    from april.agents.sessions import Sessions
    from april.agents.verifiers import Verifiers

_MODULE_OF = {
    "Sessions": "april.agents.sessions",
    "Verifiers": "april.agents.verifiers",
    "ProgramResult": "april.agents.rollout_functions",
    "program": "april.agents.rollout_functions",
}
__all__ = ["ProgramResult", "Sessions", "Verifiers", "program"]


def __getattr__(name: str) -> Any:
    """Import a name on first use, so that a scheduler without agents loads no web server."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)
