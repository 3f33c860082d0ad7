"""A tiny random Qwen2.5-VL with its processor, made on the spot, and versions of it in all of whose weights, those of
the vision tower too, something has changed.

Its vocabulary has 512 tokens; an image of 168 x 224 pixels is read as 48 of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

VOCAB_SIZE, CONTEXT = 512, 4096
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
EOS, VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = 2, 3, 4, 5, 6
PLACEHOLDERS = (IMAGE_PAD, VIDEO_PAD)
"""What stands in prompts for images and videos, and is never generated."""
PATCH, MERGE = 14, 2
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def image_model() -> Any:
    """The model of version 0, in float32."""
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": VOCAB_SIZE, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT,
            "initializer_range": 0.09, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": EOS,
            "pad_token_id": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]},
        },
        vision_config={
            "depth": 3, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "out_hidden_size": 256,
            "patch_size": PATCH, "spatial_merge_size": MERGE, "temporal_patch_size": 2, "window_size": 112,
            "fullatt_block_indexes": [1], "initializer_range": 0.2,
        },
        image_token_id=IMAGE_PAD, video_token_id=VIDEO_PAD, vision_start_token_id=VISION_START,
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


def tokenizer() -> Any:
    bpe = Tokenizer(tokenizer_models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        (f"a tiny model sees {n} cats, then {n * 7} dogs" for n in range(2000)),
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE, special_tokens=list(SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        ),
    )  # fmt: skip
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bpe, eos_token=SPECIAL[EOS], additional_special_tokens=list(SPECIAL[1:]),
        extra_special_tokens={"image_token": SPECIAL[IMAGE_PAD], "video_token": SPECIAL[VIDEO_PAD]},
        chat_template=CHAT, pad_token="<|endoftext|>",  # noqa: S106 - no secret
    )  # fmt: skip


def sizes(max_pixels: int = 28 * 28 * 256) -> dict[str, Any]:
    """How its image processor cuts images up."""
    return {
        "patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 2, "min_pixels": 28 * 28 * 4,
        "max_pixels": max_pixels,
    }  # fmt: skip


class _Processor(Qwen2_5_VLProcessor):
    """Without the reader of videos, which needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        """Nothing is checked."""
        return type(argument)


def image_processor() -> Any:
    made: Any = _Processor
    return made(Qwen2VLImageProcessorPil(**sizes()), tokenizer(), None, chat_template=CHAT)


def save_image_model(model: Any, where: Path, **of_sizes: int) -> Path:
    """Write a directory that servers load; a video processor could be made only where torchvision is."""
    model.save_pretrained(where)
    tokenizer().save_pretrained(where)
    images = Qwen2VLImageProcessorPil(**sizes(**of_sizes)).to_dict() | {"image_processor_type": "Qwen2VLImageProcessor"}
    videos = {name: value for name, value in images.items() if name != "image_processor_type"}
    both = {
        "image_processor": images, "processor_class": "Qwen2_5_VLProcessor",
        "video_processor": videos | {"video_processor_type": "Qwen2VLVideoProcessor"},
    }  # fmt: skip
    (where / "processor_config.json").write_text(json.dumps(both), "utf-8")
    return where
