"""A trainer of a tiny model that sees: ``python vision_trainer.py FOLDER STEPS [DIES]``, which dies in a step, as by
``kill -9``. What it has been given, and its state after each update, are files in the folder.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from models_that_see import IMAGE, SEE, SEEN, picture, tiny_processor, tiny_vision_model

import april
from april.core.attachments import Attachment
from april.serialization.state_file import read_state, write_state

GROUPS, SAMPLES, PROMPTS = 5, 8, 40
KIND = "vision"
CONFIG = april.Config(
    rollout_batch_size=GROUPS, n_samples_per_prompt=SAMPLES, over_sampling_batch_size=2 * GROUPS, max_response_len=160,
    sampling={"temperature": 0.9}, seed=3,
    engine={"kind": "transformers", "slots": 48, "max_len": 256, "stream_interval": 4},
)  # fmt: skip


def image_of(row: int) -> Attachment:
    """Of a prompt; all but every fifth are of one size, so that nothing but the content tells them apart."""
    return picture(300 + row, *((24, 24) if row % 5 == 4 else (16, 24)))


def prompts(folder: Path) -> list[dict[str, Any]]:
    """The same tokens for all; images as bytes, or as files."""
    made = []
    for row in range(PROMPTS):
        image: Any = image_of(row).data
        if row % 2:
            path = folder / f"{row}.png"
            path.write_bytes(image)
            image = path
        made.append({"token_ids": [20, SEE, IMAGE, SEEN, 9], "images": [image], "row": row})
    return made


class Weights:
    """A model whose weights follow from the number of updates, those of its vision tower too."""

    def __init__(self) -> None:
        self.model = tiny_vision_model()
        self._first = {name: weight.clone() for name, weight in self.model.state_dict().items()}

    def write(self, updates: int) -> None:
        """Write those after so many updates, in place."""
        drawn = torch.Generator().manual_seed(updates)
        with torch.no_grad():
            for name, weight in self.model.state_dict().items():
                noise = torch.randn(weight.shape, generator=drawn) * (0.1 if updates else 0.0)
                weight.copy_(self._first[name] * (1 + noise))


def train(folder: Path, steps: int, dies: int | None = None) -> None:
    """Train up to so many steps, from the newest state if there is one; ``dies`` in that step, behind its batch."""
    weights = Weights()
    states = sorted(folder.glob("state-*"))
    done = int(states[-1].name.rpartition("-")[2]) if states else 0
    weights.write(done)
    with april.RolloutScheduler(
        CONFIG, prompts=prompts(folder), model=weights.model, processor=tiny_processor(), reward=None
    ) as scheduler:
        if states:
            scheduler.load_state_dict(read_state(states[-1], KIND)["rollouts"])
        for step in range(done, steps):
            batch = scheduler.next_batch()
            rows = [_row(sample) for sample in batch.samples]
            if step == dies:
                os.kill(os.getpid(), signal.SIGKILL)
            weights.write(step + 1)
            scheduler.weight_update(trained=batch.id)
            scheduler.validate()
            (folder / f"rows-{step + 1:02d}").write_bytes(msgspec.msgpack.encode(rows))
            write_state(folder / f"state-{step + 1:02d}", KIND, {"rollouts": scheduler.state_dict()})


def _row(sample: Any) -> dict[str, Any]:
    (placed,) = sample.prompt.attached
    return {
        "row": sample.prompt.data["row"], "digest": placed.attachment.digest, "resumes": sample.resumes,
        "prompt": sample.prompt.token_ids.tolist(), "tokens": sample.tokens.tolist(),
        "logprobs": sample.logprobs.tolist(), "updates": np.asarray(sample.versions)[:, 1].tolist(),
    }  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Path(sys.argv[1]), int(sys.argv[2]), *map(int, sys.argv[3:]))
