"""Pauses, weight updates and evaluations in the middle of training: engines stop, agree, and go on exactly."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from virtual_rollouts import LengthOf, RecordingEngine, Rollouts, now, on_virtual_time, prompt_ids, table

from april.core.sampling import SamplingParams
from april.core.types import GenerationMode, Prompt
from april.core.versions import PolicyVersion
from april.errors import ConfigError, EngineError, RolloutError

pytestmark = on_virtual_time


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
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1), rollouts.driver.paused():
            pytest.fail("the pause was cancelled before")
    rollouts.check(await waiter)
    async with rollouts.driver.paused():  # the lock was given back
        pass


async def test_a_trainer_pauses_updates_and_resumes_in_calls_of_its_own() -> None:
    """What ran goes on under the version that it names; a pause asked for twice is one, and a second end none."""
    rollouts = Rollouts(table({(0, 0): 20, (1, 0): 30}), n=2)
    driver = rollouts.driver
    waiter = asyncio.create_task(driver.next_batch())
    await asyncio.sleep(7.5)
    await asyncio.gather(driver.pause(), driver.pause())
    assert not rollouts.core.attempts
    await asyncio.sleep(100)
    assert await driver.update_weights(transfer=lambda: asyncio.sleep(1), label=4) == PolicyVersion(0, 4)
    await asyncio.sleep(10)
    assert not rollouts.core.attempts
    assert not waiter.done()
    await driver.resume()
    await driver.resume()
    batch = await waiter
    assert [[(s.version.n, s.count) for s in sample.segments] for sample in batch.samples] == [
        [(0, 7), (4, 13)], [(0, 7), (4, 23)],
    ]  # fmt: skip
    assert now() == pytest.approx(7.5 + 111 + 23, abs=1.01)
    assert await driver.update_weights() == PolicyVersion(0, 5)


async def test_a_version_that_a_trainer_names_goes_up() -> None:
    """Above those of the updates that were asked for before; one that failed may be named again."""
    driver = Rollouts(table({}, 20), n=1).driver

    async def fails() -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        await driver.update_weights(transfer=fails, label=3)
    first = asyncio.create_task(driver.update_weights(transfer=lambda: asyncio.sleep(1), label=3))
    await asyncio.sleep(0)
    for label, newest in ((3, 3), (2, 3), (True, 3), ("4", 3)):
        with pytest.raises(ConfigError, match=f"label must be a whole number above {newest}"):
            await driver.update_weights(label=label)  # type: ignore[arg-type]
    assert await asyncio.gather(first, driver.update_weights(), driver.update_weights(label=6)) == [
        PolicyVersion(0, 3), PolicyVersion(0, 4), PolicyVersion(0, 6),
    ]  # fmt: skip


async def test_calls_that_would_wait_for_the_end_of_a_pause_say_so() -> None:
    """They come from the trainer's thread, which could not end it; who asks beside it waits."""
    rollouts = Rollouts(table({}, 5), n=1)
    driver = rollouts.driver
    await driver.pause()
    for call in (
        lambda: driver.wait_batch(blocks=True),
        lambda: driver.load_state_dict(driver.state_dict(None)),
        lambda: driver.evaluate([], 1, SamplingParams(max_tokens=5), 0),
    ):
        with pytest.raises(RolloutError, match=r"generation is paused; call resume\(\) first"):
            await call()
    waiter = asyncio.create_task(driver.next_batch())
    await asyncio.sleep(50)
    assert not waiter.done()
    await driver.resume()
    rollouts.check(await waiter)


TORN = r"reached engines \['good'\] but not \['bad'\].*weight_update again"


def two(fails: str, lengths: LengthOf, **options: Any) -> Rollouts:
    """N = 4 on two engines; a call of one of them fails once."""
    engines = [RecordingEngine(lengths, "bad", fails=fails), RecordingEngine(lengths, "good")]
    return Rollouts(lengths, **({"n": 4, "engines": engines} | options))


async def half_done(run: Rollouts) -> int:
    """An update that reaches one engine and not the other; returns the number of tokens so far."""
    made = sum(e.tokens for e in run.engines)
    with pytest.raises(EngineError, match="bad cannot load"):
        await run.driver.update_weights("weights")
    return made


@pytest.mark.parametrize("path", ["weights", None])
async def test_an_engine_that_cannot_pause_is_left_out_and_comes_back(path: str | None) -> None:
    """The others get the new weights; it gets them once it is well, or, without a path, with the next update."""
    rollouts = two("pause", table({}, 20))
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


