"""Saves the state of a core as plain numbers, strings, bytes, lists and dicts, and restores it.

Invariant: a restored core holds every token and every prompt that the saved core held, those of attempts in flight and
of untrained batches included; samples that were delivered and trained are not in a snapshot.

Tokens are stored as little-endian int32 bytes, log-probabilities as float32 bytes, or lists of such bytes; None if
empty, as ``torch.load`` cannot read empty bytes. ``data`` of a prompt is stored as it was given.

``restore`` checks every number of a state as if it came from an engine, and refuses a state whose samples cannot be
handled as the present settings promise.
"""

from __future__ import annotations

import math
import string
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields, replace
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from april.core.attachments import Attachment, Extras, Placed, Rows, joined, note_layout, rows_of, wrong_rows
from april.core.completion_monitor import Unit
from april.core.engine_table import EngineTable
from april.core.events import WorkChanged
from april.core.ledger import Ledger, LengthLedger
from april.core.partial_buffer import PartialBuffer
from april.core.rollout_core import RolloutCore
from april.core.row_rewards import RowReward, wrong_row_rewards
from april.core.settings import LEAST_QUORUM, CoreSettings, quorum_of
from april.core.state_checksum import State, data_out
from april.core.tape import AttemptTape, Float32, Int32, Segment, SegmentKind, TokenTape, content_of
from april.core.types import (
    MAX_SAMPLES_FACTOR,
    NO_DEADLINE,
    SETTLED,
    Attempt,
    CallState,
    Chain,
    DropReason,
    FinishReason,
    GenerateCall,
    Group,
    GroupState,
    OnLongPrompt,
    OnStale,
    Prompt,
    RecordedCall,
    Refill,
    Replay,
    Sample,
    SampleId,
    SampleState,
    Work,
    repeatable_calls,
)
from april.core.value_checks import count_of, float32_reward, wrong_ids, wrong_logprobs, wrong_reward
from april.core.versions import FIRST_VERSION, PolicyVersion, VersionClock
from april.errors import CheckpointError, InvariantError

# -------------------------------------------------------------------- saving


def take(core: RolloutCore, trained_through: int | None) -> State:
    """Return the state of ``core`` as a snapshot, without changing the core.

    Args:
        core: core to save, at any time, also in the middle of a step.
        trained_through: id of the last batch that the trainer's checkpoint was trained on; -1 if there is none. Later
            batches are part of the state, delivered or not. None means the last committed batch. The version in the
            state counts one more update for every batch up to this one that is not committed yet.

    Raises:
        CheckpointError: there is no such batch, or a later batch is already committed.
    """
    return Freezer(core).finish(trained_through)()


class _Chain(NamedTuple):
    """A chain as it was; the list ``segments`` may have grown since."""

    number: int
    prompt: Int32
    attached: tuple[Placed, ...]
    extras: Extras
    tokens: Int32
    logprobs: Float32
    segments: list[Segment]
    calls: list[GenerateCall]
    last_call: CallState | None
    replay: Replay | None


class _Sample(NamedTuple):
    id: SampleId
    state: SampleState
    finish: FinishReason | None
    reward: float
    row_rewards: tuple[RowReward, ...]
    attempts: int
    resumes: int
    failures: int
    restarts: int
    chains: list[tuple[Any, ...]]
    """Fields of a _Chain each."""


class _Group(NamedTuple):
    id: int
    ready: bool
    prompt: Prompt
    drawn_under: PolicyVersion
    bound: int
    cohort: tuple[tuple[int, float], ...]
    cohort_values: Extras
    finishers: list[int]
    data: State
    unchecked: list[str]
    samples: list[tuple[Any, ...]]
    """Fields of a _Sample each."""


_GROUP = attrgetter("id", "ready", "prompt", "drawn_under", "bound", "cohort", "cohort_values")
_SAMPLE = attrgetter(
    "id", "state", "finish", "reward", "row_rewards", "attempts", "resumes", "failures", "restarts"
)
_CHAIN = attrgetter("number", "prompt", "attached", "extras", "tape.tokens", "tape.logprobs", "tape.segments")
CONSTRAINED = "constrained"
"""What a state calls the kind of a generated segment with a grammar."""
SAMPLES_AT_ONCE = 500
"""Number of samples that one call of :meth:`Freezer.advance` collects, in a few milliseconds."""
MOST_ROUNDS = 5
"""Number of times that :meth:`Freezer.advance` goes through the groups that have changed meanwhile."""


