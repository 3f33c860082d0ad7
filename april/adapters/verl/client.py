"""verl's client and agent-loop worker, with the coordinator behind them; runs in verl's worker processes.

Validation is verl's own, unchanged: it has no session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import transfer_queue as tq
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.utils.tokenizer import get_processor_token_id
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from april.adapters.verl.outputs import fields_of, result_of
from april.adapters.verl.settings import UNBANNED
from april.beside import in_thread
from april.core.attachments import Placed
from april.core.tape import Int32
from april.processes.coordinator import calls
from april.processes.coordinator.media import KINDS, placed_media
from april.processes.coordinator.messages import Result
from april.seams import plain_class


class Remote:
    """An actor whose methods are called like those of an object: each returns something to be awaited."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._actor, name).remote


class Client(FullyAsyncLLMServerClient):  # type: ignore[misc]
    """Asks the coordinator before every request, and tells it what came."""

    coordinator: Any
    max_tokens: int
    overruns: bool
    stands: Mapping[str, int]
    """Ids that stand for images and videos, by kind; the worker that has the model's processor says them."""

    @classmethod
    def around(cls, client: Any, coordinator: Any, max_tokens: int, *, overruns: bool) -> Client:
        """verl's client with the ``coordinator`` (an actor) behind it.

        ``max_tokens``: of a call that names no limit. ``overruns``: servers go beyond the limits that they are given.
        """
        new = cls.__new__(cls)
        new.__dict__.update(client.__dict__)
        new.__dict__.setdefault("_only_hybrid", False)
        new.coordinator, new.max_tokens, new.overruns, new.stands = coordinator, max_tokens, overruns, {}
        return new

    async def generate(  # type: ignore[no-untyped-def]
        self, request_id, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> Any:
        """verl's TokenOutput, from however many requests; its ``extra_fields`` have the oldest and newest weights."""
        session = calls.CURRENT.get()
        if session is None:
            return await super().generate(
                request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **kwargs
            )
        limit = next((k for k in ("max_tokens", "max_new_tokens") if sampling_params.get(k) is not None), "max_tokens")
        outputs: list[Any] = []

        async def send(token_ids: Int32, max_tokens: int) -> Result:
            output = await LLMServerClient.generate(
                self, request_id, prompt_ids=token_ids.tolist(), sampling_params={**sampling_params, limit: max_tokens},
                **dict(kwargs),
            )  # fmt: skip
            outputs.append(output)
            return result_of(len(token_ids), output, max_tokens if self.overruns else None, sampling_params)

        media = {kind: kwargs.get(f"{kind}_data") for kind in KINDS}
        attached: tuple[Placed, ...] = ()
        if any(media.values()):
            attached = await in_thread(placed_media, prompt_ids, media, self.stands)
        done = await calls.generate(
            session, send, list(prompt_ids), int(sampling_params.get(limit) or self.max_tokens),
            float(sampling_params.get("temperature", 1.0)), attached=attached,
            banned_ids=tuple(sorted(set(self.stands.values()))),
        )  # fmt: skip
        return TokenOutput(**fields_of(done, outputs))


NEVER = -100.0
"""The bias of a token that is not to be generated."""


def stands_of(processor: Any) -> dict[str, int]:
    """Ids that stand for what is no token, by kind, where the model's processor has some."""
    ids = {kind: None if processor is None else get_processor_token_id(processor, kind) for kind in ("image", "video")}
    return {kind: int(found) for kind, found in ids.items() if found is not None}


def worker_class() -> Any:
    """verl's agent-loop worker, by april's rules.

    A class of its own each time: Ray sends an actor class with what it inherits, and verl's cannot be found by its
    name, so all of it has to go by value.
    """
    base = plain_class(AgentLoopWorkerTQ)

    class AgentLoopWorker(base):  # type: ignore[valid-type, misc]
        """Starts the agent loops of a prompt one by one, as the coordinator says, and again where it says so."""

        async def _run_prompt(
            self, prompt: dict[str, Any], sampling_params: dict[str, Any], trajectory: dict[str, Any],
            trace: bool = False,
        ) -> None:  # fmt: skip
            coordinator, uid = Remote(self.llm_client.coordinator), prompt["uid"]
            if trajectory["validate"]:
                try:
                    await super()._run_prompt(prompt, sampling_params, trajectory, trace)
                finally:
                    await coordinator.validated(uid)
                return

            self.llm_client.stands = stands = stands_of(self.processor)
            sampling = dict(sampling_params)
            if stands and self.rollout_config.name in UNBANNED:
                sampling["logit_bias"] = dict.fromkeys(map(str, stands.values()), NEVER)

            async def agent_loop(session: calls.Session) -> None:
                await self._run_agent_loop(
                    dict(sampling), trajectory=trajectory, trace=trace, session_id=session.index, **prompt
                )

            async def forget(keys: list[str]) -> None:
                await tq.async_kv_clear(keys=keys, partition_id="train")

            await asyncio.gather(
                *(calls.run_sample(coordinator, uid, i, agent_loop, forget) for i in range(self.rollout_config.n))
            )
            if await coordinator.closed(uid):
                # no sibling can store anything any more; some may have, before a restart
                labels = (await tq.async_kv_list("train") or {}).get("train", {})
                await forget([key for key in labels if key.split("_")[0] == uid])

        async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
            session = None if validate else calls.CURRENT.get()
            outputs = output if isinstance(output, list) else [output]
            if session is not None:
                for one in outputs:
                    spans, oldest, newest = session.provenance(len(one.prompt_ids), len(one.response_ids))
                    one.extra_fields["april_spans"] = spans
                    one.extra_fields["april_resumes"] = session.resumes
                    one.extra_fields["min_global_steps"] = oldest
                    one.extra_fields["max_global_steps"] = newest
            await super()._agent_loop_postprocess(output, validate, **kwargs)
            if session is None or not outputs:
                return
            session.keys += [f"{session.uid}_{session.index}_{i}" for i in range(len(outputs))]
            session.reward = outputs[-1].reward_score
            metric = self.config.algorithm.get("filter_groups", None)
            name = metric.get("metric", None) if metric else None
            if name == "reward":
                session.value = session.reward
            elif name:
                found = outputs[-1].extra_fields.get("reward_extra_info", {}).get(name)
                session.value = None if found is None else float(found)

    return AgentLoopWorker
