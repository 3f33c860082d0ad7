"""Rollout and reward functions that fail, cheat or misuse ``llm``: each harms its own sample only, and is named."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import ContextVar, copy_context
from typing import Any

import pytest
from virtual_rollouts import Angles, Rollouts, now, on_virtual_time, prompt_ids, table

from april.core.sampling import SamplingParams
from april.core.types import DropReason, Prompt, Refill, SampleId
from april.driver.command_executor import CLOSE_PATIENCE_S
from april.driver.llm import LLM
from april.driver.rewards import Response
from april.driver.user_code import inside_user_code, refuse_inside_user_code
from april.engines.simulated.response_lengths import LognormalLengths
from april.errors import DataExhausted, RolloutError, SchedulerClosed

pytestmark = on_virtual_time


# ---------------------------------------------------------------- rollout functions


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


async def is_no_coroutine(prompt: Prompt, llm: LLM) -> None:
    await None  # type: ignore[misc]


MISUSE = {
    generates_nothing: "returned without awaiting a call of llm.generate",
    two_at_once: "while another call of the same sample was running",
    does_not_wait: "an earlier llm.generate was given up.*await every call to its end, without a timeout",
    gives_up_and_asks_again: "an earlier llm.generate was given up",
    gives_up: "an earlier llm.generate was given up",
    rewrites: "append to Completion.conversation",
    forgets_the_prompt: "append to Completion.conversation",
    is_no_coroutine: "TypeError",
}


@pytest.mark.parametrize("function", list(MISUSE), ids=lambda f: f.__name__)
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
    assert re.search(MISUSE[function], story)
    assert rollouts.core.counters["failed_attempts"] == 0  # no engine was blamed
    assert rollouts.core.prompts.as_dict()["dropped"] == {"failed": 1}


IDS = prompt_ids(0).tolist()
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"token_ids": [*IDS, 12345]}, "UsageError: .* token id 12345 is outside the engine's vocabulary of 1000"),
    ({"token_ids": "What is 6 x 7?"}, "UsageError: .* followed by your tokenizer's ids of new text"),
    ({"token_ids": Prompt(prompt_ids(0))}, "got Prompt of object; give prompt.token_ids or "),
    ({"token_ids": [*IDS, 1.5]}, "UsageError: .* flat list of integers"),
    ({"token_ids": [*IDS, -1]}, "UsageError: .* must be in"),
    ({"max_tokens": 0}, r"UsageError: llm.generate: max_tokens must be in \[1, 2\*\*31\), got 0"),
    ({"max_tokens": 2.5}, "llm.generate: max_tokens must be an integer, got 2.5"),
    ({"max_tokens": True}, "llm.generate: max_tokens must be an integer, got True"),
    ({"max_tokens": 4, "min_tokens": 5}, "UsageError: llm.generate: min_tokens must be in"),
    ({"temperature": -1}, "UsageError: llm.generate: temperature must be a finite number >= 0"),
    ({"temperature": float("nan")}, "UsageError: llm.generate: temperature must be a finite number >= 0"),
    ({"temperature": "hot"}, "llm.generate: temperature must be a number, got 'hot'"),
    ({"top_p": 2.0}, "UsageError: llm.generate: top_p must be in"),
    ({"stop_token_ids": [5000]}, "UsageError: .* stop_token_ids must be in the vocabulary"),
    ({"stop_token_ids": 5}, "llm.generate: stop_token_ids must be a list, got 5"),
    ({"stop_token_ids": [1.5]}, r"llm.generate: stop_token_ids must be integers, got \(1.5,\)"),
    ({"stop_token_ids": ["<|im_end|>"]}, r"convert_tokens_to_ids\('<.*'\)"),
    ({"stop_token_ids": [5, "</s>"]}, r"convert_tokens_to_ids\('<.*'\)"),
    ({"stop": 5}, "llm.generate: stop must be a list, got 5"),
    ({"stop": ["a", ""]}, "UsageError: llm.generate: an empty stop string"),
    ({"stop": [7]}, "UsageError: llm.generate: stop strings must be strings, got 7"),
    ({"stop": ["\ufffd"]}, "contains U\\+FFFD"),
    ({"top_k": 5}, "TypeError: llm.generate: top_k: changes the distribution.*april supports token_ids,"),
    ({"n": 4}, "TypeError: llm.generate: n: .*set n_samples_per_prompt; april supports"),
    ({"max_new_tokens": 4}, "max_new_tokens: is called max_tokens in april"),
    ({"colour": "red"}, "TypeError: llm.generate: colour: unknown argument; april supports token_ids"),
]  # fmt: skip
NO_TOKENIZER = [
    ({"stop": ["x"]}, "UsageError: llm.generate: stop strings are matched on text; give the scheduler tokenizer="),
    ({"stop": "x"}, "give the scheduler tokenizer="),
]


@pytest.mark.parametrize(
    ("arguments", "message", "tokenizer"),
    [(*row, Angles()) for row in REFUSED] + [(*row, None) for row in NO_TOKENIZER],
    ids=[repr(row[0])[:60] for row in REFUSED + NO_TOKENIZER],
)
async def test_calls_that_are_refused(arguments: dict[str, Any], message: str, tokenizer: Any) -> None:
    """One sentence where the call is made; no engine sees the request, and the sample may go on with another call."""
    errors: list[str] = []

    async def rollout(prompt: Prompt, llm: LLM) -> None:
        with pytest.raises((ValueError, TypeError)) as caught:
            await llm.generate(**arguments)
        errors.append(f"{type(caught.value).__name__}: {caught.value}")
        await llm.generate()

    rollouts = Rollouts(table({}), rollout=rollout, tokenizer=tokenizer, allow_mismatch=True)
    rollouts.check(await rollouts.driver.next_batch())
    assert len(rollouts.engines[0].requests) == len(errors) == 1
    assert re.search(message, errors[0])


async def test_generate_after_the_function_has_returned() -> None:
    """A task that outlives its function gets an error of its own, and the finished sample stays as it is."""
    kept: list[LLM] = []

    async def rollout(prompt: Prompt, llm: LLM) -> None:
        await llm.generate()
        kept.append(llm)

    async def reward(prompt: Prompt, response: Response) -> float:
        with pytest.raises(RolloutError, match="after its rollout function had ended"):
            await kept[0].generate()
        return 1.0

    rollouts = Rollouts(table({}), rollout=rollout, reward=reward)
    await rollouts.step()
    assert kept


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


@pytest.mark.parametrize("raises", [False, True])
async def test_a_cancelled_function_that_swallows_its_end_changes_nothing(raises: bool) -> None:
    """Functions of a dropped group that swallow their end, rollout and reward alike, are no events any more."""
    swallowed: list[SampleId] = []

    async def swallow(sample_id: SampleId) -> None:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            swallowed.append(sample_id)
            if raises:
                raise ValueError("cleaning up failed") from None

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


async def test_close_waits_for_functions_that_clean_up(caplog: pytest.LogCaptureFixture) -> None:
    """A finally block may await; one that never ends is named in the log and left behind after CLOSE_PATIENCE_S."""
    ended: list[float] = []
    release = asyncio.Event()

    async def rollout(prompt: Prompt, llm: LLM) -> None:
        try:
            await llm.generate()
        finally:
            await (asyncio.sleep(3) if llm.sample_id.group == 0 else release.wait())
            ended.append(now())

    rollouts = Rollouts(table({}, 500), n=2, rollout=rollout)
    waiter = asyncio.create_task(rollouts.driver.next_batch())
    await asyncio.sleep(10)
    await rollouts.driver.close()
    assert ended == [13.0]
    assert now() == 10 + CLOSE_PATIENCE_S
    assert "did not end within 10 s and is left running" in caplog.text
    release.set()
    await asyncio.sleep(0)
    with pytest.raises(SchedulerClosed):
        await waiter


@pytest.mark.parametrize("ask", ["generate", "chat", "base_url", "earlier call"])
async def test_a_function_that_swallows_the_end_generates_nothing(ask: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever it asks for of llm then, it is told that the scheduler is closed, and close waits for nothing."""
    errors: list[BaseException] = []

    async def rollout(prompt: Prompt, llm: LLM) -> None:
        earlier = asyncio.ensure_future(llm.generate())
        with suppress(asyncio.CancelledError):  # as asyncio.wait_for of Python 3.11 may
            await asyncio.shield(earlier)
        try:
            if ask == "generate":
                await llm.generate(any_conversation=True, token_ids=prompt.token_ids)
            elif ask == "chat":
                await llm.chat([{"role": "user", "content": "and now?"}])
            elif ask == "base_url":
                assert llm.base_url
            else:
                await earlier
        except BaseException as error:
            errors.append(error)
            raise

    rollouts = Rollouts(table({}, 500), n=2, rollout=rollout)
    waiter = asyncio.create_task(rollouts.driver.next_batch())
    await asyncio.sleep(10)
    await rollouts.driver.close()
    assert now() == 10
    expected = asyncio.CancelledError if ask == "earlier call" else SchedulerClosed
    assert [type(error) for error in errors] == [expected] * len(errors)
    assert len(errors) >= 2
    assert not caplog.text
    with pytest.raises(SchedulerClosed):
        await waiter


