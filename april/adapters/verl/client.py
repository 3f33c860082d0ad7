"""Subclasses of verl's client and agent-loop worker that call april's scheduler; they run in verl's worker processes.

Validation does not use april.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ray
import transfer_queue as tq
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.utils import tensordict_utils as tu
from verl.utils.rollout_trace import rollout_trace_op
from verl.utils.tokenizer import get_processor_token_id
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from april.adapters.common.installed_trainer import undecorated_class
from april.adapters.common.placed_media import MEDIA_KINDS, placed_media
from april.adapters.verl import agent_calls  # as a module: Ray cannot pickle a context variable with the class
from april.adapters.verl.agent_calls import AgentLoopSession, LLMCall, LLMResult, Message, WorkerCalls, fields_of
from april.adapters.verl.settings import UNBANNED
from april.concurrency.worker_threads import run_in_thread
from april.core.attachments import Placed

MEDIA = (*(f"{kind}_data" for kind in MEDIA_KINDS), "mm_processor_output")
"""Arguments of verl's client that are sent as Ray references, so that the trainer's process never loads them."""


def limit_of(sampling: Mapping[str, Any]) -> str:
    """Return the key of the token limit in verl's sampling parameters."""
    return next((k for k in ("max_tokens", "max_new_tokens") if sampling.get(k) is not None), "max_tokens")


async def ask_servers(client: LLMServerClient, asked: LLMCall, token_ids: list[int], max_tokens: int) -> Any:
    """Send one request through verl's own ``client`` and return its TokenOutput."""
    sampling = {**asked.options, limit_of(asked.options): max_tokens}
    return await LLMServerClient.generate(
        client, asked.request_id, prompt_ids=token_ids, sampling_params=sampling, **asked.media
    )


class AprilServerClient(FullyAsyncLLMServerClient):  # type: ignore[misc]
    """verl's client, except that agent loops that april runs get their responses from april's scheduler."""

    max_tokens: int
    placeholder_ids: Mapping[str, int]
    """Placeholder token ids by kind (image, video), from the model's processor."""

    @classmethod
    def around(cls, client: Any, max_tokens: int) -> AprilServerClient:
        """Make a copy of verl's client; ``max_tokens`` is the token limit of calls that set none."""
        new = cls.__new__(cls)
        new.__dict__.update(client.__dict__)
        new.__dict__.setdefault("_only_hybrid", False)
        new.max_tokens, new.placeholder_ids = max_tokens, {}
        return new

    @rollout_trace_op  # type: ignore[untyped-decorator]
    async def generate(  # type: ignore[no-untyped-def]
        self, request_id, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> Any:
        """Return a complete response as TokenOutput; ``extra_fields`` has the oldest and the newest weight version."""
        session = agent_calls.CURRENT_SESSION.get()
        if session is None:
            return await super().generate(request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **kwargs)
        media = {kind: kwargs.get(f"{kind}_data") for kind in MEDIA_KINDS}
        attached: tuple[Placed, ...] = ()
        if any(media.values()):
            attached = await run_in_thread(placed_media, prompt_ids, media, self.placeholder_ids)
        sampling = {
            "max_tokens": int(sampling_params.get(limit_of(sampling_params)) or self.max_tokens),
            "temperature": float(sampling_params.get("temperature", 1.0)),
            "stop_token_ids": tuple(sampling_params.get("stop_token_ids") or ()),
            "banned_ids": tuple(sorted(set(self.placeholder_ids.values()))),
        }  # fmt: skip
        done = await session.generate(
            LLMCall(
                token_ids=np.asarray(prompt_ids, np.int32), sampling=sampling, options=sampling_params,
                request_id=request_id, attached=attached,
                media={k: ray.put(v) if k in MEDIA and v is not None else v for k, v in kwargs.items()},
            )
        )  # fmt: skip
        return TokenOutput(**fields_of(done, session.spans))


NEVER = -100.0
"""Logit bias of a token that must not be generated."""


def placeholder_ids_of(processor: Any) -> dict[str, int]:
    """Return the placeholder token ids that the model's processor defines, by kind; empty without a processor."""
    ids = {kind: None if processor is None else get_processor_token_id(processor, kind) for kind in ("image", "video")}
    return {kind: int(found) for kind, found in ids.items() if found is not None}


def worker_class() -> Any:
    """Make the class of april's agent-loop worker.

    The class is made in a function so that Ray pickles it by value, since its base class cannot be imported by name.
    """
    base = undecorated_class(AgentLoopWorkerTQ)

    class AgentLoopWorker(base):  # type: ignore[valid-type, misc]
        """Worker that starts the agent loop of a training sample when april's scheduler starts the sample."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._april = WorkerCalls()

        async def april_begin(self, row: Any, number: int, uid: str, index: int, stored: Sequence[str]) -> None:
            self._april.begin(number, uid, index, stored)
            tu.assign_non_tensor_data(row, "april_session", number)
            await self.generate_sequences(row)

        async def april_messages(self) -> list[Message]:
            return await self._april.messages()

        async def april_answer(self, answers: Sequence[tuple[int, LLMResult | str | None]]) -> None:
            self._april.answer(answers)

        async def april_validate(self, rows: Any) -> None:
            """Run verl's own validation of these prompts and wait until it is finished."""
            before = set(self.background_tasks)
            await self.generate_sequences(rows)
            await asyncio.gather(*(self.background_tasks - before))

        async def _run_prompt(
            self, prompt: dict[str, Any], sampling_params: dict[str, Any], trajectory: dict[str, Any],
            trace: bool = False,
        ) -> None:  # fmt: skip
            if trajectory["validate"]:
                await super()._run_prompt(prompt, sampling_params, trajectory, trace)
                return
            self.llm_client.placeholder_ids = placeholders = placeholder_ids_of(self.processor)
            sampling = dict(sampling_params)
            if placeholders and self.rollout_config.name in UNBANNED:
                sampling["logit_bias"] = dict.fromkeys(map(str, placeholders.values()), NEVER)

            async def agent_loop(session: AgentLoopSession) -> None:
                await self._run_agent_loop(
                    sampling, trajectory=trajectory, trace=trace, session_id=session.index, **prompt
                )

            async def forget(keys: Sequence[str]) -> None:
                await tq.async_kv_clear(keys=list(keys), partition_id="train")

            await self._april.run(prompt.pop("april_session"), agent_loop, forget)

        async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
            session = None if validate else agent_calls.CURRENT_SESSION.get()
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
