"""A tiny random Qwen2.5-VL, made on the spot, and versions of it in all of whose weights, the vision tower's too,
something has changed. An image of 168 x 224 pixels is read as 48 tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from tests.tiny_vision import IMAGE_ID, VIDEO_ID, VOCAB, tiny_processor, tiny_tokenizer

CONTEXT = 4096
EOS, VISION_START, VISION_END = 2, 3, 4
PLACEHOLDERS = (IMAGE_ID, VIDEO_ID)
"""What stands in prompts for images and videos, and is never generated."""


def image_model() -> Any:
    """The model of version 0, in float32."""
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT,
            "initializer_range": 0.09, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": EOS,
            "pad_token_id": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]},
        },
        vision_config={
            "depth": 3, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "out_hidden_size": 256,
            "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
            "fullatt_block_indexes": [1], "initializer_range": 0.2,
        },
        image_token_id=IMAGE_ID, video_token_id=VIDEO_ID, vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model: Any = Qwen2_5_VLForConditionalGeneration(config)
        return model.eval()


def change(model: Any, seed: int, step: float = 0.1) -> None:
    """Turn every weight, in place, by so large a share of its norm, which stays."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            direction, norm = torch.randn(weight.shape, generator=noise), weight.norm()
            if not norm:  # a bias, as it was made
                continue
            weight.add_(direction * (step * norm / direction.norm()))
            weight.mul_(norm / weight.norm())


def save_image_model(model: Any, where: Path) -> Path:
    """Write a directory that servers load; a video processor could be made only where torchvision is."""
    model.save_pretrained(where)
    tiny_tokenizer().save_pretrained(where)
    cuts = tiny_processor().image_processor.to_dict()
    videos = {name: value for name, value in cuts.items() if name != "image_processor_type"}
    both = {
        "image_processor": cuts | {"image_processor_type": "Qwen2VLImageProcessor"},
        "video_processor": videos | {"video_processor_type": "Qwen2VLVideoProcessor"},
        "processor_class": "Qwen2_5_VLProcessor",
    }  # fmt: skip
    (where / "processor_config.json").write_text(json.dumps(both), "utf-8")
    return where
