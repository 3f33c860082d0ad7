"""Reward functions and filters that are wrong for a while, for one prompt, or for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
import numpy as np
import pytest
from virtual_rollouts import Rollouts, on_virtual_time, table

from april.core.types import Prompt, SampleId
from april.driver.llm import LLM
from april.driver.rewards import Response
from april.driver.user_code import kind_of, outcome_of, place_of
from april.errors import RolloutError


@pytest.mark.parametrize("which", ["reward", "group_reward", "filter"])
@pytest.mark.parametrize("seconds", [0.5, 2.0, 30.0])
@on_virtual_time
async def test_an_outage_of_what_a_function_asks(which: str, seconds: float) -> None:
    """A judge that refuses connections for a while costs nothing but time, and other samples go on meanwhile."""
    refused: list[float] = []

    async def ask(answer: Any) -> Any:
        now = asyncio.get_running_loop().time()
        if 5.0 <= now < 5.0 + seconds:
            refused.append(now)
            raise ConnectionError("connection refused")
        return answer

    async def reward(prompt: Prompt, response: Response) -> Any:
        return await ask(1.0) if which == "reward" else 1.0

    async def group_reward(prompt: Prompt, responses: list[Response]) -> Any:
        return await ask([1.0] * len(responses))

    async def judge(prompt: Prompt, responses: list[Response]) -> Any:
        return await ask(True)

    functions: dict[str, Any] = {
        "reward": {"reward": reward},
        "group_reward": {"group_reward": group_reward},
        "filter": {"reward": reward, "filter": judge},
    }

    rollouts = Rollouts(table({}), n=2, samples=2, retry_pause_s=4.0, **functions[which])
    while asyncio.get_running_loop().time() < 5.0 + 2 * seconds:
        await rollouts.step()
    assert refused
    assert not rollouts.dropped
    assert rollouts.core.prompts.as_dict()["dropped"] == {}
    rollouts.check_ledger()


@on_virtual_time
async def test_pauses_between_tries() -> None:
    """They grow, and a function that goes on failing costs its group after half a minute."""
    tries: list[float] = []

    async def reward(prompt: Prompt, response: Response) -> float:
        if response.sample_id == (0, 0):
            tries.append(asyncio.get_running_loop().time())
            raise ConnectionError("connection refused")
        return 1.0

    rollouts = Rollouts(table({}), n=1, samples=2, over=2, reward=reward, retry_pause_s=4.0)
    for _ in range(3):
        await rollouts.step()
    await asyncio.sleep(100)
    await rollouts.step()
    assert np.diff(tries).tolist() == pytest.approx([4.0, 32.0])
    assert rollouts.core.prompts.as_dict()["dropped"] == {"failed": 1}


WRONG = {"none": None, "text": "good", "dict": {"score": 1.0}, "nan": float("nan"), "list": [1.0, 2.0]}


@pytest.mark.parametrize("kind", [*WRONG, "attribute", "group", "filter"])
@on_virtual_time
async def test_a_function_that_was_written_wrongly_ends_the_step_at_once(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In one sentence, without a try more, and with a line in the log; once it is mended the scheduler goes on."""
    mended: list[bool] = []
    asked: list[SampleId] = []

    async def reward(prompt: Prompt, response: Response) -> Any:
        if mended or kind == "filter":
            return 1.0
        asked.append(response.sample_id)
        return response.txt if kind == "attribute" else WRONG[kind]  # type: ignore[attr-defined]

    async def group_reward(prompt: Prompt, responses: list[Response]) -> Any:
        return [1.0] * len(responses) if mended else 1.0

    async def judge(prompt: Prompt, responses: list[Response]) -> Any:
        return True if mended else "yes"

    functions: dict[str, Any] = {"group_reward": group_reward} if kind == "group" else {"reward": reward}
    if kind == "filter":
        functions["filter"] = judge

    rollouts = Rollouts(table({}), n=2, samples=2, retry_pause_s=4.0, **functions)
    with pytest.raises(RolloutError, match=r"^(g1\.s\d: )?the (reward function|filter) failed: .*$"):
        await rollouts.driver.next_batch()
    assert asyncio.get_running_loop().time() == 5.0  # when the first responses are there
    assert len(asked) == len(set(asked))
    assert not rollouts.dropped
    rollouts.check_ledger()
    assert len(caplog.records) == 1
    mended.append(True)
    await rollouts.step()


