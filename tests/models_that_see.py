"""A tiny random Qwen2.5-VL, or another model that sees, with its processor, all made on the spot; and images for it."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from april.core.attachments import Attachment, Placed
from april.core.sampling import SamplingParams
from april.engines.protocol import Chunk, Float32, Int32, Request

SPECIAL = ("<pad>", "<eos>", "<see>", "</see>", "<image>", "<video>", "<|im_start|>", "<|im_end|>")
PAD, EOS, SEE, SEEN, IMAGE, VIDEO = range(6)
VOCAB_SIZE = 97
TEMPLATE = (
    "{% for m in messages %}<|im_start|> {% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}<see> <image> </see> {% else %}{{ c.text }} {% endif %}{% endfor %}{% endif %}"
    "<|im_end|> {% endfor %}{% if add_generation_prompt %}<|im_start|> {% endif %}"
)
FAMILIES = ("qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "gemma3")
GEMMA_TOKENS = 4


def tiny_tokenizer() -> Any:
    """Words t8 to t96, between spaces, and the words that stand for images."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(SPECIAL)} | {f"t{i}": i for i in range(len(SPECIAL), VOCAB_SIZE)}
    made = Tokenizer(models.WordLevel(words, "<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, **dict(zip(("pad_token", "eos_token"), SPECIAL, strict=False)),
        additional_special_tokens=list(SPECIAL[2:]),
        extra_special_tokens={
            "image_token": "<image>", "video_token": "<video>", "boi_token": "<see>", "eoi_token": "</see>",
        },
        chat_template=TEMPLATE, padding_side="left",
    )  # fmt: skip


def tiny_processor(family: str = "qwen2_5_vl") -> Any:
    """The processor of transformers, over the image processor that needs no torchvision; 4 pixels are a patch."""
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    if family == "gemma3":
        images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = TEMPLATE.replace("<see> <image> </see>", "<see>")  # the processor writes the rest
        return Gemma3Processor(images, tokenizer, image_seq_length=GEMMA_TOKENS, chat_template=tokenizer.chat_template)

    class TinyProcessor(Qwen2_5_VLProcessor):  # type: ignore[misc]
        """Without the reader of videos, which needs torchvision."""

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return type(argument)

        def save_pretrained(self, save_directory: Any, **options: Any) -> None:
            self.tokenizer.save_pretrained(save_directory)

    images = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=8 * 8 * 4, max_pixels=8 * 8 * 64
    )
    return TinyProcessor(images, tiny_tokenizer(), None, chat_template=TEMPLATE)


def tiny_vision_model(family: str = "qwen2_5_vl", seed: int = 0, **changes: Any) -> Any:
    """float32, in training mode, as a trainer would hold it; ``changes`` are to the configuration of its text."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    text: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": EOS,
        "bos_token_id": None, "pad_token_id": PAD, "initializer_range": 0.2,
    }  # fmt: skip
    vision: dict[str, Any] = {"initializer_range": 0.2, "patch_size": 4}
    if family == "gemma3":
        text |= {"head_dim": 8, "sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}
        vision |= {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "image_size": 16,
        }  # fmt: skip
        ids: dict[str, Any] = {
            "image_token_index": IMAGE, "image_token_id": IMAGE, "boi_token_index": SEE, "eoi_token_index": SEEN,
            "mm_tokens_per_image": GEMMA_TOKENS,
        }  # fmt: skip
    else:
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
        vision |= {"depth": 2, "num_heads": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
        if family == "qwen2_5_vl":
            vision |= {
                "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 32, "window_size": 16,
                "fullatt_block_indexes": [1],
            }  # fmt: skip
        elif family == "qwen2_vl":
            vision |= {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}
        else:
            text["head_dim"] = 8
            if family == "qwen3_vl_moe":
                text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
            text["rope_parameters"]["mrope_interleaved"] = True
            vision |= {
                "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 32, "deepstack_visual_indexes": [0],
                "num_position_embeddings": 64,
            }  # fmt: skip
        ids = {
            "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": SEE,
            "vision_end_token_id": SEEN,
        }  # fmt: skip
    config = AutoConfig.for_model(
        family, text_config=text | changes, vision_config=vision, tie_word_embeddings=False, **ids
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa")
        if family == "gemma3":  # which begins blind
            torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.5)
    return model.train()


@cache
def picture(seed: int, height: int = 16, width: int = 24) -> Attachment:
    """An image of noise, as PNG."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return Attachment.of("image", buffer.getvalue())


def opened(attachment: Attachment) -> Any:
    from PIL import Image

    assert attachment.data is not None
    return Image.open(io.BytesIO(attachment.data))


Seeing = tuple[Int32, tuple[Placed, ...]]
"""Tokens of a conversation, and its images at their places."""


def with_images(processor: Any, before: Sequence[int], images: Sequence[Attachment]) -> Seeing:
    """Expanded tokens of words ``before`` and behind images, and the places of these."""
    mark = processor.image_token
    text = " ".join([*(f"t{i}" for i in before), *(f"<see> {mark} </see> t9" for _ in images)])
    if mark == "<see>":
        text = text.replace("<see> <see> </see>", "<see>")
    made = processor(text=[text], images=[opened(image) for image in images] or None)
    tokens = np.array(made["input_ids"][0], np.int32)
    ours = np.concatenate([[False], tokens == IMAGE, [False]])
    edges = np.flatnonzero(ours[1:] != ours[:-1]).reshape(-1, 2).tolist()
    places = [Placed(i, at, end - at, (IMAGE,)) for i, (at, end) in zip(images, edges, strict=True)]
    return tokens, tuple(places)


def seeing(name: str, tokens: Int32, attached: tuple[Placed, ...], new: int = 20, **sampling: Any) -> Request:
    """A request that comes with images; the ids that stand for some are banned."""
    params = SamplingParams(new, **({"seed": 7, "banned_ids": (IMAGE, VIDEO)} | sampling))
    return Request(attempt_id=name, token_ids=tokens, sampling=params, attached=attached)


def apart_seeing(
    model: Any, processor: Any, tokens: Int32, attached: Sequence[Placed], chunk: Chunk, temperature: float = 1.0
) -> Float32:
    """Distances in nats from log-probabilities of one full forward pass over what the processor makes of the images."""
    sequence = torch.from_numpy(np.concatenate([tokens, chunk.tokens]).astype(np.int64))[None]
    given: dict[str, Any] = {}
    if attached:
        marks = " ".join("t9 " + processor.image_token for _ in attached)
        made = processor(text=[marks], images=[opened(p.attachment) for p in attached], return_tensors="pt")
        types = (sequence == IMAGE).long()
        given = {n: made[n] for n in ("pixel_values", "image_grid_thw") if n in made}
        given |= {n: types for n in ("mm_token_type_ids", "token_type_ids") if n in made}
    training = model.training
    with torch.no_grad():
        rows = model.eval()(input_ids=sequence, use_cache=False, **given).logits[0, len(tokens) - 1 : -1].float()
    model.train(training)
    expected = (rows / temperature).log_softmax(-1).gather(1, sequence[0, len(tokens) :, None])[:, 0]
    return np.abs(expected.numpy() - chunk.logprobs)
