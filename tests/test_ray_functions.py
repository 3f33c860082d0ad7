"""Functions in actors of Ray, with a stand-in for Ray: real threads, loops and sockets, arguments that travel."""

from __future__ import annotations

import asyncio
import inspect
import json
import pickle
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest
from rank_threads import PATIENCE_S, begun
from ray_stand_in import Actor, StandIn

import april
import april.ray
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.engine import SimulatedEngine
from april.errors import ConfigError, RolloutError, UsageError
from april.processes import ray_functions
from tests.gateway_suite.script import TOKENIZER

CONFIG = april.Config(rollout_batch_size=2, n_samples_per_prompt=2, max_response_len=40)
Rows = dict[tuple[int, int], tuple[list[int], list[float]]]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """In the place of the package; the server of this process ends with the test."""
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "ray", stand_in)
    ray_functions._llm_server.cache_clear()
    yield stand_in
    GO_ON.set()
    for actor in stand_in.actors:
        actor.end()
    if ray_functions._llm_server.cache_info().currsize:
        ray_functions._llm_server().endpoint.stop()
        ray_functions._llm_server.cache_clear()


def engine() -> SimulatedEngine:
    cost = DecodeCost(1e-5, 0.0, 0.0)
    return SimulatedEngine("e", cost, lambda r: 7 + 5 * sum(r.sample_key or (0, 0)), max_running=8)


def batches(count: int = 1, config: april.Config = CONFIG, **functions: Any) -> list[april.Batch]:
    """Of a run with these functions, whose books balance."""
    given: dict[str, Any] = {"prompts": [[1 + i, 2] for i in range(2 * count)], "engines": [engine()], "check": True}
    with april.RolloutScheduler(config, **given | functions) as run:
        made = [run.next_batch() for _ in range(count)]
        assert run.ledger()["tokens"].balanced
    return made


def rows(made: list[april.Batch]) -> Rows:
    """Tokens and log-probabilities, by sample."""
    return {tuple(s.id): (s.tokens.tolist(), s.logprobs.tolist()) for batch in made for s in batch.samples}


