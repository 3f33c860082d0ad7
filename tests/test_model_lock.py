"""The trainer's model, used by others while the embedded engine decodes: in turns, or found out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from test_shared_weights import _broken_stream, _config
from tiny_models import V1, apart, at_call, tiny_engine, tiny_model, tiny_request

import april
from april.concurrency.model_lock import model_lock_of
from april.errors import ConfigError, RolloutError, UsageError, WeightsInUse

IDS = torch.tensor([[3, 4, 5]])


def _in_a_thread(function: Callable[[], Any]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


@contextmanager
def _set(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def _hooked(module: Any) -> Iterator[None]:
    hook = module.register_forward_hook(lambda *_: None)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _overwritten(weight: Any) -> Iterator[None]:
    """Through ``.data``: neither a counter nor an address moves."""
    before = weight.data.clone()
    weight.data.mul_(1.5)
    try:
        yield
    finally:
        weight.data.copy_(before)


SWITCHES: dict[str, Callable[[Any], Any]] = {
    "flag": lambda model: _set(model.model.layers[1].mlp, "adapter_off", True),
    "adapter": lambda model: _set(model.model.layers[0].self_attn, "active", ["reference"]),
    "scale": lambda model: _set(model.model.layers[0].self_attn, "scales", {"default": 0.5}),
    "mode": lambda model: _set(model.lm_head, "training", True),
    "hook": lambda model: _hooked(model.model.layers[0].mlp),
    "forward": lambda model: _set(model.lm_head, "forward", lambda x: x),
    "module": lambda model: _set(model.model.layers[0], "mlp", torch.nn.Identity()),
    "parameter": lambda model: _set(model.lm_head, "weight", torch.nn.Parameter(model.lm_head.weight.detach() * 2)),
    "data": lambda model: _set(model.lm_head.weight, "data", model.lm_head.weight.detach() * 2),
    "values": lambda model: _overwritten(model.lm_head.weight),
    "buffer": lambda model: _set(model.model.layers[0].mlp.bias.bias, "data", torch.ones(2)),
}


def _model() -> Any:
    model = tiny_model()
    for layer in model.model.layers:
        layer.mlp.adapter_off = False
        layer.self_attn.active, layer.self_attn.scales = ["default"], {"default": 2.0}
        layer.mlp.bias = torch.nn.Module()
        layer.mlp.bias.register_buffer("bias", torch.zeros(2))
    return model


@pytest.mark.parametrize("switch", SWITCHES)
async def test_a_model_that_is_switched_for_one_call_is_found_out(switch: str) -> None:
    """Back before the decoder's next step, and still the tokens of the tick are dropped, by a sentence that helps."""
    model = _model()
    engine = tiny_engine(model, stream_interval=8)

    def reference() -> None:
        with SWITCHES[switch](model):
            model.model.embed_tokens(IDS)

    at_call(model, 21, lambda: _in_a_thread(reference))
    chunks, error = await _broken_stream(engine, tiny_request(new=100))
    assert sum(len(chunk.tokens) for chunk in chunks) == 17
    assert error.unsound == 8
    if switch not in ("data", "values", "buffer"):
        assert "the model was switched (" in str(error)
        assert "inside `with april.hold_model(model):`" in str(error)
    await engine.close()


@pytest.mark.parametrize("switch", SWITCHES)
async def test_a_model_that_stays_switched_is_found_out(switch: str) -> None:
    """By the end of the tick, whoever did it, and also where nobody calls the model."""
    model = _model()
    engine = tiny_engine(model)
    switched = SWITCHES[switch](model)
    if switch == "forward":  # which could not be decoded with
        switched = _set(model.lm_head, "forward", model.lm_head.forward)
    if switch == "module":
        switched = _set(model.model.layers[0], "mlp", model.model.layers[1].mlp)
    at_call(model, 5, switched.__enter__)
    _, error = await _broken_stream(engine, tiny_request(new=100))
    assert error.unsound > 0
    switched.__exit__(None, None, None)
    await engine.close()


