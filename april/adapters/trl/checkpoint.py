"""april's part of a checkpoint of TRL's trainer: its state, and the rest of a generation batch that is half trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from april.atomic_file import write_atomic
from april.errors import CheckpointError
from april.state_file import checksum_of, pack, unpack

STATE_FILE, BUFFER_FILE = "april_state.msgpack", "april_buffer.safetensors"
KIND = "trl"
"""The first holds april's state, what decides the order of prompts, steps into a generation batch, and the second's
checksum."""


def write(folder: Path, trainer: Any, rollouts: dict[str, Any]) -> None:
    """``rollouts``: the scheduler's state of this moment."""
    state = {"rollouts": rollouts, "order": _order_of_prompts(trainer), "micro": 0, "buffer": ""}
    if trainer._step % _steps_per_generation(trainer):
        from safetensors.torch import save

        state["micro"] = trainer._step
        parts = enumerate(trainer._buffered_inputs)
        tensors = {f"{i}.{key}": value.contiguous().clone() for i, part in parts for key, value in part.items()}
        buffer = save(tensors)
        state["buffer"] = checksum_of(buffer)
        write_atomic(folder / BUFFER_FILE, buffer)
    write_atomic(folder / STATE_FILE, pack(KIND, state))


def read(folder: Path, trainer: Any) -> Any:
    """The scheduler's state; a batch that was half trained goes to the trainer at once.

    Raises:
        CheckpointError: the checkpoint was saved without april or with other prompts, or is damaged.
    """
    try:
        data = (folder / STATE_FILE).read_bytes()
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} has no {STATE_FILE}: it was not saved by AprilGRPOTrainer, so nobody knows which prompts were "
            "trained; begin anew from its weights (model=...) instead"
        ) from None
    except OSError as error:
        raise CheckpointError(f"april's state in {folder} cannot be read: {error}") from error
    state = unpack(KIND, data, str(folder))
    if state["order"] != (now := _order_of_prompts(trainer)):
        raise CheckpointError(
            f"{folder} was saved with prompts {state['order']}, now they are {now}; they must be the same, in the same "
            "order, after a restart"
        )
    if state["micro"]:
        trainer._step, trainer._buffered_inputs = state["micro"], _parts(folder, state, str(trainer.accelerator.device))
    return state["rollouts"]


def _parts(folder: Path, state: dict[str, Any], device: str) -> list[dict[str, Any]]:
    """What TRL calls its buffered inputs."""
    from safetensors.torch import load

    try:
        data = (folder / BUFFER_FILE).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{BUFFER_FILE} in {folder} cannot be read: {error}") from error
    if checksum_of(data) != state["buffer"]:
        raise CheckpointError(f"{BUFFER_FILE} in {folder} is damaged, or belongs to another checkpoint")
    tensors = {name: tensor.to(device) for name, tensor in load(data).items()}
    parts: dict[int, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        number, _, key = name.partition(".")
        parts.setdefault(int(number), {})[key] = tensor
    return [parts[i] for i in sorted(parts)]


def _order_of_prompts(trainer: Any) -> dict[str, int]:
    """What decides which prompt comes when, but for the prompts themselves."""
    args = trainer.args
    return {"rows": len(trainer.train_dataset), "seed": args.seed, "shuffled": bool(trainer.shuffle_dataset)}


def _steps_per_generation(trainer: Any) -> int:
    """Calls of training_step per generation batch."""
    return int(trainer.args.steps_per_generation * trainer.num_iterations)
