"""``llm.chat``: messages and tools in a rollout function without a client, on virtual time; and budgets of samples."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("renderers")
from renderers import Qwen3RendererConfig

import april
from april.testing import FakeEngine, Rollouts, conversation, rollouts, run_virtual
from tests.gateway_suite.script import EOS, LONG, TOKENIZER, TOOL, VOCAB, reply, says

PLAIN = Qwen3RendererConfig(enable_thinking=False)
TOOLS = [{"type": "function", "function": TOOL}]
SMALL: dict[str, Any] = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "max_response_len": 2000}


def ask(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def engine(**options: Any) -> FakeEngine:
    given: dict[str, Any] = {"chunk_tokens": 4, "seconds_per_token": 0.01} | options
    given |= {"vocab_size": VOCAB, "eos_token_id": EOS}
    return FakeEngine("e", responses=lambda request: reply(conversation(request).tolist()), **given)


def prompts() -> Iterator[list[int]]:
    """Prompts of which the functions here make nothing."""
    return ([5 + i] for i in range(90))


def started(rollout: Any, config: dict[str, Any] | None = None, **options: Any) -> Rollouts:
    """A run of this function, on engines with the scripted model."""
    given: dict[str, Any] = {
        "engines": [engine()], "prompts": prompts(), "tokenizer": TOKENIZER, "renderer": PLAIN,
        "reward": lambda prompt, response: float(len(response.tokens)),
    }  # fmt: skip
    return rollouts(april.Config(**SMALL | (config or {})), rollout=rollout, **given | options)


def batch_of(rollout: Any, config: dict[str, Any] | None = None, **options: Any) -> april.Batch:
    """The first batch of such a run."""

    async def program() -> april.Batch:
        async with started(rollout, config, **options) as run:
            batch = await run.next_batch()
            run.audit()
            return batch

    return run_virtual(program())


def test_an_answer_has_the_message_its_calls_and_its_end() -> None:
    """Text, tool calls with JSON arguments, the reason of the end, and the tokens as they were sampled."""
    seen: list[Any] = []

    async def rollout(prompt: april.Prompt, llm: april.LLM) -> None:
        seen.append(await llm.chat(ask("#add"), tools=TOOLS))

    (first, *_) = batch_of(rollout).samples
    answer = seen[0]
    (call,) = answer.tool_calls
    assert (answer.finish, call.name, json.loads(call.arguments)) == ("tool_calls", "add", {"a": 1, "b": 2})
    assert answer.text.strip() == "let me see"
    assert answer.message["tool_calls"][0]["id"] == call.id
    assert answer.tokens.tolist() == [*TOKENIZER.encode(says("add")), EOS]
    with pytest.raises(ValueError, match="read-only"):  # the next turn is made of it
        answer.prompt_ids[0] = 7
    assert first.tokens.tolist() == answer.tokens.tolist()
    np.testing.assert_array_equal(first.logprobs, answer.logprobs)


@pytest.mark.parametrize("opens", ["base_url", "chat"])
def test_what_the_function_itself_has_generated_is_heard(opens: str) -> None:
    """A call of any conversation counts beside an endpoint that no client has asked, and beside llm.chat."""

    async def rollout(prompt: april.Prompt, llm: april.LLM) -> None:
        if opens == "chat":
            await llm.chat(ask("#add"), tools=TOOLS)
        else:
            assert llm.base_url
        await llm.generate(list(prompt.token_ids), any_conversation=True)

    rows = Counter(row.id for row in batch_of(rollout).samples)
    assert set(rows.values()) == {2 if opens == "chat" else 1}


def test_turns_are_one_row_over_weight_updates() -> None:
    """What was sampled stays in the next turn, also where steps cut both; a tool's result carries no loss."""

    async def rollout(prompt: april.Prompt, llm: april.LLM) -> str:
        messages = ask("first #longadd")
        answer = await llm.chat(messages, tools=TOOLS)
        await asyncio.sleep(0.5 + llm.sample_id.index)
        result = {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "3 #long"}
        last = await llm.chat([*messages, answer.message, result], tools=TOOLS)
        return last.text

    async def program() -> None:
        config = {"over_sampling_batch_size": 6, "max_in_flight": 5}
        async with started(rollout, config, engines=[engine(seconds_per_token=0.05)]) as run:
            versions = 0
            for _ in range(6):
                batch = await run.next_batch()
                assert batch.one_row_each
                for sample in batch.samples:
                    trained = TOKENIZER.decode(sample.tokens[sample.loss_mask == 1])
                    assert trained == f"{says('longadd')}<|im_end|>{LONG}<|im_end|>"
                    assert 0 in sample.loss_mask
                    versions = max(versions, len({tuple(v) for v in sample.versions.tolist()}))
                await run.weight_update()
            assert versions > 1
            assert run.ledger()["tokens"].dropped == {}
            run.audit()

    run_virtual(program())


