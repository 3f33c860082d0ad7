"""Submits attempts (engine requests), and decides what happens when one ends, fails or stalls.

The tokens of the attempt are stored or dropped, and its call is completed, sent again or given up.

``engine_recovery`` decides when an engine that failed or was busy is used again. Invariants: the tokens of an attempt
are stored before anything else is decided; the tokens of an attempt for which its sample no longer waits are dropped
when it ends, for the reason in ``Attempt.drop_reason``.
"""

from __future__ import annotations

from april.core import commands as do
from april.core import events as ev
from april.core.attachments import joined
from april.core.context import CoreContext
from april.core.sample_calls import SampleCalls
from april.core.sample_lifecycle import SampleLifecycle
from april.core.tape import AttemptCounts
from april.core.types import Attempt, AttemptFailure, AttemptState, CallState, DropReason, EngineFinish, GenerateCall
from april.errors import InvariantError

# module-level names, as an enum member costs 60 ns per use on Python 3.11 and these are used at every event
STOP, LENGTH, ABORT = EngineFinish.STOP, EngineFinish.LENGTH, EngineFinish.ABORT
SILENT, DOUBTFUL, ABANDONED = AttemptState.SILENT, AttemptState.DOUBTFUL, AttemptState.ABANDONED
_DROP_REASON_OF_REJECTED = {
    AttemptFailure.WEIGHTS_WRITTEN: DropReason.UNKNOWN_WEIGHTS,
    AttemptFailure.NO_TEXT: DropReason.FAILED,
}


