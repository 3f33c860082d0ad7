"""What a precision means for log-probabilities: april's, delivered, beside transformers' own, on a model of yours.

    python -m benchmarks.precision MODEL_DIRECTORY [--precisions float32 bfloat16 autocast] [--json FILE]

Responses are generated with the embedded engine, some of them cut at the end of a step and continued in the next. Their
log-probabilities are computed again by a forward pass of each response by itself, of all of them in a left-padded
batch, and in float32. In each row are the absolute differences in nats per token.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import april

QUESTIONS = (
    "What is 17 + 25?", "Name three rivers.", "Why is the sky blue?", "Write a line about autumn.",
    "How many days has a leap year?", "What is a prime number?", "Say hello in French.", "Explain gravity.",
)  # fmt: skip
PRECISIONS: dict[str, tuple[torch.dtype, Callable[[], AbstractContextManager[Any]]]] = {
    "float32": (torch.float32, nullcontext),
    "bfloat16": (torch.bfloat16, nullcontext),
    "autocast": (torch.float32, lambda: torch.autocast(device().type, torch.bfloat16)),
}
"""Dtype of the weights, and what is around every forward pass."""


def device() -> torch.device:
    """The GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def batch_of(model: Any, tokenizer: Any, samples: int, tokens: int) -> april.Batch:
    """Responses in two steps, so that many were cut and continued."""
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    encoded = [tokenizer.apply_chat_template(c, add_generation_prompt=True) for c in conversations]
    prompts = [{"token_ids": list(e["input_ids"] if hasattr(e, "keys") else e)} for e in encoded]
    groups = max(1, samples // 4)
    config = april.Config(
        rollout_batch_size=groups, n_samples_per_prompt=4, max_response_len=tokens, on_data_end="wrap",
        refill="sample", max_in_flight=4 * groups + 3, engine={"kind": "transformers", "stream_interval": 8},
    )  # fmt: skip
    with april.RolloutScheduler(config, prompts=prompts, reward=lambda *_: 0.0, model=model) as rollouts:
        rollouts.next_batch()
        return rollouts.next_batch()


def alone(model: Any, batch: april.Batch) -> list[torch.Tensor]:
    """float32 [T] per response: each by itself."""
    found = []
    for sample in batch.samples:
        prompt = [int(t) for t in sample.prompt.token_ids]
        ids = torch.tensor([[*prompt, *sample.tokens.tolist()]], device=model.device)
        with torch.no_grad():
            logprobs = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        found.append(logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].cpu())
    return found


def together(model: Any, batch: april.Batch) -> list[torch.Tensor]:
    """The same, in one left-padded batch, as a trainer computes them."""
    arrays = april.to_torch(batch.padded(left_pad_prompts=True), device=model.device)
    ids = arrays["response_ids"]
    with torch.no_grad():
        logits = model(arrays["input_ids"], attention_mask=arrays["attention_mask"], use_cache=False).logits
        now = logits[:, -ids.shape[1] - 1 : -1].float().log_softmax(-1).gather(-1, ids[..., None])[..., 0].cpu()
    return [row[: len(sample.tokens)] for row, sample in zip(now, batch.samples, strict=True)]


def figures(ones: list[torch.Tensor], others: list[torch.Tensor]) -> dict[str, float]:
    """mean, p99 and max of the absolute difference in nats, and over how many tokens."""
    gaps = (torch.cat(ones) - torch.cat(others)).abs()
    return {
        "mean": float(gaps.mean()), "p99": float(gaps.quantile(0.99)), "max": float(gaps.max()), "tokens": len(gaps)
    }  # fmt: skip


def measure(path: str, precision: str, samples: int, tokens: int) -> dict[str, Any]:
    """All comparisons of one precision."""
    dtype, context = PRECISIONS[precision]
    tokenizer = AutoTokenizer.from_pretrained(path)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, use_safetensors=True)
    model = model.to(device()).eval()
    with context():
        batch = batch_of(model, tokenizer, samples, tokens)
        single, padded = alone(model, batch), together(model, batch)
    delivered = [torch.from_numpy(sample.logprobs.copy()) for sample in batch.samples]
    rows = {
        "april, transformers alone": figures(delivered, single),
        "april, transformers padded": figures(delivered, padded),
        "transformers alone and padded": figures(single, padded),
    }
    if precision != "float32":
        exact = alone(model.float(), batch)
        rows |= {"april, float32": figures(delivered, exact), "transformers alone, float32": figures(single, exact)}
    cut = sum(1 for sample in batch.samples if sample.resumes)
    return {"responses": len(batch.samples), "cut and continued": cut, "rows": rows}


def main() -> None:
    """Print a table per precision; with ``--json`` write the same."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.precision", description=__doc__.splitlines()[0])
    parser.add_argument("model", help="directory of a Hugging Face causal model with its tokenizer")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--samples", type=int, default=8, help="responses that are compared")
    parser.add_argument("--tokens", type=int, default=64, help="longest response")
    parser.add_argument("--threads", type=int, help="of torch; default: its own")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    results = {}
    for precision in options.precisions:
        torch.manual_seed(0)
        result = results[precision] = measure(options.model, precision, options.samples, options.tokens)
        print(f"\n{precision}: {result['responses']} responses, {result['cut and continued']} cut and continued")
        for name, row in result["rows"].items():
            values = "  ".join(f"{key} {row[key]:.2e}" for key in ("mean", "p99", "max"))
            print(f"  {name:32s} {values}  of {row['tokens']}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
