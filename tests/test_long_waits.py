"""Whoever waits long for the same thing hears what it is: weight updates, engines, prompts, functions, exporters."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from core_machine import settings
from virtual_rollouts import RecordingEngine, Rollouts, now, on_virtual_time, prompt_ids, table

import april
from april.core import events as ev
from april.core.rollout_core import RolloutCore
from april.core.sampling import SamplingParams
from april.core.settings import EngineLimits
from april.core.types import Prompt
from april.driver.long_waits import WARN_AFTER_S, LongWaits
from april.record.run_status import WaitReason, wait_text

pytestmark = on_virtual_time


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings that name a wait or a function that takes long."""
    texts = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    return [text for text in texts if " has waited " in text or " working on " in text]


@pytest.mark.parametrize("call", ["weight_update", "load_state_dict"])
async def test_a_transfer_that_does_not_return_is_named(call: str, caplog: pytest.LogCaptureFixture) -> None:
    """Once, after the time, by the call that waits; what the driver says of itself has it before, with how long it has
    lasted."""
    run = Rollouts(table({}, 20), n=4, engines=[RecordingEngine(table({}, 20), remote=True)])
    hangs: Any = asyncio.Event().wait
    if call == "weight_update":
        await run.driver.next_batch()
        waiting = asyncio.create_task(run.driver.update_weights(transfer=hangs))
    else:
        waiting = asyncio.create_task(run.driver.load_state_dict(run.driver.state_dict(None), transfer=hangs))
    assert "waits for" not in repr(run.driver)
    await asyncio.sleep(7)
    assert repr(run.driver).endswith("has waited 7 s for a weight update: its transfer function to return")
    await asyncio.sleep(WARN_AFTER_S - 7.001)
    assert not said(caplog)
    for seconds in (1, 10_000):
        await asyncio.sleep(seconds)
        assert said(caplog) == [
            f"{call} has waited 60 s for its transfer function to return; nothing is generated until then"
        ]
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.mark.parametrize("call", ["pause", "load", "resume"])
async def test_an_engine_that_an_update_waits_for_is_named(call: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever of the update takes long; the others, which have answered, are not."""
    lengths = table({}, 20)
    engines = [RecordingEngine(lengths, f"e{i}", remote=True, slow=slow) for i, slow in enumerate(({call: 29.0}, {}))]
    run = Rollouts(lengths, n=4, engines=engines, warn_after_s=20.0, stall_timeout_s=900.0)
    await run.driver.next_batch()
    await run.driver.update_weights("weights")
    assert said(caplog) == [f"weight_update has waited 20 s for engine e0 to {call}; nothing is generated until then"]
    await run.driver.update_weights("weights")
    assert len(said(caplog)) == 1  # no longer than the one that was named


@pytest.mark.parametrize("timeout_s", [None, 600.0])
async def test_a_function_that_takes_long_is_named(timeout_s: float | None, caplog: pytest.LogCaptureFixture) -> None:
    """With a sample of it, and once for all that do so at the same time; short ones are not, nor what they wait for."""

    async def judge(prompt: Prompt, response: Any) -> float:
        await asyncio.sleep(70 if len(response.tokens) > 5 else 1)
        return 1.0

    run = Rollouts(table({}, 20), n=4, reward=judge, function_timeout_s=timeout_s)
    await run.driver.next_batch()
    assert len(said(caplog)) == 1
    (sentence,) = said(caplog)
    assert "judge has been working on " in sentence
    ends = "no limit is set (function_timeout_s)" if timeout_s is None else "april ends it after 600 s"
    assert sentence.endswith(f" for 60 s; {ends}")
    await run.driver.next_batch()
    assert len(said(caplog)) == 1


async def test_a_function_that_is_warned_of_has_the_rest_of_its_time() -> None:
    """The warning changes nothing: it is ended when it would have been, and is on time a moment before."""
    ended: list[float] = []

    async def judge(prompt: Prompt, response: Any) -> float:
        began = now()
        try:
            await asyncio.sleep(99.0 if len(ended) else 1000.0)
        finally:
            ended.append(now() - began)
        return 1.0

    run = Rollouts(table({}, 5), n=1, reward=judge, function_timeout_s=100.0, max_attempt_failures=9)
    await run.driver.next_batch()
    assert ended == [100.0, 99.0]


ASKED, PAUSE = ev.StepRequested(), ev.PauseRequested()
OTHER_WEIGHTS = ev.EngineProbed(engine="e0", probe=1, answered=True, ok=True)
DRAWN = ev.PromptsDrawn([Prompt(prompt_ids(0))], exhausted=True)
EVALUATION = ev.EvaluationRequested(
    evaluation=0, prompts=[Prompt(prompt_ids(0))], n_samples=1, sampling=SamplingParams(5), seed=0,
    functions_at_once=None,
)  # fmt: skip


@pytest.mark.parametrize(
    ("events", "sentence"),
    [
        ([ASKED], "next_batch has waited 60 s for prompts: the prompt source has not returned the next ones"),
        (
            [ev.EnginesAsked(), OTHER_WEIGHTS, ASKED, DRAWN],
            "next_batch has waited 60 s for a healthy engine: repair one of e0; after outage_deadline_s the step fails",
        ),
        ([ASKED, PAUSE], "next_batch has waited 60 s for the end of a pause"),
        ([PAUSE, EVALUATION], "evaluate has waited 60 s for the end of a pause"),
        (
            [PAUSE, ev.UpdateRequested(update=1, path="weights")],
            "weight_update has waited 60 s for the end of an evaluation or of a pause",
        ),
    ],
    ids=["no prompt comes", "no engine", "a pause", "an evaluation in a pause", "an update behind a pause"],
)
async def test_whatever_is_waited_for_is_named_once_and_no_timer_is_left(
    events: list[ev.Event], sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing happens any more, and the loop has nothing to do for it."""
    core = RolloutCore(settings(n=1, samples=1), [EngineLimits("e0", 4096, None, (2,), remote=True)])
    told: list[float] = []
    waits = LongWaits(core, now, 60.0, {}, told.append)
    for event in events:
        core.handle(event)
    waits.update()
    await asyncio.sleep(3600)
    (text,) = said(caplog)
    assert text.startswith(sentence)
    assert told == [6.0]
    assert waits.current_wait == f"has waited 3600 s for {wait_text(core)}"
    assert not asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]


