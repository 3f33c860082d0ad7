"""Trainers that fetch batches ahead: the bound holds when a batch is trained, nothing is masked, nothing is lost."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import pytest
from virtual_rollouts import on_virtual_time

from april import Config
from april.core.batch import Batch
from april.errors import CheckpointError, ConfigError, RolloutError
from april.testing import FakeEngine, rollouts, run_virtual

N, SAMPLES, TRAINING_S = 4, 2, 600.0


def length(request: Any) -> int:
    """Heavy tails: median 55, the longest of a hundred some 900."""
    group, index = request.sample_key
    return max(1, min(2000, int(random.Random(group * 64 + index).lognormvariate(4.0, 1.2))))


async def slow_reward(prompt: Any, response: Any) -> float:
    """One response in eight is judged for minutes."""
    await asyncio.sleep(300.0 if response.sample_id.group % 8 == 3 else 2.0)
    return float(len(response.tokens))


def config(bound: int, refill: str, over: int, **changes: Any) -> Config:
    return Config(
        rollout_batch_size=N, n_samples_per_prompt=SAMPLES, over_sampling_batch_size=over, max_in_flight=over * SAMPLES,
        refill=refill, max_staleness=bound, max_response_len=2000, engine={"kind": "simulated"}, **changes,
    )  # fmt: skip


def schedule(bound: int, refill: str, over: int, out: int, steps: int = 24) -> SimpleNamespace:
    """A trainer of so many updates, who fetches ``out`` batches ahead while it trains; 0: who waits for each batch.

    How old the tokens are is counted here, by the weights that are there when they are trained.
    """
    seen = SimpleNamespace(oldest=0, masked=0, trained=Counter())

    async def main() -> None:
        prompts = ([1, 2 + i % 900] for i in range(10**6))
        engines = [FakeEngine("e", lengths=length, max_running=4096)]
        settings, waiting = config(bound, refill, over), deque[Batch]()
        async with rollouts(settings, engines=engines, prompts=prompts, reward=slow_reward, check=False) as run:
            for _ in range(steps):
                while len(waiting) < max(1, out):
                    waiting.append(await run.next_batch())
                fetching = asyncio.create_task(run.next_batch()) if out else None
                batch, now = waiting.popleft(), run.version.n
                ages = [now - s.version.n for sample in batch.samples for s in sample.segments]
                assert batch.trained_at.n == now
                assert batch.metrics["staleness_max"] == max(ages)
                seen.oldest = max(seen.oldest, *ages)
                seen.masked += sum(int((sample.loss_mask == 0).sum()) for sample in batch.samples)
                seen.trained.update((s.prompt.epoch, s.prompt.position, s.id.index) for s in batch.samples)
                await asyncio.sleep(TRAINING_S)
                await run.weight_update()
                if fetching is not None:
                    waiting.append(await fetching)
            run.audit()
            seen.seconds = asyncio.get_running_loop().time() / steps
            seen.dropped = {str(r): c for r, c in run.ledger()["prompts"].dropped.items() if c}

    run_virtual(main(), limit_s=1e7)
    return seen


@pytest.mark.parametrize("bound", [1, 2, 5])
@pytest.mark.parametrize("over", [N, 2 * N])
@pytest.mark.parametrize("refill", ["none", "group", "sample"])
def test_the_bound_holds_when_a_batch_is_trained(refill: str, over: int, bound: int) -> None:
    """One and two batches out, slow rewards, heavy tails: nothing masked or dropped, no slower than who waits."""
    waits = schedule(bound, refill, over, 0)
    assert waits.oldest <= bound
    for out in (1, 2)[:bound]:
        ahead = schedule(bound, refill, over, out)
        assert (ahead.masked, ahead.dropped) == (0, {})
        assert ahead.oldest <= bound
        assert max(ahead.trained.values()) == 1
        assert ahead.seconds <= waits.seconds


def short(bound: int, **engine: Any) -> Any:
    """A run with short responses before one engine."""
    engines = [FakeEngine("e", **({"lengths": 9} | engine))]
    return rollouts(config(bound, "none", N), engines=engines, prompts=[[1, 2]] * 99)


@on_virtual_time
async def test_who_never_trains_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """More batches out than the bound: a fetch ahead waits for an update, and says so once it has waited for long."""
    async with short(1) as run:
        for _ in range(2):
            await run.next_batch()
        fetching = asyncio.create_task(run.next_batch())
        await asyncio.sleep(100.0)
        assert not fetching.done()
        assert len(caplog.messages) == 1
        assert "2 batches are delivered but not trained" in caplog.messages[0]
        with pytest.raises(RolloutError, match="another call waits for the same batch"):
            await run.next_batch()
        await run.weight_update()
        batch = await fetching
        assert (batch.version.n, batch.trained_at.n, batch.metrics["batches_out"]) == (1, 2, 1.0)


@on_virtual_time
async def test_an_update_commits_the_oldest_batch_or_those_up_to_the_one_it_names() -> None:
    """At most one update per batch, in the order of delivery; an unknown batch is refused before anything happens."""
    async with short(5) as run:
        core = run.scheduler._driver.core
        with pytest.raises(ConfigError, match="there is no batch 0; no batch was delivered yet"):
            await run.weight_update(trained=0)
        for _ in range(5):
            await run.next_batch()
        await run.weight_update()
        assert list(core.leased) == [1, 2, 3, 4]
        await run.weight_update(trained=2)
        assert list(core.leased) == [3, 4]
        for wrong in (5, -1, True, "3"):
            with pytest.raises(ConfigError, match="weight_update: "):
                await run.weight_update(trained=wrong)  # type: ignore[arg-type]
        await run.weight_update(trained=2)  # once more for a batch that is committed: an update of nothing else
        assert list(core.leased) == [3, 4]
        assert run.version.n == 3
        with pytest.raises(CheckpointError, match="trained_through=1"):
            run.state_dict(trained_through=1)


@on_virtual_time
async def test_two_updates_at_once_commit_two_batches() -> None:
    """Each takes the oldest batch that no other one has; where the first comes to nothing, the second has both."""
    async with short(5, weight_update_s=5.0) as run:
        core = run.scheduler._driver.core
        for _ in range(4):
            await run.next_batch()
        await asyncio.gather(run.weight_update(), run.weight_update())
        assert (list(core.leased), run.version.n) == ([2, 3], 2)

        def broken() -> None:
            raise ValueError("no route")

        first = asyncio.create_task(run.weight_update(transfer=broken))
        await asyncio.sleep(0)
        await run.weight_update()
        assert (list(core.leased), run.version.n) == ([], 3)
        with pytest.raises(ValueError, match="no route"):
            await first


@on_virtual_time
async def test_a_bound_that_is_lowered() -> None:
    """What is drawn afterwards keeps it, what was drawn before keeps its own; it crosses a restart; never upwards."""
    lengths = {(group, i): 9 + 40 * (group % 3 == 0) for group in range(99) for i in range(SAMPLES)}
    many = [[1, 2]] * 99
    async with rollouts(config(3, "sample", N), engines=[FakeEngine("e", lengths=lengths)], prompts=many) as run:
        for _ in range(3):
            await run.next_batch()
            await run.weight_update()
        drawn = run.scheduler._driver.core.context.groups_drawn
        assert run.scheduler._driver.lower_staleness(None) == 2
        assert run.scheduler._driver.lower_staleness(1) == 1
        for wrong in (2, -1, True, 0.5):
            with pytest.raises(ConfigError, match="lower_staleness: bound must be between 0 and the current bound, 1,"):
                run.scheduler._driver.lower_staleness(wrong)  # type: ignore[arg-type]
        oldest = {True: 0, False: 0}
        for _ in range(12):
            batch = await run.next_batch()
            assert batch.metrics["staleness_bound"] == 1.0
            for sample in batch.samples:
                after = sample.id.group >= drawn
                oldest[after] = max(oldest[after], sample.staleness)
            await run.weight_update()
        assert oldest[True] == 1 < oldest[False] <= 3
        state = run.state_dict()
    async with rollouts(config(3, "sample", N), engines=[FakeEngine("e", lengths=lengths)], prompts=many) as run:
        await run.load_state_dict(state)
        assert (await run.next_batch()).metrics["staleness_bound"] == 1.0
    async with rollouts(config(2, "sample", N), engines=[FakeEngine("e", lengths=lengths)], prompts=many) as run:
        await run.load_state_dict(state)
        assert (await run.next_batch()).metrics["staleness_bound"] == 2.0


@on_virtual_time
async def test_batches_that_no_update_follows() -> None:
    """Data generation, and gradients over several batches: commit() ends a batch, and the next one is on policy."""
    async with short(0) as run:
        for _ in range(8):
            batch = await run.next_batch()
            assert batch.off_policy_share == 0.0
            run.commit(batch.id)
        assert not run.scheduler._driver.core.leased
        await run.weight_update()
        assert run.version.n == 1
        with pytest.raises(ConfigError, match="commit: there is no batch 8; the batches so far are 0 to 7"):
            run.commit(8)


@on_virtual_time
async def test_what_was_planned_is_recorded_at_the_commit() -> None:
    """A trainer that updates less often than once a batch trains younger tokens than planned, and is told so."""
    async with short(5) as run:
        batches = [await run.next_batch() for _ in range(3)]
        assert [b.metrics["staleness_max"] for b in batches] == [0, 1, 2]
        await run.weight_update(trained=2)
        after = await run.next_batch()
        assert after.metrics["committed_staleness_max"] == after.metrics["committed_off_policy_share"] == 0.0
