"""Checks of a state before a driver goes on from it, beside those of the core: sampling, settings.

Other prompts are refused in ``prompt_source``, other engines and damaged numbers in ``core/snapshot.py``.
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

from april.core.sampling import SamplingParams
from april.core.sealed import State, require_sealed, seal
from april.core.snapshot import changed_settings
from april.core.state import RolloutCore
from april.driver.prompt_source import Position
from april.errors import CheckpointError

log = logging.getLogger("april")

KIND = "rollouts"
"""The kind of state that a scheduler saves."""
ALWAYS_REFUSED = {"stop", "stop_token_ids"}
"""Settings that must not change, as held tokens may contain such stops in their middle."""


def state_of(core: State, prompts: State, sampling: SamplingParams) -> State:
    """A scheduler's state: a snapshot of its core, where its prompts stand, and how it samples."""
    return seal(KIND, {"core": core, "prompts": prompts, "sampling": sampling_out(sampling)})


def parts_of(state: Any) -> tuple[State, State, State]:
    """The arguments of :func:`state_of`; raises CheckpointError for a state that is none, or was changed."""
    require_sealed(KIND, state)
    parts = [state.get(name) for name in ("core", "prompts", "sampling")]
    if not all(isinstance(part, dict) for part in parts):
        raise CheckpointError("the state is damaged: a part of it is missing")
    return parts[0], parts[1], parts[2]


def sampling_out(sampling: SamplingParams) -> dict[str, Any]:
    """The configured sampling for a state."""
    values = asdict(sampling)
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in values.items()
        if name not in ("max_tokens", "seed")
    }


def refuse_sampling(core: RolloutCore, saved: Any, sampling: SamplingParams, *, allow_mismatch: bool) -> None:
    """Other sampling than before cannot go on from tokens that were sampled by it: one batch has one way of sampling.

    Raises:
        CheckpointError: they differ and ``core``, which was restored, holds tokens; ``allow_mismatch`` allows for
            temperature, top_p and min_tokens.
    """
    now = sampling_out(sampling)
    if not isinstance(saved, dict) or saved.keys() != now.keys():
        raise CheckpointError("the state is damaged: it does not say how it was sampled")
    held = core.tokens.held
    for name, value in now.items():
        if saved[name] != value and held and not (allow_mismatch and name not in ALWAYS_REFUSED):
            raise CheckpointError(
                f"the state holds {held} tokens that were sampled with {name}={saved[name]}, the configuration has "
                f"{value}; set sampling.{name} as it was"
                + ("" if name in ALWAYS_REFUSED else ", or allow_mismatch: true if your trainer accounts for it")
            )


def refuse_undrawn(core: RolloutCore, stand: Position) -> None:
    """Raise CheckpointError if ``core`` holds a prompt twice, or one that was not drawn."""
    names = [(group.prompt.epoch, group.prompt.position) for group in core.buffer]
    if len(set(names)) < len(names) or any(name >= (stand.epoch, stand.position) for name in names):
        raise CheckpointError(
            f"the state is damaged: it holds prompts that were not drawn before prompt {stand.position} of epoch "
            f"{stand.epoch}, or one of them twice"
        )


def log_changes(core: RolloutCore, state: dict[str, Any]) -> None:
    """Log the settings that differ from those of the state."""
    changes = changed_settings(core, state)
    if changes:
        log.info(
            "the state goes on under other settings: %s",
            "; ".join(f"{name} was {saved}, now {now}" for name, (saved, now) in changes.items()),
        )
