"""Snapshots: everything that crosses a restart, as plain numbers, strings, bytes, lists and dicts.

Invariant: a core restored from a snapshot holds every token and every prompt that the snapshotted one held, those of
attempts in flight and of batches the trainer has not trained on included; what was delivered and trained is not in it.

Tokens are little-endian bytes (int32), log-probabilities too (float32). ``data`` of a prompt is stored as it was given.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from april.core.ledger import Ledger
from april.core.tape import Segment, SegmentKind, TokenTape
from april.core.types import (
    Attempt,
    DropReason,
    FinishReason,
    Group,
    Prompt,
    RecordedCall,
    Replay,
    Sample,
    SampleState,
)
from april.core.versions import FIRST_VERSION, PolicyVersion, VersionClock
from april.errors import CheckpointError, InvariantError

if TYPE_CHECKING:
    from april.core.state import RolloutCore

FORMAT = 1
State = dict[str, Any]


# -------------------------------------------------------------------- taking


def take(core: RolloutCore, trained_through: int | None) -> State:
    """The state of ``core``; it is not changed.

    Args:
        core: at any time, also in the middle of a step.
        trained_through: number of the last batch that the trainer's checkpoint has trained on (-1: none). Later
            batches, delivered or not, are part of the state. None: the last committed batch. If a weight update has
            not committed it yet, the version in the state is that of the update which would.

    Raises:
        CheckpointError: no such batch, or a later one is already committed.
    """
    books = core.books
    newest_committed = _newest_committed(core)
    last = newest_committed if trained_through is None else trained_through
    if isinstance(last, bool) or not isinstance(last, int) or not -1 <= last < books.batches:
        newest = books.batches - 1
        there = f"the batches delivered so far are 0 to {newest}" if books.batches else "no batch was delivered"
        raise CheckpointError(f"trained_through={last!r} must be the id of a batch, or -1; {there}")
    if last < newest_committed:
        raise CheckpointError(
            f"trained_through={last}, but batch {newest_committed} is committed by a weight update and no longer "
            "held; take the state before the weight update that follows the batch"
        )
    untrained = sorted(b for b in core.leased if trained_through is None or b > last)
    again = [group for batch in untrained for group in core.leased[batch]]
    tokens, prompts = _copy(books.tokens), _copy(books.prompts)
    for group in again:
        prompts.delivered -= 1
        tokens.delivered -= sum(s.tape.generated for s in group.samples)
    # what attempts in flight have is observed the moment it is written down
    for attempt in core.attempts.values():
        tokens.observe(attempt.tape.parsed)
        tokens.drop(attempt.tape.after_stop, DropReason.AFTER_STOP)
        if attempt.lost_for is not None:
            tokens.drop(attempt.tape.count, attempt.lost_for)
    current = core.clock.current
    if last > newest_committed:  # these weights are what the next weight update would have announced
        current = current._replace(n=current.n + 1)
    ready = [*again, *core.monitor]
    waiting = [group for group in core.buffer if group.ready_at < 0]
    return {
        "format": FORMAT,
        "n_samples_per_prompt": core.settings.n_samples_per_prompt,
        "run_seed": core.settings.run_seed,
        "version": list(current),
        "branches": {str(incarnation): n for incarnation, n in core.clock.branches.items()},
        "groups_drawn": books.groups_drawn,
        "batches": last + 1,
        "tokens": _ledger_out(tokens),
        "prompts": _ledger_out(prompts),
        "counters": dict(core.counters),
        "ready": [_group_out(core, group) for group in ready],
        "waiting": [_group_out(core, group) for group in waiting],
    }


def _newest_committed(core: RolloutCore) -> int:
    """Number of the newest batch that no longer is held; batches are committed in any order."""
    return next((b for b in range(core.books.batches - 1, -1, -1) if b not in core.leased), -1)


def _group_out(core: RolloutCore, group: Group) -> State:
    prompt = group.prompt
    return {
        "id": group.id,
        "epoch": prompt.epoch,
        "position": prompt.position,
        "prompt": _ints(prompt.token_ids),
        "data": dict(prompt.data),
        "drawn_under": list(group.drawn_under),
        "samples": [_sample_out(core, sample) for sample in group.samples],
    }


def _sample_out(core: RolloutCore, sample: Sample) -> State:
    tape, replay = sample.tape, sample.replay
    calls = [*sample.calls, *(replay.calls if replay is not None else ())]
    open_start = sample.call.start if sample.call is not None else replay.open_start if replay is not None else None
    if sample.state is SampleState.IN_FLIGHT and not core.attempts[sample.attempt_id].doubtful:
        attempt = core.attempts[sample.attempt_id]
        tape = _with_attempt(tape, attempt)
        if attempt.tape.stopped and open_start is not None:
            # complete, and only the engine does not know yet
            calls.append(RecordedCall(open_start, len(tape), FinishReason.STOP))
            open_start = None
    return {
        "finished": sample.state in (SampleState.FINISHED, SampleState.LEASED),
        "tokens": _ints(tape.tokens),
        "logprobs": np.asarray(tape.logprobs, "<f4").tobytes(),
        "segments": [
            [s.count, s.version.incarnation, s.version.n, str(s.kind), s.attempt_id, s.engine, s.temperature]
            for s in tape.segments
        ],
        "calls": [[c.start, c.end, str(c.finish)] for c in calls],
        "open_call": open_start,
        "finish": None if sample.finish is None else str(sample.finish),
        "reward": sample.reward,
        "attempts": sample.attempts,
        "resumes": sample.resumes,
        "failures": sample.failures,
        "restarts": sample.restarts,
    }


def _with_attempt(tape: TokenTape, attempt: Attempt) -> TokenTape:
    """A copy of the sample's tape, with what its running attempt has brought so far."""
    copy = TokenTape()
    copy.tokens, copy.logprobs, copy.segments = tape.tokens, tape.logprobs, list(tape.segments)
    copy.add_attempt(attempt.tape, attempt.id, attempt.engine, attempt.sampling.temperature)
    return copy


