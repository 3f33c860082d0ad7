"""Reward functions and filters that are wrong for a while, for one prompt, or for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import numpy as np
import pytest
from virtual_rollouts import Rollouts, now, on_virtual_time, table

from april.core.types import DropReason, Prompt, SampleId
from april.driver.llm import LLM
from april.driver.rewards import Response
from april.driver.user_code import kind_of, outcome_of, place_of
from april.errors import RolloutError

pytestmark = on_virtual_time

WELL = object()
"""The function works."""


async def cancelled() -> Any:
    """Raises CancelledError although nobody cancelled the caller."""
    inner: asyncio.Future[float] = asyncio.get_running_loop().create_future()
    inner.cancel()
    return await inner


async def cancels_itself() -> Any:
    """Cancels the task that runs it, which no one else did."""
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(1)


def raises(error: BaseException) -> Callable[[], Awaitable[Any]]:
    async def function() -> Any:
        raise error

    return function


def returns(value: Any) -> Callable[[], Awaitable[Any]]:
    async def function() -> Any:
        return value

    return function


class Functions:
    """All functions of a user; that of the name ``which`` does what ``fault`` does, and works where that is WELL."""

    def __init__(self, which: str, fault: Callable[[SampleId], Awaitable[Any]]) -> None:
        self.which, self.fault = which, fault

    async def at(self, place: str, sample_id: SampleId, well: Any) -> Any:
        answer = WELL if place != self.which else await self.fault(sample_id)
        return well if answer is WELL else answer

    async def reward(self, prompt: Prompt, response: Response) -> Any:
        return await self.at("reward", response.sample_id, 1.0)

    async def group_reward(self, prompt: Prompt, responses: list[Response]) -> Any:
        return await self.at("group_reward", responses[0].sample_id, np.arange(len(responses)))

    async def filter(self, prompt: Prompt, responses: list[Response]) -> Any:
        return await self.at("filter", responses[0].sample_id, np.bool_(True))

    async def rollout(self, prompt: Prompt, llm: LLM) -> None:
        await self.at("rollout before generate", llm.sample_id, None)
        await llm.generate()
        await self.at("rollout", llm.sample_id, None)

    def rollouts(self, **changes: Any) -> Rollouts:
        """N = 2, n = 4."""
        scored = {"group_reward": self.group_reward} if self.which == "group_reward" else {"reward": self.reward}
        values: dict[str, Any] = {"n": 2, "samples": 4, "rollout": self.rollout} | scored
        return Rollouts(table({}), filter=self.filter, **(values | changes))


def failing(which: str, fails: Callable[[dict[str, Any]], Any], for_these: Callable[[int], bool]) -> Functions:
    """Functions of which one fails for those prompts that ``for_these`` names, by number."""

    async def fault(sample_id: SampleId) -> Any:
        if for_these(sample_id.group):
            fails({"answer": 1})
        return WELL

    return Functions(which, fault)


# ---------------------------------------------------------------- once, and for one group

EVERYWHERE: dict[str, tuple[Callable[[], Awaitable[Any]], str]] = {
    "raises": (raises(KeyError("answer")), "KeyError: 'answer'"),
    "exits": (raises(SystemExit(3)), "SystemExit: 3"),
    "interrupts": (raises(KeyboardInterrupt()), "KeyboardInterrupt"),
    "raises no Exception": (raises(type("Odd", (BaseException,), {})("odd")), "Odd: odd"),
    "is cancelled from inside": (cancelled, "something that it waited for was cancelled"),
    "cancels itself": (cancels_itself, "something that it waited for was cancelled"),
    "hangs": (lambda: asyncio.Event().wait(), "within function_timeout_s=60"),
}
VALUES: dict[str, list[tuple[Any, str]]] = {
    "reward": [
        (float("nan"), "expected a finite number"), (-np.inf, "expected a finite number"),
        (None, "expected a number"), ("good", "expected a number"), (10**400, "expected a number"),
    ],
    "group_reward": [
        ([1.0], "expected 3 numbers, one per sample"), ([1.0] * 4, "expected 3 numbers"), (2.0, "expected 3 numbers"),
        ({0: 1.0, 1: 0.5, 2: 0.0}, "expected 3 numbers"), ({3.0, 2.0, 1.0}, "expected 3 numbers"),
        ("101", "expected 3 numbers"), ([1.0, float("nan"), 1.0], "the reward of g1.s1 is nan"),
        ([1.0, 1.0, None], "the reward of g1.s2 is None"),
    ],
    "filter": [
        (None, "the filter of group 1 returned None (NoneType); expected True or False"),
        (1, "the filter of group 1 returned 1 (int); expected True or False"),
        (float("nan"), "expected True or False"),
        ([True, True], "the filter of group 1 returned [True, True] (list); expected True or False"),
    ],
}  # fmt: skip
FAULTS = [
    *(pytest.param(which, fault, words, id=f"{which} {kind}")
      for which in ("reward", "group_reward", "filter", "rollout", "rollout before generate")
      for kind, (fault, words) in EVERYWHERE.items()),
    *(pytest.param(which, returns(value), words, id=f"{which} returns {value}"[:40])
      for which, values in VALUES.items() for value, words in values),
]  # fmt: skip


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize(("which", "fault", "words"), FAULTS)
async def test_a_function_that_fails(which: str, fault: Callable[[], Awaitable[Any]], words: str, times: int) -> None:
    """Once: it is asked again, a rollout function with a new response. Three times (max_attempt_failures): the group is
    dropped as failed, by name, and replaced. No other group notices, and every token is accounted for."""
    failed: list[SampleId] = []

    async def once_or_more(sample_id: SampleId) -> Any:
        if sample_id.group != 1 or (failed and sample_id != failed[0]) or len(failed) == times:
            return WELL
        failed.append(sample_id)
        return await fault()

    rollouts = Functions(which, once_or_more).rollouts(samples=3, function_timeout_s=60.0)
    batch = await rollouts.step()
    assert len(failed) == times
    assert set(batch.group_ids.tolist()) == ({0, 1} if times == 1 else {0, 2})
    assert rollouts.core.counters["failed_attempts"] == 0  # no engine was blamed
    again = 5 * times if which == "rollout" else 0
    story = rollouts.core.story(failed[0])
    assert words in story
    if times == 1:
        assert rollouts.dropped == ({DropReason.FAILED: again} if again else {})
        assert batch.metrics["failed_samples"] == (which != "filter")
        return
    if which == "rollout before generate":  # what its siblings have by then
        assert set(rollouts.dropped) <= {DropReason.FAILED}
    else:
        assert rollouts.dropped == {DropReason.FAILED: again + (10 if which == "rollout" else 15)}
    assert rollouts.core.prompts.as_dict()["dropped"] == {"failed": 1}
    assert (batch.metrics["groups_dropped_failed"], batch.metrics["groups_dropped_filtered"]) == (1, 0)
    assert "group dropped (failed): " in story


# ---------------------------------------------------------------- for a while, and for ever


@pytest.mark.parametrize("which", ["reward", "group_reward", "filter"])
@pytest.mark.parametrize("seconds", [0.5, 2.0, 30.0])
async def test_an_outage_of_what_a_function_asks(which: str, seconds: float) -> None:
    """A judge that refuses connections for a while costs nothing but time, and other samples go on meanwhile."""
    refused: list[float] = []

    async def judge(sample_id: SampleId) -> Any:
        if 5.0 <= now() < 5.0 + seconds:
            refused.append(now())
            raise ConnectionError("connection refused")
        return WELL

    rollouts = Functions(which, judge).rollouts(samples=2)
    while now() < 5.0 + 2 * seconds:
        await rollouts.step()
    assert refused
    assert not rollouts.dropped
    assert rollouts.core.prompts.as_dict()["dropped"] == {}
    rollouts.check_ledger()


async def test_pauses_between_tries() -> None:
    """They grow, and a function that goes on failing costs its group after half a minute."""
    tries: list[float] = []

    async def refuses(sample_id: SampleId) -> Any:
        if sample_id != (0, 0):
            return WELL
        tries.append(now())
        raise ConnectionError("connection refused")

    rollouts = Functions("reward", refuses).rollouts(n=1, samples=2, over=2)
    for _ in range(3):
        await rollouts.step()
    await asyncio.sleep(100)
    await rollouts.step()
    assert np.diff(tries).tolist() == pytest.approx([4.0, 32.0])
    assert rollouts.core.prompts.as_dict()["dropped"] == {"failed": 1}


WRONG: list[tuple[str, Callable[[], Awaitable[Any]]]] = [
    *(("reward", returns(value)) for value in (None, "good", {"score": 1.0}, float("nan"), [1.0, 2.0])),
    ("reward", raises(AttributeError("'Response' object has no attribute 'txt'"))),
    ("group_reward", returns(1.0)),
    ("filter", returns("yes")),
]


@pytest.mark.parametrize(("which", "fault"), WRONG)
async def test_a_function_that_was_written_wrongly_ends_the_step_at_once(
    which: str, fault: Callable[[], Awaitable[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    """In one sentence, without a try more, and with a line in the log; once it is mended the scheduler goes on."""
    mended: list[bool] = []
    asked: list[SampleId] = []

    async def wrong(sample_id: SampleId) -> Any:
        if mended:
            return WELL
        asked.append(sample_id)
        return await fault()

    rollouts = Functions(which, wrong).rollouts(samples=2)
    with pytest.raises(RolloutError, match=r"^(g1\.s\d: )?the (reward function|filter) failed: .*$"):
        await rollouts.driver.next_batch()
    assert now() == 5.0  # when the first responses are there
    assert len(asked) == len(set(asked))
    assert not rollouts.dropped
    rollouts.check_ledger()
    assert len(caplog.records) == 1
    mended.append(True)
    await rollouts.step()


@pytest.mark.parametrize("error", [TypeError("one sample"), AttributeError("one sample")])
async def test_a_function_that_has_worked_was_not_written_wrongly(error: Exception) -> None:
    """What it raises for single samples costs their groups, as ever."""
    rollouts = failing("reward", lambda data: raising(error), lambda group: group in (2, 3)).rollouts(samples=2)
    for _ in range(3):
        await rollouts.step()
    assert rollouts.core.prompts.as_dict()["dropped"] == {"failed": 2}


class JudgeAway(Exception):
    """A class of a user's own, or of a client's library."""


def raising(error: BaseException) -> Any:
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


@pytest.mark.parametrize(
    ("kind", "which", "n"),
    [(kind, "reward", 2) for kind in MISTAKES]
    + [("key", which, n) for which in ("reward", "group_reward", "filter", "rollout") for n in (1, 2, 8)],
)
async def test_what_fails_alike_for_every_sample_ends_the_step_at_once(
    kind: str, which: str, n: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it raises, with the cause, its line and one line in the log, before any pause is over."""
    rollouts = failing(which, MISTAKES[kind], lambda group: True).rollouts(n=n)
    place = r"\(line \d+ of test_driver_mistakes.py\)$"
    with pytest.raises(RolloutError, match=rf"failed: (\w+(Error|Group):|it raised) .* {place}") as raised:
        await rollouts.driver.next_batch()
    assert raised.value.__cause__ is not None
    assert raised.value.__cause__.__traceback__ is not None
    assert now() <= (15.0 if which == "rollout" else 5.0) * (1 + (n == 1))
    assert n == 1 or (rollouts.core.prompts.as_dict()["dropped"] == {} and len(caplog.records) == 1)


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
async def test_an_outage_at_the_very_start_costs_no_group(which: str, error: Exception) -> None:
    """Errors of files, sockets, clients and users' own classes may pass, though every sample has them at first."""
    rollouts = failing(which, lambda data: raising(error) if now() < 30 else None, lambda group: True).rollouts()
    await rollouts.step()
    assert rollouts.core.prompts.as_dict()["dropped"] == {}


