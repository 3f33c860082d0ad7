"""Adapter for TRL: ``AprilGRPOTrainer(rollout_func=rollout(...))``. Importing it imports neither trl nor torch."""

from __future__ import annotations

from typing import Any

from april.adapters.trl.checks import require_trl
from april.adapters.trl.trainer import Rollout, april_trainer, rollout

__all__ = ["AprilGRPOTrainer", "Rollout", "april_trainer", "rollout"]


def __getattr__(name: str) -> Any:
    """Make AprilGRPOTrainer on first access, since its base class is in trl."""
    if name == "AprilGRPOTrainer":
        globals()[name] = april_trainer(require_trl().GRPOTrainer)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
