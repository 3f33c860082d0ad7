"""Rollout and reward functions that fail, cheat or misuse ``llm``: each harms its own sample only, and is named."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
from virtual_rollouts import RecordingEngine, Rollouts, now, on_virtual_time, table, virtual

from april.core.types import DropReason, Prompt, SampleId
from april.driver.llm import LLM
from april.driver.local_host import CLOSE_PATIENCE_S
from april.driver.rewards import Response
from april.errors import RolloutError, SchedulerClosed


async def cancelled() -> float:
    """Raises CancelledError although nobody cancelled the caller."""
    inner: asyncio.Future[float] = asyncio.get_running_loop().create_future()
    inner.cancel()
    return await inner


def raises(error: BaseException) -> Callable[[], Awaitable[Any]]:
    async def function() -> Any:
        raise error

    return function


def returns(value: Any) -> Callable[[], Awaitable[Any]]:
    async def function() -> Any:
        return value

    return function


# ---------------------------------------------------------------- rewards

BAD_REWARDS: dict[str, tuple[Callable[[], Awaitable[Any]], str]] = {
    "raises": (raises(KeyError("answer")), "KeyError: 'answer'"),
    "exits": (raises(SystemExit(3)), "SystemExit: 3"),
    "is cancelled from inside": (cancelled, "something that it waited for was cancelled"),
    "nan": (returns(float("nan")), "expected a finite number"),
    "inf": (returns(-np.inf), "expected a finite number"),
    "none": (returns(None), "expected a number"),
    "text": (returns("good"), "expected a number"),
    "huge": (returns(10**400), "expected a number"),
}


@pytest.mark.parametrize("kind", list(BAD_REWARDS))
@on_virtual_time
async def test_a_reward_that_fails_once_is_asked_again(kind: str) -> None:
    """The reward is computed again; no token is dropped for it."""
    fault, message = BAD_REWARDS[kind]
    failed: list[SampleId] = []

    async def reward(prompt: Prompt, response: Response) -> Any:
        if not failed:
            failed.append(response.sample_id)
            return await fault()
        return 1.0

    rollouts = Rollouts(table({}), n=2, samples=2, reward=reward)
    batch = await rollouts.step()
    assert batch.rewards.tolist() == [1.0] * 4
    assert batch.metrics["failed_samples"] == 1
    assert not rollouts.dropped
    assert message in rollouts.core.story(failed[0])


@pytest.mark.parametrize("kind", list(BAD_REWARDS))
@on_virtual_time
async def test_a_reward_that_fails_too_often_drops_the_group_by_name(kind: str) -> None:
    """After max_attempt_failures the group is dropped as failed and replaced; every token is accounted for."""
    fault, message = BAD_REWARDS[kind]
    calls: list[SampleId] = []

    async def reward(prompt: Prompt, response: Response) -> Any:
        if response.sample_id == (1, 1):
            calls.append(response.sample_id)
            return await fault()
        return 1.0

    rollouts = Rollouts(table({(1, 0): 9}), n=2, samples=2, reward=reward)
    batch = await rollouts.step()
    assert set(batch.group_ids.tolist()) == {0, 2}
    assert len(calls) == 3
    # both samples of group 1: one had been scored or was still running
    assert rollouts.dropped == {DropReason.FAILED: 5 + 5}
    assert rollouts.core.prompts.as_dict()["dropped"] == {"failed": 1}
    assert batch.metrics["groups_dropped_failed"] == 1
    story = rollouts.core.story(SampleId(1, 1))
    assert "group dropped (failed): g1.s1" in story
    assert message in story


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([1.0], "expected 3 numbers, one per sample"),
        ([1.0] * 4, "expected 3 numbers"),
        (2.0, "expected 3 numbers"),
        ({0: 1.0, 1: 0.5, 2: 0.0}, "expected 3 numbers"),
        ({3.0, 2.0, 1.0}, "expected 3 numbers"),
        ("101", "expected 3 numbers"),
        ([1.0, float("nan"), 1.0], "the reward of g1.s1 is nan"),
        ([1.0, 1.0, None], "the reward of g1.s2 is None"),
    ],
)
@on_virtual_time
async def test_group_rewards_that_cannot_be(answer: Any, message: str) -> None:
    """A group reward of the wrong shape or value: asked again, then the group is dropped by name and replaced."""
    calls: list[int] = []

    async def group_reward(prompt: Prompt, responses: list[Response]) -> Any:
        calls.append(responses[0].sample_id.group)
        return answer if calls[-1] == 1 else np.arange(3.0)

    rollouts = Rollouts(table({}), n=2, samples=3, group_reward=group_reward)
    batch = await rollouts.step()
    assert batch.rewards.tolist() == [0, 1, 2] * 2
    assert set(batch.group_ids.tolist()) == {0, 2}
    assert calls.count(1) == 3
    assert message in rollouts.core.story(SampleId(1, 0))
    assert rollouts.dropped == {DropReason.FAILED: 15}


@on_virtual_time
async def test_a_run_in_which_everything_fails_stops_with_the_reason() -> None:
    """Eight groups in a row without one completed: the trainer gets the last error; a fixed reward can go on."""
    broken = [True]

    async def reward(prompt: Prompt, response: Response) -> float:
        if broken[0]:
            raise ConnectionError("no answer from the judge")
        return 1.0

    rollouts = Rollouts(table({}), n=2, samples=2, reward=reward)
    with pytest.raises(RolloutError, match=r"8 groups failed in a row.*ConnectionError: no answer from the judge"):
        await rollouts.driver.next_batch()
    rollouts.check_ledger()
    broken[0] = False
    await rollouts.step()


# ---------------------------------------------------------------- rollout functions


@pytest.mark.parametrize("fault", ["raises", "exits", "is cancelled from inside"])
@pytest.mark.parametrize("after", [False, True], ids=["before generate", "after generate"])
@on_virtual_time
async def test_a_rollout_function_that_fails_once_begins_again(fault: str, after: bool) -> None:
    """The sample starts anew, its tokens are counted as dropped; the others never notice."""
    failed: list[SampleId] = []

    async def rollout(prompt: Prompt, llm: LLM) -> None:
        first = not failed
        if first:
            failed.append(llm.sample_id)
        if not first or after:
            await llm.generate()
        if first:
            await BAD_REWARDS[fault][0]()

    rollouts = Rollouts(table({}), n=2, samples=2, rollout=rollout)
    batch = await rollouts.step()
    assert set(batch.group_ids.tolist()) == {0, 1}
    assert rollouts.dropped == ({DropReason.FAILED: 5} if after else {})
    assert BAD_REWARDS[fault][1] in rollouts.core.story(failed[0])


async def generates_nothing(prompt: Prompt, llm: LLM) -> None:
    return None


async def two_at_once(prompt: Prompt, llm: LLM) -> None:
    await asyncio.gather(llm.generate(), llm.generate())


async def does_not_wait(prompt: Prompt, llm: LLM) -> None:
    task = asyncio.ensure_future(llm.generate())
    task.add_done_callback(lambda t: t.cancelled() or t.exception())
    await asyncio.sleep(2)


async def gives_up_and_asks_again(prompt: Prompt, llm: LLM) -> None:
    try:
        async with asyncio.timeout(2):
            await llm.generate()
    except TimeoutError:
        await llm.generate()


async def gives_up(prompt: Prompt, llm: LLM) -> None:
    try:
        await asyncio.wait_for(llm.generate(), 2)
    except TimeoutError:
        return


async def rewrites(prompt: Prompt, llm: LLM) -> None:
    done = await llm.generate()
    await llm.generate(done.conversation[1:])


async def forgets_the_prompt(prompt: Prompt, llm: LLM) -> None:
    done = await llm.generate(prompt.token_ids)
    await llm.generate(done.tokens)


async def unknown_id(prompt: Prompt, llm: LLM) -> None:
    await llm.generate([*prompt.token_ids, 12345])


async def text(prompt: Prompt, llm: LLM) -> None:
    await llm.generate("What is 6 x 7?")  # type: ignore[arg-type]


async def fractions(prompt: Prompt, llm: LLM) -> None:
    await llm.generate([*prompt.token_ids, 1.5])  # type: ignore[list-item]


async def negative(prompt: Prompt, llm: LLM) -> None:
    await llm.generate([*prompt.token_ids, -1])


async def no_tokens(prompt: Prompt, llm: LLM) -> None:
    await llm.generate(max_tokens=0)


async def cold(prompt: Prompt, llm: LLM) -> None:
    await llm.generate(temperature=-1)


async def nan_temperature(prompt: Prompt, llm: LLM) -> None:
    await llm.generate(temperature=float("nan"))


async def top_p_two(prompt: Prompt, llm: LLM) -> None:
    await llm.generate(top_p=2.0)


async def unknown_stop(prompt: Prompt, llm: LLM) -> None:
    await llm.generate(stop_token_ids=[5000])


async def too_many_at_least(prompt: Prompt, llm: LLM) -> None:
    await llm.generate(max_tokens=4, min_tokens=5)


async def is_no_coroutine(prompt: Prompt, llm: LLM) -> None:
    await None  # type: ignore[misc]


MISUSE = {
    generates_nothing: "returned without a call of llm.generate",
    two_at_once: "while another call of the same sample was running",
    does_not_wait: "an earlier llm.generate was given up",
    gives_up_and_asks_again: "an earlier llm.generate was given up",
    gives_up: "an earlier llm.generate was given up",
    rewrites: "append to the conversation",
    forgets_the_prompt: "append to the conversation",
    unknown_id: "token id 12345 is outside the engine's vocabulary of 1000",
    text: "and what your tokenizer makes of text",
    fractions: "flat list of integers",
    negative: "must be in",
    no_tokens: "max_tokens must be at least 1",
    cold: "temperature must be a finite number >= 0",
    nan_temperature: "temperature must be a finite number >= 0",
    top_p_two: "top_p must be in",
    unknown_stop: "stop_token_ids must be in the vocabulary",
    too_many_at_least: "min_tokens must be in",
    is_no_coroutine: "TypeError",
}


@pytest.mark.parametrize("function", list(MISUSE), ids=lambda f: f.__name__)
@on_virtual_time
async def test_misuse_is_a_named_failure_of_that_sample(function: Callable[..., Any]) -> None:
    """Whatever one sample's function does wrong: its group is dropped by name, engines and other samples go on."""

    async def rollout(prompt: Prompt, llm: LLM) -> None:
        if llm.sample_id == (1, 0):
            await function(prompt, llm)
        else:
            await llm.generate()

    rollouts = Rollouts(table({}), n=2, samples=2, rollout=rollout, allow_mismatch=True)
    for _ in range(3):
        batch = await rollouts.step()
        assert 1 not in batch.group_ids
    story = rollouts.core.story(SampleId(1, 0))
    assert "group dropped (failed): g1.s0" in story
    assert MISUSE[function] in story
    assert rollouts.core.counters["failed_attempts"] == 0  # no engine was blamed
    assert rollouts.core.prompts.as_dict()["dropped"] == {"failed": 1}


