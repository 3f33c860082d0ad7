"""Why april is not in verl's ``separate_async``: the call that changes the weights, and who does not hear of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest


class Witness:
    """Stands in one of the places that verl has for others, and notes whatever is asked of it."""

    def __init__(self, place: str, seen: list[str]) -> None:
        self._place, self._seen = place, seen

    def __getattr__(self, name: str) -> Any:
        self._seen.append(f"{self._place}.{name}")
        return lambda *args, **kwargs: None


def test_weights_change_without_a_word_to_anybody() -> None:
    """The end of a step aborts, updates and resumes the servers by one call; sampler, manager, callback: nothing.

    When this fails, verl tells one of them, and april could stop its requests there and go on under a known version.
    """
    from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync

    seen: list[str] = []
    trainer = PPOTrainerSeparateAsync.__new__(PPOTrainerSeparateAsync)
    trainer.prev_step_profile = False
    trainer.hybrid_rollout_config = SimpleNamespace(enable_switch=False)
    trainer.timing_raw, trainer.global_steps = {}, 3
    for place in ("replay_buffer", "agent_loop_manager", "checkpoint_callback", "standalone_checkpoint_manager"):
        setattr(trainer, place, Witness(place, seen))
    trainer.standalone_checkpoint_manager.update_weights = lambda step: seen.append(f"weights {step}")

    trainer.on_step_end()

    assert seen == ["weights 3"]


def test_a_trainer_of_ones_own_is_not_found() -> None:
    """It could be told, as a subclass; but verl looks for its name before it imports what the settings name."""
    from verl.trainer.ppo.v1 import get_trainer_cls

    with pytest.raises(ValueError, match="Unknown trainer 'april'"):
        get_trainer_cls("april")
