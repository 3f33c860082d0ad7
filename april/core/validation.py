"""Checks the whole state of the rollout core: compares indexes with each other, and ledgers with a recount."""

from __future__ import annotations

from collections import Counter

from april.core.attachments import rows_of
from april.core.context import CoreContext
from april.core.types import (
    AttemptState,
    CallState,
    Chain,
    Evaluation,
    GenerationMode,
    Group,
    GroupState,
    Sample,
    SampleId,
    SampleState,
)
from april.core.weight_updates import WeightUpdates
from april.errors import InvariantError

# module-level names, as an enum member costs 60 ns per use on Python 3.11 and these are used for every sample held
NEW, RUNNING, FINISHED, LEASED = SampleState.NEW, SampleState.RUNNING, SampleState.FINISHED, SampleState.LEASED
QUEUED, IN_FLIGHT = CallState.QUEUED, CallState.IN_FLIGHT


def check_calls(sample: Sample) -> str | None:
    """Describe what is wrong with the sample's calls; None if they are consistent."""
    lost = in_flight = called = False
    for chain in sample.chains:
        if not chain.calls and chain.replay is None and len(chain.tape) == 0:
            continue  # nothing to compare
        if wrong := _check_chain(sample, chain):
            return wrong if len(sample.chains) == 1 else f"chain {chain.number}: {wrong}"
        called = called or bool(chain.calls or chain.replay)
        if (call := chain.open_call) is not None:
            lost, in_flight = lost or call.function_lost, in_flight or call.state is IN_FLIGHT
    if lost and not in_flight:
        return "its function was lost, and it has nothing left at an engine that would end"
    if sample.state is FINISHED and not called:
        return "it is finished without any call"
    return None


def _check_chain(sample: Sample, chain: Chain) -> str | None:
    done = [(c.start, c.end) for c in chain.calls if c.finish is not None]
    call, replay = chain.open_call, chain.replay
    if len(done) + (call is not None) != len(chain.calls):
        return "an open call before the last one, or a complete one without its result"
    if (call and sample.state is not RUNNING) or (chain.calls and sample.state is NEW):
        return "it has calls but does not run"
    if replay is not None:
        done += [(start, end) for start, end, _ in replay.calls]
    position = 0
    for start, end in done:
        if not position <= start <= end <= len(chain.tape):
            return f"call [{start}, {end}) after token {position} of {len(chain.tape)}"
        position = end
    opened = call.start if call is not None else replay.open_start if replay is not None else None
    if opened is not None and not position <= opened <= len(chain.tape):
        return f"call [{opened}, ...) after token {position} of {len(chain.tape)}"
    if sample.state is FINISHED and position != len(chain.tape):
        return f"finished, but its calls end at {position} of {len(chain.tape)} tokens"
    if replay is not None and (call is not None or sample.state is SampleState.SCORING):
        return "it is replayed, but its tokens are beyond the replay"
    return None


def check_group(group: Group, *, whole: bool) -> str | None:
    """Describe what is wrong with a group's counts; None if they are right. ``whole``: groups are delivered whole."""
    members = group.members
    finished = {s.id.index for s in members if s.state is FINISHED}
    leased = {s.id.index for s in group.samples if s.state is LEASED}
    if leased and whole:
        return f"{sorted(leased)} are settled but still held"
    unfinished = len(members) - len(finished)
    if (unfinished, len(members)) != (group.unfinished, group.held):
        return f"it has {unfinished} unfinished samples of {len(members)}"
    if sorted(finished | leased) != sorted(group.finishers) or len(leased) != group.delivered:
        return f"{sorted(finished | leased)} are finished, but its finishers are {group.finishers}"
    if whole and group.quorum != len(members):
        return f"a quorum of {group.quorum} of {len(members)}"
    open_one = group.state is GroupState.OPEN
    if (whole or open_one) and open_one == group.complete:
        return "it is complete but neither ready nor judged, or it is either of these too early"
    return None