class Freezer:
    """Collects references to all that a snapshot needs: in parts while the core goes on, and then at one moment.

    Arrays are never written into once they are in the core, so that references to them are enough. A group that changes
    after it was collected is collected again, by the end at the latest.
    """

    def __init__(self, core: RolloutCore, at_once: int = SAMPLES_AT_ONCE) -> None:
        self._core, self._at_once = core, at_once
        self._changed: set[int] = set()
        """Numbers of the groups that have changed since they were collected."""
        self._groups: dict[int, tuple[Any, ...]] = {}
        """Fields of a _Group each, by number."""
        self._left = deque(core.buffer.groups)
        self._rounds = 1
        core.context.changed.append(self._changed)

    def advance(self) -> bool:
        """Collect some of the groups; returns False once the rest can be collected at the end."""
        groups, left, samples = self._core.buffer.groups, self._left, 0
        while left and samples < self._at_once:
            if (group := groups.get(left.popleft())) is not None:
                self._changed.discard(group.id)
                self._groups[group.id] = _frozen(group)
                samples += len(group.samples)
        if not left and self._rounds < MOST_ROUNDS:
            missing = [number for number in groups if number in self._changed or number not in self._groups]
            if sum(len(groups[number].samples) for number in missing) > self._at_once:
                self._rounds += 1
                left.extend(missing)
        return bool(left)

    def close(self) -> None:
        """End the collection."""
        changed = self._core.context.changed
        changed[:] = [numbers for numbers in changed if numbers is not self._changed]

    def finish(self, trained_through: int | None) -> Callable[[], State]:
        """Return a function that returns the present state of the core, whatever the core does afterwards.

        Call the returned function once, in any thread. Arguments and errors are those of :func:`take`.
        """
        self.close()
        core, context = self._core, self._core.context
        # batches may be committed in any order
        newest_committed = next((b for b in range(context.batches - 1, -1, -1) if b not in core.leased), -1)
        last = newest_committed if trained_through is None else trained_through
        if isinstance(last, bool) or not isinstance(last, int) or not -1 <= last < context.batches:
            newest = context.batches - 1
            there = f"the batches delivered so far are 0 to {newest}" if newest >= 0 else "no batch was delivered yet"
            raise CheckpointError(f"trained_through={last!r} must be the id of a batch, or -1; {there}")
        if last < newest_committed:
            raise CheckpointError(
                f"trained_through={last}, but batch {newest_committed} was committed by a weight update and is no "
                "longer held; save the state before the weight update that follows the batch"
            )
        untrained = sorted(b for b in core.leased if trained_through is None or b > last)
        again = [sample for batch in untrained for sample in core.leased[batch]]
        # samples in the order in which they will be delivered
        ready = [*again, *(sample for unit in core.monitor for sample in unit.members)]
        groups = core.buffer.groups | {sample.id.group: sample.group for sample in again}
        current = core.clock.current
        # the version after the weight updates for the batches that the checkpoint was trained on
        current = current._replace(n=current.n + len(core.leased) - len(untrained))
        head = {
            "settings": settings_out(core),
            "version": list(current),
            "branches": {str(incarnation): n for incarnation, n in core.clock.branches.items()},
            "groups_drawn": context.groups_drawn,
            "batches": last + 1,
            "staleness_bound": core.leases.bound,
            "counters": dict(core.counters),
            "aside": list(core.buffer.aside),
            "unbegun": list(core.buffer.unbegun),
            "long_round": [g.id for g in groups.values() if g.put_aside and g.id not in core.buffer.aside],
        }
        collected, changed = self._groups, self._changed
        frozen = {
            number: collected[number] if number in collected and number not in changed else _frozen(group)
            for number, group in groups.items()
        }
        # most engines return whole answers, so that the tapes of their requests in flight are empty
        attempts = [(a, a.drop_reason, a.tape.freeze()) for a in core.attempts.values() if a.tape.parsed]
        return partial(
            _state_of, head, deepcopy((context.tokens, context.prompts, context.lengths)), set(core.buffer.groups),
            [sample.id for sample in again], [sample.id for sample in ready], frozen, attempts,
        )  # fmt: skip


def _frozen(group: Group) -> tuple[Any, ...]:
    """Return the fields of a _Group, as they are now."""
    samples = [
        (
            *_SAMPLE(sample),
            [
                (
                    *_CHAIN(chain),
                    (calls := chain.calls[:]),
                    calls[-1].state if calls else None,
                    None if (replay := chain.replay) is None else Replay(replay.calls.copy(), replay.open_start),
                )
                for chain in sample.chains
            ],
        )
        for sample in group.samples
    ]
    return (*_GROUP(group), group.finishers[:], *data_out(group.prompt.data), samples)


_Running = Mapping[int, tuple[Attempt, AttemptTape]]
"""Attempts whose tokens their samples get, with their tapes as they were, by the identity of their calls."""


def _state_of(
    head: State, ledgers: tuple[Ledger, Ledger, LengthLedger], held: Collection[int], again: Sequence[SampleId],
    order: Sequence[SampleId], fields_of_groups: Mapping[int, tuple[Any, ...]],
    attempts: Iterable[tuple[Attempt, DropReason | None, tuple[Any, ...]]],
) -> State:  # fmt: skip
    """Return the snapshot of what a :class:`Freezer` has collected.

    Args:
        held: numbers of the groups in the buffer; the others are delivered, and are delivered again.
        again: delivered samples that will be delivered again after a restart.
        order: complete samples in the order in which they will be delivered.
        attempts: attempts of training in flight, each with its drop reason and the fields of its tape.
    """
    groups = {number: _Group._make(fields_of) for number, fields_of in fields_of_groups.items()}
    tokens, prompts, lengths = ledgers
    for name in again:
        chains = groups[name.group].samples[name.index][-1]
        generated = sum(s.count for c in chains for s in _Chain._make(c).segments if s.kind is SegmentKind.GENERATED)
        tokens.delivered -= generated
        lengths.trained.add(generated, -1)
    ready = {number: groups[number] for number, _ in order}
    prompts.delivered -= sum(number not in held for number in ready)
    ready |= {number: group for number, group in groups.items() if group.ready and number in held}
    # tokens of attempts in flight are in no ledger yet; in the snapshot they count as observed
    running: dict[int, tuple[Attempt, AttemptTape]] = {}
    for attempt, drop_reason, fields_of_tape in attempts:
        tape = AttemptTape.of_frozen(*fields_of_tape).sure()
        if drop_reason is None and attempt.constrained and not tape.stopped:
            drop_reason = DropReason.CUT_GRAMMAR  # after a restart, the call begins again
        tokens.observe(tape.parsed)
        tokens.drop(tape.after_stop, DropReason.AFTER_STOP)
        tokens.drop(tape.unknown, DropReason.UNKNOWN_WEIGHTS)
        tokens.drop(tape.bare, DropReason.NO_EXTRAS)
        if drop_reason is None:
            running[id(attempt.call)] = attempt, tape
        else:
            tokens.drop(tape.count, drop_reason)
    back = set(again)
    return {
        **head,
        "tokens": without_held(tokens),
        "prompts": without_held(prompts),
        "lengths": lengths.as_dict(),
        "attachments": _attachments_out(groups.values(), back),
        "ready": [_group_out(group, back, running) for group in ready.values()],
        "waiting": [_group_out(group, back, running) for n, group in groups.items() if n in held and not group.ready],
        "order": [list(name) for name in order],
    }


