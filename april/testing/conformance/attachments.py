"""Checks of attachments such as images: each is read at its position in the prompt, by the present weights."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from april.engines.protocol import EngineFinish, Request
from april.testing.conformance.bench import Bench, ReadRequest, check, require_equal, require_prefix
from april.testing.conformance.subject import Broken, Figures, NotTested, Shown, Weights
from april.testing.conformance.tokens import declared_kind, expected
from april.testing.conformance.weights import other_weights

LENGTH = 32
CUT = 8
SAMPLES = 4


def _request(bench: Bench, prompt: Shown, number: int, **more: object) -> Request:
    # ban the placeholder tokens of images, because no reference model could read a response that contains them
    placeholders = {token for placed in prompt.attached for token in placed.stands}
    banned = tuple(sorted(placeholders)) if bench.engine.capabilities.bans else ()
    ids = prompt.token_ids
    request = bench.request(number, LENGTH, prompt=ids, forced=False, banned_ids=banned, **more)  # type: ignore[arg-type]
    return replace(request, attached=tuple(prompt.attached))


def _prompts(bench: Bench) -> list[Shown]:
    """Return at least two prompts with attachments; the first two have the same tokens."""
    kinds = bench.offered("attachments")
    prompts = [s for s in bench.subject.shown if {placed.attachment.kind for placed in s.attached} <= set(kinds)]
    if len(prompts) < 2:
        raise NotTested("no two prompts with attachments were given")
    if list(prompts[0].token_ids) != list(prompts[1].token_ids):
        raise NotTested("the first two prompts with attachments must have the same tokens")
    return prompts


@check("The response to a prompt depends on its own attachments: the same tokens get another response with other "
       "images, and the same response with the same images, even if these were sent before.")  # fmt: skip
async def attached(bench: Bench) -> Figures:
    prompts = _prompts(bench)
    bench.require_greedy_repeats()
    # several requests at the same time, so that some of them need an attachment that is still being uploaded
    together = [_request(bench, prompt, 0) for prompt in prompts for _ in range(SAMPLES)]
    readings = await bench.run_complete(together)
    later = await bench.run_complete(_request(bench, prompt, 0) for prompt in reversed(prompts))
    firsts = readings[::SAMPLES]
    for i, first in enumerate(firsts):
        for other in (*readings[i * SAMPLES + 1 : (i + 1) * SAMPLES], later[len(prompts) - 1 - i]):
            require_equal(other.tokens, first.tokens, f"prompt {i} with the same attachments again")
    answers = {tuple(first.tokens.tolist()) for first in firsts}
    if len(answers) < len(firsts):
        raise Broken(
            f"{len(firsts)} prompts with other attachments got {len(answers)} different answers of {LENGTH} tokens: "
            "the engine ignores attachments, or confuses them"
        )
    return {"prompts": len(prompts)} | _against_reference(bench, bench.weights, [*readings, *later], prompts)


@check("A response that is cut off and resumed continues with the attachments of its prompt.")
async def attached_and_resumed(bench: Bench) -> Figures:
    prompts = _prompts(bench)
    bench.require_greedy_repeats()
    uncut = await bench.run_complete(_request(bench, prompt, 0) for prompt in prompts)
    resumed = 0
    for prompt, whole in zip(prompts, uncut, strict=True):
        if whole.count <= CUT:
            continue
        (rest,) = await bench.run_complete([_request(bench, prompt, 0, response=whole.tokens[:CUT])])
        joined = np.concatenate((whole.tokens[:CUT], rest.tokens))
        require_prefix(joined, whole.tokens, "a response with attachments, resumed")
        resumed += 1
    if not resumed:
        raise NotTested(f"no response had more than {CUT} tokens; give other prompts")
    return {"responses": resumed}


@check("After a weight update, attachments are read by the new weights, and features that the old weights computed "
       "from the attachments are not used.")  # fmt: skip
async def attached_after_an_update(bench: Bench) -> Figures:
    prompts = _prompts(bench)
    other, before = other_weights(bench), bench.weights
    if before.seen is None or other.seen is None:
        raise NotTested("no reference model that reads attachments was given")
    old = await bench.run_complete(_request(bench, prompt, i, temperature=1.0) for i, prompt in enumerate(prompts))
    _against_reference(bench, before, old, prompts)
    await bench.load_weights(other)
    new = await bench.run_complete(_request(bench, prompt, i, temperature=1.0) for i, prompt in enumerate(prompts))
    return _against_reference(bench, other, new, prompts)


def _against_reference(bench: Bench, weights: Weights, readings: list[ReadRequest], prompts: list[Shown]) -> Figures:
    """Check the log-probabilities against the reference model with these weights and these attachments."""
    if weights.seen is None:
        return {}
    worst, kind = 0.0, declared_kind(bench)
    for reading in readings:
        if not reading.count:
            continue
        sampling = reading.request.sampling
        logits = weights.seen(reading.request, reading.tokens.tolist())
        without = logits.copy()
        without[:, list(sampling.banned_ids)] = -np.inf
        # some engines compute log-probabilities before they remove the banned ids, some engines afterwards
        worst = max(worst, min(
            float(np.abs(expected(kind, of, reading.tokens, sampling.temperature or 1.0, 1.0) - reading.logprobs).max())
            for of in (logits, without)
        ))  # fmt: skip
    if not worst <= bench.subject.tolerance:
        raise Broken(
            f"log-probabilities of prompts with attachments differ by up to {worst:.3g} nats from the reference: other "
            "or earlier weights have read the attachments, or the engine read something else"
        )
    return {"largest difference to the reference": worst}


@check("Banned ids are not generated, even if they are the most likely tokens.")
async def banned_ids(bench: Bench) -> Figures:
    bench.offered("bans")
    ends = set(bench.engine.capabilities.eos_token_ids)
    banned = 0
    for temperature in (0.0, 1.0):
        asked = [bench.request(i, LENGTH, temperature=temperature) for i in range(SAMPLES)]
        for request, free in zip(asked, await bench.run_complete(asked), strict=True):
            never = tuple(sorted(set(free.tokens.tolist()) - ends))
            again = bench.copy_of(request)
            (held,) = await bench.run_complete([replace(again, sampling=replace(again.sampling, banned_ids=never))])
            if came := set(never) & set(held.tokens.tolist()):
                raise Broken(f"{len(never)} ids were banned, but {len(came)} were generated, {min(came)} for instance")
            if held.count != request.sampling.max_tokens and held.finish is not EngineFinish.STOP:
                raise Broken(f"a response with banned ids ended with {held.finish} after {held.count} tokens")
            banned += len(never)
    return {"banned": banned, "responses": 2 * SAMPLES}
