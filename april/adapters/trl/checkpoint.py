"""april's part of a checkpoint of TRL's trainer: its state, and the rest of a generation batch that is half trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from april.errors import CheckpointError
from april.state_file import checksum_of, read_state, write_atomic, write_state

STATE_FILE, BUFFER_FILE = "april_state.msgpack", "april_buffer.safetensors"
"""The first holds april's state, what decides the order of prompts, steps into a generation batch, and checksums of
what each rank has left of it, which is in the second for rank 0."""
KIND = "trl"
_LIST = "[]"
"""Ends the names of what is a list of numbers in TRL."""


def buffer_file(rank: int) -> str:
    """Name of a rank's part of a generation batch that is half trained."""
    return BUFFER_FILE if rank == 0 else BUFFER_FILE.replace(".", f"_rank{rank}.")


def write(folder: Path, trainer: Any, rollouts: Callable[[], dict[str, Any]]) -> None:
    """Called on every rank. ``rollouts``: april's state of this moment, which rank 0 asks for and writes."""
    state = {"order": _order_of_prompts(trainer), "micro": 0, "buffers": []}
    if trainer._step % _steps_per_generation(trainer):
        state |= {"micro": trainer._step, "buffers": _write_buffer(folder, trainer)}
    if trainer.accelerator.is_main_process:  # last: a state that is there has all the buffers that it names
        write_state(folder / STATE_FILE, KIND, state | rollouts())


def _write_buffer(folder: Path, trainer: Any) -> list[str]:
    """Checksums of all ranks' buffers, of which this one's is written here."""
    import torch
    from safetensors.torch import save

    parts = enumerate(trainer._buffered_inputs)
    buffer = save(dict(_as_tensor(f"{i}.{key}", value) for i, part in parts for key, value in part.items()))
    write_atomic(folder / buffer_file(trainer.accelerator.process_index), buffer)
    digits = torch.tensor(list(checksum_of(buffer).encode()), device=trainer.accelerator.device)
    return [bytes(row).decode() for row in trainer.accelerator.gather(digits).view(-1, len(digits)).tolist()]


def read(folder: Path, trainer: Any) -> Any:
    """Return what was written; a batch that was half trained goes to the trainer at once.

    Raises CheckpointError for a checkpoint that was saved without april or with other prompts, or is damaged.
    """
    if not (folder / STATE_FILE).exists():
        raise CheckpointError(
            f"{folder} has no {STATE_FILE}: it was not saved by AprilGRPOTrainer, so nobody knows which prompts were "
            "trained; begin anew from its weights (model=...) instead"
        )
    state = read_state(folder / STATE_FILE, KIND)
    if state["order"] != (now := _order_of_prompts(trainer)):
        raise CheckpointError(
            f"{folder} was saved with prompts {state['order']}, now they are {now}; they must be the same, in the same "
            "order, after a restart"
        )
    if state["micro"]:
        trainer._step, trainer._buffered_inputs = state["micro"], _parts(folder, state, trainer.accelerator)
    return state


def _parts(folder: Path, state: dict[str, Any], accelerator: Any) -> list[dict[str, Any]]:
    """Return what TRL calls its buffered inputs, of this rank."""
    from safetensors.torch import load

    checksums = state["buffers"] if "buffers" in state else [state["buffer"]]  # before there were ranks
    if len(checksums) != accelerator.num_processes:
        raise CheckpointError(
            f"{folder} was saved in the middle of a generation batch, of which each of {len(checksums)} processes had "
            f"its part, and now there are {accelerator.num_processes}; go on with as many, or from a checkpoint "
            "between two generation batches"
        )
    rank = accelerator.process_index
    try:
        data = (folder / buffer_file(rank)).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{buffer_file(rank)} in {folder} cannot be read: {error}") from error
    if checksum_of(data) != checksums[rank]:
        raise CheckpointError(f"{buffer_file(rank)} in {folder} is damaged, or belongs to another checkpoint")
    parts: dict[int, dict[str, Any]] = {}
    for name, tensor in load(data).items():  # to main memory: safetensors does not know the device cpu:0
        number, _, key = name.partition(".")
        is_list = key.endswith(_LIST)
        value = tensor.tolist() if is_list else tensor.to(accelerator.device)
        parts.setdefault(int(number), {})[key.removesuffix(_LIST)] = value
    return [parts[i] for i in sorted(parts)]


def _as_tensor(name: str, value: Any) -> tuple[str, Any]:
    """A part of a batch under its name; numbers of images are a list."""
    import torch

    if isinstance(value, list):
        return name + _LIST, torch.tensor(value, dtype=torch.int64)
    return name, value.contiguous().clone()


def _order_of_prompts(trainer: Any) -> dict[str, int]:
    """Return what decides which prompt comes when, but for the prompts themselves."""
    args = trainer.args
    return {"rows": len(trainer.train_dataset), "seed": args.seed, "shuffled": bool(trainer.shuffle_dataset)}


def _steps_per_generation(trainer: Any) -> int:
    """Calls of training_step per generation batch."""
    return int(trainer.args.steps_per_generation * trainer.num_iterations)