def call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call it as a scheduler does, on a loop."""

    async def program() -> Any:
        return await function(*arguments, **named)

    return asyncio.run(program())


# ---------------------------------------------------------------- rewards, filters, tools


def reward(prompt: april.Prompt, response: april.Response) -> float:
    """It writes into what it is given, in the main thread of its process."""
    response.tokens[0] = 1
    prompt.token_ids[0] = 1
    return float(len(response.text()))


async def group_reward(prompt: april.Prompt, responses: list[april.Response]) -> list[float]:
    return [reward(prompt, response) for response in responses]


def keeps(prompt: april.Prompt, responses: list[april.Response]) -> bool:
    return all(response.reward == len(response.text()) for response in responses)


@pytest.mark.parametrize("functions", [{"reward": reward}, {"group_reward": group_reward}])
def test_rewards_and_filters_run_in_actors(ray: StandIn, functions: dict[str, Any]) -> None:
    """With text, and arrays that they may write into, which are not those of the batch."""

    class Characters:
        """A tokenizer that does not travel with every call."""

        travelled = 0

        def decode(self, ids: list[int], **options: Any) -> str:
            return "x" * len(ids)

        def __reduce__(self) -> Any:
            Characters.travelled += 1
            return Characters, ()

    Characters.__qualname__ = "Characters"
    globals()["Characters"] = Characters
    there = {name: april.ray.remote(f, num_actors=2, num_gpus=1) for name, f in functions.items()}
    made = batches(2, **there, filter=april.ray.remote(keeps), tokenizer=Characters())
    assert rows(made) == rows(batches(2, **functions, tokenizer=Characters()))
    assert all(s.reward == len(s.tokens) for batch in made for s in batch.samples)
    assert Characters.travelled == len(ray.actors) == 3
    most = 1 if "reward" in functions else ray_functions.MAX_CONCURRENT_CALLS
    assert {**ray.options[0]} == {"num_cpus": 1, "num_gpus": 1, "max_concurrency": most}


class NotCarried(Exception):
    def __init__(self) -> None:
        super().__init__("it stays")
        self.lock = threading.Lock()


def raises(what: str) -> Any:
    if what == "exit":
        sys.exit(3)
    if what == "generator":
        raise GeneratorExit
    if what == "cancelled":
        raise asyncio.CancelledError
    if what == "stays":
        raise NotCarried
    return {}[what]


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("key", KeyError, "'key'"), ("exit", RolloutError, "SystemExit"), ("stays", RolloutError, "isn't serializable"),
        ("generator", RolloutError, "GeneratorExit"), ("cancelled", RolloutError, "CancelledError"),
    ],
)  # fmt: skip
def test_what_a_function_raises_is_raised_here(ray: StandIn, what: str, kind: type[Exception], words: str) -> None:
    """Itself, with the lines of its process as a note; nothing that it raises ends its actor."""
    there = april.ray.remote(raises)
    with pytest.raises(kind, match=words) as caught:
        call(there, what=what)
    assert type(caught.value) is kind
    if kind is KeyError:
        assert "return {}[what]" in caught.value.__notes__[0]
    assert not ray.actors[0].dead


STARTED, GO_ON = threading.Semaphore(0), threading.Event()
ENDED: list[str] = []


def plain_waits() -> str:
    """Until the test says so."""
    STARTED.release()
    GO_ON.wait(PATIENCE_S)
    return "done"


async def waits() -> None:
    STARTED.release()
    try:
        await asyncio.Event().wait()
    finally:
        ENDED.append("cancelled")


def test_a_call_that_is_cancelled_ends_there(ray: StandIn) -> None:
    """An async one is cancelled; of a plain one the process ends, and the next call has another one."""
    ENDED.clear()
    GO_ON.clear()

    async def cancelled(function: Any) -> None:
        task = asyncio.create_task(function())
        await asyncio.to_thread(STARTED.acquire)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def program() -> None:
        await cancelled(april.ray.remote(waits))
        assert ray.cancelled == 1
        while not ENDED:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
        assert not ray.actors[0].dead
        there = april.ray.remote(plain_waits)
        await cancelled(there)
        assert ray.actors[1].dead
        GO_ON.set()
        assert await there() == "done"
        assert len(ray.actors) == 3

    asyncio.run(program())


def test_a_plain_function_runs_once_at_a_time_in_each_actor(ray: StandIn) -> None:
    """Calls wait for an actor that is free, not behind one that takes long."""
    GO_ON.clear()

    async def program() -> None:
        there = april.ray.remote(plain_waits, num_actors=2)
        calls = [asyncio.create_task(there()) for _ in range(5)]
        for _ in range(2):
            await asyncio.to_thread(STARTED.acquire)
        assert [len(actor.running) for actor in ray.actors] == [1, 1]
        GO_ON.set()
        assert await asyncio.gather(*calls) == ["done"] * 5

    asyncio.run(program())
    while STARTED.acquire(blocking=False):
        pass


# ---------------------------------------------------------------- actors that die


@pytest.fixture
def dying(ray: StandIn, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is put in here is taken out by calls, which have their actor die if it is true."""
    plan: list[Any] = []
    began = Actor._called

    def called(actor: Actor, *arguments: Any) -> Any:
        if plan and plan.pop(0):
            actor.die()
        return began(actor, *arguments)

    monkeypatch.setattr(Actor, "_called", called)
    return plan


def test_a_reward_whose_actor_dies_is_asked_for_again(ray: StandIn, dying: list[Any]) -> None:
    """In a new actor; nobody else hears of it."""
    dying += [True, True, False, True]
    (batch,) = batches(reward=april.ray.remote(length))
    assert batch.metrics["failed_samples"] == 0
    assert [actor.dead for actor in ray.actors] == [True, True, True, False]


def length(prompt: april.Prompt, response: april.Response) -> float:
    return float(len(response.tokens))


def test_a_function_of_which_actors_die_fails(ray: StandIn, dying: list[Any]) -> None:
    """It does not end one process after the other."""
    dying += [True] * 4
    there = april.ray.remote(raises)
    with pytest.raises(RolloutError, match=r"3 actors in a row died while they ran raises, the last one: killed"):
        call(there, "exit")
    assert len(ray.actors) == 3


# ---------------------------------------------------------------- rollout functions


async def turns(prompt: april.Prompt, llm: april.LLM) -> list[int]:
    """Two turns, and what the environment says between them."""
    first = await llm.generate(max_tokens=4)
    assert (first.versions == 0).all()
    STARTED.release()
    await asyncio.to_thread(GO_ON.wait, PATIENCE_S)
    last = await llm.generate([*first.conversation, 5, 6], max_tokens=9, stop_token_ids=[3])
    first.tokens[:] = 0  # they are its own
    assert llm.sampling.max_tokens == 40
    return [len(first.tokens), len(last.tokens)]


