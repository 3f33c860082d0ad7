"""Images are held once per group, whatever its samples are doing."""

from __future__ import annotations

import io
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
from models_that_see import EOS, IMAGE, VOCAB_SIZE, tiny_processor

import april
from april.testing import FakeEngine, rollouts, run_virtual

GROUPS, SAMPLES, SIDE = 32, 8, 320


def noise(seed: int) -> bytes:
    """A PNG of 300 kB, which noise cannot be compressed below."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()


def test_256_held_samples_have_one_image_per_group() -> None:
    """256 samples in 32 groups, cut and resumed, and a state of them: 32 images of 300 kB, and no copy."""
    processor = tiny_processor()
    config = april.Config(
        rollout_batch_size=1, over_sampling_batch_size=GROUPS, n_samples_per_prompt=SAMPLES, max_response_len=1000,
        max_staleness=GROUPS,
    )  # fmt: skip
    engine = FakeEngine(
        "e", lengths=lambda r: 4 if r.sample_key and r.sample_key[0] == 0 else 900, max_running=GROUPS * SAMPLES,
        vocab_size=VOCAB_SIZE, eos_token_id=EOS, max_context=20_000,
    )  # fmt: skip

    class Drawn:
        """Images that nobody else holds."""

        def __iter__(self) -> Iterator[Any]:
            return ({"token_ids": [9, IMAGE, 10], "images": [noise(i)]} for i in range(GROUPS))

    async def held() -> tuple[int, Any]:
        how: Any = {"engines": [engine], "prompts": Drawn(), "processor": processor, "check": False}
        async with rollouts(config, reward=lambda prompt, response: 1.0, **how) as run:
            before = tracemalloc.get_traced_memory()[0]
            await run.next_batch()  # a batch of one group: the other 248 samples are cut, and held
            return tracemalloc.get_traced_memory()[0] - before, run.state_dict()

    tracemalloc.start()
    try:
        taken, state = run_virtual(held())
    finally:
        tracemalloc.stop()
    held_images = [a["size"] for a in state["core"]["attachments"].values()]
    assert len(engine.attempts) >= GROUPS * SAMPLES
    assert len(held_images) == GROUPS
    assert min(held_images) > 300_000
    assert sum(held_images) < taken < 1.5 * sum(held_images)  # 256 conversations of 1,600 tokens are in it
