"""Agent loops that go wrong in verl, and their requests: no step waits for them, no token is unnamed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters.stand_in_verl import Trainer, single_turn
from april.core.settings import CoreSettings, EngineLimits
from april.core.types import GenerationMode, Refill
from april.processes.coordinator.calls import Session, generate
from april.processes.coordinator.coordinator import Coordinator
from april.processes.coordinator.messages import Go, Result, Start

Make = Callable[..., Trainer]


@pytest.fixture
def trainer() -> Iterator[Make]:
    made: list[Trainer] = []

    def make(length_of: Callable[[int, int], int] = lambda row, sample: 5, **more: Any) -> Trainer:
        made.append(Trainer(length_of, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_cancelled_tool_costs_a_try_and_then_its_group(trainer: Make) -> None:
    """A CancelledError from within an agent loop ends that rollout and nothing else."""
    tries: Counter[int] = Counter()

    async def with_a_tool(session: Session, prompt: list[int], send: Any) -> list[int]:
        tries[prompt[1]] += 1
        if prompt[1] == 1 or (prompt[1] == 2 and tries[2] == 1):
            raise asyncio.CancelledError
        return await single_turn(session, prompt, send)

    run = trainer()
    run.agent_loop = with_a_tool
    for _ in range(4):
        run.step()
        run.update()
    assert tries[2] > 2
    assert 1 not in {row for row, _ in run.trained}
    assert 2 in {row for row, _ in run.trained}
    assert run.ask("ledgers")["prompts"]["dropped"] == {"failed": 1}


def test_a_timeout_around_a_call_costs_its_group_and_not_the_run(trainer: Make) -> None:
    """A rollout that goes on though its call is unfinished has failed; what the server still sends is named."""

    async def in_a_hurry(session: Session, prompt: list[int], send: Any) -> list[int]:
        if prompt[1] != 1:
            return await single_turn(session, prompt, send)
        try:
            done = await asyncio.wait_for(generate(session, send, prompt, 40, 1.0), 2.0)
        except TimeoutError:
            return [] if session.index else [int(t) for t in (await generate(session, send, prompt, 40, 1.0)).tokens]
        return done.tokens.tolist()

    run = trainer()
    run.agent_loop = in_a_hurry
    for _ in range(4):
        run.step()
        run.update()
    assert 1 not in {row for row, _ in run.trained}
    assert run.ask("ledgers")["prompts"]["dropped"] == {"failed": 1}


def test_a_dropped_group_holds_up_no_step(trainer: Make) -> None:
    """Its sibling still generates when N groups are complete: the step ends then, and those tokens are named."""

    def reward(row: int, sample: int, response: list[int]) -> float:
        if row == 1:
            raise ValueError("no answer in the response")
        return float(sample)

    # the third failure is at 6, with the sibling on its way to 35
    run = trainer(lambda row, sample: (35 if sample else 2) if row == 1 else 7, reward_of=reward)
    before = run.loop.time()
    run.step()
    assert run.loop.time() - before == 7.0
    assert run.coordinator.core.counters["fenced_attempts"] == 0
    run.validate(1.0)
    tokens = run.ask("ledgers")["tokens"]
    assert tokens["dropped"] == {"failed": 6, "late": 7}
    assert tokens["observed"] == run.server.generated


@pytest.mark.parametrize("policy", ["restart", "drop"])
def test_surplus_that_gets_too_old_after_a_restart(trainer: Make, tmp_path: Path, policy: str) -> None:
    """Somebody listens for it in the new process: it begins again, or is dropped and leaves verl's queue."""
    changes = {"april__max_staleness": 1, "april__on_stale": policy, "april__over_sampling_batch_size": 12}
    run = trainer(**changes)
    run.step()
    mine = run.save(tmp_path)
    again = trainer(**changes)
    again.trained = list(run.trained)
    assert len(again.load(tmp_path, mine)) == 9
    for _ in range(6):
        again.step()
        again.update()
    assert max(Counter(again.trained).values()) == 1
    books = again.ask("ledgers")
    assert books["tokens"]["dropped"]["stale"] > 0
    if policy == "drop":
        assert set(again.queue.values()) & {row for row, _ in again.trained} == set()
        assert len(again.queue) == books["prompts"]["held"] + len(again.run._offered)