def test_calls_side_by_side_are_rows_and_equal_ones_are_two() -> None:
    """As for a client at ``base_url``: nobody joins another's answer."""
    answers: list[Any] = []

    async def rollout(prompt: april.Prompt, llm: april.LLM) -> None:
        answers.extend(await asyncio.gather(*(llm.chat(ask("#hello")) for _ in range(3))))

    batch = batch_of(rollout)
    assert batch.sample_numbers.tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert len({answer.id for answer in answers[:3]}) == 3


def test_what_the_function_did_not_wait_for_is_unheard() -> None:
    """A call that a function gives up is dropped by name; what it has heard is trained."""

    async def rollout(prompt: april.Prompt, llm: april.LLM) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(llm.chat(ask("#long")), 0.2)
        await llm.chat(ask("#hello"))

    async def program() -> None:
        async with started(rollout, engines=[engine(seconds_per_token=0.05)]) as run:
            batch = await run.next_batch()
            assert [TOKENIZER.decode(s.tokens, skip_special_tokens=True) for s in batch.samples] == ["hi"] * 4
            assert run.ledger()["tokens"].dropped["unheard"] > 0
            run.validate()

    run_virtual(program())


def test_after_a_restart_the_same_conversations_have_the_same_answers() -> None:
    """A function that begins again is answered from its tokens, ids of its tool calls included."""
    ids: dict[Any, set[str]] = {}

    async def rollout(prompt: april.Prompt, llm: april.LLM) -> None:
        answer = await llm.chat(ask("#add"), tools=TOOLS)
        ids.setdefault(tuple(llm.sample_id), set()).add(answer.tool_calls[0].id)
        await asyncio.sleep(40)
        await llm.chat(ask("#hello"))

    async def program() -> None:
        async with started(rollout) as run:
            waiting = asyncio.create_task(run.next_batch())
            await asyncio.sleep(20)
            state = run.state_dict()
            waiting.cancel()
        again = engine()
        async with started(rollout, engines=[again]) as run:
            await run.load_state_dict(state)
            batch = await run.next_batch()
        assert {len(names) for names in ids.values()} == {1}
        assert len(batch.samples) == 8
        assert len(again.attempts) == 4  # of "#hello" only

    run_virtual(program())


def test_a_history_that_is_edited_in_place_is_another_conversation() -> None:
    """The model is shown what the messages say at each call, also if an earlier call got the same lists and dicts."""
    seen: list[Any] = []

    async def rollout(prompt: april.Prompt, llm: april.LLM) -> None:
        part, arguments = {"type": "text", "text": "secret ABC #hello"}, {"a": [{"b": "secret ABC"}]}
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
        messages = [
            {"role": "user", "content": [part]}, {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "3 #hello", "tool_call_id": "1"},
        ]  # fmt: skip
        answers = [await llm.chat(messages, tools=TOOLS)]
        messages += [answers[0].message, *ask("and now? #hello")]
        part["text"] = "hidden"
        answers.append(await llm.chat(messages, tools=TOOLS))
        arguments["a"][0]["b"] = "hidden"
        answers.append(await llm.chat(messages, tools=TOOLS))
        seen.append([TOKENIZER.decode(answer.prompt_ids.tolist()).count("secret ABC") for answer in answers])

    batch_of(rollout)
    assert seen[0] == [2, 1, 0]


