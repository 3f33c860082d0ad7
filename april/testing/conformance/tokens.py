"""Checks of token budgets, stop tokens, refusals, seeds, and log-probabilities of the declared kind."""

from __future__ import annotations

import asyncio

import numpy as np
from msgspec.structs import replace

from april.core.sampling import LogprobKind
from april.engines.protocol import EngineFinish, Float32, Int32, Request
from april.errors import EngineError
from april.testing.conformance.bench import Bench, Check, ReadRequest, check, require_equal, require_prefix
from april.testing.conformance.subject import Broken, Figures, NotOffered, NotTested, Reference

WAVES = 12
ENDING = 32
FEW = 8


@check("A response has at most max_tokens tokens, and EOS does not end it before min_tokens.")
async def budgets(bench: Bench) -> Figures:
    asked = [1, 2, 7, 16, 17, 33, 64]
    for reading in await bench.run_complete([bench.request(i, count) for i, count in enumerate(asked)]):
        if reading.count != reading.request.sampling.max_tokens:
            most = reading.request.sampling.max_tokens
            raise Broken(f"the response has {reading.count} tokens, but max_tokens and min_tokens were {most}")
        if reading.finish not in (EngineFinish.LENGTH, EngineFinish.STOP):
            raise Broken(f"a response with max_tokens tokens ended with {reading.finish}")
    (free,) = await bench.run_complete([bench.request(0, 64, forced=False)])
    tokens = free.tokens
    # use an early token of the response as a stop token, which min_tokens must then keep from ending it
    early = next((int(t) for t in tokens[:8]), None)
    held_back = 0
    if early is not None and bench.subject.greedy_repeats:
        request = bench.request(0, 40, forced=False)
        sampling = replace(request.sampling, stop_token_ids=(early,), min_tokens=20)
        (late,) = await bench.run_complete([replace(request, sampling=sampling)])
        if late.count < 20 or early in late.tokens[:19].tolist():
            raise Broken(f"a stop token ended the response after {late.count} tokens of at least 20")
        held_back = late.count
    return {"budgets": len(asked), "with a stop token held back": held_back}


async def _natural_end(bench: Bench) -> ReadRequest:
    """Find a response that ended in EOS by itself."""
    eos = set(bench.engine.capabilities.eos_token_ids)
    prompts = bench.subject.ending_prompts or bench.subject.prompts
    seen = 0
    for wave in range(WAVES):
        numbers = range(wave * ENDING, (wave + 1) * ENDING)
        readings = await bench.run_complete(
            bench.request(1000 + i, prompt=prompts[i % len(prompts)], forced=False, temperature=1.0) for i in numbers
        )
        seen += sum(r.count for r in readings)
        for reading in readings:
            if reading.finish is EngineFinish.STOP:
                return reading
            if inside := eos & set(reading.tokens.tolist()):
                raise Broken(f"the response continued after EOS ({inside}), and ended with {reading.finish}")
    raise NotTested(f"no response ended by itself in {seen} tokens; give Subject.ending_prompts")


@check("EOS is the last token, with its log-probability, and the response ends with STOP.")
async def eos_in_tokens(bench: Bench) -> Figures:
    reading = await _natural_end(bench)
    eos, tokens = bench.engine.capabilities.eos_token_ids, reading.tokens
    if not len(tokens):
        raise Broken("a response ended with STOP but without a token: its EOS is missing")
    if eos and tokens[-1] not in eos:
        raise Broken(f"a response ended with STOP, but its last token {tokens[-1]} is not one of the EOS ids {eos}")
    if set(tokens[:-1].tolist()) & set(eos):
        raise Broken("EOS is in the response before its last token")
    if not eos and bench.weights.reference is None:
        return {"tokens": reading.count, "eos ids": "the engine does not name them"}
    return {"tokens": reading.count, "eos": int(tokens[-1]), "its log-probability": float(reading.logprobs[-1])}


@check("A stop token ends the response with STOP, and is its last token, with its log-probability.")
async def stop_token_ids(bench: Bench) -> Figures:
    bench.require_greedy_repeats()
    tried = 0
    for number in range(FEW):
        (free,) = await bench.run_complete([bench.request(number, 48, forced=False)])
        tokens = free.tokens.tolist()
        stop = next((i for i in range(4, len(tokens) - 1) if tokens[i] not in tokens[:i]), None)
        if stop is None:
            continue
        request = bench.request(number, 48, forced=False, stop_token_ids=(tokens[stop],))
        (ended,) = await bench.run_complete([request])
        if ended.finish is not EngineFinish.STOP:
            raise Broken(f"a response with stop token {tokens[stop]} ended with {ended.finish}, {ended.count} tokens")
        _require_stop_at(ended, tokens, stop)
        tried += 1
    if not tried:
        raise NotTested("no greedy response had a token after its fourth that occurs first there; give other prompts")
    return {"responses": tried}


