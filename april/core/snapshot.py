"""Saves the state of a core as plain numbers, strings, bytes, lists and dicts, and restores it.

Invariant: a restored core holds every token and every prompt that the saved core held, including those of requests in
flight and of untrained batches. Samples that were delivered and trained are not in a snapshot.

The types of a snapshot are in ``saved_state``. Before ``restore``, the state's checksum is verified (see
``state_checksum``). ``restore`` refuses a state whose samples cannot be continued under the present settings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple

from april.core.attachments import Attachment, Placed, joined, note_layout, rows_of, wrong_rows
from april.core.events import WorkChanged
from april.core.ledger import Ledger
from april.core.partial_buffer import PartialBuffer
from april.core.rollout_core import RolloutCore
from april.core.row_rewards import wrong_row_rewards
from april.core.saved_state import (
    Logprobs,
    SavedChain,
    SavedCore,
    SavedGroup,
    SavedSample,
    Tokens,
    bare,
    from_state,
    to_state,
    values_in,
    values_out,
)
from april.core.settings import CoreSettings
from april.core.state_checksum import State, data_out
from april.core.tape import GENERATED, AttemptTape, TokenTape, frozen_fields
from april.core.types import (
    SETTLED,
    Attempt,
    Chain,
    DropReason,
    FinishReason,
    Group,
    GroupState,
    OnStale,
    Prompt,
    RecordedCall,
    Replay,
    Sample,
    SampleId,
    SampleState,
    Work,
)
from april.core.value_checks import wrong_ids
from april.core.versions import FIRST_VERSION
from april.core.whole_numbers import whole_number
from april.errors import CheckpointError, InvariantError

# -------------------------------------------------------------------- saving


def take(core: RolloutCore, trained_through: int | None) -> State:
    """Return the state of ``core`` as a snapshot, at any time and without changing the core.

    ``trained_through`` is the id of the last batch that the trainer's checkpoint was trained on; -1 if there is none,
    None for the last committed batch. Later batches that were delivered will be delivered again. Each uncommitted batch
    that the checkpoint was trained on adds one weight update to the saved version.

    Raises CheckpointError if there is no such batch, or a later batch is already committed.
    """
    return Freezer(core).finish(trained_through)()


SAMPLES_AT_ONCE = 500
"""Number of samples that one call of :meth:`Freezer.advance` collects, in a few milliseconds."""
MOST_ROUNDS = 5
"""Maximum number of passes of :meth:`Freezer.advance`; the first is over all groups, later ones over changed groups."""


class Freezer:
    """Collects references to everything that a snapshot needs: in parts while the core goes on, then the rest at once.

    References are enough, since arrays are never written into once they are in the core. A group that changes after it
    was collected is collected again, in :meth:`finish` at the latest.
    """

    def __init__(self, core: RolloutCore, at_once: int = SAMPLES_AT_ONCE) -> None:
        self._core, self._at_once = core, at_once
        self._changed: set[int] = set()
        """Numbers of the groups that have changed since they were collected; the core adds to this set."""
        self._groups: dict[int, _Frozen] = {}
        self._left = deque(self._present)
        self._rounds = 1
        core.context.changed.append(self._changed)

    @property
    def _present(self) -> list[Group]:
        """All groups that the core holds, and those of delivered batches that are not committed."""
        leased = {s.id.group: s.group for batch in self._core.leased.values() for s in batch}
        return list((self._core.buffer.groups | leased).values())

    def advance(self) -> bool:
        """Collect some of the groups; return False once :meth:`finish` can collect the rest."""
        left, samples = self._left, 0
        while left and samples < self._at_once:
            group = left.popleft()
            self._changed.discard(group.id)
            self._groups[group.id] = _frozen(group)
            samples += len(group.samples)
        if not left and self._rounds < MOST_ROUNDS:
            missing = [group for group in self._present if group.id in self._changed or group.id not in self._groups]
            if sum(len(group.samples) for group in missing) > self._at_once:
                self._rounds += 1
                left.extend(missing)
        return bool(left)

    def close(self) -> None:
        changed = self._core.context.changed
        changed[:] = [numbers for numbers in changed if numbers is not self._changed]

    def finish(self, trained_through: int | None) -> Callable[[], State]:
        """Collect the rest; return a function that builds the state of this moment, even if the core goes on meanwhile.

        Call the returned function once, in any thread. Arguments and errors are those of :func:`take`.
        """
        self.close()
        core, context = self._core, self._core.context
        # batches may be committed in any order
        newest_committed = next((b for b in range(context.batches - 1, -1, -1) if b not in core.leased), -1)
        last = newest_committed if trained_through is None else whole_number(trained_through)
        if last is None or not -1 <= last < context.batches:
            newest = context.batches - 1
            there = f"the batches delivered so far are 0 to {newest}" if newest >= 0 else "no batch was delivered yet"
            raise CheckpointError(f"trained_through={trained_through!r} must be the id of a batch, or -1; {there}")
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
        # the core does not yet count the weight updates for uncommitted batches that the checkpoint was trained on
        current = current._replace(n=current.n + len(core.leased) - len(untrained))
        saved = SavedCore(
            settings=core.settings,
            max_context=core.engines.max_context,
            logprob_kind=core.engines.logprob_kind,
            version=current,
            branches=dict(core.clock.branches),
            groups_drawn=context.groups_drawn,
            batches=last + 1,
            staleness_bound=core.leases.bound,
            counters=dict(core.counters),
            aside=list(core.buffer.aside),
            unbegun=list(core.buffer.unbegun),
            long_round=[g.id for g in groups.values() if g.put_aside and g.id not in core.buffer.aside],
            tokens=deepcopy(context.tokens),
            prompts=deepcopy(context.prompts),
            lengths=deepcopy(context.lengths),
            attachments=[],
            ready=[],
            waiting=[],
            order=[sample.id for sample in ready],
        )
        collected, self._groups, changed = self._groups, {}, self._changed
        frozen = {
            number: collected[number] if number in collected and number not in changed else _frozen(group)
            for number, group in groups.items()
        }
        # attempts without tokens add nothing; engines that do not stream return all tokens at the end of a request
        attempts = [
            (a, a.drop_reason, frozen_fields(a.tape))
            for a in core.attempts.values() if a.tape.count or a.tape.parsed  # parsed takes longer
        ]  # fmt: skip
        return partial(_state_of, saved, set(core.buffer.groups), [sample.id for sample in again], frozen, attempts)


class _Frozen(NamedTuple):
    """A group as it was when it was collected; it shares the core's arrays and attachments."""

    ready: bool
    prompt: Prompt
    group: SavedGroup


