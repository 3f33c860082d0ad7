"""A stand-in for vLLM's AsyncLLM (0.32 or 0.33): the same calls, outputs, aborts, pauses and labels, without a model.

It belongs to the loop that it is made on, or first used on, and refuses calls on another. A token is a hash of the
weights and everything before it. Weights that were loaded without a reset of the cache give tokens of neither model.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import AsyncGenerator, Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

VOCAB, EOS = 500, 2


def install_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine imports of vLLM."""
    vllm, params = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    vllm.SamplingParams = lambda **given: SimpleNamespace(**given)  # type: ignore[attr-defined]
    params.RequestOutputKind = SimpleNamespace(DELTA=1, FINAL_ONLY=2)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)


def next_token(weights: str, prefix: list[int], mean_len: int) -> int:
    """Greedy."""
    text = weights.encode() + np.array(prefix, np.int32).tobytes()
    number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
    return EOS if number % mean_len == 0 else 3 + (number >> 16) % (VOCAB - 3)


def logprob(token: int, weights: str) -> float:
    """A function of both, exact in float32."""
    return -((token * 31 + sum(weights.encode())) % 97 + 1) / 64


class VLLMClientError(Exception):
    """Base of errors that blame the request; from 0.33 on none of them is a ValueError."""


class RetryableRequestError(Exception):
    """What reaches a paused vLLM from 0.33 on; its server answers with the status."""

    status_code = 503


class _Request:
    def __init__(self, prompt: list[int], params: Any) -> None:
        self.prompt, self.params = prompt, params
        self.tokens: list[int] = []
        self.spans: list[list[Any]] = []
        self.told = 0
        self.outputs: asyncio.Queue[Any] = asyncio.Queue()