def plain_turns(prompt: april.Prompt, llm: april.BlockingLLM) -> list[int]:
    first = llm.generate(max_tokens=4)
    return [len(first.tokens), len(llm.generate([*first.conversation, 5, 6], max_tokens=9, stop_token_ids=[3]).tokens)]


@pytest.mark.parametrize("function", [turns, plain_turns])
def test_a_rollout_function_in_an_actor_says_the_same(ray: StandIn, function: Any) -> None:
    """Token for token; what it returns is what rewards see."""
    GO_ON.set()

    def sees(prompt: april.Prompt, response: april.Response) -> float:
        assert sum(response.output) + 2 == len(response.tokens)
        return 1.0

    made = batches(2, rollout=april.ray.remote(function, num_actors=2), reward=sees)
    assert rows(made) == rows(batches(2, rollout=function, reward=sees))
    assert len(rows(made)) == 8


def with_dying_actors(ray: StandIn, run: Callable[[Any], Any], times: int = 1) -> tuple[Any, Any]:
    """What a run of four ``turns`` returns here, and in an actor that dies when each is between its turns."""
    GO_ON.set()
    whole = run(turns)
    GO_ON.clear()
    while STARTED.acquire(blocking=False):
        pass
    there = begun(lambda: run(april.ray.remote(turns)))
    for _ in range(times):
        for _ in range(4):
            STARTED.acquire()
        ray.actors[-1].die()
    GO_ON.set()
    return whole, there.result(PATIENCE_S)


@pytest.mark.parametrize("times", [1, 2])
def test_no_sample_is_lost_with_an_actor(ray: StandIn, times: int) -> None:
    """Rollout functions begin again where they were, with every token that they had, in training and evaluation."""
    whole, (batch,) = with_dying_actors(ray, lambda function: batches(rollout=function), times)
    assert rows([batch]) == rows(whole)
    assert batch.metrics["lost_functions"] == 4 * times
    assert batch.metrics["failed_samples"] == 0
    for s in batch.samples:  # where each token comes from
        assert [(g.kind, g.count, g.engine) for g in s.segments[:2]] == [("generated", 4, "e"), ("environment", 2, "")]
        assert sum(g.count for g in s.segments) == len(s.tokens)


def test_an_evaluation_lives_through_the_end_of_an_actor(ray: StandIn) -> None:
    """Its functions begin from nothing, and answer what they would have."""

    def evaluated(function: Any) -> Any:
        with april.RolloutScheduler(CONFIG, prompts=[[1]], engines=[engine()], rollout=function, reward=length) as run:
            return run.evaluate([[5, 6], [7, 8]], n_samples=2)

    whole, outcome = with_dying_actors(ray, evaluated)
    for row, other in zip(outcome.responses, whole.responses, strict=True):
        assert [r.tokens.tolist() for r in row] == [r.tokens.tolist() for r in other]