def _attachments_out(groups: Iterable[_Group], back: Collection[SampleId]) -> State:
    """Return every attachment once, by digest, with its bytes if they are in memory and the path of its file if any."""
    placed = [p for group in groups for p in group.prompt.attached]
    for sample in (_Sample._make(fields_of) for group in groups for fields_of in group.samples):
        if _is_saved(sample, back):
            placed += [p for fields_of in sample.chains for p in _Chain._make(fields_of).attached]
    return {
        a.digest: {"kind": a.kind, "size": a.size, "data": a.data, "path": a.path}
        for a in sorted((p.attachment for p in placed), key=lambda a: a.data is not None)
    }


def _is_saved(sample: _Sample, back: Collection[SampleId]) -> bool:
    """Return True unless a sample is settled and will not be delivered again."""
    return sample.state not in SETTLED or sample.id in back


def _attached_out(attached: Iterable[Placed]) -> list[Any]:
    return [[p.attachment.digest, p.at, p.count, list(p.stands)] for p in attached]


def _group_out(group: _Group, back: Collection[SampleId], running: _Running) -> State:
    """Return a group as plain values; ``back`` are delivered samples that will be delivered again after a restart."""
    prompt = group.prompt
    return {
        "id": group.id,
        "epoch": prompt.epoch,
        "position": prompt.position,
        "prompt": _packed([prompt.token_ids], "<i4"),
        "attached": _attached_out(prompt.attached),
        "data": group.data,
        "unchecked": group.unchecked,
        "drawn_under": list(group.drawn_under),
        "bound": group.bound,
        "samples": [
            _sample_out(sample, prompt, running) if _is_saved(sample, back) else {"settled": str(sample.state)}
            for sample in map(_Sample._make, group.samples)
        ],
        "finishers": group.finishers,
        "cohort": [list(pair) for pair in group.cohort],
        **({"cohort_values": _values_out(group.cohort_values)} if group.cohort_values else {}),
    }


def _values_out(values: Extras) -> State:
    """Return values of a cohort as lists of numbers, None for NaN; records keep them, as they keep all rewards."""
    return {name: np.where(np.isnan(table), np.array(None), table).tolist() for name, table in values.items()}


def _sample_out(sample: _Sample, prompt: Prompt, running: _Running) -> State:
    first, *others = map(_Chain._make, sample.chains)
    state = {
        "finished": sample.state in (SampleState.FINISHED, SampleState.LEASED),
        **_chain_out(first, prompt, running),
        "finish": None if sample.finish is None else str(sample.finish),
        "reward": sample.reward,
        "attempts": sample.attempts,
        "resumes": sample.resumes,
        "failures": sample.failures,
        "restarts": sample.restarts,
    }
    if sample.row_rewards:
        state["row_rewards"] = [
            {
                "reward": row.reward, "row": row.row, "parts": dict(row.parts), "note": row.note,
                "per_turn": rows_out(row.per_turn), "per_token": rows_out(row.per_token),
            }
            for row in sample.row_rewards
        ]  # fmt: skip
    if others or first.prompt is not prompt.token_ids:
        state["prompt"] = _packed([first.prompt], "<i4")
        state["chains"] = [
            {"prompt": _packed([chain.prompt], "<i4"), **_chain_out(chain, prompt, running)} for chain in others
        ]
    return state


def _chain_out(chain: _Chain, prompt: Prompt, running: _Running) -> State:
    done, extras = chain.calls, chain.extras
    call = done.pop() if chain.last_call not in (None, CallState.DONE) else None
    asked = repeatable_calls(done, None if call is None else call.start, chain.replay)
    calls, open_start = ([], None) if asked is None else (list(asked.calls), asked.open_start)
    count = len(chain.tokens)
    tape = TokenTape(chain.tokens, chain.logprobs, [s for s in chain.segments if s.start < count])
    tokens, logprobs = [chain.tokens], [chain.logprobs]
    if (found := running.get(id(call))) is not None:
        attempt, came = found
        temperature = attempt.request.sampling.temperature
        tape.add_segments(
            came.spans, attempt.id, attempt.engine, temperature, attempt.over, constrained=attempt.constrained
        )
        tokens += came.chunks[0]
        logprobs += came.chunks[1]
        extras = joined(extras, came.extras) if came.count else extras
        if came.stopped and open_start is not None:
            # the response is complete; only the engine has not ended the request yet
            calls.append(RecordedCall(open_start, count + came.count, FinishReason.STOP))
            open_start = None
    state: State = {
        "tokens": _packed(tokens, "<i4"),
        "logprobs": _packed(logprobs, "<f4"),
        "segments": [
            [
                s.count, s.version.incarnation, s.version.n, CONSTRAINED if s.constrained else str(s.kind),
                s.attempt_id, s.engine, s.temperature,
            ]
            + ([] if s.over is None else [s.over.incarnation, s.over.n])
            for s in tape.segments
        ],
        "calls": [[c.start, c.end, str(c.finish)] for c in calls],
        "open_call": open_start,
    }
    if chain.attached != (() if chain.number else prompt.attached):
        state["attached"] = _attached_out(chain.attached)
    if rows_of(extras):
        state["extras"] = rows_out(extras)
    return state


def rows_out(extras: Extras) -> State:
    """Return rows by name as plain values: [number type, shape, bytes]."""
    little = {name: rows.astype(rows.dtype.newbyteorder("<"), copy=False) for name, rows in extras.items()}
    return {name: [r.dtype.str, list(r.shape), _whole_bytes(r) or r.tobytes() or None] for name, r in little.items()}


def rows_in(state: Sequence[Any]) -> Rows:
    """Return the rows of one name from their plain form; raises ValueError if they are not numbers."""
    dtype, shape, data = state
    kind = np.dtype(_text(dtype))
    if kind.kind not in "iuf" or not (data is None or isinstance(data, bytes)):
        raise ValueError("rows that are no numbers")
    rows = np.frombuffer(data or b"", kind).reshape([count_of(n) for n in shape])
    return rows.astype(kind.newbyteorder("="), copy=False)


