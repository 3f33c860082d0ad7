"""Adapter for TRL's GRPOTrainer and AsyncGRPOTrainer. Importing it imports neither trl nor torch."""

from __future__ import annotations

from typing import Any

from april.adapters.trl.asynchronous import (
    RolloutWorker,
    april_async_trainer,
    require_async_trainer,
    rollout_worker,
)  # fmt: skip
from april.adapters.trl.checks import require_trl
from april.adapters.trl.trainer import Rollout, april_trainer, rollout

__all__ = [
    "AprilAsyncGRPOTrainer", "AprilGRPOTrainer", "Rollout", "RolloutWorker", "april_async_trainer", "april_trainer",
    "rollout", "rollout_worker",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Make the trainers' subclasses on first access, since making them imports trl."""
    if name == "AprilGRPOTrainer":
        globals()[name] = april_trainer(require_trl().GRPOTrainer)
    elif name == "AprilAsyncGRPOTrainer":
        globals()[name] = april_async_trainer(require_async_trainer())
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]
