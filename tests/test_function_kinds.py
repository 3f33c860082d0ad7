"""Which functions a user may bring, how they are called, and which are refused before anything starts."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest
from real_schedulers import check, scheduler

import april
from april.core.types import DropReason
from april.driver.rewards import Response
from april.errors import ConfigError

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


# ---------------------------------------------------------------- kinds of functions


async def rollout_async(prompt: april.Prompt, llm: april.LLM) -> str:
    assert threading.current_thread().name == "april-loop"
    await llm.generate()
    return "done"


def rollout_plain(prompt: april.Prompt, llm: april.BlockingLLM) -> str:
    assert threading.current_thread().name.startswith("april-worker")
    llm.generate()
    return "done"


async def reward_async(prompt: april.Prompt, response: Response) -> float:
    assert threading.current_thread().name == "april-loop"
    assert response.output == "done"
    return float(len(response.tokens))


def reward_plain(prompt: april.Prompt, response: Response) -> float:
    assert threading.current_thread().name.startswith("april-worker")
    assert response.output == "done"
    return float(len(response.tokens))


async def filter_async(prompt: april.Prompt, responses: list[Response]) -> bool:
    assert threading.current_thread().name == "april-loop"
    return int(prompt.token_ids[0]) % 3 != 0


def filter_plain(prompt: april.Prompt, responses: list[Response]) -> bool:
    assert threading.current_thread().name.startswith("april-worker")
    return int(prompt.token_ids[0]) % 3 != 0


def with_tool(function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """A decorator that hands over an argument of its own."""

    @functools.wraps(function)
    def inner(first: Any, second: Any) -> Any:
        return function(first, second, "tool")

    return inner


def kinds(asynchronous: Callable[..., Any], plain: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """One job in all its forms."""

    class AsyncObject:
        async def __call__(self, first: Any, second: Any) -> Any:
            return await asynchronous(first, second)

        async def method(self, first: Any, second: Any, *, strict: bool = True) -> Any:
            return await asynchronous(first, second)

    class PlainObject:
        def __len__(self) -> int:
            return 0  # an object without entries is a function all the same

        def __call__(self, first: Any, second: Any) -> Any:
            return plain(first, second)

        @staticmethod
        def static(first: Any, second: Any) -> Any:
            return plain(first, second)

    def with_key(key: str, first: Any, second: Any) -> Any:
        assert key == "key"
        return plain(first, second)

    async def with_key_async(first: Any, second: Any, *, key: str) -> Any:
        assert key == "key"
        return await asynchronous(first, second)

    return {
        "async": asynchronous,
        "plain": plain,
        "async object": AsyncObject(),
        "plain object": PlainObject(),
        "async method": AsyncObject().method,
        "static method": PlainObject.static,
        "partial": functools.partial(with_key, "key"),
        "async partial": functools.partial(with_key_async, key="key"),
        "partial of async object": functools.partial(AsyncObject()),
        "returns a coroutine": lambda first, second: asynchronous(first, second),
        "any arguments": lambda *args: plain(*args),
        "decorated": with_tool(lambda first, second, tool: plain(first, second)),
    }


@pytest.mark.parametrize("kind", list(kinds(rollout_async, rollout_plain)))
def test_kinds_of_functions(kind: str) -> None:
    """Rollout functions, rewards and filters of every kind, async on the loop and plain in threads, two arguments."""
    rollout = kinds(rollout_async, rollout_plain)[kind]
    reward = kinds(reward_async, reward_plain)[kind]
    judge = kinds(filter_async, filter_plain)[kind]
    with scheduler(rollout=rollout, reward=reward, filter=judge) as rollouts:
        batch = rollouts.next_batch()
        check(batch)
        assert all(s.prompt.token_ids[0] % 3 for s in batch.samples)
        assert set(rollouts.ledger()["prompts"].dropped) == {DropReason.FILTERED}
        assert rollouts.evaluate([[1, 2]], n_samples=2).rewards.shape == (1, 2)


# ---------------------------------------------------------------- refused before anything starts


async def yields(prompt: april.Prompt, llm: april.LLM) -> Any:
    yield await llm.generate()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"rollout": lambda prompt: None},
            r"rollout is called with \(prompt, llm\), but .*<lambda>\(prompt\) does not ",
        ),
        (
            {"rollout": lambda p, llm, tool: None},
            r"\(p, llm, tool\) does not accept that: missing a required argument: 'tool'",
        ),
        ({"rollout": yields}, "rollout: yields is a generator"),
        ({"rollout": "generate"}, "rollout must be a function, got str"),
        ({"rollout": None}, "rollout must be a function, got NoneType"),
        ({"reward": lambda response: 1.0}, r"reward is called with \(prompt, response\), but"),
        (
            {"reward": functools.partial(reward_plain, 1, 2)},
            r"reward_plain\(\) does not accept that: too many positional",
        ),
        ({"reward": 1.0}, "reward must be a function, got float"),
        ({"reward": None, "group_reward": lambda p, rs, *, scale: 1.0}, r"group_reward .*required.*'scale'"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_functions_that_cannot_be_called_are_refused(arguments: dict[str, Any], words: str) -> None:
    """One sentence when the scheduler is made: what is called how, and what does not fit."""
    with pytest.raises(ConfigError, match=words):
        scheduler(**arguments)


def test_a_builtin_that_does_not_tell_its_parameters_is_not_refused() -> None:
    """Only what is known to fail is refused."""
    with scheduler(reward=max, rollout=april.driver.llm.single_turn):
        pass
    with pytest.raises(ValueError, match="signature"):
        inspect.signature(max)
