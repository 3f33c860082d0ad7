"""Generation: the life of a sample from its rollout function's calls to complete responses.

A call may take several attempts; whatever an attempt brought is kept before anything else is decided. Where a function
begins again, as its process has died, calls that were complete are answered from the tape, as long as it asks the same.
"""

from __future__ import annotations

import numpy as np

from april.core import commands as do
from april.core import events as ev
from april.core.context import CoreContext
from april.core.failures import Failures
from april.core.lost_functions import LostFunctions
from april.core.sampling import SamplingParams
from april.core.tape import AttemptCounts, Int32
from april.core.types import (
    Attempt,
    AttemptFailure,
    AttemptState,
    CallState,
    DropReason,
    EngineFinish,
    FinishReason,
    GenerateCall,
    Sample,
)
from april.errors import InvariantError

# names of the module: an enum's member costs 60 ns per use on Python 3.11, and these are used at every event
STOP, LENGTH, ABORT = EngineFinish.STOP, EngineFinish.LENGTH, EngineFinish.ABORT
_REJECTED_FOR = {
    AttemptFailure.WEIGHTS_WRITTEN: DropReason.UNKNOWN_WEIGHTS,
    AttemptFailure.NO_TEXT: DropReason.FAILED,
}
SILENT, DOUBTFUL, ABANDONED = AttemptState.SILENT, AttemptState.DOUBTFUL, AttemptState.ABANDONED