class AttemptResults:
    """Starts attempts, and handles how they end."""

    def __init__(self, context: CoreContext, calls: SampleCalls, lifecycle: SampleLifecycle) -> None:
        self._context = context
        self._calls = calls
        self._lifecycle = lifecycle

    def submit(self, call: GenerateCall, engine: str) -> None:
        """Start an attempt at ``engine`` that generates the call's remaining tokens."""
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
        context.change_state(call, CallState.IN_FLIGHT, f"attempt {attempt.id} on {engine} from token {held}")
        context.out.append(do.Submit(attempt))

    def stop_found(self, event: ev.StopFound) -> None:
        """Abort an attempt whose text contains a stop string, as its response is complete."""
        if attempt := self._attempt_in_flight(event.attempt_id):
            self._context.stop([attempt])

    def attempt_stalled(self, event: ev.AttemptStalled) -> None:
        """Abort an attempt for which the engine sent no token for too long, so that another engine can continue."""
        attempt = self._attempt_in_flight(event.attempt_id)
        if attempt is None:
            return
        if attempt.state is AttemptState.WANTED:
            attempt.silent_s = event.seconds
            self._context.change_state(attempt, SILENT, f"engine {attempt.engine} sends nothing")
        self._context.counts(attempt.sample)["stalled_attempts"] += 1
        self._context.stop([attempt])

    def _attempt_in_flight(self, attempt_id: str) -> Attempt | None:
        """Return the attempt in flight; if it has already ended, count a late event and return None."""
        attempt = self._context.attempts.get(attempt_id)
        self._context.counters["late_events"] += attempt is None
        return attempt

    def attempt_ended(self, event: ev.AttemptEnded) -> None:
        """Store the tokens of an ended attempt, then complete its call or queue it again."""
        context, counts = self._context, event.counts
        attempt = self._close(event)
        if attempt is None:
            return
        came = counts.tokens
        # an attempt aborted without tokens may never have reached the engine, so it does not show that the engine works
        if not event.fenced and (event.finish is not ABORT or came or counts.after_stop):
            context.engines.count_end(attempt.engine, context.engines.states[attempt.engine].in_flight)
        self._store_tokens(attempt, event.finish, counts)
        call = attempt.call
        if attempt.state is ABANDONED:
            return
        if attempt.state is DOUBTFUL:
            self._calls.queue(call, f"engine {attempt.engine} had other weights: {came} tokens dropped")
            return
        stopped = event.finish is STOP or (event.finish is ABORT and counts.ends)
        if self._calls.complete_if_ended(call, stopped=stopped, length=event.finish is LENGTH):
            return
        if attempt.state is SILENT:
            why = f"engine {attempt.engine} sent nothing for {attempt.silent_s:g} s"
            self._retry_or_give_up(attempt, why, progressed=came > 0)
            return
        if call.sample.evaluation is not None:
            why = f"engine {attempt.engine} ended a request that april still wanted"
            self._retry_or_give_up(attempt, why, progressed=False)
            return
        if not came:
            context.counters["empty_partials"] += 1
        call.failures, call.avoid_engine = 0, ""
        self._calls.queue(call, f"partial after {came} tokens")

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
        tokens.drop(event.rejected, _DROP_REASON_OF_REJECTED.get(kind, DropReason.CORRUPT))
        if corrupt:
            tokens.observe(came)
            tokens.drop(came, DropReason.CORRUPT)
        else:
            self._store_tokens(attempt, ABORT, event.counts)
        # One request that broke off quarantines the engine until a probe succeeds; corrupt answers do so after several
        # in a row. An engine that is busy, rejects a request or sends tokens that april cannot decode is healthy.
        if corrupt or kind is AttemptFailure.BROKE_OFF:
            context.engine_failed(attempt.engine, at_once=not corrupt)
        call = attempt.call
        if attempt.state is ABANDONED:
            return
        if attempt.state is DOUBTFUL:  # another engine may accept a request that a restarted server refused
            self._calls.queue(call, f"engine {attempt.engine} had other weights: {event.error}")
            return
        if kind is AttemptFailure.REFUSED:
            self._calls.queue(call, f"refused: {event.error}")
            self._lifecycle.replace_or_drop(call.sample, event.error, kind)
            return
        if not corrupt and self._calls.complete_if_ended(call, stopped=event.counts.ends):
            return
        if kind is AttemptFailure.WEIGHTS_WRITTEN:
            self._calls.queue(call, (
                f"engine {attempt.engine}: weights were changed during the request, so {event.rejected} tokens are "
                "dropped"
            ))
            return
        if kind is AttemptFailure.BUSY:
            self._queue_for_another_engine(attempt, f"engine {attempt.engine} is busy", event.error, kind)
            return
        self._retry_or_give_up(attempt, event.error, kind, progressed=came > 0 and not corrupt)

    def _retry_or_give_up(
        self, attempt: Attempt, error: str, kind: AttemptFailure = AttemptFailure.BROKE_OFF, *, progressed: bool
    ) -> None:
        """Queue the call again, for another engine if possible.

        The sample fails after too many failed attempts in a row that brought no token.
        """
        call = attempt.call
        progressed &= attempt.begins_again is None  # tokens that must be generated again are no progress
        call.failures = 0 if progressed else call.failures + 1
        self._queue_for_another_engine(attempt, f"attempt failed: {error}", error, kind)
        if call.failures >= self._context.settings.max_attempt_failures:
            self._lifecycle.replace_or_drop(call.sample, error, kind)

    def _queue_for_another_engine(self, attempt: Attempt, why: str, error: str, kind: AttemptFailure) -> None:
        if kind is not AttemptFailure.NO_TEXT:
            attempt.call.avoid_engine = attempt.engine
        if attempt.sample.evaluation is not None:
            attempt.sample.evaluation.last_engine_error = error, kind
        self._calls.queue(attempt.call, why)

    def _close(self, event: ev.AttemptEnded | ev.AttemptFailed) -> Attempt | None:
        """Remove the attempt from the attempts in flight and return it; return None if it had already ended."""
        context, after_stop = self._context, event.counts.after_stop
        attempt = context.attempts.close(event.attempt_id)
        if attempt is None:
            context.counters["late_events"] += 1
            return None
        if event.counts.tokens != attempt.tape.count:
            what = f"has {attempt.tape.count} new tokens, but its last event says otherwise"
            raise context.impossible_event(attempt.owner, what)
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
        if (cached := event.counts.cached) is not None:
            counters, size = context.counts(attempt.sample), len(attempt.request.token_ids)
            counters["cached_tokens"] += min(max(cached, 0), size)
            counters["cacheable_tokens"] += size
        context.aborts.ended(attempt.id)
        return attempt

    def _store_tokens(self, attempt: Attempt, finish: EngineFinish, counts: AttemptCounts) -> None:
        """Append the attempt's tokens to its sample, or record them in the ledger as dropped."""
        sample, count, lost_for = attempt.sample, counts.tokens, attempt.drop_reason
        tokens = self._context.ledger(sample)
        tokens.observe(count)
        cut = finish is ABORT and not counts.ends and count < attempt.request.sampling.max_tokens
        if cut:
            lost_for = lost_for or attempt.begins_again
        if lost_for is not None:
            tokens.drop(count, lost_for)
            return
        chain, temperature = attempt.call.chain, attempt.request.sampling.temperature
        if count and sample.group.oldest is None:
            sample.group.oldest = attempt.tape.spans[0][0]  # later tokens of the group are of this or a later version
        chain.tape.add_attempt(
            attempt.tape, attempt.id, attempt.engine, temperature, attempt.over, constrained=attempt.constrained
        )
        if count:  # without tokens, the engine of an earlier attempt still caches the longest prefix
            if attempt.tape.extras:
                chain.extras = joined(chain.extras, attempt.tape.extras)
            state = self._context.engines.states[attempt.engine]
            # with on_weight_update: keep, the engine computed the request's keys and values with older weights, and
            # does not reuse them for later requests
            kept = attempt.over not in (None, state.version)
            chain.cached_on, chain.cache_key = "" if kept else attempt.engine, state.cache_key