# -------------------------------------------------------------------- restoring


def restore(core: RolloutCore, state: State) -> None:
    """Put a snapshot into a fresh core, which begins a new incarnation of the policy version.

    No engine is used before a WeightsUpdated event says that it has that version.

    Finished samples stay finished. The rollout functions of all others start again; what their calls had generated is
    answered from the tape.

    Raises:
        CheckpointError: the core is not fresh, or the state is not one of april's, or of another configuration.
    """
    require_fresh(core)
    _check(core, state)
    try:
        _restore(core, state)
    except CheckpointError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, InvariantError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"the state is damaged: {type(error).__name__}: {reason}") from error


def require_fresh(core: RolloutCore) -> None:
    """Raise CheckpointError for a core that has done something already."""
    if core.books.groups_drawn or core.books.batches or core.step is not None or core.clock.current != FIRST_VERSION:
        raise CheckpointError("a state is loaded before the first batch and weight update; make a new scheduler")


def _check(core: RolloutCore, state: State) -> None:
    if not isinstance(state, dict) or "format" not in state:
        raise CheckpointError("this is not a state that april's state_dict() gave")
    if state["format"] != FORMAT:
        raise CheckpointError(f"the state has format {state['format']}; this version of april reads format {FORMAT}")
    for name in ("n_samples_per_prompt", "run_seed"):
        now = getattr(core.settings, name)
        if state.get(name) != now:
            setting = "seed" if name == "run_seed" else name
            raise CheckpointError(f"the state was saved with {setting}={state.get(name)}, the configuration has {now}")


def _restore(core: RolloutCore, state: State) -> None:
    books = core.books
    clock = VersionClock(_version(state["version"]), {int(i): _count(n) for i, n in state["branches"].items()})
    current = clock.restart(clock.current.n)
    ready = [_group_in(core, g, ready=True) for g in state["ready"]]
    waiting = [_group_in(core, g, ready=False) for g in state["waiting"]]
    core.clock.current, core.clock.branches = current, clock.branches
    books.groups_drawn, books.batches = _count(state["groups_drawn"]), _count(state["batches"])
    core.counters.update({str(name): _count(count) for name, count in state["counters"].items()})
    for group in sorted([*ready, *waiting], key=lambda g: g.id):
        if group.id >= books.groups_drawn:
            raise ValueError(f"group {group.id} of {books.groups_drawn}")
        stamped = [part.version for sample in group.samples for part in sample.tape.segments]
        for version in (group.drawn_under, *stamped):
            clock.staleness(version)  # raises for a version that cannot have been
        core.buffer.add(group)
    for group in [*ready, *waiting]:
        books.event_number += 1  # completed one after the other: batches are delivered again in their order
        for sample in group.samples:
            if sample.state is not SampleState.FINISHED:
                core.over_sampler.push(sample)
            elif core.monitor.sample_finished(group):  # in waiting: a filter was asked that there is no longer
                core.monitor.accept(group, books.event_number)
    _ledger_in(books.tokens, state["tokens"], sum(s.tape.generated for s in core.buffer.samples()))
    _ledger_in(books.prompts, state["prompts"], len(core.buffer))
    core.validate()