def _frozen(group: Group) -> _Frozen:
    prompt = group.prompt
    data, unchecked = data_out(prompt.data)
    samples = [
        SavedSample(
            settled=sample.state if sample.state in SETTLED else None,
            finished=sample.state in (SampleState.FINISHED, SampleState.LEASED),
            chains=[_chain_out(chain, prompt) for chain in sample.chains],
            finish=sample.finish,
            reward=sample.reward,
            row_rewards=sample.row_rewards,
            attempts=sample.attempts,
            resumes=sample.resumes,
            failures=sample.failures,
            restarts=sample.restarts,
        )
        for sample in group.samples
    ]
    saved = SavedGroup(
        id=group.id,
        epoch=prompt.epoch,
        position=prompt.position,
        prompt=Tokens(prompt.token_ids),
        attached=prompt.attached,
        data=data,
        unchecked=unchecked,
        drawn_under=group.drawn_under,
        bound=group.bound,
        samples=samples,
        finishers=group.finishers[:],
        cohort=group.cohort,
        cohort_values=group.cohort_values,
    )
    return _Frozen(group.ready, prompt, saved)


def _chain_out(chain: Chain, prompt: Prompt) -> SavedChain:
    asked, tape = chain.repeatable_calls, chain.tape
    return SavedChain(
        number=chain.number,
        prompt=None if chain.prompt is prompt.token_ids else Tokens(chain.prompt),
        tokens=Tokens(tape.tokens),
        logprobs=Logprobs(tape.logprobs),
        segments=tape.segments[:],
        calls=[] if asked is None else list(asked.calls),
        open_call=None if asked is None else asked.open_start,
        attached=None if chain.attached == prompt.attached else chain.attached,
        extras=chain.extras,
    )


