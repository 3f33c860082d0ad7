"""A fake vLLM server on a real loopback socket: the protocol with its quirks, faults on purpose, no model, no clock.

Generation goes one token per so many turns of the event loop, or by :meth:`FakeVllmServer.step` alone. What was asked
and must not be asked is in ``violations``; every request is in ``runs``.
"""

from __future__ import annotations

import base64
import io
import json
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
from aiohttp import web

from .base import AT_ONCE, Experts, FakeRequest, FakeServer, Parts, RequestFault, at_once, error, events
from .images import PLACEHOLDER, Unknown, salt_of

HARMLESS = (RequestFault.ABORT_UNSEEN, RequestFault.UNASKED_ABORT, RequestFault.TRICKLE)
"""After these april has every token that the server handed over, without an error."""


@dataclass(slots=True, eq=False)
class FakeVllmRun(FakeRequest):
    MIN_TOKENS, MAX_TOKENS = "min_tokens", "max_tokens"

    token_route: bool = True
    model: str = ""
    """As the request names it."""
    usage_asked: bool = False
    """Its stream ends with the usage."""
    says_cached: bool = False
    """Its usage says how much of its prompt was cached (``--enable-prompt-tokens-details``)."""
    logprobs_mode: str = "processed"
    under: str = ""
    """Weights that the server had when it came."""

    def as_said(self, logprob: float) -> float:
        """The log-probability under ``--logprobs-mode``; "temperature" is what no vLLM says, and others do."""
        temperature = self.params["temperature"]
        narrow = self.params.get("top_k") == 1 or (self.params.get("top_p", 1.0) < 0.01 and temperature != 1.0)
        if self.logprobs_mode == "processed" and narrow and temperature:
            return 0.0
        return logprob if self.logprobs_mode == "raw" or temperature in (0.0, 1.0) else logprob * 0.8

    def answer(self, said: Parts, model: str, *, spans: bool) -> dict[str, Any]:
        """What is said, in the shape of the request's route."""
        versions = [{"version": v, "start": a, "end": b} for v, a, b in said.spans] if spans and self.finish else None
        choice: dict[str, Any] = {
            "index": 0, "finish_reason": said.finish, "token_ids": said.ids,
            "stop_reason": self.matched if said.finish else None,
        }  # fmt: skip
        if self.token_route:
            choice["weight_versions"] = versions
            scored = [{"token_id": i, "logprob": p, "rank": 1} for i, p in zip(said.named, said.logprobs, strict=True)]
            choice["logprobs"] = {"content": [s | {"top_logprobs": [dict(s)]} for s in scored]}
            head = {"request_id": self.name, "model": model, "output_mode": "tokens"}
            if self.params.get("return_token_ids") and self.sent == 0:
                head["prompt_token_ids"] = self.prompt[: said.prompt]
        else:
            texts = [f"<{i}>" for i in said.named]
            choice |= {"text": "".join(texts), "logprobs": {
                "text_offset": [0] * len(texts), "token_logprobs": said.logprobs, "tokens": texts,
                "top_logprobs": [{t: p} for t, p in zip(texts, said.logprobs, strict=True)],
            }}  # fmt: skip
            if self.params.get("return_token_ids") and self.sent == 0:
                choice["prompt_token_ids"] = self.prompt[: said.prompt]
            if self.params.get("return_weight_versions"):
                choice["weight_versions"] = versions
            head = {"id": self.name.rsplit("-", 1)[0], "object": "text_completion", "model": model}
        return head | {"choices": [choice], "usage": None if self.stream else self.usage(said.prompt, said.total)}

    def usage(self, prompt: int, made: int) -> dict[str, Any]:
        """The server's own count of the tokens."""
        said = {"prompt_tokens": prompt, "total_tokens": prompt + made, "completion_tokens": made}
        return said | ({"prompt_tokens_details": {"cached_tokens": self.cached}} if self.says_cached else {})


TOKENS, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
TRANSFER = {
    "/init_weight_transfer_engine": "Weight transfer initialized", "/start_weight_update": "Weight update started",
    "/update_weights": "Weights updated", "/finish_weight_update": "Weight update finished",
}  # fmt: skip
"""The calls of a transfer of weights, in order, and the words of their success."""
GUARDED = ("/v1/", "/inference/")
"""What a key guards; the developer routes stay open."""


