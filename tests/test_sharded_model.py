"""The embedded engine on models that a trainer has wrapped for its ranks: DDP, and FSDP2 by gathering the weights.

One process that is the only rank of its group: collectives, hooks and tensors are those of several, which
tests/test_rank_processes.py has.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models_that_see import apart_seeing, picture, seeing, tiny_processor, tiny_vision_model, with_images
from tiny_models import apart, at_call, generated, off, steps_at_call, tiny_engine, tiny_model, tiny_request
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import april
from april.core.versions import PolicyVersion
from april.engines.protocol import GathersWeights
from april.errors import ConfigError, EngineError, WeightsInUse

REQUEST = tiny_request(new=40, length=3)
PROMPT = REQUEST.token_ids
LONG = tiny_request(new=100)
IDS = torch.tensor([[3, 4, 5, 6]])


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _sharded(model: Any, **options: Any) -> Any:
    """As trainers do it: each layer, then the rest."""
    options = {"mesh": init_device_mesh("cpu", (1,))} | options
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def _plain(model: Any) -> Any:
    """A whole copy of the weights that a sharded model has now."""
    copy = tiny_model()
    copy.load_state_dict({name: weight.full_tensor() for name, weight in model.state_dict().items()})
    return copy


async def test_the_model_inside_of_ddp_is_the_one_that_generates() -> None:
    """Its parameters are the optimizer's, its flags come back; the wrapper, whose forward pass is collective, rests."""
    wrapped = DistributedDataParallel(tiny_model())
    wrapped.register_forward_pre_hook(lambda *_: pytest.fail("the wrapper was called"))
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1)
    wrapped.module(input_ids=IDS, labels=IDS).loss.backward()
    engine = tiny_engine(wrapped)
    assert not engine.capabilities.gathers_weights
    engine.gather()  # nothing to do, and no harm
    engine.release()
    chunk = await generated(engine, REQUEST)
    assert off(wrapped.module, REQUEST, chunk) <= 1e-4
    assert all(module.training for module in wrapped.modules())

    errors = steps_at_call(wrapped.module.model.layers[0].mlp, 3, optimizer)
    await generated(engine, REQUEST)
    assert "refused" in str(*errors)
    await engine.close()


async def test_a_model_that_sees_is_gathered_with_its_vision_tower() -> None:
    """In the first gathering it is tried with images; an optimizer step in the tower is seen in the next one."""
    model, processor = tiny_vision_model(), tiny_processor()
    mesh = init_device_mesh("cpu", (1,))
    for layer in [*model.model.language_model.layers, *model.model.visual.blocks]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    engine = tiny_engine(model, processor=processor)
    tower = [weight for name, weight in model.named_parameters() if "visual" in name]
    optimizer = torch.optim.SGD(tower, lr=1.0)
    request = seeing("a", *with_images(processor, [12], [picture(1)]), 30)
    copies = []
    for number in range(2):
        engine.gather()
        chunk = await generated(engine, seeing(f"{number}", request.token_ids, request.attached, 30))
        await engine.quiet()
        engine.release()
        copies.append(tiny_vision_model())
        copies[-1].load_state_dict({name: weight.full_tensor() for name, weight in model.state_dict().items()})
        found = (processor, request.token_ids, request.attached, chunk)
        assert apart_seeing(copies[-1], *found).max() <= 1e-4
        for weight in tower:
            weight.grad = torch.full_like(weight, 0.05)
        optimizer.step()
        await engine.update_weights(PolicyVersion(0, number + 1))
    assert apart_seeing(copies[0], *found).max() > 1e-3
    await engine.close()


