"""The embedded engine beside ``model.generate`` of transformers: generated tokens per CPU second, on a model of yours.

    python -m benchmarks.embedded_cost MODEL_DIRECTORY [--responses 16] [--tokens 128] [--pairs 3]

The same prompts, temperature 1, one thread, both in turns. ``generate`` decodes the whole batch until its longest
response has ended; the engine decodes what is left. Nothing is over-sampled, so that only the engines differ.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import april
from benchmarks.precision import QUESTIONS


def by_generate(model: Any, tokenizer: Any, prompts: list[list[int]], tokens: int) -> tuple[int, float]:
    """Generated tokens, EOS included and padding left out, and CPU seconds."""
    batch = tokenizer.pad({"input_ids": prompts}, return_tensors="pt", padding_side="left")
    began = time.process_time()
    with torch.no_grad():
        out = model.generate(
            **batch, do_sample=True, temperature=1.0, top_p=1.0, top_k=0, repetition_penalty=1.0, max_new_tokens=tokens
        )
    spent = time.process_time() - began
    ends = model.generation_config.eos_token_id
    eos = torch.tensor(ends if isinstance(ends, list) else [ends])
    ended = torch.isin(out[:, batch["input_ids"].shape[1] :], eos).int()
    return int((ended.cumsum(1) - ended == 0).sum()), spent


def by_april(rollouts: april.RolloutScheduler) -> tuple[int, float]:
    """The same, of one batch."""
    began = time.process_time()
    batch = rollouts.next_batch()
    spent = time.process_time() - began
    rollouts.weight_update()
    return int(batch.lengths.sum()), spent


def main() -> None:
    """Print each pair, and the median ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--responses", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    chats = [[{"role": "user", "content": QUESTIONS[i % len(QUESTIONS)]}] for i in range(options.responses)]
    prompts = [list(tokenizer.apply_chat_template(c, add_generation_prompt=True)["input_ids"]) for c in chats]
    config = april.Config(
        rollout_batch_size=options.responses, n_samples_per_prompt=1, max_response_len=options.tokens,
        on_data_end="wrap", engine={"kind": "transformers", "slots": options.responses},
    )  # fmt: skip
    ratios = []
    with april.RolloutScheduler(config, prompts=prompts, reward=None, model=model) as rollouts:
        for _ in range(options.pairs):
            tokens, spent = by_generate(model, tokenizer, prompts, options.tokens)
            ours, ours_spent = by_april(rollouts)
            ratios.append((ours / ours_spent) / (tokens / spent))
            print(
                f"generate {tokens} tokens, {tokens / spent:.1f} per CPU s; april {ours} tokens, "
                f"{ours / ours_spent:.1f} per CPU s; {ratios[-1]:.2f}x",
                flush=True,
            )
    print(f"median {statistics.median(ratios):.2f}x of {options.pairs} pairs, {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    main()
