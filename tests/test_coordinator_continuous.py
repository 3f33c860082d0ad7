"""The coordinator with continuous generation: what a delivery leaves alone, what a pause ends, what nobody may do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from april.coordinator.calls import Session, generate, run_sample
from april.coordinator.coordinator import Coordinator
from april.coordinator.messages import Delivery, Result
from april.core.settings import CoreSettings, EngineLimits
from april.core.tape import Int32
from april.core.types import GenerationMode, Refill
from april.errors import RolloutError
from april.testing import run_virtual

EOS, N, SAMPLES, PLACES = 1, 2, 2, 8


class Run:
    """Trainer, server and rollouts on one virtual clock; orders are carried out at any time.

    The server makes a token per second and request, whose log-probability names the weights, up to ``length_of`` a row.
    """

    def __init__(
        self, length_of: Callable[[int], int], accepts: Callable[[str], bool] | None = None, **more: Any
    ) -> None:  # fmt: skip
        values: dict[str, Any] = {
            "rollout_batch_size": N, "n_samples_per_prompt": SAMPLES, "over_sampling_batch_size": N,
            "max_response_len": 1000, "max_in_flight": PLACES, "generation": GenerationMode.CONTINUOUS,
            "refill": Refill.SAMPLE, "max_staleness": 2, "has_reward": False, "has_filter": accepts is not None,
        }  # fmt: skip
        settings = CoreSettings(**(values | more))
        self.coordinator = Coordinator(settings, EngineLimits("s", 1000, None, (EOS,)), accepts=accepts, check=True)
        self.length_of = length_of
        self.live: dict[asyncio.Event, None] = {}
        self.weights = self.drawn = self.made = 0
        self.ended: list[int] = []
        """Requests that each abort has ended."""
        self.dropped: list[str] = []
        self.stored: dict[tuple[str, int], tuple[int, tuple[Any, ...], list[float]]] = {}
        """Tokens, spans and log-probabilities of responses, by sample."""
        self.told: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
        self.tasks = [asyncio.create_task(self._orders())]

    async def _orders(self) -> None:
        while True:
            for order in await self.coordinator.orders():
                if order[0] == "draw":
                    uids = [f"p{self.drawn + i}" for i in range(order[1])]
                    self.drawn += len(uids)
                    await self.coordinator.drawn(uids)
                    self.tasks += [asyncio.create_task(self._sample(u, i)) for u in uids for i in range(SAMPLES)]
                elif order[0] == "abort":
                    self.ended.append(len(self.live))
                    for aborted in self.live:
                        aborted.set()
                elif order[0] == "dropped":
                    self.dropped.append(order[1])
                elif order[0] == "closed":
                    return
                else:
                    self.told.put_nowait(order)

    async def _sample(self, uid: str, index: int) -> None:
        async def rollout(session: Session) -> None:
            done = await generate(session, self._send, [50, int(uid[1:])], 1000, 1.0)
            self.stored[uid, index] = len(done.tokens), done.spans, done.logprobs.tolist()

        async def forget(keys: list[str]) -> None:
            """Nothing is stored under keys."""

        await run_sample(self.coordinator, uid, index, rollout, forget)

    async def _send(self, token_ids: Int32, max_tokens: int) -> Result:
        weights, aborted, row, have = self.weights, asyncio.Event(), int(token_ids[1]), len(token_ids) - 2
        self.live[aborted] = None
        tokens: list[int] = []
        while len(tokens) < self.length_of(row) - have and not aborted.is_set():
            try:
                await asyncio.wait_for(aborted.wait(), 1.0)
            except TimeoutError:
                tokens.append(100)
        del self.live[aborted]
        self.made += len(tokens)
        whole = have + len(tokens) == self.length_of(row)
        if whole:
            tokens[-1] = EOS
        logprobs = np.full(len(tokens), -1.0 - weights / 1000, np.float32)
        return Result(
            offset=len(token_ids), tokens=np.array(tokens, np.int32), logprobs=logprobs, label=weights,
            aborted=not whole,
        )  # fmt: skip

    async def batch(self) -> Delivery:
        await self.coordinator.begin(self.weights)
        kind, what = await self.told.get()
        assert kind == "deliver"
        return what  # type: ignore[no-any-return]

    async def update(self) -> None:
        await self.coordinator.pause()
        assert await self.told.get() == ("paused",)
        assert not self.live
        self.weights += 1
        await self.coordinator.resume(self.weights)

    async def end(self) -> None:
        await self.coordinator.close()
        await self.tasks[0]
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def test_a_trainer_that_trains_holds_nobody_up() -> None:
    """A delivery ends nothing, places stay filled while nobody asks, and the next batch is there already."""

    async def program() -> None:
        run = Run(lambda row: 5 + row)
        assert (await run.batch()).uids == ("p0", "p1")
        assert not run.ended
        assert run.drawn == N + 2 * N  # (max_staleness - 1 out + 1) N may be undelivered
        await asyncio.sleep(2.5)
        assert len(run.live) == 2 * SAMPLES
        before = asyncio.get_running_loop().time()
        await run.update()
        batch = await run.batch()
        assert asyncio.get_running_loop().time() == before
        assert batch.uids == ("p2", "p3")
        assert run.ended == [2 * SAMPLES]
        await run.end()

    run_virtual(program())


def test_every_token_has_its_version_and_none_is_lost() -> None:
    """Over updates that end what runs: spans are of the weights that wrote, the bound holds, the ledger closes."""

    async def program() -> None:
        run = Run(lambda row: 3 + row * 7 % 11)
        for step in range(12):
            delivery = await run.batch()
            for uid in delivery.uids:
                for index in range(SAMPLES):
                    length, spans, logprobs = run.stored.pop((uid, index))
                    assert length == 3 + int(uid[1:]) * 7 % 11
                    for start, end, _, n in spans:
                        assert logprobs[start - 2 : end - 2] == pytest.approx([-1.0 - n / 1000] * (end - start))
                    assert min(n for *_, n in spans) >= step - 2
            await asyncio.sleep(2.5)
            await run.update()
        await run.coordinator.pause()
        await run.told.get()
        books = (await run.coordinator.ledgers())["tokens"]
        assert books["observed"] == run.made
        assert not books["dropped"]
        assert sum(run.ended) > 12
        await run.end()

    run_virtual(program())


def test_weights_that_changed_without_a_pause_are_refused() -> None:
    """Requests were at the servers: nobody could say which weights wrote what."""

    async def program() -> None:
        run = Run(lambda row: 5)
        await run.batch()
        with pytest.raises(RolloutError, match="the weights went from 0 to 1 while requests were at the servers"):
            await run.coordinator.begin(1)
        await run.end()

    run_virtual(program())


def test_a_trainer_that_never_updates_is_told() -> None:
    """Whatever came then would be too old when it is trained; a pause alone commits nothing."""

    async def program() -> None:
        run = Run(lambda row: 5, max_staleness=1)
        await run.batch()
        await run.batch()
        await run.coordinator.pause()
        await run.told.get()
        await run.coordinator.resume(0)
        with pytest.raises(RolloutError, match="train first: 2 batches are out"):
            await run.coordinator.begin(0)
        await run.end()

    run_virtual(program())


def test_a_request_that_nobody_wants_ends_with_the_pause() -> None:
    """Servers end all requests or none: that of a sample that was given up ends nothing before, and is gone then."""

    async def program() -> None:
        run = Run(lambda row: 50 if row == 3 else 4)
        await run.batch()
        sample = run.coordinator._execution.groups["p3"].samples[0]
        for _ in range(run.coordinator.core.settings.max_attempt_failures):
            life = run.coordinator._execution.mailboxes._lives[sample.id]
            await run.coordinator.failed("p3", 0, life, "broken")
        await asyncio.sleep(0)
        assert "p3" not in run.coordinator._execution.groups
        assert run.dropped == ["failed"]
        assert len(run.live) > len(run.coordinator.core.attempts)
        assert not run.ended
        there = len(run.live)
        await run.update()
        assert run.ended == [there]
        await run.end()

    run_virtual(program())


def test_a_filter_of_the_trainers_decides() -> None:
    """Rejected groups leave by that name and are replaced; one that raises is asked again."""
    raised: list[str] = []

    def accepts(uid: str) -> bool:
        if uid == "p1" and not raised:
            raised.append(uid)
            raise ValueError("not now")
        return int(uid[1:]) % 3 != 0

    async def program() -> None:
        run = Run(lambda row: 4, accepts)
        seen: list[str] = []
        for _ in range(4):
            seen += (await run.batch()).uids
            await run.update()
        assert len(seen) == len(set(seen)) == 4 * N
        assert all(int(uid[1:]) % 3 for uid in seen)
        assert "p1" in seen
        assert set(run.dropped) == {"filtered"}
        await run.end()

    run_virtual(program())

