"""Runs evaluations: sets of prompts that are answered under one policy version, apart from training.

In stepwise generation, training waits until evaluations have ended; in continuous generation, only weight updates wait.

Evaluations use the same queue, engines and user functions as training, but have their own ledger and counters.
An interrupted ``llm.generate`` call is generated again from its start, with the same seed. The first failure of a user
function, or several failed requests in a row, fail the whole evaluation. ``RolloutCore._advance_others`` decides the
order of evaluations, updates and training.
"""

from __future__ import annotations

from collections.abc import Iterator

from april.core.commands import EvaluationDone, EvaluationFailed
from april.core.context import CoreContext
from april.core.events import EvaluationCancelled, EvaluationRequested
from april.core.sample_lifecycle import SampleLifecycle
from april.core.types import AttemptFailure, DropReason, Evaluation, Group, Sample, SampleState
from april.errors import InvariantError

FIRST_GROUP = -(1 << 40)
"""Number of the first group of the first evaluation. All groups of evaluations have negative numbers, so the queue puts
them first."""


class Evaluations:
    """Begins and ends evaluations."""

    def __init__(self, context: CoreContext, lifecycle: SampleLifecycle) -> None:
        self._context = context
        self._lifecycle = lifecycle
        self._next_group = FIRST_GROUP

    def requested(self, event: EvaluationRequested, behind: int) -> None:
        """Queue an evaluation; it begins when weight update number ``behind`` has ended and generation is not paused.

        In stepwise generation it also waits for training's last attempt to end.
        """
        if not event.prompts or event.evaluation in self._context.evaluations:
            raise InvariantError(f"evaluation {event.evaluation} was requested twice, or without prompts")
        self._context.evaluations[event.evaluation] = Evaluation(request=event, after_update=behind)

    def cancelled(self, event: EvaluationCancelled) -> None:
        if evaluation := self._context.evaluations.get(event.evaluation):
            evaluation.fail("it was cancelled")

    @property
    def running(self) -> Iterator[Evaluation]:
        return (e for e in self._context.evaluations.values() if e.version is not None)

    def fail_without_engine(self) -> None:
        """Fail the running evaluations, as no engine accepted their requests for too long, or none can come back."""
        states = self._context.engines.states
        ill = all(s.quarantined for s in states.values())
        why = f"all engines are {'quarantined' if ill else 'quarantined or have other weights'}: {', '.join(states)}"
        if not states:
            why = "all engines have left"
        for evaluation in self.running:
            evaluation.fail(*(evaluation.last_engine_error or (why, AttemptFailure.BROKE_OFF)))

    @property
    def no_engine_can_return(self) -> bool:
        """True if no engine has the present weights and no engine is quarantined (a health probe may end a quarantine).

        False if all engines have left, as others may join.
        """
        version, states = self._context.clock.current, self._context.engines.states
        return bool(states) and not any(s.quarantined or version in s.loaded for s in states.values())

    def go_before_update(self, *, held: bool, update: int) -> bool:
        """Return True if weight update ``update`` (the first that waits) must wait for evaluations.

        The update waits for running evaluations. Unless a pause is requested (``held``), it also waits for evaluations
        that were requested before it.
        """
        evaluations = self._context.evaluations.values()
        return any(e.version is not None or not (held or e.after_update >= update) for e in evaluations)

    def advance(self, *, may_begin: bool = False, half_updated: str | None = None, update: int = 0) -> None:
        """Begin waiting evaluations, and end those that are finished or have failed.

        ``half_updated`` says why nothing may be generated before another weight update; None if generation is allowed.
        ``update`` is the number of the first update that waits or runs; 0 if there is none.
        """
        context = self._context
        for number, evaluation in list(context.evaluations.items()):
            waits = evaluation.version is None and 0 < update <= evaluation.after_update
            if half_updated is not None and not waits:
                evaluation.fail(half_updated, AttemptFailure.WEIGHTS_WRITTEN)
            if evaluation.version is None and evaluation.failure is None and may_begin and not waits:
                self._begin(evaluation)
            if evaluation.failure is not None:
                self._give_up(evaluation)
                if not evaluation.in_flight:
                    del context.evaluations[number]
                    context.out.append(EvaluationFailed(number, *evaluation.failure))
            elif evaluation.version is not None and not evaluation.unfinished and not evaluation.in_flight:
                self._forget(evaluation)
                del context.evaluations[number]
                context.out.append(EvaluationDone(number, evaluation.groups))
            else:
                most = evaluation.request.functions_at_once
                while evaluation.unstarted and (most is None or evaluation.running_functions < most):
                    evaluation.running_functions += 1
                    context.over_sampler.push(evaluation.unstarted.popleft())

    def _begin(self, evaluation: Evaluation) -> None:
        context, asked = self._context, evaluation.request
        evaluation.version, evaluation.unfinished = context.clock.current, len(asked.prompts)
        evaluation.groups = tuple(
            Group(number, prompt, asked.n_samples, evaluation.version, evaluation)
            for number, prompt in enumerate(asked.prompts, self._next_group)
        )
        self._next_group += len(asked.prompts)
        for group in evaluation.groups:
            context.evaluation_groups[group.id] = group
            evaluation.unstarted.extend(group.samples)
            if (length := len(group.prompt.token_ids)) >= context.engines.max_context:
                why = f"it has {length} tokens, so there is no room for a response"
                evaluation.fail(why, sample=group.samples[0])

    def _give_up(self, evaluation: Evaluation) -> None:
        """Cancel the functions and end the requests of a failed evaluation; calling this again does nothing."""
        for sample in self._forget(evaluation):
            self._lifecycle.stop(sample, DropReason.FAILED)
            self._context.change_state(sample, SampleState.DROPPED, "its evaluation has ended")

    def _forget(self, evaluation: Evaluation) -> list[Sample]:
        """Remove the evaluation's groups from the context; return the samples of those that were still there."""
        groups = [self._context.evaluation_groups.pop(g.id, None) for g in evaluation.groups]
        return [sample for group in groups if group is not None for sample in group.samples]
