"""Ends, counts and versions that cannot be true: of a host, of an engine object, of a trainer's own servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from core_machine import EOS, settings
from host_sides import ENGINES, HostSides
from virtual_rollouts import EOS as VIRTUAL_EOS
from virtual_rollouts import RecordingEngine, Rollouts, on_virtual_time, table

import april
from april.core import commands as do
from april.core import events as ev
from april.core.sampling import SamplingParams
from april.core.tape import AttemptTape
from april.core.types import (
    Attempt,
    AttemptFailure,
    DropReason,
    GenerateCall,
    Group,
    Prompt,
    Sample,
    SampleId,
)
from april.core.versions import FIRST_VERSION, PolicyVersion
from april.driver.detokenizer import Detokenizer
from april.driver.wire_checks import AnswerChecks
from april.engines.protocol import Chunk, EngineFinish, Request
from april.errors import EngineError, LinkError, WireError
from april.processes import messages as wire
from april.processes.coordinator.asked_host import take
from april.processes.coordinator.messages import Result
from april.processes.desk import HostDesk
from april.processes.host import Host
from april.processes.link import Link, memory_links
from april.processes.messages import ProtocolError
from april.processes.remote_hosts import HostDoor
from april.testing import FakeEngine, rollouts

pytestmark = on_virtual_time

V0 = (FIRST_VERSION, 1)


def came(i: str, *tokens: int, at: int = 0, **more: Any) -> wire.Came:
    """Tokens of an attempt, all under the first version."""
    logprobs = np.full(len(tokens), -0.5, np.float32)
    spans = ((FIRST_VERSION, len(tokens)),) if tokens else ()
    return wire.Came(i, at, bytearray(np.array(tokens, np.int32)), bytearray(logprobs), spans, **more)


def ended(i: str, finish: str, count: int, *, fenced: bool = False) -> wire.Ended:
    return wire.Ended(i, EngineFinish(finish), fenced, count)


FALSE: dict[str, tuple[Callable[[str], list[wire.Message]], str]] = {
    "a stop with no token": (lambda i: [ended(i, "stop", 0)], "without a token"),
    "a length with no token": (lambda i: [ended(i, "length", 0)], "without a token"),
    "an abort that nobody asked for, with no token": (lambda i: [ended(i, "abort", 0)], "without a token"),
    "a stop at any token": (lambda i: [came(i, 5, 6), ended(i, "stop", 2)], "neither EOS nor a stop token"),
    "a length before the budget": (lambda i: [came(i, 5, 6), ended(i, "length", 2)], "for want of room"),
    "tokens that got lost": (lambda i: [came(i, 5, 6), ended(i, "stop", 3)], "ended with 3 tokens, and 2 came"),
    "tokens that got lost of a partial": (lambda i: [came(i, 5, 6), ended(i, "abort", 9)], "9 tokens, and 2 came"),
    "tokens that got lost before a failure": (
        lambda i: [came(i, 5), wire.Failed(i, "broke", AttemptFailure.BROKE_OFF, 0, 0.0, 2)], "2 tokens, and 1 came",
    ),
    "an end before its tokens": (lambda i: [ended(i, "stop", 2), came(i, 5, EOS)], "with 2 tokens, and 0 came"),
    "a token after EOS": (lambda i: [came(i, 5, EOS, 6)], f"after token {EOS}, which ends responses"),
    "a token after EOS, told later": (lambda i: [came(i, 5, EOS), came(i, 6, at=2)], "which ends responses"),
    "a cut that was not ordered": (lambda i: [came(i, 5), ended(i, "abort", 1, fenced=True)], "been cut off here"),
    "a stop string where there is none": (lambda i: [came(i, 5, stopped=True)], "where there is none"),
    "more than the budget after a stop string": (
        lambda i: [came(i, 5, stopped=True, after_stop=1000)], "1001 tokens came where 1000 were left",
    ),
    "half a token": (lambda i: [wire.Came(i, 0, bytearray(3), bytearray(3), (V0,))], "3 bytes are no token ids"),
}  # fmt: skip


@pytest.mark.parametrize("what", FALSE)
def test_a_host_that_lies_about_an_end_is_cut_off(what: str) -> None:
    """By a sentence with host, engine, attempt and what is wrong; tokens of that request are dropped as corrupt."""
    lie, words = FALSE[what]
    sides = HostSides(settings(n=1, samples=2, has_reward=False))
    sides.pump.post(ev.StepRequested())
    sides.down()
    liar, other = sides.core.attempts
    said = [came(other, 7, 8), *lie(liar)]
    with pytest.raises(ProtocolError, match=words) as caught:
        sides.hear(sides.desk.receive(wire.encode(said)))
    assert str(caught.value).startswith(f"host h: attempt {liar} of ")
    assert " on engine h/e0: " in str(caught.value)
    believed = sides.core.attempts[liar].tape.count
    sides.hear(sides.desk.lost(str(caught.value)))
    tokens = sides.core.tokens
    assert tokens.dropped[DropReason.CORRUPT] == believed == tokens.dropped.total()
    assert (tokens.observed, tokens.held) == (2 + believed, 2)
    sides.core.validate()
    assert not sides.core.attempts


def test_an_end_that_was_asked_for_may_come_without_a_token() -> None:
    """An abort, and a cut, before anything was generated: both are true."""
    sides = HostSides(settings(n=1, samples=2, has_reward=False))
    sides.pump.post(ev.StepRequested())
    sides.down()
    one, two = sides.core.attempts
    sides.desk.execute(do.Abort("h/e0", (one,), False))
    sides.desk.execute(do.Fence("h/e0", (two,)))
    sides.hear(sides.desk.receive(wire.encode([ended(one, "abort", 0), ended(two, "abort", 0, fenced=True)])))
    assert sides.core.tokens.observed == 0
    assert len(sides.core.attempts) == 2  # they begin anew
    assert not {one, two} & set(sides.core.attempts)


class Letters:
    """Token 5 is ``a``, 6 ``b``, and so on."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(97 + (i - 5) % 26) for i in ids)


