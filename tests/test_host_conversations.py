"""Functions on hosts that hold several conversations: who is told which tokens, and whose answer is whose."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import numpy as np
import pytest
from core_machine import settings
from host_sides import SAMPLING, HostSides, started, submitted
from memory_doors import Row, rows_of
from test_hosts import Place, two_turns

import april
from april.core import commands as do
from april.core import events as ev
from april.core.batch import DeliveredSample
from april.core.types import Attempt, DropReason, Sample
from april.driver.llm import completion_of
from april.driver.rewards import response_of
from april.errors import ConfigError
from april.processes import messages as wire
from april.processes.host import Host
from april.processes.messages import ProtocolError, packed
from april.testing import FakeEngine, conversation, run_virtual
from april.testing.gateway.script import EOS, LONG, TOKENIZER, VOCAB, reply, says


def function_at_work() -> tuple[HostSides, Sample]:
    """A step of one sample, whose function runs on the host; there is room for several requests."""
    sides = HostSides(settings(n=1, samples=1, max_in_flight=8), functions=True)
    sides.pump.post(ev.StepRequested())
    return sides, started(sides.down())


def asks(sides: HostSides, sample: Sample, number: int, *ids: int) -> list[Attempt]:
    """The function on the host asks for any conversation; returns the requests that its engine gets."""
    sides.mirror.post(ev.CallMade(sample.id, SAMPLING, np.array(ids, np.int32), number, any_chain=True))
    sides.up()
    return submitted(sides.down())


def hears(sides: HostSides) -> dict[int, list[int]]:
    """What the host's function is answered now: tokens by the number of the call."""
    answers = [c.call for c in sides.down() if isinstance(c, do.CallCompleted)]
    found = {}
    for call in answers:
        assert call.result is not None
        found[call.number] = completion_of(call.chain, call.result, call.number).tokens.tolist()
    return found


def said(sides: HostSides, kind: type[Any]) -> list[Any]:
    """The messages of a kind in the frame that the host sends now."""
    frame = sides.up()
    return [m for m in wire.decode_from_host(frame) if isinstance(m, kind)]


def row(sample: DeliveredSample) -> Row:
    """A row as the oracle has it."""
    return sample.prompt.token_ids.tolist(), sample.tokens.tolist(), sample.loss_mask.tolist()


def test_open_calls_are_answered_by_their_numbers() -> None:
    """Two conversations run side by side; the one that was asked for later is answered first, each with its own."""
    sides, sample = function_at_work()
    (first,) = asks(sides, sample, 1, 1, 2, 0)
    (second,) = asks(sides, sample, 2, 50, 51, 52, 53)
    assert (first.token_ids.tolist(), second.token_ids.tolist()) == ([1, 2, 0], [50, 51, 52, 53])
    sides.ends(second, 2)
    sides.up()
    assert hears(sides) == {2: [11, 1]}
    sides.ends(first, 3)
    sides.up()
    assert hears(sides) == {1: [10, 11, 1]}
    assert [c.number for c in sample.chains] == [0, 1]
    sides.mirror.post(ev.SampleReturned(sample.id))
    sides.up()
    (score,) = (c for c in sides.down() if isinstance(c, do.ScoreSample))
    seen = response_of(score.sample, None).conversations
    assert [(c.prompt_ids.tolist(), c.tokens.tolist()) for c in seen] == [
        ([1, 2, 0], [10, 11, 1]), ([50, 51, 52, 53], [11, 1]),
    ]  # fmt: skip
    sides.mirror.post(ev.Scored(sample.id.group, [(0, 1.0)]))
    sides.up()
    (batch,) = sides.batches
    assert [(s.chain, *row(s)[:2]) for s in batch.samples] == [
        (0, [1, 2, 0], [10, 11, 1]), (1, [50, 51, 52, 53], [11, 1]),
    ]  # fmt: skip


