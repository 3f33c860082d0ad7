"""Weights that the trainer gives to an embedded engine: copied where it has a model of its own, else there already."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import collect, tiny_engine, tiny_model, tiny_request

import april
from april.core.versions import PolicyVersion
from april.engines.weight_transfer import TakesTensors, TensorSpec
from april.errors import ConfigError, EngineError
from april.weights.source import WeightSource

V1 = PolicyVersion(0, 1)


async def given(engine: Any, weights: Any, **options: Any) -> None:
    for bucket in WeightSource(weights, bucket_bytes=4096, **options).buckets():
        await engine.take(bucket.specs, bucket.tensors, bucket.last)
    await engine.update_weights(V1)


async def tokens_of(engine: Any) -> list[int]:
    """What it makes of one request, greedily."""
    asked = tiny_request(new=20, temperature=0.0)
    return [t for chunk in await collect(engine, asked) for t in chunk.tokens.tolist()]


@pytest.mark.parametrize("tied", [False, True])
async def test_an_engine_with_a_model_of_its_own_gets_a_copy(tied: bool) -> None:
    """Every weight is the trainer's afterwards, tied layers too; the next requests run on them and the new version."""
    trained, own = tiny_model(seed=1, tie_word_embeddings=tied), tiny_model(seed=2, tie_word_embeddings=tied)
    engine, there = tiny_engine(own), tiny_engine(trained)
    assert isinstance(engine, TakesTensors)
    assert engine.capabilities.takes_tensors
    assert await tokens_of(engine) != await tokens_of(there)
    await engine.pause()
    await given(engine, trained)
    await engine.resume()
    assert all(torch.equal(a, b) for a, b in zip(own.parameters(), trained.parameters(), strict=True))
    assert await tokens_of(engine) == await tokens_of(there)
    chunks = await collect(engine, tiny_request("b"))
    assert {chunk.version for chunk in chunks} == {V1}
    await engine.close()
    await there.close()


async def test_wrong_tensors_are_named() -> None:
    """A name that the model does not have, another shape, one that did not come; the next update may be whole."""
    trained, own = tiny_model(seed=1), tiny_model(seed=2)
    engine = tiny_engine(own)
    await engine.pause()
    whole = dict(trained.state_dict())
    with pytest.raises(EngineError, match=r"other\.weight came with shape \(1,\), but .* has no tensor of this name"):
        await given(engine, whole | {"other.weight": torch.ones(1)})
    # one number in the place of a row would be spread
    with pytest.raises(EngineError, match=r"model\.norm\.weight came with shape \(1,\), but .* one of shape \(32,\)"):
        await given(engine, whole | {"model.norm.weight": torch.ones(1)})
    del whole["model.norm.weight"]
    with pytest.raises(EngineError, match=r"incomplete: model\.norm\.weight of this .* did not arrive"):
        await given(engine, whole)
    await given(engine, trained)
    await engine.resume()
    assert all(torch.equal(a, b) for a, b in zip(own.parameters(), trained.parameters(), strict=True))
    await engine.close()


async def test_what_came_in_an_update_that_ended_counts_no_more() -> None:
    """A tensor of the broken transfer is none of the next one's: that it did not come is said."""
    trained, own = tiny_model(seed=1), tiny_model(seed=2)
    engine = tiny_engine(own)
    await engine.pause()
    await engine.take((TensorSpec("model.norm.weight", "float32", (32,)),), [torch.ones(32)], False)
    await engine.resume()  # its other tensors could not be drawn, say
    await engine.pause()
    whole = dict(trained.state_dict())
    del whole["model.norm.weight"]
    with pytest.raises(EngineError, match=r"incomplete: model\.norm\.weight of this .* did not arrive"):
        await given(engine, whole)
    await engine.close()


async def test_nothing_is_written_under_requests() -> None:
    """Tokens of two models in one response would be of no version."""
    engine = tiny_engine(tiny_model(seed=2))
    task = asyncio.create_task(collect(engine, tiny_request(new=200)))
    while not engine._decoder.active:  # noqa: ASYNC110 - it moves by the turns of this loop
        await asyncio.sleep(0)
    with pytest.raises(EngineError, match="requests are active under version"):
        await given(engine, tiny_model(seed=1))
    await task
    await engine.close()


def batches(engine: Any, weights: Any, model: Any) -> Any:
    """Two batches with an update between them, by a scheduler; returns the last one."""
    config = april.Config(rollout_batch_size=2, n_samples_per_prompt=1, max_response_len=8, partial_rollout=False)
    prompts = [{"token_ids": [3, 4, 5 + i]} for i in range(8)]
    with april.RolloutScheduler(config, prompts=prompts, reward=lambda p, r: 0.0, engines=[engine]) as rollouts:
        rollouts.next_batch()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        rollouts.weight_update(weights=weights)
        return rollouts.next_batch()


@pytest.mark.parametrize("own", [True, False])
def test_a_scheduler_gives_weights_to_an_embedded_engine(own: bool) -> None:
    """One with a model of its own gets them, one that reads the trainer's in place needs none; both compute alike."""
    trained = tiny_model(seed=1)
    model = tiny_model(seed=1) if own else trained
    batch = batches(tiny_engine(model), trained, trained)
    for sample in batch.samples:
        ids = torch.tensor([[*sample.prompt.token_ids.tolist(), *sample.tokens.tolist()]])
        with torch.no_grad():
            logits = trained(ids).logits[0, :-1].log_softmax(-1)
        wanted = logits.gather(1, ids[0, 1:, None])[-len(sample.tokens) :, 0].numpy()
        assert np.abs(wanted - sample.logprobs).max() < 1e-5
        assert {n for _, n in sample.versions.tolist()} == {1}


def test_what_is_read_in_place_is_not_gathered_or_split() -> None:
    """A mixture's experts are one tensor in the model and many in its checkpoint: of no matter to who reads them."""
    model = tiny_model("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    batches(tiny_engine(model), model, model)


def test_weights_are_looked_at_before_anything_is_paused() -> None:
    """What is no weights is refused by a ConfigError, and the next batch comes as if nothing had been asked."""
    model = tiny_model(seed=1)
    with pytest.raises(ConfigError, match="weights: got str"):
        batches(tiny_engine(model), "a directory", model)