class FakeVllmServer(FakeServer[FakeVllmRun]):
    """Speaks as vLLM 0.32 or 0.33 does.

    Args:
        release: 33: what comes while it is paused (mode abort or wait) is refused and not held, and completions have
            version spans where they are asked for.
        developer: VLLM_SERVER_DEV_MODE=1.
        scale_out: ``--enable-scale-out``.
        processes: API processes behind the port.
        api_key: guards the generation routes, and nothing else.
        logprobs: "processed", "raw" (vLLM's default), or "temperature".
        root: directory of the model, as its card says it.
        chunked_prefill: prompts are read in chunks, which on a CPU kills it at the first request with a seed.
        copies: data-parallel ones, behind one API process.
        speculation: ``speculative_config`` as ``/server_info`` shows it.
        without: routes that this version does not have.
        transfers: the back-end for weights that it was started with (``--weight-transfer-config``).
        world_size: workers, over all copies.
        kv_connector: ``kv_transfer_config`` as ``/server_info`` shows it; each request's keys are asked of it.
        common: of :class:`FakeServer`; a load takes the last part of its path for the name of the weights, and fails if
            that begins with "missing".
    """

    def __init__(
        self, *, developer: bool = True, scale_out: bool = True, processes: int = 1, api_key: str | None = None,
        logprobs: str = "processed", model: str = "fake", root: str = "fake/model",
        device: str = "cuda", without: tuple[str, ...] = (), chunked_prefill: bool = False, copies: int = 1,
        speculation: dict[str, Any] | None = None, release: int = 32, transfers: str | None = None, world_size: int = 1,
        kv_connector: dict[str, Any] | None = None, says_cached: bool = False, **common: Any,
    ) -> None:  # fmt: skip
        super().__init__(**common)
        self.says_cached = says_cached
        self.kv_connector = kv_connector
        self.model, self.release = model, release
        self.developer, self.scale_out, self.processes = developer, scale_out, processes
        self.logprobs = logprobs
        self.root, self.device, self.without = root, device, without
        self.chunked_prefill, self.copies, self.speculation = chunked_prefill, copies, speculation
        self._key = api_key
        self.aborts: list[tuple[str, dict[str, Any]]] = []
        """(route, body) of the calls that abort by id."""
        self.pauses: list[str] = []
        """Modes of the calls of ``/pause``."""
        self._salts: set[str] = set()
        """Of requests that have left keys in the cache."""
        self._emptied = False
        """The pause that is on has emptied the cache."""
        self.routed_experts: str | None = None
        """What the end of an answer says of the experts of all its tokens, those of the prompt too."""
        self.transfers, self.world_size = transfers, world_size
        self.transfer_calls: list[tuple[str, Any]] = []
        """(route, body) of what is asked for a transfer, in order."""
        self.joined, self.active, self.remembers, self.received = False, False, False, list[str]()
        """It is in a group; a transfer is under way; layers have a part of one; the names of the tensors that came."""
        self.stale_encoder = False
        """The scheduler believes in features of images that the worker has thrown away."""
        self.shown: dict[str, Any] = {}
        """Further settings as ``/server_info`` shows them."""
        self.resets_refused = 0
        """So many calls of ``/reset_prefix_cache`` will have no success."""
        self._stale_salts: set[str] = set()
        """Salts under which there are keys of older weights."""

    RUN = FakeVllmRun

    def _shaped(self, run: FakeVllmRun, said: dict[str, Any]) -> dict[str, Any]:
        """An answer as this server writes it."""
        return said

    def _routes(self) -> list[web.RouteDef]:
        routes = [
            web.post(TOKENS, self._generate), web.post(COMPLETIONS, self._generate),
            web.get("/v1/models", self._models), web.get("/version", self._version),
            web.get("/health", self._health), web.get("/metrics", self._metrics),
        ]  # fmt: skip
        if self.loras is not None:
            routes += [
                web.post("/v1/load_lora_adapter", self._load_adapter),
                web.post("/v1/unload_lora_adapter", self._unload_adapter),
            ]  # fmt: skip
        if self.developer:
            routes += [
                web.post("/abort_requests", self._abort), web.post("/pause", self._pause),
                web.post("/resume", self._resume), web.get("/is_paused", self._is_paused),
                web.post("/collective_rpc", self._rpc), web.post("/reset_prefix_cache", self._reset),
                web.get("/weight_info", self._weight_info), web.post("/update_weight_version", self._relabel),
                web.get("/server_info", self._server_info), web.get("/get_world_size", self._world_size),
                web.post("/reset_encoder_cache", self._reset_encoder),
                *(web.post(route, self._transfer) for route in TRANSFER),
            ]  # fmt: skip
        return routes

    def _runner_options(self) -> dict[str, Any]:
        return {"handler_cancellation": True}

    # ---------------------------------------------------------------- generation

    def _fails_by(self, run: FakeVllmRun, kind: RequestFault) -> bool:
        if kind is RequestFault.ENGINE_DIES:
            run.failed = True
            self._leave(run)
        return run.failed

    def _abort_run(self, run: FakeVllmRun) -> None:
        """What an abort does, with the tokens that are there."""
        if run.hit(RequestFault.ABORT_UNSEEN):
            run.fault = None
            return
        if run.hit(RequestFault.ABORT_NEVER_ENDS):
            run.frozen = True
            return
        if run.hit(RequestFault.LOST_PARTIAL):
            run.lose_unsent()
        self._end(run, run.aborted())

    # ---------------------------------------------------------------- requests

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body, token_route = await request.json(), request.path == TOKENS
        if token_route and not self.scale_out:
            return error(403, "Scale-out endpoints are disabled. Restart with --enable-scale-out.")
        refused = self._refusal(body, token_route)
        if refused is not None:
            return refused
        run = self._run_of(body, token_route, request.headers.get("X-Request-Id"))
        self._came(run, request.headers)
        if self.chunked_prefill and self.device == "cpu" and run.params.get("seed") is not None:
            self.violations.append(f"{run.name} has a seed, which kills the server")
            self.die()
        if kind := run.hit(*AT_ONCE):
            return at_once(kind)
        if self.release >= 33 and self.pause_mode in ("abort", "wait"):
            return await self._paused_answer(request, run)
        if self.stale_cache and (not run.cache_salt or run.cache_salt in self._stale_salts):
            self.violations.append(f"{run.name} is served with keys and values of older weights")
        if self.stale_encoder and "/reset_encoder_cache" not in self.without:
            self.violations.append(f"{run.name} is served where the next image that is known kills the server")
        self._salts.add(run.cache_salt)
        self._live.append(run)
        self._queue.append(run)
        self._changed.set()
        try:
            return await (self._stream(request, run) if run.stream else self._plain(request, run))
        finally:
            # also when the client has closed: its tokens are lost
            self._leave(run)

    async def _paused_answer(self, request: web.Request, run: FakeVllmRun) -> web.StreamResponse:
        """A stream has begun by the time at which the engine behind it refuses."""
        refusal = error(503, "Generation is paused. Please retry after it resumes.")
        return await events(request, str(refusal.text), "[DONE]") if run.stream else refusal

    def _refusal(self, body: dict[str, Any], token_route: bool) -> web.Response | None:
        params = body.get("sampling_params") if token_route else body
        ids = body.get("token_ids" if token_route else "prompt")
        if not isinstance(ids, list) or not isinstance(params, dict):
            return error(400, "validation errors: 'missing', 'loc': 'body.token_ids', 'msg': 'Field required'")
        biased = [int(i) for i in params.get("logit_bias", {}) if not 0 <= int(i) < self.vocab_size]
        if biased:
            said = f"token_id(s) {biased} in logit_bias contain out-of-vocab token ids."
            return error(400, f"{said} Vocabulary size: {self.vocab_size}")
        if (unseen := self._unseen(body)) is not None:
            return unseen
        if token_route and self.images is not None:
            ids = self.images.expanded(ids)
        if body.get("model", self.model) not in (self.model, *self.loaded):
            return error(404, f"The model `{body['model']}` does not exist.")
        if params.get("logit_bias") and self.speculation:
            return error(400, "The min_p and logit_bias sampling parameters are not yet supported")
        if params.get("stop") and self.decode is None:
            return error(400, "stop strings are not supported on a server without a tokenizer")
        low = params.get("max_tokens", 16) < max(1, params.get("min_tokens", 0))
        if low or not ids or len(ids) >= self.context or not all(0 <= i < self.vocab_size for i in ids):
            self.violations.append(f"a request with {len(ids)} ids cannot be served")
            return error(400, f"{len(ids)} prompt tokens cannot be served; the context is {self.context}")
        if len(ids) + params.get("max_tokens", 16) > self.context:
            self.violations.append(f"{len(ids)} + {params['max_tokens']} tokens are cut to the context of a server")
        return None

    def _unseen(self, body: dict[str, Any]) -> web.Response | None:
        """The refusal of images; other routes leave them out."""
        parts = body.get("content_parts")
        if not parts:
            return None
        if "token_ids" not in body:
            self.violations.append("images come on a route that leaves them out")
            return None
        if self.images is None:
            return error(400, f"{self.model} is not a multimodal model")
        if not self.images.keeps and any(part["url"] is None for part in parts):
            return error(400, "Failed to apply Processor on data={'images': [None]} with kwargs={}")
        try:
            body["seen"] = [self.images.take(part["uuid"], part["url"]) for part in parts]
        except Unknown:
            return error(400, "Cache miss for image at index 0 but data is not provided.")
        if len(parts) != body["token_ids"].count(PLACEHOLDER):
            self.violations.append(f"{len(parts)} images come for {body['token_ids'].count(PLACEHOLDER)} placeholders")
        return None

    def _salt(self, body: dict[str, Any]) -> str:
        """What the images of a request do to its tokens."""
        if self.images is None:
            return ""
        names = [part["uuid"] for part in body.get("content_parts") or ()]
        seen = zip(names, body.get("seen", ()), strict=True)
        return salt_of([self.images.look(name, data, self.weights) for name, data in seen])

    def _run_of(self, body: dict[str, Any], token_route: bool, header: str | None) -> FakeVllmRun:
        """Unknown parameters are ignored without a word, and what is too long is cut."""
        prompt = body["token_ids" if token_route else "prompt"]
        if token_route and self.images is not None:
            prompt = self.images.expanded(prompt)
        params = {"min_tokens": 0, "temperature": 1.0, "max_tokens": 16}
        params |= body["sampling_params"] | {"return_token_ids": body.get("return_token_ids")} if token_route else body
        if self.release < 33:
            params.pop("return_weight_versions", None)
        params["max_tokens"] = min(params["max_tokens"], self.context - len(prompt))
        name = header or body.get("request_id") or f"unnamed{len(self.runs)}"
        engine_id = f"generate-tokens-{name}" if token_route else f"cmpl-{name}-0"
        run = self.RUN(
            engine_id, list(prompt), params, bool(body.get("stream")), token_route=token_route,
            usage_asked=bool((body.get("stream_options") or {}).get("include_usage")), logprobs_mode=self.logprobs,
            says_cached=self.says_cached, cache_salt=body.get("cache_salt") or "", under=self.weights,
        )  # fmt: skip
        if self.loras is not None:
            run.salt = self.loras.present.get(body.get("model", ""), "")
        run.salt += self._salt(body)
        run.model = body.get("model", self.model)
        run.fault = self._plan()
        return run

    def _rows(self, run: FakeVllmRun, experts: Experts) -> str | None:
        """The experts of all tokens but the last, as a file of numpy's in base64."""
        rows = self.rows_said(run, experts.rows(run.prompt + run.ids, run.made_under))
        if rows is None or isinstance(rows, str):
            return rows
        file = io.BytesIO()
        np.save(file, rows.astype(np.uint8 if experts.count <= 256 else np.uint16))
        return base64.b64encode(file.getvalue()).decode()

    def _failure(self, run: FakeVllmRun) -> web.Response | None:
        return error(500, "EngineCore encountered an issue.", close=True) if run.failed else None

    def _usage(self, run: FakeVllmRun) -> list[str]:
        if not run.usage_asked:
            return []
        prompt = len(run.prompt) - bool(run.hit(RequestFault.OTHER_PROMPT))
        made = len(run.ids) + bool(run.hit(RequestFault.WRONG_COUNT))
        return [json.dumps({"choices": [], "usage": run.usage(prompt, made)})]

    def _said(self, run: FakeVllmRun) -> str:
        if run.failed:
            return str(error(500, "EngineCore encountered an issue.").text)
        parts = run.parts(run.sent)
        due = run.fault is not None and len(run.ids) >= run.fault.after_tokens
        if run.hit(RequestFault.REPEATED_LAST):
            if run.finish == "abort" and run.ids:
                parts.repeat(run.ids[-1], run.logprobs[-1])
        elif run.fault is not None and due and parts.ids:
            parts.spoil(run.fault.kind, self.vocab_size, clamped=-9999.0, whole=not run.stream)
        elif run.hit(RequestFault.NO_FINISH):
            parts.finish = None
        said = run.answer(parts, self.model, spans=self.developer)
        if run.finish is not None:
            said["choices"][0]["routed_experts"] = self.routed_experts
        if self.experts is not None and run.finish is not None and run.token_route and run.ids:
            said["choices"][0]["routed_experts"] = self._rows(run, self.experts)
        text = json.dumps(self._shaped(run, said))
        return text[: len(text) // 2].rstrip("}") if due and run.hit(RequestFault.TRUNCATED) else text

    async def _early(self, request: web.Request) -> web.StreamResponse | None:
        guarded = self._key is not None and request.path.startswith(GUARDED)
        if guarded and request.headers.get("Authorization") != f"Bearer {self._key}":
            return web.json_response({"error": f"Unauthorized: {request.headers.get('Authorization')}"}, status=401)
        if request.path in self.without:
            return web.Response(status=404)
        return None

    # ---------------------------------------------------------------- control

    async def _abort(self, request: web.Request) -> web.Response:
        """The reply says "aborted" whatever the ids are."""
        body = await request.json()
        ids = body.get("request_ids")
        self.aborts.append((request.path, body))
        for run in [r for r in self._live if not ids or r.name in ids]:
            self._abort_run(run)
        return web.json_response({"status": "aborted", "aborted": len(ids or ())})

    async def _pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            return error(400, "mode must be abort, wait or keep", param="query.mode")
        self.pauses.append(mode)
        if mode == "abort":
            for run in list(self._live):
                self._abort_run(run)
        while mode == "wait" and self._live:
            await self._wait()
        self.pause_mode, self._emptied = mode, request.query.get("clear_cache", "true") == "true"
        if self._emptied and self.images is not None:
            self.images.forget()
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        begun = [run.name for run in self._live if run.cache_salt and not run.ids and run.under != self.weights]
        if begun and self.stale_cache:
            self.violations.append(f"{begun} begin over keys and values of older weights")
        self.pause_mode = None
        self._changed.set()
        return web.json_response({"status": "resumed"})

    async def _is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.pause_mode is not None})

    def _old_keys(self) -> None:
        """The weights change: what is in the caches is of older ones, unless the pause that is on has emptied them."""
        self._stale_salts |= self._salts
        self.stale_cache, self.stale_encoder = not self._emptied, True

    async def _rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        name = PurePath((body.get("kwargs") or {}).get("weights_path", "missing")).name
        if body.get("method") != "reload_weights" or name.startswith("missing"):
            return error(500, f"reload_weights failed: {name} is not there", close=True)
        self.weights = name
        self._old_keys()
        if self.remembers:
            self.violations.append("layers that remember a broken transfer were loaded from a directory")
        return web.json_response({"results": [None]})

    async def _reset_encoder(self, request: web.Request) -> web.Response:
        self.stale_encoder = False
        if self.images is not None:
            self.images.features.clear()
        return web.Response()

    async def _world_size(self, request: web.Request) -> web.Response:
        copies = self.copies if request.query.get("include_dp", "true") == "true" else 1
        return web.json_response({"world_size": self.world_size * copies // self.copies})

    async def _transfer(self, request: web.Request) -> web.Response:
        """The four calls; out of order they are errors, and layers remember what came of a transfer that broke off."""
        body = json.loads(await request.read() or b"null")
        self.transfer_calls.append((request.path, body))
        if self.transfers is None:
            return error(500, "Weight transfer not configured. Please set weight_transfer_config.")
        step = list(TRANSFER).index(request.path)
        self.joined = self.joined or step == 0
        if step == 1:
            if self.active:
                return error(500, "start_weight_update called while a weight update is already active.")
            self.active = True
        elif step == 2:
            if not self.active or not self.joined:
                return error(500, "start_weight_update must be called before update_weights, in a group.")
            if self.remembers and not self.received:
                self.violations.append("a transfer goes into layers that remember another one")
            self.remembers = True
            self.received += body["update_info"]["names"]
            self.weights = "half"
            self._old_keys()
        elif step == 3:
            if not self.active:
                return error(500, "finish_weight_update called without a matching start_weight_update.")
            if self.received:
                self.weights = self.coming
            self.active, self.remembers, self.received = False, False, []
        return web.json_response({"message": TRANSFER[request.path]})

    async def _reset(self, request: web.Request) -> web.Response:
        if self.resets_refused:
            self.resets_refused -= 1
            return web.json_response({"success": False})
        self.stale_cache, self._stale_salts = False, set()
        return web.json_response({"success": True})

    def _forget(self, weights: str) -> None:
        super()._forget(weights)
        self.stale_encoder = False
        self.joined, self.active, self.remembers, self.received = False, False, False, []

    async def _load_adapter(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert self.loras is not None
        if not body.get("lora_name") or not body.get("lora_path"):
            return error(400, "Both 'lora_name' and 'lora_path' must be provided.")
        name = body["lora_name"]
        if name in self.loras.ever:
            self.violations.append(f"the name {name} is given to a second adapter, and the cache goes by names")
        if name in self.loras.present:
            return error(400, f"The lora adapter '{name}' has already been loaded.")
        if self.pause_mode is not None:
            self.violations.append("an adapter is loaded into a paused server")
        if wrong := self.loras.load(name, body["lora_path"]):
            return error(404 if wrong.startswith("No adapter") else 500, f"Call to add_lora method failed: {wrong}")
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        assert self.loras is not None
        if not self.loras.unload(name):
            return error(404, f"The lora adapter '{name}' cannot be found.")
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

    async def _relabel(self, request: web.Request) -> web.Response:
        self.label = str((await request.json())["new_version"])
        return web.json_response({"success": True, "new_version": self.label})

    async def _server_info(self, request: web.Request) -> web.Response:
        model = {"logprobs_mode": f"{self.logprobs}_logprobs", "skip_tokenizer_init": self.decode is None}
        gives = {"enable_return_routed_experts": self.experts is not None}
        return web.json_response({"vllm_config": {
            "model_config": model | (gives if self.release < 33 else {}),
            "aux_output_config": gives if self.release >= 33 else None,
            "scheduler_config": {
                "policy": "fcfs", "max_num_seqs": self.max_running, "enable_chunked_prefill": self.chunked_prefill,
            },
            "parallel_config": {"data_parallel_size": self.copies, "_api_process_count": self.processes},
            "lora_config": self.loras and {"max_lora_rank": self.loras.max_rank, "max_loras": self.loras.slots},
            "device_config": {"device": self.device}, "speculative_config": self.speculation,
            "kv_transfer_config": self.kv_connector, **self.shown,
            "weight_transfer_config": None if self.transfers is None else {"backend": self.transfers},
        }})  # fmt: skip

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": self.model, "owned_by": "vllm", "root": self.root, "parent": None, "max_model_len": self.context}
        adapters = [card | {"id": a, "root": f"adapters/{a}", "parent": self.model} for a in self.loaded]
        return web.json_response({"object": "list", "data": [card, *adapters]})

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": f"0.{self.release}.0"})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, request: web.Request) -> web.Response:
        """Metrics that are collected over several processes know no start."""
        running, asked = len(self.running), 3.0 * len(self.runs) if self.kv_connector else 0.0
        lines = [
            f'vllm:num_requests_running{{engine="0"}} {running}.0',
            f'vllm:num_requests_waiting{{engine="0"}} {len(self._queue)}.0',
            f'vllm:kv_cache_usage_perc{{engine="0"}} {running / self.max_running}',
            'vllm:num_preemptions_total{engine="0"} 3.0',
            f'vllm:external_prefix_cache_queries_total{{engine="0"}} {asked}',
        ]
        if self.processes == 1:
            lines.append(f"process_start_time_seconds {self.starts}.0")
        return web.Response(text="\n".join(lines) + "\n")