def test_a_function_that_is_left_behind_ends_in_silence() -> None:
    """It is dropped in the context of whoever drops it last, which need not be its own."""

    async def left_behind() -> None:
        with inside_user_code():
            await asyncio.Future(loop=loop)

    loop = asyncio.new_event_loop()
    coroutine = left_behind()
    copy_context().run(coroutine.send, None)
    coroutine.close()  # raises what its end raises
    refuse_inside_user_code()
    loop.close()


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
@pytest.mark.parametrize("allow", [False, True])
async def test_calls_whose_logprobs_cannot_be_recomputed_need_consent(change: dict[str, Any], allow: bool) -> None:
    """What the configuration refuses, a call may not smuggle in; with allow_mismatch it passes through."""

    async def rollout(prompt: Prompt, llm: LLM) -> None:
        await llm.generate(**change)

    rollouts = Rollouts(table({}), rollout=rollout, allow_mismatch=allow)
    if allow:
        await rollouts.step()
        (request,) = rollouts.engines[0].requests.values()
        assert {name: getattr(request.sampling, name) for name in change} == change
    else:
        with pytest.raises(RolloutError, match=r"cannot recompute.*allow_mismatch"):
            await rollouts.driver.next_batch()


# ----------------------------------------------------------------
# Dynamic sampling through the driver: only accepted groups count, rejected ones are dropped by name and replaced.


