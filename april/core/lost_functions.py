"""Rollout and reward functions that died with their host: they begin again, and are answered from the tape.

As after a restart of the process, what was generated stays, and so do the rewards of finished samples; what a reward or
the filter is still to see of a function's return is made anew.

A function may be what its host died of: one that ran each time, and got no further, fails in the end like one that
raises.

Invariant: a function begins again when nothing of it is at an engine any more; an attempt that still runs is ended
first, and its tokens are kept.
"""

from __future__ import annotations

from april.core import events as ev
from april.core.completion import Completion
from april.core.context import CoreContext
from april.core.evaluation import Evaluation
from april.core.failures import Failures
from april.core.tape import TokenTape
from april.core.types import DropReason, Group, GroupState, Sample, SampleState

RUNNING, SCORING, FINISHED = SampleState.RUNNING, SampleState.SCORING, SampleState.FINISHED


class LostFunctions:
    """From the loss of functions to their new beginning."""

    def __init__(self, context: CoreContext, completion: Completion, failures: Failures) -> None:
        self._context = context
        self._completion = completion
        self._failures = failures

    def lost(self, event: ev.FunctionsLost) -> None:
        """Those of groups that are settled are missed by nobody."""
        for number in event.groups:
            group = self._context.group(number)
            if group is None:
                continue
            killers = [s for s in group.members if self._has_died_too_often(s)] if event.died else []
            if group.evaluation is not None:
                if killers:
                    self._fail(killers[0])
                else:
                    self._evaluate_anew(group, group.evaluation)
                continue
            for sample in group.members:
                if sample.state not in (RUNNING, SCORING):
                    continue
                if sample in killers:
                    self._fail(sample)
                else:
                    self._lose(sample)
            if group.held:
                self._forget_returns(group)

    def _has_died_too_often(self, sample: Sample) -> bool:
        """Whether its functions ran when host after host died, without a token between; not: waited for an answer."""
        group = sample.group
        waits = sample.open_call is not None or sample.retry is not None
        if sample.state is SCORING and self._context.settings.group_reward:
            waits = any(s.state not in (SCORING, FINISHED) for s in group.members)
        if waits or sample.state not in (RUNNING, SCORING):
            return False
        (times, at), now = sample.deaths, len(sample.tape)
        sample.deaths = times + 1 if at == now else 1, now
        return sample.deaths[0] >= self._context.settings.max_attempt_failures

    def _fail(self, sample: Sample) -> None:
        context, times = self._context, sample.deaths[0]
        why = f"{times} hosts in a row died while its functions ran there; what they do may be why"
        context.counts(sample)["failed_samples"] += 1
        context.note(sample, f"failed: {why}")
        self._failures.cannot_go_on(sample, why)

    def _lose(self, sample: Sample) -> None:
        context, call = self._context, sample.open_call
        if call is not None and call.lost:
            return
        context.counters["lost_functions"] += 1
        if call is not None and call.attempt is not None:
            call.lost = True
            context.note(sample, "its function is lost")
            context.stop([call.attempt])
        else:
            self.begin_again(sample)

    def begin_again(self, sample: Sample) -> None:
        """Nothing of it is at an engine: its function is started anew, and is answered from the tape."""
        context, call = self._context, sample.open_call
        context.places.give_back(sample)
        if call is not None:
            context.over_sampler.forget(call)
        sample.replay, sample.finish, sample.retry = sample.asked, None, None
        sample.calls.clear()
        context.to(sample, SampleState.NEW, "begins again, as its function was lost")
        context.over_sampler.push(sample)

    def _forget_returns(self, group: Group) -> None:
        """Nobody has what the functions of finished samples returned; a verdict that was awaited is asked for anew."""
        for sample in group.members:
            if sample.state is FINISHED:
                sample.replay = sample.asked
                sample.calls.clear()
        self._completion.run_again(group)

    def _evaluate_anew(self, group: Group, evaluation: Evaluation) -> None:
        """From nothing, also what is finished, for its answer is what functions returned; with the same seeds, so that
        responses will be those that they would have been."""
        context = self._context
        for sample in reversed(group.members):
            if sample.state is SampleState.NEW:
                continue
            evaluation.counters["lost_functions"] += 1
            evaluation.functions -= sample.state is RUNNING
            if sample.state is FINISHED:
                self._completion.unfinished(sample)
            self._failures.leave(sample, DropReason.FAILED)
            evaluation.tokens.drop(sample.tape.generated, DropReason.FAILED)
            sample.tape, sample.finish, sample.reward = TokenTape(), None, 0.0
            sample.calls.clear()
            context.to(sample, SampleState.NEW, "begins again, as its function was lost")
            evaluation.to_start.appendleft(sample)
        if group.ready:
            context.to_group(group, GroupState.OPEN, "its functions were lost")
            evaluation.unfinished += 1
