"""stall_timeout_s counts from the last token: no comment, ping, empty event or empty chunk begins it again."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from fake_servers.base import KEEPS_ALIVE, PlannedFault, RequestFault
from real_schedulers import reward
from server_fixtures import KINDS, ServerThread, settings
from virtual_rollouts import RecordingEngine, Rollouts, now, on_virtual_time, table

import april
from april.core import engine_table
from april.core.versions import FIRST_VERSION
from april.engines.protocol import BufferedStream, Chunk, EngineFinish, OnWeightUpdate, Request
from april.testing import FakeEngine, Fault, FaultScript, rollouts, run_virtual

STALL_S = 10.0


class _Pile(BufferedStream):
    """An answer by a table of (seconds after the one before, tokens of the piece); then silence until it is closed."""

    over = False

    def __init__(self, pieces: list[tuple[float, int]]) -> None:
        self.pieces = list(pieces)
        self.waiting, self.ended = 0, asyncio.Event()
        self._arrived: list[int] = []
        self._done = False

    async def arrived(self) -> bool:
        if self._done:
            return False
        if not self.pieces or self.ended.is_set():
            await self.ended.wait()
            self.over, self.waiting = True, self.waiting + 1
            return True
        seconds, tokens = self.pieces.pop(0)
        await asyncio.sleep(seconds)
        self._arrived.append(tokens)
        self.waiting += 1
        return True

    def take(self) -> list[Chunk]:
        self.waiting, arrived = 0, self._arrived
        self._arrived = []
        chunks = [Chunk(np.full(n, 5, np.int32), np.full(n, -1.0, np.float32), FIRST_VERSION) for n in arrived if n]
        if self.over and not self._done:
            self._done = True
            chunks.append(Chunk(np.empty(0, np.int32), np.empty(0, np.float32), FIRST_VERSION, EngineFinish.ABORT))
        return chunks

    def __aiter__(self) -> _Pile:
        return self

    async def __anext__(self) -> Chunk:
        raise AssertionError("taken in two steps")

    async def aclose(self) -> None:
        pass


class _BufferingEngine(RecordingEngine):
    """Its first answer comes in pieces that pile up."""

    def __init__(self, *args: Any, pieces: list[tuple[float, int]], **options: Any) -> None:
        super().__init__(*args, **options)
        self.pile = _Pile(pieces)
        self.asked_s: float | None = None

    def generate(self, request: Request) -> Any:
        if self.requests:
            return super().generate(request)
        self.requests[request.attempt_id] = request
        return self.pile

    async def abort(self, attempt_ids: Any = None) -> None:
        if self.asked_s is None:
            self.asked_s = now()
        self.pile.ended.set()
        await super().abort(attempt_ids)


@pytest.mark.parametrize(
    ("pieces", "late_s"),
    [
        # silence from the beginning; signs of life without a token, fewer and more of them than pile up
        ([], 10),
        ([(1.0, 0)] * 500, 10),
        ([(0.1, 0)] * 5000, 10),
        # tokens, then nothing, while they lie in the pile
        ([(1.0, 1)] * 5, 15),
        # slow tokens, less often than the pile is looked at, are no silence
        ([(9.0, 1)] * 12, 118),
        ([(0.5, 1)] * 100, 60),
        # signs of life around a token: the pile is looked at once in stall_timeout_s, so at most twice as long
        ([(1.0, 1)] + [(0.9, 0)] * 500, 9.1 + STALL_S),
    ],
)
@on_virtual_time
async def test_pieces_that_pile_up(pieces: list[tuple[float, int]], late_s: float) -> None:
    """The moment at which the engine is asked to end the request: stall_timeout_s after the last token."""
    engine = _BufferingEngine(table({}, 300), pieces=pieces)
    rollouts = Rollouts(table({}, 300), n=1, engines=[engine], stall_timeout_s=STALL_S, max_response_len=200)
    waiter = asyncio.create_task(rollouts.driver.next_batch())
    await asyncio.sleep(late_s + 1)
    assert engine.asked_s == pytest.approx(late_s, abs=1e-6)
    assert len(rollouts.sample(0, 0).chains[0].tape) == sum(n for _, n in pieces)
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    await rollouts.driver.close()


def test_chunks_without_tokens() -> None:
    """An engine that yields empty chunks for ever is silent: its request is ended and continued."""

    async def program() -> None:
        script = FaultScript(Fault("empty_chunks", sample=(0, 1), after_tokens=3))
        config = april.Config(
            rollout_batch_size=1, n_samples_per_prompt=2, max_response_len=60, stall_timeout_s=STALL_S
        )
        engine = FakeEngine(faults=script, chunk_tokens=1)
        async with rollouts(config, engines=[engine], prompts=[[5]], reward=lambda p, r: 1.0) as run:
            batch = await run.next_batch()
            assert [s.attempts for s in batch.samples if s.id == (0, 1)] == [2]
            assert batch.metrics["stalled_attempts"] == 1
            assert engine.attempts_of((0, 1))[0].ended_s == pytest.approx(3 + STALL_S)
            run.audit()

    run_virtual(program(), limit_s=1000)


@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_pause_of_aprils_own_is_no_silence(in_flight: str, goes_on: bool) -> None:
    """Engines that keep their requests are silent while april has paused them, for however long another one hangs and
    the transfer takes; one that does not go on afterwards is silent stall_timeout_s later."""

    class Hangs(FakeEngine):
        async def pause_in_flight(self, in_flight: OnWeightUpdate) -> None:
            await asyncio.sleep(2.5 * STALL_S)
            await super().pause_in_flight(in_flight)

    class Well(FakeEngine):
        async def resume(self) -> None:
            if goes_on:
                await super().resume()

    async def program() -> None:
        config = april.Config(
            rollout_batch_size=1, over_sampling_batch_size=4, n_samples_per_prompt=1, max_response_len=3000,
            generation="continuous", on_weight_update=in_flight, stall_timeout_s=STALL_S,
        )  # fmt: skip
        engines = [kind(name, lengths=1200, chunk_tokens=1) for name, kind in (("hangs", Hangs), ("well", Well))]

        async def hand_over() -> None:
            await asyncio.sleep(2 * STALL_S)

        async with rollouts(config, engines=engines, prompts=prompts(), reward=lambda p, r: 1.0) as run:
            waits = asyncio.create_task(run.next_batch())
            await asyncio.sleep(STALL_S / 2)
            assert all(engine.attempts for engine in engines)
            await run.weight_update(transfer=hand_over)
            resumed = now()
            await asyncio.sleep(STALL_S + 1)
            assert not engines[0].aborts
            assert [abort.at_s for abort in engines[1].aborts][:1] == ([] if goes_on else [resumed + STALL_S])
            run.audit()
            waits.cancel()

    run_virtual(program(), limit_s=1000)


def prompts() -> list[list[int]]:
    return [[3 + i, 7, 9] for i in range(50)]


@pytest.mark.parametrize("loss", [None, 0], ids=["plain", "streamed"])
@pytest.mark.parametrize("fault", KEEPS_ALIVE, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_servers_that_are_alive_and_say_nothing(
    kind: str, fault: RequestFault, loss: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Comments, pings, empty events and usage, spaces before a plain answer: the request is ended and continued."""
    monkeypatch.setattr(engine_table, "PROBE_INTERVAL_S", 0.01)
    server = KINDS[kind][0](max_running=6, mean_length=10**6)
    with ServerThread(server):
        config = april.Config(
            rollout_batch_size=2, over_sampling_batch_size=2, n_samples_per_prompt=2, max_response_len=80,
            abort_resend_s=0.05, stall_timeout_s=0.6,
            engine=settings(kind, server, eos_token_ids=(2,), max_token_loss=loss),
        )  # fmt: skip
        with april.RolloutScheduler(config, prompts=prompts(), reward=reward, check=True) as scheduler:
            planned = PlannedFault(fault, request=len(server.runs) + 1, after_tokens=2)
            server.faults.append(planned)
            batch = scheduler.next_batch()
            assert planned.times == 0
            assert batch.metrics["stalled_attempts"] == 1
            assert max(sample.attempts for sample in batch.samples) == 2
            assert not scheduler.ledger()["tokens"].dropped
