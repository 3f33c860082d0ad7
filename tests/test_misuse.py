"""Each misuse gives one clear sentence: before any work starts where it can be known, else with the sample named.

``test_config.py`` has the rest of the settings, ``test_driver_functions.py`` that of the rollout functions,
``test_driver.py`` and ``test_wire_checks.py`` that of the engines.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from real_schedulers import FAST, LENGTHS, assert_nothing_is_left, check, config, engine, scheduler
from virtual_rollouts import VOCAB, RecordingEngine, Rollouts, on_virtual_time, table, virtual

import april
from april.core.types import DropReason, Prompt, SampleId
from april.driver.llm import LLM
from april.driver.rewards import Response
from april.engines.protocol import Capabilities, Chunk, EngineFinish, Request
from april.engines.simulated.engine import SimulatedEngine, by_sample_key
from april.errors import AprilError, CheckpointError, ConfigError, RolloutError

BASE: dict[str, Any] = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "max_response_len": 100}


# ---------------------------------------------------------------- known before any work starts

SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"rollout_batchsize": 2}, r"rollout_batchsize: unknown setting; do you mean rollout_batch_size\?"),
    ({"colour": 2}, "colour: unknown setting; see april.Config for the names"),
    ({"temperature": 0.7}, r"temperature: unknown setting; do you mean sampling.temperature\?"),
    ({"sampling": {"temprature": 1}}, r"sampling.temprature: unknown setting; do you mean sampling.temperature\?"),
    ({"engine": {"kind": "transformers", "slot": 1}}, r"engine.slot: unknown setting; do you mean engine.slots\?"),
    ({"max_tokens": 9}, r"max_tokens: unknown setting; do you mean max_response_len\?"),
    ({"max_new_tokens": 9}, r"max_new_tokens: unknown setting; do you mean max_response_len\?"),
    ({"stop_strings": ["a"]}, r"stop_strings: unknown setting; do you mean sampling.stop\?"),
    ({"n": 4}, "n: every sample of a group is a request of its own; set n_samples_per_prompt"),
    (
        {"engine": {"kind": "vlm"}},
        r"engine.kind: april has no engine 'vlm'; it has 'transformers', 'simulated', 'vllm', 'sglang', 'openai'; "
        r"do you mean vllm\?",
    ),
    ({"engine": "vlm"}, "engine: expected a mapping of settings, got 'vlm'"),
    ({"sampling": 0.7}, "sampling: expected a mapping of settings, got 0.7"),
    ({"over_sampling_batch_size": 0}, "over_sampling_batch_size: input should be greater than or equal to 1, got 0"),
    ({"n_samples_per_prompt": 0}, "n_samples_per_prompt: input should be greater than or equal to 1, got 0"),
    ({"rollout_batch_size": 0}, "rollout_batch_size: input should be greater than or equal to 1, got 0"),
    ({"epochs": 0}, "epochs: input should be greater than or equal to 1, got 0"),
    ({"on_data_end": "stop"}, "on_data_end: input should be 'short', 'wait' or 'wrap', got 'stop'"),
    (
        {"epochs": 2, "on_data_end": "wrap"},
        "epochs=2 ends, and on_data_end=wrap never does; leave out one of them",
    ),
    (
        {"over_sampling_batch_size": 9, "max_age": 3},
        "over_sampling_batch_size=9 holds more groups than max_age=3 lets april deliver in time, which is 8; raise "
        "max_age or set on_stale",
    ),
    ({"max_filtered_groups": 0}, "max_filtered_groups: input should be greater than or equal to 1, got 0"),
]


@pytest.mark.parametrize(("change", "sentence"), SETTINGS, ids=[next(iter(c)) for c, _ in SETTINGS])
def test_settings(change: dict[str, Any], sentence: str) -> None:
    """A ConfigError of exactly this sentence, from keywords and from a mapping."""
    for make in (lambda values: april.Config(**values), april.Config.from_mapping):
        with pytest.raises(ConfigError) as caught:
            make(BASE | change)
        assert re.fullmatch(sentence, str(caught.value)), str(caught.value)


class Untouched:
    """Prompts that nobody may draw from."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        pytest.fail("work has started")


async def graded(prompt: april.Prompt, response: Response) -> float:
    pytest.fail("work has started")


