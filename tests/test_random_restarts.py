"""Restarts at random: from any checkpoint, in any moment, with engines that break off and aborts that get lost."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from seeds import seeds
from test_three_epochs import EPOCHS, MODES, CountingEngine, World, keys_of, quiet, settings_of
from virtual_rollouts import RecordingEngine, on_virtual_time

from april.core.types import GenerationMode, OnDataEnd, OnStale
from april.engines.protocol import Chunk, Request
from april.errors import DataExhausted

__all__ = ["quiet"]  # a fixture


async def live(world: World, rng: random.Random) -> None:
    """Train until every prompt of the epochs is settled, or the data has ended, with restarts on the way."""
    kept, restarts = world.keep(0), 8
    wanted = EPOCHS * world.prompts
    while len({key for key in world.settled() if key[0] < EPOCHS}) < wanted:
        waiter = asyncio.create_task(world.driver.next_batch())
        if rng.random() < 0.35:
            await asyncio.sleep(rng.uniform(0, 60))
            kept = world.keep(len(world.trained))
            if restarts and rng.random() < 0.5:  # in the middle of a step
                restarts -= 1
                waiter.cancel()
                await asyncio.wait([waiter])
                await world.restart(kept)
                continue
        try:
            batch = await waiter
        except DataExhausted:
            return
        assert batch.id == len(world.trained)
        world.look_at(batch)
        luck = rng.random()
        if luck > 0.1:
            world.trained.append(keys_of(batch))
        if luck < 0.2:  # before the weight update; below 0.1 the batch was not trained on
            kept = world.keep(len(world.trained))
            if restarts:
                restarts -= 1
                await world.restart(kept)
                continue
        if luck > 0.1:
            await world.driver.update_weights()
        else:
            await world.restart(kept)
        if restarts and rng.random() < 0.1:  # from an older checkpoint
            restarts -= 1
            await world.restart(kept)


STEPWISE, CONTINUOUS = GenerationMode


@pytest.mark.parametrize(
    ("generation", "seed"), [*seeds(24, STEPWISE), *seeds(10, CONTINUOUS)]
)
@on_virtual_time
async def test_every_prompt_is_settled_once_whatever_happens(
    generation: GenerationMode, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any schedule and policy, many restarts, faults: exactly once per epoch, tokens as the engines made them."""
    rng, faults = random.Random(seed), random.Random(seed)

    def breaks_off(engine: CountingEngine, request: Request, chunk: Chunk) -> Chunk:
        if faults.random() < 0.02:
            raise ConnectionError("reset")
        engine.handed += len(chunk.tokens)
        return chunk

    async def gets_lost(engine: CountingEngine, attempt_ids: Sequence[str] | None = None) -> None:
        if faults.random() < 0.2:
            return
        await asyncio.sleep(faults.random())
        await RecordingEngine.abort(engine, attempt_ids)

    monkeypatch.setattr(CountingEngine, "alter", breaks_off)
    monkeypatch.setattr(CountingEngine, "abort", gets_lost)
    n, prompts = rng.choice([2, 3, 5]), rng.choice([7, 12, 20])
    mode, stale, end = MODES[seed % len(MODES)], rng.choice(list(OnStale)), rng.choice(list(OnDataEnd))

    changes = {**settings_of(n, mode), "on_stale": stale, "max_staleness": rng.choice([1, 2, 4]), "check": True}
    changes["generation"] = generation
    world = World(n, prompts, end, changes)
    await live(world, rng)
    held = [(g.prompt.epoch, g.prompt.position) for g in world.core.buffer]
    times = Counter(world.settled())
    assert max(times.values()) == 1
    if end is not OnDataEnd.WAIT:
        held = []
    missing = {(e, p) for e in range(EPOCHS) for p in range(prompts)} - set(times)
    assert missing == {key for key in held if key[0] < EPOCHS}
    await world.rollouts.close()
