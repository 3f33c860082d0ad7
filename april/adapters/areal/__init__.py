"""Adapter for AReaL 1.0: a PPOTrainer whose training batches come from april. Change one import line::

    from april.adapters.areal import PPOTrainer  # in place of areal's

Pass april's settings as the keyword argument ``april``. A subclass of AReaL's workflow executor gets the training
batches from april; AReaL itself is not patched. Importing this package imports neither areal nor torch.
"""

from __future__ import annotations

from typing import Any

__all__ = ["PPOTrainer"]


def __getattr__(name: str) -> Any:
    """Import and return april's PPOTrainer. Raises ConfigError if the installed AReaL does not fit."""
    if name != "PPOTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from april.adapters.areal.settings import require_areal

    require_areal()
    from april.adapters.areal.trainer import PPOTrainer

    return PPOTrainer
