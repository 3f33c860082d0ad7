"""An environment of Prime Intellect's ``verifiers`` as a rollout function: its agents play, april's policy answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any, cast

from april.agents.endpoint import Opened
from april.core.types import Prompt
from april.driver.llm import LLM
from april.driver.rewards import Response
from april.errors import RolloutError, UsageError
from april.extras import require

log = logging.getLogger("april")


class Verifiers:
    """An environment, ``verifiers.v1.Env``, with what a RolloutScheduler asks for: prompts, rollout and reward.

    The rollout function plays one episode, whose requests have the sample's endpoint behind them, and returns the
    ``Episode``. What the environment serves beside (shared tools, the server before its harnesses) is up while any
    episode is played.

    Args:
        environment: as ``verifiers.v1.load_environment`` makes it.
        tokenizer: the model's, for :attr:`prompts`.
        sampling: ``verifiers.v1.Sampling`` of its requests; None means that april's configuration holds.

    Raises ConfigError without the package.
    """

    def __init__(self, environment: Any, tokenizer: Any = None, sampling: Any = None) -> None:
        require("an environment of verifiers", "verifiers", extra=None)
        self.environment = environment
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._serving = _Serving(environment)

    @property
    def prompts(self) -> _Prompts:
        """The tasks of the environment's taskset, each time from the first."""
        if self._tokenizer is None:
            raise UsageError("Verifiers.prompts are token ids: give Verifiers(..., tokenizer=...)")
        return _Prompts(self.environment.taskset, self._tokenizer)

    async def rollout(self, prompt: Prompt, llm: LLM) -> Any:
        """Play an episode of the prompt's task; raises RolloutError where the environment says that it failed."""
        from verifiers.v1 import EvalClientConfig, ModelContext, Sampling

        kind = type(self.environment.taskset).task_type()
        task = kind(kind.data_type().model_validate(prompt.data["task"]), self.environment.config.taskset.task)
        door = cast(Opened, llm.door())
        url, key = door.by_name()
        # one for all samples, as verifiers keeps a client for each there is; who has which key, the endpoint decides
        client = EvalClientConfig(base_url=url, headers={"Authorization": f"Bearer {key}", "x-api-key": key})
        context = ModelContext(door.endpoint.model, client, self._sampling or Sampling())

        def began(trace: Any) -> None:
            if trace.agent.trainable:  # the answers of others are not the policy's to learn
                door.name(trace.id)

        async with self._serving:
            episode = await self.environment.run_episode(task, context, on_trace=began)
        if not episode.ok:
            failed = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RolloutError("; ".join(f"{e.type}: {e.message}" for e in failed) or "the episode is not ok")
        return episode

    def reward(self, prompt: Prompt, response: Response) -> float:
        """The reward of the episode's one trainable trace; raises UsageError where there are more."""
        traces = [trace for trace in response.output.traces if trace.agent.trainable]
        if len(traces) != 1:
            raise UsageError(
                f"the episode has {len(traces)} traces that are trained, and a sample has one reward; give "
                "reward=lambda prompt, response: ... made of response.output.traces"
            )
        return float(traces[0].reward)


class _Prompts:
    """The tasks as prompts."""

    def __init__(self, taskset: Any, tokenizer: Any) -> None:
        self._taskset = taskset
        self._tokenizer = tokenizer

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for task in self._taskset:
            text = task.data.prompt_text or task.data.system_prompt or task.key
            yield {"token_ids": self._tokenizer.encode(text), "task": task.data.model_dump(mode="json")}


class _Serving:
    """What the environment serves, from the first that enters to the last that leaves.

    It is entered and left in a task of its own: what it holds may not be left in another.
    """

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._inside = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._door = asyncio.Lock()
        self._over: asyncio.Event
        self._up: asyncio.Future[None]
        self._task: asyncio.Task[None]

    async def __aenter__(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._inside:
                raise UsageError("an environment of verifiers serves one scheduler at a time; load another one")
            self._loop, self._door = loop, asyncio.Lock()
        async with self._door:
            self._inside += 1
            if self._inside == 1:
                self._over, self._up = asyncio.Event(), loop.create_future()
                self._task = loop.create_task(self._serve(self._up))
            up = self._up
        try:
            await asyncio.shield(up)
        except BaseException:
            await self.__aexit__()
            raise

    async def __aexit__(self, *_: object) -> None:
        await asyncio.shield(asyncio.ensure_future(self._leave()))

    async def _leave(self) -> None:
        async with self._door:  # who comes now waits until all is down
            self._inside -= 1
            if not self._inside:
                self._over.set()
                await self._task

    async def _serve(self, up: asyncio.Future[None]) -> None:
        try:
            async with self._environment.serving():
                up.set_result(None)
                await self._over.wait()
        except Exception as error:
            if not up.done():
                up.set_exception(error)
            else:
                log.warning("verifiers: what the environment served did not end well: %r", error)