def _require_stop_at(ended: ReadRequest, tokens: list[int], stop: int) -> None:
    got = ended.tokens.tolist()
    if not got or got[-1] != tokens[stop]:
        raise Broken(f"the stop token {tokens[stop]} is not the last token of the {len(got)} of its response")
    if got.count(tokens[stop]) > 1:
        raise Broken(f"the response continued after the stop token {tokens[stop]}")
    if got != tokens[: stop + 1]:
        # greedy tokens must not depend on the stop ids
        raise Broken(f"the response is not the greedy one up to the stop token: {len(got)} tokens, not {stop + 1}")


@check("The same seed gives the same tokens, and another seed gives other tokens.")
async def seeds(bench: Bench) -> Figures:
    can = bench.engine.capabilities
    asked = [bench.request(i, 32, temperature=1.0) for i in range(2)]
    again = [bench.copy_of(r) for r in asked for _ in range(2)]
    reseeded = [replace(asked[0].sampling, seed=100 + i) for i in range(4)]
    others = [
        replace(asked[0], attempt_id=bench.new_id(), sampling=s, sample_key=(7, i)) for i, s in enumerate(reseeded)
    ]
    repeats = await bench.run_complete(again)
    different = {tuple(r.tokens.tolist()) for r in await bench.run_complete(others)}
    if len(different) < len(others):
        raise Broken(f"{len(others)} seeds gave {len(different)} different responses of 32 tokens to one prompt")
    if not can.honours_seeds:
        raise NotOffered(f"{can.lack('honours_seeds')} (other seeds do give other tokens)")
    for one, other in zip(repeats[::2], repeats[1::2], strict=True):
        require_equal(other.tokens, one.tokens, f"the same request with seed {one.request.sampling.seed} again")
    return {"seeds": len(different) + len(asked)}


async def _require_refused(bench: Bench, request: Request, what: str) -> str:
    """Raise Broken unless the engine refuses the request before any token; return the name of the error's type."""
    reading = bench.start(request)
    await bench.wait_for_ends([reading])
    if reading.error is None:
        raise Broken(f"{what} was served: {reading.count} tokens, ended with {reading.finish}")
    if not isinstance(reading.error, EngineError):
        raise Broken(f"{what} raised {type(reading.error).__name__} ({reading.error}) instead of an EngineError")
    if reading.count:
        raise Broken(f"{what} gave {reading.count} tokens before it was refused")
    return type(reading.error).__name__


@check("A prompt that leaves no room is refused with an EngineError, and the engine still serves prompts that fit.")
async def over_long_input(bench: Bench) -> Figures:
    context = bench.engine.capabilities.max_context
    if context > 1 << 19:
        raise NotTested(f"the context of {context} tokens is not filled here")
    for length in (context, context + 1, 2 * context):
        request = bench.request(0, 4, prompt=np.resize(bench.prompt(), length))
        raised = await _require_refused(bench, request, f"a prompt of {length} tokens")
    (full,) = await bench.run_complete([bench.request(0, 4, prompt=np.resize(bench.prompt(), context - 4))])
    if full.count != 4:
        raise Broken(f"{context - 4} tokens of prompt leave room for 4, but {full.count} were generated")
    await bench.require_healthy()
    return {"context": context, "refused with": raised}


@check("Token ids outside the vocabulary are refused before they reach the model, and the engine still serves.")
async def out_of_vocabulary(bench: Bench) -> Figures:
    size = bench.engine.capabilities.vocab_size
    bystander = bench.start(bench.request(1))
    for bad in (size, size + 1000, 2**31 - 1, -1):
        ids: Int32 = np.append(bench.prompt(), np.int32(bad)).astype(np.int32)
        request = bench.request(0, 4, prompt=ids)
        raised = await _require_refused(bench, request, f"token id {bad} of a vocabulary of {size}")
    await bench.wait_for_success([bystander])
    await bench.require_healthy()
    return {"vocabulary": size, "refused with": raised}