def test_a_conversation_that_goes_on_travels_once() -> None:
    """Of what the function was answered, neither side sends a token again; a request has all of them."""
    sides, sample = function_at_work()
    own = list(range(100, 600))
    (attempt,) = asks(sides, sample, 1, *own)
    sides.ends(attempt, 3)
    sides.up()
    (answer,) = hears(sides).values()
    conversation = [*own, *answer, 77]
    sides.mirror.post(ev.CallMade(sample.id, SAMPLING, np.array(conversation, np.int32), 2, any_chain=True))
    (called,) = said(sides, wire.Called)
    assert (called.chain, called.seen, called.added) == (0, 3, packed(np.array([77], np.int32)))
    before = sides.desk.bytes_out
    (attempt,) = submitted(sides.down())
    assert attempt.token_ids.tolist() == conversation
    assert sides.desk.bytes_out - before < 400  # the prompt alone has 2000


def test_a_conversation_that_nobody_continues_is_forgotten_by_both_sides() -> None:
    """Answers that no client heard are in no row, and not in what a reward function on the host sees."""
    sides, sample = function_at_work()
    (first,) = asks(sides, sample, 1, 1, 2, 0)
    (second,) = asks(sides, sample, 2, 50, 51)
    (third,) = asks(sides, sample, 3, 60, 61)
    sides.ends(first, 3)
    sides.ends(second, 2)
    sides.brings(third, 4)
    sides.up()
    assert set(hears(sides)) == {1, 2}
    for number in (2, 3):
        sides.mirror.post(ev.CallUnheard(sample.id, number))
    sides.mirror.post(ev.SampleReturned(sample.id))
    sides.up(times=2)
    commands = sides.down()
    (score,) = (c for c in commands if isinstance(c, do.ScoreSample))
    assert [c.tokens.tolist() for c in response_of(score.sample, None).conversations] == [[10, 11, 1]]
    assert [c.number for c in score.sample.chains] == [0]
    sides.mirror.post(ev.Scored(sample.id.group, [(0, 1.0)]))
    sides.abort_all()
    sides.up()
    (batch,) = sides.batches
    assert [s.tokens.tolist() for s in batch.samples] == [[10, 11, 1]]
    assert sides.core.tokens.dropped[DropReason.UNHEARD] == 6
    sides.core.validate()


def test_a_tape_that_was_cut_is_told_as_it_is() -> None:
    """The last turn of a conversation was heard by nobody: the reward function on the host sees the turns before."""
    sides, sample = function_at_work()
    (attempt,) = asks(sides, sample, 1, 1, 2, 0)
    sides.ends(attempt, 3)
    sides.up()
    (answer,) = hears(sides).values()
    (attempt,) = asks(sides, sample, 2, 1, 2, 0, *answer, 77)
    sides.ends(attempt, 2)
    sides.up()
    assert set(hears(sides)) == {2}
    sides.mirror.post(ev.CallUnheard(sample.id, 2))
    sides.mirror.post(ev.SampleReturned(sample.id))
    sides.up()
    (score,) = (c for c in sides.down() if isinstance(c, do.ScoreSample))
    (seen,) = response_of(score.sample, None).conversations
    assert (seen.tokens.tolist(), seen.loss_mask.tolist()) == (answer, [1, 1, 1])


def test_a_lost_function_is_answered_from_the_tapes_of_all_its_conversations() -> None:
    """It asks in another order: each call finds its own tokens, and the one that was open goes on where it was."""
    sides, sample = function_at_work()
    (first,) = asks(sides, sample, 1, 1, 2, 0)
    (second,) = asks(sides, sample, 2, 50, 51)
    (third,) = asks(sides, sample, 3, 60, 61)
    sides.ends(first, 3)
    sides.ends(second, 2)
    sides.brings(third, 4)
    sides.up()
    answers = hears(sides)
    sides.pump.post(ev.FunctionsLost([sample.id.group]))
    sides.down()
    sides.abort_all()
    sides.up()
    again = started(sides.down())
    assert again.id == sample.id
    assert asks(sides, again, 1, 50, 51) == []
    assert asks(sides, again, 2, 1, 2, 0) == []
    answered = [c.call for c in sides.done if isinstance(c, do.CallCompleted)][-2:]
    tokens = {c.number: completion_of(c.chain, c.result, c.number).tokens.tolist() for c in answered if c.result}
    assert tokens == {1: answers[2], 2: answers[1]}
    (rest,) = asks(sides, again, 3, 60, 61)
    assert rest.token_ids.tolist() == [60, 61, *third.tape.packed()[0].tolist()]
    assert len(rest.token_ids) == 6