async def test_nothing_is_generated_while_the_model_is_held() -> None:
    """Nested, from a thread and from a coroutine; the first who asks is the next; afterwards generation goes on."""
    model = _model()
    engine = tiny_engine(model, stream_interval=8)
    async with april.hold_model(model):
        request = asyncio.create_task(anext(engine.generate(tiny_request(new=100))))
        with april.hold_model(model.model):  # inside of it, and in the same context
            for _ in range(50):
                await asyncio.sleep(0)
        quiet = asyncio.create_task(engine.quiet())
        await asyncio.to_thread(lambda: april.hold_model(model).__enter__().__exit__(None, None, None))
        for _ in range(50):
            await asyncio.sleep(0)
        assert engine.stats.generated_tokens == 0
        assert not quiet.done()
        assert "test_nothing_is_generated_while_the_model_is_held" in model_lock_of(model).holder
    assert len((await request).tokens) == 9
    await quiet
    async with april.hold_model(model):  # and with nothing to generate
        quiet = asyncio.create_task(engine.quiet())
        for _ in range(50):
            await asyncio.sleep(0)
        assert not quiet.done()
    await quiet

    in_it, go_on, order = threading.Event(), threading.Event(), []

    def holds() -> None:
        with april.hold_model(model):
            in_it.set()
            go_on.wait()
            order.append("thread")

    thread = threading.Thread(target=holds)
    thread.start()
    in_it.wait()

    async def coroutine() -> None:
        async with april.hold_model(model):
            order.append("coroutine")

    task = asyncio.create_task(coroutine())
    await asyncio.sleep(0)
    go_on.set()
    await task
    thread.join()
    assert order == ["thread", "coroutine"]
    await engine.close()


async def test_what_would_wait_for_itself_is_refused() -> None:
    """Holding on the loop without ``await``, generating inside of it, what is no model; closing goes on."""
    model = _model()
    engine = tiny_engine(model)
    with pytest.raises(ConfigError, match="must be a torch module, got str"):
        april.hold_model("model")
    with pytest.raises(UsageError, match="use `async with` in a coroutine"), april.hold_model(model):
        pass
    functions = {"prompts": [[5, 6, 7]] * 8, "reward": lambda *_: 0.0}
    with april.RolloutScheduler(_config(), model=model, **functions) as rollouts:
        async with april.hold_model(model):
            with pytest.raises(RolloutError, match="would wait for generation"):
                await rollouts.anext_batch()
    async with april.hold_model(model):
        request = asyncio.create_task(anext(engine.generate(tiny_request(new=100))))
        for _ in range(20):
            await asyncio.sleep(0)
        await engine.close()
        assert len((await request).tokens) == 0


@pytest.mark.parametrize("held", [True, False])
def test_a_batch_comes_when_the_model_is_as_the_trainer_left_it(held: bool) -> None:
    """Rewards that switch it in their turn spoil no token, and one that is late holds up the batch, turn or no turn."""
    model = _model()
    flag, late, threads = model.model.layers[0].mlp, threading.Event(), []

    def reward(prompt: Any, response: Any) -> float:
        if held:
            with april.hold_model(model), _set(flag, "adapter_off", True), torch.no_grad():
                model(input_ids=IDS)
        return 0.0

    functions = {"prompts": [[5, 6, 7 + k] for k in range(12)], "reward": reward}
    with april.RolloutScheduler(_config(), model=model, **functions) as rollouts:
        quiet = rollouts.engines[0].quiet

        async def switched_meanwhile() -> None:
            flag.adapter_off = True
            threads.append(threading.Timer(0.1, lambda: (late.set(), setattr(flag, "adapter_off", False))))
            threads[-1].start()
            await quiet()

        if not held:
            rollouts.engines[0].quiet = switched_meanwhile  # type: ignore[attr-defined]
        batch = rollouts.next_batch()
        assert flag.adapter_off is False
        assert late.is_set() is not held
        rollouts.validate()
    assert all(apart(model, s.prompt.token_ids, s).max() <= 1e-5 for s in batch.samples)


async def test_a_model_that_is_never_switched_back_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a sentence that names the switch; the trainer may switch it between two batches as it likes."""
    monkeypatch.setattr("april.engines.transformers.model_state.PATIENCE_S", 0.0)
    model = _model()
    engine = tiny_engine(model)
    flag = model.model.layers[0].mlp
    [c async for c in engine.generate(tiny_request(new=100))]
    flag.adapter_off = True
    with pytest.raises(
        WeightsInUse, match=r"was switched and not switched back \(adapter_off of model.layers.0.mlp is True,"
    ):
        await engine.quiet()
    with pytest.raises(WeightsInUse):  # and afterwards the engine generates as before
        await engine.update_weights(V1, "a directory")
    flag.adapter_off = False
    await engine.quiet()
    flag.adapter_off = True
    assert [c async for c in engine.generate(tiny_request("b", 100))]
    await engine.close()
