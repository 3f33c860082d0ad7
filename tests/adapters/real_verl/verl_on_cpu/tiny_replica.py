"""A replica for verl that decodes a tiny model token by token, in one Ray actor, with the contract of verl's servers.

Every request is written down with what it sent (``VERL_ON_CPU_TRACE``): a count of tokens that nobody else keeps.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from typing import Any

import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput


class Request:
    """One request while it runs."""

    def __init__(self, prompt_ids: list[int], sampling: dict[str, Any], longest: int) -> None:
        self.prompt_ids = list(prompt_ids)
        self.limit = int(sampling.get("max_tokens") or sampling.get("max_new_tokens") or longest)
        self.temperature = float(sampling.get("temperature", 1.0))
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.cache: Any = None
        self.reason = ""
        self.ended = asyncio.Event()


class TinyServer:
    """Takes requests while its gate is open; one decode step after the other for all of them."""

    def __init__(self, model_path: str, longest: int) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        self._eos = self._model.config.eos_token_id
        self._longest = longest
        self._trace = os.environ.get("VERL_ON_CPU_TRACE")
        self._label: int | None = None
        self._open, self._rejects = asyncio.Event(), False
        self._open.set()
        self._live: list[Request] = []
        self._work: asyncio.Task[None] | None = None

    # ---------------------------------------------------------------- verl's contract

    async def generate(self, prompt_ids: Any, sampling_params: Any, request_id: str, **media: Any) -> TokenOutput:
        while not self._open.is_set():
            if self._rejects:
                return self._output([], [], "aborted")
            await self._open.wait()
        request = Request(prompt_ids, sampling_params, self._longest)
        self._live.append(request)
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._run())
        label = self._label
        await request.ended.wait()
        self._note(
            ids=request.prompt_ids, tokens=request.tokens, label=label, reason=request.reason,
            temperature=request.temperature,
        )  # fmt: skip
        return self._output(request.tokens, request.logprobs, request.reason)

    def _note(self, **line: Any) -> None:
        if self._trace:
            with open(self._trace, "a", encoding="utf-8") as file:
                file.write(json.dumps({"time": time.time(), **line}) + "\n")

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, int]:
        self._open.clear()
        self._rejects = reject_request
        live, self._live = self._live, []
        for request in live:
            request.reason = "aborted"
            request.ended.set()
        return {"aborted_count": len(live)}

    async def resume_generation(self) -> None:
        self._rejects = False
        self._open.set()

    async def set_global_steps(self, global_steps: int) -> None:
        self._label = global_steps

    async def load(self, weights: dict[str, torch.Tensor], label: int | None) -> None:
        assert not self._live, "weights change while requests run"
        self._model.load_state_dict(weights, strict=False)
        self._label = label if label is not None else self._label

    async def sleep(self) -> None:
        assert not self._live, "the replica is put to sleep while requests run"

    async def ready(self) -> bool:
        return True

    async def wake_up(self, tags: Any = None) -> None: ...
    async def clear_kv_cache(self) -> None: ...
    async def release_kv_cache(self) -> None: ...
    async def resume_kv_cache(self) -> None: ...
    async def start_profile(self, **_: Any) -> None: ...
    async def stop_profile(self) -> None: ...

    # ---------------------------------------------------------------- decoding

    def _output(self, tokens: list[int], logprobs: list[float], reason: str) -> TokenOutput:
        extra = {"global_steps": self._label}
        return TokenOutput(token_ids=tokens, log_probs=logprobs, stop_reason=reason, extra_fields=extra)

    async def _run(self) -> None:
        while self._live:
            for request in list(self._live):
                if request.reason:
                    continue
                if self._decode(request) or len(request.tokens) >= request.limit:
                    request.reason = "completed"
                    self._live.remove(request)
                    request.ended.set()
                await asyncio.sleep(0)

    def _decode(self, request: Request) -> bool:
        ids = request.tokens[-1:] or request.prompt_ids
        with torch.no_grad():
            out = self._model(input_ids=torch.tensor([ids]), past_key_values=request.cache, use_cache=True)
        request.cache = out.past_key_values
        logits = out.logits[0, -1].float()
        scores = torch.log_softmax(logits / (request.temperature or 1.0), -1)
        token = int(torch.multinomial(scores.exp(), 1)) if request.temperature else int(scores.argmax())
        request.tokens.append(token)
        request.logprobs.append(float(scores[token]))
        return bool(token == self._eos)


class TinyReplica(RolloutReplica):  # type: ignore[misc]
    """One server per replica."""

    async def launch_servers(self) -> None:
        path = self.model_config.path if hasattr(self.model_config, "path") else self.model_config["path"]
        actor = ray.remote(num_cpus=0, max_concurrency=self.max_concurrency)(TinyServer)
        server = actor.options(name=f"tiny_{self.replica_rank}").remote(path, self.config.response_length)
        self.servers, self._server_handle = [server], server
        self._server_address = f"tiny-{self.replica_rank}"
        await server.ready.remote()


class TinyWeights(BaseRollout):  # type: ignore[misc]
    """The half in the trainer's process: hands the weights over."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        self._name = f"tiny_{os.environ['RANK']}"

    async def resume(self, tags: Any) -> None: ...
    async def release(self) -> None: ...

    async def update_weights(self, weights: Any, global_steps: int | None = None, **_: Any) -> None:
        state: dict[str, torch.Tensor] = {}
        if hasattr(weights, "__aiter__"):
            async for name, tensor in weights:
                state[name] = tensor.detach().cpu().float().clone()
        else:
            state = {name: tensor.detach().cpu().float().clone() for name, tensor in weights}
        await ray.get_actor(self._name).load.remote(state, global_steps)
