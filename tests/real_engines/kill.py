"""``kill -9`` of one of two servers with 64 requests in flight, seen by recording proxies in front of both."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack

import april
from april.core.batch import Batch
from tests.real_engines.recording_proxy import Exchange, RecordingProxy
from tests.real_engines.servers import NotKept, Server

GROUPS, SAMPLES = 8, 8
RESPONSE_LEN = 3000
STREAMED = 4
"""Tokens per event: so few may be lost with a server."""
PATIENCE_S = 300.0


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
            engine={
                "kind": "vllm", "urls": [p.url for p in proxies], "max_token_loss": STREAMED,
                "max_in_flight": GROUPS * SAMPLES,
            },
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
    return {"in flight": sum(in_flight), "on the server that died": in_flight[0]} | _seen(
        batch, *(p.exchanges[n:] for p, n in zip(proxies, before, strict=True))
    )


async def _all_under_way(
    proxies: Sequence[RecordingProxy], before: Sequence[int], step: asyncio.Future[Batch]
) -> list[int]:
    """Wait until all are in flight and half of those at the first server have tokens; the number at each server."""
    wanted = GROUPS * SAMPLES
    async with asyncio.timeout(PATIENCE_S):
        while True:
            rows = [p.exchanges[n:] for p, n in zip(proxies, before, strict=True)]
            running = [[e for e in row if not e.done] for row in rows]
            begun = sum(bool(e.sent) for e in running[0])
            if sum(map(len, running)) == wanted and begun * 2 >= len(running[0]):
                return [len(row) for row in running]
            if step.done() or any(e.done for row in rows for e in row):
                raise NotKept(f"a request had ended when {sum(map(len, running))} were in flight; raise RESPONSE_LEN")
            await asyncio.sleep(0.01)


def _seen(batch: Batch, died: Sequence[Exchange], lived: Sequence[Exchange]) -> dict[str, int]:
    """Compare each delivered response with what went through the proxies."""
    if len(batch.samples) != GROUPS * SAMPLES:
        raise NotKept(f"{len(batch.samples)} of {GROUPS * SAMPLES} responses were delivered")
    cut = {name: exchange.tokens for exchange in died for name in exchange.ids}
    # the completions route of the server that lives has no names: an answer is known by its tokens
    answers = Counter(tuple(exchange.tokens) for exchange in lived if exchange.tokens)
    moved = kept = 0
    for sample in batch.samples:
        for segment in sample.segments:
            got = sample.tokens[segment.start : segment.start + segment.count].tolist()
            if segment.attempt_id in cut:
                moved, kept = moved + 1, kept + len(got)
                known = cut[segment.attempt_id][: len(got)] == got
            else:
                known = answers[tuple(got)] > 0
                answers[tuple(got)] -= 1
            if not known:
                raise NotKept(f"sample {sample.id}: what attempt {segment.attempt_id} delivered was not sent so")
    if again := sum(map(len, answers.elements())):
        raise NotKept(f"{again} tokens were sent by the server that lives, and no response has them")
    if kept == moved * RESPONSE_LEN:
        raise NotKept("all responses were complete before the server died; raise RESPONSE_LEN")
    cut_off = sum(len(exchange.tokens) for exchange in died) - kept
    return {"responses that moved": moved, "their tokens, kept": kept, "sent and not received": cut_off}
