"""Drivers on virtual time whose state is saved and loaded: what the tests of restarts share."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import torch
from virtual_rollouts import EOS, VOCAB, RecordingEngine, Rollouts

from april.core.batch import Batch
from april.core.state_checksum import seal
from april.core.tape import versions_of
from april.core.types import SampleId
from april.driver.rollout_driver import KIND
from april.engines.simulated.engine import synthetic_response
from april.engines.simulated.response_lengths import LognormalLengths
from april.errors import DataExhausted

LENGTHS = LognormalLengths(25, 0.6, 0.6, seed=4)


def plain(state: Any) -> Any:
    """The state as a trainer's checkpoint gives it back."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(state))


def by_torch(state: Any) -> Any:
    """The state as torch's checkpoint gives it back."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def resealed(state: Any) -> Any:
    """The state as if it had been saved as it is now: its checksum fits."""
    return seal(KIND, {key: state[key] for key in ("core", "prompts", "sampling") if key in state})


def new(**changes: Any) -> Rollouts:
    """N = 2, N' = 4, n = 2, on two engines, one of them streaming."""
    lengths = changes.pop("lengths", LENGTHS.sample)
    engines = [RecordingEngine(lengths, "e0"), RecordingEngine(lengths, "e1", stream_interval_s=3.0)]
    values: dict[str, Any] = {"n": 2, "samples": 2, "over": 4, "max_response_len": 200, "engines": engines}
    return Rollouts(lengths, **(values | changes))


def seen_of(batch: Batch) -> list[Any]:
    return [(s.id, s.tokens.tolist(), s.logprobs.tolist(), s.reward) for s in batch.samples]


def check(batch: Batch) -> None:
    """Every sample is the uncut synthetic response."""
    for s in batch.samples:
        tokens, logprobs = synthetic_response(s.prompt.token_ids, s.id, 0, LENGTHS.sample(*s.id), VOCAB, (EOS,))
        tokens[-1] = EOS
        assert s.tokens.tolist() == tokens.tolist()
        assert s.logprobs.tolist() == logprobs.tolist()


def observed(rollouts: Rollouts) -> dict[SampleId, tuple[list[int], list[float], list[Any]]]:
    """Tokens, log-probabilities and versions of every held sample, those of running attempts included."""
    out = {}
    for sample in rollouts.core.buffer.samples():
        tokens, logprobs = sample.chains[0].tape.tokens.tolist(), sample.chains[0].tape.logprobs.tolist()
        versions = [tuple(v) for v in versions_of(sample.chains[0].tape.segments).tolist()]
        if sample.chains[0].open_call is not None and sample.chains[0].open_call.attempt is not None:
            more, more_logprobs, spans = sample.chains[0].open_call.attempt.tape.packed()
            tokens, logprobs = tokens + more.tolist(), logprobs + more_logprobs.tolist()
            versions += [tuple(v) for v, count in spans for _ in range(count)]
        out[sample.id] = (tokens, logprobs, versions)
    return out


@asynccontextmanager
async def in_a_step(rollouts: Rollouts, at: float) -> AsyncIterator[None]:
    """In the middle of a step, so many seconds after its begin; it comes to its end, and the driver is closed then."""
    waiter = asyncio.create_task(rollouts.driver.next_batch())
    await asyncio.sleep(at)
    yield
    await waiter
    await rollouts.close()


async def until_the_end(rollouts: Rollouts) -> AsyncIterator[Batch]:
    """Batches, with weight updates between them, until the data has ended."""
    while True:
        try:
            batch = await rollouts.driver.next_batch()
        except DataExhausted:
            return
        yield batch
        await rollouts.driver.update_weights()