def test_the_error_is_raised_where_the_mistake_is(caplog: pytest.LogCaptureFixture) -> None:
    """The user's own line is in the traceback that april logs."""

    async def program() -> None:
        rollouts = Rollouts(table({}), n=1, rollout=rewrites)
        with pytest.raises(RolloutError, match="append to the conversation"):
            await rollouts.driver.next_batch()
        await rollouts.close()

    virtual(program)
    assert "await llm.generate(done.conversation[1:])" in caplog.text


@on_virtual_time
async def test_generate_after_the_function_has_returned() -> None:
    """A task that outlives its function gets an error of its own, and the finished sample stays as it is."""
    errors: list[BaseException] = []

    async def late(llm: LLM) -> None:
        await asyncio.sleep(0.5)
        try:
            await llm.generate()
        except RolloutError as error:
            errors.append(error)

    tasks: list[asyncio.Task[None]] = []

    async def rollout(prompt: Prompt, llm: LLM) -> None:
        await llm.generate()
        tasks.append(asyncio.ensure_future(late(llm)))

    async def reward(prompt: Prompt, response: Response) -> float:
        await asyncio.sleep(1)
        return 1.0

    rollouts = Rollouts(table({}), n=2, rollout=rollout, reward=reward)
    await rollouts.step()
    await asyncio.gather(*tasks)
    assert len(errors) == 2
    assert all("after its rollout function had ended" in str(e) for e in errors)


