"""Handles every event that changes a sample, from its first call to its reward.

A rollout function calls ``generate``. A call takes one or more attempts (engine requests), and the tokens of an attempt
are stored before anything else is decided. When the function returns, its sample gets a reward. A group counts towards
a batch once its quorum is finished and the filter has accepted it. Failures are retried, or the sample is replaced or
dropped. ``completion_monitor`` decides when a batch is complete, ``engine_recovery`` when a busy engine is used again.

Invariants: tokens and prompts are dropped only under a named reason; if a sample went on without an attempt, the
attempt's tokens are dropped for that reason when it ends; a lost rollout function is started again only when none of
its attempts is at an engine, and its earlier calls are then answered from the tape.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from april.core import commands as do
from april.core import events as ev
from april.core.attachments import Placed
from april.core.context import CoreContext
from april.core.numbers import held_reward, wrong_reward
from april.core.settings import CoreSettings
from april.core.tape import AttemptCounts, Int32
from april.core.types import (
    MOST_SAMPLES,
    Attempt,
    AttemptFailure,
    AttemptState,
    CallState,
    Chain,
    DropReason,
    EngineFinish,
    Evaluation,
    FinishReason,
    GenerateCall,
    Group,
    GroupState,
    OnFailedSample,
    OnStale,
    Sample,
    SampleId,
    SampleState,
    TimerKind,
)
from april.errors import InvariantError

# module-level names, as an enum member costs 60 ns per use on Python 3.11 and these are used at every event
STOP, LENGTH, ABORT = EngineFinish.STOP, EngineFinish.LENGTH, EngineFinish.ABORT
SILENT, DOUBTFUL, ABANDONED = AttemptState.SILENT, AttemptState.DOUBTFUL, AttemptState.ABANDONED
NEW, RUNNING, SCORING = SampleState.NEW, SampleState.RUNNING, SampleState.SCORING
FINISHED, DROPPED = SampleState.FINISHED, SampleState.DROPPED
OPEN, JUDGED, READY = GroupState.OPEN, GroupState.JUDGED, GroupState.READY
_REJECTED_FOR = {
    AttemptFailure.WEIGHTS_WRITTEN: DropReason.UNKNOWN_WEIGHTS,
    AttemptFailure.NO_TEXT: DropReason.FAILED,
}
PAUSE_GROWTH = 8.0
LONGEST_PAUSE_S = 32.0

SURE_AFTER_GROUPS = 4
SURE_AFTER_SAMPLES = 8
"""Groups and samples with the same failure after which a function is believed to fail for all samples."""


class Function(StrEnum):
    """Kinds of user functions that the core waits for."""

    ROLLOUT = "rollout function"
    REWARD = "reward function"
    FILTER = "filter"


class Mistake(NamedTuple):
    """Says whether a failure may be a bug in the user's function, and whether it certainly is."""

    likely: bool
    sure: bool


class Mistakes:
    """Counts the failures of the user's functions by kind (exception and line), to recognise bugs in them."""

    def __init__(self, settings: CoreSettings) -> None:
        self.groups = max(2, min(settings.over_sampling_batch_size, SURE_AFTER_GROUPS))
        """Number of prompts for which a function must fail in the same way before it counts as a bug."""
        self._samples = min(self.groups * settings.n_samples_per_prompt, SURE_AFTER_SAMPLES)
        self._worked: set[Function] = set()
        self._failed: defaultdict[tuple[Function, str], set[SampleId]] = defaultdict(set)

    def worked(self, function: Function) -> None:
        """Note that a call of this function for a training sample succeeded; its failures no longer count as bugs."""
        self._worked.add(function)

    def made(self, function: Function, kind: str, samples: Iterable[Sample], others: Iterable[Sample] = ()) -> Mistake:
        """Record a failed call for these samples. An empty ``kind`` marks a failure that may be temporary.

        ``others`` are samples for which the call has not ended; while they outnumber the failures, no bug is certain.
        """
        if not kind or function in self._worked:
            return Mistake(likely=False, sure=False)
        failed = self._failed[function, kind]
        failed.update(sample.id for sample in samples)
        enough = len(failed) >= self._samples and len({group for group, _ in failed}) >= self.groups
        return Mistake(likely=True, sure=enough and sum(s.id not in failed for s in others) <= len(failed))