@pytest.mark.parametrize(("what", "seconds"), [("pause", 30), ("load", 600), ("resume", 30)])
@pytest.mark.parametrize("alone", [False, True])
async def test_nobody_waits_for_ever_for_an_engine_that_hangs(
    what: str, seconds: int, alone: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named and left out, and comes back with the next update; without another engine the update fails.

    Not so where only the resumption hangs: the weights are there, the batch is committed, and the version says so.
    """
    lengths = table({})
    bad = RecordingEngine(lengths, "bad")
    others = [] if alone else [RecordingEngine(lengths, "good")]
    rollouts = Rollouts(lengths, n=4, engines=[bad, *others])
    await rollouts.driver.next_batch()
    bad.hangs, before = what, now()
    sentence = f"engine bad has not answered {'update_weights' if what == 'load' else what} in {seconds} s"
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


async def test_an_update_whose_resumption_fails_is_done() -> None:
    """The weights are there: a trainer that goes on commits no batch that it has not trained."""
    lengths = table({})
    rollouts = Rollouts(lengths, n=2, engines=[RecordingEngine(lengths, fails="resume")])
    first, second = await rollouts.driver.next_batch(), await rollouts.driver.next_batch()
    assert list(rollouts.core.leased) == [first.id, second.id]
    assert await rollouts.driver.update_weights() == PolicyVersion(0, 1)
    assert list(rollouts.core.leased) == [second.id]
    rollouts.check(await rollouts.driver.next_batch())  # a probe has found the engine, which was resumed then


async def test_an_engine_that_hangs_does_not_hold_up_close(caplog: pytest.LogCaptureFixture) -> None:
    """close gives it 30 s and names it in the log; the others are closed."""
    lengths = table({})
    bad = RecordingEngine(lengths, "bad")
    rollouts = Rollouts(lengths, n=1, engines=[bad, RecordingEngine(lengths, "good")])
    await rollouts.step()
    bad.hangs, before = "close", now()
    await rollouts.close()
    assert now() - before == pytest.approx(30, abs=0.01)
    assert "engine bad could not be closed" in caplog.text


async def test_a_half_done_weight_update_ends_the_wait_for_a_step_that_is_running() -> None:
    """An asynchronous trainer that asked ahead is told at once, as one that asks afterwards is; no token is made until
    all engines agree, and then the step goes on where it was."""
    rollouts = two("load", table({}, 20))
    waiter = asyncio.create_task(rollouts.driver.next_batch())
    await asyncio.sleep(7.5)
    await half_done(rollouts)
    told = now()
    with pytest.raises(EngineError, match=TORN):
        await waiter
    assert now() == told
    await asyncio.sleep(50)
    assert sum(e.tokens for e in rollouts.engines) == 4 * 7
    with pytest.raises(EngineError, match="reached engines"):
        await rollouts.driver.evaluate([Prompt(prompt_ids(1))], 1, SamplingParams(max_tokens=5), 0)
    await rollouts.driver.update_weights("weights")
    batch = await rollouts.driver.next_batch()
    rollouts.check(batch)
    assert [[(s.version.n, s.count) for s in x.segments] for x in batch.samples] == [[(0, 7), (1, 13)]] * 4


async def test_after_a_half_done_weight_update_nothing_is_generated_ahead() -> None:
    """With continuous generation engines go on while the trainer trains; not while they hold different weights."""
    rollouts = two("load", table({}, 20), generation=GenerationMode.CONTINUOUS)
    await rollouts.driver.next_batch()
    made = await half_done(rollouts)
    await asyncio.sleep(50)
    assert sum(e.tokens for e in rollouts.engines) == made
    await rollouts.driver.update_weights("weights")
    await asyncio.sleep(50)
    assert sum(e.tokens for e in rollouts.engines) > made
    rollouts.check(await rollouts.driver.next_batch())


@pytest.mark.parametrize("generation", list(GenerationMode))
async def test_a_transfer_that_breaks_off_ends_the_wait_for_a_batch_that_was_asked_for_ahead(
    generation: GenerationMode,
) -> None:
    """At once, with the sentence that says what to do; asked again before that is done, the same is said again."""
    lengths = table({}, 20)
    server = RecordingEngine(lengths, remote=True)
    rollouts = Rollouts(lengths, n=4, engines=[server], generation=generation, max_staleness=4)
    driver = rollouts.driver
    await driver.next_batch()
    ahead = asyncio.create_task(driver.next_batch())
    await asyncio.sleep(5)

    async def breaks() -> None:
        raise OSError("the link broke")

    with pytest.raises(OSError, match="the link broke"):
        await driver.update_weights(transfer=breaks)
    told = now()
    sentence = r"transfer of weights was interrupted \(OSError: the link broke\).*call weight_update again"
    for waiter in (ahead, driver.next_batch()):
        with pytest.raises(EngineError, match=sentence):
            await waiter
    assert now() == told
    await driver.update_weights("weights")
    assert (await driver.next_batch()).version == PolicyVersion(0, 1)


async def test_an_update_that_was_asked_for_already_may_mend_a_half_done_one() -> None:
    """Whoever waits for a batch is told of weights that are torn only if nothing on its way makes them whole."""
    rollouts = two("load", table({}, 20))
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
    rollouts = two("load", table({}, 20))
    waiter = asyncio.create_task(rollouts.driver.next_batch())
    await asyncio.sleep(7.5)
    waiter.cancel()
    await half_done(rollouts)
    await rollouts.driver.update_weights("weights")
    rollouts.check(await rollouts.driver.next_batch())
