"""Engines that need no server, as subjects of the conformance suite: small, so that all checks take seconds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
from tiny_models import tiny_model
from tiny_tokenizers import tokenizer

from april.core.attachments import Attachment, Placed
from april.engines.protocol import Engine, Float32, Int32, Request
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.engine import SimulatedEngine
from april.engines.transformers.engine import TransformersEngine
from april.testing import FakeEngine
from april.testing.conformance import Shown, Subject, Weights, hugging_face
from april.testing.conformance.subject import Seen
from april.testing.records import conversation, with_attachment_ids

LONG, SHORT = 120, 9
ENDS = 3
"""A prompt that begins with it gets a short response."""
PROMPTS = ((5, 6, 7, 8), (9, 10, 11), (12, 13, 14, 15, 16))
ENDING = ((ENDS, 6, 7), (ENDS, 9))


def says(request: Request) -> Int32:
    """What a fake model answers: the same tokens to the same conversation of the same sample, none of them a stop."""
    before = with_attachment_ids(request)
    seed = [*before.tolist(), *(request.sample_key or (0, 0))]
    count = SHORT if before[0] == ENDS else 4 * LONG
    allowed = np.setdiff1d(np.arange(1, 1000), request.sampling.banned_ids)
    return np.random.default_rng(seed).choice(allowed, count).astype(np.int32)


def shown(*images: bytes) -> Shown:
    """A prompt of a few words around images, each of which is read as three tokens."""
    ids, attached = [5], []
    for data in images:
        attached.append(Placed(Attachment.of("image", data), len(ids), 3, (400,)))
        ids += [400, 400, 400, 7]
    return Shown(ids, attached)


SHOWN = (shown(b"red"), shown(b"blue"), shown(b"red", b"blue"), shown(b"blue", b"red"))


def opens(make: Callable[[], Engine]) -> Callable[[], Awaitable[Engine]]:
    """``make`` as Subject.open wants it."""

    async def opened() -> Engine:
        return make()

    return opened


def fake(**options: Any) -> FakeEngine:
    """One millisecond a token, in chunks of four."""
    defaults: dict[str, Any] = {"responses": says, "seconds_per_token": 0.001, "chunk_tokens": 4, "max_context": 1000,
                                "extras": ("routed_experts",)}  # fmt: skip
    return FakeEngine(**(defaults | options))


def fake_subject(make: Callable[[], Engine] = fake, **changes: Any) -> Subject:
    """For a virtual loop."""
    values: dict[str, Any] = {
        "open": opens(make), "prompts": PROMPTS, "ending_prompts": ENDING, "long_tokens": LONG,
        "shown": SHOWN, "other": Weights("elsewhere"), "now": Weights("here"), "patience_s": 20.0,
    }  # fmt: skip
    return Subject(**(values | changes))


def simulated() -> SimulatedEngine:
    def length_of(request: Request) -> int:
        return SHORT if conversation(request)[0] == ENDS else 4 * LONG

    return SimulatedEngine(
        "simulated", DecodeCost(1e-3, 0.0, 0.0), length_of, max_running=64, vocab_size=1000, max_context=1000,
        stream_interval_s=0.004, extras=("routed_experts",),
    )  # fmt: skip


def embedded_subject(directory: Path, **changes: Any) -> Subject:
    """The embedded engine with a tiny model; its weights 0 and 1 are saved in ``directory``."""
    vocab_size = tokenizer("text").get_vocab_size()
    weights = []
    for seed in (0, 1):
        path = directory / str(seed)
        if not path.exists():
            tiny_model(seed=seed, vocab_size=vocab_size).save_pretrained(path)
        weights.append(Weights(str(path), hugging_face(str(path))))

    def make() -> TransformersEngine:
        return TransformersEngine(
            tiny_model(seed=0, vocab_size=vocab_size), slots=64, max_len=400, stream_interval=4, check=False
        )

    values: dict[str, Any] = {
        "open": opens(make), "prompts": PROMPTS, "long_tokens": LONG, "now": weights[0], "other": weights[1],
        "patience_s": 30.0, "aborts": 200, "in_flight": 80,
    }  # fmt: skip
    return Subject(**(values | changes))


def seeing_subject(directory: Path, **changes: Any) -> Subject:
    """The embedded engine with a tiny model that sees."""
    from models_that_see import picture, tiny_processor, tiny_vision_model, with_images

    processor, weights = tiny_processor(), []
    for seed in (0, 1):
        path = directory / f"sees{seed}"
        if not path.exists():
            tiny_vision_model(seed=seed).eval().save_pretrained(path)
        weights.append(Weights(str(path), seen=sees(seed)))

    def make() -> TransformersEngine:
        return TransformersEngine(
            tiny_vision_model(seed=0), slots=16, max_len=400, stream_interval=4, check=False, processor=processor
        )

    prompts = [Shown(*with_images(processor, (20, 21), images)) for images in (
        [picture(0)], [picture(1)], [picture(0), picture(1)], [picture(1), picture(0)],
    )]  # fmt: skip
    values: dict[str, Any] = {
        "open": opens(make), "prompts": ((10, 11, 12, 13), (14, 15, 16)), "long_tokens": LONG, "shown": prompts,
        "now": weights[0], "other": weights[1], "patience_s": 30.0,
    }  # fmt: skip
    return Subject(**(values | changes))


def sees(seed: int) -> Seen:
    """Logits of one full forward pass with the images of a request."""
    import torch
    from models_that_see import IMAGE, opened, tiny_processor, tiny_vision_model

    model, processor = tiny_vision_model(seed=seed).eval(), tiny_processor()

    def logits(request: Request, response: list[int]) -> Float32:
        made = processor.image_processor(
            images=[opened(placed.attachment) for placed in request.attached], return_tensors="pt"
        )
        ids = torch.tensor([[*request.token_ids.tolist(), *response]])
        with torch.no_grad():
            rows: Float32 = model(
                input_ids=ids, use_cache=False, pixel_values=made["pixel_values"],
                image_grid_thw=made["image_grid_thw"], mm_token_type_ids=(ids == IMAGE).long(),
            ).logits[0, len(request.token_ids) - 1 : -1].float().numpy()  # fmt: skip
        return rows

    return logits
