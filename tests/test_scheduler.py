"""The scheduler as a trainer sees it: both faces, on real loops, with engines that cost next to nothing."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import april
from april.core.types import DropReason, FinishReason
from april.driver.rewards import Response
from april.engines.decode_cost import DecodeCost
from april.engines.protocol import Capabilities, Request
from april.engines.response_lengths import LognormalLengths
from april.engines.simulated import SimulatedEngine, by_sample_key, synthetic_response
from april.errors import (
    ConfigError,
    DataExhausted,
    EngineError,
    RolloutError,
    SchedulerClosed,
)

LENGTHS = LognormalLengths(20, 0.7, 0.7, seed=5)
FAST = DecodeCost(1e-5, 0.0, 0.0)
VOCAB = 1000


def engine(name: str = "e0", **options: Any) -> SimulatedEngine:
    return SimulatedEngine(name, FAST, by_sample_key(LENGTHS), **({"max_running": 64, "vocab_size": VOCAB} | options))


def config(**changes: Any) -> april.Config:
    values: dict[str, Any] = {
        "rollout_batch_size": 3,
        "n_samples_per_prompt": 2,
        "over_sampling_batch_size": 5,
        "max_response_len": 100,
        "seed": 1,
    }
    return april.Config(**(values | changes))


def endless() -> Iterator[list[int]]:
    number = 0
    while True:
        number += 1
        yield [number % 900 + 1, 7]


async def reward(prompt: april.Prompt, response: Response) -> float:
    return float(len(response.tokens))


def scheduler(**changes: Any) -> april.RolloutScheduler:
    arguments: dict[str, Any] = {
        "config": config(),
        "prompts": endless(),
        "reward": reward,
        "engines": [engine("e0"), engine("e1", stream_interval_s=1e-4)],
        "check": True,
    }
    return april.RolloutScheduler(**(arguments | changes))


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    yield
    gc.collect(1)  # a forgotten task, loop or coroutine complains now
    assert not [t.name for t in threading.enumerate() if t.name == "april-loop"]


def check(batch: april.Batch) -> None:
    for s in batch.samples:
        count = min(LENGTHS.sample(*s.id), 100)
        tokens, logprobs = synthetic_response(s.prompt.token_ids, s.id, 0, count, VOCAB, (0,))
        if s.finish is FinishReason.STOP:
            tokens[-1] = 0
        assert s.tokens.tolist() == tokens.tolist()
        assert s.logprobs.tolist() == logprobs.tolist()
        assert s.reward == count


# ---------------------------------------------------------------- the two faces


def test_the_blocking_face() -> None:
    """Batches, versions, books, story and repr, for a trainer without an event loop."""
    with scheduler() as rollouts:
        delivered = []
        for step in range(6):
            batch = rollouts.next_batch()
            check(batch)
            assert len(batch) == 6
            assert batch.version == rollouts.version == (0, step)
            assert rollouts.weight_update() == (0, step + 1)
            delivered += [s.id for s in batch.samples]
        assert len(set(delivered)) == 36
        books = rollouts.ledger()
        assert books["tokens"].balanced
        assert books["prompts"].balanced
        assert books["prompts"].delivered == 18
        assert books["tokens"].delivered <= books["tokens"].observed
        rollouts.validate()
        assert [e.name for e in rollouts.engines] == ["e0", "e1"]
        assert "leased in batch" in rollouts.story(*delivered[0])
        assert "version=0.6" in repr(rollouts)
        assert repr(rollouts).startswith("<RolloutScheduler <RolloutCore")


@pytest.mark.asyncio
async def test_the_async_face() -> None:
    """The same for a trainer with an event loop of its own, which is never blocked."""
    rollouts = scheduler()
    try:
        for step in range(4):
            batch = await rollouts.anext_batch()
            check(batch)
            transfers = []
            assert await rollouts.aweight_update(transfer=lambda done=transfers: done.append(1)) == (0, step + 1)
            assert transfers == [1]
        result = await rollouts.aevaluate([[5, 6]], n_samples=2)
        assert result.rewards.shape == (1, 2)
    finally:
        await asyncio.to_thread(rollouts.close)


@pytest.mark.asyncio
@pytest.mark.parametrize("turns", range(6))
async def test_a_cancelled_anext_batch_loses_nothing(turns: int) -> None:
    """Wherever a trainer's loop gives up, between two threads included: the next call gets the same batch."""
    rollouts = scheduler(engines=[engine()])
    try:
        seen = []
        for _ in range(12):
            waiter = asyncio.create_task(rollouts.anext_batch())
            for _ in range(turns):
                await asyncio.sleep(0)
            if turns == 5:  # the batch is there, and this loop has not looked yet
                while not rollouts._thread.call(lambda: rollouts._driver.core.leased):
                    pass
            waiter.cancel()
            outcome = (await asyncio.gather(waiter, return_exceptions=True))[0]
            batch = outcome if isinstance(outcome, april.Batch) else await rollouts.anext_batch()
            check(batch)
            seen.append(batch.id)
            await rollouts.aweight_update()
        assert seen == list(range(12))
        assert not rollouts._thread.call(lambda: dict(rollouts._driver.core.leased))
    finally:
        await asyncio.to_thread(rollouts.close)