def _state_of(
    saved: SavedCore, held: Collection[int], again: Sequence[SampleId], groups: dict[int, _Frozen],
    attempts: Iterable[tuple[Attempt, DropReason | None, tuple[Any, ...]]],
) -> State:  # fmt: skip
    """Return the snapshot of what a :class:`Freezer` has collected.

    ``saved`` is the saved core without groups and attachments, ``groups`` all groups by number (emptied here), and
    ``held`` has the numbers of those in the buffer; the others have only samples in ``again``, which will be delivered
    once more.
    """
    for number, index in again:
        sample = groups[number].group.samples[index]
        sample.settled = None
        generated = sum(s.count for chain in sample.chains for s in chain.segments if s.kind is GENERATED)
        saved.tokens.delivered -= generated
        saved.lengths.trained.add(generated, -1)
    first = dict.fromkeys(number for number, _ in saved.order)
    saved.prompts.delivered -= sum(number not in held for number in first)
    # tokens of attempts in flight are in no ledger yet; in the snapshot they count as observed
    for attempt, drop_reason, fields_of_tape in attempts:
        tape = AttemptTape.of_frozen(*fields_of_tape).sure()
        if drop_reason is None and attempt.constrained and not tape.stopped:
            drop_reason = DropReason.CUT_GRAMMAR  # engines cannot continue within a grammar: the call begins again
        saved.tokens.observe(tape.parsed)
        saved.tokens.drop(tape.after_stop, DropReason.AFTER_STOP)
        saved.tokens.drop(tape.unknown, DropReason.UNKNOWN_WEIGHTS)
        saved.tokens.drop(tape.bare, DropReason.NO_EXTRAS)
        if drop_reason is None:
            number, index = attempt.sample.id
            _add_attempt(groups[number].group.samples[index], attempt, tape)
        else:
            saved.tokens.drop(tape.count, drop_reason)
    attachments: dict[str, Attachment] = {}
    for _, _, group in groups.values():
        _detach(group, attachments)
        group.cohort_values = values_out(group.cohort_values)
    saved.attachments = list(attachments.values())
    others = [number for number in groups if number in held and number not in first]
    saved.ready = [groups[n].group for n in (*first, *(n for n in others if groups[n].ready))]
    saved.waiting = [groups[n].group for n in others if not groups[n].ready]
    state = to_state(saved)
    groups.clear()
    for done in (saved.ready, saved.waiting):
        while done:
            done.pop()  # one by one, because no other thread runs while Python frees thousands of groups at once
    return state


def _add_attempt(sample: SavedSample, attempt: Attempt, came: AttemptTape) -> None:
    """Add the tokens of an attempt in flight to its conversation."""
    chain = next(c for c in sample.chains if c.number == attempt.call.chain.number)
    count, (tokens, logprobs) = len(chain.tokens), came.chunks
    tape = TokenTape(chain.tokens.whole, chain.logprobs.whole, chain.segments)
    tape.add_segments(
        came.spans, attempt.id, attempt.engine, attempt.request.sampling.temperature, attempt.over,
        constrained=attempt.constrained,
    )  # fmt: skip
    chain.tokens.arrays += tokens
    chain.logprobs.arrays += logprobs
    if came.count:
        chain.extras = joined(chain.extras, came.extras)
    if came.stopped and chain.open_call is not None:
        # the response is complete; only the engine has not ended the request yet
        chain.calls.append(RecordedCall(chain.open_call, count + came.count, FinishReason.STOP))
        chain.open_call = None


