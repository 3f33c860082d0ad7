"""Records of runs whose prompts have images and whose tokens have rows: decided again, and without their content."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from test_random_extras import CONFIG, check, engines
from virtual_rollouts import on_virtual_time

import april
from april.core.attachments import Attachment, Placed
from april.core.saved_state import Logprobs, SavedChain, Tokens, bare
from april.core.types import Prompt
from april.record.event_values import from_plain, to_plain
from april.record.replay import replay
from april.testing import FaultScript, rollouts
from april.testing.fault_script import ROW_FAULTS, STREAM_FAULTS
from april.testing.same_loop import Rollouts
from april.view.report import page
from april.view.run_data import read_run

IMAGES = [Attachment.of("image", bytes([i]) * (100 + i)) for i in range(3)]


class Prompts(list[Prompt]):
    """Several of them have the same image."""

    attachments = ("image",)


async def recorded(path: Path, seed: int = 0) -> Rollouts:
    """A few batches of a run with a record, in which requests break off and rows get lost."""
    prompts = Prompts(
        Prompt(np.array([1, 2, i + 3], np.int32), {"i": i}, attached=(Placed(IMAGES[i % 3], 1, 2, (2,)),))
        for i in range(40)
    )
    script = FaultScript.random(seed=seed, rate=0.25, kinds=(*STREAM_FAULTS, *ROW_FAULTS))
    config = april.Config(**CONFIG, generation="continuous" if seed % 2 else "stepwise")
    async with rollouts(config, engines=engines(script), prompts=prompts, record=path) as run:
        for _ in range(4):
            batch = await run.next_batch()
            check(batch)
            assert all(s.attached[0].attachment == IMAGES[s.prompt.data["i"] % 3] for s in batch.samples)
            await run.weight_update()
    return run


@pytest.mark.parametrize("seed", range(4))
@on_virtual_time
async def test_a_run_with_images_and_rows_is_decided_again(seed: int, tmp_path: Path) -> None:
    """From events alone, which have the hash and the size of each image, and how many tokens came without rows."""
    path = tmp_path / "run.jsonl"
    core = (await recorded(path, seed))._driver.core
    again = replay(path).core
    assert (again.tokens, again.prompts) == (core.tokens, core.prompts)
    lines = map(msgspec.json.decode, path.read_text("utf-8").splitlines())
    drawn = [parts for _, what, parts, *_ in lines if what == "PromptsDrawn"]
    first = drawn[0]["prompts"][0]["attached"][0]["attachment"]
    assert first == {"kind": "image", "digest": IMAGES[0].digest, "size": 100}


@on_virtual_time
async def test_the_report_tells_of_tokens_without_rows(tmp_path: Path) -> None:
    """Beside what else was dropped."""
    path = tmp_path / "run.jsonl"
    run = await recorded(path)
    bare = sum(batch.metrics["no_extras_tokens"] for batch in run.batches)
    assert bare
    assert f"tokens that came without their rows of extras</td><td>{bare:,.0f}" in page([read_run(path)])


def test_a_state_in_a_record_has_no_image_and_no_row() -> None:
    """Hashes, sizes and numbers of rows are left of it, which a replay can begin with."""
    attachment = replace(IMAGES[0], path="/home/me/a.png")
    left = json.loads(json.dumps(to_plain(attachment)))
    assert left == {"kind": "image", "digest": attachment.digest, "size": 100}
    again = from_plain(left, Attachment)
    assert (again, again.data, again.path) == (attachment, None, "")
    chain = SavedChain(
        tokens=Tokens(np.arange(3)), logprobs=Logprobs(np.zeros(3)), segments=[], calls=[],
        attached=bare([Placed(attachment, 1, 2, (7,))]), extras={"read": np.ones((7, 2), np.uint8)},
    )  # fmt: skip
    left = json.loads(json.dumps(to_plain(chain)))
    assert (left["tokens"], left["extras"]) == ({"length": 3}, {"read": {"length": 7, "sum": 14}})
    found = from_plain(left, SavedChain)
    assert found.attached == chain.attached
    assert found.tokens.whole.tolist() == [0] * 3
    assert found.extras["read"].shape == (7, 0)