def test_an_interrupted_next_batch_loses_nothing() -> None:
    """Ctrl-C while the trainer waits, as in a notebook: the next call returns the batch."""
    started, release = threading.Event(), threading.Event()

    async def slow(prompt: april.Prompt, response: Response) -> float:
        started.set()
        await asyncio.to_thread(release.wait)
        return float(len(response.tokens))

    def interrupt() -> None:
        started.wait()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with scheduler(reward=slow) as rollouts:
        waker = threading.Thread(target=interrupt)
        waker.start()
        with pytest.raises(KeyboardInterrupt):
            rollouts.next_batch()
        waker.join()
        release.set()
        batch = rollouts.next_batch()
        check(batch)
        assert batch.id == 0


# ---------------------------------------------------------------- weight updates


def test_the_transfer_runs_in_the_trainers_thread_while_engines_are_paused() -> None:
    """transfer is called where weight_update was called; its exception leaves version and generation alone."""
    with scheduler() as rollouts:
        rollouts.next_batch()
        seen: list[Any] = []

        def transfer() -> None:
            seen.append((threading.current_thread(), [e._paused for e in rollouts.engines], rollouts.version))  # type: ignore[attr-defined]

        assert rollouts.weight_update(transfer=transfer) == (0, 1)
        assert seen == [(threading.current_thread(), [True, True], (0, 0))]

        def fails() -> None:
            raise OSError("the network is down")

        rollouts.next_batch()
        with pytest.raises(OSError, match="network"):
            rollouts.weight_update(transfer=fails)
        assert rollouts.version == (0, 1)
        assert not any(e._paused for e in rollouts.engines)  # type: ignore[attr-defined]
        check(rollouts.next_batch())
        assert rollouts.weight_update("a directory") == (0, 2)


def test_an_interrupted_transfer_leaves_the_engines_open() -> None:
    """Ctrl-C inside transfer: the engines are resumed, the version stays."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    with scheduler() as rollouts:
        rollouts.next_batch()
        with pytest.raises(KeyboardInterrupt):
            rollouts.weight_update(transfer=interrupted)
        assert rollouts.version == (0, 0)
        check(rollouts.next_batch())
        rollouts.weight_update()


def test_an_engine_that_cannot_load() -> None:
    """The engine's error comes out of weight_update; nobody waits for a transfer that will not be asked for."""

    class Fails(SimulatedEngine):
        async def pause(self) -> None:
            raise EngineError("cannot pause")

    with scheduler(engines=[Fails("e0", FAST, by_sample_key(LENGTHS), max_running=64, vocab_size=VOCAB)]) as rollouts:
        with pytest.raises(EngineError, match="cannot pause"):
            rollouts.weight_update(transfer=lambda: pytest.fail("the engine is not paused"))
        check(rollouts.next_batch())


# ---------------------------------------------------------------- evaluation


def test_evaluation_touches_nothing_and_repeats_exactly() -> None:
    """Between and during steps: same result, no carry and no count of training changed."""
    held_out = [[i, 8] for i in range(1, 6)]

    def books(r: april.RolloutScheduler) -> Any:
        return r.ledger(), r.version, repr(r)

    with scheduler() as rollouts:
        first = rollouts.evaluate(held_out, n_samples=3)
        rollouts.next_batch()
        before = books(rollouts)
        second = rollouts.evaluate(held_out, n_samples=3)
        assert books(rollouts) == before
        rollouts.weight_update()
        third = rollouts.evaluate(iter(held_out), n_samples=3)
        check(rollouts.next_batch())

    assert first.rewards.shape == (5, 3)
    assert first.rewards.tolist() == [[min(100, LENGTHS.sample(g, i)) for i in range(3)] for g in range(5)]
    for other in (second, third):
        assert other.rewards.tolist() == first.rewards.tolist()
        assert [[r.tokens.tolist() for r in row] for row in other.responses] == [
            [r.tokens.tolist() for r in row] for row in first.responses
        ]
    assert first.reward_mean == first.rewards.mean()
    means = first.rewards.mean(axis=1)
    assert first.reward_standard_error == pytest.approx(means.std(ddof=1) / np.sqrt(5))


