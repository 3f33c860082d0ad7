"""Supervised warm-up: a tiny Qwen3, built from its config and taught the task by imperfect demonstrations.

Invariant: the weights depend on the seed alone (same machine, same thread count): initial weights, demonstrations
and the order of the batches are all drawn from it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from safetensors.torch import load, save
from torch.nn.functional import cross_entropy
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.study import countdown as task

STEPS = 550
TOKENS_PER_STEP = 768
"""Padded tokens of a batch; demonstrations of like length share one, so that little of it is padding."""
LEARNING_RATE = 4e-3
RISING_STEPS = 20
FINAL_RATE = 0.03
"""Share of the learning rate at the last step."""
_POOL = 512
_IGNORED = -100

Demonstration = Callable[[int, int], tuple[task.Int32, task.Int32]]
"""Prompt and response ``index`` for the warm-up of ``seed``."""


def build_model(
    seed: int, for_servers: bool = False, *, vocab_size: int = task.VOCAB_SIZE, context: int = 512
) -> Qwen3ForCausalLM:
    """An untrained Qwen3 of about 0.1 M parameters in float32; leaves torch's global generator as it was.

    ``for_servers``: vLLM has no CPU attention for heads below 32, and on a CPU does not reload tied embeddings rightly.
    """
    config = Qwen3Config(  # type: ignore[call-arg]  # its declaration hides what every configuration takes
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        initializer_range=0.08,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32 if for_servers else 16,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        max_position_embeddings=context,
        tie_word_embeddings=not for_servers,
        bos_token_id=task.BOS_ID,
        eos_token_id=task.EOS_ID,
        pad_token_id=task.PAD_ID,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Qwen3ForCausalLM = Qwen3ForCausalLM(config)
    model.train(False)
    return model


def weights_of(model: torch.nn.Module) -> bytes:
    """Return the weights as a safetensors file; tied ones are in it once."""
    return save(dict(model.named_parameters()))


def load_weights(model: torch.nn.Module, weights: bytes, where: object = "the weights") -> None:
    """Put what :func:`weights_of` returned into a model.

    Raises ValueError if a parameter is missing; ``where`` names the weights then.
    """
    own = dict(model.named_parameters())
    for name, tensor in load(weights).items():
        own.pop(name).data.copy_(tensor)
    if own:
        raise ValueError(f"{where}: no {', '.join(own)} in it")


def imitate(
    model: Qwen3ForCausalLM, seed: int, demonstration: Demonstration, steps: int = STEPS,
    tokens_per_step: int = TOKENS_PER_STEP,
) -> None:  # fmt: skip
    """Train the model on ``steps`` batches of demonstrations.

    AdamW, the learning rate rising for RISING_STEPS and then falling linearly to FINAL_RATE of its peak.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for step, (ids, labels) in enumerate(_batches(seed, steps, demonstration, tokens_per_step)):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * _rate(step, steps)
        logits = model(input_ids=ids, use_cache=False).logits.float()
        predicted, wanted = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        loss = cross_entropy(predicted, wanted, ignore_index=_IGNORED, reduction="sum") / tokens_per_step
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def _rate(step: int, steps: int) -> float:
    rising = (step + 1) / RISING_STEPS
    falling = 1.0 - (1.0 - FINAL_RATE) * step / max(1, steps)
    return min(rising, falling)


def _batches(
    seed: int, steps: int, demonstration: Demonstration, tokens_per_step: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """``steps`` batches of right-padded ids and labels, int64 [rows, length]; the prompt and padding carry no loss."""
    batches: list[tuple[torch.Tensor, torch.Tensor]] = []
    order = np.random.default_rng([seed, _POOL])
    drawn = 0
    while len(batches) < steps:
        pool = [demonstration(seed, index) for index in range(drawn, drawn + _POOL)]
        drawn += _POOL
        pool.sort(key=lambda pair: len(pair[1]))
        fresh = []
        while pool:
            rows = max(1, tokens_per_step // sum(map(len, pool[-1])))
            fresh.append(_padded(pool[-rows:]))
            del pool[-rows:]
        batches += [fresh[i] for i in order.permutation(len(fresh))]
    return batches[:steps]


def _padded(pairs: list[tuple[task.Int32, task.Int32]]) -> tuple[torch.Tensor, torch.Tensor]:
    length = max(len(prompt) + len(response) for prompt, response in pairs)
    ids = np.full((len(pairs), length), task.PAD_ID, dtype=np.int64)
    labels = np.full((len(pairs), length), _IGNORED, dtype=np.int64)
    for row, (prompt, response) in enumerate(pairs):
        end = len(prompt) + len(response)
        ids[row, : len(prompt)] = prompt
        ids[row, len(prompt) : end] = response
        labels[row, len(prompt) : end] = response
    return torch.from_numpy(ids), torch.from_numpy(labels)