async def test_gathered_weights_are_those_of_the_last_optimizer_step() -> None:
    """Log-probabilities equal a recomputation with FSDP2's own forward pass and with a plain copy, step after step;
    a forward pass without a backward one, which leaves some weights whole, does not make them those of before. In
    between the model is sharded again, and FSDP2 has recorded nothing of what was generated."""
    model = _sharded(tiny_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    held = list(model.parameters())
    engine = tiny_engine(model)
    assert isinstance(engine, GathersWeights)
    assert engine.capabilities.gathers_weights
    seen = []
    for n in range(3):
        with torch.no_grad():
            model(input_ids=IDS)  # the rest stays whole behind it
        if n:
            optimizer.step()  # of the gradients of before
            optimizer.zero_grad()
            await engine.update_weights(PolicyVersion(0, n))
        recorded = len(model._get_fsdp_state()._comm_ctx.post_forward_order)
        engine.gather()
        if n == 2:
            engine.gather()  # once more, as an interrupted call that is repeated
        assert not any(isinstance(p, DTensor) for p in model.parameters())
        chunk = await generated(engine, REQUEST)
        await engine.quiet()
        engine.release()
        engine.release()
        # passes that were recorded would be gathered for in the backward pass, by the ranks only that generated
        assert len(model._get_fsdp_state()._comm_ctx.post_forward_order) == recorded
        assert all(p is q for p, q in zip(model.parameters(), held, strict=True))
        assert chunk.version == PolicyVersion(0, n)
        assert max(off(model, REQUEST, chunk), off(_plain(model), REQUEST, chunk)) <= 1e-4
        assert all(module.training for module in model.modules())
        seen.append(chunk.tokens.tolist())
        model(input_ids=IDS, labels=IDS).loss.backward()
    assert seen[0] != seen[1] != seen[2]
    await engine.close()


async def test_nobody_has_gathered() -> None:
    """A sentence, at once; so do weights from a directory, which would be written into a part of the model."""
    engine = tiny_engine(_sharded(tiny_model()))
    with pytest.raises(EngineError, match=r"sharded over ranks and were not gathered; .*RankScheduler"):
        await generated(engine, REQUEST)
    with pytest.raises(EngineError, match="set_model_state_dict"):
        await engine.update_weights(PolicyVersion(0, 1), "somewhere")
    assert not engine.capabilities.updates_from_disk
    await engine.close()


def test_a_scheduler_that_brings_no_ranks_together_refuses_it() -> None:
    """One rank alone would wait in the first gathering for the others, for ever."""
    config, model = april.Config(rollout_batch_size=1, max_response_len=8), _sharded(tiny_model())
    with pytest.raises(ConfigError, match=r"sharded over several ranks, .*use april.RankScheduler on every rank"):
        april.RolloutScheduler(config, prompts=[[1]], reward=None, model=model)


def test_the_scheduler_of_the_ranks_gathers_and_releases() -> None:
    """Around batches and evaluations, each with the weights of the last step; in between the model is sharded."""
    model = _sharded(tiny_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = april.Config(
        rollout_batch_size=1, n_samples_per_prompt=2, over_sampling_batch_size=2, max_response_len=8,
        engine={"kind": "transformers", "stream_interval": 2},
    )  # fmt: skip
    with april.RankScheduler(
        config, ranks=april.Ranks.of_torch(), prompts=[PROMPT.tolist()] * 4, reward=lambda *_: 1.0, model=model
    ) as rollouts:
        known = {rollouts.version: _plain(model)}
        for _ in range(3):
            batch = rollouts.next_batch()
            assert all(isinstance(p, DTensor) for p in model.parameters())
            for sample in batch.samples:
                for n, whole in known.items():
                    of_it = (sample.versions == n).all(1)
                    assert apart(whole, PROMPT, sample)[of_it].max(initial=0.0) <= 1e-4
            model(input_ids=IDS, labels=IDS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            known[rollouts.weight_update()] = _plain(model)
            rollouts.evaluate([[5, 6, 7]], max_tokens=2)
            assert all(isinstance(p, DTensor) for p in model.parameters())
    assert rollouts.version == (0, 3)


async def test_an_optimizer_step_on_the_pieces_is_refused_while_it_generates() -> None:
    """The optimizer holds the pieces, and the model shows the whole meanwhile; nothing is written."""
    model = _sharded(tiny_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(input_ids=IDS, labels=IDS).loss.backward()
    engine = tiny_engine(model)
    engine.gather()
    errors = steps_at_call(model.model.layers[0].mlp, 3, optimizer)
    chunk = await generated(engine, REQUEST)
    engine.release()
    assert "refused" in str(*errors)
    assert off(model, REQUEST, chunk) <= 1e-4
    await engine.close()


@pytest.mark.parametrize("whole", [True, False])
async def test_weights_written_during_a_tick(whole: bool) -> None:
    """Whether the pieces were written or what was made of them: the tokens of that tick are not handed out."""
    model = _sharded(tiny_model())
    piece = next(model.parameters())
    engine = tiny_engine(model, stream_interval=8)
    engine.gather()

    def write() -> None:
        with torch.no_grad():
            (next(model.parameters()) if whole else piece).mul_(1.5)

    at_call(model.model.layers[0].mlp, 12, write)
    with pytest.raises(WeightsInUse, match="the weights were changed while 1 requests"):
        await generated(engine, REQUEST)
    engine.release()
    await engine.close()


async def test_weights_written_and_nobody_told(caplog: pytest.LogCaptureFixture) -> None:
    """An optimizer writes the pieces; gathering them again is no write."""
    model = _sharded(tiny_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = tiny_engine(model)
    for warned in (False, False, True):
        if warned:
            model(input_ids=IDS, labels=IDS).loss.backward()
            optimizer.step()
        with caplog.at_level(logging.WARNING, "april"):
            engine.gather()
            await generated(engine, REQUEST)
            await engine.quiet()
            engine.release()
        assert ("policy version is still" in caplog.text) is warned
    await engine.close()


async def test_released_while_it_generates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tick that runs ends first; the request waits for the next gathering and goes on exactly."""
    model = _sharded(tiny_model())
    engine = tiny_engine(model)
    engine.gather()
    in_a_tick, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        in_a_tick.set()
        go_on.wait()
        assert not any(isinstance(p, DTensor) for p in model.parameters())

    submit = engine._thread.submit

    def submitted(work: Any, *arguments: Any) -> Any:
        if work is int:  # release() waits for the thread
            go_on.set()
        return submit(work, *arguments)

    monkeypatch.setattr(engine._thread, "submit", submitted)
    hook = at_call(model.model.layers[0].mlp, 10, wait)
    generating = asyncio.create_task(generated(engine, LONG))
    await asyncio.to_thread(in_a_tick.wait)
    await asyncio.to_thread(engine.release)
    await engine.quiet()
    hook.remove()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert not generating.done()
    assert not engine.generating
    engine.gather()
    chunk = await generating
    await engine.quiet()
    engine.release()
    assert len(chunk.tokens) == 100
    assert off(model, LONG, chunk) <= 1e-4
    engine.gather()
    await engine.close()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    engine.gather()
    engine.release()  # closed, and nothing to wait for


async def test_mixed_precision_is_that_of_the_forward_pass() -> None:
    """bfloat16 parameters in forward: keys, values and log-probabilities are of bfloat16, the check has measured it."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = _sharded(tiny_model(initializer_range=0.1), mp_policy=policy)
    engine = tiny_engine(model)
    engine.gather()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    chunk = await generated(engine, REQUEST)
    assert engine._decoder._cache.stored_dtypes == {torch.bfloat16}
    await engine.quiet()
    engine.release()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    own, whole = off(model, REQUEST, chunk), off(_plain(model), REQUEST, chunk)
    assert own < 0.1  # the noise of its own precision, none on some processors
    assert whole > 1e-3
    await engine.close()


def test_a_check_that_fails_leaves_the_weights_sharded() -> None:
    """The check runs in the first gathering, which all ranks make; its error is the one that a whole model has."""
    model = _sharded(tiny_model())
    calls = iter(range(10_000))
    model.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: output * (1 + next(calls) % 2))
    engine = tiny_engine(model)
    with pytest.raises(ConfigError, match="differs from a full forward pass"):
        engine.gather()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    asyncio.run(engine.close())


@pytest.mark.parametrize(
    ("shard", "sentence"),
    [
        (lambda model: _sharded(model, offload_policy=CPUOffloadPolicy(pin_memory=False)), "with an offload_policy"),
        (
            lambda model: _sharded(model, mesh=init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicas", "shards"))),
            "over a mesh of several dimensions",
        ),
        (lambda model: fully_shard(model.model.layers[0], mesh=init_device_mesh("cpu", (1,))), "without some of them"),
    ],
)
def test_what_was_not_seen_working_is_refused(shard: Callable[[Any], object], sentence: str) -> None:
    """Each by its own sentence, when the engine is made, on each rank alone."""
    model = tiny_model()
    shard(model)
    with pytest.raises(ConfigError, match=f"qwen3 are sharded over ranks by fully_shard {sentence}"):
        tiny_engine(model)