@on_virtual_time
async def test_what_the_function_waits_for_is_ended_with_its_group() -> None:
    """A dropped group ends its functions, tasks of their own that wait in generate included."""
    ended: list[str] = []

    async def wait(llm: LLM) -> None:
        try:
            await llm.generate()
        finally:
            ended.append("inner")

    async def rollout(prompt: Prompt, llm: LLM) -> None:
        if llm.sample_id == (0, 0):
            task = asyncio.ensure_future(wait(llm))
            await asyncio.wait([task])
        elif llm.sample_id == (0, 1):
            await asyncio.sleep(3)
            raise ValueError("no")
        else:
            await llm.generate()

    rollouts = Rollouts(table({(0, 0): 500}), n=1, samples=2, rollout=rollout)
    batch = await rollouts.step()
    assert batch.group_ids.tolist() == [1, 1]
    assert ended == ["inner"]


@pytest.mark.parametrize("ending", [returns(None), raises(ValueError("cleaning up failed"))], ids=["returns", "raises"])
@on_virtual_time
async def test_a_cancelled_function_that_swallows_its_end_changes_nothing(ending: Callable[[], Awaitable[Any]]) -> None:
    """Functions of a dropped group that swallow their end, rollout and reward alike, are no events any more."""
    swallowed: list[SampleId] = []

    async def swallow(sample_id: SampleId) -> None:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            swallowed.append(sample_id)
            await ending()

    async def rollout(prompt: Prompt, llm: LLM) -> None:
        if llm.sample_id == (0, 0):
            await llm.generate()
            await swallow(llm.sample_id)
        elif llm.sample_id == (0, 1):
            await asyncio.sleep(7)
            raise ValueError("no")
        else:
            await llm.generate()

    async def reward(prompt: Prompt, response: Response) -> float:
        if response.sample_id == (0, 2):
            await swallow(response.sample_id)
        return 1.0

    rollouts = Rollouts(table({}), n=1, samples=3, rollout=rollout, reward=reward, max_attempt_failures=1)
    batch = await rollouts.step()
    assert set(batch.group_ids.tolist()) == {1}
    assert swallowed == [(0, 0), (0, 2)]
    await rollouts.step()