async def test_silent_requests_are_named_where_nothing_else_ends_them(caplog: pytest.LogCaptureFixture) -> None:
    """Without stall_timeout_s; tokens that come, however slowly, are no silence."""
    lengths = table({}, 200)
    run = Rollouts(lengths, n=1, engines=[RecordingEngine(lengths, stream_interval_s=10.0)])
    await run.driver.next_batch()
    assert now() > 190
    assert not said(caplog)
    await run.close()
    core = RolloutCore(settings(n=1, samples=1), [EngineLimits("e0", 4096, None, (2,))])
    waits = LongWaits(core, now, 60.0, {})
    core.handle(ev.StepRequested())
    core.handle(ev.PromptsDrawn([Prompt(prompt_ids(0))], exhausted=True))
    (sample,) = (s for group in core.buffer.groups.values() for s in group.samples)
    core.handle(ev.CallMade(sample.id, SamplingParams(5)))
    waits.update()
    await asyncio.sleep(61)
    assert said(caplog) == [
        "next_batch has waited 60 s for responses: 1 request in flight, but no new tokens"
    ]


@pytest.mark.parametrize("patience_s", [None, 60.0, 1800.0])
async def test_a_shorter_limit_counts_although_a_longer_one_runs(
    patience_s: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A wait is told of after 6 s and warned of after 60, whatever was waited for before it, and how long at most."""
    core = RolloutCore(settings(n=1, samples=1), [EngineLimits("e0", 4096, None, (2,))])
    told: list[float] = []
    waits = LongWaits(core, now, 60.0, {WaitReason.PROMPTS: patience_s}, lambda _: told.append(now()))
    core.handle(ev.StepRequested())
    waits.update()
    await asyncio.sleep(20)
    with waits.waiting_for("next_batch", "engines to end"):
        await asyncio.sleep(59)
        assert not said(caplog)
        await asyncio.sleep(2)
        assert said(caplog) == ["next_batch has waited 60 s for engines to end"]
        assert told[-1] == 26.0
    waits.close()


async def test_no_wait_is_longer_than_the_scheduler_lives() -> None:
    """The clock of a loop begins anywhere, such as when the machine was started."""
    await asyncio.sleep(4098)
    core = RolloutCore(settings(n=1, samples=1), [EngineLimits("e0", 4096, None, (2,))])
    assert LongWaits(core, now, 60.0, {}).waited_s == 0.0


def test_the_time_is_a_setting_that_follows_the_deadline_of_outages() -> None:
    """60 s, or less where outages are shorter, or what is given."""
    base = {"rollout_batch_size": 1, "max_response_len": 9}
    assert april.Config(**base).warned_after_s == WARN_AFTER_S == 60.0
    assert april.Config(**base, outage_deadline_s=2.0).warned_after_s == 2.0
    assert april.Config(**base, outage_deadline_s=2.0, warn_after_s=5.0).warned_after_s == 5.0
