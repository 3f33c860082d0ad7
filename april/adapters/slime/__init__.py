"""Adapter for slime and its fork miles: ``--rollout-function-path april.adapters.slime.generate_rollout``.

slime manages servers, weights, data and checkpoints; april decides which samples run, when a rollout ends and which
samples continue in the next rollout. See docs/slime.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from april.adapters.slime.framework import framework_of
from april.adapters.slime.rollouts import SlimeRollouts
from april.adapters.slime.samples import post_process_rewards
from april.engines.protocol import Engine

__all__ = ["RolloutFunction", "generate_rollout", "make_generate_rollout", "post_process_rewards"]


class RolloutFunction:
    """Callable that slime and miles can use as their rollout function; it keeps one session per data source.

    Args:
        engines: engine objects to use instead of slime's SGLang servers; only one session is possible then.
        tokenizer: tokenizer to use instead of the one at ``--hf-checkpoint``.
        check: True to validate april's whole state after every event (slow).
    """

    def __init__(
        self, engines: Sequence[Engine] | None = None, *, tokenizer: Any = None, check: bool = False
    ) -> None:
        self._options: dict[str, Any] = {"engines": engines, "tokenizer": tokenizer, "check": check}
        self.sessions: dict[int, SlimeRollouts] = {}
        """Sessions by ``id()`` of their data source; the id stays unique because a session keeps its source alive."""

    def __call__(self, args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
        framework = framework_of(data_source)
        if evaluation:  # slime evaluates by itself; with stepwise generation april has no requests at the servers now
            evaluate = framework.get("rollout.sglang_rollout.generate_rollout")
            return evaluate(args, rollout_id, data_source, evaluation=True)
        session = self.sessions.get(id(data_source))
        if session is None:
            session = SlimeRollouts(args, data_source, framework, rollout_id, **self._options)
            self.sessions[id(data_source)] = session
        return session.rollout(rollout_id)

    def close(self) -> None:
        """Close all sessions; unfinished samples that are in no checkpoint are lost."""
        while self.sessions:
            self.sessions.popitem()[1].close()


make_generate_rollout = RolloutFunction
"""Alias of :class:`RolloutFunction`, for a rollout function with engines of your own."""
generate_rollout = RolloutFunction()
"""Rollout function for ``--rollout-function-path``, in slime and in miles."""
