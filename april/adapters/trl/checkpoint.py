"""Reads and writes april's files in a TRL checkpoint: april's state and the rest of a half-trained generation batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from april.errors import CheckpointError
from april.serialization.plain_values import plain, restored
from april.serialization.state_file import read_state, write_state

STATE_FILE = "april_state.msgpack"
KIND, ASYNC_KIND = "trl", "trl_async"
"""Kinds of april's state files for GRPOTrainer and for AsyncGRPOTrainer."""
BUFFER_KIND = "trl_buffer"
"""Kind of the files in which each rank saves the untrained rest of its generation batch."""


def buffer_file(rank: int) -> str:
    """Return the name of the file in which a rank saves the untrained rest of its generation batch."""
    return f"april_buffer_rank{rank}.msgpack"


def write(folder: Path, trainer: Any, rollouts: Callable[[], dict[str, Any]]) -> None:
    """Write this rank's buffer and, on rank 0, april's state, which ``rollouts`` returns. Call it on every rank."""
    accelerator, state = trainer.accelerator, {"order": order_of_prompts(trainer), "micro": 0}
    if trainer._step % (trainer.args.steps_per_generation * trainer.num_iterations):  # in the middle of a batch
        rank, step = accelerator.process_index, trainer.state.global_step
        state |= {"micro": trainer._step, "ranks": accelerator.num_processes, "step": step}
        parts = plain(list(trainer._buffered_inputs), "a generation batch")
        write_state(folder / buffer_file(rank), BUFFER_KIND, {"rank": rank, "step": step, "parts": parts})
        accelerator.wait_for_everyone()
    if accelerator.is_main_process:  # last, so that all buffers exist
        write_state(folder / STATE_FILE, KIND, state | rollouts())


def read(folder: Path, trainer: Any, kind: str = KIND) -> Any:
    """Return the saved state, after restoring the half-trained batch in the trainer if there is one.

    Raises CheckpointError if the checkpoint was saved without april or with other prompts, or is damaged.
    """
    if not (folder / STATE_FILE).exists():
        raise CheckpointError(
            f"{folder} has no {STATE_FILE}: it was saved without april, so april does not know which prompts "
            "were trained; start a new run from its weights (model=...) instead"
        )
    state = read_state(folder / STATE_FILE, kind)
    if state["order"] != (now := order_of_prompts(trainer)):
        raise CheckpointError(
            f"{folder} was saved with prompts {state['order']}, but now they are {now}; they must be the same, in the "
            "same order, after a restart"
        )
    if state["micro"]:
        trainer._step, trainer._buffered_inputs = state["micro"], _parts(folder, state, trainer.accelerator)
    return state


def _parts(folder: Path, state: dict[str, Any], accelerator: Any) -> list[dict[str, Any]]:
    """Read this rank's buffer as TRL's ``_buffered_inputs``."""
    if state["ranks"] != accelerator.num_processes:
        raise CheckpointError(
            f"{folder} was saved in the middle of a generation batch that was spread over {state['ranks']} processes, "
            f"but now there are {accelerator.num_processes}; continue with the same number, or from a checkpoint "
            "between two generation batches"
        )
    rank = accelerator.process_index
    saved = read_state(folder / buffer_file(rank), BUFFER_KIND)
    if (saved["rank"], saved["step"]) != (rank, state["step"]):
        raise CheckpointError(f"{buffer_file(rank)} in {folder} belongs to another rank or checkpoint")
    return [
        {key: value.to(accelerator.device) if hasattr(value, "to") else value for key, value in part.items()}
        for part in restored(saved["parts"])
    ]


def order_of_prompts(trainer: Any) -> dict[str, int]:
    """Return the settings that decide the order in which prompts are drawn."""
    args = trainer.args
    return {"rows": len(trainer.train_dataset), "seed": args.seed, "shuffled": bool(trainer.shuffle_dataset)}
