"""``python -m tests.real_engines.response_weights``: what a response weighs in the recommended loss in bfloat16.

SmolLM2-135M generates responses with a cache in bfloat16, as engines do; then the same model computes each response in
one pass, as trainers do. The weights are the same, so every product of p / q should be 1; what is printed is what
rounding makes of it, over more and more tokens. The end of the sequence is left out of what is sampled.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from april.engines.transformers.model_support import cache_argument
from tests.real_engines.pretrained import questions, smollm2

LIMIT = 2.0


def main(
    tokens: Annotated[int, typer.Option(help="Tokens of each response.", min=1)] = 1024,
    seed: int = 0,
) -> None:
    """Print the mean and the range of min(product of p / q, 2) over eight responses."""
    torch.manual_seed(seed)
    directory = smollm2()
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    model.eval()
    prompts = questions(directory)
    with torch.no_grad():
        responses, sampled = _generate(model, prompts, tokens, AutoTokenizer.from_pretrained(directory).eos_token_id)
        differences = torch.stack(
            [
                _computed(model, prompt, response) - q
                for prompt, response, q in zip(prompts, responses, sampled, strict=True)
            ]
        ).double()
    print(
        f"per token: mean absolute difference {differences.abs().mean():.3f}, "
        f"KL {-differences.mean():.2e} (k1), {(differences.expm1() - differences).mean():.2e} (k3) nats"
    )
    for count in sorted({*(2**i for i in range(6, 20) if 2**i < tokens), tokens}):
        weights = differences[:, :count].sum(1).clamp(max=math.log(LIMIT)).exp()
        print(f"{count} tokens: mean weight {weights.mean():.2f}, {weights.min():.3f} to {weights.max():.2f}")


def _generate(model: Any, prompts: list[list[int]], count: int, eos: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their log-probabilities, [B, count], float32."""
    width = max(map(len, prompts))
    ids = torch.tensor([[eos] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    positions, kept = (mask.cumsum(-1) - 1).clamp(min=0), {cache_argument(model): DynamicCache()}
    tokens, logprobs = [], []
    for _ in range(count):
        made = model(ids, attention_mask=mask, position_ids=positions, use_cache=True, **kept)
        found = made.logits[:, -1].float().log_softmax(-1)
        ids = torch.multinomial(found.index_fill(-1, torch.tensor(eos), -math.inf).exp(), 1)
        tokens.append(ids)
        logprobs.append(found.gather(-1, ids))
        mask, positions = torch.cat([mask, torch.ones_like(ids)], 1), positions[:, -1:] + 1
    return torch.cat(tokens, 1), torch.cat(logprobs, 1)


def _computed(model: Any, prompt: list[int], response: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of one response in one pass, [T], float32."""
    logits = model(torch.cat([torch.tensor(prompt), response])[None]).logits[0, len(prompt) - 1 : -1]
    logprobs: torch.Tensor = logits.float().log_softmax(-1)
    return logprobs.gather(-1, response[:, None])[:, 0]


if __name__ == "__main__":
    typer.run(main)
