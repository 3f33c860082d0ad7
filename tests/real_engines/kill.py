"""``kill -9`` of one of two servers with 64 requests in flight, seen by recording proxies in front of both."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

import april
from april.core.batch import Batch
from april.core.tape import SegmentKind
from april.testing.recording_proxy import RecordingProxy
from tests.real_engines.servers import Server

GROUPS, SAMPLES = 8, 8
RESPONSE_LEN = 600
TOKENS_BEFORE = 20
"""On average, per request, before the server is killed."""
STREAMED = 4
"""Tokens per event: so few may be lost with a server."""
PATIENCE_S = 300.0


class NotKept(Exception):
    """A promise is broken; the message says which."""


async def kill_one(dies: Server, lives: Server) -> dict[str, int]:
    """All responses finish on the server that lives, and no token that had reached april is generated again.

    Returns:
        Figures.

    Raises:
        NotKept: it is not so.
    """
    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(RecordingProxy(s.url)) for s in (dies, lives)]
        config = april.Config(
            rollout_batch_size=GROUPS, n_samples_per_prompt=SAMPLES, max_response_len=RESPONSE_LEN,
            # nobody ends before the server does; the log-probabilities are not looked at
            sampling={"min_tokens": RESPONSE_LEN - 1}, allow_mismatch=True,
            engine={"kind": "vllm", "urls": [p.url for p in proxies], "max_token_loss": STREAMED},
        )  # fmt: skip
        prompts = [[10 + group, 20, 30] for group in range(GROUPS)]
        rollouts = await asyncio.to_thread(april.RolloutScheduler, config, prompts=prompts, reward=lambda p, r: 0.0)
        try:
            before = [len(p.exchanges) for p in proxies]  # a few were asked at the start
            step = asyncio.ensure_future(rollouts.anext_batch())
            try:
                in_flight = await _all_under_way(proxies, before, step)
                dies.kill()
                async with asyncio.timeout(PATIENCE_S):
                    batch = await step
            finally:
                step.cancel()
            await asyncio.to_thread(rollouts.validate)
            ledger = await asyncio.to_thread(lambda: rollouts.ledger()["tokens"])
        finally:
            await asyncio.to_thread(rollouts.close)
    if not ledger.balanced or any(ledger.dropped.values()) or ledger.observed != ledger.delivered:
        raise NotKept(f"the ledger says {ledger.as_dict()}")
    return {"in flight": sum(in_flight), "on the server that died": in_flight[0]} | _seen(batch, proxies)


async def _all_under_way(
    proxies: Sequence[RecordingProxy], before: Sequence[int], step: asyncio.Future[Batch]
) -> list[int]:
    """Wait until all requests are in flight and have some tokens; the number at each server."""
    wanted = GROUPS * SAMPLES
    async with asyncio.timeout(PATIENCE_S):
        while True:
            rows = [p.exchanges[n:] for p, n in zip(proxies, before, strict=True)]
            running = [[e for e in row if not e.done] for row in rows]
            tokens = sum(len(e.tokens) for row in running for e in row)
            if sum(map(len, running)) == wanted and tokens >= TOKENS_BEFORE * wanted:
                return [len(row) for row in running]
            if step.done() or any(e.done for row in rows for e in row):
                raise NotKept("a request had ended before all were in flight; raise RESPONSE_LEN")
            await asyncio.sleep(0.01)


def _seen(batch: Batch, proxies: Sequence[RecordingProxy]) -> dict[str, int]:
    """Compare each delivered response with what went through the proxies."""
    if len(batch.samples) != GROUPS * SAMPLES:
        raise NotKept(f"{len(batch.samples)} of {GROUPS * SAMPLES} responses were delivered")
    died, lived = proxies
    moved = kept = cut_off = 0
    for sample in batch.samples:
        for segment in sample.segments:
            if segment.kind is not SegmentKind.GENERATED:
                continue
            got = sample.tokens[segment.start : segment.start + segment.count].tolist()
            gone = died.tokens(segment.attempt_id)
            sent = gone or lived.tokens(segment.attempt_id)
            if sent[: len(got)] != got:
                raise NotKept(f"sample {sample.id}: attempt {segment.attempt_id} delivered other tokens than were sent")
            if gone:
                moved, kept, cut_off = moved + 1, kept + len(got), cut_off + len(sent) - len(got)
            elif len(sent) != len(got):
                raise NotKept(f"sample {sample.id}: {len(sent)} tokens were sent, {len(got)} of them are held")
    if not moved:
        raise NotKept("no response had begun on the server that died")
    return {"tokens kept of those cut off": kept, "sent and not received": cut_off, "responses that moved": moved}
