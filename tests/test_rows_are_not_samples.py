"""What counts responses counts samples, however many rows of the batch each of them has."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from memory_doors import MemoryDoors, door_of
from several_rows import batch

import april
from april.core.batch import rows_by_sample
from april.export import choose_samples
from april.record.recorder import Recorder
from april.testing import AuditError, FakeEngine, audit, run_virtual
from april.testing.same_loop import _SameLoopScheduler
from benchmarks.demo.arm import group_spread

CONFIG = april.Config(
    rollout_batch_size=2, n_samples_per_prompt=2, over_sampling_batch_size=4, max_response_len=40, max_in_flight=8,
    engine={"kind": "simulated"},
)  # fmt: skip


def test_a_batch_says_how_many_samples_and_rows_it_has() -> None:
    """Where each sample is a row, it does not say so twice."""
    assert "samples=4 rows=7 tokens=25" in repr(batch())
    one = replace(batch(), samples=batch().samples[2:4], group_sizes=(2,))
    assert "samples=2 tokens=7" in repr(one)


@pytest.mark.parametrize("k", [1, 3, 4, 9])
def test_texts_are_of_different_samples(k: int) -> None:
    """A sample of several conversations is shown once, by the first one."""
    chosen = choose_samples(batch(), k)
    assert len({s.id for s in chosen}) == len(chosen) == min(k, 4)
    firsts = {rows[0].id: rows[0].chain for rows in rows_by_sample(batch().samples)}
    assert all(s.chain == firsts[s.id] for s in chosen)


def test_lengths_of_a_group_are_those_of_its_samples() -> None:
    """Rows of a sample are one response: 9 and 3 tokens, 3 and 10."""
    expected = [np.std(lengths) / np.mean(lengths) for lengths in ([9, 3], [3, 10])]
    assert group_spread(batch().samples) == pytest.approx(expected)


def test_a_record_has_the_length_of_each_response() -> None:
    """Readers draw the lengths of responses from it."""
    lines: list[Any] = []
    recorder = object.__new__(Recorder)
    recorder._lines = type("Lines", (), {"add": lambda self, kind, parts: lines.append(parts())})()  # type: ignore[assignment]
    recorder.record_batch(batch())
    assert lines[0]["lengths"] == [9, 3, 3, 10]


async def agents() -> tuple[list[april.Batch], FakeEngine, Any]:
    """Batches of samples with three conversations each, and what the engine has handed over."""
    engine = FakeEngine("e", lengths=7, chunk_tokens=1)

    async def rollout(prompt: april.Prompt, llm: april.LLM) -> None:
        door = door_of(llm)
        first = await door.ask(prompt.token_ids)
        await asyncio.gather(door.ask([70, 71]), door.ask([80]), door.ask([*first.conversation, 90], max_tokens=3))

    async def reward(prompt: april.Prompt, response: april.Response) -> float:  # a thread would not wait for the clock
        return float(len(response.conversations))

    scheduler = _SameLoopScheduler(
        CONFIG, prompts=[{"token_ids": [1, 2, i + 3], "i": i} for i in range(6)], engines=[engine], check=True,
        rollout=rollout, reward=reward,
    )  # fmt: skip
    batches = []
    try:
        for _ in range(3):
            batches.append(await scheduler.anext_batch())
            await scheduler._driver.update_weights("weights")
        return batches, engine, scheduler.ledger()["tokens"]
    finally:
        await scheduler._driver.close()


@pytest.fixture
def audited(monkeypatch: pytest.MonkeyPatch) -> tuple[list[april.Batch], FakeEngine, Any]:
    monkeypatch.setattr(april.RolloutScheduler, "_gateway_type", MemoryDoors)
    return run_virtual(agents())


def test_an_audit_knows_conversations(audited: Any) -> None:
    """Rows of one sample are no second delivery, and every token is compared with the engine's record."""
    batches, engine, ledger = audited
    found = audit(batches, [engine], ledger=ledger)
    assert sum(map(len, batches)) == 3 * found.samples
    assert (found.samples, found.duplicated) == (12, 0)


def test_an_audit_finds_a_row_that_came_twice(audited: Any) -> None:
    """In the same batch or in another one."""
    batches, engine, ledger = audited
    first = batches[0]
    again = replace(first, samples=(*first.samples, first.samples[0]), group_sizes=(*first.group_sizes, 1))
    for wrong in ([again, *batches[1:]], [first, *batches[1:-1], replace(batches[-1], samples=first.samples[:1])]):
        with pytest.raises(AuditError, match="was delivered again"):
            audit(wrong, [engine], ledger=ledger)