@pytest.mark.parametrize("error", [TypeError("one sample"), AttributeError("one sample")])
@on_virtual_time
async def test_a_function_that_has_worked_was_not_written_wrongly(error: Exception) -> None:
    """What it raises for single samples costs their groups, as ever."""

    async def reward(prompt: Prompt, response: Response) -> float:
        if response.sample_id.group in (2, 3):
            raise error
        return 1.0

    rollouts = Rollouts(table({}), n=2, samples=2, reward=reward)
    for _ in range(3):
        await rollouts.step()
    assert rollouts.core.prompts.as_dict()["dropped"] == {"failed": 2}


class JudgeAway(Exception):
    """A class of a user's own, or of a client's library."""


def raising(error: Exception) -> Any:
    raise error


MISTAKES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "key": lambda data: data["anwser"],
    "index": lambda data: [][0],
    "value": lambda data: float("three"),
    "zero": lambda data: 1 / 0,
    "assertion": lambda data: raising(AssertionError("no answer")),
    "attribute": lambda data: data.anwser,  # type: ignore[attr-defined]
    "run time": lambda data: raising(RuntimeError("shapes differ")),
    "group": lambda data: raising(ExceptionGroup("of a TaskGroup", [KeyError("anwser")])),
    "an end": lambda data: raising(StopAsyncIteration()),
    "its own cause": lambda data: raising(own_cause(RuntimeError("shapes differ"))),
    "key while a file is away": lambda data: raising(instead_of(KeyError("anwser"), FileNotFoundError("cache"))),
}


def because_of(error: Exception, before: Exception) -> Exception:
    """``raise error from before``."""
    error.__cause__ = before
    return error


def instead_of(error: Exception, before: Exception) -> Exception:
    """``except ...: raise error``."""
    error.__context__ = before
    return error


def own_cause(error: Exception) -> Exception:
    """``raise error from error``."""
    return because_of(error, error)


PASSING = [
    OSError("gone"), TimeoutError(), ConnectionRefusedError("away"), aiohttp.ClientPayloadError(), JudgeAway("503"),
    EOFError(), MemoryError(), ExceptionGroup("of a TaskGroup", [ValueError("?"), ConnectionResetError("away")]),
    because_of(RuntimeError("no judge"), TimeoutError()), instead_of(ValueError("no judge"), JudgeAway("503")),
]  # fmt: skip


class Wrong:
    """Functions of which ``which`` fails, for those prompts that ``for_these`` says, by number."""

    def __init__(self, which: str, fails: Callable[[dict[str, Any]], Any], for_these: Callable[[int], bool]) -> None:
        self.which, self.fails, self.for_these = which, fails, for_these

    def at(self, place: str, group: int) -> None:
        if place == self.which and self.for_these(group):
            self.fails({"answer": 1})

    async def reward(self, prompt: Prompt, response: Response) -> float:
        self.at("reward", response.sample_id.group)
        return 1.0

    async def group_reward(self, prompt: Prompt, responses: list[Response]) -> list[float]:
        self.at("group_reward", responses[0].sample_id.group)
        return [1.0] * len(responses)

    async def judge(self, prompt: Prompt, responses: list[Response]) -> bool:
        self.at("filter", responses[0].sample_id.group)
        return True

    async def rollout(self, prompt: Prompt, llm: LLM) -> None:
        await llm.generate()
        self.at("rollout", llm.sample_id.group)

    def rollouts(self, **changes: Any) -> Rollouts:
        in_groups = self.which == "group_reward"
        functions = {"group_reward": self.group_reward} if in_groups else {"reward": self.reward}
        values: dict[str, Any] = {"n": 2, "samples": 4, "over": 4, "retry_pause_s": 4.0} | functions
        return Rollouts(table({}), filter=self.judge, rollout=self.rollout, **(values | changes))


