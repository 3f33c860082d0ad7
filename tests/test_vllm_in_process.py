"""vLLM's AsyncLLM as an engine: on its own loop or on april's, every token once, aborts and weight updates exact."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_async_llm import EOS, FakeAsyncLLM, install_vllm
from fake_servers.base import uncut
from fake_servers.images import PLACEHOLDER, TOKENS_EACH, FakeImages, features, salt_of
from msgspec import structs
from PIL import Image
from real_schedulers import assert_nothing_is_left, endless
from server_fixtures import Got, ServerThread, is_of_its_weights, read, request, sent, transferred, update

import april
from april.core.attachments import Attachment, Placed
from april.core.sampling import LogprobKind
from april.core.versions import FIRST_VERSION, PolicyVersion
from april.driver.rewards import Response
from april.engines.protocol import EngineFinish, Request
from april.engines.vllm.in_process import VllmInProcessEngine
from april.engines.weight_transfer import Handshake, ReceivesWeights
from april.errors import AttachmentError, ConfigError, EngineBusy, EngineError, RequestRefused, WireError

PROMPT = [12, 20, 30]
ABORT, ENDS = EngineFinish.ABORT, {True: EngineFinish.STOP, False: EngineFinish.LENGTH}


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    install_vllm(monkeypatch)


class World:
    """An AsyncLLM, the engine over it, and a way to run something on the AsyncLLM's loop."""

    def __init__(self, llm: FakeAsyncLLM, loop: asyncio.AbstractEventLoop, **options: Any) -> None:
        self.llm, self.loop = llm, loop
        self.engine = VllmInProcessEngine(llm, **options)

    async def there(self, function: Callable[[], Any]) -> Any:
        async def call() -> Any:
            return function()

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call(), self.loop))

    async def until(self, condition: Callable[[], bool]) -> None:
        while not await self.there(condition):  # noqa: ASYNC110 - a state of another loop, which has no event for it
            await asyncio.sleep(0)

    async def ask(self, prompt: list[int] = PROMPT, max_tokens: int = 50, **more: Any) -> Got:
        got = await read(self.engine, request(prompt, max_tokens, **({"temperature": 0.0} | more)))
        assert got.error or len(got.chunks) == 1 or more.get("stream") or self.engine.capabilities.streams
        return got

    def uncut(
        self, prompt: list[int], max_tokens: int = 50, weights: str = "tiny0"
    ) -> tuple[list[int], list[float]]:
        return uncut(prompt, weights=weights, max_tokens=max_tokens, mean_length=self.llm.mean_length)

    def whole(self, prompt: list[int], max_tokens: int = 50, weights: str = "tiny0") -> list[int]:
        return self.uncut(prompt, max_tokens, weights)[0]


async def made(**llm: Any) -> FakeAsyncLLM:
    return FakeAsyncLLM(**llm)


@asynccontextmanager
async def world(own_loop: bool = False, *, options: dict[str, Any] | None = None, **llm: Any) -> AsyncIterator[World]:
    """``own_loop``: the AsyncLLM was made on a loop on another thread; otherwise outside of any loop."""
    if own_loop:
        with ServerThread() as thread:
            there = thread.call(made(**llm))
            yield World(there, thread.loop, **(options or {}))
            thread.call(there.shut())
    else:
        here = await asyncio.to_thread(lambda: FakeAsyncLLM(**llm))
        assert here.output_handler is None
        yield World(here, asyncio.get_running_loop(), **(options or {}))
        await here.shut()


both_loops = pytest.mark.parametrize("own_loop", [True, False], ids=["own loop", "april's loop"])