def _detach(group: SavedGroup, attachments: dict[str, Attachment]) -> None:
    """Remove what delivered and dropped samples held, and move attachments' contents to ``attachments``, by digest."""
    for sample in group.samples:
        if sample.settled is not None:
            sample.chains, sample.row_rewards = [], ()
    chains = [chain for sample in group.samples for chain in sample.chains if chain.attached]
    for placed in (*group.attached, *(p for chain in chains for p in chain.attached or ())):
        known = attachments.get(placed.attachment.digest)
        if known is None or known.data is None:  # prefer an attachment with bytes to a file of the same content
            attachments[placed.attachment.digest] = placed.attachment
    group.attached = bare(group.attached)
    for chain in chains:
        chain.attached = bare(chain.attached or ())


# -------------------------------------------------------------------- settings


REFUSED = {"n_samples_per_prompt": "n_samples_per_prompt", "run_seed": "seed"}
"""Settings that must not change over a restart, with their names in the configuration."""


def changed_settings(core: RolloutCore, saved: SavedCore) -> dict[str, tuple[Any, Any]]:
    """Return the settings that have changed since the snapshot was taken, by name: (saved value, present value)."""
    names = [f.name for f in fields(core.settings) if f.name != "run_id"]
    pairs = {name: (getattr(saved.settings, name), getattr(core.settings, name)) for name in names}
    pairs |= {name: (getattr(saved, name), getattr(core.engines, name)) for name in ("max_context", "logprob_kind")}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


# -------------------------------------------------------------------- restoring


class Restored(NamedTuple):
    """A snapshot with the groups that were made from it."""

    saved: SavedCore
    ready: list[Group]
    waiting: list[Group]


def restore(core: RolloutCore, state: State | SavedCore) -> Restored:
    """Put a snapshot into a fresh core, whose policy version becomes the saved one with ``incarnation`` raised by 1.

    No engine is used before it has confirmed that it has the weights of this version.

    Finished samples stay finished. The rollout functions of all other samples start again, and the calls that they
    repeat are answered with the saved tokens.

    Raises:
        CheckpointError: the core is not fresh, or the state is not a state of april, is damaged, or cannot be continued
            with these settings or engines.
    """
    require_fresh(core)
    try:
        saved = state if isinstance(state, SavedCore) else from_state(state, SavedCore)
        for name, (was, now) in changed_settings(core, saved).items():
            if name in REFUSED:
                raise CheckpointError(
                    f"the state was saved with {REFUSED[name]}={was}, but the configuration has {now}"
                )
        _take_over_work(core, saved.settings)
        attachments = {attachment.digest: attachment for attachment in saved.attachments}
        ready = [_group_in(core, group, attachments, ready=True) for group in saved.ready]
        waiting = [_group_in(core, group, attachments, ready=False) for group in saved.waiting]
        restored = Restored(saved, ready, waiting)
        _put(core, restored)
        return restored
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, InvariantError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"the state is damaged: {type(error).__name__}: {reason}") from error


def move(restored: Restored, core: RolloutCore) -> None:
    """Put a snapshot into another fresh core. The core into which :func:`restore` put it must not be used again."""
    require_fresh(core)
    _take_over_work(core, restored.saved.settings)
    _put(core, restored)
    for sample in core.buffer.samples():
        for chain in sample.chains:
            note_layout(core.engines.row_layout, chain.extras, core.settings.extras)


def require_fresh(core: RolloutCore) -> None:
    """Raise CheckpointError for a core that has already drawn prompts, run a step or updated weights."""
    context = core.context
    if context.groups_drawn or context.batches or core.step is not None or core.clock.current != FIRST_VERSION:
        raise CheckpointError("a state must be loaded before the first batch and weight update; create a new scheduler")


def _take_over_work(core: RolloutCore, saved: CoreSettings) -> None:
    """Use the saved values of settings that april chooses itself (``auto``) both in the saved run and in this one."""
    s = core.settings
    work = {str(name): getattr(saved, name) for name in set(s.auto).intersection(saved.auto)}
    if s.on_stale is OnStale.FINISH and (over := work.get(Work.OVER_SAMPLING)) is not None:
        # more groups could not be delivered in time
        work[Work.OVER_SAMPLING] = min(over, (s.delivery_bound + 1) * s.rollout_batch_size)
    core.context.change(WorkChanged(**work))


