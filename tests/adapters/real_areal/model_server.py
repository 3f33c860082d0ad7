"""AReaL's routes over a tiny Hugging Face model in float32, which is loaded from each weight update; in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.areal_server import ArealServer, Row


class ModelServer(ArealServer):
    """One forward pass over all rows per step; log-probabilities at temperature 1.

    Args:
        path: directory of the first weights.
        places, token_s: as :class:`ArealServer`.
    """

    def __init__(self, path: str, *, places: int, token_s: float) -> None:
        super().__init__(places=places, token_s=token_s)
        self.models = [_model(path)]
        """By the number of updates before."""
        self._drawn = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def decode(self, rows: Sequence[Row]) -> list[tuple[int, float]]:
        longest = max(len(row.ids) for row in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        for i, row in enumerate(rows):
            ids[i, : len(row.ids)] = torch.tensor(row.ids)
        # padded at the right, causal: the last real position sees no padding
        logits = self.models[-1](ids).logits
        made = []
        for i, row in enumerate(rows):
            logprobs = torch.log_softmax(logits[i, len(row.ids) - 1], -1)
            token = int(torch.multinomial(logprobs.exp(), 1, generator=self._drawn))
            made.append((token, float(logprobs[token])))
        return made

    def load(self, path: str) -> None:
        self.models.append(_model(path))


def _model(path: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def started(server: ArealServer) -> str:
    """Its address, once it serves in a thread that ends with the process."""
    ready = threading.Event()
    address = ""

    async def run() -> None:
        nonlocal address
        address = await server.start()
        ready.set()
        await asyncio.Event().wait()

    threading.Thread(target=lambda: asyncio.run(run()), daemon=True).start()
    ready.wait()
    return address
