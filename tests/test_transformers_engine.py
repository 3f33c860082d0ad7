"""The embedded engine on the event loop: every token once, ends that happen when they must, runs that repeat."""

from __future__ import annotations

import asyncio
import copy
import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from real_schedulers import assert_nothing_is_left
from tiny_models import (
    EOS,
    V1,
    VOCAB_SIZE,
    asked,
    at_call,
    collect,
    generated,
    joined,
    off,
    tiny_engine,
    tiny_model,
    tiny_request,
)
from tiny_tokenizers import ids_of, tokenizer

import april
from april.core.sampling import SamplingParams
from april.core.versions import FIRST_VERSION
from april.driver.rewards import Response
from april.engines.protocol import Chunk, EngineFinish, Request
from april.engines.transformers.engine import TransformersEngine
from april.errors import ConfigError, EngineError, ModelBroken


def _start(engine: TransformersEngine, *requests: Request) -> list[asyncio.Task[list[Chunk]]]:
    return [asyncio.create_task(collect(engine, request)) for request in requests]


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the worker thread's state has no event
        await asyncio.sleep(0)


@pytest.mark.parametrize(("call", "fewest"), [(1, 1), (5, 5)])
async def test_abort_during_a_tick_takes_effect_when_it_ends(call: int, fewest: int) -> None:
    """Asked for in the middle of a prefill or of a decode step: nothing computed is lost, one tick at most is added."""
    model = tiny_model()
    engine = tiny_engine(model, slots=2)
    reached, opened = threading.Event(), threading.Event()
    at_call(model, call, lambda: (reached.set(), opened.wait()))
    first, second = _start(engine, tiny_request("first", 200), tiny_request("second", 200))
    await _until(reached.is_set)
    late = _start(engine, tiny_request("late", 200))[0]
    await asyncio.sleep(0)
    await engine.abort()
    opened.set()
    for task in (first, second):
        (chunk,) = await task
        assert chunk.finish is EngineFinish.ABORT
        assert fewest <= len(chunk.tokens) <= 33
        assert len(chunk.tokens) == engine.stats.generated_tokens / 2
    (chunk,) = await late  # submitted during the tick, aborted before it could begin
    assert (len(chunk.tokens), chunk.finish) == (0, EngineFinish.ABORT)
    await engine.close()


@pytest.mark.parametrize("stream_interval", [None, 3])
async def test_every_generated_token_is_yielded_or_counted_as_discarded(stream_interval: int | None) -> None:
    """60 requests; consumers leave and ids are aborted, between ticks and during them: the books balance."""
    engine = tiny_engine(slots=6, stream_interval=stream_interval)
    rng = np.random.default_rng(3)
    yielded = 0

    async def consume(request: Request) -> None:
        nonlocal yielded
        async for chunk in engine.generate(request):
            yielded += len(chunk.tokens)

    tasks = [
        asyncio.create_task(consume(tiny_request(f"{i}", int(rng.integers(1, 50)), int(rng.integers(1, 20)), seed=i)))
        for i in range(60)
    ]
    seen_ticking = False
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        # Once per event-loop cycle between ticks and once during each tick: the same decisions in every run.
        if seen_ticking and engine._ticking:
            time.sleep(0)  # noqa: ASYNC251 - no wait: the interpreter goes to the engine's thread
            continue
        seen_ticking = engine._ticking
        if rng.random() < 0.05:
            tasks[int(rng.integers(0, 60))].cancel()
        if rng.random() < 0.05:
            await engine.abort([f"{int(rng.integers(0, 60))}"])
    await asyncio.gather(*tasks, return_exceptions=True)
    await _until(lambda: engine._pump is None)

    stats = engine.stats
    assert 0 < sum(task.cancelled() for task in tasks) < 40
    assert stats.aborts > 0
    assert stats.discarded_tokens > 0
    assert stats.generated_tokens == yielded + stats.discarded_tokens
    assert engine._decoder.idle
    assert not engine._streams


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (asked("x", np.array([3, VOCAB_SIZE], np.int32), SamplingParams(5)), f"token id {VOCAB_SIZE} is outside"),
        (asked("x", np.array([-1], np.int32), SamplingParams(5)), "token id -1 is outside"),
        (asked("x", np.ones(64, np.int32), SamplingParams(5)), "no room below max_len 64"),
        (
            asked(
                "x", np.ones(3, np.int32), SamplingParams(5, min_tokens=1, stop_token_ids=tuple(range(VOCAB_SIZE)))
            ),
            "every token",
        ),
    ],
)
async def test_requests_that_make_no_sense_cost_nothing(bad: Request, complaint: str) -> None:
    """They are refused by a sentence with the attempt in it, before anything is queued or computed."""
    engine = tiny_engine(max_len=64)
    with pytest.raises(EngineError, match=complaint) as caught:
        await collect(engine, bad)
    assert "attempt x" in str(caught.value)
    assert engine.stats.requests == engine.stats.generated_tokens == 0
    assert engine._pump is None


