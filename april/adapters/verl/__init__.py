"""Adapter for verl's ``colocate_async`` trainer (0.9.1 and later 0.9.x). One hydra group enables it::

    python -m verl.trainer.main_ppo ... 'hydra.searchpath=[pkg://april.adapters.verl.conf]' +april=verl

The group sets verl's own settings to the three classes below; verl itself is not patched. Importing this package
imports neither verl nor ray nor torch.
"""

from __future__ import annotations

from typing import Any

__all__ = ["AgentLoopManager", "Checkpoints", "Sampler"]


def __getattr__(name: str) -> Any:
    """Import and return one of april's subclasses. Raises ConfigError if the installed verl does not fit."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from april.adapters.verl.settings import require_verl

    require_verl()
    from april.adapters.verl import driver

    return getattr(driver, name)