def _put(core: RolloutCore, restored: Restored) -> None:
    """Put the groups of a snapshot into a fresh core; an earlier core that is no longer used may have them, too."""
    (saved, ready, waiting), context = restored, core.context
    core.clock.current, core.clock.branches = saved.version, dict(saved.branches)
    core.clock.restart(saved.version.n)
    context.groups_drawn, context.batches = saved.groups_drawn, saved.batches
    if saved.settings.max_staleness == core.settings.max_staleness:  # a changed setting overrides the saved bound
        core.leases.bound = min(core.leases.bound, saved.staleness_bound)
    core.counters.update(saved.counters)
    for group in sorted([*ready, *waiting], key=lambda g: g.id):
        if group.id >= context.groups_drawn or group.id in core.buffer.groups:
            raise ValueError(f"group {group.id} of {context.groups_drawn}")
        core.buffer.add(group)
    if core.settings.tail_batching:  # otherwise groups that wait for a later round are ordinary groups from now on
        for number in saved.long_round:
            core.buffer.groups[number].put_aside = True
        for numbers, begun in ((saved.aside, True), (saved.unbegun, False)):
            for number in numbers:
                core.buffer.put_aside(core.buffer.groups[number], begun=begun)
    for group in [*ready, *waiting]:
        context.event_number += 1  # groups are delivered in the order of the events at which they became READY
        for sample in group.members:
            if sample.state is not SampleState.FINISHED and core.buffer.in_round(group):
                core.over_sampler.push(sample)
        if group.cohort or group.complete:  # without a cohort, a changed setting has made the group complete
            if not group.cohort:
                group.fix_cohort()
            if group.ready:
                context.change_group_state(group, GroupState.OPEN, "put into another core")
            context.change_group_state(group, GroupState.READY, "complete since before a restart")
            if core.settings.whole_groups:
                core.monitor.accept(group)
    if not core.settings.whole_groups:
        _accept_ready(core, saved.order)
    _ledger_in(context.tokens, saved.tokens, sum(s.generated for s in core.buffer.samples()))
    _ledger_in(context.prompts, saved.prompts, len(core.buffer))
    finished = [s for s in core.buffer.samples() if s.state is SampleState.FINISHED]
    context.lengths.restore(saved.lengths, (s.generated for s in finished))
    for sample in finished if core.settings.has_reward else ():
        sizes = [(len(chain.turns), len(chain.tape)) for chain in sample.row_chains]
        if wrong := wrong_row_rewards(sample.row_rewards, sizes, context.reward_layout):
            raise ValueError(f"the reward of {sample.id} {wrong}")
    core.validate()
    if context.tokens.held and saved.logprob_kind != core.engines.logprob_kind:
        core.engines.logprob_kind = "mixed"  # batches may now contain log-probabilities of both kinds
    _require_rewards(core, had_reward=saved.settings.has_reward)
    _require_room(core, saved.max_context)
    segments = (s for sample in core.buffer.samples() for chain in sample.chains for s in chain.tape.segments)
    for version in {group.drawn_under for group in core.buffer}.union(s.version for s in segments):
        core.clock.staleness(version)  # raises an error for a version that cannot exist
    _require_in_time(core, saved.settings)


def _accept_ready(core: RolloutCore, saved: Sequence[SampleId]) -> None:
    """Count the deliverable samples towards a batch in the order of the snapshot; used with a quorum below 1."""
    order = {name: place for place, name in enumerate(saved)}
    ready = [sample for sample in core.buffer.samples() if sample.ready]
    for sample in sorted(ready, key=lambda sample: order.get(sample.id, len(order))):
        core.context.event_number += 1
        sample.since = core.context.event_number
        core.monitor.accept(sample)


def _ledger_in(ledger: Ledger, saved: Ledger, held: int) -> None:
    ledger.observed, ledger.delivered, ledger.held = saved.observed, saved.delivered, held
    ledger.dropped.update(+saved.dropped)  # without counts of 0


