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


class Verifiers:
    """Makes prompts, rollout and reward of a RolloutScheduler from an environment (``verifiers.v1.Env``).

    The policy generates the turns of the trainable agents. Any other agent, such as a user simulator, needs a model of
    its own. The rollout function plays one episode, whose requests go to the sample's endpoint, and returns the
    ``Episode``. The environment's own servers (shared tools, the server of its harnesses) start with the first episode
    and stop with the scheduler.

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
        self._serving: asyncio.Task[None] | None = None
        """Task that runs the environment's servers."""
        self._started: asyncio.Future[None]
        """Future that is done once the servers have started, or could not start."""

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
        served = cast(ServedSession, llm.endpoint())
        url, key = served.shared_address()
        # one config for all samples, as verifiers keeps a client per config; the endpoint tells samples apart by name
        client = EvalClientConfig(base_url=url, headers={"Authorization": f"Bearer {key}", "x-api-key": key})
        context = ModelContext(served.endpoint.model, client, self._sampling or Sampling())

        def on_trace(trace: Any) -> None:
            # the policy must not learn from the answers of other agents
            served.register_name(trace.id, "" if trace.agent.trainable else NO_MODEL.format(trace.agent.name))

        await self._start_servers()
        episode = await self.environment.run_episode(task, context, on_trace=on_trace)
        if not episode.ok:
            failed = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RolloutError("; ".join(f"{e.type}: {e.message}" for e in failed) or "the episode is not ok")
        return episode

    async def _start_servers(self) -> None:
        """Start the environment's servers unless they run already; raises their error if they cannot start."""
        loop, serving = asyncio.get_running_loop(), self._serving
        if serving is not None and not serving.done() and serving.get_loop() is not loop:
            raise UsageError("an environment of verifiers serves one scheduler at a time; load another one")
        if serving is None or serving.done():
            self._started = loop.create_future()
            self._serving = loop.create_task(self._serve(self._started))
        await asyncio.shield(self._started)

    async def _serve(self, started: asyncio.Future[None]) -> None:
        """Run the servers in one task until the event loop ends, because the task that starts them must stop them."""
        try:
            async with self.environment.serving():
                started.set_result(None)
                await asyncio.Event().wait()
        except Exception as error:
            if started.done():
                log.warning("verifiers: closing the environment failed: %r", error)
            else:
                started.set_exception(error)

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
    def __init__(self, taskset: Any, tokenizer: Any) -> None:
        self._taskset = taskset
        self._tokenizer = tokenizer

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for task in self._taskset:
            text = task.data.prompt_text or task.data.system_prompt or task.key
            yield {"token_ids": self._tokenizer.encode(text), "task": task.data.model_dump(mode="json")}