SHORT = 4096
"""Bytes up to which the arrays of one chain are copied into one ``bytes`` object."""


def _packed(arrays: Iterable[Any], dtype: str) -> bytes | list[bytes] | None:
    """Return the arrays' content: None if it is empty, and a list if joining it would copy long ``bytes`` objects."""
    little: list[NDArray[Any]] = [np.asarray(array, dtype) for array in arrays]
    if len(little) == 1:
        return _whole_bytes(little[0]) or little[0].tobytes() or None
    if sum(array.nbytes for array in little) <= SHORT:
        return content_of(little) or None
    parts: list[bytes] = []
    small: list[NDArray[Any]] = []
    for array in little:
        if (shared := _whole_bytes(array)) is None:
            small.append(array)
        else:
            parts += [content_of(small), shared]
            small = []
    parts = [part for part in (*parts, content_of(small)) if part]
    return parts if len(parts) > 1 else parts[0]


def _whole_bytes(array: NDArray[Any]) -> bytes | None:
    """Return the ``bytes`` object that has exactly the content of the array; None if there is none."""
    base: object = array.base
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, bytes) and len(base) == array.nbytes and array.flags.c_contiguous else None


def without_held(ledger: Ledger) -> State:
    """Return the counts of a ledger except ``held``, which is counted anew when a state is restored."""
    return {name: count for name, count in ledger.as_dict().items() if name != "held"}


REFUSED = {"n_samples_per_prompt": "n_samples_per_prompt", "run_seed": "seed"}
"""Settings that must not change over a restart, with their names in the configuration."""
PLANNED = ("rollout_batch_size", "max_staleness", "max_age", "max_resumes", "on_stale", "group_quorum", "auto")
"""Settings that determine which held samples can still be delivered in time."""


def settings_out(core: RolloutCore) -> State:
    """Return the settings of ``core`` for a snapshot, with the common properties of its engines."""
    s = core.settings
    values = {f.name: getattr(s, f.name) for f in fields(s) if f.name != "run_id"}
    plain = {name: str(value) if isinstance(value, str) else value for name, value in values.items()}
    plain |= {name: [str(part) for part in value] for name, value in values.items() if isinstance(value, (tuple, list))}
    return {**plain, "max_context": core.engines.max_context, "logprob_kind": core.engines.logprob_kind}


def changed_settings(core: RolloutCore, state: State) -> dict[str, tuple[Any, Any]]:
    """Return the settings that have changed since the snapshot was taken, by name: (saved value, present value)."""
    saved, now = state["settings"], settings_out(core)
    return {name: (saved[name], now[name]) for name in now if name in saved and saved[name] != now[name]}


class Restored(NamedTuple):
    """A snapshot with its groups, whose every number was checked."""

    state: State
    ready: list[Group]
    waiting: list[Group]


def restore(core: RolloutCore, state: State) -> Restored:
    """Put a snapshot into a fresh core, which begins a new incarnation (restart) of the policy version.

    No engine is used before it has confirmed that it loaded that version.

    Finished samples stay finished. The rollout functions of all other samples start again, and the calls that they
    repeat are answered with the saved tokens.

    Raises:
        CheckpointError: the core is not fresh; or the state is not one of april's, is damaged, or cannot be continued
            with these settings or engines.
    """
    require_fresh(core)
    try:
        if not isinstance(state, dict) or not isinstance(state.get("settings"), Mapping):
            raise CheckpointError("this is not a state that april's state_dict() returned")
        for name, (saved, now) in changed_settings(core, state).items():
            if name in REFUSED:
                raise CheckpointError(
                    f"the state was saved with {REFUSED[name]}={saved}, but the configuration has {now}"
                )
        _take_over_work(core, state["settings"])
        attachments = _attachments_in(state.get("attachments", {}))
        ready = [_group_in(core, g, attachments, ready=True) for g in state["ready"]]
        waiting = [_group_in(core, g, attachments, ready=False) for g in state["waiting"]]
        restored = Restored(state, ready, waiting)
        _put(core, restored)
        return restored
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, InvariantError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"the state is damaged: {type(error).__name__}: {reason}") from error


def move(restored: Restored, core: RolloutCore) -> None:
    """Put what :func:`restore` has put into a core into another one like it; do not use the first core any more."""
    require_fresh(core)
    _take_over_work(core, restored.state["settings"])
    _put(core, restored)
    for sample in core.buffer.samples():
        for chain in sample.chains:
            note_layout(core.engines.row_layout, chain.extras, core.settings.extras)


def require_fresh(core: RolloutCore) -> None:
    """Raise CheckpointError for a core that has already drawn prompts, run a step or updated weights."""
    context = core.context
    if context.groups_drawn or context.batches or core.step is not None or core.clock.current != FIRST_VERSION:
        raise CheckpointError("a state must be loaded before the first batch and weight update; create a new scheduler")


def _take_over_work(core: RolloutCore, saved: State) -> None:
    """Take over the amount of work from the state, for settings that april chose itself (``auto``) then and now."""
    s = core.settings
    both = set(s.auto).intersection(map(Work, saved.get("auto", ())))
    over, in_flight = (
        max(1, count_of(saved[name])) if name in both else None for name in (Work.OVER_SAMPLING, Work.IN_FLIGHT)
    )
    if over is not None and s.on_stale is OnStale.FINISH:  # more could not be delivered in time
        over = min(over, (s.delivery_bound + 1) * s.rollout_batch_size)
    quorum = float(saved[Work.QUORUM]) if Work.QUORUM in both else None
    if quorum is not None and not (0.0 < quorum <= 1.0 and quorum_of(quorum, s.n_samples_per_prompt) >= LEAST_QUORUM):
        raise ValueError(f"a quorum of {quorum}")
    core.context.change(
        WorkChanged(
            over_sampling_batch_size=over,
            refill=Refill(saved[Work.REFILL]) if Work.REFILL in both else None,
            max_in_flight=in_flight,
            group_quorum=quorum,
        )
    )