def _attached_in(
    core: RolloutCore, attachments: Mapping[str, Attachment], attached: Iterable[Placed]
) -> tuple[Placed, ...]:
    """Return the attachments of a conversation with their contents."""
    whole = tuple(replace(placed, attachment=attachments[placed.attachment.digest]) for placed in attached)
    if unknown := {placed.attachment.kind for placed in whole} - set(core.settings.attachments):
        raise CheckpointError(
            f"the state has prompts with {min(unknown)}s, but this scheduler has no processor=; give it one"
        )
    return whole


def _group_in(core: RolloutCore, saved: SavedGroup, attachments: Mapping[str, Attachment], *, ready: bool) -> Group:
    ids = saved.prompt.whole.copy()  # user functions may write into it
    if wrong := wrong_ids(ids, core.engines.vocab_size):
        raise CheckpointError(f"a prompt of the state does not fit these engines: {wrong}")
    prompt = Prompt(
        ids, dict(saved.data), saved.epoch, saved.position, _attached_in(core, attachments, saved.attached)
    )
    group = Group(saved.id, prompt, 0, saved.drawn_under, bound=saved.bound)
    # a filter or a group reward needs the return values of rollout functions, which are not saved
    keeps_finished = ready or not (core.settings.group_reward or core.settings.has_filter)
    for index, part in enumerate(saved.samples):
        present = SampleState.FINISHED if part.finished and keeps_finished else SampleState.NEW
        sample = Sample(SampleId(saved.id, index), group, part.settled or present)
        if part.settled is None:
            _sample_in(core, sample, part, attachments)
        group.delivered += part.settled is SampleState.LEASED
        group.samples.append(sample)
    _completed(core.settings, group, saved, ready=ready)
    return group


def _sample_in(core: RolloutCore, sample: Sample, saved: SavedSample, attachments: Mapping[str, Attachment]) -> None:
    """Restore a sample's counters and chains, and its reward if it is finished."""
    sample.attempts, sample.resumes = saved.attempts, saved.resumes
    sample.failures, sample.restarts = saved.failures, saved.restarts
    sample.chains = tuple(_chain_in(core, sample, part, attachments) for part in saved.chains)
    if sample.state is SampleState.FINISHED:
        if saved.finish is None:
            raise ValueError(f"{sample.id} is finished without an end")
        sample.finish, sample.reward, sample.row_rewards = saved.finish, saved.reward, saved.row_rewards
    longest, most = max(len(chain.tape) for chain in sample.chains), core.settings.max_response_len
    if longest > most:
        raise CheckpointError(
            f"the state holds {longest} tokens of {sample.id}, but the configuration has max_response_len={most}"
        )


def _chain_in(
    core: RolloutCore, sample: Sample, saved: SavedChain, attachments: Mapping[str, Attachment]
) -> Chain:
    """Restore the tokens of a conversation, and the calls of llm.generate that the rollout function will repeat."""
    prompt = sample.group.prompt
    chain = Chain(
        sample, saved.number, prompt.token_ids if saved.prompt is None else saved.prompt.whole,
        prompt.attached if saved.attached is None else _attached_in(core, attachments, saved.attached),
        TokenTape(saved.tokens.whole, saved.logprobs.whole, saved.segments),
    )  # fmt: skip
    for ids in (chain.prompt, chain.tape.tokens):
        if wrong := wrong_ids(ids, core.engines.vocab_size):
            raise CheckpointError(f"{sample.id} of the state does not fit these engines: {wrong}")
    if saved.calls or saved.open_call is not None:
        chain.replay = Replay(deque(saved.calls), saved.open_call)
    for name in core.settings.extras:  # missing extras are an error, as they cannot be made again
        if name not in saved.extras and chain.rows_due:
            raise CheckpointError(
                f"the state holds tokens of {sample.id} without {name}, which the setting extras requires for every "
                f"token; leave {name} out of extras until a new run, or begin without the state"
            )
    chain.extras = {name: rows for name, rows in saved.extras.items() if name in core.settings.extras}
    if rows_of(chain.extras):
        if wrong := wrong_rows(chain.extras, list(chain.extras), chain.rows_due, core.engines.row_layout):
            raise ValueError(f"{sample.id} has {wrong}")
        note_layout(core.engines.row_layout, chain.extras, core.settings.extras)
    return chain


