"""Random lives of hosts, with prompts that have images and engines that give rows with their tokens.

Rows say which token was read, where, and which request has made them, so that a row of another sample, of another
place, or made again by a later request would show. More lives: ``APRIL_RANDOM_LIVES=1000`` before pytest.
"""

from __future__ import annotations

import asyncio
import os
import zlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_hosts import LENGTHS
from test_hosts_that_lie import LyingLife
from test_random_host_protocol import HostsLife, lived
from tiny_vision import IMAGE_ID, VIDEO_ID, picture, tiny_processor, tiny_tokenizer
from virtual_rollouts import on_virtual_time

import april
from april.attachments import attachment_bytes
from april.core.attachments import Attachment, Placed
from april.core.batch import Batch, DeliveredSample
from april.core.tape import SegmentKind
from april.core.types import DropReason, EngineFinish, Prompt
from april.errors import LinkError
from april.processes.host import Host
from april.processes.link import memory_links
from april.processes.remote_hosts import HostDoor
from april.testing import FakeEngine, FaultScript
from april.testing.same_loop import _SameLoopScheduler

pytestmark = on_virtual_time

LIVES = int(os.environ.get("APRIL_RANDOM_LIVES", "20"))
BATCH = 10
IMAGES = [Attachment.of("image", bytes([i]) * (100 + i)) for i in range(3)]


def image_of(prompt: int) -> Attachment:
    """Several prompts have the same."""
    return IMAGES[prompt % 3]


def mark_of(attempt_id: str) -> int:
    """What tells the rows of requests apart."""
    return zlib.crc32(attempt_id.encode()) & 0xFFFF


class WithImages(april.Config):
    """Prompts have images, and tokens have rows."""

    def core_settings(self, **options: Any) -> Any:
        """As if there were a processor, and a trainer that wants rows."""
        return replace(super().core_settings(**options), attachments=("image",), extras=("read", "where"))