def _put(core: RolloutCore, restored: Restored) -> None:
    """Put groups into a fresh core; they may be in another core that is no longer used."""
    (state, ready, waiting), context = restored, core.context
    branches = {int(i): count_of(n) for i, n in state["branches"].items()}
    clock = VersionClock(version_of(state["version"]), branches)
    for group in (*ready, *waiting):
        for version in (group.drawn_under, *(part.version for s in group.samples for part in s.segments)):
            clock.staleness(version)  # raises ValueError for a version that cannot exist
    core.clock.current, core.clock.branches = clock.restart(clock.current.n), clock.branches
    context.groups_drawn, context.batches = count_of(state["groups_drawn"]), count_of(state["batches"])
    if state["settings"]["max_staleness"] == core.settings.max_staleness:  # a changed setting overrides the saved bound
        core.leases.bound = min(core.leases.bound, count_of(state.get("staleness_bound", core.leases.bound)))
    core.counters.update({str(name): count_of(count) for name, count in state["counters"].items()})
    for group in sorted([*ready, *waiting], key=lambda g: g.id):
        if group.id >= context.groups_drawn or group.id in core.buffer.groups:
            raise ValueError(f"group {group.id} of {context.groups_drawn}")
        core.buffer.add(group)
    _aside_in(core, state)
    for group in [*ready, *waiting]:
        context.event_number += 1  # a number for each group, so that they are delivered in the order of the snapshot
        for sample in group.members:
            if sample.state is not SampleState.FINISHED and core.buffer.in_round(group):
                core.over_sampler.push(sample)
        if group.cohort or group.complete:  # complete but not ready: its filter has been removed since
            if not group.cohort:
                group.fix_cohort()
            if group.ready:
                context.change_group_state(group, GroupState.OPEN, "put into another core")
            context.change_group_state(group, GroupState.READY, "complete since before a restart")
            if core.settings.whole_groups:
                core.monitor.accept(group)
    if not core.settings.whole_groups:
        _count_in(core, state)
    _ledger_in(context.tokens, state["tokens"], sum(s.generated for s in core.buffer.samples()))
    _ledger_in(context.prompts, state["prompts"], len(core.buffer))
    finished = [s for s in core.buffer.samples() if s.state is SampleState.FINISHED]
    context.lengths.restore(state.get("lengths", {}), (s.generated for s in finished))
    for sample in finished if core.settings.has_reward else ():
        sizes = [(len(chain.turns), len(chain.tape)) for chain in sample.row_chains]
        if wrong := wrong_row_rewards(sample.row_rewards, sizes, context.reward_layout):
            raise ValueError(f"the reward of {sample.id} {wrong}")
    core.validate()
    if context.tokens.held and state["settings"].get("logprob_kind", "") not in ("", core.engines.logprob_kind):
        core.engines.logprob_kind = "mixed"  # batches may now contain tokens of both kinds
    _require_rewards(core, state)
    context.without_room = _without_room(core, state)
    _require_in_time(core, state)


def _aside_in(core: RolloutCore, state: State) -> None:
    """Restore which groups wait for a later round; without tail batching they are ordinary groups from now on."""
    if core.settings.tail_batching:
        for number in state.get("long_round", ()):
            core.buffer.groups[count_of(number)].put_aside = True
        for name, begun in (("aside", True), ("unbegun", False)):
            for number in state.get(name, ()):
                core.buffer.put_aside(core.buffer.groups[count_of(number)], begun=begun)


def _count_in(core: RolloutCore, state: State) -> None:
    """Count the deliverable samples in the order of the snapshot; used if batches count samples, not groups."""
    order = {SampleId(*map(count_of, pair)): place for place, pair in enumerate(state.get("order", ()))}
    ready = [sample for sample in core.buffer.samples() if sample.ready]
    for sample in sorted(ready, key=lambda sample: order.get(sample.id, len(order))):
        core.context.event_number += 1
        sample.since = core.context.event_number
        core.monitor.accept(sample)


def _attachments_in(state: State) -> dict[str, Attachment]:
    """Return the attachments of a state by digest, after checking the digests of those whose bytes are in the state."""
    found = {}
    for digest, saved in state.items():
        kind, path, data = _text(saved["kind"]), _text(saved["path"]), saved["data"]
        if data is None:
            if not path:
                raise ValueError(f"the {kind} {digest[:12]} has neither bytes nor a path")
            found[digest] = Attachment(kind, digest, count_of(saved["size"]), path=path)
        elif not isinstance(data, bytes) or (attachment := Attachment.of(kind, data, path)).digest != digest:
            raise ValueError(f"the bytes of the {kind} {digest[:12]} do not match its digest")
        else:
            found[digest] = attachment
    return found


def _attached_in(
    core: RolloutCore, attachments: Mapping[str, Attachment], state: Iterable[Any], tokens: int
) -> tuple[Placed, ...]:
    """Return the attachments of a conversation of ``tokens`` tokens, after checking their places."""
    attached, end = [], 0
    for digest, at, count, stands in state:
        placed = Placed(attachments[digest], count_of(at), count_of(count), tuple(count_of(i) for i in stands))
        if placed.at < end or not placed.count or placed.end > tokens or not placed.stands:
            raise ValueError(f"an attachment at tokens {placed.at} to {placed.end} of {tokens}, after token {end}")
        if placed.attachment.kind not in core.settings.attachments:
            raise CheckpointError(
                f"the state has prompts with {placed.attachment.kind}s, but this scheduler has no processor=; give it "
                "one"
            )
        attached.append(placed)
        end = placed.end
    return tuple(attached)