@pytest.mark.parametrize(("tokens", "found"), [((5, 6, 7), True), ((5, 6, 7, 8), False), ((5, 7, 6), False)])
def test_a_stop_string_of_a_host_is_looked_at_in_the_text(tokens: tuple[int, ...], found: bool) -> None:
    """The last token completes ``bc``, or the host is cut off."""
    sides = HostSides(settings(n=1, samples=1))
    sides.desk = HostDesk(
        sides.core, "h", ENGINES, functions=False, failed=lambda call, error: None, detokenizer=Detokenizer(Letters())
    )
    group = Group(0, Prompt(np.array([1, 2], np.int32), {}, 0, 0), 1)
    call = GenerateCall(Sample(SampleId(0, 0), group).chains[0], SamplingParams(20, stop=("bc",)), 0)
    attempt = Attempt(
        id="a", call=call, engine="h/e0", token_ids=group.prompt.token_ids, sampling=call.sampling, tape=AttemptTape(),
        end_ids=frozenset((EOS,)), oldest=FIRST_VERSION,
    )  # fmt: skip
    sides.desk.execute(do.Submit(attempt))
    frame = wire.encode([came("a", *tokens, stopped=True, after_stop=2)])
    if found:
        assert list(sides.desk.receive(frame)) == []
        assert (attempt.tape.count, attempt.tape.stopped, attempt.tape.after_stop) == (3, True, 2)
    else:
        with pytest.raises(ProtocolError, match="where there is none"):
            list(sides.desk.receive(frame))
        assert attempt.tape.count == 0


class _Lying(Link):
    """A link whose messages are changed."""

    def __init__(self, link: Any, change: Callable[[Any], None]) -> None:
        self.link, self.change, self.peer = link, change, link.peer
        self.open, self.close = link.open, link.close  # type: ignore[method-assign]

    def send(self, frame: bytes) -> None:
        messages = wire.decode_from_host(frame)
        for message in messages:
            self.change(message)
        self.link.send(wire.encode(messages))


