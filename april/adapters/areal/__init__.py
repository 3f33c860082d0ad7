"""AReaL 1.0: april inside its PPOTrainer, switched on by one import line::

    from april.adapters.areal import PPOTrainer  # in place of areal's

april's settings are the keyword ``april``. Nothing of AReaL is patched: the trainer's own executor of workflows is
replaced by one with april's core behind it. Importing this imports neither areal nor torch; taking PPOTrainer does.
"""

from __future__ import annotations

from typing import Any

__all__ = ["PPOTrainer"]


def __getattr__(name: str) -> Any:
    """AReaL's trainer as april has it; raises ConfigError without an AReaL that fits."""
    if name != "PPOTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from april.adapters.areal.checks import require_areal

    require_areal()
    from april.adapters.areal.trainer import PPOTrainer

    return PPOTrainer