def test_evaluation_while_a_step_waits() -> None:
    """Training requests are parked, the engines are the evaluation's, then the step goes on exactly."""
    holding = threading.Event()
    go = threading.Event()

    def judge(prompt: april.Prompt, response: Response) -> float:
        if not go.is_set():
            holding.set()
            go.wait()
        return float(len(response.tokens))

    with scheduler(reward=judge) as rollouts:
        batches: list[april.Batch] = []
        trainer = threading.Thread(target=lambda: batches.append(rollouts.next_batch()))
        trainer.start()
        holding.wait()
        evaluation = threading.Thread(target=lambda: batches.append(rollouts.evaluate([[1, 2]])))  # type: ignore[arg-type]
        evaluation.start()
        go.set()
        trainer.join()
        evaluation.join()
        check(next(b for b in batches if isinstance(b, april.Batch)))


def test_evaluation_has_its_own_sampling() -> None:
    """temperature, top_p, max_tokens and seed of the call reach the engine; the rest is that of training."""
    seen: list[Request] = []

    class Spy(SimulatedEngine):
        def generate(self, request: Request) -> Any:
            seen.append(request)
            return super().generate(request)

    spy = Spy("e0", FAST, by_sample_key(LENGTHS), max_running=64, vocab_size=VOCAB)
    settings = config(sampling={"stop_token_ids": [9], "min_tokens": 2}, allow_mismatch=True)
    with scheduler(engines=[spy], config=settings) as rollouts:
        rollouts.next_batch()
        training = {r.attempt_id for r in seen}
        seen.clear()
        rollouts.evaluate([[1]], temperature=0.0, top_p=0.5, max_tokens=11, seed=3)
        rollouts.evaluate([[1]], seed=4)
    first, second = (r.sampling for r in seen)
    assert (first.temperature, first.top_p, first.max_tokens, first.min_tokens) == (0.0, 0.5, 11, 2)
    assert (second.temperature, second.top_p, second.max_tokens, second.min_tokens) == (1.0, 1.0, 100, 2)
    assert first.stop_token_ids == second.stop_token_ids == (9,)
    assert first.seed != second.seed
    ids = {r.attempt_id for r in seen}
    assert len(ids) == 2
    assert not ids & training
    assert len({len(i) for i in ids | training}) == 1


def test_evaluation_of_several_turns() -> None:
    """The same rollout function; a call without room ends with LENGTH as in training; group rewards work too."""

    async def rollout(prompt: april.Prompt, llm: april.LLM) -> int:
        done = await llm.generate()
        done = await llm.generate([*done.conversation, 901, 902])
        done = await llm.generate([*done.conversation, *range(400, 500)])
        assert done.finish is FinishReason.LENGTH
        return len(done.conversation)

    async def group_reward(prompt: april.Prompt, responses: list[Response]) -> list[float]:
        assert all(r.output == 101 == 1 + len(r.tokens) for r in responses)
        assert all(r.loss_mask.sum() < len(r.tokens) for r in responses)
        return [1.0, 2.0]

    with scheduler(rollout=rollout, reward=None, group_reward=group_reward) as rollouts:
        assert rollouts.evaluate([[1], [2]], n_samples=2).rewards.tolist() == [[1.0, 2.0]] * 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"n_samples": 0}, "n_samples must be at least 1"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"temperature": -1.0}, "temperature must be a finite number"),
        ({"top_p": 0.0}, "top_p must be in"),
        ({"prompts": []}, "there are no prompts"),
        ({"prompts": "text"}, "must be an iterable of prompts"),
        ({"prompts": [[1], [5000]]}, "prompt 1: token id 5000"),
    ],
    ids=str,
)
def test_evaluations_that_are_refused(arguments: dict[str, Any], words: str) -> None:
    """A ConfigError before anything is paused."""
    with scheduler() as rollouts, pytest.raises(ConfigError, match=words):
        rollouts.evaluate(**({"prompts": [[1]]} | arguments))