def _early(message: Any) -> None:
    if isinstance(message, wire.Ended):
        message.finish = EngineFinish.LENGTH


def _half(message: Any) -> None:
    """And the count says the same."""
    if isinstance(message, wire.Came) and len(message.tokens) > 4:
        half = len(message.tokens) // 8
        message.tokens, message.logprobs = message.tokens[: 4 * half], message.logprobs[: 4 * half]
        message.spans = ((message.spans[0][0], half),)
    elif isinstance(message, wire.Ended):
        message.count //= 2


def _old(message: Any) -> None:
    if isinstance(message, wire.Came):
        message.spans = tuple((v._replace(n=v.n - 1), count) for v, count in message.spans)


@pytest.mark.parametrize("lie", [_early, _half, _old], ids=["length", "half", "old version"])
async def test_work_goes_on_without_a_host_that_lies(
    lie: Callable[[Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    """A host is cut off twice and then refused; every batch comes, whole, from the engine that is left."""

    door = HostDoor()
    config = april.Config(
        rollout_batch_size=2, n_samples_per_prompt=2, max_response_len=30, engine={"kind": "simulated"}
    )
    own = FakeEngine("own", max_running=1, seconds_per_token=10)
    async with rollouts(
        config, engines=[own], prompts=[[1, 2 + i] for i in range(50)], reward=None, hosts=door, check=True
    ) as run:
        await run.weight_update(path="/weights")

        async def join() -> Any:
            here, there = memory_links()
            door.accept(here)
            return _Lying(there, lie)

        host = Host("h", engines=[FakeEngine("x", lengths=9)], join=join)
        await host.astart()
        for _ in range(3):
            batch = await run.next_batch()
            for sample in batch.samples:
                assert sample.tokens[-1] == 0 or len(sample.tokens) == 30
                assert {s.engine for s in sample.segments} == {"own"}
            await run.weight_update(path="/weights")
        with pytest.raises(LinkError, match="was cut off 2 times for what cannot be true"):
            await host.aend()
        await host.aclose()
        ledger = run.ledger()
        assert set(ledger["tokens"].dropped) <= {DropReason.CORRUPT}
        assert not ledger["prompts"].dropped
    lost = [r.getMessage() for r in caplog.records if "host h is lost: " in r.getMessage()]
    assert len(lost) == 2
    assert all(" on engine h/x: " in line and ": attempt " in line for line in lost)


# ---------------------------------------------------------------- engines of this process


def request(**sampling: Any) -> Request:
    return Request(
        attempt_id="a", token_ids=np.ones(3, np.int32), sampling=SamplingParams(**({"max_tokens": 20} | sampling))
    )


def chunk(*tokens: int, finish: Any = None, version: Any = FIRST_VERSION, logprob: float = -1.0) -> Chunk:
    return Chunk(np.array(tokens, np.int32), np.full(len(tokens), logprob, np.float32), version, finish)


def answer(*chunks: Chunk, eos: tuple[int, ...] = (EOS,), **sampling: Any) -> EngineFinish:
    """What an answer of these chunks is taken for."""
    checks = AnswerChecks(request(**sampling), vocab_size=50, max_context=99, eos_token_ids=eos, oldest=FIRST_VERSION)
    for piece in chunks:
        checks.piece(piece, FIRST_VERSION)
    return checks.end(chunks[-1])


def test_answers_that_can_be_true() -> None:
    """EOS at the end, in the first min_tokens as well; a stop token; an engine whose EOS is not known; plain words."""
    assert answer(chunk(5, 6), chunk(EOS, finish=EngineFinish.STOP)) is EngineFinish.STOP
    assert answer(chunk(5, EOS, 6, EOS, finish=EngineFinish.STOP), min_tokens=2) is EngineFinish.STOP
    assert answer(chunk(5, 7), chunk(finish=EngineFinish.STOP), stop_token_ids=(7,)) is EngineFinish.STOP
    assert answer(chunk(5, EOS, 6, finish=EngineFinish.STOP), eos=()) is EngineFinish.STOP
    assert answer(chunk(5, finish="abort")) is EngineFinish.ABORT
    assert answer(chunk(*range(5, 25), finish="length")) is EngineFinish.LENGTH


@pytest.mark.parametrize(
    ("chunks", "sampling", "words"),
    [
        ([chunk(5, EOS, 6)], {}, "which ends responses; if it does not"),
        ([chunk(5, EOS), chunk(6)], {}, "which ends responses"),
        ([chunk(5, 7, 6)], {"stop_token_ids": (7,)}, "tokens came after token 7"),
        ([chunk(5, EOS, 6)], {"min_tokens": 1}, "which ends responses"),
        ([chunk(5, finish="tired")], {}, "'tired', which is no finish reason"),
        ([chunk(5), chunk(finish=EngineFinish.STOP), chunk(6)], {}, "after the one that ended the stream"),
        ([chunk(5, version=PolicyVersion(0, 1))], {}, "policy version 0.1 came"),
        ([chunk(5, version=None)], {}, "must be a PolicyVersion, got None"),
        ([chunk(finish=EngineFinish.STOP)], {}, "without a token"),
    ],
)
def test_answers_that_cannot_be_true(chunks: list[Chunk], sampling: dict[str, Any], words: str) -> None:
    """Tokens behind an end, a finish that is none, a version that is none, nothing at all."""
    with pytest.raises(EngineError, match=words):
        answer(*chunks, **sampling)


class _GoesOn(FakeEngine):
    """Its first two answers go on after EOS."""

    lies = 2

    async def generate(self, request: Request) -> Any:
        async for piece in super().generate(request):
            if self.lies and piece.finish is EngineFinish.STOP:
                self.lies -= 1
                yield Chunk(piece.tokens, piece.logprobs, piece.version)
                yield Chunk(np.array([9], np.int32), np.array([-1], np.float32), piece.version, piece.finish)
            else:
                yield piece


async def test_an_engine_object_that_goes_on_after_eos_is_not_believed(caplog: pytest.LogCaptureFixture) -> None:
    """A user-written engine is held to the same: its answer is corrupt, whole, and begins again."""

    config = april.Config(rollout_batch_size=2, max_response_len=30, engine={"kind": "simulated"})
    async with rollouts(config, engines=[_GoesOn("e", lengths=9)], prompts=[[1, 2], [3, 4]], reward=None) as run:
        batch = await run.next_batch()
        assert all(s.tokens[-1] == 0 and np.count_nonzero(s.tokens == 0) == 1 for s in batch.samples)
        assert set(run.ledger()["tokens"].dropped) == {DropReason.CORRUPT}
    assert caplog.text.count("tokens came after token 0, which ends responses") == 2


# ---------------------------------------------------------------- a trainer's own servers


@pytest.mark.parametrize(
    ("tokens", "more", "kind"),
    [
        ((5, EOS), {}, EngineFinish.STOP),
        ((5, 6), {"aborted": True}, EngineFinish.ABORT),
        ((5, 6, 7, 8), {}, EngineFinish.LENGTH),
        ((5, 7), {"stop_token_ids": (7,)}, EngineFinish.STOP),
        ((5, 6), {"ends_anywhere": True}, EngineFinish.STOP),
        ((5, 6), {}, "neither EOS nor a stop token"),
        ((5, EOS, 6), {"aborted": True}, "which ends responses"),
        ((), {}, "without a token"),
        ((5, 6, 7, 8, 9), {}, "5 tokens came where 4 were left"),
        ((5, EOS), {"label": 1}, "policy version 0.1"),
    ],
)
def test_results_of_a_trainers_own_servers(tokens: tuple[int, ...], more: dict[str, Any], kind: Any) -> None:
    """What a coordinator is told of them is looked at in the same place."""
    sample = Group(0, Prompt(np.ones(2, np.int32)), 1).samples[0]
    call = GenerateCall(sample.chains[0], SamplingParams(4), 0)
    attempt = Attempt(
        id="a", call=call, engine="e", token_ids=np.ones(2, np.int32), sampling=call.sampling, tape=AttemptTape(),
        end_ids=frozenset((EOS,)),
    )  # fmt: skip
    ids = np.array(tokens, np.int32)
    logprobs = np.full(len(ids), -1, np.float32)
    result = Result(offset=2, tokens=ids, logprobs=logprobs, **({"label": 0, "aborted": False} | more))
    event = take(attempt, result, FIRST_VERSION)
    if isinstance(kind, EngineFinish):
        assert isinstance(event, ev.AttemptEnded)
        assert event.finish is kind
    else:
        assert isinstance(event, ev.AttemptFailed)
        assert event.kind is AttemptFailure.CORRUPT
        assert kind in event.error
        assert attempt.tape.count == 0


# ----------------------------------------------------------------
# Answers that contradict themselves, or end where no response can end: dropped whole as corrupt, and begun again.


class _Liar(RecordingEngine):
    """Its first ``lies`` answers are ``chunks``."""

    def __init__(self, chunks: list[Chunk], lies: int) -> None:
        super().__init__(table({}, 8))
        self.chunks, self.lies = chunks, lies

    async def generate(self, request: Request) -> Any:
        if self.lies:
            self.lies -= 1
            for piece in self.chunks:
                yield piece
            return
        async for piece in super().generate(request):
            yield piece


CONTRADICTIONS: dict[str, tuple[list[Chunk], type[EngineError], str]] = {
    "length": ([chunk(5, 6, finish=EngineFinish.LENGTH)], WireError, "for want of room"),
    "clamped": (
        [chunk(5, 6, logprob=-9999.0), chunk(VIRTUAL_EOS, finish=EngineFinish.STOP)], WireError, "minus infinity",
    ),
    "after its end": (
        [chunk(5, VIRTUAL_EOS, finish=EngineFinish.STOP), chunk(7)], WireError, "after the one that ended",
    ),
    "no token": ([chunk(finish=EngineFinish.STOP)], EngineError, "without a token"),
    "no end": ([chunk(5, 6)], EngineError, "without a finish reason"),
}  # fmt: skip


@pytest.mark.parametrize("what", list(CONTRADICTIONS))
async def test_an_evaluation_is_not_deceived(what: str) -> None:
    """A request whose answer cannot be true begins again, a few times; then the evaluation fails by name."""
    chunks, error, words = CONTRADICTIONS[what]

    prompt = april.Prompt(np.array([1, 2], np.int32))
    for lies in (2, 10**6):
        rollouts = Rollouts(table({}, 8), n=1, engines=[_Liar(chunks, lies)])
        evaluator = rollouts.driver
        if lies == 2:
            result = await evaluator.evaluate([prompt], 1, SamplingParams(100), 1)
            assert len(result.responses[0][0].tokens) == 8
        else:
            with pytest.raises(error, match=words):
                await evaluator.evaluate([prompt], 1, SamplingParams(100), 1)
        await rollouts.driver.close()


async def test_a_stop_string_does_not_excuse_an_answer_that_contradicts_itself() -> None:
    """What the engine says after a stop string is not looked at; that its whole answer is wrong is believed."""

    class Contradicts(RecordingEngine):
        async def generate(self, request: Request) -> Any:
            async for chunk in super().generate(request):
                yield chunk
            if len(self.requests) == 1:
                raise WireError("it says 3 tokens and came with 2")

    class Names:
        def decode(self, ids: list[int], **options: Any) -> str:
            return "".join(f"<{i}>" for i in ids)

    async def until_a_string(prompt: april.Prompt, llm: Any) -> Any:
        return await llm.generate(stop=["><"])  # complete with the second token

    lengths = table({}, 8)
    engine = Contradicts(lengths, stream_interval_s=1.0)
    rollouts = Rollouts(lengths, n=1, engines=[engine], tokenizer=Names(), rollout=until_a_string)
    batch = await rollouts.driver.next_batch()
    assert batch.samples[0].attempts == 2
    assert len(batch.samples[0].tokens) == 2
    assert rollouts.dropped["corrupt"] == 2
    rollouts.check_ledger()
