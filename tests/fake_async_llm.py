"""A stand-in for vLLM's AsyncLLM (0.32 or 0.33): a fake server's requests behind the object's calls, without a model.

It belongs to the loop that it is made on, or first used on, and refuses calls on another. Weights that were loaded
without a reset of the cache give tokens of neither model.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fake_servers.base import Experts, FakeRequest, FakeServer
from fake_servers.images import salt_of

VOCAB, EOS = 512, 2


def install_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine imports of vLLM."""
    vllm, params = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    vllm.SamplingParams = lambda **given: SimpleNamespace(**given)  # type: ignore[attr-defined]
    params.RequestOutputKind = SimpleNamespace(DELTA=1, FINAL_ONLY=2)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)


class VLLMClientError(Exception):
    """Base of errors that blame the request; from 0.33 on none of them is a ValueError."""


class RetryableRequestError(Exception):
    """What reaches a paused vLLM from 0.33 on; its server answers with the status."""

    status_code = 503


@dataclass(slots=True, eq=False)
class LlmRun(FakeRequest):
    """One request; what is no stream comes at its end."""

    MIN_TOKENS, MAX_TOKENS = "min_tokens", "max_tokens"

    seen: str = ""
    """What its images do to its tokens."""

    @property
    def due(self) -> bool:
        return self.stream or self.finish is not None

    def as_said(self, logprob: float) -> float:
        return logprob