@both_loops
@pytest.mark.parametrize("stream", [False, True])
async def test_eighty_requests_cut_and_continued_equal_the_uncut_ones(own_loop: bool, stream: bool) -> None:
    """All of them aborted at once, again and again: nothing that vLLM had made is lost, EOS and stop ids included."""
    async with world(own_loop, mean_length=200) as w:
        prompts = [[*PROMPT, i + 5] for i in range(80)]
        held: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        turn = begun = 0
        while open_ones := [i for i, h in enumerate(held) if len(h) < 40 and EOS not in h]:
            await w.there(partial(w.llm.limit, turn % 3 * 4))
            tasks = {
                i: asyncio.create_task(w.ask(prompts[i] + held[i], 40 - len(held[i]), stream=stream))
                for i in open_ones
            }
            begun += len(tasks)
            await w.until(lambda begun=begun: len(w.llm.runs) == begun and w.llm.stopped == w.llm.open_requests)
            await w.engine.abort()
            for i, task in tasks.items():
                answer = await task
                assert answer.error is None
                held[i] += answer.tokens
                logprobs[i] += answer.logprobs
                assert answer.finish is (ABORT if EOS not in held[i] and len(held[i]) < 40 else ENDS[EOS in held[i]])
                assert set(answer.versions) <= {FIRST_VERSION}
            turn += 1
        assert [*zip(held, logprobs, strict=True)] == [w.uncut(p, 40) for p in prompts]
        assert turn > 5
        await w.there(w.llm.limit)
        third = w.whole(PROMPT)[2]
        answer = await w.ask(PROMPT, stop_token_ids=(third,), stream=stream)
        assert (answer.tokens[-1], answer.finish) == (third, EngineFinish.STOP)


@both_loops
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("release", [32, 33])
async def test_pause_ends_requests_that_are_just_being_handed_over(own_loop: bool, release: int, stream: bool) -> None:
    """vLLM does not know them when it pauses. It holds them, and april asks until they have ended; or it refuses them,
    which is their end as well. Either way nothing has failed, and the engine serves on."""
    async with world(own_loop, release=release, options={"stream": stream}) as w:
        gate = await w.there(asyncio.Event)
        w.llm.before_add = gate
        tasks = [asyncio.create_task(w.ask()) for i in range(4)]
        await w.until(lambda: len(w.llm.runs) == 4)
        pausing = asyncio.create_task(w.engine.pause())
        await w.until(lambda: w.llm.pause_mode)
        await w.there(gate.set)
        await pausing
        for answer in await asyncio.gather(*tasks):
            assert (answer.tokens, answer.finish, answer.error) == ([], EngineFinish.ABORT, None)
        later = asyncio.create_task(w.ask())
        await w.engine.resume()
        assert (await later).tokens == w.whole(PROMPT)


@both_loops
async def test_a_vllm_that_somebody_else_has_paused_is_busy(own_loop: bool) -> None:
    """The request waits elsewhere, and goes on after the resumption; three of them do not make an engine sick."""
    async with world(own_loop) as w:
        await w.engine._call_on_llm_loop(lambda: w.llm.pause_generation(mode="abort", clear_cache=False))
        for _ in range(4):
            answer = await w.ask()
            assert isinstance(answer.error, EngineBusy)
            assert "Generation is paused" in str(answer.error)
        await w.engine._call_on_llm_loop(w.llm.resume_generation)
        assert (await w.ask()).tokens == w.whole(PROMPT)


@both_loops
async def test_weights_from_disk_between_two_steps(own_loop: bool) -> None:
    """Load, forget the cache, label; requests that waited meanwhile have the new weights and their version."""
    async with world(own_loop, mean_length=10_000) as w:
        await w.there(lambda: w.llm.limit(4))
        running = asyncio.create_task(w.ask())
        await w.until(lambda: w.llm.stopped == 1)
        with pytest.raises(EngineError, match="pause the engine first"):
            await w.engine.update_weights(PolicyVersion(0, 1), "tiny1")
        await w.engine.pause()
        await w.there(lambda: w.llm.limit())
        third = request()
        waiting, unwanted = asyncio.create_task(w.ask()), asyncio.create_task(read(w.engine, third))
        await asyncio.sleep(0)
        await w.engine.abort([third.attempt_id])
        assert (await unwanted).finish is EngineFinish.ABORT
        await w.engine.update_weights(PolicyVersion(0, 1), "tiny1")
        assert len(w.llm.runs) == 1
        await w.engine.resume()
        old, new = await running, await waiting
        assert (old.tokens, set(old.versions)) == (w.whole(PROMPT)[:4], {FIRST_VERSION})
        assert (new.tokens, set(new.versions)) == (w.whole(PROMPT, weights="tiny1"), {PolicyVersion(0, 1)})
        assert w.llm.label.startswith("v0.1-")