LENGTHS = LognormalLengths(15, 0.6, 0.6, seed=8)


def group_of(responses: list[Response]) -> int:
    return responses[0].sample_id.group


def only(accepted: Callable[[int], bool]) -> Callable[..., Awaitable[bool]]:
    async def verdict(prompt: Prompt, responses: list[Response]) -> bool:
        return accepted(group_of(responses))

    return verdict


@pytest.mark.parametrize("refill", list(Refill))
@pytest.mark.parametrize("over", [3, 6, 2], ids=["N' = N", "N' = 2N", "portions"])
async def test_rejected_groups_are_replaced_and_never_counted(refill: Refill, over: int) -> None:
    """Every batch has N accepted groups; what was rejected is counted per step, by name, with all its tokens."""
    rollouts = Rollouts(LENGTHS.sample, n=3, samples=2, over=over, refill=refill, filter=only(lambda g: g % 3 != 1))
    dropped = 0
    delivered: list[int] = []
    for _ in range(6):
        batch = await rollouts.step()
        assert batch.group_sizes == (2, 2, 2)
        dropped += int(batch.metrics["groups_dropped_filtered"])
        delivered += batch.group_ids[::2].tolist()
    assert all(group % 3 != 1 for group in delivered)
    assert len(set(delivered)) == 18
    core = rollouts.core
    assert core.prompts.dropped[DropReason.FILTERED] >= dropped > 4
    assert rollouts.dropped == {
        DropReason.FILTERED: sum(
            LENGTHS.sample(g, i) for g in range(core.context.groups_drawn) for i in range(2)
            if g % 3 == 1 and g not in core.buffer.groups
        )
    }  # fmt: skip


async def test_what_a_filter_sees() -> None:
    """The prompt with its data, and every response with its reward and what the rollout function returned."""
    seen: list[Any] = []

    async def rollout(prompt: Prompt, llm: LLM) -> str:
        await llm.generate()
        return f"output of {llm.sample_id}"

    async def verdict(prompt: Prompt, responses: list[Response]) -> bool:
        seen.append((prompt.data["answer"], [(r.sample_id, r.output, r.reward, len(r.tokens)) for r in responses]))
        for r in responses:  # what it writes harms nobody
            r.tokens[:] = 0
            r.logprobs[:] = 9
        return True

    async def length(prompt: Prompt, response: Response) -> float:
        return float(len(response.tokens))

    prompts = [{"token_ids": prompt_ids(i), "answer": 10 * i} for i in range(2)]
    rollouts = Rollouts(
        table({(0, 1): 8}), n=2, samples=2, prompts=prompts, rollout=rollout, reward=length, filter=verdict
    )
    await rollouts.step()
    assert sorted(seen) == [
        (0, [((0, 0), "output of g0.s0", 5.0, 5), ((0, 1), "output of g0.s1", 8.0, 8)]),
        (10, [((1, 0), "output of g1.s0", 5.0, 5), ((1, 1), "output of g1.s1", 5.0, 5)]),
    ]


async def test_evaluations_are_not_filtered() -> None:
    """The filter is for training."""
    rollouts = Rollouts(table({}), n=1, samples=2, filter=only(lambda g: pytest.fail("not training")))
    result = await rollouts.driver.evaluate([Prompt(prompt_ids(1))], 2, SamplingParams(max_tokens=9), 0)
    assert result.rewards.shape == (1, 2)


# ---------------------------------------------------------------- the end of the data


async def test_data_of_which_nothing_is_accepted() -> None:
    """No empty batch, no waiting for ever: the data has ended."""
    rollouts = Rollouts(table({}), n=2, samples=2, over=3, prompts=5, filter=only(lambda g: False))
    sentence = r"every prompt is delivered or dropped \(dropped so far: \{'filtered': 5\}\)"
    with pytest.raises(DataExhausted, match=sentence):
        await rollouts.driver.next_batch()


async def test_the_end_of_the_data_waits_for_a_filter_that_thinks() -> None:
    """The last group is neither forgotten nor delivered before its verdict."""

    async def slow(prompt: Prompt, responses: list[Response]) -> bool:
        await asyncio.sleep(60)
        return True

    rollouts = Rollouts(table({}), n=4, prompts=3, filter=slow)
    batch = await rollouts.step()
    assert sorted(batch.group_ids.tolist()) == [0, 1, 2]
    assert now() == pytest.approx(65, abs=1e-6)