class NoPartials(SimulatedEngine):
    """Loses what an aborted request had."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, returns_partials=False)


def no_partials() -> SimulatedEngine:
    return NoPartials("e0", FAST, by_sample_key(LENGTHS), max_running=64, vocab_size=VOCAB)


def test_an_engine_without_partials_is_fine_when_nothing_is_cut() -> None:
    """With N' = N and refill none nothing is aborted at the end of a step."""
    with scheduler(engines=[no_partials()], config=config(over_sampling_batch_size=3)) as rollouts:
        check(rollouts.next_batch())


ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"config": BASE}, "config must be an april.Config, got dict; Config.from_mapping and Config.from_yaml make one"),
    ({"engines": "vllm"}, "engines must be a list of engine objects, got str"),
    ({"engines": engine()}, "engines must be a list of engine objects, got SimulatedEngine"),
    ({"engines": [engine(), "e1"]}, r"engines: str is not an engine \(april.engines.protocol.Engine\)"),
    ({"engines": []}, "engines: at least one engine is needed"),
    ({"engines": None}, ".*needs a model.*"),
    ({"engines": None, "model": object(), "config": config(engine={"kind": "simulated"})}, ".*takes no model object.*"),
    ({"engines": [engine("a"), engine("b"), engine("a")]}, r".*names must be unique, got \['a', 'b', 'a'\].*"),
    (
        {"engines": [engine("a"), engine("b", max_context=100)]},
        "max_response_len=100 leaves no room for a prompt in the context of 100 tokens of engine b; .*",
    ),
    ({"engines": [no_partials()]}, "engine e0 hands over nothing.*set over_sampling_batch_size.*"),
    (
        {"engines": [no_partials()], "config": config(over_sampling_batch_size=3, refill="sample")},
        "engine e0 hands over nothing.*refill: none.*",
    ),
    ({"group_reward": graded}, "give reward or group_reward, not both"),
    ({"reward": 1.0}, "reward must be a function, got float"),
    ({"rollout": "single_turn"}, "rollout must be a function, got str"),
    ({"filter": True}, "filter must be a function, got bool"),
    ({"prompts": "text"}, "prompts must be an iterable of prompts, got str"),
    ({"prompts": None}, "prompts must be an iterable of prompts, got NoneType"),
    ({"prompts": 5}, "prompts must be an iterable of prompts, got int"),
    (
        {"filter": april.rewards_differ, "reward": None},
        "filter=rewards_differ would reject every group; it needs a reward and n_samples_per_prompt above 1",
    ),
    (
        {"filter": april.rewards_differ, "config": config(n_samples_per_prompt=1)},
        "filter=rewards_differ would reject every group; it needs a reward and n_samples_per_prompt above 1",
    ),
    (
        {"config": config(epochs=2)},
        r"prompts can be iterated only once \(Untouched\), and several epochs are wanted; give a list or a data set, "
        "or an object whose __iter__ begins anew",
    ),
    (
        {"config": config(sampling={"stop_token_ids": [VOCAB]})},
        "sampling.stop_token_ids: 1000 is outside the vocabulary of 1000 of engine e0",
    ),
]


@pytest.mark.parametrize(("change", "sentence"), ARGUMENTS, ids=[s[:30] for _, s in ARGUMENTS])
def test_arguments_of_the_scheduler(change: dict[str, Any], sentence: str) -> None:
    """Refused by the constructor with exactly this sentence: no thread, no prompt, no request."""
    with pytest.raises(ConfigError) as caught:
        scheduler(**({"prompts": Untouched(), "reward": graded} | change))
    assert re.fullmatch(sentence, str(caught.value)), str(caught.value)
    assert_nothing_is_left()


CALLS: list[tuple[Callable[[april.RolloutScheduler], Any], type[AprilError], str]] = [
    (lambda r: r.load_state_dict("x"), CheckpointError, r"this is not a state that april's state_dict\(\) gave"),
    *(
        (
            lambda r, batch=batch: r.state_dict(batch), CheckpointError,
            f"trained_through={batch!r} must be the id of a batch, or -1; the batches delivered so far are 0 to 0",
        )
        for batch in ("x", 7)
    ),
    (lambda r: r.weight_update(transfer=3), ConfigError, "weight_update: transfer must be a function, got int"),
    (lambda r: r.evaluate(None), ConfigError, "evaluate: prompts must be an iterable of prompts, got NoneType"),
    (lambda r: r.evaluate("text"), ConfigError, "evaluate: prompts must be an iterable of prompts, got str"),
    (lambda r: r.evaluate([]), ConfigError, "evaluate: there are no prompts"),
    (
        lambda r: r.evaluate([[1], [5000]]), ConfigError,
        "prompt 1: token id 5000 is outside the engine's vocabulary of 1000",
    ),
    *(
        (lambda r, name=name, value=value: r.evaluate([[1]], **{name: value}), ConfigError, f"evaluate: {words}")
        for name, value, words in (
            ("n_samples", "2", "n_samples must be a whole number and at least 1, got '2'"),
            ("n_samples", 0, "n_samples must be a whole number and at least 1, got 0"),
            ("n_samples", True, "n_samples must be a whole number and at least 1, got True"),
            ("max_tokens", 0, "max_tokens must be a whole number and at least 1, got 0"),
            ("max_tokens", 2.5, "max_tokens must be a whole number and at least 1, got 2.5"),
            ("seed", -1, "seed must be a whole number and at least 0, got -1"),
            ("seed", "a", "seed must be a whole number and at least 0, got 'a'"),
            ("temperature", "hot", "temperature must be a number, got 'hot'"),
            ("temperature", -1.0, "temperature must be a finite number .*"),
            ("top_p", 0.0, "top_p must be in .*"),
        )
    ),
    (
        lambda r: r.weight_update(lambda: None),
        ConfigError,
        "weight_update: path must be the name of a directory, got function; a function that hands the weights over is "
        "given as transfer=, a model that is read in place not at all",
    ),
    (lambda r: r.extend(5), ConfigError, "prompts must be an iterable of prompts, got int"),
]