class FakeAsyncLLM(FakeServer[LlmRun]):
    """``release``: 32 holds what reaches it while it is paused, 33 refuses it; ``common``: of :class:`FakeServer`."""

    def __init__(
        self, *, mode: str = "raw_logprobs", policy: str = "fcfs", release: int = 33, transfers: str | None = None,
        experts: Experts | None = None, **common: Any,
    ) -> None:  # fmt: skip
        super().__init__(**({"weights": "tiny0", "mean_length": 60, "max_running": 1 << 20} | common))
        self.release, self.alive = release, True
        self.experts = experts
        self.stale_encoder = False
        """The scheduler believes in what the worker has forgotten of images."""
        self.dead, self.cache_resets = False, True
        self.rpc_results: list[Any] = [None]
        """What the workers return of a reload."""
        self.keeps_label = False
        self.lies: dict[str, Any] = {}
        """Attributes of completions that are overwritten."""
        self.options: list[dict[str, Any]] = []
        """What requests were given besides."""
        self.before_add: asyncio.Event | None = None
        """Set by a test: requests wait for it before vLLM knows of them."""
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                get_vocab_size=lambda: VOCAB, max_model_len=1000, logprobs_mode=mode,
                is_multimodal_model=self.images is not None,
                try_get_generation_config=lambda: {"eos_token_id": [EOS, VOCAB]},
            ),
            scheduler_config=SimpleNamespace(max_num_seqs=64, policy=policy),
            parallel_config=SimpleNamespace(data_parallel_size=2, world_size=3),
        )  # fmt: skip
        gives = SimpleNamespace(enable_return_routed_experts=experts is not None)
        if release >= 33:
            self.vllm_config.aux_output_config = gives
        else:
            vars(self.vllm_config.model_config).update(vars(gives))
        if experts is not None:
            vars(self.vllm_config.model_config).update(
                get_num_experts=lambda: experts.count, get_num_experts_per_tok=lambda: experts.top_k,
                get_total_num_hidden_layers=lambda: experts.layers,
            )  # fmt: skip
        if transfers is not None:
            self.vllm_config.weight_transfer_config = SimpleNamespace(backend=transfers)
        self.session = False
        """It is in the middle of a transfer of weights."""
        self.transfers: list[tuple[str, dict[str, Any]]] = []
        """The calls of transfers."""
        self.fails: set[str] = set()
        """Those that fail."""
        self.renderer = SimpleNamespace(get_eos_token_id=lambda: EOS)
        self.output_handler: asyncio.Task[None] | None = None
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        self._run_output_handler()

    def _run_output_handler(self) -> None:
        if self.output_handler is None:
            self.output_handler = asyncio.get_running_loop().create_task(self._tick())
        assert self.output_handler.get_loop() is asyncio.get_running_loop(), "called on a loop that is not its own"

    async def shut(self) -> None:
        """End its output handler, on its loop."""
        if self.output_handler is not None:
            self.output_handler.cancel()
            await asyncio.wait({self.output_handler})

    def _make_token(self, run: LlmRun) -> None:
        run.salt = " with keys of others" if self.stale_cache else run.seen
        super()._make_token(run)

    def _output(self, run: LlmRun) -> Any:
        ids, logprobs = run.ids[run.sent : run.flushed], run.logprobs[run.sent : run.flushed]
        completion = SimpleNamespace(
            token_ids=ids,
            logprobs=[{t: SimpleNamespace(logprob=p)} for t, p in zip(ids, logprobs, strict=True)],
            finish_reason=run.finish,
            weight_versions=[SimpleNamespace(version=s[0]) for s in run.spans] if run.finish else None,
        )
        if self.experts is not None and run.finish and run.ids:
            completion.routed_experts = self.rows_said(run, self.experts.rows(run.prompt + run.ids, run.made_under))
        for name, value in self.lies.items():
            setattr(completion, name, value)
        run.sent = run.flushed
        return SimpleNamespace(
            outputs=[completion], finished=run.finish is not None, prompt_token_ids=list(run.prompt)
        )

    def _look(self, prompt: dict[str, Any]) -> str:
        images = (prompt.get("multi_modal_data") or {}).get("image", [])
        if not images:
            return ""
        assert self.images is not None
        assert not self.stale_encoder, "an image that the scheduler believes to know kills the engine"
        names = prompt["multi_modal_uuids"]["image"]
        seen = zip(names, images, strict=True)
        return salt_of([self.images.look(name, image.tobytes(), self.weights) for name, image in seen])

    async def generate(
        self, prompt: dict[str, Any], params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[Any, None]:
        assert params.logprobs == 0
        assert request_id not in [run.name for run in self.runs]
        ids = prompt["prompt_token_ids"]
        ids = ids if self.images is None else self.images.expanded(ids)
        run = LlmRun(request_id, ids, vars(params), stream=params.output_kind == 1, seen=self._look(prompt))
        run.cache_salt = prompt.get("cache_salt", "")
        self.runs.append(run)
        self.options.append(options)
        if self.before_add is not None:
            await self.before_add.wait()
        if self.dead:
            raise RuntimeError("EngineDeadError")
        if len(run.prompt) > 500:
            raise (ValueError if self.release == 32 else VLLMClientError)("the prompt is too long")
        if self.pause_mode is not None and self.release == 33:
            raise RetryableRequestError("Generation is paused. Please retry after it resumes.")
        self._run_output_handler()
        self._live.append(run)
        self._queue.append(run)
        self._changed.set()
        try:
            finished = False
            while not finished:
                while run.flushed == run.sent and not run.over:
                    await self._news(run)
                output = self._output(run)
                finished = output.finished
                yield output
        finally:
            self._leave(run)

    async def abort(self, request_ids: list[str]) -> None:
        self._run_output_handler()
        for run in [run for run in self._live if run.name in request_ids]:
            self._end(run, "abort")

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert mode == "abort"
        self.pause_mode = mode
        await self.abort([run.name for run in self._live])

    async def resume_generation(self) -> None:
        self._run_output_handler()
        self.pause_mode = None
        self._changed.set()

    async def collective_rpc(self, method: str, limit_s: float | None = None, *, kwargs: dict[str, Any]) -> list[None]:
        self._run_output_handler()
        if method != "reload_weights":
            return self._transfer(method, kwargs)
        if kwargs["weights_path"] == "missing":
            raise FileNotFoundError("missing")
        self.weights, self.stale_cache = kwargs["weights_path"], True
        self.stale_encoder = self.images is not None
        return self.rpc_results

    def _transfer(self, method: str, kwargs: dict[str, Any]) -> list[None]:
        self.transfers.append((method, kwargs))
        if method in self.fails:
            raise RuntimeError(f"{method} died")
        match method:
            case "start_weight_update":
                if self.session:
                    raise RuntimeError("already started")
                self.session = True
            case "finish_weight_update":
                self.session = False
            case "update_weights":
                assert self.session
                self.weights, self.stale_cache = "-".join(kwargs["update_info"]["names"]), True
            case _:
                assert method == "init_weight_transfer_engine"
        return [None]

    async def reset_prefix_cache(self) -> bool:
        self._run_output_handler()
        self.stale_cache = not self.cache_resets
        return self.cache_resets

    async def reset_encoder_cache(self) -> None:
        self._run_output_handler()
        self.stale_encoder = False
        if self.images is not None:
            self.images.features.clear()

    async def update_weight_version(self, label: str) -> None:
        self._run_output_handler()
        if not self.keeps_label:
            self.label = label

    async def get_weight_version(self) -> str:
        self._run_output_handler()
        return self.label

    async def check_health(self) -> None:
        if self.dead:
            raise RuntimeError("EngineDeadError")
