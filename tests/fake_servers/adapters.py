"""Adapters (LoRA) of fake servers: which are loaded under which name, and what tokens their requests get."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path


class FakeAdapters:
    """The adapters that one process has; tokens under one depend on its tensors as they were when it was loaded."""

    def __init__(self, *, max_rank: int = 16, slots: int = 2) -> None:
        self.max_rank, self.slots = max_rank, slots
        self.present: dict[str, str] = {}
        """Name -> what is added to the name of the weights under it."""
        self.ever: list[str] = []
        """Names of all loads that worked, in order, of earlier processes too."""
        self.unloaded: list[str] = []

    def load(self, name: str, path: str) -> str:
        """Why it cannot be loaded; empty: it is."""
        try:
            rank = int(json.loads((Path(path) / "adapter_config.json").read_text())["r"])
            salt = salt_of(path)
        except (OSError, ValueError, KeyError):
            return f"No adapter found for {path}"
        if rank > self.max_rank:
            return f"LoRA rank {rank} is greater than max_lora_rank {self.max_rank}."
        self.present[name] = salt
        self.ever.append(name)
        return ""

    def unload(self, name: str) -> bool:
        """False: it was not there."""
        self.unloaded.append(name)
        return self.present.pop(name, None) is not None


def salt_of(path: str | Path) -> str:
    """What the tokens under an adapter depend on besides the model's weights."""
    return "+" + hashlib.blake2b((Path(path) / "adapter_model.safetensors").read_bytes(), digest_size=4).hexdigest()


def write_adapter(
    where: Path, seed: int = 0, *, rank: int = 4, layers: dict[str, tuple[int, int]] | None = None, **settings: object
) -> str:
    """A directory as ``PeftModel.save_pretrained`` leaves it; ``layers``: (rows, columns) by name. Returns its path."""
    where.mkdir(parents=True, exist_ok=True)
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"} | settings
    (where / "adapter_config.json").write_text(json.dumps(said))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for layer, (rows, columns) in (layers or {"model.layers.0.self_attn.q_proj": (8, 8)}).items():
        for part, shape in (("A", (rank, columns)), ("B", (rows, rank))):
            start, end = end, end + 4 * shape[0] * shape[1]
            header[f"base_model.model.{layer}.lora_{part}.weight"] = {
                "dtype": "F32", "shape": list(shape), "data_offsets": [start, end],
            }  # fmt: skip
    told = json.dumps(header).encode()
    content = (seed.to_bytes(4, "little") * (end // 4))[:end]
    (where / "adapter_model.safetensors").write_bytes(len(told).to_bytes(8, "little") + told + content)
    return str(where)
