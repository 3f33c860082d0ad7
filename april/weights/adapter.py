"""Writes a trainer's adapter (LoRA, PEFT) to a directory from which servers load it.

Invariant: the trainer's model is never modified. If the model is sharded over ranks, all ranks must call the same
methods at the same time, and one of them writes.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import tempfile
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from april.engines.http.adapter_files import TENSORS, why_unservable
from april.engines.http.weight_directories import ADAPTER_FILE
from april.errors import ConfigError

MIN_KEPT_DIRECTORIES = 2
"""Number of newest adapter directories that are always kept, because a slow server may still read the previous one."""


def is_adapted(model: Any) -> bool:
    """Return True for a PEFT model, whose trained weights are those of an adapter."""
    return isinstance(getattr(model, "peft_config", None), Mapping) and hasattr(model, "get_base_model")


@dataclass(frozen=True, slots=True)
class TrainedAdapter:
    """The settings and tensors of a model's active adapter."""

    settings: dict[str, Any]
    tensors: dict[str, Any] = field(repr=False)
    """Tensors by their names in a saved adapter; each rank has only its shards if the model is sharded."""

    def write(self, folder: Path, *, writes: bool = True, private: bool = False) -> None:
        """Write the adapter into a new directory. Collective if tensors are sharded over ranks.

        Args:
            writes: True if this rank writes the files; False if it only takes part in gathering.
            private: True if only this user may read the files.
        """
        whole = {}
        for name, tensor in self.tensors.items():
            found = tensor.detach()
            found = found.full_tensor() if hasattr(found, "full_tensor") else found
            if writes:
                whole[name] = found.to("cpu").contiguous()
        if not writes:
            return
        from safetensors.torch import save_file

        os.makedirs(folder, mode=0o700 if private else 0o777)
        save_file(whole, folder / TENSORS, metadata={"format": "pt"})
        (folder / ADAPTER_FILE).write_text(json.dumps(self.settings, indent=1, default=_json_value), encoding="utf-8")
        for file in (TENSORS, ADAPTER_FILE) if private else ():
            os.chmod(folder / file, 0o600)


def merged_copy(model: Any) -> Any:
    """Return a copy of the base model in main memory, with the active adapters merged into it."""
    import torch

    known: dict[int, Any] = {id(p): torch.nn.Parameter(_on_cpu(p), requires_grad=False) for p in model.parameters()}
    known |= {id(b): _on_cpu(b) for b in model.buffers()}
    return copy.deepcopy(model, known).merge_and_unload()


def _on_cpu(tensor: Any) -> Any:
    return tensor.detach().to("cpu", copy=True)


def adapter_of(model: Any) -> TrainedAdapter:
    """Return the active adapter; raises ConfigError if other parameters are trained, or if servers cannot use it."""
    configs: Mapping[str, Any] = model.peft_config
    active = getattr(model, "active_adapters", None) or [model.active_adapter]
    names = list(active() if callable(active) else active)
    if len(names) != 1 or names[0] not in configs:
        raise ConfigError(
            f"PEFT model with the active adapters {names}: a request can use only one adapter; activate one"
        )
    (name,) = names
    config = configs[name]
    settings = config.to_dict() if hasattr(config, "to_dict") else dict(vars(config))
    if (why := why_unservable(settings, scales=True)) is not None:
        raise ConfigError(f"PEFT adapter {name}: {why}")
    own = re.compile(rf"(.*?\.lora_(?:embedding_)?[AB])\.{re.escape(name)}((?:\..*)?)")
    found = ((own.fullmatch(key), tensor) for key, tensor in model.state_dict(keep_vars=True).items())
    tensors = {key[1] + key[2]: tensor for key, tensor in found if key is not None}
    if not tensors:
        raise ConfigError(f"PEFT adapter {name} has no tensors")
    mine = {id(tensor) for tensor in tensors.values()}
    others = [key for key, p in model.named_parameters() if p.requires_grad and id(p) not in mine]
    if others:
        raise ConfigError(
            f"PEFT model that trains {others[0]} in addition to its adapter {name}: servers would keep the old "
            "values; train only the adapter"
        )
    return TrainedAdapter({**settings, "inference_mode": True}, tensors)


def _json_value(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(value)


class AdapterDirectories:
    """Writes each version of the adapter to a new directory, inside a directory that is removed at the end.

    Args:
        parent: directory that the servers can also read; None means this machine's directory for temporary files.
    """

    def __init__(self, parent: Path | None = None) -> None:
        self._parent = parent
        self._root: Path | None = None
        self._number = 0
        self._written: deque[Path] = deque()

    def write(self, adapter: TrainedAdapter) -> str:
        """Write the adapter into a new directory and return its path. Raises OSError."""
        if self._root is None:
            if self._parent is not None:
                self._parent.mkdir(parents=True, exist_ok=True)
            self._root = Path(tempfile.mkdtemp(prefix="april-adapters-", dir=self._parent))
        self._number += 1
        made = self._root / str(self._number)
        self._written.append(made)
        adapter.write(made, private=True)
        return str(made)

    def remove_others(self, paths: Collection[str]) -> None:
        """Remove all directories except the newest and those that servers may read again (``paths``)."""
        for made in list(self._written)[:-MIN_KEPT_DIRECTORIES]:
            if str(made) not in paths:
                shutil.rmtree(made, ignore_errors=True)
                self._written.remove(made)

    def close(self) -> None:
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
        self._root = None
        self._written.clear()
