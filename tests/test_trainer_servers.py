"""A trainer's own servers as an engine: they end all requests or none, answer late, and get weights by themselves."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from saved_rollouts import plain
from seeds import seeds
from virtual_rollouts import on_virtual_time

from april import Config
from april.adapters.common.trainer_servers import ServerResult, TrainerServers
from april.core.tape import Int32
from april.core.types import DropReason, Prompt, Refill
from april.driver.llm import LLM
from april.testing import rollouts

EOS, N, SAMPLES, PLACES = 1, 2, 2, 8


class Rows:
    """0, 1, 2 and so on, without tokens; they go on where they stood."""

    resumes = True

    def __init__(self, first: int = 0) -> None:
        self.next = first

    def __iter__(self) -> Rows:
        return self

    def __next__(self) -> dict[str, Any]:
        self.next += 1
        return {"row": self.next - 1}


class Run:
    """A trainer, its servers and april's rollouts.

    The servers make a token per second and request, whose log-probability names the weights, up to ``length_of`` a row.
    With ``chance``, they break off now and then, answer late, and rollout functions raise.
    """

    def __init__(
        self, length_of: Callable[[int], int], accepts: Callable[[int], bool] | None = None,
        chance: random.Random | None = None, **more: Any,
    ) -> None:  # fmt: skip
        values = {
            "rollout_batch_size": N, "n_samples_per_prompt": SAMPLES, "max_response_len": 1000, "max_staleness": 2,
            "max_in_flight": PLACES, "generation": "continuous", "refill": "sample", "stall_timeout_s": None,
        }  # fmt: skip
        self.config, self.length_of, self.accepts, self.chance = Config(**(values | more)), length_of, accepts, chance
        self.rows = Rows()
        self.live: dict[asyncio.Event, None] = {}
        self.weights = self.made = self.asked = 0
        self.late_s: Callable[[int], float] = lambda row: 0.0
        self.ended: list[int] = []
        """Requests that each abort has ended."""
        self.servers = self.new_servers()
        self.fails: set[int] = set()
        """Rows whose functions raise."""

    def new_servers(self) -> TrainerServers:
        return TrainerServers("s", self._ask, self._end_all, max_context=1000, eos_token_ids=(EOS,))

    @asynccontextmanager
    async def begun(self, state: Any = None) -> AsyncIterator[Run]:
        keep = None if self.accepts is None else self._keep
        async with rollouts(
            self.config, engines=[self.servers], prompts=self.rows, rollout=self._rollout, filter=keep
        ) as self.rollouts:
            self.driver = self.rollouts.scheduler._driver
            if state is not None:
                self.servers.restore(state["late"])
                await self.rollouts.load_state_dict(state["april"])
            yield self

    def _bad_luck(self, of: float) -> bool:
        return self.chance is not None and self.chance.random() < of

    async def _keep(self, prompt: Prompt, responses: Any) -> bool:
        assert self.accepts is not None
        assert [response.output[0] for response in responses] == [prompt.data["row"]] * SAMPLES
        return self.accepts(prompt.data["row"])

    async def _rollout(self, prompt: Prompt, llm: LLM) -> Any:
        row = prompt.data["row"]
        self.servers.requests[llm.sample_id] = f"row {row}"
        try:
            done = await llm.forward([50, row], {"max_tokens": 1000, "stop_token_ids": (EOS,)})
            if self._bad_luck(0.05) or row in self.fails:
                raise ValueError("bad luck")
            return row, done.versions[:, 1], done.logprobs
        finally:
            self.servers.forget(llm.sample_id)

    async def _end_all(self) -> None:
        self.ended.append(len(self.live))
        for aborted in self.live:
            aborted.set()

    async def _ask(self, asked: str, token_ids: Int32, max_tokens: int) -> ServerResult:
        self.asked += 1
        weights, aborted, row, have = self.weights, asyncio.Event(), int(token_ids[1]), len(token_ids) - 2
        assert asked == f"row {row}"
        if self._bad_luck(0.05):
            raise OSError("gone")
        if self._bad_luck(0.05):
            return _result([], weights, aborted=True)
        self.live[aborted] = None
        tokens: list[int] = []
        while len(tokens) < self.length_of(row) - have and not aborted.is_set():
            try:
                await asyncio.wait_for(aborted.wait(), 1.0)
            except TimeoutError:
                tokens.append(100)
        del self.live[aborted]
        self.made += len(tokens)
        await asyncio.sleep(self.late_s(row))
        if self._bad_luck(0.2):
            assert self.chance is not None
            await asyncio.sleep(self.chance.choice((0.2, 3.0)))
        whole = have + len(tokens) == self.length_of(row)
        return _result([*tokens[:-1], EOS] if whole else tokens, weights, aborted=not whole)

    async def pause(self) -> None:
        await self.driver.pause()
        if self.servers.busy:
            await self._end_all()

    async def update(self) -> None:
        await self.pause()
        assert all(aborted.is_set() for aborted in self.live)
        self.weights += 1
        assert (await self.rollouts.weight_update(label=self.weights)).n == self.weights
        await self.driver.resume()

    def state(self, through: int | None) -> Any:
        return plain({"april": self.rollouts.state_dict(through), "late": self.servers.late_responses()})


def _result(tokens: list[int], weights: int, *, aborted: bool) -> ServerResult:
    logprobs = np.full(len(tokens), -1.0 - weights / 1000, np.float32)
    return ServerResult(tokens=np.array(tokens, np.int32), logprobs=logprobs, label=weights, aborted=aborted)


pytestmark = on_virtual_time


async def test_what_nobody_wants_runs_on_until_all_are_ended() -> None:
    """Servers end all requests or none: those of a group that was given up end nothing else, and go with the rest."""
    async with Run(lambda row: 50 if row == 3 else 4).begun() as run:
        await run.rollouts.next_batch()
        failing = run.driver.core.buffer.groups[3].samples
        for _ in range(run.driver.core.settings.max_attempt_failures):
            run.driver.executor.samples._runners[failing[0].id].function.task.cancel()
            await asyncio.sleep(0.01)
        assert 3 not in run.driver.core.buffer.groups
        assert len(run.live) > len(run.driver.core.attempts)
        assert not run.ended
        there = len(run.live)
        await run.update()
        assert run.ended[-1] == there - len(run.ended) + 1


async def test_a_late_answer_is_the_next_attempts() -> None:
    """It came when april had given its request up: the same call is not sent again, and its tokens have the version of
    the weights that wrote them; also over a restart.
    """
    for restart in (False, True):
        run = Run(lambda row: 20, abort_deadline_s=0.5, abort_resend_s=0.25, generation="stepwise", refill="none",
                  over_sampling_batch_size=2 * N)  # fmt: skip
        run.length_of = lambda row: 20 if row >= N else 4
        async with run.begun():
            asking = asyncio.create_task(run.rollouts.next_batch())
            await asyncio.sleep(3.5)
            run.late_s = lambda row: 30.0 if row >= N else 0.0
            batch = await asking
            await asyncio.sleep(40.0)
            run.weights += 1
            sent, state = run.asked, run.state(batch.id)
            assert [(len(tokens), version) for _, _, _, tokens, _, version, *_ in state["late"]] == [(4, [0, 0])] * 4
            run.late_s = lambda row: 0.0
            if not restart:
                await run.rollouts.weight_update(label=1)
                second = await run.rollouts.next_batch()
        if restart:
            run.servers = run.new_servers()
            async with run.begun(state):
                second = await run.rollouts.next_batch()
        for sample in second.samples:
            assert [(s.version.n, s.count) for s in sample.segments if s.attempt_id] == [(0, 4), (1, 16)]
            assert sample.output[1].tolist() == [0] * 4 + [1] * 16
        assert run.asked == sent + 4 + 4  # for the rest of each, and for two new groups


async def test_servers_that_take_nothing_are_asked_again() -> None:
    """Whoever else has paused them has cut it off before it began: that is no failure, and no busy wait."""
    run = Run(lambda row: 3)
    ask, cut = run._ask, 4 * PLACES

    async def cuts(asked: str, token_ids: Int32, max_tokens: int) -> ServerResult:
        if run.asked < cut:
            run.asked += 1
            return _result([], 0, aborted=True)
        return await ask(asked, token_ids, max_tokens)

    run.servers._send_to_server = cuts
    async with run.begun():
        batch = await run.rollouts.next_batch()
    assert asyncio.get_running_loop().time() == pytest.approx(3.0 + 0.05 + 0.1 + 0.2 + 0.4)
    assert all(sample.attempts == 1 for sample in batch.samples)


async def test_tokens_that_cannot_be_used_are_counted() -> None:
    """An answer without tokens says how many it had, and the ledger has them under the reason."""
    run = Run(lambda row: 3)
    ask = run._ask

    async def useless_at_first(asked: str, token_ids: Int32, max_tokens: int) -> ServerResult:
        if run.asked:
            return await ask(asked, token_ids, max_tokens)
        run.asked += 1
        return replace(_result([], 0, aborted=True), unused=(7, DropReason.UNKNOWN_WEIGHTS))

    run.servers._send_to_server = useless_at_first
    async with run.begun():
        await run.rollouts.next_batch()
        assert run.rollouts.ledger()["tokens"].dropped == {DropReason.UNKNOWN_WEIGHTS: 7}


@pytest.mark.parametrize("seed", seeds(40))
async def test_random_lives(seed: int) -> None:
    """Late answers, servers and functions that break, filters, deadlines that run out, restarts: nothing is lost.

    Each prompt is delivered or dropped once, every token has the version of the weights that wrote it, none is too old,
    and the ledger closes over all lives.
    """
    chance = random.Random(seed)
    most, bound = chance.choice((4, 30)), chance.choice((1, 2, 4))
    length = {row: chance.choice((2, 5, 9, 30)) for row in range(400)}
    rejects = chance.random() < 0.5
    more = {
        "max_staleness": bound, "abort_deadline_s": chance.choice((0.5, 30.0)), "abort_resend_s": 0.25,
        "refill": str(chance.choice(tuple(Refill))), "over_sampling_batch_size": chance.choice((N, 2 * N)),
        "max_in_flight": most,
    }  # fmt: skip

    def accepts(row: int) -> bool:
        if chance.random() < 0.1:
            raise ValueError("not now")  # it is asked again
        return row % 4 != 0

    run = Run(length.__getitem__, accepts if rejects else None, chance, **more)
    seen: list[int] = []
    state: Any = None
    step, lives = 0, 0
    while step < 14:
        lives += 1
        async with run.begun(state):
            while step < 14:
                batch = await run.rollouts.next_batch()
                for sample in batch.samples:
                    row, versions, logprobs = sample.output
                    seen.append(row)
                    assert not rejects or row % 4
                    assert len(versions) == length[row]
                    assert logprobs == pytest.approx(-1.0 - versions / 1000)
                    assert versions.min() >= step - bound
                step += 1
                await asyncio.sleep(chance.choice((0.0, 1.5, 12.0)))
                await run.pause()
                state = run.state(batch.id)
                if chance.random() < 0.25:
                    break
                run.weights += 1
                await run.rollouts.weight_update(label=run.weights)
                await run.driver.resume()
            else:
                await run.pause()
                await asyncio.sleep(10.0)
            books = run.rollouts.ledger()
        run.weights = step
        run.servers = run.new_servers()
    assert len(seen) == 14 * N * SAMPLES
    assert set(np.unique(seen, return_counts=True)[1]) == {SAMPLES}
    assert books["prompts"].observed == run.rows.next
    if lives == 1:  # what comes late to a process that has ended is counted by nobody
        assert books["tokens"].observed == run.made
