"""A model with an adapter, as PEFT makes it, without the package."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


class Adapted(torch.nn.Module):
    """A layer with an adapter, named as PEFT names it."""

    def __init__(self, *, rank: int = 2, **settings: Any) -> None:
        super().__init__()
        layer = torch.nn.Module()
        layer.base_layer = torch.nn.Linear(8, 8, bias=False).requires_grad_(False)
        for part, shape in (("lora_A", (8, rank)), ("lora_B", (rank, 8))):
            setattr(layer, part, torch.nn.ModuleDict({"default": torch.nn.Linear(*shape, bias=False)}))
        self.base_model = torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"q_proj": layer})})
        said = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "target_modules": {"q_proj"}, "bias": "none"}
        self.peft_config = {"default": SimpleNamespace(to_dict=lambda: said | settings)}
        self.active_adapter = "default"

    def get_base_model(self) -> torch.nn.Module:
        return self.base_model
