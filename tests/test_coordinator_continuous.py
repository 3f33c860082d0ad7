"""The coordinator with continuous generation: what a delivery leaves alone, what a pause ends, what nobody may do."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
from seeds import seeds
from virtual_rollouts import on_virtual_time

from april.core.settings import CoreSettings, EngineLimits
from april.core.tape import Int32
from april.core.types import GenerationMode, Refill
from april.daemon_pool import DaemonPool
from april.errors import RolloutError, SchedulerClosed
from april.processes.coordinator.calls import Session, generate, run_sample
from april.processes.coordinator.coordinator import Coordinator
from april.processes.coordinator.messages import Delivery, Order, Result
from april.processes.coordinator.run import Run as TrainersRun

EOS, N, SAMPLES, PLACES = 1, 2, 2, 8


class Run:
    """Orders are carried out at any time.

    The server makes a token per second and request, whose log-probability names the weights, up to ``length_of`` a row.
    With ``chance``, it breaks off now and then, answers late, and rollouts raise.
    """

    def __init__(
        self, length_of: Callable[[int], int], accepts: Callable[[str], bool] | None = None,
        chance: random.Random | None = None, **more: Any,
    ) -> None:  # fmt: skip
        values: dict[str, Any] = {
            "rollout_batch_size": N, "n_samples_per_prompt": SAMPLES, "over_sampling_batch_size": N,
            "max_response_len": 1000, "max_in_flight": PLACES, "generation": GenerationMode.CONTINUOUS,
            "refill": Refill.SAMPLE, "max_staleness": 2, "has_reward": False, "has_filter": accepts is not None,
        }  # fmt: skip
        settings = CoreSettings(**(values | more))
        self.coordinator = Coordinator(settings, EngineLimits("s", 1000, None, (EOS,)), accepts=accepts, check=True)
        self.length_of, self.chance = length_of, chance
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
                    self.start(uids)
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

    def start(self, uids: list[str]) -> None:
        """The rollouts of these prompts."""
        self.tasks += [asyncio.create_task(self._sample(uid, i)) for uid in uids for i in range(SAMPLES)]

    def _bad_luck(self, of: float) -> bool:
        return self.chance is not None and self.chance.random() < of

    async def _sample(self, uid: str, index: int) -> None:
        async def rollout(session: Session) -> None:
            done = await generate(session, self._send, [50, int(uid[1:])], 1000, 1.0)
            if self._bad_luck(0.05):
                raise ValueError("bad luck")
            self.stored[uid, index] = len(done.tokens), done.spans, done.logprobs.tolist()

        async def forget(keys: list[str]) -> None:
            """Nothing is stored under keys."""

        await run_sample(self.coordinator, uid, index, rollout, forget)

    async def _send(self, token_ids: Int32, max_tokens: int) -> Result:
        if self._bad_luck(0.05):
            raise OSError("gone")
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
        if self._bad_luck(0.2):
            await asyncio.sleep(self.chance.choice((0.2, 3.0)) if self.chance else 0.0)
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

    async def again(self, *args: Any, **more: Any) -> Run:
        """Another process, from the state of this moment, between two pauses."""
        state = await self.coordinator.state()
        stored: dict[str, list[int]] = {f"p{i}": [] for i in range(self.drawn)}
        for uid, index in self.stored:
            stored[uid].append(index)
        other = Run(*args, **more)
        other.weights, other.drawn, other.stored = self.weights, self.drawn, self.stored.copy()
        other.start(await other.coordinator.restore(state, stored))
        return other


pytestmark = on_virtual_time


async def test_weights_that_changed_without_a_pause_are_refused() -> None:
    """Requests were at the servers: nobody could say which weights wrote what."""
    run = Run(lambda row: 5)
    await run.batch()
    with pytest.raises(RolloutError, match="the weights went from 0 to 1 while requests were at the servers"):
        await run.coordinator.begin(1)
    await run.end()


async def test_a_trainer_that_never_updates_is_told() -> None:
    """Whatever came then would be too old when it is trained; a pause alone commits nothing."""
    run = Run(lambda row: 5, max_staleness=1)
    await run.batch()
    await run.batch()
    await run.coordinator.pause()
    await run.told.get()
    await run.coordinator.resume(0)
    with pytest.raises(RolloutError, match="train first: 2 batches are out"):
        await run.coordinator.begin(0)
    await run.end()


async def test_a_request_that_nobody_wants_ends_with_the_pause() -> None:
    """Servers end all requests or none: that of a sample that was given up ends nothing before, and is gone then."""
    run = Run(lambda row: 50 if row == 3 else 4)
    await run.batch()
    sample = run.coordinator.host.groups["p3"].samples[0]
    for _ in range(run.coordinator.core.settings.max_attempt_failures):
        life = run.coordinator.host.mailboxes._lives[sample.id]
        await run.coordinator.failed("p3", 0, life, "broken")
    await asyncio.sleep(0)
    assert "p3" not in run.coordinator.host.groups
    assert run.dropped == ["failed"]
    assert len(run.live) > len(run.coordinator.core.attempts)
    assert not run.ended
    there = len(run.live)
    await run.update()
    assert run.ended == [there]
    await run.end()


@pytest.mark.parametrize("seed", seeds(40))
async def test_random_lives(seed: int) -> None:
    """Late answers, servers and rollouts that break, filters, deadlines that run out, restarts: nothing is lost.

    Each prompt is delivered or dropped once, every token has the version of the weights that wrote it, none is too old,
    and the ledger closes over all lives.
    """
    chance = random.Random(seed)
    most, bound = chance.choice((4, 30)), chance.choice((1, 2, 4))
    length = {row: chance.choice((2, 5, 9, 30)) for row in range(400)}
    rejects = chance.random() < 0.5
    more = {
        "max_staleness": bound, "abort_deadline_s": chance.choice((0.5, 30.0)), "abort_resend_s": 0.25,
        "refill": chance.choice(tuple(Refill)), "over_sampling_batch_size": chance.choice((N, 2 * N)),
        "max_in_flight": most,
    }  # fmt: skip

    def accepts(uid: str) -> bool:
        if rejects and chance.random() < 0.1:
            raise ValueError("not now")  # it is asked again
        return not rejects or int(uid[1:]) % 4 != 0

    run = Run(length.__getitem__, accepts, chance, **more)
    seen: list[str] = []
    made = 0
    for step in range(14):
        delivery = await run.batch()
        for uid in delivery.uids:
            seen.append(uid)
            assert not rejects or int(uid[1:]) % 4
            for index in range(SAMPLES):
                tokens, spans, logprobs = run.stored.pop((uid, index))
                assert tokens == length[int(uid[1:])]
                assert sum(end - start for start, end, *_ in spans) == tokens
                for start, end, _, n in spans:
                    assert logprobs[start - 2 : end - 2] == pytest.approx([-1.0 - n / 1000] * (end - start))
                    assert n >= step - bound
        await asyncio.sleep(chance.choice((0.0, 1.5, 12.0)))
        await run.update()
        if chance.random() < 0.25:
            made += run.made
            run, before = await run.again(length.__getitem__, accepts, chance, **more), run
            await before.end()
    assert len(seen) == len(set(seen)) == 14 * N
    await run.coordinator.pause()
    assert await run.told.get() == ("paused",)
    await asyncio.sleep(10.0)
    books = await run.coordinator.ledgers()
    assert books["prompts"]["observed"] == run.drawn
    if not made:  # what comes late to a process that has ended is counted by nobody
        assert books["tokens"]["observed"] == run.made
    await run.end()


class Orders:
    """A coordinator that has these orders."""

    def __init__(self, *orders: Order) -> None:
        self.orders = list(orders)

    def ask(self, what: str, *_: Any) -> Any:
        if what != "orders":
            return None
        assert self.orders, "it asks for ever"
        orders, self.orders = self.orders, []
        return orders


@pytest.mark.parametrize(
    ("order", "said"),
    [(("deliver", None), "asked for and not taken"), (("fail", "no engine is left"), "no engine is left")],
)
def test_a_pause_that_is_answered_by_a_batch_is_no_pause(order: Order, said: str) -> None:
    """A call for a batch was interrupted: requests may still be at the servers, and the batch has nobody."""
    run = TrainersRun(cast("Any", Orders(("dropped", "filtered", "alike"), order, ("paused",))), 1)
    with pytest.raises(RolloutError, match=said):
        run.pause()
    assert run.dropped == ({"filtered": 1} if order[0] == "deliver" else {})


class UntilClosed(Orders):
    """The last order comes when it is asked for; before it, the coordinator has none."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = threading.Event()

    def ask(self, method: str, *args: Any) -> Any:
        """What the run asks."""
        if method == "orders":
            self.closed.wait()
            return [("closed",)]
        if method == "close":
            self.closed.set()
        return None


def test_who_waits_for_a_batch_when_the_run_is_closed_is_told() -> None:
    """In another thread: nobody carries out orders any more, so nothing would ever come. Later calls are refused."""
    trainer = UntilClosed()
    run = TrainersRun(cast("Any", trainer), 1, own_thread=True)
    waits = DaemonPool("test").submit(run.next_batch, 0, 1)
    run.close()
    with pytest.raises(SchedulerClosed, match="the run is closed"):
        waits.result(60.0)
    with pytest.raises(SchedulerClosed, match="the run is closed"):
        run.pause()


async def test_rollouts_that_wait_when_the_coordinator_is_closed_are_told() -> None:
    """Those that wait to begin or for the rest of their response, and those that ask afterwards."""
    run = Run(lambda row: 50, max_in_flight=1)
    batch = asyncio.create_task(run.batch())
    await asyncio.sleep(2.5)
    assert len(run.coordinator.host.mailboxes) > 0
    await run.coordinator.close()
    await asyncio.sleep(100.0)
    samples = run.tasks[1:]
    assert samples
    assert all(task.done() and isinstance(task.exception(), SchedulerClosed) for task in samples)
    batch.cancel()