def test_evaluations_that_fail_name_the_prompt() -> None:
    """Whatever a function raises comes out as RolloutError with its cause, and training goes on."""

    def judge(prompt: april.Prompt, response: Response) -> float:
        if prompt.token_ids[0] == 2:
            raise LookupError("no answer key")
        if prompt.token_ids[0] == 3:
            raise SystemExit(1)
        return float("nan") if prompt.token_ids[0] == 4 else float(len(response.tokens))

    async def rollout(prompt: april.Prompt, llm: april.LLM) -> None:
        if prompt.token_ids[0] == 5:
            return
        if prompt.token_ids[0] == 6:
            raise SystemExit(1)
        done = await llm.generate()
        if prompt.token_ids[0] == 8:
            await llm.generate(done.conversation[1:])

    long = [1] * 200
    prompts = (april.Prompt(np.array([7, i + 100], np.int32)) for i in range(1000))
    engines = [engine(max_context=150)]
    with scheduler(reward=judge, rollout=rollout, prompts=prompts, engines=engines) as rollouts:
        for bad, words in (
            ([2], "evaluation prompt 1: the reward function raised LookupError: no answer key"),
            ([3], "evaluation prompt 1: the reward function raised SystemExit: 1"),
            ([4], "evaluation prompt 1: the reward of g1.s0 is nan"),
            ([5], "evaluation prompt 1: the rollout function generated nothing"),
            ([6], "evaluation prompt 1: the rollout function raised SystemExit: 1"),
            ([8], "evaluation prompt 1: llm.generate was given tokens that do not begin"),
            (long, "evaluation prompt 1: it has 200 tokens, which leaves no room"),
        ):
            with pytest.raises(RolloutError) as caught:
                rollouts.evaluate([[1], bad, [9]])
            assert words in str(caught.value)
            if bad == [2]:
                assert isinstance(caught.value.__cause__, LookupError)
        check(rollouts.next_batch())
    with scheduler(reward=None) as rollouts, pytest.raises(RolloutError, match="needs a reward function"):
        rollouts.evaluate([[1]])


# ---------------------------------------------------------------- rewards in threads


def test_plain_reward_functions_run_in_threads() -> None:
    """A blocking reward blocks neither the loop nor the engines, nor the other rewards."""
    together = threading.Barrier(2, timeout=30)
    names: set[str] = set()

    def judge(prompt: april.Prompt, response: Response) -> float:
        names.add(threading.current_thread().name)
        together.wait()  # two must run at the same time to get past this
        return float(len(response.tokens))

    with scheduler(reward=judge, config=config(over_sampling_batch_size=3)) as rollouts:
        check(rollouts.next_batch())
    assert "april-loop" not in names
    assert threading.current_thread().name not in names


class CallableReward:
    """An object with an async __call__."""

    async def __call__(self, prompt: april.Prompt, response: Response) -> float:
        assert threading.current_thread().name == "april-loop"
        return float(len(response.tokens))


@pytest.mark.parametrize("kind", ["object", "lambda", "numpy"])
def test_kinds_of_reward_functions(kind: str) -> None:
    """Async objects, plain functions that return an awaitable, numpy scalars."""
    functions: dict[str, Any] = {
        "object": CallableReward(),
        "lambda": lambda p, r: reward(p, r),
        "numpy": lambda p, r: np.float32(len(r.tokens)),
    }
    with scheduler(reward=functions[kind]) as rollouts:
        check(rollouts.next_batch())


