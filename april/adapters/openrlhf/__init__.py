"""Adapter for OpenRLHF: ``python -m april.adapters.openrlhf <OpenRLHF's flags> --april.config april.yaml``.

The command replaces OpenRLHF's trainers and engine actor by subclasses, in memory, and then runs OpenRLHF's own command
line, ``openrlhf.cli.train_ppo_ray``. No file of OpenRLHF is changed. docs/openrlhf.md describes the effects.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from april.adapters.openrlhf.arguments import config_of, require_openrlhf, split_flags
from april.errors import AprilError, ConfigError

__all__ = ["main"]

COMMAND = "openrlhf.cli.train_ppo_ray"
HELP = """april's flags, beside those of OpenRLHF that follow:
  --april.config FILE       settings of april.Config that OpenRLHF's flags do not decide, as YAML
  --april.SETTING VALUE     one such setting, which overrides the file: --april.over_sampling_batch_size 64
"""


def install(settings: Mapping[str, Any]) -> None:
    """Replace OpenRLHF's classes by april's in this process. Raises ConfigError if this OpenRLHF does not fit."""
    require_openrlhf()
    from april.adapters.openrlhf import actors

    for module, name, cls in (
        ("ppo_trainer", "PPOTrainer", actors.AprilPPOTrainer),
        ("ppo_trainer_async", "PPOTrainerAsync", actors.AprilPPOTrainerAsync),
        ("ray.vllm_engine", "RolloutRayActor", actors.AprilRolloutRayActor),
    ):
        setattr(sys.modules[f"openrlhf.trainer.{module}"], name, actors.as_actor(cls))
    utils: Any = importlib.import_module("openrlhf.utils")
    get_strategy = utils.get_strategy

    def checked_strategy(args: Any) -> Any:
        """Check april's settings. OpenRLHF's train() calls this with its checked flags before it starts any actor."""
        config_of(args, settings)
        args.april = dict(settings)  # OpenRLHF sends args to all actors
        return get_strategy(args)

    utils.get_strategy = checked_strategy


def main(words: Sequence[str] | None = None) -> None:
    """Run the training; exit with a one-sentence message if april refuses the settings or fails."""
    try:
        theirs, settings = split_flags(sys.argv[1:] if words is None else words)
        install(settings)
        if {"-h", "--help"} & set(theirs):
            print(HELP)
        sys.argv = [COMMAND, *theirs]
        runpy.run_module(COMMAND, run_name="__main__", alter_sys=True)
    except ConfigError as error:
        sys.exit(f"april: {error}")
    except AprilError as error:
        sys.exit(f"april: {type(error).__name__}: {error}")