@pytest.mark.parametrize(
    ("kind", "which", "n"),
    [(kind, "reward", 2) for kind in MISTAKES]
    + [("key", which, n) for which in ("reward", "group_reward", "filter", "rollout") for n in (1, 2, 8)],
)
@on_virtual_time
async def test_what_fails_alike_for_every_sample_ends_the_step_at_once(
    kind: str, which: str, n: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it raises, with the cause, its line and one line in the log, before any pause is over."""
    rollouts = Wrong(which, MISTAKES[kind], lambda group: True).rollouts(n=n, over=n)
    place = r"\(line \d+ of test_driver_mistakes.py\)$"
    with pytest.raises(RolloutError, match=rf"failed: (\w+(Error|Group):|it raised) .* {place}") as raised:
        await rollouts.driver.next_batch()
    assert raised.value.__cause__ is not None
    assert raised.value.__cause__.__traceback__ is not None
    assert asyncio.get_running_loop().time() <= (15.0 if which == "rollout" else 5.0) * (1 + (n == 1))
    assert n == 1 or (rollouts.core.prompts.as_dict()["dropped"] == {} and len(caplog.records) == 1)
    await rollouts.close()


def test_what_a_plain_function_has_not_found() -> None:
    """``next`` without a default ends the function by what means another thing to who waits: its own line is named."""

    def reward() -> float:
        return next(rate for rate in (0.5, 1.0) if rate > 1.0)

    error = outcome_of(reward).error
    assert isinstance(error, RolloutError)
    place = place_of(error, reward)
    line = reward.__code__.co_firstlineno + 1
    assert kind_of(error, place) == f"StopIteration, line {line} of test_driver_mistakes.py"


@pytest.mark.parametrize("error", PASSING, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("which", ["reward", "group_reward", "filter"])
@on_virtual_time
async def test_an_outage_at_the_very_start_costs_no_group(which: str, error: Exception) -> None:
    """Errors of files, sockets, clients and users' own classes may pass, though every sample has them at first."""
    loop = asyncio.get_running_loop()
    outage = Wrong(which, lambda data: raising(error) if loop.time() < 30 else None, lambda group: True)
    rollouts = outage.rollouts()
    await rollouts.step()
    assert rollouts.core.prompts.as_dict()["dropped"] == {}
    await rollouts.close()


@pytest.mark.parametrize("which", ["reward", "group_reward", "filter", "rollout"])
@pytest.mark.parametrize("bad", [{0}, {0, 1}, {0, 5, 6}])
@on_virtual_time
async def test_bad_rows_cost_themselves(which: str, bad: set[int]) -> None:
    """A KeyError of some prompts, the first ones among them, drops those and nothing else."""
    rollouts = Wrong(which, MISTAKES["key"], lambda group: group in bad).rollouts(n=4, over=4)
    for _ in range(4):
        await rollouts.step()
    assert rollouts.core.prompts.as_dict()["dropped"] == {"failed": len(bad)}
    await rollouts.close()


@pytest.mark.parametrize("n", [1, 2])
@on_virtual_time
async def test_bad_rows_first_where_a_batch_is_small(n: int) -> None:
    """Others are in work beside them: what becomes of those tells whether a function is wrong."""
    rollouts = Wrong("reward", MISTAKES["key"], lambda group: group < 3).rollouts(n=n, over=8, samples=1)
    for _ in range(4):
        await rollouts.step()
    await asyncio.sleep(100)
    await rollouts.step()
    assert rollouts.core.prompts.as_dict()["dropped"] == {"failed": 3}
    await rollouts.close()


@pytest.mark.parametrize("which", ["reward", "rollout"])
@on_virtual_time
async def test_bad_rows_that_fail_before_others_can_work(which: str) -> None:
    """Four of 32, at once, while a slow judge or the engine is at work on the others: they cost themselves."""

    async def at_once(group: int) -> None:
        if group % 8 == 0:
            raise KeyError("answer")

    async def reward(prompt: Prompt, response: Response) -> float:
        if which == "reward":
            await at_once(response.sample_id.group)
            await asyncio.sleep(60)
        return 1.0

    async def rollout(prompt: Prompt, llm: LLM) -> None:
        if which == "rollout":
            await at_once(llm.sample_id.group)
        await llm.generate()

    rollouts = Rollouts(table({}), n=28, over=32, samples=2, rollout=rollout, reward=reward)
    await rollouts.step()


@on_virtual_time
async def test_failures_of_several_kinds_are_no_mistake() -> None:
    """Every sample raises in a line of its own: no line is blamed for what it has not done."""

    async def reward(prompt: Prompt, response: Response) -> float:
        if response.sample_id.group < 4:
            MISTAKES[list(MISTAKES)[sum(response.sample_id) % len(MISTAKES)]]({})
        return 1.0

    rollouts = Rollouts(table({}), n=4, samples=2, reward=reward, retry_pause_s=4.0)
    await rollouts.step()
    assert rollouts.core.prompts.as_dict()["dropped"] == {"failed": 4}