@pytest.mark.parametrize("error", [StopIteration(), SystemExit(4), KeyError("x")], ids=repr)
def test_a_plain_reward_function_that_raises(error: BaseException) -> None:
    """Whatever it raises is a named failure; StopIteration and SystemExit do not hang or end the run."""
    raised: list[int] = []

    def judge(prompt: april.Prompt, response: Response) -> float:
        if not raised:
            raised.append(1)
            raise error
        return float(len(response.tokens))

    with scheduler(reward=judge) as rollouts:
        batch = rollouts.next_batch()
        check(batch)
        assert batch.metrics["failed_samples"] == 1
        assert not rollouts.ledger()["tokens"].dropped[DropReason.FAILED]


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("what", ["next_batch", "weight_update", "evaluate", "close"])
def test_blocking_calls_inside_a_reward_are_refused(asynchronous: bool, what: str) -> None:
    """They would wait for the very reward that makes them: a clear error, no deadlock; looking inside is allowed."""
    errors: list[BaseException] = []
    looked: list[str] = []
    holder: list[april.RolloutScheduler] = []

    def judge(prompt: april.Prompt, response: Response) -> float:
        (rollouts,) = holder
        looked.append(repr(rollouts) + rollouts.story(0, 0) + str(rollouts.ledger()))
        try:
            getattr(rollouts, what)(*([[[1]]] if what == "evaluate" else []))
        except RolloutError as error:
            errors.append(error)
        return float(len(response.tokens))

    async def async_judge(prompt: april.Prompt, response: Response) -> float:
        return judge(prompt, response)

    with scheduler(reward=async_judge if asynchronous else judge) as rollouts:
        holder.append(rollouts)
        check(rollouts.next_batch())
    assert errors
    assert all("inside a rollout or reward function" in str(e) for e in errors)
    assert all(look.startswith("<RolloutScheduler <RolloutCore") for look in looked)


def test_the_async_face_inside_a_rollout_function_is_refused() -> None:
    """Awaiting the next batch inside a sample that the batch needs would wait for ever as well."""
    holder: list[april.RolloutScheduler] = []

    async def rollout(prompt: april.Prompt, llm: april.LLM) -> None:
        await llm.generate()
        with pytest.raises(RolloutError, match="inside a rollout or reward function"):
            await holder[0].anext_batch()

    with scheduler(rollout=rollout) as rollouts:
        holder.append(rollouts)
        check(rollouts.next_batch())


# ---------------------------------------------------------------- the end


def test_close_is_idempotent_and_final() -> None:
    """After close everything raises SchedulerClosed, repr says so, and close does nothing."""
    rollouts = scheduler()
    rollouts.next_batch()
    rollouts.close()
    rollouts.close()
    assert repr(rollouts) == "<RolloutScheduler closed>"
    for call in (
        rollouts.next_batch, rollouts.weight_update, rollouts.ledger, rollouts.validate,
        lambda: rollouts.evaluate([[1]]), lambda: rollouts.story(0, 0),
        lambda: rollouts.weight_update(transfer=lambda: pytest.fail("closed")),
        lambda: asyncio.run(rollouts.anext_batch()), lambda: asyncio.run(rollouts.aevaluate([[1]])),
    ):  # fmt: skip
        with pytest.raises(SchedulerClosed, match="closed"):
            call()


@pytest.mark.parametrize("what", ["next_batch", "evaluate", "transfer"])
def test_close_while_another_thread_waits(what: str) -> None:
    """Who waits gets SchedulerClosed or the engine's error, at once; nothing is left behind."""
    inside = threading.Event()
    outcome: list[BaseException] = []

    async def never(prompt: april.Prompt, response: Response) -> float:
        inside.set()
        await asyncio.Event().wait()
        return 0.0

    release = threading.Event()

    def transfer() -> None:
        inside.set()
        release.wait()

    rollouts = scheduler(reward=never)

    def wait() -> None:
        try:
            if what == "transfer":
                rollouts.weight_update(transfer=transfer)
            elif what == "evaluate":
                rollouts.evaluate([[1]])
            else:
                rollouts.next_batch()
        except april.AprilError as error:
            outcome.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    inside.wait()
    rollouts.close()
    release.set()
    waiter.join()
    assert len(outcome) == 1
    assert isinstance(outcome[0], SchedulerClosed)


def test_close_waits_for_plain_rewards_that_run() -> None:
    """A thread cannot be cancelled: close returns when the running reward function has returned."""
    inside, release = threading.Event(), threading.Event()
    done: list[int] = []

    def judge(prompt: april.Prompt, response: Response) -> float:
        inside.set()
        release.wait()
        done.append(1)
        return 1.0

    rollouts = scheduler(reward=judge)

    def train() -> None:
        with pytest.raises(SchedulerClosed):
            rollouts.next_batch()
        done.append(0)

    trainer = threading.Thread(target=train)
    trainer.start()
    inside.wait()
    closer = threading.Thread(target=rollouts.close)
    closer.start()
    trainer.join()  # told at once
    assert done == [0]
    release.set()
    closer.join()
    assert 1 in done


def test_an_exception_in_the_with_block_closes() -> None:
    """The trainer's own error comes out."""
    rollouts = scheduler()
    with pytest.raises(ZeroDivisionError), rollouts:
        rollouts.next_batch().lengths.tolist()[0] / 0
    assert repr(rollouts) == "<RolloutScheduler closed>"