async def test_an_update_that_fails_says_so() -> None:
    """A cache that keeps old keys and values is no update; nothing is generated before one succeeds."""
    async with world() as w:
        await w.engine.pause()
        with pytest.raises(EngineError, match="FileNotFoundError"):
            await w.engine.update_weights(PolicyVersion(0, 1), "missing")
        w.llm.cache_resets = False
        with pytest.raises(EngineError, match="could not reset its prefix cache"):
            await w.engine.update_weights(PolicyVersion(0, 1), "tiny1")
        assert w.llm.label == "default"
        await w.engine.resume()
        answer = await w.ask()
        assert isinstance(answer.error, EngineError)
        assert "its weights belong to no version" in str(answer.error)
        assert not (await w.engine.health()).ok
        w.llm.cache_resets = True
        await update(w.engine, PolicyVersion(0, 1), "tiny1")
        assert (await w.ask()).tokens == w.whole(PROMPT, weights="tiny1")
        assert (await w.engine.health()).ok


@pytest.mark.parametrize("results", [[], None, [None, "worker died"], [{"error": "no memory"}]])
async def test_a_reload_counts_when_every_worker_has_returned_nothing(results: Any) -> None:
    """Whatever else they return is no success, and a label that does not move names no weights."""
    async with world() as w:
        await w.engine.pause()
        w.llm.rpc_results = results
        with pytest.raises(EngineError, match="workers returned"):
            await w.engine.update_weights(PolicyVersion(0, 1), "tiny1")
        w.llm.rpc_results, w.llm.keeps_label = [None], True
        with pytest.raises(EngineError, match="labels its weights default"):
            await w.engine.update_weights(PolicyVersion(0, 1), "tiny1")
        await w.engine.resume()
        assert (await w.ask()).error is not None
        assert not (await w.engine.health()).ok


V1, V2 = PolicyVersion(0, 1), PolicyVersion(0, 2)


@both_loops
async def test_weights_that_the_trainer_sends(own_loop: bool) -> None:
    """To each of the workers by vLLM's own calls, on vLLM's own loop; then the cache is emptied and the label moves."""
    async with world(own_loop, transfers="april_gloo") as w:
        assert isinstance(w.engine, ReceivesWeights)
        assert (w.engine.capabilities.collective, w.engine.handshake) == (("gloo",), Handshake.TORCH)
        assert await w.engine.ranks() == 6
        await transferred(w.engine, V1)
        calls = dict(w.llm.transfers)
        assert calls["init_weight_transfer_engine"]["init_info"] == {
            "master_address": "127.0.0.1", "master_port": 4711, "rank_offset": 1, "world_size": 2, "group": "april-g1",
            "timeout_s": 60.0,
        }  # fmt: skip
        assert calls["update_weights"]["update_info"] == {
            "names": ["head.weight"], "dtype_names": ["float32"], "shapes": [(4,)]
        }  # fmt: skip
        answer = await w.ask()
        assert (answer.tokens, set(answer.versions)) == (w.whole(PROMPT, weights="head.weight"), {V1})


