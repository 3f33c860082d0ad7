"""Random lives of hosts, as in ``test_random_host_protocol``, whose functions hold several conversations at a time.

Agents ask side by side, begin anew, go on with what was said earlier, ask the same twice, and leave without having
heard everything. The oracle knows what each has asked and heard, and makes the rows of it by itself.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from typing import Any

import pytest
from memory_doors import MemoryDoor, MemoryDoors, Row, door_of, rows_of
from test_host_conversations import row
from test_random_host_protocol import HostsLife, lived
from virtual_rollouts import on_virtual_time

import april
from april.core.batch import Batch
from april.processes.host import Host
from april.scheduler import RolloutScheduler

pytestmark = on_virtual_time

LIVES = int(os.environ.get("APRIL_RANDOM_LIVES", "4"))
BATCH = 4
MISUNDERSTOOD = (
    "to be kept", "known here", "has brought nothing", "calls generate:", "returned, and is", "april stops",
)  # fmt: skip
"""What a side says that cuts the other off; a host that comes back after it would go on as if nothing had been."""


async def agent(door: MemoryDoor, start: list[int], chance: random.Random) -> None:
    """A few rounds of requests; the same for the same ``chance``, whatever becomes of its host."""
    said = [list(start)]
    for turn in range(chance.randint(1, 4)):
        what = chance.choice(["on", "on", "other", "side by side", "twins", "summary", "gone"])
        last, tool, limit = said[-1], [600 + turn] * chance.randint(0, 3), chance.choice([3, 30])
        requests = {
            "on": [[*last, *tool]],
            "other": [[700 + turn, 701]],
            "side by side": [[*last, *tool], [710 + turn], [*start, 720 + turn], [*chance.choice(said), 730]],
            "twins": [[*last, *tool], [*last, *tool]],
            "summary": [[*start, 740 + turn]],
            "gone": [[*chance.choice(said), 750]],
        }[what]
        heard = what != "gone"
        answers = await asyncio.gather(*(door.ask(ids, heard=heard, max_tokens=limit) for ids in requests))
        if heard:
            said += [answer.conversation.tolist() for answer in answers]
    if chance.random() < 0.2:
        asyncio.ensure_future(door.ask([760], heard=False))  # noqa: RUF006  # nobody waits for it
        await asyncio.sleep(chance.choice([0.0, 2.0]))


class AgentsLife(HostsLife):
    """All of its functions are agents."""

    longest = (400,)
    prompts = 6
    multi_turn = 1.0

    def __init__(self, seed: int) -> None:
        self.told: dict[Any, list[Row]] = {}
        """What each sample's function has asked and heard, made into rows."""
        super().__init__(seed)

    async def rollout(self, prompt: Any, llm: april.LLM) -> Any:
        """An agent, which always asks at least once and hears the answer."""
        key = llm.sample_id
        door, chance = door_of(llm), random.Random(f"{self.seed} {key}")
        await door.ask(prompt.token_ids if chance.random() < 0.7 else [555, 556])
        await agent(door, prompt.token_ids.tolist(), chance)
        if self.luck.random() < self.raises:
            raise OSError("worse luck")
        if prompt.token_ids.tolist() == [5, 6]:
            return  # in an evaluation, which has samples of the same names
        self.told[key] = rows_of(door.events)
        self.seen["rows"] += len(self.told[key])
        self.seen["unheard"] += door.asked - len(door.heard)

    def worth(self, response: Any) -> float:
        """All conversations count."""
        return self.worth_of([(c.prompt_ids, c.tokens, c.loss_mask) for c in response.conversations])

    @staticmethod
    def worth_of(rows: list[Any]) -> float:
        """The reward of these rows."""
        return float(sum(3 * int(sum(p)) + int(sum(t)) + 5 * int(sum(m)) for p, t, m in rows) % 97)

    def check_environment(self, prompt: int, tokens: list[int]) -> None:
        """The oracle has them."""

    def check_rewards(self, batch: Batch) -> None:
        """Rows are what the function has asked and heard; their reward is that of all of them."""
        for key in {s.id for s in batch.samples}:
            rows = sorted(row(s) for s in batch.samples if s.id == key)
            assert rows == self.told[key], key
            assert {s.reward for s in batch.samples if s.id == key} == {self.worth_of(rows)}


@pytest.mark.parametrize("first", range(0, LIVES, BATCH))
async def test_lives_of_agents_on_hosts_that_join_die_hang_and_come_back(
    first: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each answer comes to who has asked; rows hold what was heard, once; nothing else is kept or lost."""
    monkeypatch.setattr(RolloutScheduler, "_gateway_type", MemoryDoors)
    monkeypatch.setattr(Host, "_gateway_type", MemoryDoors)
    seen: Counter[str] = Counter()
    for seed in range(first, first + BATCH):
        life = await lived(AgentsLife(seed))
        seen += life.seen
        seen["replayed"] += life.scheduler.driver.core.counters["lost_functions"]
    said = [record.getMessage() for record in caplog.records]
    assert not [text for text in said if any(wrong in text for wrong in MISUNDERSTOOD)]
    assert min(seen[what] for what in ("rows", "unheard", "replayed", "dies", "leaves")) >= 2, seen
