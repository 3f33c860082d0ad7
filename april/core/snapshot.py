"""Snapshots: everything that crosses a restart, as plain numbers, strings, bytes, lists and dicts.

Invariant: a core restored from a snapshot holds every token and every prompt that the snapshotted one held, those of
attempts in flight and of batches the trainer has not trained on included; what was delivered and trained is not in it.

Tokens are little-endian bytes (int32), log-probabilities too (float32); None where there are none, as ``torch.load``
does not read empty bytes. ``data`` of a prompt is stored as it was given. ``restoring.py`` is the way back.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np

from april.core.ledger import Ledger
from april.core.restoring import require_fresh, restore, settings_out
from april.core.sealed import State, data_out
from april.core.tape import TokenTape
from april.core.types import SETTLED, Attempt, DropReason, FinishReason, Group, RecordedCall, Sample, SampleState
from april.errors import CheckpointError

if TYPE_CHECKING:
    from april.core.state import RolloutCore

__all__ = ["State", "require_fresh", "restore", "take"]


# -------------------------------------------------------------------- taking


def take(core: RolloutCore, trained_through: int | None) -> State:
    """The state of ``core``; it is not changed.

    Args:
        core: at any time, also in the middle of a step.
        trained_through: number of the last batch that the trainer's checkpoint has trained on (-1: none). Later
            batches, delivered or not, are part of the state. None: the last committed batch. The version in the state
            is that of weights trained on it: one update later for every batch up to it that is still out.

    Raises:
        CheckpointError: no such batch, or a later one is already committed.
    """
    context = core.context
    newest_committed = _newest_committed(core)
    last = newest_committed if trained_through is None else trained_through
    if isinstance(last, bool) or not isinstance(last, int) or not -1 <= last < context.batches:
        newest = context.batches - 1
        there = f"the batches delivered so far are 0 to {newest}" if context.batches else "no batch was delivered"
        raise CheckpointError(f"trained_through={last!r} must be the id of a batch, or -1; {there}")
    if last < newest_committed:
        raise CheckpointError(
            f"trained_through={last}, but batch {newest_committed} is committed by a weight update and no longer "
            "held; take the state before the weight update that follows the batch"
        )
    untrained = sorted(b for b in core.leased if trained_through is None or b > last)
    again = [sample for batch in untrained for sample in core.leased[batch]]
    tokens, prompts, lengths = _copy(context.tokens), _copy(context.prompts), context.lengths.copy()
    for sample in again:
        tokens.delivered -= sample.tape.generated
        lengths.trained.add(sample.tape.generated, -1)
    back = set(again)
    # in the order in which they are to be delivered
    ready = [*again, *(sample for unit in core.monitor for sample in unit.members)]
    groups = {sample.id.group: sample.group for sample in ready}
    prompts.delivered -= sum(number not in core.buffer.groups for number in groups)
    groups |= {group.id: group for group in core.buffer if group.ready}
    # what attempts in flight have is observed the moment it is written down
    for attempt in core.attempts.values():
        tokens.observe(attempt.tape.parsed)
        tokens.drop(attempt.tape.after_stop, DropReason.AFTER_STOP)
        if attempt.lost_for is not None:
            tokens.drop(attempt.tape.count, attempt.lost_for)
    current = core.clock.current
    # what the weight updates that follow from these batches would have announced
    current = current._replace(n=current.n + len(core.leased) - len(untrained))
    return {
        "settings": settings_out(core),
        "version": list(current),
        "branches": {str(incarnation): n for incarnation, n in core.clock.branches.items()},
        "groups_drawn": context.groups_drawn,
        "batches": last + 1,
        "staleness_bound": core.leases.bound,
        "tokens": _ledger_out(tokens),
        "prompts": _ledger_out(prompts),
        "lengths": lengths.as_dict(),
        "counters": dict(core.counters),
        "ready": [_group_out(group, back) for group in groups.values()],
        "waiting": [_group_out(group, back) for group in core.buffer if not group.ready],
        "order": [list(sample.id) for sample in ready],
    }


def _newest_committed(core: RolloutCore) -> int:
    """Number of the newest batch that no longer is held; batches are committed in any order."""
    return next((b for b in range(core.context.batches - 1, -1, -1) if b not in core.leased), -1)


def _group_out(group: Group, back: Collection[Sample]) -> State:
    """``back``: samples that were delivered and are to be delivered once more."""
    prompt = group.prompt
    data, unchecked = data_out(prompt.data)
    return {
        "id": group.id,
        "epoch": prompt.epoch,
        "position": prompt.position,
        "prompt": _packed(prompt.token_ids, "<i4"),
        "data": data,
        "unchecked": unchecked,
        "drawn_under": list(group.drawn_under),
        "bound": group.bound,
        "samples": [
            {"settled": str(sample.state)} if sample.state in SETTLED and sample not in back else _sample_out(sample)
            for sample in group.samples
        ],
        "finishers": list(group.finishers),
        "cohort": [list(pair) for pair in group.cohort],
    }


def _sample_out(sample: Sample) -> State:
    tape, asked, call = sample.tape, sample.asked, sample.open_call
    calls, open_start = ([], None) if asked is None else (list(asked.calls), asked.open_start)
    attempt = call.attempt if call is not None else None
    if attempt is not None and attempt.lost_for is None:
        tape = _with_attempt(tape, attempt)
        if attempt.tape.stopped and open_start is not None:
            # complete, and only the engine does not know yet
            calls.append(RecordedCall(open_start, len(tape), FinishReason.STOP))
            open_start = None
    return {
        "finished": sample.state in (SampleState.FINISHED, SampleState.LEASED),
        "tokens": _packed(tape.tokens, "<i4"),
        "logprobs": _packed(tape.logprobs, "<f4"),
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


# -------------------------------------------------------------------- plain forms


def _packed(array: Any, dtype: str) -> bytes | None:
    return np.asarray(array, dtype).tobytes() or None


def _copy(ledger: Ledger) -> Ledger:
    return Ledger(ledger.observed, ledger.delivered, ledger.held, ledger.dropped.copy())


def _ledger_out(ledger: Ledger) -> State:
    return {
        "observed": ledger.observed,
        "delivered": ledger.delivered,
        "dropped": {str(reason): count for reason, count in ledger.dropped.items() if count},
    }