async def test_stale_keys_and_values_cannot_be_used() -> None:
    """With active requests a new version is refused, and so is resuming after the weights were written in place."""
    model = tiny_model()
    engine = tiny_engine(model)
    tasks = _start(engine, tiny_request("a", 200))
    await _until(lambda: engine.stats.decode_steps > 0)
    await engine.pause()
    with pytest.raises(EngineError, match=r"1 requests are active under version 0\.0: pause and abort"):
        await engine.update_weights(V1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(input_ids=torch.tensor([[3, 4, 5]]), labels=torch.tensor([[3, 4, 5]])).loss.backward()
    optimizer.step()
    with pytest.raises(EngineError, match="weights were changed"):
        await engine.resume()
    await engine.abort()
    assert (await tasks[0])[0].version == FIRST_VERSION
    await engine.update_weights(V1)
    await engine.resume()
    (chunk,) = await collect(engine, tiny_request("b", 5))
    assert chunk.version == V1
    await engine.close()


async def test_weights_are_loaded_from_disk_in_place(tmp_path: Path) -> None:
    """The parameters stay the same objects with the values of the directory; a wrong directory changes nothing."""
    model, newer = tiny_model("llama", seed=0), tiny_model("llama", seed=1)
    newer.save_pretrained(tmp_path / "good")
    tiny_model("llama", num_hidden_layers=1).save_pretrained(tmp_path / "short")
    engine = tiny_engine(model)
    held = {name: (parameter, parameter.clone()) for name, parameter in model.named_parameters()}
    for wrong in ("missing", "short"):
        with pytest.raises(EngineError, match=wrong):
            await engine.update_weights(V1, str(tmp_path / wrong))
    assert all(torch.equal(parameter, value) for parameter, value in held.values())
    await engine.pause()
    await engine.update_weights(V1, str(tmp_path / "good"))
    await engine.resume()

    assert all(parameter is held[name][0] for name, parameter in model.named_parameters())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), newer.parameters(), strict=True))
    request = tiny_request("a", 10)
    (chunk,) = await collect(engine, request)
    assert chunk.version == V1
    assert off(newer, request, chunk) <= 1e-5
    await engine.close()