@pytest.mark.parametrize("which", ["reward", "group_reward", "filter", "rollout"])
@pytest.mark.parametrize("bad", [{0}, {0, 1}, {0, 5, 6}])
async def test_bad_rows_cost_themselves(which: str, bad: set[int]) -> None:
    """A KeyError of some prompts, the first ones among them, drops those and nothing else."""
    rollouts = failing(which, MISTAKES["key"], lambda group: group in bad).rollouts(n=4)
    for _ in range(4):
        await rollouts.step()
    assert rollouts.core.prompts.as_dict()["dropped"] == {"failed": len(bad)}


@pytest.mark.parametrize("n", [1, 2])
async def test_bad_rows_first_where_a_batch_is_small(n: int) -> None:
    """Others are in work beside them: what becomes of those tells whether a function is wrong."""
    rollouts = failing("reward", MISTAKES["key"], lambda group: group < 3).rollouts(n=n, over=6, samples=1)
    for _ in range(4):
        await rollouts.step()
    await asyncio.sleep(100)
    await rollouts.step()
    assert rollouts.core.prompts.as_dict()["dropped"] == {"failed": 3}


@pytest.mark.parametrize("which", ["reward", "rollout"])
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


async def test_failures_of_several_kinds_are_no_mistake() -> None:
    """Every sample raises in a line of its own: no line is blamed for what it has not done."""

    async def several(sample_id: SampleId) -> Any:
        if sample_id.group < 4:
            MISTAKES[list(MISTAKES)[sum(sample_id) % len(MISTAKES)]]({})
        return WELL

    rollouts = Functions("reward", several).rollouts(n=4, samples=2)
    await rollouts.step()
    assert rollouts.core.prompts.as_dict()["dropped"] == {"failed": 4}
