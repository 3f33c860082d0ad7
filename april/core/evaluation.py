"""Evaluations: prompts that are answered under one policy version and leave no trace in training.

Stepwise, training waits until they have ended; with continuous generation nothing does but the next weight update.

Their groups go through the queue, the attempts and the functions as those of training do. What differs is decided here:
they have accounts of their own, a cut response begins again from its call with the same seed, and the first failure of
a function, or an engine's failures in a row, end the whole evaluation. Whose turn it is, of evaluations, updates and
training, is decided in ``RolloutCore._advance_others``.
"""

from __future__ import annotations

from collections.abc import Iterator

from april.core.commands import EvaluationDone, EvaluationFailed
from april.core.context import CoreContext
from april.core.events import EvaluationCancelled, EvaluationRequested
from april.core.lives import SampleLives
from april.core.types import AttemptFailure, DropReason, Evaluation, Group, Sample, SampleState
from april.errors import InvariantError

FIRST_GROUP = -(1 << 40)
"""Number of the first group of the first evaluation: all of them are below those of training, and so go first."""


class Evaluations:
    """Begins and ends evaluations."""

    def __init__(self, context: CoreContext, lives: SampleLives) -> None:
        self._context = context
        self._lives = lives
        self._next_group = FIRST_GROUP

    def requested(self, event: EvaluationRequested, behind: int) -> None:
        """Let an evaluation wait for a pause to end, and stepwise for training's last attempt."""
        if not event.prompts or event.evaluation in self._context.evaluations:
            raise InvariantError(f"evaluation {event.evaluation} was requested twice, or without prompts")
        self._context.evaluations[event.evaluation] = Evaluation(request=event, behind=behind)

    def cancelled(self, event: EvaluationCancelled) -> None:
        """End an evaluation as if it had failed, unless it has ended already."""
        if evaluation := self._context.evaluations.get(event.evaluation):
            evaluation.fail("it was cancelled")

    @property
    def running(self) -> Iterator[Evaluation]:
        return (e for e in self._context.evaluations.values() if e.version is not None)

    def no_engine(self) -> None:
        """End evaluations whose requests wait: no engine has taken them for too long, or none can come back."""
        states = self._context.engines.states
        ill = all(s.quarantined for s in states.values())
        why = f"all engines are {'quarantined' if ill else 'quarantined or have other weights'}: {', '.join(states)}"
        if not states:
            why = "all engines have left"
        for evaluation in self.running:
            evaluation.fail(*(evaluation.trouble or (why, AttemptFailure.BROKE_OFF)))

    @property
    def hopeless(self) -> bool:
        """True when no engine has the present weights and none is probed, which might bring it back.

        Where all have left, others may join.
        """
        version, states = self._context.clock.current, self._context.engines.states
        return bool(states) and not any(s.quarantined or version in s.loaded for s in states.values())

    def come_first(self, *, held: bool, update: int) -> bool:
        """Return whether an update waits for evaluations: begun ones, and without a pause (``held``) later ones.

        ``update``: the first that waits; those that were asked for after it come after it.
        """
        evaluations = self._context.evaluations.values()
        return any(e.version is not None or not (held or e.behind >= update) for e in evaluations)

    def advance(self, *, may_begin: bool = False, half_updated: str | None = None, update: int = 0) -> None:
        """Begin what waits for that, end what is finished or has failed.

        ``half_updated``: why nothing may be generated before another weight update. ``update``: the first that waits
        or runs; 0 means none.
        """
        context = self._context
        for number, evaluation in list(context.evaluations.items()):
            waits = evaluation.version is None and 0 < update <= evaluation.behind
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
                while evaluation.to_start and (most is None or evaluation.functions < most):
                    evaluation.functions += 1
                    context.over_sampler.push(evaluation.to_start.popleft())

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
            evaluation.to_start.extend(group.samples)
            if (length := len(group.prompt.token_ids)) >= context.engines.max_context:
                why = f"it has {length} tokens, which leaves no room for a response"
                evaluation.fail(why, sample=group.samples[0])

    def _give_up(self, evaluation: Evaluation) -> None:
        """Cancel the functions and end the requests, once."""
        for sample in self._forget(evaluation):
            self._lives.leave(sample, DropReason.FAILED)
            self._context.to(sample, SampleState.DROPPED, "its evaluation has ended")

    def _forget(self, evaluation: Evaluation) -> list[Sample]:
        """Take the groups out of the books; returns the samples that were in them."""
        groups = [self._context.evaluation_groups.pop(g.id, None) for g in evaluation.groups]
        return [sample for group in groups if group is not None for sample in group.samples]
