"""Cross-checks of the whole state: every index against every other, every ledger against a recount."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from april.core.types import Sample, SampleState
from april.errors import InvariantError

if TYPE_CHECKING:
    from april.core.state import RolloutCore


REPLAYING = (SampleState.NEW, SampleState.STARTED, SampleState.OUTSIDE)


def check_calls(sample: Sample) -> str | None:
    """What is wrong with the sample's record of generate calls, or None."""
    calls = [*sample.calls, *(sample.replay.calls if sample.replay is not None else ())]
    position = 0
    for call in calls:
        if not position <= call.start <= call.end <= len(sample.tape):
            return f"call [{call.start}, {call.end}) after token {position} of {len(sample.tape)}"
        position = call.end
    opened = sample.call.start if sample.call is not None else sample.replay.open_start if sample.replay else None
    if opened is not None and not position <= opened <= len(sample.tape):
        return f"call [{opened}, ...) after token {position} of {len(sample.tape)}"
    if sample.state is SampleState.FINISHED and (not calls or position != len(sample.tape)):
        return f"finished, but its calls end at {position} of {len(sample.tape)} tokens"
    return None


def validate(core: RolloutCore) -> None:
    """Raise InvariantError at the first contradiction. Cost: proportional to everything held."""

    def fail(message: str, sample: Sample | None = None) -> None:
        story = f"\n{core.story(sample.id)}" if sample is not None else ""
        raise InvariantError(f"after event {core.context.event_number}: {message}{story}\n{core!r}")

    states: Counter[SampleState] = Counter()
    held = 0
    current = [a for a in core.attempts.values() if a.dropped_for is None]
    by_sample = {a.sample.id: a for a in current}
    if len(by_sample) != len(current):
        fail("a sample has more than one attempt in flight")
    for group in core.buffer:
        unfinished = sum(s.state is not SampleState.FINISHED for s in group.samples)
        if unfinished != group.unfinished:
            fail(f"{group} has {unfinished} unfinished samples", group.samples[0])
        if (group.ready_at >= 0) + (group.judged_since >= 0) != (unfinished == 0):
            fail(f"{group} is complete and neither ready nor judged, or it is both, or too early", group.samples[0])
        if group.judged_since >= 0 and not core.settings.has_filter:
            fail(f"{group} waits for a filter that does not exist", group.samples[0])
        for sample in group.samples:
            states[sample.state] += 1
            held += sample.tape.generated
            wrong = sample.tape.check()
            if wrong:
                fail(f"{sample}: {wrong}", sample)
            if sample.state in (SampleState.LEASED, SampleState.DROPPED):
                fail(f"{sample} is settled and still held", sample)
            if (sample.state is SampleState.IN_FLIGHT) != (sample.id in by_sample):
                fail(f"{sample} is in flight without an attempt, or the other way round", sample)
            if (sample.ticket > 0) != (sample.state in (SampleState.NEW, SampleState.QUEUED)):
                fail(f"{sample} waits outside the queue, or is queued and does not wait", sample)
            if (sample.call is not None) != (sample.state in (SampleState.QUEUED, SampleState.IN_FLIGHT)):
                fail(f"{sample} has a call and does not wait for tokens, or the other way round", sample)
            if len(sample.tape) > core.settings.max_response_len:
                fail(f"{sample} is longer than max_response_len={core.settings.max_response_len}", sample)
            if sample.replay is not None and sample.state not in REPLAYING:
                fail(f"{sample} is replayed and is beyond that", sample)
            wrong = check_calls(sample)
            if wrong:
                fail(f"{sample}: {wrong}", sample)

    for attempt in current:
        if attempt.sample.state is not SampleState.IN_FLIGHT:
            fail(f"attempt {attempt.id} belongs to {attempt.sample}", attempt.sample)
    per_engine = Counter(a.engine for a in core.attempts.values())
    for name, state in core.engines.states.items():
        if state.in_flight != per_engine[name]:
            fail(f"engine {name} counts {state.in_flight} in flight, there are {per_engine[name]}")
    starting = core.context.starting
    if starting != states[SampleState.STARTED]:
        fail(f"{starting} places held by starting samples, {states[SampleState.STARTED]} samples are starting")
    if len(core.attempts) + starting > core.settings.max_in_flight:
        fail(f"more than max_in_flight={core.settings.max_in_flight} in flight")
    if core.over_sampler.waiting != states[SampleState.NEW] + states[SampleState.QUEUED]:
        fail(f"{core.over_sampler.waiting} in the queue, {states} held")
    ready = [g for g in core.buffer if g.ready_at >= 0]
    if sorted(g.id for g in ready) != sorted(g.id for g in core.monitor):
        fail("the ready list is not the list of complete groups")
    if core.aborts.pending > len(core.attempts):
        fail(f"{core.aborts.pending} aborts pending for {len(core.attempts)} attempts")
    if core.tokens.held != held:
        fail(f"ledger: {core.tokens.held} tokens held, a recount finds {held}")
    if core.prompts.held != len(core.buffer):
        fail(f"ledger: {core.prompts.held} prompts held, a recount finds {len(core.buffer)}")
    for name, ledger in (("tokens", core.tokens), ("prompts", core.prompts)):
        if not ledger.balanced:
            fail(f"{name} were lost or made up: {ledger.as_dict()}")
