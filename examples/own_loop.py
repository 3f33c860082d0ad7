"""april in a training loop of your own: GRPO on a tiny language model, in seconds on a CPU.

Everything is here: model, task, reward, loss. Replace them by yours; the lines inside ``with`` stay. The model is to
write even tokens; responses end at random, so their lengths have a long tail. Run: ``python examples/own_loop.py``.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import april

EOS, VOCAB_SIZE = 0, 24


def tiny_model() -> Any:
    """A random Qwen3; with a real one: ``AutoModelForCausalLM.from_pretrained(...)``."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, eos_token_id=EOS, pad_token_id=1,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def prompts() -> Iterator[dict[str, Any]]:
    """Keys besides ``token_ids`` are ``prompt.data`` in the reward. A list will do as well."""
    for number in itertools.count():
        yield {"token_ids": [1, 2 + number % 20], "remainder": 0}


async def reward(prompt: april.Prompt, response: april.Response) -> float:
    """Share of even tokens. A plain function works too."""
    return float((response.tokens % 2 == prompt.data["remainder"]).mean())


def grpo_loss(model: Any, batch: april.Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the recommended loss, and the log-probabilities [B, T] that it is made of.

    It is the mean over the batch's tokens; each response is corrected for the weights that wrote it.
    """
    rows = batch.padded(left_pad_prompts=True) | {"advantages": batch.advantages("grpo")}
    arrays = april.to_torch(rows, device=model.device)
    ids = arrays["response_ids"]  # [B, T]
    logits = model(arrays["input_ids"], attention_mask=arrays["attention_mask"]).logits[:, -ids.shape[1] - 1 : -1]
    logprobs = logits.float().log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    loss = april.policy_loss(logprobs, arrays["logprobs"], arrays["loss_mask"], arrays["advantages"])
    return loss, logprobs


def main(arguments: Sequence[str] | None = None) -> float:
    """Train and print one line per step; returns the mean reward of the last batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--group-quorum", type=float, default=1.0, help="share of a group after which it is delivered")
    options = parser.parse_args(arguments)
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    config = april.Config(
        rollout_batch_size=8,  # N groups per step
        n_samples_per_prompt=8,
        over_sampling_batch_size=16 if options.group_quorum == 1 else 12,  # N' groups in work; a quorum needs fewer
        max_response_len=200,
        max_in_flight=64,
        group_quorum=options.group_quorum,
    )
    record = "runs/own_loop.jsonl"  # what april decided, for `april report` and `april replay`
    with april.RolloutScheduler(config, prompts=prompts(), reward=reward, model=model, record=record) as rollouts:
        for step in range(options.steps):
            batch = rollouts.next_batch()
            loss, logprobs = grpo_loss(model, batch)
            # how far the batch is from the present weights, for the report; before the optimizer changes them
            rollouts.record_report(batch.id, april.off_policy_report(batch, logprobs))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            rollouts.weight_update()
            print(
                f"step {step}: reward {batch.rewards.mean():.2f}, {batch.lengths.sum()} tokens, longest "
                f"{batch.lengths.max()}, {batch.off_policy_share:.0%} from older weights"
            )
        print(rollouts)
    return float(batch.rewards.mean())


if __name__ == "__main__":
    main()
