"""april's carry beside slime's own checkpoint of its data source: what is unfinished when slime saves.

One file per checkpoint, written whole or not at all, readable by its owner only; msgpack, nothing in it is executed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from april.core.types import SampleId
from april.errors import CheckpointError
from april.state_file import pack, unpack, write_atomic

KIND = "slime"


def path_of(directory: str, rollout_id: int) -> Path:
    """Beside the file that slime's data source writes for this rollout."""
    return Path(directory) / "rollout" / f"april_carry_{rollout_id}.msgpack"


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Replace ``path`` by ``content``.

    Raises:
        CheckpointError: a sample has something that cannot be written, or the directory is not writable.
    """
    data = pack(KIND, content)
    try:
        write_atomic(path, data)
    except OSError as error:
        raise CheckpointError(f"the carry cannot be written to {path}: {error.strerror}") from error


def read(path: Path) -> dict[str, Any] | None:
    """The content of ``path``; None: there is no such file.

    Raises:
        CheckpointError: it is damaged, or was written by another version of april.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"the carry {path} cannot be read: {error}") from error
    content: dict[str, Any] = unpack(KIND, data, str(path))
    return content


def without_objects(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state of the scheduler in which the samples of prompts are plain."""
    core = dict(state["core"])
    for key in ("ready", "waiting"):
        core[key] = [
            {**group, "data": {"group": [as_dict(s) for s in group["data"]["group"]]}} for group in core[key]
        ]
    return {**state, "core": core}


def groups_in(state: Mapping[str, Any]) -> set[int]:
    """Numbers of the groups that a state of the scheduler holds."""
    return {group["id"] for key in ("ready", "waiting") for group in state["core"][key]}


def as_dict(sample: Any) -> dict[str, Any]:
    """A sample as plain values; those that come from a file are that already."""
    return dict(sample) if isinstance(sample, Mapping) else dict(sample.to_dict())


def key_of(sample_id: SampleId) -> str:
    """A sample's name in the file."""
    return f"{sample_id.group}.{sample_id.index}"


def id_of(key: str) -> SampleId:
    """The sample that a name in the file means."""
    group, _, index = key.partition(".")
    return SampleId(int(group), int(index))
