"""The lives of samples, in the order in which they pass.

A rollout function calls ``generate``; a call takes one attempt or several, and what an attempt brought is kept before
anything else is decided. The function returns, its sample gets a reward, and its group counts when the quorum is
finished and the filter has accepted it. What fails on the way is tried again, replaced, or given up. Whether a batch is
complete is decided in ``completion_monitor``; when a busy engine is asked again, in ``engine_recovery``.

Invariants: whatever is given up leaves under a named reason, tokens and prompt alike; an attempt whose sample went on
without it drops its tokens for that reason when it ends; a lost function begins again only when none of its attempts
is at an engine any more, and is then answered from the tape.
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

# names of the module: an enum's member costs 60 ns per use on Python 3.11, and these are used at every event
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
"""A function that failed alike for so many groups and samples is believed to fail for all."""


class Function(StrEnum):
    """The functions of the user."""

    ROLLOUT = "rollout function"
    REWARD = "reward function"
    FILTER = "filter"


class Mistake(NamedTuple):
    """Tells whether a failure may be a mistake in the function itself, and whether it is one for sure."""

    likely: bool
    sure: bool


class Mistakes:
    """Failures of a run's functions, wherever they run, by their kind: what was raised in which line."""

    def __init__(self, settings: CoreSettings) -> None:
        self.groups = max(2, min(settings.over_sampling_batch_size, SURE_AFTER_GROUPS))
        """Prompts for which a function must fail alike."""
        self._samples = min(self.groups * settings.n_samples_per_prompt, SURE_AFTER_SAMPLES)
        self._worked: set[Function] = set()
        self._failed: defaultdict[tuple[Function, str], set[SampleId]] = defaultdict(set)

    def worked(self, function: Function) -> None:
        """A call for training has come to its end."""
        self._worked.add(function)

    def made(self, function: Function, kind: str, samples: Iterable[Sample], others: Iterable[Sample] = ()) -> Mistake:
        """A call for these samples has failed. ``kind``: empty if that may pass.

        ``others``: for which it may be about to work; more of them than have failed are waited for.
        """
        if not kind or function in self._worked:
            return Mistake(likely=False, sure=False)
        failed = self._failed[function, kind]
        failed.update(sample.id for sample in samples)
        enough = len(failed) >= self._samples and len({group for group, _ in failed}) >= self.groups
        return Mistake(likely=True, sure=enough and sum(s.id not in failed for s in others) <= len(failed))