def test_an_interpreter_that_exits_without_close() -> None:
    """A script that forgets close ends at once, with its own exit status and without noise."""
    code = """
import asyncio, april, sys
from april.engines.decode_cost import DecodeCost
from april.engines.simulated import SimulatedEngine
engine = SimulatedEngine("e", DecodeCost(1e-3, 0, 0), lambda r: 10 + 1000 * r.sample_key[0], max_running=8)
config = april.Config(rollout_batch_size=1, n_samples_per_prompt=1, over_sampling_batch_size=3, max_response_len=5000)
rollouts = april.RolloutScheduler(config, prompts=[[1], [2], [3]], engines=[engine])
print(len(rollouts.next_batch()))
sys.exit(3)
"""
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (3, "1\n", "")


def test_the_end_of_the_data() -> None:
    """The last batch may be short, then DataExhausted."""
    with scheduler(prompts=[[i] for i in range(1, 5)]) as rollouts:
        assert [len(rollouts.next_batch().group_sizes) for _ in range(2)] == [3, 1]
        with pytest.raises(DataExhausted):
            rollouts.next_batch()


def test_a_bad_prompt_names_its_position_and_loses_no_good_one() -> None:
    """Prompts before and after the bad one are all delivered."""
    prompts: list[Any] = [[1], [2], [3], [4], "oops", [6], [7]]
    with scheduler(prompts=prompts, config=config(over_sampling_batch_size=3)) as rollouts:
        batches = [rollouts.next_batch()]
        with pytest.raises(RolloutError, match="prompt 4 is a str"):
            rollouts.next_batch()
        batches.append(rollouts.next_batch())
        delivered = {int(s.prompt.token_ids[0]) for b in batches for s in b.samples}
        assert delivered == {1, 2, 3, 4, 6, 7}


# ---------------------------------------------------------------- what is refused at construction


class NoPartials(SimulatedEngine):
    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, returns_partials=False)


def no_partials() -> SimulatedEngine:
    return NoPartials("e0", FAST, by_sample_key(LENGTHS), max_running=64, vocab_size=VOCAB)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"group_reward": reward}, "give reward or group_reward, not both"),
        ({"reward": 1.0}, "reward must be a function, got float"),
        ({"rollout": "single_turn"}, "rollout must be a function, got str"),
        ({"engines": []}, "at least one engine"),
        ({"engines": [engine("a"), engine("b"), engine("a")]}, r"names must be unique, got \['a', 'b', 'a'\]"),
        (
            {"engines": [engine("a"), engine("b", max_context=100)]},
            "max_response_len=100 leaves no room for a prompt in the context of 100 tokens of engine b",
        ),
        (
            {"config": config(sampling={"stop_token_ids": [3, VOCAB]})},
            "sampling.stop_token_ids: 1000 is outside the vocabulary of 1000 of engine e0",
        ),
        ({"engines": [no_partials()]}, "engine e0 hands over nothing.*set over_sampling_batch_size"),
        (
            {"engines": [no_partials()], "config": config(over_sampling_batch_size=3, refill="sample")},
            "engine e0 hands over nothing.*refill: none",
        ),
        ({"prompts": "text"}, "prompts must be an iterable"),
        ({"prompts": None}, "prompts must be an iterable"),
        ({"engines": None}, "needs a model"),
        ({"engines": None, "model": object(), "config": config(engine={"kind": "simulated"})}, "takes no model object"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_contradictions_are_refused_before_anything_starts(arguments: dict[str, Any], words: str) -> None:
    """A ConfigError that names the setting; no thread is left (see the fixture)."""
    with pytest.raises(ConfigError, match=words):
        scheduler(**arguments)


def test_an_engine_without_partials_is_fine_when_nothing_is_cut() -> None:
    """With N' = N and refill none nothing is aborted at the end of a step."""
    with scheduler(engines=[no_partials()], config=config(over_sampling_batch_size=3)) as rollouts:
        check(rollouts.next_batch())


def test_engines_from_the_configuration() -> None:
    """Without engine objects the scheduler builds what config.engine describes."""
    settings = config(engine={"kind": "simulated", "count": 2, "median_len": 3, "slots": 8}, max_response_len=4)
    with scheduler(config=settings, engines=None) as rollouts:
        assert [e.name for e in rollouts.engines] == ["simulated0", "simulated1"]
        assert len(rollouts.next_batch()) == 6