def _group_in(core: RolloutCore, state: State, *, ready: bool) -> Group:
    prompt = Prompt(_int_array(state["prompt"]), dict(state["data"]), _count(state["epoch"]), _count(state["position"]))
    n = core.settings.n_samples_per_prompt
    group = Group(_count(state["id"]), prompt, n, _version(state["drawn_under"]))
    # a filter or a group reward sees what rollout functions return, and that does not survive the process
    keeps_finished = ready or not (core.settings.group_reward or core.settings.has_filter)
    for sample, saved in zip(group.samples, state["samples"], strict=True):
        _sample_in(sample, saved, keeps_finished=keeps_finished)
        if len(sample.tape) > core.settings.max_response_len:
            raise CheckpointError(
                f"the state holds {len(sample.tape)} tokens of {sample.id}, the configuration has "
                f"max_response_len={core.settings.max_response_len}"
            )
    return group


def _sample_in(sample: Sample, state: State, *, keeps_finished: bool) -> None:
    tape, start = sample.tape, 0
    for count, incarnation, n, kind, attempt_id, engine, temperature in state["segments"]:
        version = _version((incarnation, n))
        kept = (SegmentKind(kind), str(attempt_id), str(engine), float(temperature))
        tape.segments.append(Segment(start, _count(count), version, *kept))
        start += count
    tape.tokens = _int_array(state["tokens"])
    tape.logprobs = np.frombuffer(state["logprobs"], "<f4").astype(np.float32)
    sample.attempts, sample.failures = _count(state["attempts"]), _count(state["failures"])
    sample.resumes, sample.restarts = _count(state["resumes"]), _count(state["restarts"])
    calls = [RecordedCall(_count(start), _count(end), FinishReason(finish)) for start, end, finish in state["calls"]]
    open_call = None if state["open_call"] is None else _count(state["open_call"])
    if state["finished"] is True and keeps_finished:
        sample.state, sample.calls, sample.outlived = SampleState.FINISHED, calls, True
        sample.finish, sample.reward = FinishReason(state["finish"]), float(state["reward"])
        if not math.isfinite(sample.reward):
            raise ValueError(f"the reward of {sample.id} is {sample.reward}")
    elif calls or open_call is not None:
        sample.replay = Replay(deque(calls), open_call)
    elif len(tape):
        raise ValueError(f"{sample.id} has tokens that nobody asked for")


# -------------------------------------------------------------------- plain forms


def _ints(array: Any) -> bytes:
    return np.asarray(array, "<i4").tobytes()


def _int_array(data: bytes) -> Any:
    return np.frombuffer(data, "<i4").astype(np.int32)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"expected a count, found {value!r}")
    return value


def _version(pair: Any) -> PolicyVersion:
    incarnation, n = pair
    return PolicyVersion(_count(incarnation), _count(n))


def _copy(ledger: Ledger) -> Ledger:
    return Ledger(ledger.observed, ledger.delivered, ledger.held, ledger.dropped.copy())


def _ledger_out(ledger: Ledger) -> State:
    return {
        "observed": ledger.observed,
        "delivered": ledger.delivered,
        "dropped": {str(reason): count for reason, count in ledger.dropped.items() if count},
    }


def _ledger_in(ledger: Ledger, state: State, held: int) -> None:
    ledger.delivered, ledger.held = _count(state["delivered"]), held
    ledger.dropped.update({DropReason(reason): _count(count) for reason, count in state["dropped"].items()})
    ledger.observed = _count(state["observed"])
    if not ledger.balanced:
        raise ValueError(f"its ledger does not balance: {ledger.as_dict()}")