@check("The id of a running request cannot be used a second time, and the first request is not affected.")
async def duplicate_id(bench: Bench) -> Figures:
    first = bench.start(bench.request(0, bench.subject.long_tokens // 2))
    # let the first request start, so that its id is in use
    for _ in range(3):
        await asyncio.sleep(0)
    running = not first.task.done()
    second = bench.request(1, attempt_id=first.id)
    raised = await _require_refused(bench, second, "a second request with an id in flight") if running else ""
    await bench.wait_for_success([first])
    if not running:
        raise NotTested("the first request was complete before the second could be sent; raise Subject.long_tokens")
    if first.finish is EngineFinish.ABORT:
        raise Broken("the first request ended with ABORT")
    if bench.subject.greedy_repeats:
        (uncut,) = await bench.run_complete([bench.copy_of(first.request, first.count)])
        require_prefix(first.tokens, uncut.tokens, "the first request")
    return {"refused with": raised}


SAMPLES = 8
LENGTH = 48
TIE = 1e-5
"""If the probability of the k most likely tokens is this close to top-p, the nucleus may have k or k + 1 tokens."""


def expected(kind: LogprobKind, logits: Float32, tokens: Int32, temperature: float, top_p: float) -> Float32:
    """Return the log-probabilities float32 [C, T] of ``tokens`` [T] by ``logits`` [T, V], as ``kind`` defines them.

    Each token must match one of C alternatives. There are 2 for ``processed`` with top-p, because rounding decides
    which token is the last of the nucleus, and otherwise 1.
    """
    scaled = np.asarray(logits, np.float64) / (1.0 if kind is LogprobKind.RAW else temperature)
    logs = scaled - np.logaddexp.reduce(scaled, axis=1, keepdims=True)
    rows = np.arange(len(tokens))
    own = logs[rows, tokens]
    if kind is not LogprobKind.PROCESSED or top_p >= 1.0:
        return own[None].astype(np.float32)
    mass = np.cumsum(np.sort(np.exp(logs), axis=1)[:, ::-1], axis=1)
    # probability of the nucleus, the smallest set of the most likely tokens that together have at least top_p
    nuclei = [mass[rows, np.argmax(mass >= min(top_p + shift, 1.0 - 1e-9), axis=1)] for shift in (-TIE, TIE)]
    return np.stack([own - np.log(nucleus) for nucleus in nuclei]).astype(np.float32)


def declared_kind(bench: Bench) -> LogprobKind:
    """Return the kind of log-probabilities that the engine declares.

    If the kind is unknown, return RAW: only temperature 1 without top-p is then tested, where all kinds are equal.
    """
    kind = bench.engine.capabilities.logprob_kind
    return LogprobKind.RAW if kind is LogprobKind.UNKNOWN else kind


def largest_difference(
    kind: LogprobKind, reference: Reference, reading: ReadRequest, temperature: float, top_p: float = 1.0
) -> float:
    """Return the largest difference in nats between a response's log-probabilities and those of the reference."""
    if not reading.count:
        return 0.0
    tokens = reading.tokens
    logits = reference(reading.request.token_ids.tolist(), tokens.tolist())
    wanted = expected(kind, logits, tokens, temperature, top_p)
    return float(np.abs(wanted - reading.logprobs).min(axis=0).max())


def _check(name: str, promise: str, temperature: float, top_p: float) -> Check:
    async def body(bench: Bench) -> Figures:
        kind, reference = bench.engine.capabilities.logprob_kind, bench.weights.reference
        if reference is None:
            raise NotTested("no reference model was given")
        if kind is LogprobKind.UNKNOWN and (temperature != 1.0 or top_p < 1.0):
            raise NotOffered("the engine does not report the kind of its log-probabilities")
        asked = declared_kind(bench)
        readings = await bench.run_complete(
            bench.request(i, LENGTH, forced=False, temperature=temperature, top_p=top_p) for i in range(SAMPLES)
        )
        worst = max(largest_difference(asked, reference, r, temperature, top_p) for r in readings)
        figures: Figures = {
            "kind": str(kind), "largest difference": worst, "tokens": sum(r.count for r in readings)
        }  # fmt: skip
        if not worst <= bench.subject.tolerance:
            fits = [
                str(other)
                for other in (LogprobKind.TEMPERATURE, LogprobKind.PROCESSED, LogprobKind.RAW)
                if max(largest_difference(other, reference, r, temperature, top_p) for r in readings)
                <= bench.subject.tolerance
            ]
            raise Broken(
                f"log-probabilities declared as {kind} differ from the reference by up to {worst:.3g} nats"
                + (f"; they are those of the kind {' or '.join(fits)}" if fits else "")
            )
        return figures

    body.__name__ = name
    return check(promise)(body)


logprobs = _check(
    "logprobs", "Log-probabilities are those of a full forward pass of the same model, at temperature 1.", 1.0, 1.0
)
logprobs_temperature = _check(
    "logprobs_temperature", "Log-probabilities at temperature 0.7 are of the kind that the engine declares.", 0.7, 1.0
)
logprobs_top_p = _check(
    "logprobs_top_p", "Log-probabilities at temperature 0.7 and top-p 0.8 are of the declared kind.", 0.7, 0.8
)