def test_a_function_that_begins_anew_has_no_conversations_on_its_host() -> None:
    """What the core has dropped is gone there, the prompt is the group's again, and old numbers mean new calls."""
    sides, sample = function_at_work()
    (attempt,) = asks(sides, sample, 1, 90, 91)
    sides.ends(attempt, 2)
    (attempt,) = asks(sides, sample, 2, 50, 51)
    sides.ends(attempt, 2)
    sides.up()
    hears(sides)
    sides.mirror.post(ev.SampleFailed(sample.id, "raised"))
    sides.up()
    again = started(sides.down())
    assert [(c.number, c.prompt.tolist(), len(c.tape)) for c in again.chains] == [(0, [1, 2, 0], 0)]
    (attempt,) = asks(sides, again, 1, 50, 51, 52)
    sides.ends(attempt, 2)
    sides.up()
    assert set(hears(sides)) == {1}


def test_a_late_answer_to_a_function_that_has_ended_is_nothing() -> None:
    """The core's answer and the end of the function's run cross on the way."""
    sides, sample = function_at_work()
    (attempt,) = asks(sides, sample, 1, 1, 2, 0)
    (other,) = asks(sides, sample, 2, 50, 51)
    sides.ends(attempt, 2)
    sides.ends(other, 2)
    sides.up()
    sides.mirror.post(ev.CallUnheard(sample.id, 2))
    sides.mirror.post(ev.SampleReturned(sample.id))
    assert set(hears(sides)) == {1, 2}
    sides.up()
    assert any(isinstance(c, do.ScoreSample) for c in sides.down())
    assert sides.core.tokens.dropped[DropReason.UNHEARD] == 2


@pytest.mark.parametrize(
    "lie", [{"chain": 7}, {"added": None}, {"chain": None}, {"chain": None, "added": bytearray()}, {"seen": 4}]
)
def test_a_conversation_that_cannot_be_ends_the_connection(lie: dict[str, Any]) -> None:
    """A host that names an unknown conversation, or one without tokens, or more than there are, is not believed."""
    sides, sample = function_at_work()
    if lie != {"chain": None, "added": bytearray()}:
        (attempt,) = asks(sides, sample, 1, 1, 2, 0)
        sides.ends(attempt, 3)
        sides.up()
    run = sides.desk._known[sample.id].run
    added, any_chain = packed(np.array([5], np.int32)), lie not in ({"added": None}, {"chain": None})
    called = wire.Called(*sample.id, run, 2, SAMPLING, 0, added, any_chain, 0)
    for name, value in lie.items():
        setattr(called, name, value)
    if lie == {"added": None}:
        called.any_chain = True
        called.chain = None
    with pytest.raises(ProtocolError, match="calls generate"):
        list(sides.desk.receive(wire.encode([called])))


def test_a_function_that_returns_with_an_open_call_says_so_first() -> None:
    """A host that says it has returned, and not that nobody hears its open call, is not believed."""
    sides, sample = function_at_work()
    asks(sides, sample, 1, 1, 2, 0)
    asks(sides, sample, 2, 50, 51)
    sides.mirror.post(ev.SampleReturned(sample.id))
    with pytest.raises(ProtocolError, match="returned"):
        sides.up()


# -------------------------------------------------------------------- a client over HTTP


REAL = april.Config(
    rollout_batch_size=1, n_samples_per_prompt=2, over_sampling_batch_size=2, max_response_len=200, max_in_flight=8,
    engine={"kind": "simulated"}, max_staleness=9,
)  # fmt: skip