class SampleLives:
    """The handlers of all events that change a sample, a call, an attempt or the state of a group."""

    def __init__(self, context: CoreContext) -> None:
        self._context = context
        self._mistakes = Mistakes(context.settings)
        self._failed_in_a_row = 0
        """Groups dropped for failures since the last group that counted."""
        self._filtered_in_a_row = 0
        """Groups that the filter rejected since the last group that counted."""

    # ---------------------------------------------------------------- calls

    def call_made(self, event: ev.CallMade) -> None:
        """A rollout function asks for tokens."""
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
        """The chain of a call that may be of any conversation: where it was made before its function was lost, else the
        longest of those free that it extends. None means that it begins one.
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
            # what this run has heard goes before an equal conversation of which it has heard nothing
            if not heard or chain is None or self._heard_until(lost, heard) > longest:
                return lost
        return chain

    def _heard_until(self, chain: Chain, heard: int) -> int:
        """Tokens of its conversation with so many of the answers that are to be replayed."""
        assert chain.replay is not None
        return len(chain.prompt) + chain.replay.calls[heard - 1].end

    def _heard_before(self, chain: Chain, token_ids: Int32, attached: Sequence[Placed]) -> int | None:
        """Return after how many of the answers that are to be replayed a call comes; None: it is of another chain.

        A function that begins anew asks for the first of them. A client that has outlived the process asks for what
        follows on the last one that it has heard: those before stand in its tokens.
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
        """Return whether the tokens are those before ``start``, as far as there was room for them."""
        asked = token_ids[: self._room_for(chain, attached)]
        return len(asked) == len(chain.prompt) + start and chain.begins(asked, start, attached)

    def _room_for(self, chain: Chain, attached: Sequence[Placed]) -> int:
        """The most tokens of a conversation that a chain has room for; no attachment is there in part."""
        most = len(chain.prompt) + self._context.attempts.room(chain)
        return next((placed.at for placed in attached if placed.end > most), most) if attached else most

    def _is_cut(self, chain: Chain, event: ev.CallMade) -> bool:
        """Return whether the conversation ends before something attached that has no room: nothing is to follow."""
        return event.token_ids is not None and self._room_for(chain, event.attached) < len(event.token_ids)

    def _call_of_any_chain(self, sample: Sample, event: ev.CallMade) -> None:
        """Answer from a tape what was answered before; else continue a chain, or begin one."""
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
                # the conversation that the prompt begins was never asked for
                chain.prompt, chain.attached = np.array(ids, np.int32), attached
        self._add_environment(chain, ids, attached)
        self._open(chain, event, len(chain.tape))

    def _no_chain(self, sample: Sample, token_ids: Int32) -> str | None:
        """Return why no further chain may begin with these tokens; None means that one may."""
        settings = self._context.settings
        # those of before a restart count once they are asked for again
        if sum(bool(chain.calls) for chain in sample.chains) >= settings.max_chains:
            return f"it wants more than max_chains={settings.max_chains} conversations"
        if len(token_ids) >= self._context.engines.max_context:
            return f"a conversation of {len(token_ids)} tokens has no room in the engines' context"
        return None

    def _open(self, chain: Chain, event: ev.CallMade, start: int) -> None:
        call = GenerateCall(chain, event.sampling, start, event.number)
        chain.calls.append(call)
        # a call out of a saved state may be complete: it was saved between its last token and the end of its attempt
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
        """Make a segment of what the function added since its last call, cut to the room; returns what is wrong."""
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
        """Answer from the tape what was answered before; a function that asks otherwise begins again."""
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
                chain.replay = None  # it stood between two calls: from here on it is on its own
            self._answer(call, end, finish)
            return
        chain.replay = None
        if start is None and ids is not None:
            self._add_environment(chain, ids, event.attached)
        self._open(chain, event, len(chain.tape) if start is None else start)

    def call_unheard(self, event: ev.CallUnheard) -> None:
        """A call's answer reaches nobody: it ends, and its tokens leave their chain; one that went on since stays."""
        context = self._context
        sample = context.sample(event.sample)
        if sample is None:
            return
        last = [chain.calls[-1] for chain in sample.chains if chain.calls]
        call = next((c for c in last if c.number == event.number), None)
        # what a lost function has heard is asked again
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
        """End the attempt of a call, if there is one; its tokens are dropped for this reason when it has ended."""
        if call.attempt is not None:
            call.attempt.lost_for = reason
            self._context.to(call.attempt, ABANDONED, f"attempt abandoned ({reason})")
            self._context.stop([call.attempt])

    def _drop_unclaimed(self, sample: Sample) -> None:
        """The function has returned and asked for less than before the restart: the rest of its chains is dropped."""
        for chain in sample.chains:
            if chain.replay is not None:
                end = chain.calls[-1].end if chain.calls else 0
                self._context.tokens.drop(chain.cut(end), DropReason.REPLAY_DIVERGED)
                self._context.counters["replays_diverged"] += 1
                chain.replay = None
        sample.chains = tuple(chain for chain in sample.chains if chain.number == 0 or chain.calls)

    def diverged(self, sample: Sample) -> None:
        """The function did not ask what it had asked before: its tokens belong to another conversation."""
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
        """Complete a call if the sample's other calls have used up the budget while it waited; returns whether so."""
        return self._context.settings.max_sample_tokens is not None and self._complete_if(call, stopped=False)

    def submit(self, call: GenerateCall, engine: str) -> None:
        """Send what is missing of a call to an engine."""
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
            context.counters["reprefill_tokens"] += len(attempt.token_ids)
        context.to(call, CallState.IN_FLIGHT, f"attempt {attempt.id} on {engine} from token {held}")
        context.out.append(do.Submit(attempt))

    def stop_found(self, event: ev.StopFound) -> None:
        """The text of an attempt has a stop string: its response is complete, the engine may rest."""
        if attempt := self._running(event.attempt_id):
            self._context.stop([attempt])

    def _running(self, attempt_id: str) -> Attempt | None:
        """The attempt; None, and a late event, for one that is accounted for."""
        attempt = self._context.attempts.get(attempt_id)
        self._context.counters["late_events"] += attempt is None
        return attempt

    def attempt_stalled(self, event: ev.AttemptStalled) -> None:
        """An engine is silent about an attempt: it is asked to end it, and another engine may go on."""
        attempt = self._running(event.attempt_id)
        if attempt is None:
            return
        if attempt.state is AttemptState.WANTED:
            attempt.silent_s = event.seconds
            self._context.to(attempt, SILENT, f"engine {attempt.engine} is silent")
        self._context.counts(attempt.sample)["stalled_attempts"] += 1
        self._context.stop([attempt])

    def attempt_ended(self, event: ev.AttemptEnded) -> None:
        """An attempt is over, by itself or because it was asked to end."""
        context, counts = self._context, event.counts
        attempt = self._close(event)
        if attempt is None:
            return
        came = counts.tokens
        # others may never have reached it
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
        """Go on from what is there, elsewhere if possible; failing again and again at the same token is too much."""
        call = attempt.call
        progressed &= call.sample.evaluation is None  # which begins again
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
        """An attempt broke off; its tokens are kept unless they cannot be true."""
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
        # an engine that breaks off is not used before it was probed; one that sends nonsense is, a few times; one that
        # takes no requests for now, or says what is wrong with this one, is well; so is one whose tokens have no text
        if corrupt or kind is AttemptFailure.BROKE_OFF:
            context.engine_failed(attempt.engine, at_once=not corrupt)
        call = attempt.call
        if attempt.state is ABANDONED:
            return
        if attempt.state is DOUBTFUL:  # what a restarted server refuses, the right one may take
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
        """Take the attempt out of the book; None if it was accounted for before."""
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
        """Move the attempt's tokens to its sample, or drop them in the ledger."""
        sample, count, lost_for = attempt.sample, counts.tokens, attempt.lost_for
        tokens = self._context.ledger(sample)
        tokens.observe(count)
        cut = finish is ABORT and not counts.ends and count < attempt.sampling.max_tokens
        if cut and sample.evaluation is not None:
            lost_for = lost_for or DropReason.FAILED  # its call begins again with the same seed
        if lost_for is not None:
            tokens.drop(count, lost_for)
            return
        chain = attempt.call.chain
        chain.tape.add_attempt(attempt.tape, attempt.id, attempt.engine, attempt.sampling.temperature, attempt.over)
        if count:  # else what an earlier attempt left elsewhere is still the best there is
            if attempt.tape.extras:
                chain.add_extras(attempt.tape.extras)
            state = self._context.engines.states[attempt.engine]
            kept = attempt.over not in (None, state.version)  # what it wrote serves no request of the present version
            chain.cached_on, chain.cached_under = "" if kept else attempt.engine, state.life

    # ---------------------------------------------------------------- returns, rewards and verdicts

    def sample_returned(self, event: ev.SampleReturned) -> None:
        """A rollout function has returned."""
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
            error = "the rollout function returned without a call of llm.generate; await at least one"
            self.cannot_go_on(sample, error)
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
        """A rollout or reward function failed; returns whether it would fail for every sample."""
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
        """Yield samples whose function is at work where that of ``sample`` has failed, or further."""
        scored = (SCORING, FINISHED)
        if sample.state is RUNNING and sample.generated:
            return  # the others still generate
        for group in self._context.buffer.groups.values():
            if whole and not all(s.state in scored for s in group.members):
                continue  # it is not asked for yet
            for s in group.members:
                if s.state is sample.state and (s.state is SCORING or s.asks):
                    yield s

    def _waits(self, mistake: Mistake) -> bool:
        """Return whether the next try waits; where too few prompts are in work to be sure of a mistake, it does not."""
        return not mistake.likely or len(self._context.buffer.groups) >= self._mistakes.groups

    def scored(self, event: ev.Scored) -> None:
        """Rewards have come in: all of them count, or none."""
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
        """The sample itself, or the sibling for which its whole group is scored anew; None if neither."""
        if sample.state is SCORING:
            return sample
        if sample.state is not FINISHED or not self._context.settings.group_reward:
            return None
        return next((s for s in sample.group.samples if s.state is SCORING), None)

    def ask_again(self, timer: int) -> None:
        """A pause after a failure is over: ask once more what is still wanted."""
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
        """A verdict counts unless the group was dropped, or a sample of it began again, since the filter was asked."""
        return group is not None and group.state is JUDGED and group.since == judgement

    def group_judged(self, event: ev.GroupJudged) -> bool:
        """The filter gave its verdict, or failed; returns whether it would fail for every group."""
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

    # ---------------------------------------------------------------- from a reward to a group that counts

    def sample_finished(self, sample: Sample) -> None:
        """A sample has its reward."""
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
        """Let an open group with a finished quorum count, or ask the filter about it."""
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
        """Let the group count; its cohort is fixed from now on."""
        self._context.to_group(group, READY, "complete")
        self._failed_in_a_row = self._filtered_in_a_row = 0
        group.cohort = group.rewarded
        if self._context.settings.whole_groups:
            self._context.monitor.accept(group)
        else:
            for index in group.finishers:
                self._count(group.samples[index])

    def _count(self, sample: Sample) -> None:
        """With a quorum, a single sample can be delivered from now on."""
        sample.since = self._context.event_number
        self._context.monitor.accept(sample)

    def no_longer_finished(self, sample: Sample) -> None:
        """A finished sample begins again, or is given up."""
        self._context.monitor.not_ready(sample)
        sample.group.finishers.remove(sample.id.index)
        sample.group.unfinished += 1

    def reopen(self, group: Group) -> None:
        """A finished sample began again; with a quorum that changes nothing once the cohort is fixed."""
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
        """Run functions once more whose returns a group reward or the filter needs and a dead process had.

        Their calls are answered from the tape; a group that counts already needs no returns.
        """
        context, settings = self._context, self._context.settings
        if group.state is READY or not (settings.group_reward or settings.has_filter):
            return
        for sample in group.samples:
            if sample.replayed and sample.state is FINISHED:
                self.no_longer_finished(sample)
                context.lengths.generated.add(sample.generated, -1)  # until it is finished once more
                sample.finish = None
                context.to(sample, NEW, "runs again for what it returns")
                context.over_sampler.push(sample)
        if group.state is not OPEN:
            context.to_group(group, OPEN, "what the filter was to see is lost")

    # ---------------------------------------------------------------- trying again, and giving up

    def fail(self, sample: Sample, error: str, *, waits: bool = True) -> None:
        """Try the reward (after a pause, if it ``waits``) or the whole sample again, so often and no more."""
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
        """Replace the sample, or give it up, its group, or its evaluation.

        ``kind`` says how the request failed that is to blame; None means that a function is.
        """
        if sample.evaluation is not None:
            sample.evaluation.fail(error, kind, sample if kind is None else None)
            return
        group, settings, error = sample.group, self._context.settings, f"{sample.id}: {error}"
        policy, n = settings.on_failed_sample, settings.n_samples_per_prompt
        # with group rewards it is the group that cannot be scored; one that counts goes on without its stragglers
        of_all = settings.group_reward and sample.state is SCORING
        counts = group.state is not OPEN
        if policy is OnFailedSample.REPLACE and not of_all and len(group.samples) < MOST_SAMPLES * n:
            self._replace(sample, error)
        elif counts or (policy is OnFailedSample.SHRINK and not of_all and group.held > settings.min_group_size):
            self.give_up_sample(sample, DropReason.FAILED, error)
        else:
            self.give_up(group, DropReason.FAILED, error)

    def _replace(self, sample: Sample, error: str) -> None:
        """A fresh sample joins the group before the one that failed leaves it."""
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
        """Seconds before the next try: the judge or sandbox that a function asks may be well again by then."""
        return min(self._context.settings.retry_pause_s * PAUSE_GROWTH ** (failures - 1), LONGEST_PAUSE_S)

    def ask_reward(self, sample: Sample) -> None:
        """Ask for the reward of a sample that has returned; with group rewards, once all its siblings have."""
        if self._context.settings.group_reward:
            self._ask_group_reward(sample.group)
        else:
            sample.retry = None
            self._context.out.append(do.ScoreSample(sample))

    def _ask_group_reward(self, group: Group) -> None:
        """Ask if every held sample has returned and not every one has its reward."""
        members = group.members
        for sample in members:
            sample.retry = None
        states = {sample.state for sample in members}
        if SCORING in states and states <= {SCORING, FINISHED}:
            self._context.out.append(do.ScoreGroup(group))

    def begin_again(self, sample: Sample, reason: DropReason) -> None:
        """Drop the tokens of a sample and start it anew."""
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
        """End whatever the sample does, and drop its tokens."""
        context, generated = self._context, sample.generated
        if sample.state in (SCORING, FINISHED):
            context.lengths.drop(generated, reason, counted=sample.state is FINISHED)
        elif generated or any(call.attempt is not None for call in sample.open_calls):
            context.lengths.unfinished[reason] += 1
        self.leave(sample, reason)
        context.tokens.drop(generated, reason)

    def leave(self, sample: Sample, reason: DropReason) -> None:
        """Take a sample out of wherever it is waiting or generating, and end its rollout function."""
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
        """Drop one sample; its group goes on with the others, if there are any or some are delivered."""
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
        """A sample was delivered, or given up for ``reason``; a prompt counts as delivered if any sample of it was."""
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
        """Drop a whole group; it is replaced by the rules of the over-sampler."""
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
        """After a weight update: begin again or drop what exceeds max_staleness, where the policy says so."""
        context = self._context
        for sample in context.buffer.too_old():
            if sample.state is DROPPED:
                continue  # with a sibling, a moment ago
            why = f"{sample.id} is older than max_staleness"
            if context.settings.on_stale is OnStale.RESTART:
                self.begin_again(sample, DropReason.STALE)
            elif sample.group.state is READY and not context.settings.whole_groups:
                self.give_up_sample(sample, DropReason.STALE, why)
            else:
                self.give_up(sample.group, DropReason.STALE, why)

    # ---------------------------------------------------------------- functions that died with their host

    def functions_lost(self, event: ev.FunctionsLost) -> None:
        """The functions of these groups died with their host; settled groups need none."""
        for number in event.groups:
            group = self._context.group(number)
            if group is None:
                continue
            killers = [s for s in group.members if self._has_died_too_often(s)] if event.died else []
            if group.evaluation is not None:
                if killers:
                    self._fail_for_deaths(killers[0])
                else:
                    self._evaluate_anew(group, group.evaluation)
                continue
            for sample in group.members:
                if sample.state not in (RUNNING, SCORING):
                    continue
                if sample in killers:
                    self._fail_for_deaths(sample)
                else:
                    self._lose_function(sample)
            if not group.held:
                continue
            for sample in group.members:  # the returns of finished samples are lost, and what was to be judged
                if sample.state is FINISHED:
                    sample.replay_all()
            self.run_again_for_returns(group)

    def _has_died_too_often(self, sample: Sample) -> bool:
        """Count the deaths of hosts while a function of the sample ran there and got no further; too many in a row?"""
        group = sample.group
        waits = sample.asks or sample.retry is not None
        if sample.state is SCORING and self._context.settings.group_reward:
            waits = any(s.state not in (SCORING, FINISHED) for s in group.members)
        if waits or sample.state not in (RUNNING, SCORING):
            return False
        (times, at), now = sample.deaths, sample.tokens
        sample.deaths = times + 1 if at == now else 1, now
        return sample.deaths[0] >= self._context.settings.max_attempt_failures

    def _fail_for_deaths(self, sample: Sample) -> None:
        """A function that ran each time a host died may be what the hosts died of."""
        context, times = self._context, sample.deaths[0]
        why = f"{times} hosts in a row died while its functions ran there; what they do may be why"
        context.counts(sample)["failed_samples"] += 1
        context.note(sample, f"failed: {why}")
        self.cannot_go_on(sample, why)

    def _lose_function(self, sample: Sample) -> None:
        context, calls = self._context, sample.open_calls
        if any(call.lost for call in calls):
            return
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
        """Start the function of a sample anew, once none of its attempts is at an engine; its calls are answered from
        the tapes.
        """
        context, calls = self._context, sample.open_calls
        if any(call.attempt is not None for call in calls):
            return
        context.places.give_back(sample)
        for call in calls:
            context.over_sampler.forget(call)
        sample.replay_all()
        sample.finish, sample.retry = None, None
        context.to(sample, NEW, "its function runs again, answered from the tape")
        context.over_sampler.push(sample)

    def _evaluate_anew(self, group: Group, evaluation: Evaluation) -> None:
        """Begin every sample from nothing, finished ones too, as an evaluation is what its functions return.

        The seeds stay, so the responses will be those that they would have been.
        """
        context = self._context
        for sample in reversed(group.members):
            if sample.state is NEW:
                continue
            evaluation.counters["lost_functions"] += 1
            evaluation.functions -= sample.state is RUNNING
            if sample.state is FINISHED:
                self.no_longer_finished(sample)
            self.leave(sample, DropReason.FAILED)
            evaluation.tokens.drop(sample.generated, DropReason.FAILED)
            sample.clear()
            sample.reward = 0.0
            context.to(sample, NEW, "begins again, as its function was lost")
            evaluation.to_start.appendleft(sample)
        if group.ready:
            context.to_group(group, OPEN, "its functions were lost")
            evaluation.unfinished += 1