def test_a_dropped_prompt_is_not_asked_again_after_a_restart(trainer: Make, tmp_path: Path) -> None:
    """Its rollouts have not all ended when verl saves, so it is still in verl's queue."""

    async def with_a_slow_tool(session: Session, prompt: list[int], send: Any) -> list[int]:
        if prompt[1] == 1 and session.index == 0:
            await asyncio.sleep(1.9)
            raise ValueError("broken")
        response = await single_turn(session, prompt, send)
        if prompt[1] == 1:
            await asyncio.sleep(1000.0)
        return response

    run = trainer(lambda row, sample: 5 if row == 1 else 8)
    run.agent_loop = with_a_slow_tool
    run.step()
    assert run.ask("ledgers")["prompts"]["dropped"] == {"failed": 1}
    mine = run.save(tmp_path)
    assert 1 in mine["queue"].values()
    again = trainer()
    again.load(tmp_path, mine)
    assert 1 not in again.queue.values()
    for _ in range(6):
        again.step()
        again.update()
    assert 1 not in {row for row, _ in again.trained}


def test_tokens_that_came_late_are_in_the_checkpoint(trainer: Make, tmp_path: Path) -> None:
    """Those of requests that the step did not wait for: the next process goes on behind them."""

    async def over_a_slow_network(session: Session, prompt: list[int], send: Any) -> list[int]:
        async def slowly(token_ids: Any, max_tokens: int) -> Any:
            result = await send(token_ids, max_tokens)
            await asyncio.sleep(3.0)  # longer than the step waits
            return result

        return await single_turn(session, prompt, slowly)

    run = trainer(lambda row, sample: 30 if row == 0 else 4)
    run.agent_loop = over_a_slow_network
    run.step()
    run.validate(10.0)
    late = {i: list(r.tokens) for i, r in run.coordinator.host.mailboxes.late.items() if len(r.tokens)}
    assert late
    generated, mine = run.server.generated, run.save(tmp_path)
    again = trainer(lambda row, sample: 30 if row == 0 else 4)
    again.load(tmp_path, mine)
    seen: dict[str, Any] = {}
    for _ in range(6):
        again.step()
        seen |= again.last
        again.update()
    for response in (t for key, t in seen.items() if key.startswith("u0_")):
        assert len(response["tokens"]) == 30
        assert response["spans"][0][2] == "0.0"
        assert response["spans"][1][2].startswith("1.")
    tokens = again.ask("ledgers")["tokens"]
    assert tokens["observed"] == generated + again.server.generated


@pytest.mark.asyncio
async def test_tokens_of_weights_that_nobody_told_of() -> None:
    """What separate_async would bring, whose servers get weights without a word: the tokens are dropped by name."""
    settings = CoreSettings(
        rollout_batch_size=1, n_samples_per_prompt=1, over_sampling_batch_size=2, max_response_len=50, max_in_flight=2,
        generation=GenerationMode.CONTINUOUS, refill=Refill.SAMPLE,
    )  # fmt: skip
    coordinator = Coordinator(settings, EngineLimits("verl", 100, None, (0,), "temperature"), check=True)
    await coordinator.begin(0)
    await coordinator.drawn(["a", "b"])
    start = await coordinator.start("a", 0)
    assert isinstance(start, Start)
    assert isinstance(await coordinator.call("a", 0, start.life, np.array([1, 2], np.int32), 50, 1.0), Go)
    tokens, logprobs = np.array([5, 6, 0], np.int32), np.zeros(3, np.float32)
    result = Result(offset=2, tokens=tokens, logprobs=logprobs, label=1, aborted=False)

    await coordinator.ended("a", 0, start.life, result)

    assert (await coordinator.ledgers())["tokens"]["dropped"] == {"corrupt": 3}
