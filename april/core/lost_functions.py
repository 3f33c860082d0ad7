"""Decides what happens to a rollout function whose process died: it is restarted, or fails after too many deaths.

Invariant: the function is restarted only when none of its attempts (requests) is at an engine. The calls that it then
repeats are answered with their stored tokens. Functions that raise errors are handled in ``function_results``.
"""

from __future__ import annotations

from april.core import events as ev
from april.core.context import CoreContext
from april.core.sample_lifecycle import SampleLifecycle
from april.core.types import DropReason, Evaluation, Sample, SampleState

# module-level names, as an enum member costs 60 ns per use on Python 3.11 and these are used at every event
NEW, RUNNING = SampleState.NEW, SampleState.RUNNING


class LostFunctions:
    """Restarts rollout functions whose process died."""

    def __init__(self, context: CoreContext, lifecycle: SampleLifecycle) -> None:
        self._context = context
        self._lifecycle = lifecycle

    def function_lost(self, event: ev.FunctionLost) -> None:
        """Restart a rollout function whose process died; it fails if that happens repeatedly without progress.

        Deaths count only while no call is open: a function that waits for tokens cannot have ended its process.
        """
        sample = self._context.sample(event.sample)
        if sample is None or sample.state is not RUNNING:
            return
        if not sample.has_open_call:  # with an open call it was only waiting, so it cannot have ended its process
            (times, at), now = sample.process_deaths, sample.tokens
            sample.process_deaths = times + 1 if at == now else 1, now
            if sample.process_deaths[0] >= self._context.settings.max_attempt_failures:
                times = sample.process_deaths[0]
                why = f"{times} processes in a row died while they ran its function, which may be the cause"
                self._context.counts(sample)["failed_samples"] += 1
                self._context.note(sample, f"failed: {why}")
                self._lifecycle.replace_or_drop(sample, why)
                return
        if sample.evaluation is None:
            self._restart_when_requests_end(sample)
        else:
            self._restart_in_evaluation(sample, sample.evaluation)

    def _restart_when_requests_end(self, sample: Sample) -> None:
        context, calls = self._context, sample.open_calls
        context.counters["lost_functions"] += 1
        if running := [call.attempt for call in calls if call.attempt is not None]:
            for call in calls:
                call.function_lost = True
                if call.attempt is None:
                    context.over_sampler.forget(call)
            context.note(sample, "its function is lost")
            context.stop(running)
        else:
            self.restart_with_replay(sample)

    def restart_with_replay(self, sample: Sample) -> None:
        """Start the function of a sample again once none of its attempts is at an engine.

        The calls that it repeats are answered with their stored tokens.
        """
        context, calls = self._context, sample.open_calls
        if any(call.attempt is not None for call in calls):
            return
        context.places.release(sample)
        for call in calls:
            context.over_sampler.forget(call)
        sample.replay_all()
        sample.finish = None
        context.change_state(sample, NEW, "its function runs again, with the recorded tokens")
        context.over_sampler.push(sample)

    def _restart_in_evaluation(self, sample: Sample, evaluation: Evaluation) -> None:
        """Restart a sample of an evaluation without its tokens; with the same seed it gets the same response."""
        evaluation.counters["lost_functions"] += 1
        evaluation.running_functions -= 1
        self._lifecycle.stop(sample, DropReason.FAILED)
        evaluation.tokens.drop(sample.generated, DropReason.FAILED)
        sample.clear()
        self._context.change_state(sample, NEW, "starts again, because its function was lost")
        evaluation.unstarted.appendleft(sample)
