"""Tiny Hugging Face models, seeded, built from their configuration: nothing is downloaded. And engines on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from april.core.batch import DeliveredSample
from april.core.sampling import SamplingParams
from april.core.versions import PolicyVersion
from april.engines.protocol import Chunk, Float32, Int32, Request
from april.engines.transformers.engine import TransformersEngine
from april.errors import WeightsInUse

VOCAB_SIZE = 97
EOS = 1

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": EOS,
    "bos_token_id": None,
    "pad_token_id": 0,
    # Ten times the usual: logits that differ by nats, so that a wrong mask cannot hide in rounding.
    "initializer_range": 0.2,
}
V1 = PolicyVersion(0, 1)
ARCHITECTURES = ("qwen2", "qwen3", "llama", "glm4")


def tiny_model(architecture: str = "qwen3", seed: int = 0, **changes: Any) -> Any:
    """A float32 model of about 30,000 parameters in training mode, as a trainer would hold it.

    Args:
        architecture: a ``model_type`` of transformers: one of :data:`ARCHITECTURES` or another decoder.
        seed: of the weights.
        changes: to the configuration.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = dict(_SHAPE)
    if architecture in ("qwen3", "glm", "glm4"):
        shape["head_dim"] = 8
    if architecture in ("glm", "glm4"):
        shape["partial_rotary_factor"] = 0.5
    config = AutoConfig.for_model(architecture, **(shape | changes))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=changes.get("attn_implementation", "sdpa"))
    return model.train()


def tiny_engine(model: Any = None, **options: Any) -> TransformersEngine:
    """An engine without EOS, so that lengths are what ``max_tokens`` says unless a test asks for stops."""
    return TransformersEngine(model or tiny_model(), **({"slots": 8, "max_len": 256, "eos_token_ids": ()} | options))


def tiny_request(name: str = "a", new: int = 20, length: int = 9, **sampling: Any) -> Request:
    """A request for ``new`` tokens, whose prompt of ``length`` tokens follows from its name."""
    tokens = np.random.default_rng(sum(map(ord, name))).integers(2, VOCAB_SIZE, length, dtype=np.int32)
    return asked(name, tokens, SamplingParams(max_tokens=new, **({"seed": 7} | sampling)))


def asked(name: str, tokens: np.ndarray[Any, Any], sampling: SamplingParams) -> Request:
    return Request(attempt_id=name, token_ids=tokens, sampling=sampling)


async def collect(engine: TransformersEngine, request: Request) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(request)]


def joined(chunks: list[Chunk]) -> Chunk:
    tokens, logprobs = (np.concatenate([getattr(c, name) for c in chunks]) for name in ("tokens", "logprobs"))
    return Chunk(tokens, logprobs, chunks[-1].version, chunks[-1].finish)


async def generated(engine: TransformersEngine, request: Request) -> Chunk:
    return joined(await collect(engine, request))


def apart(model: Any, prompt: Int32, chunk: Chunk | DeliveredSample, temperature: float = 1.0) -> Float32:
    """Distances in nats between log-probabilities and those of one full forward pass of ``model``, [T]."""
    sequence = torch.from_numpy(np.concatenate([prompt, chunk.tokens]).astype(np.int64))
    training = model.training
    with torch.no_grad():
        rows = model.eval()(input_ids=sequence[None], use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    model.train(training)
    expected = (rows / temperature).log_softmax(-1).gather(1, sequence[len(prompt) :, None])[:, 0]
    return np.abs(expected.numpy() - chunk.logprobs)


def off(model: Any, request: Request, chunk: Chunk, temperature: float = 1.0) -> float:
    """The largest of these distances."""
    return float(apart(model, request.token_ids, chunk, temperature).max())


def at_call(module: Any, number: int, what: Callable[[], object]) -> Any:
    """Do something in the engine's thread when ``module`` is called for the n-th time; the handle of the hook."""
    calls = iter(range(1, 10_000))

    def hook(*_: object) -> None:
        if next(calls) == number:
            what()

    return module.register_forward_pre_hook(hook)


def steps_at_call(module: Any, number: int, *optimizers: torch.optim.Optimizer) -> list[Exception]:
    """Have optimizers step when ``module`` is called for the n-th time; the list gets what their steps raise."""
    errors: list[Exception] = []

    def step() -> None:
        for optimizer in optimizers:
            try:
                optimizer.step()
            except WeightsInUse as error:
                errors.append(error)

    at_call(module, number, step)
    return errors


def write_weights(model: Any) -> None:
    """Do what an optimizer does, as far as the tensors know."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.05)