@pytest.mark.parametrize(
    ("call", "kept"),
    [("init_weight_transfer_engine", True), ("update_weights", False), ("finish_weight_update", False)],
)
async def test_a_transfer_that_fails_leaves_no_doubt(call: str, kept: bool) -> None:
    """Before the weights come everything is as it was; afterwards nothing is generated until an update succeeds."""
    async with world(transfers="april_gloo") as w:
        await w.engine.pause()
        w.llm.transfers.clear()
        w.engine._nothing_to_forget = True
        w.llm.fails = {call}
        with pytest.raises(EngineError, match=f"{call} died"):
            await sent(w.engine)
        w.llm.fails = set()
        assert await w.engine.leave() == kept
        await w.engine.resume()
        answer = await w.ask()
        assert (answer.error is None) == kept
        assert not w.llm.session
        await transferred(w.engine, V2)
        assert set((await w.ask()).versions) == {V2}


def test_weights_are_sent_where_vllm_was_made_for_it() -> None:
    """Not without a back-end, over one that april does not know, under an adapter, or to workers on other machines."""

    def offered(**changes: Any) -> tuple[str, ...]:
        llm = FakeAsyncLLM(transfers=changes.get("transfers"))
        llm.vllm_config.parallel_config.distributed_executor_backend = changes.get("executor", "mp")
        return VllmInProcessEngine(llm, lora_request=changes.get("lora_request")).capabilities.collective

    assert offered() == offered(transfers="ipc") == offered(transfers="nccl", executor="ray") == ()
    assert offered(transfers="nccl", lora_request=object()) == ()
    assert (offered(transfers="nccl"), offered(transfers="april_gloo")) == (("nccl",), ("gloo",))


async def test_weights_that_somebody_else_updates_are_noticed() -> None:
    """vLLM's own labels must agree with april's versions."""
    async with world() as w:
        await update(w.engine, PolicyVersion(0, 1), "tiny1")
        assert (await w.ask()).error is None
        w.llm.label = "somebody's"
        answer = await w.ask()
        assert isinstance(answer.error, EngineError)
        assert "somebody else changes its weights" in str(answer.error)


@pytest.mark.parametrize("label", ["default", "mine", "v0.0-abcdef", "v0.3-abcdef", "between-01234567-abcdef"])
async def test_weights_of_another_run_are_not_the_first_version(label: str) -> None:
    """An AsyncLLM lives longer than an engine before it: what april has put there once is not its start."""
    async with world() as w:
        w.llm.label = label
        answer = await w.ask()
        others = label[:5] in ("v0.3-", "betwe")
        assert others == (answer.error is not None)
        assert not others or "another run of april gave it" in str(answer.error)
        await update(w.engine, PolicyVersion(0, 1), "tiny1")
        assert set((await w.ask()).versions) == {PolicyVersion(0, 1)}


@pytest.mark.parametrize(
    ("lies", "message"),
    [
        ({"logprobs": None}, "tokens came with no log-probabilities"),
        ({"logprobs": []}, "tokens came with 0 log-probabilities"),
        ({"finish_reason": "error"}, "ended the response for the reason 'error'"),
    ],
)
async def test_what_cannot_be_true_is_refused(lies: dict[str, Any], message: str) -> None:
    """Counts and reasons are looked at."""
    async with world() as w:
        w.llm.lies = lies
        answer = await w.ask()
        assert isinstance(answer.error, EngineError)
        assert message in str(answer.error)


async def test_tied_embeddings_on_a_cpu_are_not_reloaded() -> None:
    """One sentence says why and what to do; weights, version and requests stay as they were."""
    async with world() as w:
        config = w.llm.vllm_config
        config.model_config.hf_config = SimpleNamespace(tie_word_embeddings=True)
        for device, reloads in (("cuda", True), ("cpu", False)):
            config.device_config = SimpleNamespace(device_type=device)
            engine = VllmInProcessEngine(w.llm)
            assert engine.capabilities.updates_from_disk is reloads
            assert any("tied embeddings" in note for note in engine.capabilities.notes) is not reloads
        with pytest.raises(EngineError, match="tied embeddings"):
            await engine.update_weights(PolicyVersion(0, 1), "tiny1")
        assert w.llm.weights == "tiny0"
        assert (await engine.health()).ok


