"""Adapter for slime and its fork miles: ``--rollout-function-path april.adapters.slime.generate_rollout``.

slime manages servers, weights, data and checkpoints; april decides which samples run, when a rollout ends and which
samples continue in the next rollout. See docs/slime.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from april.adapters.slime.framework import Framework, framework_of
from april.adapters.slime.rollouts import SlimeRollouts
from april.adapters.slime.samples import post_process_rewards
from april.engines.protocol import Engine

__all__ = ["GenerateRollout", "RolloutFunction", "generate_rollout", "make_generate_rollout", "post_process_rewards"]


class RolloutFunction:
    """Callable that slime can use as its rollout function; it keeps one session per data source.

    Args:
        engines: engine objects to use instead of slime's SGLang servers; only one session is possible then.
        args: slime's namespace of flags, used when the caller passes None.
        tokenizer: tokenizer to use instead of the one at ``--hf-checkpoint``.
        evaluate: function to call for evaluations instead of slime's own, with the same arguments.
        check: True to validate april's whole state after every event (slow).
    """

    def __init__(
        self, engines: Sequence[Engine] | None = None, *, args: Any = None, tokenizer: Any = None, evaluate: Any = None,
        check: bool = False,
    ) -> None:  # fmt: skip
        self._options: dict[str, Any] = {"engines": engines, "tokenizer": tokenizer, "check": check}
        self._args, self._evaluate = args, evaluate
        self.sessions: dict[int, SlimeRollouts] = {}
        """Sessions by ``id()`` of their data source, which they keep alive."""

    def __call__(self, args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
        if evaluation:
            return self.evaluate(args, rollout_id, data_source)
        return self.rollout(args, rollout_id, data_source)

    def rollout(self, args: Any, rollout_id: int, data_source: Any, weight_version: int | None = None) -> Any:
        """Return a batch for training; ``weight_version`` is the servers' version, if the trainer passes it."""
        session = self.sessions.get(id(data_source))
        if session is None:
            args = self._args if args is None else args
            session = SlimeRollouts(args, data_source, framework_of(data_source), rollout_id, **self._options)
            self.sessions[id(data_source)] = session
        return session.rollout(rollout_id, weight_version)

    def evaluate(self, args: Any, rollout_id: int, data_source: Any) -> Any:
        """Run slime's own evaluation; the servers have no requests from april during it."""
        args = self._args if args is None else args
        function = self._evaluate or framework_of(data_source).get("rollout.sglang_rollout.generate_rollout")
        return function(args, rollout_id, data_source, evaluation=True)

    def close(self) -> None:
        """Close all sessions; partial samples that are in no checkpoint are lost."""
        while self.sessions:
            self.sessions.popitem()[1].close()


def make_generate_rollout(engines: Sequence[Engine] | None = None, **options: Any) -> Any:
    """Make a rollout function for slime that uses the given engines; takes the arguments of :class:`RolloutFunction`.

    At the end, close its attribute ``function``, which is the underlying :class:`RolloutFunction`.
    """
    function = RolloutFunction(engines, **options)

    def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
        return function(args, rollout_id, data_source, evaluation)

    generate_rollout.function = function  # type: ignore[attr-defined]
    return generate_rollout


generate_rollout = make_generate_rollout()
"""Rollout function for ``--rollout-function-path``, in slime and in miles."""


class GenerateRollout:
    """april's rollout function as a class. miles constructs it, and passes the servers' weight version to each call."""

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
        """Close the session."""
        self._function.close()
