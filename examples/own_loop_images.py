"""april in a training loop of your own, with images: GRPO on a tiny vision-language model, in a minute on a CPU.

The model is to write even tokens where it sees red, odd ones where it sees blue. It and its processor are made here, at
random; with real ones only ``tiny_model`` and ``tiny_processor`` change. Run: ``python examples/own_loop_images.py``.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessorPil,
)

import april

SPECIAL = ["<|end|>", "<|pad|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
EOS, PAD, START, END, IMAGE, VIDEO = range(6)
WORDS = [f"w{i}" for i in range(18)]
TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)
COLOURS = {"red": (220, 20, 20), "blue": (20, 20, 220)}


class Processor(Qwen2_5_VLProcessor):
    """Of images alone: the part for videos needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        """Accept that there is no part for videos."""
        check: Any = super().check_argument_for_proper_class
        return None if argument is None else check(argument_name, argument)


def tiny_processor() -> Any:
    """With a real one: ``AutoProcessor.from_pretrained(...)``."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*SPECIAL, *WORDS])}, unk_token=WORDS[0]))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=words, eos_token=SPECIAL[EOS], pad_token=SPECIAL[PAD], additional_special_tokens=SPECIAL[2:],
        extra_special_tokens={"image_token": SPECIAL[IMAGE], "video_token": SPECIAL[VIDEO]},
    )  # fmt: skip
    pixels = Qwen2VLImageProcessorPil(
        patch_size=14, merge_size=2, temporal_patch_size=2, min_pixels=28 * 28, max_pixels=28 * 28 * 16
    )
    make: Any = Processor
    return make(image_processor=pixels, tokenizer=tokenizer, video_processor=None, chat_template=TEMPLATE)


def tiny_model() -> Any:
    """With a real one: ``AutoModelForImageTextToText.from_pretrained(...)``."""
    torch.manual_seed(0)
    text = {
        "vocab_size": len(SPECIAL) + len(WORDS), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": EOS,
        "bos_token_id": None, "pad_token_id": PAD,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32, "patch_size": 14,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 56, "fullatt_block_indexes": [0],
    }  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=VIDEO,
            vision_start_token_id=START, vision_end_token_id=END, tie_word_embeddings=False,
        )
    )  # fmt: skip


def prompts(count: int) -> list[dict[str, Any]]:
    """A chat and its image, which may be bytes, a path, a PIL image or a ``data:`` URL."""
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "w1"}]}]
    names = [list(COLOURS)[i % 2] for i in range(count)]
    return [{"messages": chat, "images": [Image.new("RGB", (56, 56), COLOURS[n])], "colour": n} for n in names]


def reward(prompt: april.Prompt, response: april.Response) -> float:
    """Share of the tokens that fit the colour."""
    return float((response.tokens % 2 == (prompt.data["colour"] == "blue")).mean())


def pixels_of(batch: april.Batch, processor: Any) -> dict[str, torch.Tensor]:
    """What the model sees: the images of all rows, in order. Each is held once per group, as the file that it was."""
    attached = [placed.attachment for sample in batch.samples for placed in sample.attached]
    images = [Image.open(io.BytesIO(april.attachment_bytes(attachment))) for attachment in attached]
    made = processor.image_processor(images, return_tensors="pt")
    return {"pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"]}


def grpo_loss(model: Any, processor: Any, batch: april.Batch) -> torch.Tensor:
    """The recommended loss; the rows have as many tokens for an image as the model reads it as."""
    rows = batch.padded(pad_id=PAD, left_pad_prompts=True) | {"advantages": batch.advantages("grpo")}
    arrays = april.to_torch(rows)
    ids, whole = arrays["response_ids"], arrays["input_ids"]  # [B, T], [B, L]
    types = (whole == IMAGE).int()
    seen = pixels_of(batch, processor)
    out = model(whole, attention_mask=arrays["attention_mask"], mm_token_type_ids=types, **seen)
    logprobs = out.logits[:, -ids.shape[1] - 1 : -1].float().log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    return april.policy_loss(logprobs, arrays["logprobs"], arrays["loss_mask"], arrays["advantages"])


def main(arguments: Sequence[str] | None = None) -> float:
    """Train and print one line per step; returns the mean reward of the last batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args(arguments)
    model, processor = tiny_model(), tiny_processor()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    config = april.Config(
        rollout_batch_size=4, over_sampling_batch_size=8, n_samples_per_prompt=8, max_response_len=40, max_in_flight=32
    )
    asked = prompts(16 * options.steps)
    with april.RolloutScheduler(config, prompts=asked, reward=reward, model=model, processor=processor) as rollouts:
        for step in range(options.steps):
            batch = rollouts.next_batch()
            loss = grpo_loss(model, processor, batch)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            rollouts.weight_update()
            print(f"step {step}: reward {batch.rewards.mean():.2f}, {batch.off_policy_share:.0%} from older weights")
    return float(batch.rewards.mean())


if __name__ == "__main__":
    main()
