"""What a workflow gets in place of AReaL's engine: each call of ``agenerate`` is as many requests as april wants."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from areal import workflow_context
from areal.api import ModelResponse
from areal.infra.utils.http import arequest_with_retry

from april.core.tape import Int32
from april.core.types import DropReason
from april.errors import RolloutError
from april.processes.coordinator import calls
from april.processes.coordinator.messages import Result
from april.server_text import said

STOP_REASONS = ("stop", "tool_calls", "length")


class Engine:
    """Everything but ``agenerate`` is AReaL's.

    Args:
        inner: AReaL's RemoteInfEngine.
        pauses: how often weights may have changed so far.
    """

    def __init__(self, inner: Any, pauses: Callable[[], int]) -> None:
        self._inner, self._pauses = inner, pauses

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def agenerate(self, req: Any) -> Any:
        """The response to a ModelRequest, with the version of the weights that wrote each token."""
        inner, session = self._inner, calls.CURRENT.get()
        if session is None:
            return await inner.agenerate(req)
        prompt, sampling = list(req.input_ids), req.gconfig
        room = min(sampling.max_tokens - len(prompt), sampling.max_new_tokens)
        if sampling.n_samples != 1:
            raise RolloutError(f"a request for {sampling.n_samples} samples: ask once per sample, with n_samples=1")
        if room <= 0:
            raise RolloutError(
                f"a prompt of {len(prompt)} tokens leaves no room for a response: max_tokens={sampling.max_tokens}, "
                f"max_new_tokens={sampling.max_new_tokens}"
            )
        if req.vision_msg_vllm:
            raise RolloutError("images in vLLM's chat format cannot be continued by token ids; use text or SGLang")
        reason = "stop"
        began = time.perf_counter()

        async def send(token_ids: Int32, max_tokens: int) -> Result:
            nonlocal reason
            label, pauses = inner.get_version(), self._pauses()
            one = req.copy()
            one.input_ids, one.gconfig = token_ids.tolist(), sampling.new(max_new_tokens=max_tokens)
            made = await self._answer(one, label)
            if made.stop_reason in STOP_REASONS:
                reason = made.stop_reason
            tokens = np.asarray(made.output_tokens, np.int32)
            logprobs = np.asarray(made.output_logprobs, np.float32)
            unused = None
            if pauses != self._pauses() and len(tokens):
                # it ended after a pause, in which weights may have changed: nobody knows which wrote it
                unused, tokens, logprobs = (len(tokens), DropReason.UNKNOWN_WEIGHTS), tokens[:0], logprobs[:0]
            aborted = made.stop_reason == "abort" or unused is not None
            # a server's own limit is not known here
            anywhere = bool(getattr(sampling, "stop", None)) or made.stop_reason in ("length", "tool_calls")
            return Result(
                offset=len(token_ids), tokens=tokens, logprobs=logprobs, label=label, aborted=aborted, unused=unused,
                stop_token_ids=tuple(getattr(sampling, "stop_token_ids", None) or ()), ends_anywhere=anywhere,
            )  # fmt: skip

        done = await calls.generate(session, send, prompt, room, sampling.temperature)
        versions = np.full(len(prompt) + len(done.tokens), -1)
        for start, end, _, n in done.spans:
            versions[start:end] = n
        latency = time.perf_counter() - began
        return ModelResponse(
            input_tokens=prompt,
            input_images=req.image_data,
            output_tokens=done.tokens.tolist(),
            output_logprobs=done.logprobs.tolist(),
            output_versions=versions[len(prompt) :].tolist(),
            stop_reason="length" if done.by_length else reason,
            latency=latency,
            ttft=latency,
            tokenizer=req.tokenizer,
            processor=req.processor,
        )

    async def _answer(self, one: Any, label: int) -> Any:
        """One request, once: whether it is sent again is april's to say."""
        inner, address = self._inner, self._inner.choose_server()
        http = inner.backend.build_generation_request(one, with_lora=False, version=label)
        try:
            answer = await arequest_with_retry(
                session=await workflow_context.get_aiohttp_session(), addr=address, endpoint=http.endpoint,
                payload=http.payload, method=http.method, max_retries=1, timeout=inner.config.request_timeout,
            )  # fmt: skip
        except RuntimeError as error:
            # its text repeats the whole request
            raise RolloutError(f"server {address}: {said(str(error).rpartition('Last error: ')[2])}") from None
        if not isinstance(answer, dict):
            raise RolloutError(f"server {address} gave a {type(answer).__name__} where JSON was expected")
        return inner.backend.parse_generation_response(answer)