async def test_a_client_on_a_host_asks_at_its_base_url() -> None:
    """The endpoint is in the host's process: conversations side by side become rows, and it is closed with the host."""
    asked: dict[Any, list[tuple[int, str, list[int]]]] = {}

    async def agent(prompt: april.Prompt, llm: april.LLM) -> None:
        events = asked[llm.sample_id] = []

        async def ask(number: int, ids: list[int]) -> list[int]:
            events.append((number, "asks", ids))
            body = {"model": "m", "prompt": ids, "max_tokens": 9, "return_token_ids": True}
            key = {"Authorization": f"Bearer {llm.api_key}"}
            async with http.post(f"{llm.base_url}/completions", json=body, headers=key) as response:
                answer = (await response.json())["choices"][0]["token_ids"]
            events.append((number, "hears", answer))
            return list(answer)

        async with aiohttp.ClientSession() as http:
            first = await ask(1, [40, 41])
            await asyncio.gather(ask(2, [40, 41, *first, 7]), ask(3, [60, 61]), ask(4, [60, 61]))

    engines = [april.testing.FakeEngine("f", lengths=7, chunk_tokens=1, seconds_per_token=0.001)]
    p = Place(REAL, 2, [april.testing.FakeEngine("here", lengths=7, seconds_per_token=0.001)],
              rollout=agent, reward=lambda prompt, response: float(len(response.conversations)))  # fmt: skip
    try:
        host = await p.host("a", engines)
        door = host._gateway
        await p.all_batches()
        rows = [s for b in p.batches for s in b.samples]
        assert len(rows) == 3 * 4
        for key, events in asked.items():
            assert sorted(row(s) for s in rows if s.id == key) == rows_of(events)
        assert {s.reward for s in rows} == {3.0}
    finally:
        await p.end()
        p.scheduler._gateway.close()
    assert door._endpoint is None



@pytest.mark.parametrize("dies", [False, True])
def test_functions_on_hosts_chat(dies: bool) -> None:
    """``llm.chat`` keeps a conversation in one row on a host too, and goes on elsewhere when that dies in mid-call."""
    renderers = pytest.importorskip("renderers")
    ran: set[str] = set()

    def agent(where: str) -> Any:
        async def rollout(prompt: april.Prompt, llm: april.LLM) -> str:
            ran.add(where)
            messages = [{"role": "user", "content": f"{prompt.data['i']} #split"}]
            first = await llm.chat(messages)
            assert first.text == says("split")
            last = await llm.chat([*messages, first.message, {"role": "user", "content": "and #long"}])
            return f"{last.text} {last.finish}"

        return rollout

    def engine(name: str) -> FakeEngine:
        return FakeEngine(
            name, responses=lambda request: reply(conversation(request).tolist()), vocab_size=VOCAB, eos_token_id=EOS,
            chunk_tokens=4, seconds_per_token=0.05,
        )  # fmt: skip

    async def one(prompt: april.Prompt, response: april.Response) -> float:  # the clock would not wait for a thread
        return 1.0

    async def program() -> None:
        options = {"tokenizer": TOKENIZER, "renderer": renderers.Qwen3RendererConfig(enable_thinking=False)}
        config = april.Config(
            rollout_batch_size=2, n_samples_per_prompt=2, over_sampling_batch_size=4, max_response_len=400,
            max_sample_tokens=60, engine={"kind": "simulated"}, max_staleness=9,
        )  # fmt: skip
        p = Place(config, 8, [engine("here")], rollout=agent("here"), reward=one, **options)
        try:
            await p.host("a", [engine("f")], rollout=agent("a"))
            if dies:
                waiting = asyncio.ensure_future(p.all_batches())
                await asyncio.sleep(1.5)
                p.of_host["a"].close()
                await waiting
            else:
                await p.all_batches()
            p.scheduler.validate()
        finally:
            await p.end()
        rows = [s for b in p.batches for s in b.samples]
        assert len(rows) == 16
        for sample in rows:
            said = TOKENIZER.decode(sample.tokens[sample.loss_mask == 1])
            assert said == f"{says('split')}<|im_end|>{LONG}"[: len(said)]
            assert int(sample.loss_mask.sum()) == 60
        assert ran == {"here", "a"}
        assert (sum(b.metrics["lost_functions"] for b in p.batches) > 0) is dies

    run_virtual(program())


def test_a_renderer_without_a_tokenizer_is_refused_by_a_host() -> None:
    """As by the scheduler, before it joins."""
    with pytest.raises(ConfigError, match=r"renderer= .* needs tokenizer="):
        Host("a", rollout=two_turns, renderer=object(), address="127.0.0.1:1", token=april.new_token())
