"""Checks of promises that april keeps on top of an engine: stop strings, EOS at a cut, no lost tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count, islice
from typing import Any, TypeVar

import numpy as np
from msgspec import structs

from april.config.settings import Config
from april.core.batch import Batch
from april.core.sampling import GAP
from april.core.types import DropReason, FinishReason, Prompt
from april.core.versions import PolicyVersion
from april.driver.llm import LLM
from april.engines.protocol import Chunk, Engine, EngineFinish, Int32, Request
from april.errors import EngineError
from april.testing.conformance.bench import Bench, check, compare_with_wire, require_prefix
from april.testing.conformance.subject import Broken, Figures, NotTested
from april.testing.recording_engine import RecordingEngine
from april.testing.same_loop import Rollouts, rollouts

T = TypeVar("T")

LENGTH = 48
GROUPS, SAMPLES, OVER = 2, 8, 16
KILL_GROUPS = 8


def _greedy(length: int, **sampling: Any) -> Config:
    return Config(
        rollout_batch_size=1, n_samples_per_prompt=1, max_response_len=length, allow_mismatch=True,
        max_failed_groups=1, sampling={"temperature": 0.0, **sampling},
    )  # fmt: skip


class _AlteringEngine(RecordingEngine):
    """Records the engine under test. When the scheduler closes this wrapper, the engine itself stays open.

    Args:
        engine: The engine under test.
        cut: Function that returns the number of tokens after which an attempt ends as if aborted; None means no cut.
            The cut is made by a smaller budget, so it is exact.
        shift: Number of weight updates that the engine has had before april's first version.
    """

    def __init__(
        self, engine: Engine, cut: Callable[[Request], int | None] = lambda request: None, shift: int = 0
    ) -> None:
        super().__init__(engine)
        self._cut, self._shift = cut, shift

    @property
    def aborted(self) -> int:
        """Number of attempts that ended with ABORT."""
        return sum(end is EngineFinish.ABORT for end in self.ends.values())

    def got(self, attempt_id: str) -> Int32:
        """Return the tokens that april got for an attempt, int32 [T]."""
        return np.concatenate([np.empty(0, np.int32), *(chunk.tokens for chunk in self.yielded[attempt_id])])

    def alter_request(self, request: Request) -> Request:
        cut = self._cut(request)
        return request if cut is None else structs.replace(request, sampling=request.sampling.capped(cut))

    def alter_chunk(self, request: Request, chunk: Chunk) -> Chunk:
        cut = self._cut(request)
        short = cut is not None and cut < request.sampling.max_tokens
        return replace(
            chunk, finish=EngineFinish.ABORT if chunk.finish and short else chunk.finish,
            version=PolicyVersion(chunk.version.incarnation, chunk.version.n - self._shift),
        )  # fmt: skip

    async def update_weights(self, version: PolicyVersion, path: str | None = None) -> None:
        await super().update_weights(PolicyVersion(version.incarnation, version.n + self._shift), path)

    async def close(self) -> None:
        with suppress(EngineError):
            await self.engine.abort([i for i, end in self.ends.items() if end is None])


def _recorded(bench: Bench, **options: Any) -> _AlteringEngine:
    """Wrap the engine so that april sees its first version, even if the engine has had weight updates."""
    return _AlteringEngine(bench.engine, shift=bench.version.n - bench.subject.first_version.n, **options)


async def _response(bench: Bench, config: Config, engine: _AlteringEngine, prompt: Int32) -> tuple[Int32, FinishReason]:
    """Generate one greedy response through the scheduler."""
    async with rollouts(
        config, engines=[engine], prompts=[prompt.tolist()], tokenizer=bench.subject.tokenizer
    ) as run:  # fmt: skip
        batch = await bench.with_timeout(run.next_batch(), "a step of one response")
        ledger = run.ledger()["tokens"]
        if not ledger.balanced or ledger.observed != engine.tokens:
            raise Broken(f"the engine returned {engine.tokens} tokens, but april's ledger has {ledger}")
        return batch.samples[0].tokens, batch.samples[0].finish


async def _greedy_with(bench: Bench, find: Callable[[list[int]], T | None], what: str) -> tuple[Int32, Int32, T]:
    """Return the first prompt whose greedy response ``find`` accepts, the response, and what ``find`` returned."""
    bench.require_greedy_repeats()
    for number in range(8):
        prompt = bench.prompt(number)
        uncut, _ = await _response(bench, _greedy(LENGTH), _recorded(bench), prompt)
        if (found := find(uncut.tolist())) is not None:
            return prompt, uncut, found
    raise NotTested(f"no greedy response had {what}; give other prompts")


@check("A stop string ends the response at the token that completes it, even if an abort has cut the string.")
async def stop_strings(bench: Bench) -> Figures:
    tokenizer = bench.subject.tokenizer
    if tokenizer is None:
        raise NotTested("no tokenizer was given")
    prompt, uncut, (stop, end, begin) = await _greedy_with(
        bench,
        lambda ids: _string_in([tokenizer.decode(ids[:n], skip_special_tokens=False) for n in range(len(ids) + 1)]),
        "readable text for a stop string",
    )
    cuts = sorted({*range(max(1, begin - 2), end), 1, 2})
    for cut in cuts:
        engine = _recorded(bench, cut=lambda r, cut=cut: None if r.response_offset else cut)
        tokens, finish = await _response(bench, _greedy(LENGTH, stop=["never said", stop]), engine, prompt)
        if len(tokens) != end or finish is not FinishReason.STOP:
            raise Broken(f"cut after {cut} tokens, it ended with {finish} after {len(tokens)} tokens, not {end}")
        require_prefix(tokens, uncut, f"the response cut after {cut} tokens")
        if any(r.sampling.stop and r.response_offset for r in engine.requests.values()):
            raise Broken("the engine was given a stop string that may begin in an earlier attempt")
    return {"cuts": len(cuts), "honoured": len(cuts), "tokens in the string": end - begin}


def _string_in(texts: list[str]) -> tuple[str, int, int] | None:
    """Find a string over several tokens that occurs once: (string, tokens to its end, tokens before its start)."""
    for begin in range(6, len(texts) - 4):
        for end in range(begin + 4, begin + 1, -1):
            stop = texts[end][len(texts[begin]) :]
            fits = len(stop) > 1 and GAP not in texts[end] and stop == stop.strip()
            if fits and next(n for n, text in enumerate(texts) if stop in text) == end:
                return stop, end, begin
    return None


@check("A response that was aborted after its EOS or stop token is complete; aborted before, it is continued to it.")
async def eos_at_a_cut(bench: Bench) -> Figures:
    prompt, uncut, end = await _greedy_with(
        bench,
        lambda ids: next((i + 1 for i in range(4, len(ids) - 1) if ids[i] not in ids[:i]), None),
        "a token that was new behind the fourth",
    )
    ids = uncut.tolist()
    for cut in (end - 2, end - 1, end):
        engine = _recorded(bench, cut=lambda r, cut=cut: None if r.response_offset else cut)
        config = _greedy(LENGTH, stop_token_ids=[ids[end - 1]])
        tokens, finish = await _response(bench, config, engine, prompt)
        attempts = len(engine.requests)
        if finish is not FinishReason.STOP or tokens.tolist() != ids[:end]:
            raise Broken(f"cut after {cut} of {end} tokens, it ended with {finish} after {len(tokens)} tokens")
        if attempts != (1 if cut == end else 2):
            raise Broken(f"cut after {cut} of {end} tokens, the response took {attempts} requests")
    return {"cuts": 3, "stop token": ids[end - 1]}


def _endless(bench: Bench) -> Iterator[list[int]]:
    """Yield prompts without end; no two of a thousand are equal."""
    size = bench.engine.capabilities.vocab_size
    eos = set(bench.engine.capabilities.eos_token_ids)
    known = sorted({t for p in bench.subject.prompts for t in p if 0 <= t < size} - eos)
    for number in count():
        digits = [known[(number // len(known) ** k) % len(known)] for k in range(4)]
        yield [*bench.prompt(number).tolist(), *digits]


def _budget(bench: Bench, group: int, index: int) -> int:
    """Return a token budget that varies widely between groups, so that steps end while most requests run."""
    of_group, of_sample = (group * 40503 % 65536) / 65536, ((group * SAMPLES + index) * 30011 % 65536) / 65536
    return max(4, int(bench.subject.long_tokens * (0.06 + 0.94 * of_group) * (0.8 + 0.2 * of_sample)))


@check("In a thousand aborted requests, with weight updates between them, no token that was sent is lost.")
async def thousand_aborts(bench: Bench) -> Figures:
    """Check that the engine's client, april's ledger and the delivered responses all have the same tokens."""
    subject = bench.subject
    engine = _recorded(bench)
    config = Config(
        rollout_batch_size=GROUPS, n_samples_per_prompt=SAMPLES, over_sampling_batch_size=OVER, max_staleness=OVER,
        max_response_len=subject.long_tokens, abort_resend_s=0.25, abort_deadline_s=max(1.0, subject.patience_s),
    )  # fmt: skip

    async def rollout(prompt: Prompt, llm: LLM) -> None:
        await llm.generate(max_tokens=_budget(bench, llm.sample_id.group, llm.sample_id.index))

    both = subject.other is not None and None not in (subject.other.path, subject.now.path)
    from_disk = bench.engine.capabilities.updates_from_disk and both
    before = None if subject.made is None else await subject.made()
    given = updates = 0
    async with rollouts(
        config, engines=[engine], prompts=_endless(bench), rollout=rollout, check=False
    ) as run:  # fmt: skip
        while engine.aborted < subject.aborts:
            batch = await bench.with_timeout(run.next_batch(), "a step")
            given += _exact(batch, [engine])
            updates += 1
            await _update(bench, run, engine, from_disk)
            bench.say(f"{engine.aborted} of {subject.aborts} requests aborted, {updates} weight updates")
            if updates > 8 and engine.aborted < 4 * updates:
                raise NotTested(f"only {engine.aborted} requests were aborted in time; raise Subject.long_tokens")
        run.validate()
        ledger = run.ledger()["tokens"]
        handed_over = engine.tokens
        if not ledger.balanced or ledger.observed != handed_over:
            raise Broken(f"the engine returned {handed_over} tokens, but april's ledger has {ledger.as_dict()}")
        corrupt = {str(k): v for k, v in ledger.dropped.items() if v and k is not DropReason.AFTER_STOP}
        if corrupt:
            raise Broken(f"april dropped tokens: {corrupt}")
    held = [(request, engine.got(i), engine.ends[i]) for i, request in engine.requests.items()]
    figures: Figures = {
        "aborted": engine.aborted, "requests": len(held), "weight updates": updates,
        "tokens handed over": engine.tokens, "delivered": given,
    }  # fmt: skip
    if subject.wire is not None:
        figures |= compare_with_wire(subject.wire, held, engine.capabilities.abort_means)
    if subject.made is not None and before is not None:
        await bench.wait_until_idle()
        sent = figures.get("seen on the wire", figures["tokens handed over"])
        figures["made and never sent"] = int(await subject.made() - before) - int(sent)
    return figures


async def _update(bench: Bench, run: Rollouts, engine: _AlteringEngine, from_disk: bool) -> None:
    """Make a weight update; ``from_disk`` loads the other of two sets of weights and notes it in ``bench.weights``."""
    now, other = bench.subject.now, bench.subject.other
    weights = other if from_disk and other is not None and bench.weights is now else now
    if from_disk:
        bench.weights = weights
    update = run.weight_update(weights.path) if from_disk else run.weight_update(transfer=lambda: None)
    await bench.with_timeout(update, "a weight update")
    bench.version = PolicyVersion(bench.version.incarnation, bench.version.n + 1)


def _exact(batch: Batch, engines: Sequence[_AlteringEngine]) -> int:
    """Check that each delivered response is the concatenation of its attempts; return the number of tokens."""
    attempts: dict[tuple[int, int] | None, list[tuple[int, Int32]]] = {}
    for engine in engines:
        for attempt_id, request in engine.requests.items():
            part = (request.response_offset, engine.got(attempt_id))
            attempts.setdefault(request.sample_key, []).append(part)
    total = 0
    for sample in batch.samples:
        # an attempt without a token begins at the same position as the next attempt
        parts = sorted(attempts[sample.id], key=lambda part: (part[0], len(part[1])))
        got = np.concatenate([tokens for _, tokens in parts])
        if not np.array_equal(got, sample.tokens):
            raise Broken(
                f"sample {sample.id}: {len(sample.tokens)} tokens were delivered, but its {len(parts)} requests got "
                f"{len(got)}, or others"
            )
        total += len(sample.tokens)
    return total


async def failover(bench: Bench, death: Callable[[], Awaitable[None]]) -> Figures:
    """Run a step on two engines, the first of which dies midway; all responses must finish on the other one."""
    subject = bench.subject
    assert subject.second is not None
    engines = [_recorded(bench), _AlteringEngine(await subject.second())]
    first, second = engines
    config = Config(
        rollout_batch_size=KILL_GROUPS, n_samples_per_prompt=SAMPLES, max_response_len=subject.long_tokens,
        abort_resend_s=0.25, abort_deadline_s=max(1.0, subject.patience_s),
    )  # fmt: skip

    async def rollout(prompt: Prompt, llm: LLM) -> None:
        await llm.generate(max_tokens=max(subject.long_tokens // 2, _budget(bench, *llm.sample_id)))

    prompts = list(islice(_endless(bench), KILL_GROUPS))
    async with rollouts(config, engines=engines, prompts=prompts, rollout=rollout, check=False) as run:
        step = asyncio.get_running_loop().create_task(run.next_batch())
        try:
            await bench.wait_until(lambda: step.done() or len(first.requests) >= KILL_GROUPS, "no request had begun")
            await death()
            at_death = {i: len(first.got(i)) for i, end in first.ends.items() if end is None}
            batch = await bench.with_timeout(_result(step), "the step in which a server died")
            ledger = run.ledger()["tokens"]
        finally:
            step.cancel()
    await second.engine.close()
    both = first.tokens + second.tokens
    if not ledger.balanced or ledger.observed != both:
        raise Broken(f"the engines returned {both} tokens, but april's ledger has {ledger.as_dict()}")
    if dropped := {str(k): v for k, v in ledger.dropped.items() if v}:
        raise Broken(f"april dropped tokens: {dropped}")
    if len(batch.samples) != KILL_GROUPS * SAMPLES:
        raise Broken(f"{len(batch.samples)} of {KILL_GROUPS * SAMPLES} responses were finished")
    _exact(batch, engines)
    return {"responses": len(batch.samples), "cut off": len(at_death), "their tokens, kept": sum(at_death.values())}


async def _result(step: asyncio.Task[Batch]) -> Batch:
    return await step