def test_close_waits_for_functions_that_clean_up(caplog: pytest.LogCaptureFixture) -> None:
    """A finally block may await; one that never ends is named in the log and left behind after CLOSE_PATIENCE_S."""
    ended: list[float] = []
    release = asyncio.Event()

    async def rollout(prompt: Prompt, llm: LLM) -> None:
        try:
            await llm.generate()
        finally:
            if llm.sample_id.group == 0:
                await asyncio.sleep(3)
            else:
                await release.wait()
            ended.append(now())

    async def program() -> None:
        rollouts = Rollouts(table({}, 500), n=2, rollout=rollout)
        waiter = asyncio.create_task(rollouts.driver.next_batch())
        await asyncio.sleep(10)
        await rollouts.driver.close()
        assert ended == [13.0]
        assert now() == 10 + CLOSE_PATIENCE_S
        release.set()
        await asyncio.sleep(0)
        with pytest.raises(SchedulerClosed):
            await waiter
        await rollouts.close()

    virtual(program)
    assert "did not end within 10 s and is left behind" in caplog.text


@on_virtual_time
async def test_functions_do_not_see_each_others_context() -> None:
    """A context variable that one sample's function sets is not there in the functions that start later."""
    colour: ContextVar[str] = ContextVar("colour", default="none")
    seen: list[str] = []

    async def rollout(prompt: Prompt, llm: LLM) -> None:
        seen.append(colour.get())
        colour.set(str(llm.sample_id))
        await llm.generate()

    rollouts = Rollouts(table({(0, 0): 9}), n=3, rollout=rollout, max_in_flight=1)
    await rollouts.step()
    assert seen == ["none"] * 3


@pytest.mark.parametrize("change", [{"top_p": 0.9}, {"min_tokens": 3}, {"temperature": 0.0}], ids=str)
def test_calls_whose_logprobs_cannot_be_recomputed_need_consent(change: dict[str, float]) -> None:
    """What the configuration refuses, a call may not smuggle in; with allow_mismatch it passes through."""

    async def rollout(prompt: Prompt, llm: LLM) -> None:
        await llm.generate(**change)  # type: ignore[arg-type]

    async def program(allow: bool) -> None:
        rollouts = Rollouts(table({}), n=1, rollout=rollout, allow_mismatch=allow)
        if allow:
            await rollouts.step()
            (request,) = rollouts.engines[0].requests.values()
            assert {name: getattr(request.sampling, name) for name in change} == change
        else:
            with pytest.raises(RolloutError, match=r"cannot recompute.*allow_mismatch"):
                await rollouts.driver.next_batch()
        await rollouts.close()

    virtual(lambda: program(False))
    virtual(lambda: program(True))


@on_virtual_time
async def test_a_function_that_works_before_its_first_call_holds_its_place() -> None:
    """Preparation before the first generate (here 10 s) delays that sample, and max_in_flight counts it."""

    async def rollout(prompt: Prompt, llm: LLM) -> str:
        await asyncio.sleep(10)
        await llm.generate()
        return "done"

    async def reward(prompt: Prompt, response: Response) -> float:
        assert response.output == "done"
        return 1.0

    lengths = table({}, 5)
    rollouts = Rollouts(
        lengths, n=2, rollout=rollout, reward=reward, max_in_flight=1, engines=[RecordingEngine(lengths)]
    )
    await rollouts.step()
    assert now() == pytest.approx(30, abs=0.1)
