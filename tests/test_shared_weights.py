"""The embedded engine beside a trainer: whoever writes the weights while it generates hears of it, and nobody else."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import (
    V1,
    apart,
    at_call,
    collect,
    joined,
    off,
    steps_at_call,
    tiny_engine,
    tiny_model,
    tiny_request,
    write_weights,
)
from virtual_rollouts import RecordingEngine, Rollouts, now, on_virtual_time, table

import april
from april.core.sampling import SamplingParams
from april.core.versions import PolicyVersion
from april.engines.protocol import Capabilities, Chunk, EngineFinish, Request
from april.engines.transformers.engine import TransformersEngine
from april.errors import EngineError, RolloutError, WeightsInUse

PROMPT = tiny_request().token_ids


def _swap(model: Any) -> None:
    """New tensors behind the same parameters."""
    for weight in model.parameters():
        weight.data = weight.data.clone()


async def _broken_stream(engine: TransformersEngine, request: Request) -> tuple[list[Chunk], WeightsInUse]:
    chunks: list[Chunk] = []

    async def read() -> None:
        async for chunk in engine.generate(request):
            chunks.append(chunk)

    with pytest.raises(WeightsInUse, match="embedded engine reads the trainer's model in place") as caught:
        await read()
    return chunks, caught.value


@pytest.mark.parametrize("change", [write_weights, _swap])
async def test_tokens_of_a_tick_during_which_the_weights_change_are_not_handed_out(change: Any) -> None:
    """Those before it are, exact under the old weights; nothing is generated before the next update; books balance."""
    model = tiny_model()
    engine = tiny_engine(model, stream_interval=8)
    at_call(model, 21, lambda: change(model))  # the third tick of eight
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    (chunks, error), (none, same) = await asyncio.gather(
        _broken_stream(engine, tiny_request(new=100)), _broken_stream(engine, tiny_request("b", 100))
    )

    assert len(joined(chunks).tokens) == len(joined(none).tokens) == 17
    assert error.unsound == same.unsound == 8
    assert "changed while 2 requests generated from them: april dropped 16 tokens" in str(error)
    old = tiny_model()
    old.load_state_dict(before)
    assert off(old, tiny_request(), joined(chunks)) <= 1e-5
    assert engine.stats.generated_tokens == 2 * (17 + 8)
    assert engine.stats.discarded_tokens == 16
    assert not (await engine.health()).ok
    refused, _ = await _broken_stream(engine, tiny_request("c", 100))
    assert not refused

    await engine.update_weights(V1)
    assert (await engine.health()).ok
    (chunk,) = await collect(engine, tiny_request("d", 7))
    assert (chunk.version, chunk.finish) == (V1, EngineFinish.LENGTH)
    assert off(model, tiny_request("d"), chunk) <= 1e-5
    await engine.close()


async def test_a_response_that_ends_in_a_torn_tick_has_not_ended() -> None:
    """Nor has one that began in it, or waited: all of them fail, with the tokens of before it."""
    model = tiny_model()
    engine = tiny_engine(model, slots=1, stream_interval=8)
    at_call(model, 12, lambda: write_weights(model))
    (chunks, error), (none, late) = await asyncio.gather(
        _broken_stream(engine, tiny_request("a", 14)), _broken_stream(engine, tiny_request("waits", 14))
    )

    assert [len(chunk.tokens) for chunk in chunks] == [9]
    assert (error.unsound, late.unsound, none) == (5, 0, [])
    assert engine._decoder.idle
    await engine.close()


async def test_weights_written_before_a_model_call_that_fails() -> None:
    """The error of the call is not taken for the whole truth: the steps before it are of no known weights."""
    model = tiny_model()
    engine = tiny_engine(model)
    at_call(model, 3, lambda: write_weights(model))
    at_call(model, 5, lambda: (_ for _ in ()).throw(RuntimeError("out of memory")))
    chunks, error = await _broken_stream(engine, tiny_request(new=100))

    assert (chunks, error.unsound) == ([], 4)
    await engine.close()


@pytest.mark.parametrize("fused", [False, True])
async def test_an_optimizer_step_while_it_generates_is_refused(fused: bool) -> None:
    """In the trainer's own line, before a weight is written; generation goes on. Other models may be trained."""
    model, other = tiny_model(), tiny_model(seed=1)
    engine = tiny_engine(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, fused=fused) for m in (model, other)]
    for trained in (model, other):
        trained(input_ids=torch.tensor([[3, 4]]), labels=torch.tensor([[3, 4]])).loss.backward()
    before = [weight.clone() for weight in model.parameters()]
    errors = steps_at_call(model, 5, *optimizers)
    (chunk,) = await collect(engine, tiny_request(new=100))

    assert "april refused an optimizer step while transformers generates from the same weights" in str(*errors)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert off(model, tiny_request(), chunk) <= 1e-5
    optimizers[0].step()  # nothing is active
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    await engine.close()


async def test_a_closed_or_forgotten_engine_refuses_nothing() -> None:
    """Its guard over optimizers goes with it."""
    from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

    before = len(hooks)
    engine, forgotten = tiny_engine(tiny_model()), tiny_engine(tiny_model())
    assert len(hooks) == before + 2
    await engine.close()
    forgotten._thread.shutdown()
    del forgotten
    assert len(hooks) == before


