"""verl 0.9 (0.9.1 or later): april inside verl's ``colocate_async`` trainer, switched on by one hydra group::

    python -m verl.trainer.main_ppo ... 'hydra.searchpath=[pkg://april.adapters.verl.conf]' +april=verl

The group names the three classes below in verl's own places for them. Nothing of verl is patched. Importing this module
imports neither verl nor ray nor torch; taking one of the classes does.
"""

from __future__ import annotations

from typing import Any

__all__ = ["AgentLoopManager", "Checkpoints", "Sampler"]


def __getattr__(name: str) -> Any:
    """Return one of verl's classes as april has it; raises ConfigError without a verl that fits."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from april.adapters.verl.checks import require_seams, require_verl

    require_verl()
    require_seams()
    from april.adapters.verl import driver

    return getattr(driver, name)