class SampleLives:
    """Handles all events that change a sample, a call, an attempt or the state of a group."""

    def __init__(self, context: CoreContext) -> None:
        self._context = context
        self._mistakes = Mistakes(context.settings)
        self._failed_in_a_row = 0
        """Number of groups dropped for failures since a group was last accepted."""
        self._filtered_in_a_row = 0
        """Number of groups that the filter rejected since a group was last accepted."""

    # ---------------------------------------------------------------- calls

    def call_made(self, event: ev.CallMade) -> None:
        """Handle a call of ``llm.generate``: answer it from the tape, or queue it for an engine."""
        self._context.counters["overridden_requests"] += event.overridden
        what = "called generate twice at the same time"
        sample = self._context.free_to_act(event.sample, what, asks=event.any_chain)
        if sample is None:
            return
        if event.any_chain:
            self._call_of_any_chain(sample, event)
            return
        chain = sample.chains[0]
        if chain.replay is not None:
            self._replay(chain, event)
            return
        if event.token_ids is not None:
            error = self._add_environment(chain, event.token_ids, event.attached)
            if error:
                self.cannot_go_on(sample, error)
                return
        self._open(chain, event, len(chain.tape.tokens))

    def chain_of(self, sample: Sample, token_ids: Int32, attached: Sequence[Placed] = ()) -> Chain | None:
        """Return the chain (token sequence) that a call with these tokens continues, or None if it begins a new one.

        A chain in which the call was already made before its function was lost goes first; then the longest free chain
        that the tokens extend.
        """
        lost_ones = [chain for chain in sample.chains if chain.replay is not None]
        claims = [(chain, self._heard_before(chain, token_ids, attached)) for chain in lost_ones]
        claimed = [(heard, chain.number, chain) for chain, heard in claims if heard is not None]
        free = (c for c in sample.chains if c.replay is None and c.open_call is None and c.calls)
        extended = [
            (len(c.prompt) + len(c.tape), -c.number, c) for c in free if c.begins(token_ids, len(c.tape), attached)
        ]
        longest, _, chain = max(extended, default=(-1, 0, None))
        if claimed:
            heard, _, lost = min(claimed)
            # a chain whose answers the client has seen in this run goes before an equal one that is new to it
            if not heard or chain is None or self._heard_until(lost, heard) > longest:
                return lost
        return chain

    def _heard_until(self, chain: Chain, heard: int) -> int:
        """Return the length of the conversation (prompt included) after the first ``heard`` replayed answers."""
        assert chain.replay is not None
        return len(chain.prompt) + chain.replay.calls[heard - 1].end

    def _heard_before(self, chain: Chain, token_ids: Int32, attached: Sequence[Placed]) -> int | None:
        """Return how many replayed answers precede a call with these tokens; None if it belongs to another chain.

        A restarted function asks for the first answer. A client that outlived the process asks for the answer after
        the last one that it received; its tokens contain the earlier answers.
        """
        replay = chain.replay
        assert replay is not None
        starts = [call.start for call in replay.calls]
        starts += [] if replay.open_start is None else [replay.open_start]
        for heard, start in enumerate(starts):
            if self._asks_again(chain, token_ids, start, attached):
                return heard
        if replay.open_start is None and replay.calls and chain.begins(token_ids, replay.calls[-1].end, attached):
            return len(starts)
        return None

    def _asks_again(self, chain: Chain, token_ids: Int32, start: int, attached: Sequence[Placed]) -> bool:
        """Return True if the tokens equal the conversation before ``start``, both cut to the room that there is."""
        asked = token_ids[: self._room_for(chain, attached)]
        return len(asked) == len(chain.prompt) + start and chain.begins(asked, start, attached)

    def _room_for(self, chain: Chain, attached: Sequence[Placed]) -> int:
        """Return the most tokens that a chain may hold, prompt included; a cut never splits an attachment."""
        most = len(chain.prompt) + self._context.attempts.room(chain)
        return next((placed.at for placed in attached if placed.end > most), most) if attached else most

    def _is_cut(self, chain: Chain, event: ev.CallMade) -> bool:
        """Return True if an attachment did not fit, so that the conversation was cut and nothing may be generated."""
        return event.token_ids is not None and self._room_for(chain, event.attached) < len(event.token_ids)

    def _call_of_any_chain(self, sample: Sample, event: ev.CallMade) -> None:
        """Handle a call for any conversation: replay its answer from a tape, continue a chain, or begin a chain."""
        ids, attached, sample.any_chain = event.token_ids, event.attached, True
        assert ids is not None
        if event.chain is None:
            chain = self.chain_of(sample, ids, attached)
        else:
            chain = next((c for c in sample.chains if c.number == event.chain), None)
        if chain is not None and chain.replay is not None:
            self._replay(chain, event)
            return
        if chain is None:
            if wrong := self._no_chain(sample, ids):
                self.cannot_go_on(sample, wrong)
                return
            chain = sample.chains[0]
            if chain.calls or chain.replay is not None:
                chain = Chain(sample, 1 + sample.chains[-1].number, np.array(ids, np.int32), attached)
                sample.chains += (chain,)
            elif not np.array_equal(ids, chain.prompt) or attached != chain.attached:
                # no call used the group's prompt, so this conversation becomes the first chain
                chain.prompt, chain.attached = np.array(ids, np.int32), attached
        self._add_environment(chain, ids, attached)
        self._open(chain, event, len(chain.tape))

    def _no_chain(self, sample: Sample, token_ids: Int32) -> str | None:
        """Return the reason why these tokens may not begin another chain, or None if they may."""
        settings = self._context.settings
        # chains from before a restart count only once a call has used them again
        if sum(bool(chain.calls) for chain in sample.chains) >= settings.max_chains:
            return f"it wants more than max_chains={settings.max_chains} conversations"
        if len(token_ids) >= self._context.engines.max_context:
            return f"a conversation of {len(token_ids)} tokens has no room in the engines' context"
        return None

    def _open(self, chain: Chain, event: ev.CallMade, start: int) -> None:
        call = GenerateCall(chain, event.sampling, start, event.number)
        chain.calls.append(call)
        # a call from a saved state may be complete already: saved between its last token and the end of its attempt
        stopped = self._context.attempts.ends_in_stop(call)
        cut = bool(event.attached) and self._is_cut(chain, event)
        if not self._complete_if(call, stopped=stopped, length=cut):
            self._context.note(chain.sample, f"asks for up to {event.sampling.max_tokens} tokens")
            self._context.over_sampler.push(call)

    def _complete_if(self, call: GenerateCall, *, stopped: bool, length: bool = False) -> bool:
        """Complete a call that has ``stopped``, or has used up the engine's context (``length``) or its budget."""
        if stopped:
            finish = FinishReason.STOP
        elif length or self._context.attempts.budget(call) <= 0:
            finish = FinishReason.LENGTH
        else:
            return False
        self._answer(call, len(call.chain.tape.tokens), finish)
        return True

    def _add_environment(self, chain: Chain, token_ids: Int32, attached: Sequence[Placed]) -> str | None:
        """Append the tokens that the function added since its last call, cut to the room; return an error, or None."""
        have = len(chain.prompt) + len(chain.tape)
        if not chain.begins(token_ids, len(chain.tape), attached):
            return (
                "llm.generate was given a conversation that does not begin with the prompt and everything generated so "
                "far, with what is attached to them; append to the conversation, never rewrite it"
            )
        end = self._room_for(chain, attached)
        chain.tape.add_environment(np.array(token_ids[have:end], np.int32), self._context.clock.current)
        chain.attached += tuple(placed for placed in attached if have <= placed.at < end)
        return None

    def _replay(self, chain: Chain, event: ev.CallMade) -> None:
        """Answer a repeated call from the tape; a function whose calls differ from before begins again."""
        replay = chain.replay
        assert replay is not None
        ids = event.token_ids
        if ids is not None:
            heard = self._heard_before(chain, ids, event.attached)
        else:
            heard = 0 if replay.next_start == chain.seen else None
        if heard is None or (heard and not event.any_chain):
            self.diverged(chain.sample)
            return
        for _ in range(heard):
            call = GenerateCall(chain, event.sampling, replay.next_start or 0, state=CallState.DONE)
            _, call.end, call.finish = replay.calls.popleft()
            chain.calls.append(call)
        start = replay.next_start
        if replay.calls:
            assert start is not None
            call = GenerateCall(chain, event.sampling, start, event.number)
            chain.calls.append(call)
            _, end, finish = replay.calls.popleft()
            if replay.next_start is None:
                chain.replay = None  # no call was open when the function was lost, so later calls are new
            self._answer(call, end, finish)
            return
        chain.replay = None
        if start is None and ids is not None:
            self._add_environment(chain, ids, event.attached)
        self._open(chain, event, len(chain.tape) if start is None else start)

    def call_unheard(self, event: ev.CallUnheard) -> None:
        """End a call whose answer nobody will read and drop its tokens, unless its chain has continued since."""
        context = self._context
        sample = context.sample(event.sample)
        if sample is None:
            return
        last = [chain.calls[-1] for chain in sample.chains if chain.calls]
        call = next((c for c in last if c.number == event.number), None)
        # a lost function is started again and repeats its calls
        if sample.state is not RUNNING or call is None or any(c.lost for c in last):
            return
        if call.state is not CallState.DONE:
            context.over_sampler.forget(call)
            self._abandon(call, DropReason.UNHEARD)
        chain, tokens = call.chain, context.ledger(sample)
        context.note(sample, f"call {call.number} is heard by nobody")
        if chain.replay is not None:
            tokens.drop(chain.cut(call.end), DropReason.REPLAY_DIVERGED)  # it would have followed the answer
            context.counters["replays_diverged"] += 1
            chain.replay = None
        chain.calls.pop()
        tokens.drop(chain.cut(chain.calls[-1].end if chain.calls else 0), DropReason.UNHEARD)
        if not chain.calls and chain.number:
            sample.chains = tuple(c for c in sample.chains if c is not chain)
        sample.any_chain = True
        answered = [(c.calls[-1].number, c.calls[-1].finish) for c in sample.chains if c.calls and c.calls[-1].finish]
        sample.finish = max(answered)[1] if answered else None

    def _abandon(self, call: GenerateCall, reason: DropReason) -> None:
        """Ask the engine to end the call's attempt, if any; its tokens are dropped for ``reason`` once it has ended."""
        if call.attempt is not None:
            call.attempt.lost_for = reason
            self._context.to(call.attempt, ABANDONED, f"attempt abandoned ({reason})")
            self._context.stop([call.attempt])

    def _drop_unclaimed(self, sample: Sample) -> None:
        """Drop the replayed tokens that a function did not ask for before it returned."""
        for chain in sample.chains:
            if chain.replay is not None:
                end = chain.calls[-1].end if chain.calls else 0
                self._context.tokens.drop(chain.cut(end), DropReason.REPLAY_DIVERGED)
                self._context.counters["replays_diverged"] += 1
                chain.replay = None
        sample.chains = tuple(chain for chain in sample.chains if chain.number == 0 or chain.calls)

    def diverged(self, sample: Sample) -> None:
        """Begin a sample again whose restarted function made other calls than before, so that its tokens do not fit."""
        self._context.counters["replays_diverged"] += 1
        self.begin_again(sample, DropReason.REPLAY_DIVERGED)

    def _answer(self, call: GenerateCall, end: int, finish: FinishReason) -> None:
        call.end, call.finish, call.sample.finish = end, finish, finish
        self._context.to(call, CallState.DONE, f"call complete ({finish}) at {end} tokens")
        if call.lost:
            self.begin_from_tape(call.sample)
        else:
            self._context.out.append(do.CallCompleted(call))

    def _queue(self, call: GenerateCall, why: str) -> None:
        self._context.to(call, CallState.QUEUED, why)
        if call.lost:
            self.begin_from_tape(call.sample)
        else:
            self._context.over_sampler.push(call)

    # ---------------------------------------------------------------- attempts

    def spent(self, call: GenerateCall) -> bool:
        """Complete a queued call if other calls of its sample used up ``max_sample_tokens``; return True if so."""
        return self._context.settings.max_sample_tokens is not None and self._complete_if(call, stopped=False)

    def submit(self, call: GenerateCall, engine: str) -> None:
        """Start an attempt at ``engine`` for the tokens that the call still lacks."""
        context, sample, held = self._context, call.sample, len(call.chain.tape.tokens)
        state = context.engines.states[engine]
        if context.clock.current not in state.loaded or not state.has_room:
            has = f"has versions {set(state.loaded)}, is {state.gate} and {state.health}"
            raise InvariantError(f"{sample.id} is sent to engine {engine}, which {has}")
        attempt = context.attempts.open(call, engine, context.clock.current)
        context.counts(sample)["attempts"] += 1
        if held > call.start:
            sample.resumes += 1
            context.counters["resumed_attempts"] += 1
            context.counters["reprefill_tokens"] += len(attempt.request.token_ids)
        context.to(call, CallState.IN_FLIGHT, f"attempt {attempt.id} on {engine} from token {held}")
        context.out.append(do.Submit(attempt))

    def stop_found(self, event: ev.StopFound) -> None:
        """Stop an attempt whose text contains a stop string: its response is complete."""
        if attempt := self._running(event.attempt_id):
            self._context.stop([attempt])

    def _running(self, attempt_id: str) -> Attempt | None:
        """Return the attempt in flight; None, counted as a late event, if it has already ended."""
        attempt = self._context.attempts.get(attempt_id)
        self._context.counters["late_events"] += attempt is None
        return attempt

    def attempt_stalled(self, event: ev.AttemptStalled) -> None:
        """Ask the engine to end an attempt for which it sent no token for too long; another engine may continue."""
        attempt = self._running(event.attempt_id)
        if attempt is None:
            return
        if attempt.state is AttemptState.WANTED:
            attempt.silent_s = event.seconds
            self._context.to(attempt, SILENT, f"engine {attempt.engine} is silent")
        self._context.counts(attempt.sample)["stalled_attempts"] += 1
        self._context.stop([attempt])

    def attempt_ended(self, event: ev.AttemptEnded) -> None:
        """Store the tokens of an ended attempt, then complete its call or queue it again."""
        context, counts = self._context, event.counts
        attempt = self._close(event)
        if attempt is None:
            return
        came = counts.tokens
        # an attempt that was aborted without tokens may never have reached the engine, so it says nothing about it
        if not event.fenced and (event.finish is not ABORT or came or counts.after_stop):
            context.engines.ended(attempt.engine, context.engines.states[attempt.engine].in_flight)
        self._keep(attempt, event.finish, counts)
        call = attempt.call
        if attempt.state is ABANDONED:
            return
        if attempt.state is DOUBTFUL:
            self._queue(call, f"engine {attempt.engine} had other weights: {came} tokens dropped")
            return
        stopped = event.finish is STOP or (event.finish is ABORT and counts.ends)
        if self._complete_if(call, stopped=stopped, length=event.finish is LENGTH):
            return
        if attempt.state is SILENT:
            why = f"engine {attempt.engine} was silent for {attempt.silent_s:g} s"
            self._broke_off(attempt, why, progressed=came > 0)
            return
        if call.sample.evaluation is not None:
            self._broke_off(attempt, f"engine {attempt.engine} ended a request that april wanted", progressed=False)
            return
        if not came:
            context.counters["empty_partials"] += 1
        call.failures, call.avoid = 0, ""
        self._queue(call, f"partial after {came} tokens")

    def _broke_off(
        self, attempt: Attempt, error: str, kind: AttemptFailure = AttemptFailure.BROKE_OFF, *, progressed: bool
    ) -> None:
        """Queue the call again, for another engine if possible; the sample fails after too many at the same token."""
        call = attempt.call
        progressed &= call.sample.evaluation is None  # a call of an evaluation begins again without its tokens
        call.failures = 0 if progressed else call.failures + 1
        self._go_elsewhere(attempt, f"attempt failed: {error}", error, kind)
        if call.failures >= self._context.settings.max_attempt_failures:
            self.cannot_go_on(call.sample, error, kind)

    def _go_elsewhere(self, attempt: Attempt, why: str, error: str, kind: AttemptFailure) -> None:
        if kind is not AttemptFailure.NO_TEXT:
            attempt.call.avoid = attempt.engine
        if attempt.sample.evaluation is not None:
            attempt.sample.evaluation.trouble = error, kind
        self._queue(attempt.call, why)

    def attempt_failed(self, event: ev.AttemptFailed) -> None:
        """Handle an attempt that broke off: its tokens are kept unless they are corrupt."""
        context, came = self._context, event.counts.tokens
        attempt = self._close(event)
        if attempt is None:
            return
        kind, corrupt = event.kind, event.kind is AttemptFailure.CORRUPT
        counters, tokens = context.counts(attempt.sample), context.ledger(attempt.sample)
        counters["failed_attempts"] += 1
        counters["busy_refusals"] += kind is AttemptFailure.BUSY
        tokens.observe(event.rejected)
        tokens.drop(event.rejected, _REJECTED_FOR.get(kind, DropReason.CORRUPT))
        if corrupt:
            tokens.observe(came)
            tokens.drop(came, DropReason.CORRUPT)
        else:
            self._keep(attempt, ABORT, event.counts)
        # a broken request quarantines the engine until a probe, corrupt answers only after several in a row; an engine
        # that is busy, rejects one request or whose tokens could not be decoded is still healthy
        if corrupt or kind is AttemptFailure.BROKE_OFF:
            context.engine_failed(attempt.engine, at_once=not corrupt)
        call = attempt.call
        if attempt.state is ABANDONED:
            return
        if attempt.state is DOUBTFUL:  # another engine may accept a request that a restarted server refused
            self._queue(call, f"engine {attempt.engine} had other weights: {event.error}")
            return
        if kind is AttemptFailure.REFUSED:
            self._queue(call, f"refused: {event.error}")
            self.cannot_go_on(call.sample, event.error, kind)
            return
        if not corrupt and self._complete_if(call, stopped=event.counts.ends):
            return
        if kind is AttemptFailure.WEIGHTS_WRITTEN:
            self._queue(call, f"engine {attempt.engine}: weights were written, {event.rejected} tokens dropped")
            return
        if kind is AttemptFailure.BUSY:
            self._go_elsewhere(attempt, f"engine {attempt.engine} is busy", event.error, kind)
            return
        self._broke_off(attempt, event.error, kind, progressed=came > 0 and not corrupt)

    def _close(self, event: ev.AttemptEnded | ev.AttemptFailed) -> Attempt | None:
        """Remove the attempt from the book and return it; None if it had already ended."""
        context, after_stop = self._context, event.counts.after_stop
        attempt = context.attempts.close(event.attempt_id)
        if attempt is None:
            context.counters["late_events"] += 1
            return None
        if event.counts.tokens != attempt.tape.count:
            raise context.impossible(attempt.owner, f"has {attempt.tape.count} new tokens, its end says otherwise")
        if after_stop:
            tokens = context.ledger(attempt.sample)
            tokens.observe(after_stop)
            tokens.drop(after_stop, DropReason.AFTER_STOP)
            context.counts(attempt.sample)["after_stop_tokens"] += after_stop
        unknown, bare = event.counts.unknown, event.counts.bare
        if unknown or bare:
            tokens = context.ledger(attempt.sample)
            tokens.observe(unknown + bare)
            tokens.drop(unknown, DropReason.UNKNOWN_WEIGHTS)
            tokens.drop(bare, DropReason.NO_EXTRAS)
            context.counts(attempt.sample)["no_extras_tokens"] += bare
        context.aborts.ended(attempt.id)
        return attempt

    def _keep(self, attempt: Attempt, finish: EngineFinish, counts: AttemptCounts) -> None:
        """Append the attempt's tokens to its sample, or record them in the ledger as dropped."""
        sample, count, lost_for = attempt.sample, counts.tokens, attempt.lost_for
        tokens = self._context.ledger(sample)
        tokens.observe(count)
        cut = finish is ABORT and not counts.ends and count < attempt.request.sampling.max_tokens
        if cut and sample.evaluation is not None:
            lost_for = lost_for or DropReason.FAILED  # a cut call of an evaluation begins again with the same seed
        if lost_for is not None:
            tokens.drop(count, lost_for)
            return
        chain, temperature = attempt.call.chain, attempt.request.sampling.temperature
        chain.tape.add_attempt(attempt.tape, attempt.id, attempt.engine, temperature, attempt.over)
        if count:  # without tokens, the cached prefix of an earlier attempt is still the longest
            if attempt.tape.extras:
                chain.add_extras(attempt.tape.extras)
            state = self._context.engines.states[attempt.engine]
            kept = attempt.over not in (None, state.version)  # its cache is of older weights and serves no new request
            chain.cached_on, chain.cached_under = "" if kept else attempt.engine, state.life

    # ---------------------------------------------------------------- returns, rewards and verdicts

    def sample_returned(self, event: ev.SampleReturned) -> None:
        """Handle the return of a rollout function: ask for the reward, or finish the sample if there is none."""
        context = self._context
        sample = context.free_to_act(event.sample, "returned while it was waiting for tokens")
        if sample is None:
            return
        if sample.any_chain:
            self._drop_unclaimed(sample)
        else:
            replay, sample.chains[0].replay = sample.chains[0].replay, None
            if len(sample.chains) > 1 or (replay is not None and replay.next_start is not None):
                self.diverged(sample)
                return
        if sample.finish is None:
            error = "the rollout function returned without a call of llm.generate that it awaited"
            self.cannot_go_on(sample, f"{error}; write await llm.generate(...)")
            return
        context.to(sample, SCORING, "returned")
        if sample.group.evaluation is not None:
            sample.group.evaluation.functions -= 1
        else:
            self._mistakes.worked(Function.ROLLOUT)
        if context.settings.has_reward:
            self.ask_reward(sample)
        else:
            self.sample_finished(sample)

    def sample_failed(self, event: ev.SampleFailed) -> bool:
        """Retry or give up after a failed rollout or reward function; return True if it would fail for every sample."""
        sample = self._context.sample(event.sample)
        if sample is None:
            return False
        rollout = sample.state is RUNNING
        whole = self._context.settings.group_reward and not rollout
        function, kind = Function.ROLLOUT if rollout else Function.REWARD, event.kind * (sample.evaluation is None)
        mistake = self._mistakes.made(
            function, kind, sample.group.members if whole else [sample], self._got_as_far(sample, whole=whole)
        )
        waits = self._waits(mistake)
        if sample.state is not FINISHED:
            self.fail(sample, event.error, waits=waits)
        elif blamed := self._whose_reward_is_awaited(sample):
            self.fail(blamed, event.error, waits=waits)
        else:
            self._context.counters["late_events"] += 1
        return mistake.sure

    def _got_as_far(self, sample: Sample, *, whole: bool) -> Iterator[Sample]:
        """Yield samples whose function has got at least as far as that of ``sample`` had when it failed."""
        scored = (SCORING, FINISHED)
        if sample.state is RUNNING and sample.generated:
            return  # it failed with tokens; samples that still generate have not got as far
        for group in self._context.buffer.groups.values():
            if whole and not all(s.state in scored for s in group.members):
                continue  # its group reward is not asked for yet
            for s in group.members:
                if s.state is sample.state and (s.state is SCORING or s.asks):
                    yield s

    def _waits(self, mistake: Mistake) -> bool:
        """Return whether to pause before the retry: not for a likely bug while too few prompts are open to be sure."""
        return not mistake.likely or len(self._context.buffer.groups) >= self._mistakes.groups

    def scored(self, event: ev.Scored) -> None:
        """Store the rewards of a group; if one of them is invalid, none is stored."""
        context = self._context
        group = context.group(event.group)
        if group is None:
            context.counters["late_events"] += event.group >= 0
            return
        awaited: list[tuple[Sample, float]] = []
        for index, reward in event.rewards:
            blamed = self._whose_reward_is_awaited(group.samples[index])
            if blamed is None:
                context.counters["late_events"] += 1
            elif wrong := wrong_reward(reward):
                self.fail(blamed, f"the reward is {wrong}")
                return
            else:
                awaited.append((group.samples[index], held_reward(reward)))
        for sample, reward in awaited:
            sample.reward = reward
        if awaited and group.evaluation is None:
            self._mistakes.worked(Function.REWARD)
        for sample, _ in awaited:
            if sample.state is SCORING:
                self.sample_finished(sample)

    def _whose_reward_is_awaited(self, sample: Sample) -> Sample | None:
        """Return the sample whose reward is awaited: this one, or the sibling for which the group is scored again.

        None if no reward is awaited.
        """
        if sample.state is SCORING:
            return sample
        if sample.state is not FINISHED or not self._context.settings.group_reward:
            return None
        return next((s for s in sample.group.samples if s.state is SCORING), None)

    def ask_again(self, timer: int) -> None:
        """Retry the reward function or filter whose pause has ended, if its answer is still wanted."""
        context = self._context
        what = context.retries.pop(timer, None)
        if isinstance(what, Sample):
            if what.retry == timer:
                self.ask_reward(what)
        elif what is not None:
            group, judgement = what
            if self._is_awaited(context.buffer.groups.get(group.id), judgement):
                context.out.append(do.JudgeGroup(group, judgement))

    def _is_awaited(self, group: Group | None, judgement: int) -> bool:
        """Return False if the group was dropped, or one of its samples began again, since the filter was asked."""
        return group is not None and group.state is JUDGED and group.since == judgement

    def group_judged(self, event: ev.GroupJudged) -> bool:
        """Accept or drop a group after the filter; return True if the filter failed and would fail for every group."""
        context = self._context
        group = context.buffer.groups.get(event.group)
        if group is None or not self._is_awaited(group, event.judgement):
            context.counters["late_events"] += 1
            return False
        if event.error is not None:
            mistake = self._mistakes.made(Function.FILTER, event.kind, group.first)
            group.filter_failures += 1
            context.note(group.samples[0], f"filter failed: {event.error}")
            if group.filter_failures >= context.settings.max_attempt_failures:
                self.give_up(group, DropReason.FAILED, f"filter of group {group.id}: {event.error}")
            elif self._waits(mistake) and (pause_s := self.pause_s(group.filter_failures)):
                context.to_group(group, JUDGED, f"the filter is asked again in {pause_s:g} s")
                context.retries[context.start_timer(TimerKind.RETRY, pause_s)] = group, group.since
            else:
                self.ask_filter(group)
            return mistake.sure
        self._mistakes.worked(Function.FILTER)
        if event.keep:
            self.accept(group)
        else:
            self.give_up(group, DropReason.FILTERED, "the filter rejected it")
        return False

    # ---------------------------------------------------------------- finished samples and accepted groups

    def sample_finished(self, sample: Sample) -> None:
        """Mark a sample as finished, now that it has its reward."""
        group = sample.group
        sample.retry = None
        self._context.to(sample, FINISHED, f"finished, reward {sample.reward:g}")
        group.unfinished -= 1
        group.finishers.append(sample.id.index)
        if group.evaluation is None:
            self._context.lengths.generated.add(sample.generated)
        if group.state is OPEN:
            self.advance(group)
        elif group.state is READY:
            self._count(sample)

    def advance(self, group: Group) -> None:
        """Accept an open group whose quorum is finished, or ask the filter about it."""
        if group.state is not OPEN or not group.complete:
            return
        if group.evaluation is not None:
            self._context.to_group(group, READY, "complete")
            group.evaluation.unfinished -= 1
        elif self._context.settings.has_filter:
            self.ask_filter(group)
        else:
            self.accept(group)

    def ask_filter(self, group: Group) -> None:
        self._context.to_group(group, JUDGED, "the filter is asked")
        self._context.out.append(do.JudgeGroup(group, group.since))

    def accept(self, group: Group) -> None:
        """Make the group deliverable and fix its cohort, the rewards from which baselines are computed."""
        self._context.to_group(group, READY, "complete")
        self._failed_in_a_row = self._filtered_in_a_row = 0
        group.cohort = group.rewarded
        if self._context.settings.whole_groups:
            self._context.monitor.accept(group)
        else:
            for index in group.finishers:
                self._count(group.samples[index])

    def _count(self, sample: Sample) -> None:
        """Make a single finished sample deliverable (group quorum below 1)."""
        sample.since = self._context.event_number
        self._context.monitor.accept(sample)

    def no_longer_finished(self, sample: Sample) -> None:
        """Undo the bookkeeping of a finished sample that begins again or is given up."""
        self._context.monitor.not_ready(sample)
        sample.group.finishers.remove(sample.id.index)
        sample.group.unfinished += 1

    def reopen(self, group: Group) -> None:
        """Open a group again because a finished sample began again; no change once a quorum's cohort is fixed."""
        context, settings = self._context, self._context.settings
        if group.state is READY and not settings.whole_groups:
            return
        context.monitor.not_ready(group)
        group.cohort = ()
        if group.state is not OPEN:
            context.to_group(group, OPEN, "a sample began again")
        self.run_again_for_returns(group)
        self.advance(group)

    def run_again_for_returns(self, group: Group) -> None:
        """Run finished functions again whose return values were lost, where a group reward or the filter needs them.

        Their calls are answered from the tape. A group that is already accepted needs no return values.
        """
        context, settings = self._context, self._context.settings
        if group.state is READY or not (settings.group_reward or settings.has_filter):
            return
        for sample in group.samples:
            if sample.replayed and sample.state is FINISHED:
                self.no_longer_finished(sample)
                context.lengths.generated.add(sample.generated, -1)  # counted once more when it finishes again
                sample.finish = None
                context.to(sample, NEW, "runs again for what it returns")
                context.over_sampler.push(sample)
        if group.state is not OPEN:
            context.to_group(group, OPEN, "what the filter was to see is lost")

    # ---------------------------------------------------------------- retries and drops

    def fail(self, sample: Sample, error: str, *, waits: bool = True) -> None:
        """Retry the reward (after a pause, if it ``waits``) or the sample, up to ``max_attempt_failures`` times."""
        context = self._context
        sample.failures += 1
        context.counts(sample)["failed_samples"] += 1
        context.note(sample, f"failed: {error}")
        if sample.failures >= context.settings.max_attempt_failures or sample.evaluation is not None:
            self.cannot_go_on(sample, error)
        elif sample.state is not SCORING:
            self.begin_again(sample, DropReason.FAILED)
        elif waits and (pause_s := self.pause_s(sample.failures)):
            sample.retry = context.start_timer(TimerKind.RETRY, pause_s)
            context.retries[sample.retry] = sample
        else:
            self.ask_reward(sample)

    def cannot_go_on(self, sample: Sample, error: str, kind: AttemptFailure | None = None) -> None:
        """Replace the sample, or give up the sample, its group or its evaluation, as the settings say.

        ``kind`` tells how the engine request failed; None if a function of the user's failed.
        """
        if sample.evaluation is not None:
            sample.evaluation.fail(error, kind, sample if kind is None else None)
            return
        group, settings, error = sample.group, self._context.settings, f"{sample.id}: {error}"
        policy, n = settings.on_failed_sample, settings.n_samples_per_prompt
        # a failed group reward concerns the whole group; an accepted group goes on without its late samples
        of_all = settings.group_reward and sample.state is SCORING
        counts = group.state is not OPEN
        if policy is OnFailedSample.REPLACE and not of_all and len(group.samples) < MOST_SAMPLES * n:
            self._replace(sample, error)
        elif counts or (policy is OnFailedSample.SHRINK and not of_all and group.held > settings.min_group_size):
            self.give_up_sample(sample, DropReason.FAILED, error)
        else:
            self.give_up(group, DropReason.FAILED, error)

    def _replace(self, sample: Sample, error: str) -> None:
        """Add a new sample to the group, then give up the one that failed."""
        context, group = self._context, sample.group
        fresh = Sample(SampleId(group.id, len(group.samples)), group)
        fresh.urgent = sample.urgent
        context.urgent += [fresh] * sample.urgent
        group.samples.append(fresh)
        group.unfinished += 1
        context.buffer.changes(group, 1)
        context.counters["replaced_samples"] += 1
        context.note(fresh, f"takes the place of {sample.id}")
        context.over_sampler.push(fresh)
        self.give_up_sample(sample, DropReason.FAILED, error)

    def pause_s(self, failures: int) -> float:
        """Return the seconds before the next retry, in which a judge or sandbox that the function calls may recover."""
        return min(self._context.settings.retry_pause_s * PAUSE_GROWTH ** (failures - 1), LONGEST_PAUSE_S)

    def ask_reward(self, sample: Sample) -> None:
        """Ask for the reward of a sample whose function has returned; a group reward waits for all its samples."""
        if self._context.settings.group_reward:
            self._ask_group_reward(sample.group)
        else:
            sample.retry = None
            self._context.out.append(do.ScoreSample(sample))

    def _ask_group_reward(self, group: Group) -> None:
        """Ask for the group's reward if the functions of all held samples have returned and a reward is missing."""
        members = group.members
        for sample in members:
            sample.retry = None
        states = {sample.state for sample in members}
        if SCORING in states and states <= {SCORING, FINISHED}:
            self._context.out.append(do.ScoreGroup(group))

    def begin_again(self, sample: Sample, reason: DropReason) -> None:
        """Drop the tokens of a sample and start its rollout function again."""
        context = self._context
        was_finished = sample.state is FINISHED
        self._end(sample, reason)
        if was_finished:
            self.no_longer_finished(sample)
        sample.clear()
        sample.reward = 0.0
        sample.restarts += 1
        context.to(sample, NEW, f"begins again ({reason})")
        context.over_sampler.push(sample)
        if was_finished:
            self.reopen(sample.group)

    def _end(self, sample: Sample, reason: DropReason) -> None:
        """Stop the sample's function and requests, and drop its tokens."""
        context, generated = self._context, sample.generated
        if sample.state in (SCORING, FINISHED):
            context.lengths.drop(generated, reason, counted=sample.state is FINISHED)
        elif generated or any(call.attempt is not None for call in sample.open_calls):
            context.lengths.unfinished[reason] += 1
        self.leave(sample, reason)
        context.tokens.drop(generated, reason)

    def leave(self, sample: Sample, reason: DropReason) -> None:
        """Remove a sample from the queue, end its requests and cancel its rollout function."""
        context = self._context
        sample.retry = None
        context.over_sampler.forget(sample)
        context.places.give_back(sample)
        for call in sample.open_calls:
            context.over_sampler.forget(call)
            call.chain.calls.remove(call)
            self._abandon(call, reason)
        if sample.state is not NEW:
            context.out.append(do.CancelSample(sample))

    def give_up_sample(self, sample: Sample, reason: DropReason, error: str) -> None:
        """Drop one sample and go on with the rest of its group; drop the group if no sample is left or delivered."""
        context, group = self._context, sample.group
        if group.held == 1 and not group.delivered:
            self.give_up(group, reason, error)
            return
        context.counters[f"samples_dropped_{reason}"] += 1
        if sample.state is FINISHED:
            self.no_longer_finished(sample)
        group.unfinished -= 1
        size = group.delivered + group.held - 1
        group.quorum = min(group.quorum, size)
        if reason is DropReason.FAILED:
            context.out.append(do.Warn(f"{error}; it is given up, and its group goes on with {size} samples"))
        self._drop(sample, reason, f"dropped ({reason}): {error}")
        if context.settings.group_reward:
            self._ask_group_reward(group)  # the others may have waited for this one
        if group.held:
            self.advance(group)

    def _drop(self, sample: Sample, reason: DropReason, why: str) -> None:
        context = self._context
        context.monitor.forget(sample)
        self._end(sample, reason)
        context.to(sample, DROPPED, why)
        self.sample_left(sample.group, reason)

    def sample_left(self, group: Group, reason: DropReason | None = None) -> None:
        """Count a sample that was delivered (``reason`` None) or given up; settle its prompt after the last sample.

        A prompt counts as delivered if any of its samples was.
        """
        context = self._context
        context.buffer.changes(group, -1)
        if group.held:
            return
        context.buffer.remove(group)
        if reason is None or group.delivered:
            context.prompts.deliver(1)
        else:
            context.prompts.drop(1, reason)

    def give_up(self, group: Group, reason: DropReason, error: str) -> None:
        """Drop a whole group; the over-sampler decides whether another prompt replaces it."""
        context, settings = self._context, self._context.settings
        context.monitor.forget(group)
        context.counters[f"groups_dropped_{reason}"] += 1
        context.out.append(do.ReportDrop(group, reason, error))
        for sample in group.members:
            self._drop(sample, reason, f"group dropped ({reason}): {error}")
        if reason is DropReason.FAILED:
            self._failed_in_a_row += 1
            if self._failed_in_a_row >= settings.max_failed_groups:
                context.failure = f"{self._failed_in_a_row} groups failed in a row, the last one: {error}"
                self._failed_in_a_row = 0
        elif reason is DropReason.FILTERED:
            self._filtered_in_a_row += 1
            if self._filtered_in_a_row >= settings.max_filtered_groups:
                context.failure = (
                    f"the filter rejected {self._filtered_in_a_row} groups in a row; are the prompts too easy or too "
                    "hard for the model? Otherwise raise max_filtered_groups"
                )
                self._filtered_in_a_row = 0

    def replace_too_old(self) -> None:
        """Restart or drop, as ``on_stale`` says, the samples that a weight update has made older than max_staleness."""
        context = self._context
        for sample in context.buffer.too_old():
            if sample.state is DROPPED:
                continue  # dropped with its group earlier in this loop
            why = f"{sample.id} is older than max_staleness"
            if context.settings.on_stale is OnStale.RESTART:
                self.begin_again(sample, DropReason.STALE)
            elif sample.group.state is READY and not context.settings.whole_groups:
                self.give_up_sample(sample, DropReason.STALE, why)
            else:
                self.give_up(sample.group, DropReason.STALE, why)

    # ---------------------------------------------------------------- rollout functions whose process died

    def function_lost(self, event: ev.FunctionLost) -> None:
        """Restart a rollout function whose process died; it fails if that happens repeatedly without progress."""
        sample = self._context.sample(event.sample)
        if sample is None or sample.state is not RUNNING:
            return
        if not sample.asks:  # else it did nothing when its process died
            (times, at), now = sample.deaths, sample.tokens
            sample.deaths = times + 1 if at == now else 1, now
            if sample.deaths[0] >= self._context.settings.max_attempt_failures:
                why = f"{sample.deaths[0]} processes in a row died while its function ran there, which may be why"
                self._context.counts(sample)["failed_samples"] += 1
                self._context.note(sample, f"failed: {why}")
                self.cannot_go_on(sample, why)
                return
        if sample.evaluation is None:
            self._lose_function(sample)
        else:
            self._evaluate_anew(sample, sample.evaluation)

    def _lose_function(self, sample: Sample) -> None:
        context, calls = self._context, sample.open_calls
        context.counters["lost_functions"] += 1
        if running := [call.attempt for call in calls if call.attempt is not None]:
            for call in calls:
                call.lost = True
                if call.attempt is None:
                    context.over_sampler.forget(call)
            context.note(sample, "its function is lost")
            context.stop(running)
        else:
            self.begin_from_tape(sample)

    def begin_from_tape(self, sample: Sample) -> None:
        """Start the function of a sample again once none of its attempts is at an engine.

        Its earlier calls are answered from the tapes.
        """
        context, calls = self._context, sample.open_calls
        if any(call.attempt is not None for call in calls):
            return
        context.places.give_back(sample)
        for call in calls:
            context.over_sampler.forget(call)
        sample.replay_all()
        sample.finish = None
        context.to(sample, NEW, "its function runs again, answered from the tape")
        context.over_sampler.push(sample)

    def _evaluate_anew(self, sample: Sample, evaluation: Evaluation) -> None:
        """Restart a sample of an evaluation without its tokens; with the same seed it gets the same response."""
        evaluation.counters["lost_functions"] += 1
        evaluation.functions -= 1
        self.leave(sample, DropReason.FAILED)
        evaluation.tokens.drop(sample.generated, DropReason.FAILED)
        sample.clear()
        self._context.to(sample, NEW, "begins again, as its function was lost")
        evaluation.to_start.appendleft(sample)
