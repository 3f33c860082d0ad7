"""april inside slime and miles: ``--rollout-function-path april.adapters.slime.generate_rollout``.

slime owns the servers, the weights, the data and the checkpoints; april owns the round: what is submitted, when it
stops, what is kept and what it is stamped with. docs/slime.md says what that changes. Batches are asked for in
``session``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from april.adapters.slime.framework import Framework, framework_of
from april.adapters.slime.samples import post_process_rewards
from april.adapters.slime.session import Session
from april.engines.protocol import Engine

__all__ = ["GenerateRollout", "RolloutFunction", "generate_rollout", "make_generate_rollout", "post_process_rewards"]


class RolloutFunction:
    """A rollout function of slime, and the sessions that it has opened, one per data source.

    Args:
        engines: engine objects for the only session, instead of slime's SGLang servers.
        args: slime's namespace where the caller gives None.
        tokenizer: instead of that of ``--hf-checkpoint``.
        evaluate: called as slime's function is with ``evaluation=True``; None: slime's own function evaluates.
        check: cross-check april's books after every event (slow).
    """

    def __init__(
        self, engines: Sequence[Engine] | None = None, *, args: Any = None, tokenizer: Any = None, evaluate: Any = None,
        check: bool = False,
    ) -> None:  # fmt: skip
        self._options: dict[str, Any] = {"engines": engines, "tokenizer": tokenizer, "check": check}
        self._args = args
        self._evaluate = evaluate
        self.sessions: dict[int, Session] = {}
        """Sessions by identity of the data source, which they keep alive."""

    def __call__(self, args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
        if evaluation:
            return self.evaluate(args, rollout_id, data_source)
        return self.rollout(args, rollout_id, data_source)

    def rollout(self, args: Any, rollout_id: int, data_source: Any, weight_version: int | None = None) -> Any:
        """A batch for training; ``weight_version`` of the servers, where the trainer says it."""
        session = self.sessions.get(id(data_source))
        if session is None:
            args = self._args if args is None else args
            framework = framework_of(data_source)
            session = Session(args, data_source, framework, rollout_id, **self._options)
            self.sessions[id(data_source)] = session
        return session.rollout(rollout_id, weight_version)

    def evaluate(self, args: Any, rollout_id: int, data_source: Any) -> Any:
        """As slime evaluates: no request of april's is at the servers meanwhile."""
        args = self._args if args is None else args
        function = self._evaluate or framework_of(data_source).get("rollout.sglang_rollout.generate_rollout")
        return function(args, rollout_id, data_source, evaluation=True)

    def close(self) -> None:
        """End all sessions; what they hold and no checkpoint has is gone."""
        while self.sessions:
            self.sessions.popitem()[1].close()


def make_generate_rollout(
    engines: Sequence[Engine] | None = None, *, args: Any = None, tokenizer: Any = None, evaluate: Any = None,
    check: bool = False,
) -> Any:  # fmt: skip
    """A rollout function for slime with engines of your own; arguments are those of :class:`RolloutFunction`.

    Its attribute ``function`` is the :class:`RolloutFunction` behind it, to be closed at the end.
    """
    function = RolloutFunction(engines, args=args, tokenizer=tokenizer, evaluate=evaluate, check=check)

    def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
        return function(args, rollout_id, data_source, evaluation)

    generate_rollout.function = function  # type: ignore[attr-defined]
    return generate_rollout


generate_rollout = make_generate_rollout()
"""The function for ``--rollout-function-path``, in slime and in miles."""


class GenerateRollout:
    """april's rollout function as a class that miles constructs: it is told the version of the servers' weights."""

    def __init__(self, input: Any) -> None:
        self._input = input
        self._function = RolloutFunction()
        self._evaluator: Any = None

    def __call__(self, input: Any) -> Any:
        args, data_source = self._input.args, self._input.data_source
        if not input.evaluation:
            return self._function.rollout(args, input.rollout_id, data_source, input.weight_version)
        if self._evaluator is None:
            framework: Framework = framework_of(data_source)
            path = "rollout.inference_rollout.inference_rollout_common.InferenceRolloutFn"
            self._evaluator = framework.get(path)(self._input)
        return self._evaluator(input)

    def close(self) -> None:
        """End the session."""
        self._function.close()
