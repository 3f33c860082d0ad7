"""Pauses, weight updates and evaluations in the middle of training: engines stop, agree, and go on exactly."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from virtual_rollouts import RecordingEngine, Rollouts, now, on_virtual_time, prompt_ids, table

from april.core.sampling import SamplingParams
from april.core.types import GenerationMode, Prompt
from april.core.versions import PolicyVersion
from april.engines.protocol import Capabilities
from april.errors import EngineError

pytestmark = on_virtual_time


async def test_pause_and_resume_in_the_middle_of_a_step() -> None:
    """Inside a pause nothing generates; afterwards the same samples go on where they were."""
    rollouts = Rollouts(table({(0, 0): 20, (1, 0): 30}), n=2)
    waiter = asyncio.create_task(rollouts.driver.next_batch())
    await asyncio.sleep(7.5)
    async with rollouts.driver.paused():
        assert not rollouts.core.attempts
        assert [len(rollouts.sample(g, 0).tape) for g in (0, 1)] == [7, 7]
        made = rollouts.engines[0].tokens
        await asyncio.sleep(100)
        assert rollouts.engines[0].tokens == made
        rollouts.core.validate()
    batch = await waiter
    rollouts.check(batch)
    assert now() == pytest.approx(7.5 + 100 + 23, abs=1.01)
    assert all(s.attempts == 2 for s in batch.samples)


async def test_a_cancelled_pause_goes_on() -> None:
    """Whoever gives up waiting for a pause leaves training running."""

    class Slow(RecordingEngine):
        async def abort(self, attempt_ids: Any = None) -> None:
            await asyncio.sleep(5)
            await super().abort(attempt_ids)

    lengths = table({(0, 0): 20})
    rollouts = Rollouts(lengths, n=1, engines=[Slow(lengths)])
    waiter = asyncio.create_task(rollouts.driver.next_batch())
    await asyncio.sleep(3)

    async def hold() -> None:
        async with rollouts.driver.paused():
            pytest.fail("the pause was cancelled before")

    holder = asyncio.create_task(hold())
    await asyncio.sleep(1)
    holder.cancel()
    rollouts.check(await waiter)
    async with rollouts.driver.paused():  # the lock was given back
        pass


async def test_weight_update_in_the_middle_of_a_step() -> None:
    """An asynchronous trainer may update while a step runs: the sample is cut there, and its versions say so."""
    rollouts = Rollouts(table({(0, 0): 20}), n=1)
    waiter = asyncio.create_task(rollouts.driver.next_batch())
    await asyncio.sleep(8.5)
    assert await rollouts.driver.update_weights() == PolicyVersion(0, 1)
    batch = await waiter
    rollouts.check(batch)
    assert [(s.version.n, s.count) for s in batch.samples[0].segments] == [(0, 8), (1, 12)]


async def test_a_transfer_that_raises_leaves_the_version() -> None:
    """The trainer's error comes out, engines are resumed, the version and the lease stay, generation goes on."""

    async def transfer() -> None:
        raise OSError("no route")

    rollouts = Rollouts(table({(1, 0): 20}), n=1, over=2)
    await rollouts.driver.next_batch()
    with pytest.raises(OSError, match="no route"):
        await rollouts.driver.update_weights(transfer=transfer)
    assert rollouts.core.clock.current == PolicyVersion(0, 0)
    assert list(rollouts.core.leased) == [0]
    batch = await rollouts.driver.next_batch()
    assert {s.version for x in batch.samples for s in x.segments} == {PolicyVersion(0, 0)}
    assert await rollouts.driver.update_weights() == PolicyVersion(0, 1)


async def test_an_interrupted_update_is_completed_once_engines_are_loading() -> None:
    """Cancelled before: nothing has changed. Cancelled while engines load: they finish, and the version says so."""
    lengths = table({})
    engines = [RecordingEngine(lengths, f"e{i}", weight_update_s=2.0 + i) for i in range(2)]
    rollouts = Rollouts(lengths, n=2, engines=engines)
    for wait, version in ((0.0, 0), (2.5, 1)):
        batch = await rollouts.driver.next_batch()
        update = asyncio.create_task(rollouts.driver.update_weights("weights", trained=batch.id))
        await asyncio.sleep(wait)
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        assert rollouts.core.clock.current == PolicyVersion(0, version)
        assert {e.engine._version for e in engines} == {PolicyVersion(0, version)}
        assert len(rollouts.core.leased) == 1 - version
    batch = await rollouts.step()
    assert batch.version == PolicyVersion(0, 1)


