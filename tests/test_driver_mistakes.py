"""Reward functions and filters that are wrong for a while, for one prompt, or for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from virtual_rollouts import Rollouts, table, virtual

from april.core.types import Prompt, SampleId
from april.driver.rewards import Response
from april.errors import RolloutError


@pytest.mark.parametrize("which", ["reward", "group_reward", "filter"])
@pytest.mark.parametrize("seconds", [0.5, 2.0, 30.0])
def test_an_outage_of_what_a_function_asks(which: str, seconds: float) -> None:
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

    async def program() -> None:
        rollouts = Rollouts(table({}), n=2, samples=2, retry_pause_s=4.0, **functions[which])
        while asyncio.get_running_loop().time() < 5.0 + 2 * seconds:
            await rollouts.step()
        assert refused
        assert not rollouts.dropped
        assert rollouts.core.prompts.as_dict()["dropped"] == {}
        rollouts.check_ledger()
        await rollouts.close()

    virtual(program)


def test_pauses_between_tries() -> None:
    """They grow, and a function that goes on failing costs its group after half a minute."""
    tries: list[float] = []

    async def reward(prompt: Prompt, response: Response) -> float:
        if response.sample_id == (0, 0):
            tries.append(asyncio.get_running_loop().time())
            raise ConnectionError("connection refused")
        return 1.0

    async def program() -> None:
        rollouts = Rollouts(table({}), n=1, samples=2, over=2, reward=reward, retry_pause_s=4.0)
        for _ in range(3):
            await rollouts.step()
        await asyncio.sleep(100)
        await rollouts.step()
        assert np.diff(tries).tolist() == pytest.approx([4.0, 32.0])
        assert rollouts.core.prompts.as_dict()["dropped"] == {"failed": 1}
        await rollouts.close()

    virtual(program)


WRONG = {"none": None, "text": "good", "dict": {"score": 1.0}, "nan": float("nan"), "list": [1.0, 2.0]}


@pytest.mark.parametrize("kind", [*WRONG, "attribute", "group", "filter"])
def test_a_function_that_was_written_wrongly_ends_the_step_at_once(
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

    async def program() -> None:
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
        await rollouts.close()

    virtual(program)


@pytest.mark.parametrize("error", [TypeError("one sample"), AttributeError("one sample")])
def test_a_function_that_has_worked_was_not_written_wrongly(error: Exception) -> None:
    """What it raises for single samples costs their groups, as ever."""

    async def reward(prompt: Prompt, response: Response) -> float:
        if response.sample_id.group in (2, 3):
            raise error
        return 1.0

    async def program() -> None:
        rollouts = Rollouts(table({}), n=2, samples=2, reward=reward)
        for _ in range(3):
            await rollouts.step()
        assert rollouts.core.prompts.as_dict()["dropped"] == {"failed": 2}
        await rollouts.close()

    virtual(program)