async def test_the_model_is_the_trainers_when_a_response_is_handed_out() -> None:
    """Each module has its own flag back before anybody hears of the tokens, and the engine touches it no more.

    Attention that takes no masks is exchanged only while it generates; the model can train afterwards.
    """
    model = tiny_model(attention_dropout=0.5)
    off_by_itself = model.model.layers[0].mlp
    off_by_itself.training = False
    model.set_attn_implementation("flex_attention")
    engine = tiny_engine(model, stream_interval=4)
    seen, inside, chunks = [], [], []
    model.register_forward_pre_hook(lambda *_: inside.append(any(m.training for m in model.modules())))
    async for chunk in engine.generate(tiny_request("a", 20)):
        chunks.append(chunk)
        seen.append([m.training for m in model.modules() if m is not off_by_itself])
        seen.append([not off_by_itself.training, model.config._attn_implementation == "flex_attention"])
    assert len(chunks) >= 5
    assert all(all(flags) for flags in seen)
    assert not any(inside)
    model.eval()
    await engine.quiet()
    assert not any(m.training for m in model.modules())
    model.train().set_attn_implementation("sdpa")
    model(input_ids=torch.tensor([[3, 4]]), labels=torch.tensor([[3, 4]])).loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert off(model, tiny_request(), joined(chunks)) <= 1e-5
    await engine.close()


def _config(**settings: Any) -> april.Config:
    values = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "over_sampling_batch_size": 4, "max_response_len": 60}
    return april.Config(**(values | settings))


async def test_training_beside_anext_batch_fails_the_step_by_name_and_loses_nothing() -> None:
    """Every call says so until weight_update(); then the step goes on, and every token is exact under its stamp."""
    model = tiny_model()
    weights = {0: {name: weight.clone() for name, weight in model.state_dict().items()}}
    prompts = [{"token_ids": PROMPT} for _ in range(8)]
    engine = {"kind": "transformers", "stream_interval": 4}
    functions = {"prompts": prompts, "reward": lambda *_: 0.0}
    with april.RolloutScheduler(_config(engine=engine), model=model, **functions) as rollouts:
        at_call(model, 8, lambda: write_weights(model))  # in the second tick
        for call in (rollouts.anext_batch, rollouts.anext_batch):
            with pytest.raises((RolloutError, EngineError), match="step the optimizer between two batches"):
                await call()
        with pytest.raises(EngineError, match="step the optimizer between two batches"):
            await rollouts.aevaluate([{"token_ids": PROMPT}])
        ledger = rollouts.ledger()["tokens"]
        assert {reason for reason, count in ledger.dropped.items() if count} == {"unknown_weights"}
        assert ledger.held > 0
        rollouts.validate()
        weights[1] = {name: weight.clone() for name, weight in model.state_dict().items()}
        await rollouts.aweight_update()
        batch = await rollouts.anext_batch()
        assert model.training

    counts = {0: 0, 1: 0}
    reference = tiny_model()
    for version, values in weights.items():
        reference.load_state_dict(values)
        for sample in batch.samples:
            its = sample.versions[:, 1] == version
            counts[version] += int(its.sum())
            assert apart(reference, PROMPT, sample)[its].max(initial=0.0) <= 1e-5
    assert min(counts.values()) > 0


@on_virtual_time
async def test_weights_written_during_an_evaluation_are_told_and_training_waits() -> None:
    """The evaluation fails with the engine's sentence, and so does the next batch, until the weights are told."""

    class Torn(RecordingEngine):
        torn = True

        def generate(self, request: Request) -> Any:
            if self.torn:
                raise WeightsInUse("written meanwhile")
            return super().generate(request)

        async def update_weights(self, version: PolicyVersion, path: str | None = None) -> None:
            self.torn = False
            await super().update_weights(version, path)

    lengths = table({(0, 0): 3})
    rollouts = Rollouts(lengths, n=1, engines=[Torn(lengths)])
    prompt = april.Prompt(token_ids=np.array([5, 6], np.int32))
    for call in (
        lambda: rollouts.driver.evaluate([prompt], 1, SamplingParams(5), 0),
        rollouts.driver.next_batch,
    ):
        with pytest.raises(EngineError, match="written meanwhile"):
            await call()
    await rollouts.driver.update_weights()
    rollouts.check(await rollouts.driver.next_batch())


@on_virtual_time
async def test_a_batch_waits_until_the_engine_is_quiet() -> None:
    """An attempt that was given up for lost may still run on the trainer's model: the batch comes when it does not."""

    class Busy(RecordingEngine):
        @property
        def capabilities(self) -> Capabilities:
            return replace(super().capabilities, shares_weights=True)

        async def quiet(self) -> None:
            await asyncio.sleep(50)

    lengths = table({(0, 0): 3})
    rollouts = Rollouts(lengths, n=1, engines=[Busy(lengths)])
    await rollouts.driver.next_batch()
    assert now() >= 53


def test_a_few_values_tell_weights_apart() -> None:
    """At most four of each parameter, the same ones every time; a step of an optimizer moves them."""
    model, same = tiny_model(), tiny_model()
    shown, as_well = tiny_engine(model).weight_sample(), tiny_engine(same).weight_sample()
    assert shown.dtype == np.float32
    assert len(shown) == sum(min(4, p.numel()) for p in model.parameters())
    assert np.array_equal(shown, as_well)
    write_weights(model)
    assert (tiny_engine(model).weight_sample() != shown).mean() > 0.9