class Server(RecordingEngine):
    """Has weights of its own."""

    @property
    def capabilities(self) -> Capabilities:
        """Those of a server."""
        return replace(super().capabilities, remote=True)


class FailsOnce(RecordingEngine):
    """An engine whose ``broken`` method raises the first time, late."""

    def __init__(self, *args: Any, broken: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self.broken = broken

    async def _maybe(self, what: str) -> None:
        if self.broken == what:
            self.broken = ""
            raise EngineError(f"{self.name} cannot {what}")

    async def pause(self) -> None:
        await self._maybe("pause")
        await super().pause()

    async def update_weights(self, version: PolicyVersion, path: str | None = None) -> None:
        await self._maybe("load")
        await super().update_weights(version, path)


async def test_engines_of_which_none_can_pause_keep_their_version() -> None:
    """weight_update fails before anything was written; all engines are open again."""
    lengths = table({})
    engines = [FailsOnce(lengths, name, broken="pause") for name in ("a", "b")]
    rollouts = Rollouts(lengths, n=4, engines=engines)
    await rollouts.driver.next_batch()
    with pytest.raises(EngineError, match="a cannot pause"):
        await rollouts.driver.update_weights()
    batch = await rollouts.driver.next_batch()
    assert {s.engine for x in batch.samples for s in x.segments} == {"a", "b"}
    assert batch.version == PolicyVersion(0, 0)


@pytest.mark.parametrize("path", ["weights", None])
async def test_an_engine_that_cannot_pause_is_left_out_and_comes_back(path: str | None) -> None:
    """The others get the new weights; it gets them once it is well, or, without a path, with the next update."""
    lengths = table({}, 20)
    engines = [FailsOnce(lengths, "bad", broken="pause"), RecordingEngine(lengths, "good")]
    rollouts = Rollouts(lengths, n=4, engines=engines)
    await rollouts.driver.next_batch()
    assert await rollouts.driver.update_weights(path) == PolicyVersion(0, 1)
    batch = await rollouts.driver.next_batch()
    assert {s.engine for x in batch.samples for s in x.segments} == {"good"}
    assert batch.version == PolicyVersion(0, 1)
    if path is None:
        await rollouts.driver.update_weights()
    batch = await rollouts.driver.next_batch()
    assert {s.engine for x in batch.samples for s in x.segments} == {"bad", "good"}
    assert {s.version for x in batch.samples for s in x.segments} == {batch.version}


class Hangs(RecordingEngine):
    """One of its methods never returns while ``hangs`` names it."""

    hangs = ""

    async def _maybe(self, what: str) -> None:
        if self.hangs == what:
            await asyncio.Event().wait()

    async def pause(self) -> None:
        await self._maybe("pause")
        await super().pause()

    async def resume(self) -> None:
        await self._maybe("resume")
        await super().resume()

    async def update_weights(self, version: PolicyVersion, path: str | None = None) -> None:
        await self._maybe("update_weights")
        await super().update_weights(version, path)

    async def close(self) -> None:
        await self._maybe("close")
        await super().close()


@pytest.mark.parametrize(("what", "seconds"), [("pause", 30), ("update_weights", 600), ("resume", 30)])
@pytest.mark.parametrize("alone", [False, True])
async def test_nobody_waits_for_ever_for_an_engine_that_hangs(
    what: str, seconds: int, alone: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named and left out, and comes back with the next update; without another engine the update fails.

    Not so where only the resumption hangs: the weights are there, the batch is committed, and the version says so.
    """
    lengths = table({})
    bad = Hangs(lengths, "bad")
    others = [] if alone else [RecordingEngine(lengths, "good")]
    rollouts = Rollouts(lengths, n=4, engines=[bad, *others])
    await rollouts.driver.next_batch()
    bad.hangs, before = what, now()
    sentence = f"engine bad has not answered {what} in {seconds} s"
    if alone and what != "resume":
        with pytest.raises(EngineError, match=sentence):
            await rollouts.driver.update_weights()
        assert rollouts.core.clock.current == PolicyVersion(0, 0)
    else:
        await rollouts.driver.update_weights()
        assert sentence in caplog.text
        assert rollouts.core.engines.states["bad"].quarantined
    assert now() - before == pytest.approx(seconds, abs=0.01)
    bad.hangs = ""
    await rollouts.driver.update_weights()
    rollouts.check(await rollouts.driver.next_batch())


async def test_an_update_that_raises_may_be_repeated() -> None:
    """Where it raises the version stays, so a trainer that asks again commits no batch that it has not trained."""

    class Stuck(RecordingEngine):
        troubles = 2

        async def resume(self) -> None:
            self.troubles -= 1
            if self.troubles >= 0:
                raise EngineError("it stays paused")
            await super().resume()

    lengths = table({})
    rollouts = Rollouts(lengths, n=2, engines=[Stuck(lengths)])
    first, second = await rollouts.driver.next_batch(), await rollouts.driver.next_batch()
    assert list(rollouts.core.leased) == [first.id, second.id]
    assert await rollouts.driver.update_weights() == PolicyVersion(0, 1)
    assert list(rollouts.core.leased) == [second.id]
    rollouts.check(await rollouts.driver.next_batch())  # a probe has found the engine, which was resumed then


async def test_an_engine_that_hangs_does_not_hold_up_close(caplog: pytest.LogCaptureFixture) -> None:
    """close gives it 30 s and names it in the log; the others are closed."""
    lengths = table({})
    bad = Hangs(lengths, "bad")
    rollouts = Rollouts(lengths, n=1, engines=[bad, RecordingEngine(lengths, "good")])
    await rollouts.step()
    bad.hangs, before = "close", now()
    await rollouts.close()
    assert now() - before == pytest.approx(30, abs=0.01)
    assert "engine bad could not be closed" in caplog.text


async def test_a_half_done_weight_update_stops_generation_until_it_is_whole() -> None:
    """One engine has the new weights, the other has not: no token is made before both agree; carry is kept."""
    lengths = table({(2, 0): 30, (3, 0): 30})
    engines = [
        FailsOnce(lengths, "bad", broken="load"),
        RecordingEngine(lengths, "good", weight_update_s=5.0),
    ]
    rollouts = Rollouts(lengths, n=2, over=4, engines=engines)
    await rollouts.driver.next_batch()
    made = sum(e.tokens for e in engines)
    with pytest.raises(EngineError, match="bad cannot load"):
        await rollouts.driver.update_weights("weights")
    assert now() == pytest.approx(10, abs=0.01)  # nobody resumed while the other engine was loading
    with pytest.raises(EngineError, match=r"reached engines \['good'\] and not \['bad'\].*weight_update again"):
        await rollouts.driver.next_batch()
    assert sum(e.tokens for e in engines) == made
    assert await rollouts.driver.update_weights("weights") == PolicyVersion(0, 1)
    batch = await rollouts.step()
    assert batch.version == PolicyVersion(0, 1)


async def test_a_half_done_weight_update_ends_the_wait_for_a_step_that_is_running() -> None:
    """An asynchronous trainer that asked ahead is told at once, as one that asks afterwards is; no token is made until
    all engines agree, and then the step goes on where it was."""
    lengths = table({}, 20)
    engines = [FailsOnce(lengths, "bad", broken="load"), RecordingEngine(lengths, "good")]
    rollouts = Rollouts(lengths, n=4, engines=engines)
    waiter = asyncio.create_task(rollouts.driver.next_batch())
    await asyncio.sleep(7.5)
    with pytest.raises(EngineError, match="bad cannot load"):
        await rollouts.driver.update_weights("weights")
    made = sum(e.tokens for e in engines)
    told = now()
    with pytest.raises(EngineError, match=r"reached engines \['good'\] and not \['bad'\].*weight_update again"):
        await waiter
    assert now() == told
    await asyncio.sleep(50)
    assert sum(e.tokens for e in engines) == made == 4 * 7
    with pytest.raises(EngineError, match="reached engines"):
        await rollouts.driver.evaluate([Prompt(prompt_ids(1))], 1, SamplingParams(max_tokens=5), 0)
    await rollouts.driver.update_weights("weights")
    batch = await rollouts.driver.next_batch()
    rollouts.check(batch)
    assert [[(s.version.n, s.count) for s in x.segments] for x in batch.samples] == [[(0, 7), (1, 13)]] * 4


async def test_after_a_half_done_weight_update_nothing_is_generated_ahead() -> None:
    """With continuous generation engines go on while the trainer trains; not while they hold different weights."""
    lengths = table({}, 20)
    engines = [FailsOnce(lengths, "bad", broken="load"), RecordingEngine(lengths, "good")]
    rollouts = Rollouts(lengths, n=4, engines=engines, generation=GenerationMode.CONTINUOUS)
    await rollouts.driver.next_batch()
    with pytest.raises(EngineError, match="bad cannot load"):
        await rollouts.driver.update_weights("weights")
    made = sum(e.tokens for e in engines)
    await asyncio.sleep(50)
    assert sum(e.tokens for e in engines) == made
    await rollouts.driver.update_weights("weights")
    await asyncio.sleep(50)
    assert sum(e.tokens for e in engines) > made
    rollouts.check(await rollouts.driver.next_batch())


@pytest.mark.parametrize("generation", list(GenerationMode))
async def test_a_transfer_that_breaks_off_ends_the_wait_for_a_batch_that_was_asked_for_ahead(
    generation: GenerationMode,
) -> None:
    """At once, with the sentence that says what to do; asked again before that is done, the same is said again."""
    lengths = table({}, 20)
    rollouts = Rollouts(lengths, n=4, engines=[Server(lengths)], generation=generation, max_staleness=4)
    driver = rollouts.driver
    await driver.next_batch()
    ahead = asyncio.create_task(driver.next_batch())
    await asyncio.sleep(5)

    async def breaks() -> None:
        raise OSError("the link broke")

    with pytest.raises(OSError, match="the link broke"):
        await driver.update_weights(transfer=breaks)
    told = now()
    sentence = r"transfer of weights was broken off \(OSError: the link broke\).*call weight_update again"
    for waiter in (ahead, driver.next_batch()):
        with pytest.raises(EngineError, match=sentence):
            await waiter
    assert now() == told
    await driver.update_weights("weights")
    assert (await driver.next_batch()).version == PolicyVersion(0, 1)


async def test_an_update_that_was_asked_for_already_may_mend_a_half_done_one() -> None:
    """Whoever waits for a batch is told of weights that are torn only if nothing on its way makes them whole."""
    lengths = table({}, 20)
    engines = [FailsOnce(lengths, "bad", broken="load"), RecordingEngine(lengths, "good")]
    rollouts = Rollouts(lengths, n=4, engines=engines)
    ahead = asyncio.create_task(rollouts.driver.next_batch())
    await asyncio.sleep(7.5)
    updates = [asyncio.create_task(rollouts.driver.update_weights("weights")) for _ in range(2)]
    asked_between = asyncio.create_task(rollouts.driver.next_batch())
    with pytest.raises(EngineError, match="bad cannot load"):
        await updates[0]
    assert await updates[1] == PolicyVersion(0, 1)
    assert await ahead is await asked_between


async def test_what_was_said_of_torn_weights_is_not_said_of_whole_ones() -> None:
    """A call for a batch was interrupted, so nobody heard that an update broke off; the next one mended it."""
    lengths = table({}, 20)
    engines = [FailsOnce(lengths, "bad", broken="load"), RecordingEngine(lengths, "good")]
    rollouts = Rollouts(lengths, n=4, engines=engines)
    waiter = asyncio.create_task(rollouts.driver.next_batch())
    await asyncio.sleep(7.5)
    waiter.cancel()
    with pytest.raises(EngineError, match="bad cannot load"):
        await rollouts.driver.update_weights("weights")
    await rollouts.driver.update_weights("weights")
    rollouts.check(await rollouts.driver.next_batch())


async def test_an_evaluation_has_the_engines_to_itself() -> None:
    """While it runs no training request is at an engine; the step goes on afterwards, with equal books."""
    rollouts = Rollouts(table({}, 20), n=4)
    engine = rollouts.engines[0]
    waiter = asyncio.create_task(rollouts.driver.next_batch())
    await asyncio.sleep(7.5)
    training = set(engine.requests)
    evaluation = asyncio.create_task(
        rollouts.driver.evaluate([Prompt(prompt_ids(1))], 2, SamplingParams(max_tokens=10), 0)
    )
    await asyncio.sleep(5)
    assert engine.open_streams == 2
    assert not rollouts.core.attempts
    assert len(set(engine.requests) - training) == 2
    books = rollouts.core.tokens.as_dict()
    result = await evaluation
    assert rollouts.core.tokens.as_dict() == books
    assert [len(r.tokens) for r in result.responses[0]] == [10, 10]
    batch = await waiter
    assert [[s.count for s in x.segments] for x in batch.samples] == [[7, 13]] * 4