class Generation:
    """Calls and attempts."""

    def __init__(self, context: CoreContext, failures: Failures, lost: LostFunctions) -> None:
        self._context = context
        self._failures = failures
        self._lost = lost

    # ---------------------------------------------------------------- calls

    def call_made(self, event: ev.CallMade) -> None:
        """A rollout function asks for tokens."""
        sample = self._context.free_to_act(event.sample, "called generate twice at the same time")
        if sample is None:
            return
        if sample.replay is not None:
            self._replay(sample, event)
            return
        if event.token_ids is not None:
            error = self._take_environment(sample, event.token_ids)
            if error:
                self._failures.cannot_go_on(sample, error)
                return
        self._open(sample, event.sampling, len(sample.tape))

    def _open(self, sample: Sample, sampling: SamplingParams, start: int) -> None:
        call = GenerateCall(sample, sampling, start)
        sample.calls.append(call)
        if not self._complete_if_it_is(call):  # saved between the last token and the end of its attempt
            self._context.note(sample, f"asks for up to {sampling.max_tokens} tokens")
            self._context.over_sampler.push(call)

    def _complete_if_it_is(self, call: GenerateCall) -> bool:
        """A call out of a saved state is complete if its tokens end in EOS, or have used its budget."""
        attempts = self._context.attempts
        if attempts.ends_in_stop(call):
            self._complete(call, FinishReason.STOP)
        elif attempts.budget(call) <= 0:
            self._complete(call, FinishReason.LENGTH)
        else:
            return False
        return True

    def _take_environment(self, sample: Sample, token_ids: Int32) -> str | None:
        """What the rollout function added since the last call becomes a segment of the environment, cut to the room."""
        prompt = sample.group.prompt.token_ids
        have = np.concatenate((prompt, sample.tape.tokens))
        if len(token_ids) < len(have) or not np.array_equal(token_ids[: len(have)], have):
            return (
                "llm.generate was given tokens that do not begin with the prompt and everything generated so far; "
                "append to the conversation, never rewrite it"
            )
        added = token_ids[len(have) : len(prompt) + self._context.attempts.room(sample)]
        sample.tape.add_environment(np.array(added, np.int32), self._context.clock.current)
        return None

    def _replay(self, sample: Sample, event: ev.CallMade) -> None:
        """Answer from the tape what was answered before; a function that asks otherwise begins again."""
        replay = sample.replay
        assert replay is not None
        start = replay.calls[0].start if replay.calls else replay.open_start
        if start is None:
            sample.replay = None  # it stood between two calls: from here on it is on its own
            self.call_made(event)
            return
        prompt, tape = sample.group.prompt.token_ids, sample.tape.tokens
        if event.token_ids is None:
            same = start == sample.seen
        else:
            asked = event.token_ids[: len(prompt) + self._context.attempts.room(sample)]
            same = np.array_equal(asked, np.concatenate((prompt, tape[:start])))
        if not same:
            self.diverged(sample)
        elif replay.calls:
            call = GenerateCall(sample, event.sampling, start)
            sample.calls.append(call)
            _, end, finish = replay.calls.popleft()
            self._answer(call, end, finish)
        else:
            sample.replay = None
            self._open(sample, event.sampling, start)

    def diverged(self, sample: Sample) -> None:
        """The function did not ask what it had asked before: its tokens belong to another conversation."""
        self._context.counters["replays_diverged"] += 1
        self._failures.begin_again(sample, DropReason.REPLAY_DIVERGED)

    def _complete(self, call: GenerateCall, finish: FinishReason) -> None:
        self._answer(call, len(call.sample.tape), finish)

    def _answer(self, call: GenerateCall, end: int, finish: FinishReason) -> None:
        call.end, call.finish, call.sample.finish = end, finish, finish
        self._context.to(call, CallState.DONE, f"call complete ({finish}) at {end} tokens")
        if call.lost:
            self._lost.begin_again(call.sample)
        else:
            self._context.out.append(do.CallCompleted(call))

    def _queue(self, call: GenerateCall, why: str) -> None:
        self._context.to(call, CallState.QUEUED, why)
        if call.lost:
            self._lost.begin_again(call.sample)
        else:
            self._context.over_sampler.push(call)

    # ---------------------------------------------------------------- attempts

    def submit(self, call: GenerateCall, engine: str) -> None:
        """Send what is missing of a call to an engine."""
        context, sample, held = self._context, call.sample, len(call.sample.tape)
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
        attempt = self._context.attempts.get(event.attempt_id)
        if attempt is None:
            self._context.counters["late_events"] += 1
        else:
            self._context.stop([attempt])

    def attempt_stalled(self, event: ev.AttemptStalled) -> None:
        """An engine is silent about an attempt: it is asked to end it, and another engine may go on."""
        attempt = self._context.attempts.get(event.attempt_id)
        if attempt is None:
            self._context.counters["late_events"] += 1
            return
        if attempt.state is AttemptState.WANTED:
            attempt.silent_s = event.seconds
            self._context.to(attempt, AttemptState.SILENT, f"engine {attempt.engine} is silent")
        self._context.counts(attempt.sample)["stalled_attempts"] += 1
        self._context.stop([attempt])

    def attempt_ended(self, event: ev.AttemptEnded) -> None:
        """An attempt is over, by itself or because it was asked to end."""
        context, counts = self._context, event.counts
        attempt = self._take(event)
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
        if self._complete_after(call, event.finish, counts):
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
            self._failures.cannot_go_on(call.sample, error, kind)

    def _go_elsewhere(self, attempt: Attempt, why: str, error: str, kind: AttemptFailure) -> None:
        if kind is not AttemptFailure.NO_TEXT:
            attempt.call.avoid = attempt.engine
        if attempt.sample.evaluation is not None:
            attempt.sample.evaluation.trouble = error, kind
        self._queue(attempt.call, why)

    def _complete_after(self, call: GenerateCall, finish: EngineFinish, counts: AttemptCounts) -> bool:
        """Complete the call if this attempt brought its last token, whatever cut it off there."""
        if finish is STOP or (finish is ABORT and counts.ends):
            self._complete(call, FinishReason.STOP)
        elif finish is LENGTH or self._context.attempts.budget(call) <= 0:
            self._complete(call, FinishReason.LENGTH)
        else:
            return False
        return True

    def attempt_failed(self, event: ev.AttemptFailed) -> None:
        """An attempt broke off; its tokens are kept unless they cannot be true."""
        context, came = self._context, event.counts.tokens
        attempt = self._take(event)
        if attempt is None:
            return
        kind, corrupt = event.kind, event.kind is AttemptFailure.CORRUPT
        written = kind is AttemptFailure.WEIGHTS_WRITTEN
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
        suspect = kind in (AttemptFailure.BROKE_OFF, AttemptFailure.CORRUPT)
        if suspect:
            context.engine_failed(attempt.engine, at_once=not corrupt)
        call = attempt.call
        if attempt.state is ABANDONED:
            return
        if attempt.state is DOUBTFUL:  # what a restarted server refuses, the right one may take
            self._queue(call, f"engine {attempt.engine} had other weights: {event.error}")
            return
        if kind is AttemptFailure.REFUSED:
            self._queue(call, f"refused: {event.error}")
            self._failures.cannot_go_on(call.sample, event.error, kind)
            return
        if not corrupt and self._complete_after(call, ABORT, event.counts):
            return
        if written:
            why = f"engine {attempt.engine}: weights were written, {event.rejected} tokens dropped"
            self._queue(call, why)
            return
        if kind is AttemptFailure.BUSY:
            self._go_elsewhere(attempt, f"engine {attempt.engine} is busy", event.error, kind)
            return
        self._broke_off(attempt, event.error, kind, progressed=came > 0 and not corrupt)

    def _take(self, event: ev.AttemptEnded | ev.AttemptFailed) -> Attempt | None:
        """The attempt, which is no longer in flight; None for one that is already accounted for."""
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
        context.aborts.ended(attempt.id)
        return attempt

    def _keep(self, attempt: Attempt, finish: EngineFinish, counts: AttemptCounts) -> None:
        """The attempt's tokens move to the sample, or into the ledger, under the reason they are dropped for."""
        sample, count, lost_for = attempt.sample, counts.tokens, attempt.lost_for
        tokens = self._context.ledger(sample)
        tokens.observe(count)
        cut = finish is ABORT and not counts.ends and count < attempt.sampling.max_tokens
        if cut and sample.evaluation is not None:
            lost_for = lost_for or DropReason.FAILED  # its call begins again with the same seed
        if lost_for is not None:
            tokens.drop(count, lost_for)
            return
        sample.tape.add_attempt(attempt.tape, attempt.id, attempt.engine, attempt.sampling.temperature)
        if count:  # else what an earlier attempt left elsewhere is still the best there is
            sample.cached_on, sample.cached_under = attempt.engine, self._context.engines.states[attempt.engine].life