@pytest.mark.parametrize(("call", "error", "sentence"), CALLS, ids=[s[:40] for _, _, s in CALLS])
def test_arguments_of_calls(call: Callable[[Any], Any], error: type[AprilError], sentence: str) -> None:
    """Refused with exactly this sentence; the run goes on with equal books."""
    with scheduler() as rollouts:
        rollouts.next_batch()
        before = rollouts.version, rollouts.ledger()["prompts"].delivered
        with pytest.raises(error) as caught:
            call(rollouts)
        assert re.fullmatch(sentence, str(caught.value)), str(caught.value)
        assert (rollouts.version, rollouts.ledger()["prompts"].delivered) == before
        rollouts.weight_update()
        assert rollouts.next_batch().id == 1
        rollouts.validate()
    assert_nothing_is_left()


# ---------------------------------------------------------------- known when it happens: the sample is named


def run(
    caplog: pytest.LogCaptureFixture, sentence: str, *reasons: DropReason, group_stays: bool = False, **arguments: Any
) -> Rollouts:
    """Three steps of N = 2, n = 2 in which group 1, sample 0 is misused; the others are delivered, the books exact."""
    made: list[Rollouts] = []

    async def program() -> None:
        lengths = table({(0, 0): 7, (1, 1): 6}, 5)
        engines = [arguments.pop("engine", RecordingEngine)(lengths)]
        rollouts = Rollouts(lengths, n=2, samples=2, engines=engines, **arguments)
        made.append(rollouts)
        delivered: list[int] = []
        for _ in range(3):
            batch = await rollouts.step()  # checks tokens, log-probabilities, provenance, ledger
            assert batch.group_sizes == (2, 2)
            delivered += batch.group_ids[::2].tolist()
        assert sorted(delivered) == ([0, 1, 2, 3, 4, 5] if group_stays else [0, 2, 3, 4, 5, 6])
        assert set(rollouts.dropped) == set(reasons)
        assert rollouts.core.prompts.as_dict()["dropped"] == ({} if group_stays else {"failed": 1})
        await rollouts.close()

    with caplog.at_level(logging.WARNING, "april"):
        virtual(program)
    sentences = [record.getMessage() for record in caplog.records]
    assert any(re.fullmatch(rf"{sentence}( \(line \d+ of test_misuse.py\))?", s) for s in sentences), sentences
    return made[0]


def of_sample_1_0(value: Any) -> Callable[..., Any]:
    async def reward(prompt: Prompt, response: Response) -> Any:
        return value if response.sample_id == (1, 0) else 1.0

    return reward


REWARDS: dict[str, tuple[Any, str]] = {
    "nan": (float("nan"), "the reward of g1.s0 is nan; expected a finite number"),
    "infinite": (np.float32(np.inf), "the reward of g1.s0 is inf; expected a finite number"),
    "missing": (None, r"the reward of g1.s0 is None \(NoneType\); expected a number"),
    "text": ("good", r"the reward of g1.s0 is 'good' \(str\); expected a number"),
}


@pytest.mark.parametrize("kind", list(REWARDS))
def test_rewards(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """NaN or missing: one sentence with the sample, its group is dropped as failed, everything else is delivered."""
    value, sentence = REWARDS[kind]
    failed = rf"reward function failed for g1\.s0: {sentence}"
    rollouts = run(caplog, failed, DropReason.FAILED, reward=of_sample_1_0(value))
    assert f"group dropped (failed): g1.s0: the reward function failed: {sentence}".replace(
        "\\", ""
    ) in rollouts.core.story(SampleId(1, 0))


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ([1.0], r"the group reward of group 1 returned \[1.0\]; expected 2 numbers, one per sample"),
        (None, "the group reward of group 1 returned None; expected 2 numbers, one per sample"),
        ([float("nan"), 1.0], "the reward of g1.s0 is nan; expected a finite number"),
    ],
)
def test_group_rewards(answer: Any, sentence: str, caplog: pytest.LogCaptureFixture) -> None:
    """Wrong length, missing or NaN: one sentence, and that group only."""

    async def group_reward(prompt: Prompt, responses: list[Response]) -> Any:
        return answer if responses[0].sample_id.group == 1 else [1.0] * len(responses)

    run(caplog, rf"reward function failed for g1\.s0: {sentence}", DropReason.FAILED, group_reward=group_reward)