class RowsEngine(FakeEngine):
    """Looks at its images, and gives rows with the end of each response; now and then it has none for a cut one."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name, **options)
        self._capabilities = replace(self._capabilities, extras=("read", "where", "more"))
        self.forgets = 0

    async def generate(self, request: Any) -> AsyncIterator[Any]:
        images = [attachment_bytes(placed.attachment) for placed in request.attached]
        trains = request.token_ids[0] == 1  # prompts of evaluations begin otherwise, and have no images
        assert images == ([image_of(int(request.token_ids[2]) - 3).data] if trains else [])
        said = [request.token_ids]
        stream = super().generate(request)
        try:
            async for chunk in stream:
                said.append(chunk.tokens)
                if chunk.finish is None or not request.extras:
                    yield chunk
                    continue
                generated = sum(map(len, said[1:]))
                self.forgets += chunk.finish is EngineFinish.ABORT
                if chunk.finish is EngineFinish.ABORT and self.forgets % 4 == 0:
                    yield replace(chunk, extras={})
                    continue
                yield replace(chunk, extras=self.rows(request, np.concatenate(said), request.rows_wanted(generated)))
        finally:
            await stream.aclose()

    def rows(self, request: Any, tokens: Any, count: int) -> Any:
        """Of each step: the token that was read; its place, and the request."""
        assert request.extras == ("read", "where")
        first = request.extras_from
        where = np.arange(first, first + count, dtype=np.uint16)
        mark = np.full(count, mark_of(request.attempt_id), np.uint16)
        return {"read": tokens[first : first + count].astype(np.int64), "where": np.stack((where, mark), axis=1)}


class LifeWithMore(HostsLife):
    """The same books, and more: images where they belong, rows that were made with their tokens."""

    def begin(self, local: list[Any], **options: Any) -> None:
        self.config = WithImages(**self.config.model_dump(exclude_unset=True))
        self.source = [
            Prompt(np.array([1, 2, i + 3], np.int32), {"i": i}, attached=(Placed(image_of(i), 1, 2, (2,)),))
            for i in range(self.prompts)
        ]
        super().begin(local, **options)

    def engine(self, name: str, faults: FaultScript | None = None) -> FakeEngine:
        return RowsEngine(name, lengths=LENGTHS, chunk_tokens=1, faults=faults)

    def check_end(self) -> None:
        super().check_end()
        for desk in self.scheduler.driver.hosts.desks:  # type: ignore[union-attr]
            assert not len(desk._attached)
        self.seen["bare"] += self.scheduler.ledger()["tokens"].dropped[DropReason.NO_EXTRAS]

    def check_batch(self, batch: Batch) -> None:
        super().check_batch(batch)
        for sample in batch.samples:
            self.check_row(sample)

    def check_row(self, s: DeliveredSample) -> None:
        """One row per token, as the request made it that generated the token behind."""
        (placed,) = s.attached
        assert s.prompt.attached == (placed,)
        assert placed.attachment.digest == image_of(s.prompt.data["i"]).digest
        whole, prompt = np.concatenate((s.prompt.token_ids, s.tokens)), len(s.prompt.token_ids)
        assert s.extras["read"].dtype == np.int64
        generated = [x for x in s.segments if x.kind is SegmentKind.GENERATED]
        last = prompt + generated[-1].start + generated[-1].count - 1
        assert s.extras["read"][:last].tolist() == whole[:last].tolist()
        assert s.extras["where"][:last, 0].tolist() == list(range(last))
        assert len(s.extras["read"]) == len(whole) - 1
        first = 0
        for segment in generated:
            end = prompt + segment.start + segment.count - 1
            assert set(s.extras["where"][first:end, 1].tolist()) == {mark_of(segment.attempt_id)}
            first = end
        self.seen["rows"] += last
        self.seen["resumed"] += len({x.attempt_id for x in generated}) > 1


@pytest.mark.parametrize("first", range(0, LIVES, BATCH))
async def test_images_and_rows_live_through_whatever_happens_to_hosts(first: int) -> None:
    """Every token has the row of the request that made it, every request the image of its prompt, in every life; tokens
    without rows are dropped by that name, and nothing is remembered in the end.
    """
    seen: Any = LifeWithMore(first).seen
    for seed in range(first, first + BATCH):
        seen += (await lived(LifeWithMore(seed))).seen
    assert min(seen[what] for what in ("dies", "hangs", "is cut off", "leaves", "lies", "bare", "resumed")) >= 2
    assert seen["rows"] > 1000


class LyingLifeWithMore(LyingLife, LifeWithMore):
    """Its hosts lie about rows and images as about the rest."""

    def check_batch(self, batch: Batch) -> None:
        """What was believed may be wrong, but fits."""
        for s in batch.samples:
            assert all(len(rows) == len(s.prompt.token_ids) + len(s.tokens) - 1 for rows in s.extras.values())
            assert s.extras.keys() == {"read", "where"}


async def test_whatever_a_host_says_of_rows_the_core_stays_whole() -> None:
    """Random lies in random lives: nothing raises but the host is cut off, and what is delivered has its rows."""
    wrong: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: wrong.append(context))
    lies = 0
    for seed in range(LIVES):
        lies += (await lived(LyingLifeWithMore(seed))).seen["told a lie"]
        assert not wrong, f"life {seed}"
    assert lies > 10 * LIVES


@pytest.mark.parametrize(
    ("lacks", "why"),
    [
        ({"extras": ("read",)}, "no where to give with its tokens"),
        ({"attachments": ()}, "takes no images"),
    ],
)
async def test_a_host_that_lacks_what_the_run_needs_is_refused(lacks: dict[str, Any], why: str) -> None:
    """Its engines are looked at when it joins; one that has more than is needed is welcome."""
    life = LifeWithMore(3)
    life.link = lambda link: link  # type: ignore[method-assign]
    try:
        poor = RowsEngine("poor", lengths=LENGTHS)
        poor._capabilities = replace(poor.capabilities, **lacks)
        with pytest.raises(LinkError, match=why):
            await life.host("a", [poor])
        await life.host("b", [RowsEngine("rich", lengths=LENGTHS)])
    finally:
        await life.end()


async def test_functions_on_hosts_know_the_ids_that_stand_for_images() -> None:
    """The scheduler's processor knows them: calls on a host have its sampling, and are never to generate them."""
    config = april.Config(
        rollout_batch_size=4, n_samples_per_prompt=1, max_response_len=9, engine={"kind": "simulated"}
    )
    door, engines = HostDoor(), [FakeEngine("here", lengths=LENGTHS), FakeEngine("e", lengths=LENGTHS)]
    there: list[int] = []

    async def rollout(prompt: Any, llm: april.LLM) -> None:
        await llm.generate(max_tokens=3)

    async def on_the_host(prompt: Any, llm: april.LLM) -> None:
        there.append(len(prompt.attached))
        await llm.generate(max_tokens=3)

    async def join() -> Any:
        here, link = memory_links()
        door.accept(here)
        return link

    async def reward(prompt: Any, response: Any) -> float:
        return 0.0

    functions: dict[str, Any] = {"rollout": rollout, "reward": reward}
    prompts = [{"token_ids": [7, IMAGE_ID, 9], "images": [picture(color=(i, 0, 0))]} for i in range(4)]
    scheduler = _SameLoopScheduler(
        config, prompts=prompts, engines=engines[:1], hosts=door, processor=tiny_processor(), **functions
    )
    functions["rollout"] = on_the_host
    host = Host("h", engines=engines[1:], join=join, tokenizer=tiny_tokenizer(), **functions)
    try:
        await host.astart()
        await asyncio.sleep(0)
        batch = await scheduler.anext_batch()
        requests = [record.request for engine in engines for record in engine.attempts.values()]
        assert len(requests) == 4
        assert {request.sampling.banned_ids for request in requests} == {(IMAGE_ID, VIDEO_ID)}
        assert there == [1, 1]
        assert len({s.attached[0].attachment.digest for s in batch.samples}) == 4
        assert all(len(s.prompt.token_ids) == 2 + s.attached[0].count for s in batch.samples)
    finally:
        await scheduler.driver.close()
        await host.aclose()
