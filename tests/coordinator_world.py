"""Trainer, server and rollouts of a few lines around a coordinator with continuous generation, on a virtual clock."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from april.core.settings import CoreSettings, EngineLimits
from april.core.tape import Int32
from april.core.types import GenerationMode, Refill
from april.processes.coordinator.calls import Session, generate, run_sample
from april.processes.coordinator.coordinator import Coordinator
from april.processes.coordinator.messages import Delivery, Result

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