@both_loops
@pytest.mark.parametrize("release", [32, 33])
async def test_a_dead_vllm_and_a_wrong_request_are_told_apart(own_loop: bool, release: int) -> None:
    """vLLM's errors that blame the request (ValueError before 0.33) are the request's fault; all else the engine's."""
    async with world(own_loop, release=release) as w:
        assert (await w.engine.health()).ok
        assert isinstance((await w.ask([5] * 600)).error, RequestRefused)
        assert isinstance((await w.ask(max_tokens=998)).error, RequestRefused)
        assert len(w.llm.runs) == 1
        w.llm.dead = True
        answer = await w.ask()
        assert type(answer.error) is EngineError
        assert "EngineDeadError" in str(answer.error)
        assert not (await w.engine.health()).ok


@both_loops
async def test_cancelled_requests_leave_nothing_behind(own_loop: bool) -> None:
    """At any time of the cancellation: vLLM has no request left, and pause returns."""
    async with world(own_loop, mean_length=10_000) as w:
        await w.there(lambda: w.llm.limit(2))
        for turns in range(12):
            task = asyncio.create_task(w.ask())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await w.engine.pause()
        assert not w.llm.open_requests


def test_capabilities_come_from_vllms_configuration() -> None:
    """Kind, vocabulary, context, EOS ids of tokenizer and generation config, places of all data-parallel ranks."""
    raw = VllmInProcessEngine(FakeAsyncLLM()).capabilities
    assert (raw.logprob_kind, raw.vocab_size, raw.max_context) == (LogprobKind.RAW, 512, 1000)
    assert (raw.eos_token_ids, raw.max_in_flight, raw.streams) == ((2, 512), 128, False)
    assert any("temperature 1" in note for note in raw.notes)
    processed = VllmInProcessEngine(FakeAsyncLLM(mode="processed_logprobs"), stream=True, eos_token_ids=[7])
    assert processed.capabilities.logprob_kind is LogprobKind.PROCESSED
    assert processed.capabilities.streams
    assert processed.capabilities.eos_token_ids == (7,)
    with pytest.raises(ConfigError, match="logprobs_mode='raw_logits'"):
        VllmInProcessEngine(FakeAsyncLLM(mode="raw_logits"))
    with pytest.raises(ConfigError, match=r"takes an AsyncLLM object of vLLM .* or newer, got str"):
        VllmInProcessEngine("vllm")


async def test_a_loop_that_is_gone_or_stands_still_is_named() -> None:
    """Calls to it would never return."""
    closed, still = asyncio.new_event_loop(), asyncio.new_event_loop()
    closed.close()
    async with world() as w:
        health = await VllmInProcessEngine(w.llm, loop=closed).health()
        assert "is closed" in health.detail
        with pytest.raises(EngineError, match="is not running"):
            await VllmInProcessEngine(w.llm, loop=still).pause()
    still.close()


@both_loops
def test_the_scheduler_over_it(own_loop: bool) -> None:
    """Steps with aborts and updates from disk: every token has the log-probability of its version's weights."""

    def steps(llm: FakeAsyncLLM) -> None:
        # of the first 6 groups, those with even prompts stand still until the others have ended the step
        llm.limit(1, lambda prompt: prompt[0] % 2 == 0)

        async def late_reward(prompt: april.Prompt, response: Response) -> float:
            while rollouts.version.n == 0 and llm.stopped < 6:  # noqa: ASYNC110 - a counter of another loop
                await asyncio.sleep(0)
            return 0.0

        config = april.Config(
            rollout_batch_size=3, n_samples_per_prompt=2, over_sampling_batch_size=6, max_response_len=200, seed=1
        )
        engine = VllmInProcessEngine(llm)
        rollouts = april.RolloutScheduler(
            config=config, prompts=endless(), reward=late_reward, engines=[engine], check=True
        )
        with rollouts:
            continued = 0
            for step in range(6):
                for sample in rollouts.next_batch().samples:
                    is_of_its_weights(sample, "tiny", mean_length=60)
                    continued += len(set(sample.versions[:, 1].tolist())) > 1
                if step == 0:
                    assert llm.output_handler is not None
                    llm.output_handler.get_loop().call_soon_threadsafe(llm.limit)
                rollouts.weight_update(path=f"tiny{step + 1}")
            assert continued >= 6
            assert rollouts.ledger()["tokens"].balanced

    if own_loop:
        with ServerThread() as thread:
            llm = thread.call(made())
            steps(llm)
            thread.call(llm.shut())
    else:
        steps(FakeAsyncLLM())
    assert_nothing_is_left()


