"""Generation: the life of a sample from its rollout function's calls to complete responses.

A call may take several attempts; whatever an attempt brought is kept before anything else is decided. After a restart
of the process, calls that were complete are answered from the tape, as long as the function asks what it had asked.
"""

from __future__ import annotations

import numpy as np

from april.core import commands as do
from april.core import events as ev
from april.core.context import CoreContext
from april.core.failures import Failures
from april.core.tape import AttemptCounts, Int32
from april.core.types import (
    Attempt,
    AttemptFailure,
    DropReason,
    EngineFinish,
    FinishReason,
    GenerateCall,
    RecordedCall,
    Sample,
    SampleState,
)


class Generation:
    """Calls and attempts."""

    def __init__(self, context: CoreContext, failures: Failures) -> None:
        self._context = context
        self._failures = failures

    # ---------------------------------------------------------------- calls

    def call_made(self, event: ev.CallMade) -> None:
        """A rollout function asks for tokens."""
        sample = self._context.outside(event.sample, "called generate twice at the same time")
        if sample is None:
            return
        if sample.replay is not None:
            self._replay(sample, event)
            return
        if event.token_ids is not None:
            error = self._take_environment(sample, event.token_ids)
            if error:
                self._failures.give_up(sample.group, DropReason.FAILED, f"{sample.id}: {error}")
                return
        self._open_call(sample, GenerateCall(event.sampling, len(sample.tape)))

    def _open_call(self, sample: Sample, call: GenerateCall) -> None:
        sample.call = call
        if not self._complete_if_it_is(sample):  # saved between the last token and the end of its attempt
            self._queue(sample, f"asks for up to {call.sampling.max_tokens} tokens")

    def _complete_if_it_is(self, sample: Sample) -> bool:
        """A call out of a saved state is complete if its tokens end in EOS, or have used its budget."""
        call, attempts = sample.call, self._context.attempts
        assert call is not None
        if attempts.ends_in_stop(sample, call):
            self._complete_call(sample, FinishReason.STOP)
        elif attempts.budget(sample, call) <= 0:
            self._complete_call(sample, FinishReason.LENGTH)
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
        """Answer from the tape what was answered before the restart; a function that asks otherwise begins again."""
        replay = sample.replay
        assert replay is not None
        start = replay.calls[0].start if replay.calls else replay.open_start
        if start is None:
            sample.replay = None  # it stood between two calls: from here on it is on its own
            self.call_made(event)
            return
        prompt, tape = sample.group.prompt.token_ids, sample.tape.tokens
        if event.token_ids is None:
            same = start == sample.told
        else:
            asked = event.token_ids[: len(prompt) + self._context.attempts.room(sample)]
            same = np.array_equal(asked, np.concatenate((prompt, tape[:start])))
        if not same:
            self.diverged(sample)
        elif replay.calls:
            self._answer(sample, replay.calls.popleft())
        else:
            sample.replay = None
            self._open_call(sample, GenerateCall(event.sampling, start))

    def diverged(self, sample: Sample) -> None:
        """The function did not ask what it had asked before the restart: its tokens belong to another conversation."""
        self._context.counters["replays_diverged"] += 1
        self._failures.begin_again(sample, DropReason.REPLAY_DIVERGED)

    def _complete_call(self, sample: Sample, finish: FinishReason) -> None:
        assert sample.call is not None
        start, sample.call = sample.call.start, None
        sample.attempt_failures, sample.avoid = 0, ""
        self._answer(sample, RecordedCall(start, len(sample.tape), finish))

    def _answer(self, sample: Sample, call: RecordedCall) -> None:
        sample.calls.append(call)
        sample.finish = call.finish
        self._context.to(sample, SampleState.OUTSIDE, f"call complete ({call.finish}) at {call.end} tokens")
        self._context.out.append(do.CallCompleted(sample))

    def _queue(self, sample: Sample, why: str) -> None:
        self._context.to(sample, SampleState.QUEUED, why)
        self._context.over_sampler.push(sample)

    # ---------------------------------------------------------------- attempts

    def submit(self, sample: Sample, engine: str) -> None:
        """Send what is missing of the sample's call to an engine."""
        context = self._context
        call, held = sample.call, len(sample.tape)
        assert call is not None
        attempt = context.attempts.open(sample, call, engine, context.clock.current.incarnation)
        context.counters["attempts"] += 1
        if held > call.start:
            sample.resumes += 1
            context.counters["resumed_attempts"] += 1
            context.counters["reprefill_tokens"] += len(attempt.token_ids)
        context.to(sample, SampleState.IN_FLIGHT, f"attempt {attempt.id} on {engine} from token {held}")
        context.out.append(do.Submit(attempt))

    def stop_found(self, event: ev.StopFound) -> None:
        """The text of an attempt has a stop string: its response is complete, the engine may rest."""
        attempt = self._context.attempts.in_flight.get(event.attempt_id)
        if attempt is None:
            self._context.counters["late_events"] += 1
        else:
            self._context.stop([attempt])

    def attempt_stalled(self, event: ev.AttemptStalled) -> None:
        """An engine is silent about an attempt: it is asked to end it, and another engine may go on."""
        attempt = self._context.attempts.in_flight.get(event.attempt_id)
        if attempt is None:
            self._context.counters["late_events"] += 1
            return
        attempt.stalled = True
        self._context.counters["stalled_attempts"] += 1
        self._context.stop([attempt])

    def attempt_ended(self, event: ev.AttemptEnded) -> None:
        """An attempt is over, by itself or because it was asked to end."""
        context, counts = self._context, event.counts
        attempt = self._take(event)
        if attempt is None:
            return
        came = counts.tokens
        # others may never have reached it
        if not event.fenced and (event.finish is not EngineFinish.ABORT or came or counts.after_stop):
            context.engines.ended(attempt.engine, context.engines.states[attempt.engine].in_flight)
        self._keep(attempt, came)
        if attempt.dropped_for is not None:
            return
        sample = attempt.sample
        if attempt.doubtful:
            self._queue(sample, f"engine {attempt.engine} had other weights: {came} tokens dropped")
            return
        if self._complete_after(sample, event.finish, counts):
            return
        if attempt.stalled:
            self._broke_off(attempt, f"engine {attempt.engine} was silent", progressed=came > 0)
            return
        if not came:
            context.counters["empty_partials"] += 1
        sample.attempt_failures, sample.avoid = 0, ""
        self._queue(sample, f"partial after {came} tokens")

    def _broke_off(self, attempt: Attempt, error: str, *, progressed: bool) -> None:
        """Go on from what is there, elsewhere if possible; failing again and again at the same token is too much."""
        sample = attempt.sample
        sample.attempt_failures = 0 if progressed else sample.attempt_failures + 1
        sample.avoid = attempt.engine
        self._queue(sample, f"attempt failed: {error}")
        if sample.attempt_failures >= self._context.settings.max_attempt_failures:
            self._failures.give_up(sample.group, DropReason.FAILED, f"{sample.id}: {error}")

    def _complete_after(self, sample: Sample, finish: EngineFinish, counts: AttemptCounts) -> bool:
        """Complete the call if this attempt brought its last token, whatever cut it off there."""
        assert sample.call is not None
        if finish is EngineFinish.STOP or (finish is EngineFinish.ABORT and counts.ends):
            self._complete_call(sample, FinishReason.STOP)
        elif finish is EngineFinish.LENGTH or self._context.attempts.budget(sample, sample.call) <= 0:
            self._complete_call(sample, FinishReason.LENGTH)
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
        context.counters["failed_attempts"] += 1
        context.counters["busy_refusals"] += kind is AttemptFailure.BUSY
        context.tokens.observe(event.rejected)
        context.tokens.drop(event.rejected, DropReason.UNKNOWN_WEIGHTS if written else DropReason.CORRUPT)
        if corrupt:
            context.tokens.observe(came)
            context.tokens.drop(came, DropReason.CORRUPT)
        else:
            self._keep(attempt, came)
        # an engine that breaks off is not used before it was probed; one that sends nonsense is, a few times; one that
        # takes no requests for now, or says what is wrong with this one, is well
        suspect = kind in (AttemptFailure.BROKE_OFF, AttemptFailure.CORRUPT)
        if suspect and context.engines.failed(attempt.engine, at_once=not corrupt):
            context.out.append(do.ProbeEngine(attempt.engine))
        if attempt.dropped_for is not None:
            return
        if attempt.doubtful:  # what a server refuses that was started anew, the right one may take
            self._queue(attempt.sample, f"engine {attempt.engine} had other weights: {event.error}")
            return
        if kind is AttemptFailure.REFUSED:
            self._queue(attempt.sample, f"refused: {event.error}")
            self._failures.give_up(attempt.sample.group, DropReason.FAILED, f"{attempt.sample.id}: {event.error}")
            return
        if not corrupt and self._complete_after(attempt.sample, EngineFinish.ABORT, event.counts):
            return
        if written:
            why = f"engine {attempt.engine}: weights were written, {event.rejected} tokens dropped"
            self._queue(attempt.sample, why)
            return
        if kind is AttemptFailure.BUSY:
            attempt.sample.avoid = attempt.engine
            self._queue(attempt.sample, f"engine {attempt.engine} is busy")
            return
        self._broke_off(attempt, event.error, progressed=came > 0 and not corrupt)

    def _take(self, event: ev.AttemptEnded | ev.AttemptFailed) -> Attempt | None:
        """The attempt, which is no longer in flight; None for one that is already accounted for."""
        context, after_stop = self._context, event.counts.after_stop
        attempt = context.attempts.close(event.attempt_id)
        if attempt is None:
            context.counters["late_events"] += 1
            return None
        if event.counts.tokens != attempt.tape.count:
            raise context.impossible(attempt.sample, f"has {attempt.tape.count} new tokens, its end says otherwise")
        if after_stop:
            context.tokens.observe(after_stop)
            context.tokens.drop(after_stop, DropReason.AFTER_STOP)
            context.counters["after_stop_tokens"] += after_stop
        context.aborts.ended(attempt.id)
        return attempt

    def _keep(self, attempt: Attempt, count: int) -> None:
        """The attempt's tokens move to the sample, or into the ledger, under the reason they are dropped for."""
        sample = attempt.sample
        self._context.tokens.observe(count)
        if attempt.lost_for is not None:
            self._context.tokens.drop(count, attempt.lost_for)
            return
        sample.tape.add_attempt(attempt.tape, attempt.id, attempt.engine, attempt.sampling.temperature)
        if count:  # else what an earlier attempt left elsewhere is still the best there is
            sample.cached_on, sample.cached_under = attempt.engine, self._context.engines.states[attempt.engine].life