def test_a_rollout_function_that_always_ends_its_actor_fails(ray: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prompt is given up by name, and not tried for ever."""
    monkeypatch.setattr(ray_functions._AsyncActor, "call", _dies)
    with pytest.raises(RolloutError, match="processes in a row died while they ran its function"):
        batches(rollout=april.ray.remote(turns), config=CONFIG.model_copy(update={"max_failed_groups": 1}))


async def _dies(actor: Any, *arguments: Any) -> None:
    ray: Any = sys.modules["ray"]
    next(a for a in ray.actors if a.made is actor).die()


async def wrong_calls(prompt: april.Prompt, llm: april.LLM) -> None:
    """All that is refused is refused there as here."""
    with pytest.raises(TypeError, match="best_of"):
        await llm.generate(best_of=3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="max_tokens must be"):
        await llm.generate(max_tokens=0)
    sentence = r"llm.generate: an argument cannot be sent to the scheduler's process: a object"
    with pytest.raises(UsageError, match=sentence):
        await llm.generate([*prompt.token_ids, 3], images=[object()])
    with pytest.raises(UsageError, match="tokenizer"):
        await llm.chat([{"role": "user", "content": "x"}])
    done = await llm.generate(max_tokens=4)
    with pytest.raises(RolloutError, match="never rewrite it"):
        await llm.generate([9, *done.conversation[1:]])
    both = await asyncio.gather(llm.generate(), llm.generate(), return_exceptions=True)
    assert sum(isinstance(one, RolloutError) and "another call" in str(one) for one in both) == 1
    LATE.append(llm)


LATE: list[Any] = []


def test_calls_that_cannot_be_made(ray: StandIn) -> None:
    """Each raises what it raises in the scheduler's process; after its end an llm generates nothing."""
    LATE.clear()
    batches(rollout=april.ray.remote(wrong_calls))
    loop = ray.actors[0].loop
    assert loop is not None
    with pytest.raises(RolloutError, match="after its rollout function had ended"):
        asyncio.run_coroutine_threadsafe(LATE[0].generate(), loop).result()


async def several(prompt: april.Prompt, llm: april.LLM) -> None:
    """A conversation of its own, one by chat, and one of a client."""
    own = await llm.generate([9, 9, 9], max_tokens=4, any_conversation=True)
    answer = await llm.chat([{"role": "user", "content": "hello"}], max_tokens=5)
    assert (len(own.tokens), len(answer.tokens), answer.message["role"]) == (4, 5, "assistant")

    def client() -> Any:
        body = json.dumps({"model": "m", "prompt": [8, 8], "max_tokens": 6}).encode()
        headers = {"Authorization": f"Bearer {llm.api_key}", "Content-Type": "application/json"}
        asked = urllib.request.Request(f"{llm.base_url}/completions", body, headers)  # noqa: S310 - april's
        with urllib.request.urlopen(asked) as said:  # noqa: S310
            return json.load(said)

    assert (await asyncio.to_thread(client))["usage"]["completion_tokens"] == 6


def test_chats_and_clients_in_an_actor(ray: StandIn) -> None:
    """``llm.chat``, ``llm.base_url`` and calls of any conversation: each is a row, as in the scheduler's process."""
    pytest.importorskip("renderers")
    from renderers import Qwen3RendererConfig

    tokens = {"tokenizer": TOKENIZER, "renderer": Qwen3RendererConfig(enable_thinking=False)}
    (batch,) = batches(rollout=april.ray.remote(several), reward=length, **tokens)
    assert set(Counter(row.id for row in batch.samples).values()) == {3}
    assert [len(row.tokens) for row in batch.samples] == [4, 5, 6] * 4


# ---------------------------------------------------------------- the function that is returned, and mistakes


def test_it_looks_as_the_function_and_travels(ray: StandIn) -> None:
    """To the scheduler's actor; what it cannot be called with is seen before a run begins."""
    there = pickle.loads(pickle.dumps(april.ray.remote(reward, num_actors=3)))  # noqa: S301 - its own
    assert (there.__name__, there.__doc__) == ("reward", reward.__doc__)
    assert inspect.signature(there) == inspect.signature(reward)
    with pytest.raises(ConfigError, match=r"reward is called with \(prompt, response\), but length_of\(text\)"):
        batches(reward=april.ray.remote(length_of))
    assert ray.actors == []


def length_of(text: str) -> int:
    """Not of a response."""
    return len(text)


def yields(text: str) -> Iterator[int]:
    """Returns nothing at once."""
    yield 3


async def yields_later(text: str) -> AsyncIterator[int]:
    """Nor does this."""
    yield 3


@pytest.mark.parametrize(
    ("function", "options", "words"),
    [
        (3, {}, "the argument of april.ray.remote must be a function, got int"),
        (yields, {}, "yields is a generator"), (yields_later, {}, "yields_later is a generator"),
        (length_of, {"num_actors": 0}, "num_actors: expected a whole number and at least 1, got 0"),
        (length_of, {"num_actors": True}, "num_actors: expected a whole number"),
        (length_of, {"max_concurrency": 1.5}, "max_concurrency: expected a whole number"),
        (length_of, {"max_restarts": 3}, "april itself sets max_restarts because it replaces actors that died"),
        (length_of, {"num_cpu": 3}, "Ray rejects length_of: ValueError: Invalid option keyword num_cpu"),
        (lambda text: 3, {}, "Ray rejects .*lambda"),
    ],
)
def test_mistakes(ray: StandIn, function: Any, options: dict[str, Any], words: str) -> None:
    """Each with a sentence, before anything starts."""
    with pytest.raises(ConfigError, match=words):
        april.ray.remote(function, **options)
    assert ray.actors == []


def test_without_a_cluster(ray: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """april begins none of its own, and does without the package."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=r"call ray.init\(\) first"):
        april.ray.remote(length_of)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="pip install ray"):
        april.ray.remote(length_of)


def test_actors_end_with_their_scheduler(ray: StandIn) -> None:
    """A function that a second scheduler has, too, keeps none of the first one's."""
    there = april.ray.remote(length)
    for _ in range(3):
        batches(reward=there)
    assert len(ray.actors) == 3
    assert len(there._pools) == 1
    np.testing.assert_equal(len(ray.options), 3)