def shown(data: bytes | Attachment, name: str = "image") -> Request:
    attachment = data if isinstance(data, Attachment) else Attachment.of(name, data)
    ids = [12, *[PLACEHOLDER] * TOKENS_EACH, 30]
    asked = request(ids, 30, temperature=0.0, banned_ids=(PLACEHOLDER,))
    return structs.replace(asked, attached=(Placed(attachment, 1, TOKENS_EACH, (PLACEHOLDER,)),))


def picture(colour: tuple[int, int, int]) -> tuple[bytes, bytes]:
    """A PNG, and what a model sees of it."""
    image = Image.new("RGB", (4, 4), colour)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue(), image.tobytes()


@both_loops
async def test_images_are_seen_by_the_weights_of_now(own_loop: bool) -> None:
    """Each prompt's own image, on an AsyncLLM that is anywhere; after an update the scheduler of vLLM believes in
    nothing that the old vision tower has seen, which would kill it."""
    async with world(own_loop, images=FakeImages()) as w:
        assert w.engine.capabilities.attachments == ("image",)
        for weights in ("tiny0", "tiny1"):
            for colour in ((255, 0, 0), (0, 0, 255)):
                data, pixels = picture(colour)
                asked = shown(data)
                got = await read(w.engine, asked)
                seen = salt_of([features(pixels, weights)])
                assert got.error is None
                assert got.tokens == uncut(
                    asked.token_ids.tolist(), weights=weights + seen, max_tokens=30, mean_length=60,
                    banned=(PLACEHOLDER,),
                )[0]  # fmt: skip
            await update(w.engine, PolicyVersion(0, 1), "tiny1")


async def test_images_that_cannot_be_had_are_refused(tmp_path: Path) -> None:
    """A file that has gone, bytes that are no image, and an expansion that is not vLLM's are errors with a name."""
    async with world(images=FakeImages()) as w:
        lost = replace(Attachment.of("image", b"x"), data=None, path=str(tmp_path / "gone.png"))
        for data, says in ((lost, "gone.png cannot be read"), (b"no image", "cannot identify image file")):
            got = await read(w.engine, shown(data))
            assert isinstance(got.error, AttachmentError)
            assert says in str(got.error)
        w.llm.images.each += 1
        got = await read(w.engine, shown(picture((1, 2, 3))[0]))
        assert isinstance(got.error, WireError)
        assert "as 9 tokens, but it has 8; does the server's processor" in str(got.error)
        assert not got.tokens


async def test_a_prompt_has_a_salt_per_engine_and_version() -> None:
    """No request finds keys in vLLM's caches that other weights, or an engine before this one, have left there."""
    async with world() as w:
        engines = [w.engine, VllmInProcessEngine(w.llm)]
        for engine in engines:
            await read(engine, request())
            await update(engine, PolicyVersion(0, 1), "tiny1")
            await read(engine, request())
        salts = {run.cache_salt for run in w.llm.runs}
        assert len(salts) == len(w.llm.runs) == 4
        assert "" not in salts


async def test_a_connector_that_may_ignore_salts_is_refused() -> None:
    """A second cache that may answer with keys of older weights is refused as it is before a server."""
    async with world() as w:
        w.llm.vllm_config.kv_transfer_config = SimpleNamespace(kv_connector="ExampleConnector")
        with pytest.raises(ConfigError, match="the AsyncLLM has the KV connector ExampleConnector"):
            VllmInProcessEngine(w.llm)