@on_virtual_time
async def test_a_rollout_function_that_never_generates() -> None:
    """If all do so the trainer is told, with a sample."""

    async def rollout(prompt: Prompt, llm: LLM) -> None:
        return None

    rollouts = Rollouts(table({}), n=2, samples=2, rollout=rollout)
    with pytest.raises(RolloutError) as caught:
        await rollouts.driver.next_batch()
    assert str(caught.value) == (
        "8 groups failed in a row, the last one: g7.s0: "
        "the rollout function returned without a call of llm.generate; await at least one"
    )


def test_prompts_with_ids_outside_the_vocabulary() -> None:
    """Named by position when drawn; the prompts around it are delivered."""
    prompts = [[1, 2], [3, VOCAB], [4, 5]]
    with scheduler(prompts=prompts, config=config(over_sampling_batch_size=3)) as rollouts:
        with pytest.raises(RolloutError) as caught:
            rollouts.next_batch()
        assert str(caught.value) == "prompt 1: token id 1000 is outside the engine's vocabulary of 1000"
        assert sorted(s.prompt.token_ids[0] for s in rollouts.next_batch().samples[::2]) == [1, 4]  # in any order
    assert_nothing_is_left()


# ---------------------------------------------------------------- engines that say what cannot be


def changed(change: Callable[[Chunk], Chunk], times: int = 1) -> type[RecordingEngine]:
    """An engine that lies about sample (1, 0) in its first ``times`` chunks with tokens."""

    class Liar(RecordingEngine):
        lies = 0

        def alter(self, request: Request, chunk: Chunk) -> Chunk:
            if request.sample_key == (1, 0) and self.lies < times and len(chunk.tokens) > 1:
                self.lies += 1
                return change(chunk)
            return chunk

    return Liar


def first(array: Any, value: float) -> Any:
    array = array.copy()
    array[0] = value
    return array


def logprobs(change: Callable[[Any], Any]) -> Callable[[Chunk], Chunk]:
    return lambda c: replace(c, logprobs=change(c.logprobs))


def tokens(change: Callable[[Any], Any]) -> Callable[[Chunk], Chunk]:
    return lambda c: replace(c, tokens=change(c.tokens))


LIES: dict[str, tuple[Callable[[Chunk], Chunk], str]] = {
    "nan": (logprobs(lambda a: first(a, np.nan)), "log-probability nan is not a finite number <= 0"),
    "positive": (logprobs(lambda a: first(a, 0.5)), "log-probability 0.5 is not a finite number <= 0"),
    "fewer": (logprobs(lambda a: a[1:]), "5 tokens came with 4 log-probabilities"),
    "more": (logprobs(lambda a: np.append(a, a)), "5 tokens came with 10 log-probabilities"),
    "unknown id": (tokens(lambda a: first(a, VOCAB)), "token id 1000 is outside the vocabulary of 1000"),
    "negative id": (tokens(lambda a: first(a, -1)), "token id -1 is outside the vocabulary of 1000"),
}


@pytest.mark.parametrize("kind", list(LIES))
@pytest.mark.parametrize("times", [1, 3])
def test_numbers_that_cannot_be(kind: str, times: int, caplog: pytest.LogCaptureFixture) -> None:
    """The request and the sample are named; its tokens are dropped as corrupt, it is made anew or given up by name."""
    change, sentence = LIES[kind]
    whole = rf"attempt [0-9a-f]{{32}} of g1\.s0: engine e0: {re.escape(sentence)}"
    reasons = [DropReason.CORRUPT, DropReason.FAILED][:times]
    rollouts = run(caplog, whole, *reasons, group_stays=times == 1, engine=changed(change, times))
    assert rollouts.dropped[DropReason.CORRUPT] == 5 * times
    assert sentence in rollouts.core.story(SampleId(1, 0))


def test_an_engine_that_returns_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """A stream without a token that nobody asked to end: named, tried again, given up by name."""

    class Empty(RecordingEngine):
        async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
            if request.sample_key == (1, 0):
                await asyncio.sleep(1)
                yield Chunk(np.empty(0, np.int32), np.empty(0, np.float32), self.engine._version, EngineFinish.STOP)
                return
            async for chunk in super().generate(request):
                yield chunk

    run(
        caplog,
        r"attempt [0-9a-f]{32} of g1\.s0 broke off: the stream ended \(stop\) without a token, and april had not "
        "asked for its end",
        DropReason.FAILED,
        engine=Empty,
    )
