"""States that cannot be loaded: one sentence each, nothing has changed, and the right state can still be loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from saved_rollouts import LENGTHS, check, new, plain, resealed, until_the_end
from virtual_rollouts import RecordingEngine, on_virtual_time

from april.core.versions import PolicyVersion
from april.driver.prompt_source import PromptSource
from april.errors import CheckpointError, EngineError


def damage(path: list[Any], value: Any) -> Callable[[Any], Any]:
    def change(state: Any) -> Any:
        *way, last = path
        place = state
        for step in way:
            place = place[step]
        if value is ...:
            del place[last]
        else:
            place[last] = value
        return state

    return change


def chains(**changes: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Functions of fields of all conversations that have tokens."""

    def change(state: Any) -> Any:
        samples = [s for part in ("ready", "waiting") for g in state["core"][part] for s in g["samples"]]
        for chain in (c for s in samples for c in s["chains"] if c["tokens"]):
            for name, made in changes.items():
                chain[name] = made(chain[name])
        return state

    return change


def sealed(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same change of a state whose checksum fits all the same."""
    return lambda state: resealed(change(state))


def all_of(value: float, dtype: str) -> Callable[[bytes], bytes]:
    return lambda data: np.full(len(data) // 4, value, dtype).tobytes()


NUMBERS: dict[str, tuple[dict[str, Any], str]] = {
    "ids": ({"tokens": all_of(2**31 - 1, "<i4")}, "does not fit these engines: token id 2147483647 is outside"),
    "negative ids": ({"tokens": all_of(-1, "<i4")}, "does not fit these engines: token id -1 is outside"),
    "fewer tokens": ({"tokens": lambda data: data[:-4]}, "is damaged"),
    "bytes": ({"tokens": lambda data: data[:-1]}, "is damaged"),
    "calls": ({"calls": lambda calls: [[1, 2]]}, "is damaged"),
    "segments": ({"segments": lambda segments: ["a text"]}, "is damaged"),
}
"""Values that have another type than april's, or do not fit the engines; the checksum shows all other changes."""

DAMAGED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "none": (lambda s: None, "not a state that april's"),
    "text": (lambda s: "state", "not a state that april's"),
    "empty": (lambda s: {}, "not a state that april's"),
    "changed": (damage(["core", "batches"], 7), "its checksum is '[0-9a-f]{32}', but its content has '[0-9a-f]{32}'"),
    "one bit": (chains(tokens=lambda data: bytes([data[0] ^ 1]) + data[1:]), "its checksum is "),
    "no checksum": (damage(["checksum"], ...), "its checksum is None"),
    "format": (damage(["format"], 99), "has format 99; this version of april reads format 4"),
    "kind": (damage(["april"], "desk"), "a state of april's 'desk', but a state of 'rollouts' is needed"),
    "no core": (sealed(damage(["core"], ...)), "is damaged"),
    "core": (sealed(damage(["core"], {})), "is damaged"),
    "n": (
        sealed(damage(["core", "settings", "n_samples_per_prompt"], 3)),
        "saved with n_samples_per_prompt=3, but the configuration has 2",
    ),
    "seed": (sealed(damage(["core", "settings", "run_seed"], 7)), "saved with seed=7, but the configuration has 0"),
    "version": (sealed(damage(["core", "version"], 3)), "is damaged"),
    "waiting": (sealed(damage(["core", "waiting"], ...)), "is damaged"),
    "ledger": (sealed(damage(["core", "tokens", "observed"], 1)), "is damaged: .*do not add up"),
    "prompts ledger": (sealed(damage(["core", "prompts", "delivered"], 1)), "is damaged: .*do not add up"),
    "reason": (sealed(damage(["core", "tokens", "dropped"], {"whim": 0})), "is damaged"),
    "finished": (sealed(damage(["core", "waiting", 0, "samples", -1, "finished"], 1)), "is damaged"),
    "position": (sealed(damage(["prompts", "position"], None)), "is damaged"),
    "prompts": (sealed(damage(["prompts"], [])), "is damaged"),
    "epoch": (sealed(damage(["prompts", "epoch"], 4)), r"saved in epoch 4, but the configuration has epochs=1"),
}
DAMAGED |= {kind: (sealed(chains(**changes)), words) for kind, (changes, words) in NUMBERS.items()}


@pytest.mark.parametrize("kind", list(DAMAGED))
@on_virtual_time
async def test_a_state_that_is_refused_changes_nothing(kind: str) -> None:
    """CheckpointError with one sentence; afterwards the right state can be loaded, and goes on as if nothing was."""
    change, words = DAMAGED[kind]

    old = new()
    await old.step()
    waiter = asyncio.create_task(old.driver.next_batch())
    await asyncio.sleep(8)
    good = plain(old.driver.state_dict(None))
    await waiter
    await old.close()
    again = new()
    before = repr(again.core)
    with pytest.raises(CheckpointError, match=words) as caught:
        await again.driver.load_state_dict(change(deepcopy(good)))
    assert "\n" not in str(caught.value)
    assert repr(again.core) == before
    assert again.driver._source.state_dict() == PromptSource([[1]], 9).state_dict()
    assert {e.engine._version for e in again.engines} == {PolicyVersion(0, 0)}
    again.core.validate()
    await again.driver.load_state_dict(good)
    for _ in range(2):
        check(await again.driver.next_batch())
        await again.driver.update_weights()


@pytest.mark.parametrize("after", ["a batch", "a weight update", "a load"])
@on_virtual_time
async def test_a_state_is_loaded_first(after: str) -> None:
    """Once something has begun a load is refused, and the run goes on with every prompt."""
    first = new(prompts=30)
    old_groups = (await first.step()).group_ids.tolist()
    await first.close()

    old = new(prompts=30)
    await old.step()
    state = plain(old.driver.state_dict(None))
    await old.close()
    again = new(prompts=30)
    delivered = []
    if after == "a load":
        delivered = list(old_groups)
        await again.driver.load_state_dict(state)
    elif after == "a batch":
        delivered += (await again.step()).group_ids.tolist()
    else:
        await again.driver.update_weights()
    with pytest.raises(CheckpointError, match="loaded before the first batch and weight update; create a new sched"):
        await again.driver.load_state_dict(state)
    async for batch in until_the_end(again):
        delivered += batch.group_ids.tolist()
    assert sorted(delivered) == sorted(2 * list(range(30)))


@on_virtual_time
async def test_an_engine_that_cannot_be_told() -> None:
    """The load fails as a whole and can be repeated."""

    class Fails(RecordingEngine):
        failures = 1

        async def update_weights(self, version: PolicyVersion, path: str | None = None) -> None:
            if self.failures:
                self.failures -= 1
                raise EngineError("no route to e1")
            await super().update_weights(version, path)

    old = new()
    await old.step()
    state = plain(old.driver.state_dict(None))
    await old.close()
    again = new(engines=[RecordingEngine(LENGTHS.sample, "e0"), Fails(LENGTHS.sample, "e1")])
    with pytest.raises(EngineError, match="no route to e1"):
        await again.driver.load_state_dict(state)
    assert len(again.core.buffer) == 0
    assert again.driver._source.position == 0
    with pytest.raises(EngineError, match=r"reached engines \['e0'\] but not \['e1'\]"):
        await again.driver.next_batch()
    assert await again.driver.load_state_dict(state) == PolicyVersion(1, 1)
    check(await again.driver.next_batch())
