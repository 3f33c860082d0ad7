"""The decorator: a per-sample function, async or plain, becomes a partial rollout in three lines."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, cast

from april.config.settings import Config
from april.driver.user_code import check_function, is_async
from april.scheduler import RolloutScheduler

P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class PartialRollout(Protocol[P, R]):
    """A rollout function that can make its own scheduler."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The function itself."""
        ...

    def scheduler(self, config: Config, **arguments: Any) -> RolloutScheduler:
        """A scheduler for this function; takes everything that :class:`RolloutScheduler` takes, apart from rollout."""
        ...


def partial_rollout(function: Callable[P, R]) -> PartialRollout[P, R]:
    """Decorator for ``(prompt, llm)``, async, or plain (then ``llm.generate`` blocks)::

        @april.partial_rollout
        async def rollout(prompt, llm): ...

        with rollout.scheduler(config, prompts=prompts, reward=reward, model=model) as rollouts:
            batch = rollouts.next_batch()

    The function can be called as before, and given to a scheduler as ``rollout=``.

    Raises:
        ConfigError: what is decorated cannot be called with (prompt, llm).
    """
    check_function("partial_rollout", function, ("prompt", "llm"))
    wrapper: Any
    if is_async(function):

        async def call_async(*args: P.args, **kwargs: P.kwargs) -> Any:
            return await cast(Any, function(*args, **kwargs))

        wrapper = call_async
    else:

        def call(*args: P.args, **kwargs: P.kwargs) -> Any:
            return function(*args, **kwargs)

        wrapper = call
    functools.update_wrapper(wrapper, function)

    def scheduler(config: Config, **arguments: Any) -> RolloutScheduler:
        return RolloutScheduler(config, rollout=wrapper, **arguments)

    scheduler.__doc__ = PartialRollout.scheduler.__doc__
    wrapper.scheduler = scheduler
    return cast("PartialRollout[P, R]", wrapper)