def _group_in(core: RolloutCore, state: State, attachments: Mapping[str, Attachment], *, ready: bool) -> Group:
    ids = array_of(state["prompt"], "<i4").copy()  # user functions may write into it
    if wrong := wrong_ids(ids, core.engines.vocab_size):
        raise CheckpointError(f"a prompt of the state does not fit these engines: {wrong}")
    attached = _attached_in(core, attachments, state.get("attached", ()), len(ids))
    prompt = Prompt(ids, dict(state["data"]), count_of(state["epoch"]), count_of(state["position"]), attached)
    n, settings = core.settings.n_samples_per_prompt, core.settings
    if not n <= len(state["samples"]) <= MAX_SAMPLES_FACTOR * n:
        raise ValueError(f"a group of {len(state['samples'])} samples")
    bound = count_of(state.get("bound", NO_DEADLINE))
    group = Group(count_of(state["id"]), prompt, 0, version_of(state["drawn_under"]), bound=bound)
    # a filter or a group reward needs the return values of rollout functions, which are not saved
    keeps_finished = ready or not (settings.group_reward or settings.has_filter)
    for index, saved in enumerate(state["samples"]):
        sample_id = SampleId(group.id, index)
        if "settled" in saved:
            group.samples.append(_settled(sample_id, group, saved))
            continue
        sample = restored_sample(core.engines, sample_id, group, saved, keeps_finished=keeps_finished)
        for chain, part in zip(sample.chains, (saved, *saved.get("chains", ())), strict=True):
            if (places := part.get("attached")) is not None:
                chain.attached = _attached_in(core, attachments, places, len(chain.prompt) + len(chain.tape))
            _extras_in(core, chain, part.get("extras", {}))
        group.samples.append(sample)
        longest = max(len(chain.tape) for chain in sample.chains)
        if longest > settings.max_response_len:
            raise CheckpointError(
                f"the state holds {longest} tokens of {sample.id}, but the configuration has "
                f"max_response_len={settings.max_response_len}"
            )
    _completed(core.settings, group, state, ready=ready)
    return group


def _settled(sample_id: SampleId, group: Group, state: State) -> Sample:
    sample = Sample(sample_id, group, SampleState(state["settled"]))
    if sample.state not in SETTLED:
        raise ValueError(f"{sample_id} is {sample.state}")
    group.delivered += sample.state is SampleState.LEASED
    return sample


def _completed(settings: CoreSettings, group: Group, state: State, *, ready: bool) -> None:
    """Restore a group's finished samples, their order, and the rewards from which its baselines are computed."""
    members = group.members
    group.held = len(members)
    if not group.held:
        raise ValueError(f"group {group.id} is settled")
    finished = {s.id.index for s in members if s.state is SampleState.FINISHED}
    if settings.whole_groups and (group.delivered or (ready and len(finished) < group.held)):
        both = "" if settings.partial_rollout else "partial_rollout: true and "
        raise CheckpointError(
            f"group {group.id} of the state is delivered in parts, but the configuration delivers whole groups; set "
            f"{both}group_quorum below 1, as {'they were' if both else 'it was'}"
        )
    group.quorum = settings.quorum(group.held + group.delivered)
    order = [count_of(i) for i in state.get("finishers", sorted(finished))]
    if len(set(order)) != len(order) or not finished <= set(order):
        raise ValueError(f"finishers {order} of group {group.id}, of which {sorted(finished)} are finished")
    group.finishers = [i for i in order if i in finished or group.samples[i].state is SampleState.LEASED]
    group.unfinished = group.held - len(finished)
    if ready:
        rewards = [[i, group.samples[i].reward] for i in group.finishers]
        cohort = [(count_of(i), float(reward)) for i, reward in state.get("cohort", rewards)]
        known = {i for i, _ in cohort}
        if not cohort or len(known) != len(cohort) or max(known) >= len(group.samples):
            raise ValueError(f"a cohort of {sorted(known)} in group {group.id}")
        if wrong := next(filter(None, (wrong_reward(reward) for _, reward in cohort)), None):
            raise ValueError(f"a reward of group {group.id} is {wrong}")
        group.cohort = tuple((i, float32_reward(reward)) for i, reward in cohort)
        group.cohort_values = {n: np.array(v, np.float32) for n, v in state.get("cohort_values", {}).items()}
        if any(len(values) != len(cohort) or values.ndim != 3 for values in group.cohort_values.values()):
            raise ValueError(f"rewards of a cohort of {len(cohort)} in group {group.id} have other numbers of values")


def _ledger_in(ledger: Ledger, state: State, held: int) -> None:
    ledger.delivered, ledger.held = count_of(state["delivered"]), held
    ledger.dropped.update({DropReason(reason): count_of(count) for reason, count in state["dropped"].items()})
    ledger.observed = count_of(state["observed"])
    if not ledger.balanced:
        raise ValueError(f"its ledger does not balance: {ledger.as_dict()}")


# -------------------------------------------------------------------- changed settings and engines


def _require_rewards(core: RolloutCore, state: State) -> None:
    """Refuse a state with finished samples if a reward function was added or removed since it was saved."""
    saved, now = state["settings"].get("has_reward", core.settings.has_reward), core.settings.has_reward
    finished = sum(s.state is SampleState.FINISHED for s in core.buffer.samples())
    if saved != now and finished:
        had, has = ("a", "none") if saved else ("no", "one")
        raise CheckpointError(
            f"the state was saved with {had} reward function and holds {finished} finished samples; this scheduler has "
            f"{has}, so their rewards would differ in meaning from the others"
        )


