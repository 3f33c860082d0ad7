"""A processor of the Qwen2.5-VL family, made on the spot, and images for it; nothing is downloaded."""

from __future__ import annotations

import io
from functools import cache
from typing import Any

import pytest

SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
]  # fmt: skip
IMAGE_ID, VIDEO_ID = 5, 6
VOCAB = 512
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def tiny_tokenizer() -> Any:
    """A byte-level tokenizer with the special tokens of Qwen2.5-VL and a chat template."""
    transformers = pytest.importorskip("transformers")
    from tests.tiny_tokenizers import byte_level

    bpe = byte_level((f"a tiny model sees {n} cats, then {n * 7} dogs" for n in range(2000)), VOCAB, SPECIAL)
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=SPECIAL[2], pad_token=SPECIAL[0], additional_special_tokens=SPECIAL[1:],
        extra_special_tokens={"image_token": SPECIAL[IMAGE_ID], "video_token": SPECIAL[VIDEO_ID]},
    )  # fmt: skip
    made.chat_template = TEMPLATE
    return made


@cache
def tiny_processor() -> Any:
    """The processor of the tiny tokenizer: an image is as many tokens as squares of 28 pixels, from 4 to 256."""
    pytest.importorskip("PIL")
    transformers = pytest.importorskip("transformers")

    class Processor(transformers.Qwen2_5_VLProcessor):  # type: ignore[misc, name-defined]
        """Without a reader of videos, which needs torchvision."""

        def check_argument_for_proper_class(self, name: str, arg: Any) -> Any:
            return None if arg is None else super().check_argument_for_proper_class(name, arg)

    images = transformers.Qwen2VLImageProcessorPil(
        patch_size=14, merge_size=2, temporal_patch_size=2, min_pixels=28 * 28 * 4, max_pixels=28 * 28 * 256
    )
    return Processor(image_processor=images, tokenizer=tiny_tokenizer(), video_processor=None, chat_template=TEMPLATE)


def tiny_gemma() -> Any:
    """A processor of the Gemma 3 family: four tokens per image between line breaks, which the tokenizer puts together
    with those beside them.
    """
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    names = ["<pad>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<soft>"]
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("\n+|[^\n]+"), "isolated")
    bpe.decoder = tokenizers.decoders.Fuse()
    alphabet = list("abcdefghijklmnopqrstuvwxyz ?\n")
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=200, special_tokens=names, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(["user\n\n\n\n\n\n\n\n\nwhat is it? here are some more"] * 50, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=names[1], pad_token=names[0], additional_special_tokens=names[2:],
        extra_special_tokens={"boi_token": names[4], "eoi_token": names[5], "image_token": names[6]},
    )  # fmt: skip
    template = (
        "{% for m in messages %}<start_of_turn>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for c in m.content %}{% if c.type == 'image' %}<start_of_image>{% else %}{{ c.text }}{% endif %}"
        "{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    )
    return transformers.Gemma3Processor(
        image_processor=transformers.Gemma3ImageProcessorPil(size={"height": 56, "width": 56}), tokenizer=tokenizer,
        chat_template=template, image_seq_length=4,
    )  # fmt: skip


def picture(width: int = 56, height: int = 84, color: tuple[int, int, int] = (200, 30, 30)) -> Any:
    """A ``PIL.Image`` of one colour."""
    from PIL import Image

    return Image.new("RGB", (width, height), color)


def encoded(image: Any = None, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    (picture() if image is None else image).save(buffer, kind)
    return buffer.getvalue()