@pytest.mark.parametrize(
    ("messages", "arguments", "says"),
    [
        ([], {}, "messages must be a list that is not empty"),
        (ask("x"), {"tools": [{"type": "web_search"}]}, r"tools\[0\]"),
        ([{"role": "robot", "content": "x"}], {}, r"messages\[0\]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "image_url"),
        ([{"role": "user", "content": ["look", {"type": "image_url"}]}], {}, "content: a part must have .*, got str"),
        (ask("x"), {"temperature": -1.0}, "temperature must be"),
        (ask("x"), {"top_k": 4}, "llm.chat: top_k.*april supports messages, tools, max_tokens"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(messages: Any, arguments: Any, says: str) -> None:
    """The function gets the error, and can go on."""

    async def rollout(prompt: april.Prompt, llm: april.LLM) -> None:
        with pytest.raises((april.UsageError, TypeError), match=says):
            await llm.chat(messages, **arguments)
        await llm.chat(ask("#hello"))

    assert batch_of(rollout).one_row_each


@pytest.mark.parametrize("configured", [False, True])
def test_an_answer_ends_before_its_stop_string(configured: bool) -> None:
    """Be it an argument of the call or a setting."""
    seen: list[Any] = []

    async def rollout(prompt: april.Prompt, llm: april.LLM) -> None:
        seen.append(await llm.chat(ask("#long"), **({} if configured else {"stop": "done"})))

    batch_of(rollout, {"sampling": {"stop": ["done"]}} if configured else {})
    assert (seen[0].text, seen[0].stopped_by) == (LONG.removesuffix("done"), "done")


def test_the_budget_of_a_sample_ends_its_answers_as_length() -> None:
    """``max_sample_tokens`` counts over all conversations; the answer that reaches it is cut, later ones are empty."""
    seen: list[Any] = []

    async def rollout(prompt: april.Prompt, llm: april.LLM) -> None:
        seen.append([await llm.chat(ask(f"{i} #long")) for i in range(3)])

    whole = len(TOKENIZER.encode(LONG)) + 1
    batch = batch_of(rollout, {"max_sample_tokens": whole + 10})
    for answers in seen:
        assert [(a.finish, len(a.tokens)) for a in answers] == [("stop", whole), ("length", 10), ("length", 0)]
    assert np.bincount(batch.sample_numbers, [s.loss_mask.sum() for s in batch.samples]).tolist() == [whole + 10] * 4


def scheduler(rollout: Any, **config: Any) -> april.RolloutScheduler:
    """On a thread of its own, in real time."""
    return april.RolloutScheduler(
        april.Config(**SMALL | config), prompts=prompts(), rollout=rollout, reward=None, engines=[engine()],
        tokenizer=TOKENIZER, renderer=PLAIN, check=True,
    )  # fmt: skip


def test_a_plain_function_blocks() -> None:
    """``chat`` of a function in a thread returns the answer itself."""

    def rollout(prompt: april.Prompt, llm: april.BlockingLLM) -> str:
        return llm.chat(ask("#hello")).text

    with scheduler(rollout) as run:
        assert [TOKENIZER.decode(s.tokens, skip_special_tokens=True) for s in run.next_batch().samples] == ["hi"] * 4


@pytest.mark.parametrize("thread", ["the loop's", "another"])
def test_a_plain_function_may_return_a_coroutine(thread: str) -> None:
    """As a lambda around an async agent does: the agent has its address and its answers; nothing blocks the loop."""

    async def agent(prompt: april.Prompt, llm: Any) -> str:
        if thread == "another":
            address = await asyncio.to_thread(lambda: (llm.base_url, llm.api_key))
            return address[0] and (await asyncio.to_thread(llm.chat, ask("#hello"))).text
        return llm.base_url and llm.api_key and (await llm.chat(ask("#hello"))).text

    with scheduler(lambda prompt, llm: agent(prompt, llm)) as run:
        assert [TOKENIZER.decode(s.tokens, skip_special_tokens=True) for s in run.next_batch().samples] == ["hi"] * 4


def test_tokens_may_be_of_any_conversation() -> None:
    """Side by side, each a row; tokens that repeat one go on with it, and without the word a second one is refused."""
    seen: list[Any] = []

    async def rollout(prompt: april.Prompt, llm: april.LLM) -> None:
        one, two = [TOKENIZER.encode(text) for text in ("#add", "#say")]
        first, second = await asyncio.gather(
            llm.generate(one, any_conversation=True), llm.generate(two, any_conversation=True)
        )
        third = await llm.generate([*first.conversation.tolist(), 9], any_conversation=True, max_tokens=5)
        assert first.conversation.tolist() == [*one, *first.tokens.tolist()]
        assert third.conversation.tolist()[: len(first.conversation)] == first.conversation.tolist()
        with pytest.raises(april.RolloutError, match="append to "):
            await llm.generate(two)
        seen.append((first, second, third))

    rows = [s for s in batch_of(rollout).samples if s.id == (0, 0)]
    first, second, third = seen[0]
    assert [row.prompt.token_ids.tolist() for row in rows] == [TOKENIZER.encode("#add"), TOKENIZER.encode("#say")]
    assert rows[0].tokens.tolist() == [*first.tokens.tolist(), 9, *third.tokens.tolist()]
    assert rows[1].tokens.tolist() == second.tokens.tolist()
    assert rows[0].loss_mask.tolist() == [1] * len(first.tokens) + [0] + [1] * len(third.tokens)
