"""Clients that leave in the middle of an answer, on the real driver and virtual time: what is generated is bounded."""

from __future__ import annotations

import asyncio

import pytest
from memory_doors import MemoryDoors, door_of
from virtual_rollouts import Rollouts, now, on_virtual_time, table

from april.core.types import DropReason, Prompt
from april.driver.llm import LLM, Completion
from april.scheduler import RolloutScheduler

pytestmark = on_virtual_time


@pytest.fixture(autouse=True)
def _doors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents ask at doors of this process."""
    monkeypatch.setattr(RolloutScheduler, "_gateway_type", MemoryDoors)


async def test_a_client_that_leaves_for_good() -> None:
    """Its request is aborted, its tokens are dropped by name, and the sample goes on without them."""

    async def rollout(prompt: Prompt, llm: LLM) -> None:
        door = door_of(llm)
        left = asyncio.ensure_future(door.ask([*prompt.token_ids, 5]))
        await asyncio.sleep(10)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        assert len((await door.ask(prompt.token_ids)).tokens) == 30

    rollouts = Rollouts(table({}, 30), n=1, samples=1, rollout=rollout)
    (row,) = (await rollouts.driver.next_batch()).samples
    assert len(row.tokens) == 30
    assert 9 <= rollouts.dropped[DropReason.UNHEARD] <= 11
    assert now() < 45  # the first answer was not waited for


async def test_a_client_that_leaves_as_its_answer_comes() -> None:
    """The answer is complete, and nobody has it: it is dropped, too."""
    heard: list[Completion] = []

    async def rollout(prompt: Prompt, llm: LLM) -> None:
        await door_of(llm).ask([*prompt.token_ids, 5], heard=False)
        heard.append(await door_of(llm).ask(prompt.token_ids))

    rollouts = Rollouts(table({}, 30), n=1, samples=1, rollout=rollout)
    (row,) = (await rollouts.driver.next_batch()).samples
    assert row.tokens.tolist() == heard[0].tokens.tolist()
    assert rollouts.dropped[DropReason.UNHEARD] == 30


async def test_waiting_for_a_client_is_not_the_function_s_time() -> None:
    """A function that nobody has asked for yet is not too slow; once it has a client, it may be."""

    async def rollout(prompt: Prompt, llm: LLM) -> None:
        with llm.untimed():
            await asyncio.sleep(1000)
        await llm.generate()

    rollouts = Rollouts(table({}), n=1, samples=1, rollout=rollout, function_timeout_s=60)
    await rollouts.step()
    assert now() > 1000
