"""Reads and writes april's files in a TRL checkpoint: april's state and the rest of a half-trained generation batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from april.errors import CheckpointError
from april.serialization.state_file import checksum_of, read_state, write_atomic, write_state

STATE_FILE, BUFFER_FILE = "april_state.msgpack", "april_buffer.safetensors"
"""Names of april's state file, which has the checksums of all buffers, and of rank 0's buffer file: that rank's rest of
a half-trained generation batch."""
KIND, ASYNC_KIND = "trl", "trl_async"
"""Kinds of state files: those of GRPOTrainer and of AsyncGRPOTrainer."""
_LIST = "[]"
"""Suffix of a tensor's name if the value is a list in TRL."""


def buffer_file(rank: int) -> str:
    """Return the name of the buffer file of a rank."""
    return BUFFER_FILE if rank == 0 else BUFFER_FILE.replace(".", f"_rank{rank}.")


def write(folder: Path, trainer: Any, rollouts: Callable[[], dict[str, Any]]) -> None:
    """Write this rank's buffer and, on rank 0, april's state, which ``rollouts`` returns. Call it on every rank."""
    state = {"order": order_of_prompts(trainer), "micro": 0, "buffers": []}
    if trainer._step % _steps_per_generation(trainer):
        state |= {"micro": trainer._step, "buffers": _write_buffer(folder, trainer)}
    if trainer.accelerator.is_main_process:  # last, so that all buffers exist
        write_state(folder / STATE_FILE, KIND, state | rollouts())


def _write_buffer(folder: Path, trainer: Any) -> list[str]:
    """Write this rank's buffer and return the checksums of all ranks' buffers."""
    import torch
    from safetensors.torch import save

    parts = enumerate(trainer._buffered_inputs)
    buffer = save(dict(_as_tensor(f"{i}.{key}", value) for i, part in parts for key, value in part.items()))
    write_atomic(folder / buffer_file(trainer.accelerator.process_index), buffer)
    digits = torch.tensor(list(checksum_of(buffer).encode()), device=trainer.accelerator.device)
    return [bytes(row).decode() for row in trainer.accelerator.gather(digits).view(-1, len(digits)).tolist()]


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
    from safetensors.torch import load

    checksums = state["buffers"] if "buffers" in state else [state["buffer"]]  # older files have one "buffer"
    if len(checksums) != accelerator.num_processes:
        raise CheckpointError(
            f"{folder} was saved in the middle of a generation batch that was spread over {len(checksums)} processes, "
            f"but now there are {accelerator.num_processes}; continue with the same number, or from a checkpoint "
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
    for name, tensor in load(data).items():  # loads into main memory: safetensors does not know the device cpu:0
        number, _, key = name.partition(".")
        is_list = key.endswith(_LIST)
        value = tensor.tolist() if is_list else tensor.to(accelerator.device)
        parts.setdefault(int(number), {})[key.removesuffix(_LIST)] = value
    return [parts[i] for i in sorted(parts)]


def _as_tensor(name: str, value: Any) -> tuple[str, Any]:
    """Return (name in the file, tensor) of a value of the batch; image counts are lists and become int64 tensors."""
    import torch

    if isinstance(value, list):
        return name + _LIST, torch.tensor(value, dtype=torch.int64)
    return name, value.contiguous().clone()


def order_of_prompts(trainer: Any) -> dict[str, int]:
    """Return the settings that decide the order in which prompts are drawn."""
    args = trainer.args
    return {"rows": len(trainer.train_dataset), "seed": args.seed, "shuffled": bool(trainer.shuffle_dataset)}


def _steps_per_generation(trainer: Any) -> int:
    """Return how often TRL calls ``training_step`` for each generation batch."""
    return int(trainer.args.steps_per_generation * trainer.num_iterations)