class FakeAsyncLLM:
    """``mean_len``: one token in so many is EOS. :meth:`limit` stops requests at so many tokens, until it is raised.
    ``release``: 32 holds what reaches it while it is paused, 33 refuses it."""

    def __init__(
        self, *, mean_len: int = 60, mode: str = "raw_logprobs", policy: str = "fcfs", release: int = 33
    ) -> None:
        self.mean_len = mean_len
        self.release = release
        self._limit = 1 << 30
        self._picks: Callable[[list[int]], bool] = lambda prompt: True
        self.weights, self.cached_weights, self.label = "tiny0", "tiny0", "default"
        self.paused, self.dead, self.cache_resets = False, False, True
        self.rpc_results: list[Any] = [None]
        """What the workers return of a reload; they load nothing if it is anything."""
        self.keeps_label = False
        self.lies: dict[str, Any] = {}
        """Attributes of completions that are overwritten."""
        self.requests: dict[str, _Request] = {}
        self.started: list[str] = []
        self.options: list[dict[str, Any]] = []
        """What requests were given besides."""
        self.before_add: asyncio.Event | None = None
        """Set by a test: requests wait for it before vLLM knows of them."""
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                get_vocab_size=lambda: VOCAB,
                max_model_len=1000,
                logprobs_mode=mode,
                try_get_generation_config=lambda: {"eos_token_id": [EOS, EOS + 1]},
            ),
            scheduler_config=SimpleNamespace(max_num_seqs=64, policy=policy),
            parallel_config=SimpleNamespace(data_parallel_size=2),
        )
        self.renderer = SimpleNamespace(get_eos_token_id=lambda: EOS)
        self.output_handler: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        self._run_output_handler()

    def _run_output_handler(self) -> None:
        if self.output_handler is None:
            self.output_handler = asyncio.get_running_loop().create_task(self._handle())
        assert self.output_handler.get_loop() is asyncio.get_running_loop(), "called on a loop that is not its own"

    async def _handle(self) -> None:
        while True:
            if self.paused or not any(self._step(r) for r in list(self.requests.values())):
                self._wake.clear()
                await self._wake.wait()
            await asyncio.sleep(0)

    def limit(self, tokens: int = 1 << 30, picks: Callable[[list[int]], bool] = lambda prompt: True) -> None:
        """Requests whose prompts ``picks`` picks get at most so many tokens; on its loop."""
        self._limit, self._picks = tokens, picks
        self._wake.set()

    @property
    def stopped(self) -> int:
        """Requests that stand at the limit."""
        return sum(map(self._stands, self.requests.values()))

    def _stands(self, request: _Request) -> bool:
        return len(request.tokens) >= self._limit and self._picks(request.prompt)

    def _step(self, request: _Request) -> bool:
        if self._stands(request):
            return False
        stale = self.weights != self.cached_weights
        token = next_token("neither" if stale else self.weights, request.prompt + request.tokens, self.mean_len)
        request.tokens.append(token)
        if not request.spans or request.spans[-1][0] != self.label:
            request.spans.append([self.label, self.weights])
        stops = {EOS, *(request.params.stop_token_ids or ())}
        if token in stops:
            self._end(request, "stop")
        elif len(request.tokens) == request.params.max_tokens:
            self._end(request, "length")
        elif request.params.output_kind == 1:
            request.outputs.put_nowait(self._output(request, None))
        return True

    def _end(self, request: _Request, reason: str) -> None:
        self.requests = {i: r for i, r in self.requests.items() if r is not request}
        request.outputs.put_nowait(self._output(request, reason))

    def _output(self, request: _Request, reason: str | None) -> Any:
        tokens = request.tokens[request.told :] if request.params.output_kind == 1 else list(request.tokens)
        request.told = len(request.tokens)
        completion = SimpleNamespace(
            token_ids=tokens,
            logprobs=[{t: SimpleNamespace(logprob=logprob(t, self.weights))} for t in tokens],
            finish_reason=reason,
            weight_versions=[SimpleNamespace(version=s[0]) for s in request.spans] if reason else None,
        )
        for name, value in self.lies.items():
            setattr(completion, name, value)
        return SimpleNamespace(outputs=[completion], finished=reason is not None)

    async def generate(
        self, prompt: dict[str, list[int]], params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[Any, None]:
        assert params.logprobs == 0
        assert request_id not in self.started
        self.started.append(request_id)
        self.options.append(options)
        if self.before_add is not None:
            await self.before_add.wait()
        if self.dead:
            raise RuntimeError("EngineDeadError")
        if len(prompt["prompt_token_ids"]) > 500:
            raise (ValueError if self.release == 32 else VLLMClientError)("the prompt is too long")
        if self.paused and self.release == 33:
            raise RetryableRequestError("Generation is paused. Please retry after it resumes.")
        self._run_output_handler()
        request = self.requests[request_id] = _Request(prompt["prompt_token_ids"], params)
        self._wake.set()
        try:
            finished = False
            while not finished:
                output = await request.outputs.get()
                finished = output.finished
                yield output
        except (asyncio.CancelledError, GeneratorExit):
            self.requests.pop(request_id, None)
            raise

    async def abort(self, request_ids: list[str]) -> None:
        self._run_output_handler()
        for request_id in request_ids:
            if request_id in self.requests:
                self._end(self.requests[request_id], "abort")

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert mode == "abort"
        self._run_output_handler()
        self.paused = True
        await self.abort(list(self.requests))

    async def resume_generation(self) -> None:
        self._run_output_handler()
        self.paused = False
        self._wake.set()

    async def collective_rpc(self, method: str, *, kwargs: dict[str, str]) -> list[None]:
        self._run_output_handler()
        assert method == "reload_weights"
        if kwargs["weights_path"] == "missing":
            raise FileNotFoundError("missing")
        self.weights = kwargs["weights_path"]
        return self.rpc_results

    async def reset_prefix_cache(self) -> bool:
        self._run_output_handler()
        if self.cache_resets:
            self.cached_weights = self.weights
        return self.cache_resets

    async def update_weight_version(self, label: str) -> None:
        self._run_output_handler()
        if not self.keeps_label:
            self.label = label

    async def get_weight_version(self) -> str:
        self._run_output_handler()
        return self.label

    async def shut(self) -> None:
        """End its output handler, on its loop."""
        if self.output_handler is not None:
            self.output_handler.cancel()
            await asyncio.wait({self.output_handler})

    async def check_health(self) -> None:
        if self.dead:
            raise RuntimeError("EngineDeadError")