def _without_room(core: RolloutCore, state: State) -> list[Sample]:
    """Return the samples that no longer fit a smaller engine context; with on_long_prompt: error, refuse the state."""
    before, now = state["settings"].get("max_context", 0), core.engines.max_context
    if before <= now:
        return []

    lengths = {
        sample: length
        for sample in core.buffer.samples()
        if sample.state is not SampleState.FINISHED
        and (length := max(len(chain.prompt) + len(chain.tape) for chain in sample.chains)) >= now
    }
    if lengths and core.settings.on_long_prompt is OnLongPrompt.ERROR:
        groups, longest = {sample.id.group for sample in lengths}, max(lengths.values())
        raise CheckpointError(
            f"{len(groups)} unfinished groups of the state do not fit in the engines' context of {now} tokens, which "
            f"was {before} (the longest prompt and response have {longest} tokens); give the engines a larger context, "
            "or set on_long_prompt: skip, which drops these groups"
        )
    return list(lengths)


def _require_in_time(core: RolloutCore, state: State) -> None:
    """Refuse a state if, with on_stale: finish, changed settings would make held samples too old."""
    settings, saved = core.settings, state["settings"]
    changed = {name: was for name, (was, _) in changed_settings(core, state).items() if name in PLANNED}
    if settings.on_stale is not OnStale.FINISH or not changed:
        return
    late = _late(core, settings)
    if not late or (saved["on_stale"] == OnStale.FINISH and late <= _late_before(core, changed)):
        return
    was = ", ".join(f"{name}={value}" for name, value in changed.items())
    slacks = _slacks(core, settings)
    batch, what = settings.units_per_group, "groups" if settings.whole_groups else "samples"
    whole_now = settings.whole_groups and not changed.keys().isdisjoint(("group_quorum", "auto"))
    enough = max(-(-count // (slack + 1) // batch) for count, slack in enumerate(slacks, 1)) if slacks[0] >= 0 else 0
    raises = f"rollout_batch_size to at least {enough}, or " if enough else ""
    raise CheckpointError(
        f"{late} of the {core.buffer.units} {what} of the state could not be delivered in time with "
        f"rollout_batch_size={settings.rollout_batch_size}, max_staleness={settings.max_staleness} and "
        f"max_age={settings.max_age}, as on_stale: finish requires (the state was saved with {was}); set "
        f"{raises}{'group_quorum' if whole_now else 'max_staleness'} as it was, or on_stale to restart, drop or mask"
    )


def _late_before(core: RolloutCore, changed: Mapping[str, Any]) -> int:
    """Return the number of units that were already late under the saved settings; these are no reason to refuse."""
    auto = {"auto": tuple(map(Work, changed["auto"]))} if "auto" in changed else {}
    before = replace(core.settings, **{**changed, **auto})
    return _late(core, before) * max(1, core.settings.units_per_group // before.units_per_group)


def _late(core: RolloutCore, settings: CoreSettings) -> int:
    """Return the number of held units that cannot be delivered in time in any order (see the completion monitor)."""
    target = settings.target
    late = (count - max(0, slack + 1) * target for count, slack in enumerate(_slacks(core, settings), 1))
    return max(0, max(late, default=0))


def _slacks(core: RolloutCore, settings: CoreSettings) -> list[int]:
    buffer = PartialBuffer(settings, core.leases)
    buffer.groups = core.buffer.groups
    gone = set(core.context.without_room)
    return sorted(slack for unit, slack in buffer.slacks() if gone.isdisjoint(_goes_with(unit)))


def _goes_with(unit: Unit) -> Iterable[Sample]:
    """Return the samples that are dropped together with this unit: its whole group, unless the group is READY."""
    group = unit if isinstance(unit, Group) else unit.group
    return unit.members if group.ready else group.members


ID_LENGTH = 32
"""Number of hexadecimal digits in an attempt's id."""


def restored_sample(
    engines: EngineTable, sample_id: SampleId, group: Group, state: State, *, keeps_finished: bool
) -> Sample:
    """Restore a sample: as finished if it was finished and ``keeps_finished``, otherwise as new with calls to replay.

    Raises:
        CheckpointError: the sample has tokens outside of these engines' vocabulary.
        ValueError, LookupError, TypeError: the saved sample is impossible.
    """
    if type(state["finished"]) is not bool:
        raise ValueError(f"{sample_id}: finished is {state['finished']!r}")
    keeps = state["finished"] and keeps_finished
    sample = Sample(sample_id, group, SampleState.FINISHED if keeps else SampleState.NEW)
    sample.attempts, sample.failures = count_of(state["attempts"]), count_of(state["failures"])
    sample.resumes, sample.restarts = count_of(state["resumes"]), count_of(state["restarts"])
    if "prompt" in state:
        sample.chains[0].prompt = array_of(state["prompt"], "<i4")
    others = enumerate(state.get("chains", ()), 1)
    sample.chains += tuple(Chain(sample, i, array_of(c["prompt"], "<i4")) for i, c in others)
    for chain, saved in zip(sample.chains, (state, *state.get("chains", ())), strict=True):
        _chain_in(engines, chain, saved)
    if wrong := _wrong_counts(sample):
        raise ValueError(f"{sample.id}: {wrong}")
    if state["finished"]:
        reward = float(state["reward"])
        if wrong := wrong_reward(reward):
            raise ValueError(f"{sample.id}: its reward is {wrong}")
        replays = [chain.replay for chain in sample.chains if chain.replay is not None]
        finish = FinishReason(state["finish"])
        if any(r.open_start is not None for r in replays) or finish not in {r.calls[-1].finish for r in replays}:
            raise ValueError(f"{sample.id}: it is finished, but its last call is not")
        if keeps:
            sample.finish, sample.reward = finish, float32_reward(reward)
            sample.row_rewards = tuple(
                RowReward(
                    float32_reward(own["reward"]), None if own["row"] is None else count_of(own["row"]),
                    dict(own["parts"]), _rows_by_name(own["per_turn"]), _rows_by_name(own["per_token"]), own["note"],
                )
                for own in state.get("row_rewards", ())
            )  # fmt: skip
    return sample


def _rows_by_name(state: State) -> Extras:
    return {name: rows_in(rows) for name, rows in state.items()}


def _chain_in(engines: EngineTable, chain: Chain, state: State) -> None:
    """Restore the tokens of one chain of a sample, and the calls that its function will repeat."""
    name = chain.sample.id
    _tape_in(chain.tape, state)
    calls = [
        RecordedCall(count_of(start), count_of(end), FinishReason(finish)) for start, end, finish in state["calls"]
    ]
    open_call = None if state["open_call"] is None else count_of(state["open_call"])
    wrong = (
        _wrong_tape(chain.tape) or _wrong_calls(chain.tape, calls, open_call) or _wrong_ends(chain.tape, calls, engines)
    )
    if wrong is not None:
        raise ValueError(f"{name}: {wrong}")
    if "prompt" in state and not len(chain.prompt):  # the group's own prompt may be empty where only workers know it
        raise ValueError(f"{name}: a conversation begins without tokens")
    for ids in (chain.prompt, chain.tape.tokens):
        if wrong := wrong_ids(ids, engines.vocab_size):
            raise CheckpointError(f"{name} of the state does not fit these engines: {wrong}")
    if calls or open_call is not None:
        chain.replay = Replay(deque(calls), open_call)


def _extras_in(core: RolloutCore, chain: Chain, state: State) -> None:
    """Restore the extras that the settings require now; missing extras are an error, as they cannot be made again."""
    extras = {}
    for name in core.settings.extras:
        if name not in state:
            if chain.rows_due:
                raise CheckpointError(
                    f"the state holds tokens of {chain.sample.id} without {name}, which the setting extras requires "
                    f"for every token; leave {name} out of extras until a new run, or begin without the state"
                )
            continue
        rows = rows_in(state[name])
        if wrong := wrong_rows({name: rows}, (name,), chain.rows_due, core.engines.row_layout):
            raise ValueError(f"{chain.sample.id} has {wrong}")
        extras[name] = rows
    note_layout(core.engines.row_layout, extras, core.settings.extras)
    chain.extras = extras


def _tape_in(tape: TokenTape, state: State) -> None:
    start = 0
    for count, incarnation, n, kind, attempt_id, engine, temperature, *older in state["segments"]:
        constrained = kind == CONSTRAINED
        origin = SegmentKind.GENERATED if constrained else SegmentKind(kind)
        where = (origin, _text(attempt_id), _text(engine), float(temperature))
        over = version_of(older) if older else None
        tape.segments.append(Segment(start, count_of(count), version_of((incarnation, n)), *where, over, constrained))
        start += count
    for name in ("tokens", "logprobs"):
        if isinstance(state[name], (list, tuple)):
            state[name] = b"".join(state[name])  # in the state, too, which need not hold the pieces any longer
    tape.tokens, tape.logprobs = array_of(state["tokens"], "<i4"), array_of(state["logprobs"], "<f4")


def _wrong_tape(tape: TokenTape) -> str | None:
    if wrong := tape.check() or wrong_logprobs(tape.logprobs):
        return wrong
    for s in tape.segments:
        if not (math.isfinite(s.temperature) and s.temperature >= 0):
            return f"a temperature of {s.temperature}"
        if s.kind is SegmentKind.ENVIRONMENT:
            if tape.logprobs[s.start : s.start + s.count].any():
                return "tokens of the environment have log-probabilities"
        elif s.over is not None and not s.over < s.version:
            return f"tokens of version {s.version} over keys of version {s.over}"
        elif len(s.attempt_id) != ID_LENGTH or not set(s.attempt_id) <= set(string.hexdigits) or not s.engine:
            return f"tokens of attempt {s.attempt_id[:40]!r} on engine {s.engine[:40]!r}"
    return None


def _wrong_calls(tape: TokenTape, calls: list[RecordedCall], open_call: int | None) -> str | None:
    """Describe calls that overlap, or that do not cover exactly the generated tokens; None if they are consistent."""
    spans = [(call.start, call.end) for call in calls] + ([] if open_call is None else [(open_call, len(tape))])
    asked = np.zeros(len(tape), np.uint8)
    at = 0
    for start, end in spans:
        if not at <= start <= end <= len(tape):
            return f"a call of tokens {start} to {end} after {at}, of {len(tape)}"
        asked[start:end] = 1
        at = end
    if not np.array_equal(asked, tape.loss_mask()):
        return "it has tokens that no call asked for"
    return None


def _wrong_ends(tape: TokenTape, calls: list[RecordedCall], engines: EngineTable) -> str | None:
    """Describe tokens of a call that come after an end-of-sequence token; None if there are no such tokens."""
    ends = {call.end for call in calls} | {len(tape)}
    for s in tape.segments:
        stops = engines.ends_of(s.engine)
        if s.kind is SegmentKind.GENERATED and stops:
            found = s.start + np.flatnonzero(np.isin(tape.tokens[s.start : s.start + s.count], list(stops)))
            for position in found.tolist():
                if position + 1 not in ends:
                    return f"tokens after the end-of-sequence token at {position}"
    return None


def _wrong_counts(sample: Sample) -> str | None:
    ids = {s.attempt_id for s in sample.segments if s.kind is SegmentKind.GENERATED}
    if len(ids) > sample.attempts or sample.resumes > sample.attempts:
        return f"{len(ids)} attempts and {sample.resumes} resumptions of {sample.attempts} attempts"
    return None


# -------------------------------------------------------------------- plain forms


def array_of(data: bytes | None, dtype: str) -> Any:
    """Return the array with these little-endian bytes, read-only and over the same memory; None gives an empty one."""
    if data is not None and not isinstance(data, bytes):
        raise TypeError(f"expected bytes, found a {type(data).__name__}")
    return np.frombuffer(data or b"", dtype).astype(dtype[1:], copy=False)


def version_of(pair: Any) -> PolicyVersion:
    """Return the policy version of a pair (incarnation, n), after checking it."""
    incarnation, n = pair
    return PolicyVersion(count_of(incarnation), count_of(n))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, found {value!r}")
    return value
