"""Runs an environment of Prime Intellect's ``verifiers`` as a rollout function, with the policy as its model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any, cast

from april.agents.endpoint import ServedSession
from april.core.types import Prompt
from april.driver.llm import LLM
from april.driver.rewards import Response
from april.errors import RolloutError, UsageError
from april.text.install_command import require

log = logging.getLogger("april")
NO_MODEL = (
    "the agent {0!r} of the environment asks the policy, which answers only agents that are trained; give {0!r} a "
    "model of its own in the environment's configuration: {0}.model, {0}.client.base_url and {0}.client.api_key_var"
)

SLOW_START_S = 30.0
"""Seconds after which an episode that has not asked the policy is named in a warning."""
SLOW_START = (
    "an episode of verifiers has run for %g s without a request to the policy. verifiers first installs what its "
    "harness and tools need, with uv, which waits minutes for a package index that does not answer: set "
    "UV_DEFAULT_INDEX to an index that this machine reaches, and timeout.setup of the environment's agent"
)


class Verifiers:
    """Makes prompts, rollout and reward of a RolloutScheduler from an environment (``verifiers.v1.Env``).

    The policy generates the turns of the trainable agents. Any other agent, such as a user simulator, needs a model of
    its own. The rollout function plays one episode, whose requests go to the sample's endpoint, and returns the
    ``Episode``. The environment's own servers (shared tools, the server of its harnesses) run while any episode is
    played.

    Args:
        environment: environment as ``verifiers.v1.load_environment`` returns it.
        tokenizer: tokenizer of the model, for :attr:`prompts`.
        sampling: ``verifiers.v1.Sampling`` for the environment's requests; None means april's configuration. Its token
            limit and stop strings apply. Its temperature and ``top_p`` do not: training uses those of the run's
            configuration, an evaluation uses those of the evaluation.

    Raises ConfigError if the package is missing.
    """

    def __init__(self, environment: Any, tokenizer: Any = None, sampling: Any = None) -> None:
        require("an environment of verifiers", "verifiers", extra=None)
        self.environment = environment
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._servers = _EnvironmentServers(environment)
        self._slow_start_named = False

    @property
    def prompts(self) -> _Prompts:
        """The tasks of the environment's taskset as prompts; every iteration begins with the first task."""
        if self._tokenizer is None:
            raise UsageError(
                "Verifiers.prompts needs a tokenizer to make token ids: give Verifiers(..., tokenizer=...)"
            )
        return _Prompts(self.environment.taskset, self._tokenizer)

    async def rollout(self, prompt: Prompt, llm: LLM) -> Any:
        """Play an episode of the prompt's task; raises RolloutError if the environment says that it failed."""
        from verifiers.v1 import EvalClientConfig, ModelContext, Sampling

        kind = type(self.environment.taskset).task_type()
        task = kind(kind.data_type().model_validate(prompt.data["task"]), self.environment.config.taskset.task)
        door = cast(ServedSession, llm.endpoint())
        url, key = door.shared_address()
        # one config for all samples, as verifiers keeps a client per config; the endpoint tells samples apart by name
        client = EvalClientConfig(base_url=url, headers={"Authorization": f"Bearer {key}", "x-api-key": key})
        context = ModelContext(door.endpoint.model, client, self._sampling or Sampling())

        def on_trace(trace: Any) -> None:
            # the policy must not learn from the answers of other agents
            door.register_name(trace.id, "" if trace.agent.trainable else NO_MODEL.format(trace.agent.name))

        slow_start = asyncio.get_running_loop().call_later(SLOW_START_S, self._name_slow_start, door)
        try:
            async with self._servers:
                episode = await self.environment.run_episode(task, context, on_trace=on_trace)
        finally:
            slow_start.cancel()
        if not episode.ok:
            failed = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RolloutError("; ".join(f"{e.type}: {e.message}" for e in failed) or "the episode is not ok")
        return episode

    def _name_slow_start(self, door: ServedSession) -> None:
        """Warn once of an episode that has asked nothing yet: uv is silent while it waits for the network."""
        if not self._slow_start_named and not door.session.requests:
            self._slow_start_named = True
            log.warning(SLOW_START, SLOW_START_S)

    def reward(self, prompt: Prompt, response: Response) -> float:
        """Return the reward of the episode's trainable trace; raises UsageError unless there is exactly one."""
        traces = [trace for trace in response.output.traces if trace.agent.trainable]
        if len(traces) != 1:
            raise UsageError(
                f"the episode has {len(traces)} traces to train, but a sample has one reward; give reward=lambda "
                "prompt, response: ... computed from response.output.traces"
            )
        return float(traces[0].reward)


class _Prompts:
    """Iterates over the tasks as prompts."""

    def __init__(self, taskset: Any, tokenizer: Any) -> None:
        self._taskset = taskset
        self._tokenizer = tokenizer

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for task in self._taskset:
            text = task.data.prompt_text or task.data.system_prompt or task.key
            yield {"token_ids": self._tokenizer.encode(text), "task": task.data.model_dump(mode="json")}


class _EnvironmentServers:
    """Runs the environment's servers while at least one episode is played.

    They start and stop in one task of their own, because their resources must be released in the task that acquired
    them.
    """

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._episode_count = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = asyncio.Lock()
        self._stop: asyncio.Event
        self._started: asyncio.Future[None]
        self._task: asyncio.Task[None]

    async def __aenter__(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._episode_count:
                raise UsageError("an environment of verifiers serves one scheduler at a time; load another one")
            self._loop, self._lock = loop, asyncio.Lock()
        async with self._lock:
            self._episode_count += 1
            if self._episode_count == 1:
                self._stop, self._started = asyncio.Event(), loop.create_future()
                self._task = loop.create_task(self._run(self._started))
            up = self._started
        try:
            await asyncio.shield(up)
        except BaseException:
            await self.__aexit__()
            raise

    async def __aexit__(self, *_: object) -> None:
        await asyncio.shield(asyncio.ensure_future(self._release()))

    async def _release(self) -> None:
        async with self._lock:  # an episode that begins now waits until the servers are down
            self._episode_count -= 1
            if not self._episode_count:
                self._stop.set()
                await self._task

    async def _run(self, started: asyncio.Future[None]) -> None:
        try:
            async with self._environment.serving():
                started.set_result(None)
                await self._stop.wait()
        except Exception as error:
            if not started.done():
                started.set_exception(error)
            else:
                log.warning("verifiers: closing the environment failed: %r", error)
