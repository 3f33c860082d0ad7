"""A Hugging Face model as the reference for an engine's log-probabilities."""

from __future__ import annotations

from functools import cache
from typing import Any

from april.engines.protocol import Float32
from april.testing.conformance.subject import Reference


@cache
def hugging_face(path: str) -> Reference:
    """Return a function that computes reference logits with the model in a directory, in fp32 on the CPU.

    Needs the ``transformers`` extra.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, use_safetensors=True)
    model.eval()

    def logits(prompt: list[int], response: list[int]) -> Float32:
        with torch.no_grad():
            rows: Float32 = (
                model(input_ids=torch.tensor([prompt + response]), use_cache=False)
                .logits[0, len(prompt) - 1 : -1].float().numpy()
            )  # fmt: skip
        return rows

    return logits