def validate(context: CoreContext, updates: WeightUpdates) -> None:
    """Raise InvariantError at the first contradiction; takes time in proportion to the number of held samples."""

    def fail(message: str, sample: Sample | None = None) -> None:
        story = f"\n{context.story(sample.id)}" if sample is not None else ""
        raise InvariantError(f"after event {context.event_number}: {message}{story}")

    held, queued, whole = 0, 0, context.settings.whole_groups
    reserved, longest = context.places.reserved, context.settings.max_response_len
    to_start = {sample for evaluation in context.evaluations.values() for sample in evaluation.unstarted}
    started: set[SampleId] = set()
    current = [a for a in context.attempts if a.state is not AttemptState.ABANDONED]
    by_call = {a.call: a for a in current}
    if len(by_call) != len(current):
        fail("a call has more than one attempt in flight")
    for group in (*context.buffer, *context.evaluation_groups.values()):
        if wrong := check_group(group, whole=whole or group.evaluation is not None):
            fail(f"{group}: {wrong}", group.samples[0])
        if group.state is GroupState.BEING_JUDGED and not context.settings.has_filter:
            fail(f"{group} waits for a filter that does not exist", group.samples[0])
        training = group.evaluation is None
        if training and (len(group.cohort) > 0) != group.ready:
            fail(f"{group} has the cohort {group.cohort}", group.samples[0])
        aside = training and not context.buffer.in_round(group)
        for sample in group.members:
            state, calls = sample.state, [call for chain in sample.chains for call in chain.calls]
            held += sample.generated if training else 0
            if state is RUNNING and not calls and not sample.any_chain:
                started.add(sample.id)
            if aside and (state is not NEW or sample.tokens):
                fail(f"{sample} of a group that was put aside has begun", sample)
            waits = state is NEW and not aside and sample not in to_start
            queued, in_order = queued + waits, (sample.ticket > 0) == waits
            for call in calls:
                if (call.state is IN_FLIGHT) != (call in by_call):
                    fail(f"{sample} is in flight without an attempt, or has an attempt without being in flight", sample)
                waits = call.state is QUEUED and not call.function_lost
                queued, in_order = queued + waits, in_order and (call.ticket > 0) == waits
            if not in_order:
                fail(f"{sample} waits outside the queue, or is queued without waiting", sample)
            for chain in sample.chains:
                if wrong := chain.tape.check():
                    fail(f"{sample}: {wrong}", sample)
                if len(chain.tape) > longest:
                    fail(f"{sample} is longer than max_response_len={longest}", sample)
                if (rows := rows_of(chain.extras)) not in (0, chain.rows_due):
                    fail(f"{sample} has {rows} rows of extras, but its tokens need {chain.rows_due}", sample)
            wrong = check_calls(sample)
            if wrong:
                fail(f"{sample}: {wrong}", sample)
        if training and (wrong := context.buffer.wrong_oldest(group)):
            fail(f"{group}: {wrong}", group.samples[0])

    for attempt in context.attempts:
        if attempt.state is not AttemptState.ABANDONED and (
            attempt.call.attempt is not attempt or attempt.call.chain.open_call is not attempt.call
        ):
            fail(f"attempt {attempt.id} belongs to {attempt.sample}", attempt.sample)
        if (attempt.drop_reason is None) != (attempt.state in (AttemptState.WANTED, AttemptState.SILENT)):
            fail(f"attempt {attempt.id} is {attempt.state}, its tokens lost for {attempt.drop_reason}", attempt.sample)
    per_engine = Counter(a.engine for a in context.attempts)
    if gone := per_engine.keys() - context.engines.states.keys():
        fail(f"requests are in flight at engines {sorted(gone)}, which have left")
    for name, state in context.engines.states.items():
        if state.in_flight != per_engine[name]:
            fail(f"engine {name} counts {state.in_flight} requests in flight, but there are {per_engine[name]}")
        if wrong := state.contradiction():
            fail(f"engine {name}: {wrong}")
    if wrong := updates.contradiction():
        fail(wrong)
    if reserved != started:
        fail(f"places are reserved for {sorted(reserved)}, but {sorted(started)} were started and made no call")
    places = context.places
    of_evaluations = sum(sample.group < 0 for sample in reserved)
    if places.reserved_by_evaluations != of_evaluations:
        fail(f"evaluations reserve {places.reserved_by_evaluations} places, but a recount finds {of_evaluations}")
    if places.taken > max(places.total, places.max_taken):
        fail(
            f"more requests are in flight than max_in_flight={places.total}, and than its earlier value "
            f"{places.max_taken}"
        )
    if context.over_sampler.waiting != queued:
        fail(f"{context.over_sampler.waiting} in the queue, but {queued} wait")
    if missing := {*context.buffer.aside, *context.buffer.unbegun} - context.buffer.groups.keys():
        fail(f"groups {sorted(missing)} wait for a later round, but are not held")
    present = [group for group in context.buffer if context.buffer.in_round(group)]
    units = [unit for group in present for unit in ((group,) if whole else group.members)]
    if {id(unit) for unit in units if unit.ready} != {id(unit) for unit in context.monitor}:
        fail("the ready list is not the list of complete groups or samples")
    if context.buffer.units != len(units):
        fail(f"the buffer counts {context.buffer.units} units, but a recount finds {len(units)}")
    if context.aborts.pending > len(context.attempts):
        fail(f"{context.aborts.pending} aborts pending for {len(context.attempts)} attempts")
    if context.tokens.held != held:
        fail(f"ledger: {context.tokens.held} tokens held, but a recount finds {held}")
    if context.prompts.held != len(context.buffer):
        fail(f"ledger: {context.prompts.held} prompts held, but a recount finds {len(context.buffer)}")
    finished = (s.generated for s in context.buffer.samples() if s.state is FINISHED)
    if (accounted := context.lengths.accounted(finished)) != (made := context.lengths.generated):
        fail(f"lengths generated: {made}; trained, held or dropped: {accounted}")
    if context.lengths.trained.tokens > context.tokens.delivered:
        fail(f"{context.lengths.trained.tokens} tokens are trained, but {context.tokens.delivered} were delivered")
    for name, ledger in (("tokens", context.tokens), ("prompts", context.prompts)):
        if not ledger.balanced:
            fail(f"{name} do not add up: {ledger.as_dict()}")
    evaluations = context.evaluations
    for number, evaluation in evaluations.items():
        if wrong := check_evaluation(context, evaluation):
            fail(f"evaluation {number}: {wrong}")
    groups = {g.id for e in evaluations.values() if e.failure is None for g in e.groups}
    if groups != set(context.evaluation_groups):
        fail(f"groups {sorted(context.evaluation_groups)} are evaluated, but {sorted(groups)} should be")