def _completed(settings: CoreSettings, group: Group, saved: SavedGroup, *, ready: bool) -> None:
    """Restore a group's finished samples, their order, and the rewards from which its baselines are computed."""
    members = group.members
    group.held = len(members)
    finished = {s.id.index for s in members if s.state is SampleState.FINISHED}
    if settings.whole_groups and (group.delivered or (ready and len(finished) < group.held)):
        both = "" if settings.partial_rollout else "partial_rollout: true and "
        raise CheckpointError(
            f"group {group.id} of the state is delivered in parts, but the configuration delivers whole groups; set "
            f"{both}group_quorum below 1, as {'they were' if both else 'it was'}"
        )
    group.quorum = settings.quorum(group.held + group.delivered)
    group.finishers = [i for i in saved.finishers if i in finished or group.samples[i].state is SampleState.LEASED]
    group.unfinished = group.held - len(finished)
    if ready:
        group.cohort, group.cohort_values = saved.cohort, values_in(saved.cohort_values)


# -------------------------------------------------------------------- changed settings and engines


def _require_rewards(core: RolloutCore, *, had_reward: bool) -> None:
    """Refuse a state with finished samples if a reward function was added or removed since it was saved."""
    finished = sum(s.state is SampleState.FINISHED for s in core.buffer.samples())
    if had_reward != core.settings.has_reward and finished:
        had, has = ("a", "none") if had_reward else ("no", "one")
        raise CheckpointError(
            f"the state was saved with {had} reward function and holds {finished} finished samples; this scheduler has "
            f"{has}, so their rewards would differ in meaning from the others"
        )


def _require_room(core: RolloutCore, before: int) -> None:
    """Refuse a state if the engines' context is now smaller than before, and too small for unfinished responses."""
    now = core.engines.max_context
    samples = [s for s in core.buffer.samples() if s.state is not SampleState.FINISHED] if now < before else []
    lengths = {s: max(len(chain.prompt) + len(chain.tape) for chain in s.chains) for s in samples}
    if (longest := max(lengths.values(), default=0)) >= max(now, 1):
        groups = {sample.id.group for sample, length in lengths.items() if length >= now}
        raise CheckpointError(
            f"{len(groups)} unfinished groups of the state do not fit in the engines' context of {now} tokens, which "
            f"was {before} (the longest prompt and response have {longest} tokens); give the engines a larger context"
        )


PLANNED = ("rollout_batch_size", "max_staleness", "max_age", "max_resumes", "on_stale", "group_quorum", "auto")
"""Settings that determine which held samples can still be delivered in time."""


def _require_in_time(core: RolloutCore, before: CoreSettings) -> None:
    """Refuse a state if, with on_stale: finish, changed settings would make held samples too old."""
    settings = core.settings
    changed = {name: was for name in PLANNED if (was := getattr(before, name)) != getattr(settings, name)}
    late = _late(core, settings) if changed and settings.on_stale is OnStale.FINISH else 0
    if before.on_stale is OnStale.FINISH:  # what was late before the restart is no reason to refuse
        late -= _late(core, before) * max(1, settings.units_per_group // before.units_per_group)
    if late <= 0:
        return
    raise CheckpointError(
        f"{_late(core, settings)} of the {core.buffer.units} {'groups' if settings.whole_groups else 'samples'} of the "
        f"state could not be delivered in time with rollout_batch_size={settings.rollout_batch_size}, "
        f"max_staleness={settings.max_staleness} and max_age={settings.max_age}, as on_stale: finish requires (the "
        f"state was saved with {', '.join(f'{name}={was}' for name, was in changed.items())}); set these as "
        "they were, or on_stale to restart, drop or mask"
    )


def _late(core: RolloutCore, settings: CoreSettings) -> int:
    """Return how many groups (or samples) are late even in the best order of delivery; see ``completion_monitor``."""
    buffer = PartialBuffer(settings, core.leases)
    buffer.groups = core.buffer.groups
    slacks = sorted(slack for _, slack in buffer.slacks())
    late = (count - max(0, slack + 1) * settings.target for count, slack in enumerate(slacks, 1))
    return max(0, max(late, default=0))