async def _busy_run() -> tuple[list[Any], list[tuple[int, int]] | None]:
    """A run with follow-ups, aborts at completions and late requests; everything observable about it."""
    engine = tiny_engine(slots=6, seed=5)
    engine.stats.trace = []
    events: list[Any] = []
    tasks: list[asyncio.Task[None]] = []

    async def rollout(name: str, new: int) -> None:
        whole = await generated(engine, tiny_request(name, new, temperature=1.0, seed=None))
        events.append((name, whole.tokens.tolist(), whole.logprobs.tolist(), whole.finish))
        if len(events) % 5 == 0:
            await engine.abort([name.split("/")[0] for name, *_ in events[-2:]] + [f"{len(events) + 3}"])
        if "/" not in name:
            tasks.append(asyncio.create_task(rollout(f"{name}/2", 5 + new // 2)))

    tasks += [asyncio.create_task(rollout(f"{i}", 3 + (i * 37) % 60)) for i in range(25)]
    done = 0
    while done < len(tasks):
        await tasks[done]
        done += 1
    await engine.close()
    return events, engine.stats.trace


async def test_runs_repeat_exactly() -> None:
    """Same inputs, same everything: order of completion, tokens, log-probability bits, active requests of each step."""
    first, second = await _busy_run(), await _busy_run()

    assert first == second
    assert any(finish is EngineFinish.ABORT for *_, finish in first[0])
    assert len({tuple(tokens) for _, tokens, *_ in first[0]}) == 50  # requests without a seed do not share one


async def test_a_failing_model_call_fails_its_streams_and_nothing_else() -> None:
    """Tokens of completed steps come first, then the error with its cause; health tells; the next request works."""
    model = tiny_model()
    engine = tiny_engine(model, slots=2)

    def fail(*_: object) -> None:
        if engine.stats.decode_steps == 3:
            raise RuntimeError("out of memory")

    handle = model.register_forward_pre_hook(fail)
    stream = engine.generate(tiny_request("a", 20))
    chunk = await anext(stream)
    assert (len(chunk.tokens), chunk.finish) == (4, None)
    with pytest.raises(EngineError, match=r"attempt a: a model call failed \(RuntimeError: out of memory\)") as caught:
        await anext(stream)
    assert isinstance(caught.value.__cause__, RuntimeError)
    health = await engine.health()
    assert not health.ok
    assert "out of memory" in health.detail
    handle.remove()
    request = tiny_request("b", 20)
    chunks = await collect(engine, request)

    assert (await engine.health()).ok
    assert off(model, request, joined(chunks)) <= 1e-5
    assert engine.stats.generated_tokens == 24
    assert engine.stats.failures == 1
    await engine.close()


def steps_of(model: Any, **more: Any) -> april.RolloutScheduler:
    """A scheduler whose prompts never end."""
    config = april.Config(rollout_batch_size=2, n_samples_per_prompt=2, max_response_len=12, outage_deadline_s=10.0)
    prompts = ([1, 2 + i % 9] for i in itertools.count())
    return april.RolloutScheduler(config, prompts=prompts, reward=None, model=model, progress=False, **more)


@pytest.mark.parametrize(
    "said", ["no kernel", "CUDA error: an illegal memory access was encountered", "use channels_last memory format"]
)
def test_a_model_call_that_fails_for_every_request_ends_the_step(said: str) -> None:
    """At once, with the model's own error and nothing lost; after an update the same batch comes."""
    model, failing = tiny_model(), [False]

    def fail(*_: object) -> None:
        if failing[0]:
            raise RuntimeError(said)

    model.register_forward_pre_hook(fail)
    with steps_of(model) as rollouts:
        failing[0] = True
        with pytest.raises(EngineError, match=rf"a model call failed \(RuntimeError: {said}\).*repair the model"):
            rollouts.next_batch()
        failing[0] = False
        rollouts.weight_update()
        assert len(rollouts.next_batch()) == 4


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
        MemoryError(),
    ],
    ids=repr,
)  # fmt: skip
async def test_a_want_of_memory_may_pass(error: Exception) -> None:
    """It is told once: an engine that stayed unwell would be sent no request, and only a request can succeed."""
    model, failing = tiny_model(), [error]

    def fail(*_: object) -> None:
        if failing:
            raise failing.pop()

    engine = tiny_engine(model, slots=2)
    model.register_forward_pre_hook(fail)
    with pytest.raises(EngineError, match="a model call failed") as caught:
        await collect(engine, tiny_request("a", 20))
    assert not isinstance(caught.value, ModelBroken)
    assert [(await engine.health()).ok for _ in range(2)] == [False, True]
    assert await collect(engine, tiny_request("b", 20))
    await engine.close()


def test_a_model_may_be_given_another_dtype_at_an_update() -> None:
    """What waits is generated in the new one."""
    model = tiny_model()
    with steps_of(model) as rollouts:
        rollouts.next_batch()
        model.to(torch.bfloat16)
        rollouts.weight_update()
        assert len(rollouts.next_batch()) == 4


@pytest.mark.parametrize(("trains", "warns"), [("a copy", True), ("the model", False), ("now and then", False)])
def test_a_copy_of_the_model_that_is_trained_is_noticed(
    trains: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Versions that have the same weights are said once; a step that was skipped is no cause."""
    model = tiny_model()
    trained = copy.deepcopy(model) if trains == "a copy" else model
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.0)  # a warm-up from 0 writes, too
    with steps_of(model) as rollouts:
        for step in range(5):
            rollouts.next_batch()
            if trains != "now and then" or step % 2:
                for parameter in trained.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
            rollouts.weight_update()
    assert caplog.text.count("is a copy of the model trained?") == warns


async def test_a_device_that_is_lost_ends_all_streams_and_the_books_still_balance() -> None:
    """An abort that cannot read its tokens: active and waiting streams fail, the tokens count as discarded."""
    engine = tiny_engine(slots=1)
    tasks = _start(engine, tiny_request("a", 200), tiny_request("b", 200))
    await _until(lambda: engine.stats.decode_steps > 0 and not engine._ticking)

    def lost(*_: object) -> None:
        raise RuntimeError("device lost")

    engine._decoder._read = lost  # type: ignore[assignment]
    await engine.abort()
    with pytest.raises(EngineError, match="device lost"):
        await tasks[0]
    (chunk,) = await tasks[1]  # it had nothing to read

    assert chunk.finish is EngineFinish.ABORT
    assert not (await engine.health()).ok
    assert engine.stats.generated_tokens == engine.stats.discarded_tokens > 0
    assert not engine._streams
    await engine.close()


@pytest.mark.parametrize("stream_interval", [None, 4])
async def test_nan_in_the_weights_is_an_error_not_a_sample(stream_interval: int | None) -> None:
    """A NaN log-probability never reaches the trainer; its tokens are counted as discarded."""
    model = tiny_model()
    engine = tiny_engine(model, stream_interval=stream_interval)
    with torch.no_grad():
        model.lm_head.weight[5] = torch.nan
    with pytest.raises(EngineError, match=r"log-probability of nan under version 0\.0"):
        await collect(engine, tiny_request("a", 20))
    await _until(lambda: engine._pump is None)

    assert engine._decoder.idle
    assert engine.stats.generated_tokens == engine.stats.discarded_tokens > 0


async def test_capabilities_and_loading_from_a_directory(tmp_path: Path) -> None:
    """What is declared is what the model has, EOS from its configuration; from_pretrained makes the same from disk."""
    model = tiny_model("qwen2", eos_token_id=[EOS, 5])
    model.save_pretrained(tmp_path)
    engine = TransformersEngine.from_pretrained(str(tmp_path), slots=3, name="mine")
    limits = engine.capabilities

    assert (limits.vocab_size, limits.max_context, limits.max_in_flight) == (VOCAB_SIZE, 512, 3)
    assert limits.shares_weights
    assert limits.updates_from_disk
    assert limits.eos_token_ids == (EOS, 5)
    assert engine.name == "mine"
    assert repr(engine) == "TransformersEngine('mine', idle, SlotDecoder(0/3 active, 0 waiting, version 0.0))"
    request = tiny_request("a", 10)
    assert off(model, request, await generated(engine, request)) <= 1e-5
    await engine.close()


@pytest.mark.parametrize("options", [{"slots": 0}, {"max_len": 0}, {"max_len": 8}, {"stream_interval": 0}])
def test_options_out_of_range_are_refused(options: dict[str, int]) -> None:
    """By name, at construction."""
    with pytest.raises(ConfigError, match=next(iter(options))):
        TransformersEngine(tiny_model(), **options)


def test_stop_strings_of_the_configuration() -> None:
    """They need a tokenizer, such as a fast one of Hugging Face; rewards and evaluations see text."""
    from transformers import PreTrainedTokenizerFast

    network = tiny_model(vocab_size=tokenizer("text").get_vocab_size())
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer("text"))
    prompt, seen = ids_of("text", "The answer is"), list[str]()

    def rollouts(stop: list[str], **arguments: Any) -> april.RolloutScheduler:
        sampling = {"temperature": 0.0, "stop": stop}
        config = april.Config(
            rollout_batch_size=1, n_samples_per_prompt=1, max_response_len=60, sampling=sampling, allow_mismatch=True
        )
        engine = tiny_engine(network, slots=4, check=False)
        return april.RolloutScheduler(config, engines=[engine], prompts=iter(lambda: prompt, None), **arguments)

    def reward(prompt: april.Prompt, response: Response) -> float:
        seen.append(response.text(special_tokens=True))
        return float(stop in seen[-1])

    with pytest.raises(ConfigError, match=r"sampling.stop: stop strings are matched on text; give the scheduler token"):
        rollouts(["x"])
    with rollouts([]) as scheduler:
        whole = scheduler.next_batch().samples[0].tokens.tolist()
    assert len(whole) == 60
    stop = fast.decode(whole[:30], skip_special_tokens=False)[-5:]
    with rollouts([stop], tokenizer=fast, reward=reward) as scheduler:
        (sample,) = scheduler.next_batch().samples
        result = scheduler.evaluate([prompt])
    assert sample.tokens.tolist() == whole[: len(sample.tokens)]
    assert seen == [fast.decode(sample.tokens.tolist(), skip_special_tokens=False)] * 2
    assert np.array_equal(result.responses[0][0].tokens, sample.tokens)
    assert result.reward_mean == sample.reward == 1.0
    assert_nothing_is_left()