def check_evaluation(context: CoreContext, evaluation: Evaluation) -> str | None:
    """Describe what is wrong with an evaluation's counts, ledger and versions; None if they are consistent."""
    samples = [s for g in evaluation.groups for s in g.samples]
    in_flight = sum(a.sample.evaluation is evaluation for a in context.attempts)
    if evaluation.in_flight != in_flight:
        return f"{evaluation.in_flight} counted in flight, but there are {in_flight}"
    held = sum(s.generated for s in samples)
    if not evaluation.tokens.balanced or evaluation.tokens.held != held:
        return f"{held} tokens held, but its ledger says {evaluation.tokens.as_dict()}"
    if evaluation.version is None:
        return None
    alone = context.settings.generation is GenerationMode.STEPWISE
    if evaluation.version != context.clock.current or (alone and context.attempts.in_flight):
        return f"it began under {evaluation.version}, but weights changed or training continued"
    if {part.version for s in samples for part in s.segments} - {evaluation.version}:
        return f"tokens of other versions than {evaluation.version}"
    if evaluation.failure is not None:
        return None
    running = sum(s.state is SampleState.RUNNING or s.ticket > 0 for s in samples)
    unfinished = sum(g.unfinished > 0 for g in evaluation.groups)
    if (evaluation.running_functions, evaluation.unfinished) != (running, unfinished):
        found = f"{evaluation.running_functions} functions and {evaluation.unfinished} groups"
        return f"{found}, not {running} and {unfinished}"
    return None
