"""A fake SGLang server, and a fake sglang-router, on real loopback sockets: quirks of the protocol, faults on purpose.

There is no model and no clock: generation goes one token per so many turns of the event loop, or by ``step`` alone.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import PurePath
from typing import Any

import numpy as np
from aiohttp import web

from tests.real_engines.recording_proxy import RecordingProxy

from .base import AT_ONCE, FakeRequest, FakeServer, RequestFault, at_once, events
from .images import PLACEHOLDER, salt_of

KEPT_CACHE = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. Retract or "
    "finish them, then call /flush_cache."
)
FORCED_INTERVAL = 50
"""Tokens after which the scheduler hands over what a plain request has."""


@dataclass(slots=True, eq=False)
class FakeSglangRun(FakeRequest):
    MIN_TOKENS, MAX_TOKENS = "min_new_tokens", "max_new_tokens"

    queue_abort: bool = False
    """It was aborted in the queue: its last answer is put together in another way."""
    says_prompt: bool = False
    """Every event has the ids of its prompt."""
    abort_seen: bool = False
    """The server passes one abort per request on and no more."""
    rows_from: int | None = None
    """The first row of experts that is wanted; None: they are not asked for."""

    @property
    def interval(self) -> int:
        return int(self.params.get("stream_interval") or 1) if self.stream else FORCED_INTERVAL

    @property
    def due(self) -> bool:
        """Whether the scheduler hands over what it has."""
        if self.finish is not None:
            return True
        fresh = len(self.ids) - self.flushed
        if not self.stream:
            return fresh > 0 and len(self.ids) % FORCED_INTERVAL == 0
        return fresh >= self.interval or (self.flushed == 0 and fresh > 0)

    def as_said(self, logprob: float) -> float:
        """The log-probability as a server says it, which scales by the temperature before the softmax."""
        return logprob if self.params["temperature"] in (0.0, 1.0) else float(np.float32(logprob * 0.8))

    def stopped(self) -> dict[str, Any]:
        return {"type": "stop", "matched": self.ids[-1] if self.matched is None else self.matched}

    def used_up(self) -> dict[str, Any]:
        return {"type": "length", "length": len(self.ids)}

    def aborted(self) -> dict[str, Any]:
        return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def answer(
    run: FakeSglangRun, *, label: str, incremental: bool, spans: bool, fault: RequestFault | None = None,
    vocab_size: int = 512,
) -> dict[str, Any]:  # fmt: skip
    """The next event of a stream, or the answer at the end: what has left the scheduler and not the server."""
    said = run.parts(run.sent if run.stream and incremental else 0, label)
    queued = run.finish is not None and run.queue_abort
    if queued and run.stream and incremental and run.flushed:
        # the tokenizer answers: the last token once more, and all log-probabilities
        said.named, said.logprobs = said.named + run.ids[: run.flushed], said.logprobs + run.logprobs[: run.flushed]
        said.ids.append(run.ids[run.flushed - 1])
    if fault is not None and said.ids:
        said.spoil(fault, vocab_size, clamped=-3.4028234663852886e38, whole=not run.stream)
    meta: dict[str, Any] = {
        "id": said.name,
        "finish_reason": said.finish,
        "weight_version": said.label,
        "output_token_logprobs": [[p, i, None] for p, i in zip(said.logprobs, said.named, strict=True)],
        "output_token_logprobs_length": run.flushed,
        "completion_tokens": said.total,
    }
    if not queued:
        meta |= {"prompt_tokens": said.prompt, "cached_tokens": run.cached, "num_retractions": 0, "dp_rank": None}
    if run.finish is not None and spans and run.flushed:
        meta["weight_versions"] = [{"version": name, "start": a, "end": b} for name, a, b in said.spans]
    prompt = {"prompt_token_ids": run.prompt} if run.says_prompt else {}
    return {"text": "", "output_ids": said.ids, "meta_info": meta, **prompt}


KNOWN_PARAMS = frozenset({
    "max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "ignore_eos", "stop_token_ids", "stop", "sampling_seed", "logit_bias",
    "json_schema", "regex", "stream_interval",
})  # fmt: skip


class FakeSglangServer(FakeServer[FakeSglangRun]):
    """Speaks as SGLang does.

    Args:
        incremental: events of a stream have the new tokens only (``--incremental-streaming-output``).
        spans: answers say which weights made which token (0.5.20 and later).
        labels: it knows ``/update_weight_version``.
        logprobs: "temperature", or "raw" (SGLANG_RETURN_ORIGINAL_LOGPROB).
        transfers: it takes weights in a session of begin and end (0.5.23 and later).
        names_images: a request can name them (``mm_hashes``).
        common: of :class:`FakeServer`; an update takes the last part of its path for the name of the weights.
    """

    known_params = KNOWN_PARAMS

    def __init__(
        self, *, incremental: bool = True, spans: bool = True, labels: bool = True,
        logprobs: str = "temperature", transfers: bool = True, names_images: bool = True, **common: Any,
    ) -> None:  # fmt: skip
        super().__init__(**common)
        self.incremental, self.spans, self.labels = incremental, spans, labels
        self.logprobs, self.names_images = logprobs, names_images
        self.aborts: list[dict[str, Any]] = []
        """Bodies of the calls of ``/abort_request``."""
        self.updates: list[dict[str, Any]] = []
        """Bodies of the weight updates that worked."""
        self.relabels = True
        """A weight update sets the label that it names; older servers do not."""
        self.model_path = self.tokenizer_path = "fake/model"
        """Directories of the model and of its tokenizer; the first moves with a weight update of a real server."""
        self.memory, self.page_size = 65536, 1
        """Tokens of its key-value memory, and of one page of it."""
        self.speculation: str | None = None
        """Its ``speculative_algorithm``."""
        self._answering: set[FakeSglangRun] = set()
        """Requests that were let in, until they are answered; a pause that aborts waits for them."""
        self.transfers = transfers
        self.device, self.sizes = "cpu", {"tp_size": 1, "dp_size": 1, "pp_size": 1}
        """Where its weights are, and over how many processes, copies and stages."""
        self.groups: dict[str, dict[str, Any]] = {}
        """Bodies of the calls by which it has joined groups, by name."""
        self.session = False
        """It is in the middle of a transfer."""
        self.buckets: list[dict[str, Any]] = []
        """Bodies of the calls by which it has taken them."""
        self.kept_caches = 0
        """So many updates load the weights, keep the cache and the label, and say so."""

    def _forget(self, weights: str) -> None:
        super()._forget(weights)
        self.groups, self.session = {}, False

    def _routes(self) -> list[web.RouteDef]:
        routes = [
            web.post("/generate", self._generate), web.post("/abort_request", self._abort),
            web.post("/pause_generation", self._pause), web.post("/continue_generation", self._continue),
            web.post("/update_weights_from_disk", self._update), web.route("*", "/flush_cache", self._flush),
            web.get("/model_info", self._model_info), web.get("/server_info", self._server_info),
            web.get("/v1/models", self._models), web.get("/ready", self._ready),
            web.get("/openapi.json", self._openapi), web.get("/v1/loads", self._v1_loads),
        ]  # fmt: skip
        if self.transfers:
            routes += [
                web.post("/init_weights_update_group", self._join), web.post("/begin_weight_update", self._begin),
                web.post("/update_weights_from_distributed", self._receive),
                web.post("/end_weight_update", self._end_transfer),
                web.post("/destroy_weights_update_group", self._part),
            ]  # fmt: skip
        if self.loras is not None:
            routes += [
                web.post("/load_lora_adapter", self._load_adapter),
                web.post("/unload_lora_adapter", self._unload_adapter),
            ]  # fmt: skip
        if self.labels:
            routes.append(web.post("/update_weight_version", self._relabel))
        return routes

    # ---------------------------------------------------------------- generation

    def _fails_by(self, run: FakeSglangRun, kind: RequestFault) -> bool:
        match kind:
            case RequestFault.TIMED_OUT:
                self._end(run, run.aborted() | {"message": "Request timed out", "status_code": 503})
            case RequestFault.NAN_STOP:
                self._make_token(run)
                run.ids[-1] = self.eos
                self._end(run, {"type": "stop", "matched": "NaN happened"})
            case RequestFault.RETRACTED:
                run.running, run.frozen = False, True
            case _:
                return False
        return True

    def _abort_run(self, run: FakeSglangRun) -> None:
        """What the scheduler makes of an abort."""
        if run.hit(RequestFault.ABORT_NEVER_ENDS):
            run.frozen = True
            return
        if run.running and self.pause_mode == "in_place":
            run.finish = run.aborted()
            return  # nothing moves before it is continued
        if run.running:
            if not run.frozen and self.pause_mode is None:
                self._make_token(run)
            if run.hit(RequestFault.LOST_PARTIAL):
                run.lose_unsent()
            self._end(run, run.finish or run.aborted())
            return
        run.queue_abort = True
        run.finish = {"type": "abort", "message": "Abort in waiting queue"}
        self._leave(run)

    def _abort_matching(self, rid: str) -> None:
        for run in self._scheduled():
            if run.name.startswith(rid):
                self._abort_run(run)

    def _scheduled(self) -> list[FakeSglangRun]:
        """Requests that the scheduler has; those that came while the server was paused wait before it."""
        return [run for run in self._live if run.running or run.started or run in self._queue]

    # ---------------------------------------------------------------- /generate

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        refused = self._refusal(body)
        if refused is not None:
            if body.get("stream") and "error" in refused and isinstance(refused["error"], dict):
                return await events(request, json.dumps({"error": refused["error"] | {"code": 400}}), "[DONE]")
            return web.json_response(refused, status=400)
        params = {"min_new_tokens": 0, "temperature": 1.0, "max_new_tokens": 128} | body["sampling_params"]
        if self.logprobs == "raw":
            params["temperature"] = 1.0
        if body.get("lora_path") is not None:
            params["lora_path"] = body["lora_path"]
        prompt = list(body["input_ids"]) if self.images is None else self.images.expanded(body["input_ids"])
        run = FakeSglangRun(body["rid"], prompt, params, bool(body.get("stream")))
        run.says_prompt, run.cache_salt = bool(body.get("return_prompt_token_ids")), body.get("extra_key") or ""
        if self.loras is not None:
            run.salt = self.loras.present.get(body.get("lora_path", ""), "")
        if body.get("return_routed_experts"):
            run.rows_from = body.get("routed_experts_start_len", 0)
        run.salt += self._seen(body)
        run.fault = self._plan()
        self._came(run, request.headers)
        if kind := run.hit(*AT_ONCE):
            return at_once(kind)
        if any(not 0 <= i < self.vocab_size for i in run.prompt):
            self.violations.append(f"{run.name} has an id outside the vocabulary, which kills the server")
            self.die()
        if self.stale_cache:
            self.violations.append(f"{run.name} is served with keys and values of older weights")
        self._live.append(run)
        try:
            while self.pause_mode is not None and run.finish is None and not run.dead:
                await self._wait()
            self._answering.add(run)
            if run.params["max_new_tokens"] == 0:
                self._end(run, {"type": "length", "length": 0})
            elif not run.dead:
                self._queue.append(run)
                self._changed.set()
            return await (self._stream(request, run) if run.stream else self._plain(request, run))
        finally:
            self._answering.discard(run)
            if run.finish is None:
                self._leave(run)

    def _seen(self, body: dict[str, Any]) -> str:
        """What the images of a request do to its tokens: what the vision tower makes of a name is kept for ever."""
        urls, names = body.get("image_data") or [], body.get("mm_hashes")
        if self.images is None:
            if urls:
                self.violations.append("images come to a model that takes none")
            return ""
        if len(urls) != body["input_ids"].count(PLACEHOLDER):
            self.violations.append(f"{len(urls)} images for other placeholders: such a request is never answered")
        datas = [self.images.came(url) for url in urls]
        names = names or [hashlib.sha256(data).hexdigest() for data in datas]
        return salt_of([self.images.look(n, d, self.weights) for n, d in zip(names, datas, strict=True)])

    def _refusal(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """In the server's three shapes."""
        params, ids = body.get("sampling_params", {}), body.get("input_ids")
        if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
            return {"object": "error", "message": "input_ids must be integers", "code": 400}
        if unknown := sorted(set(params) - self.known_params):
            return {"error": f"Unexpected keyword argument '{unknown[0]}'"}
        biased = [key for key in params.get("logit_bias", {}) if not 0 <= int(key) < self.vocab_size]
        if biased:
            keys = f"logit_bias must has keys in [0, {self.vocab_size - 1}], got {biased[0]}."
            return {"error": {"message": keys}}
        if body.get("lora_path") not in (None, *self.loaded):
            missing = f"Got LoRA adapter that has never been loaded: {body['lora_path']}"
            return {"error": {"message": f"{missing}\nAll loaded adapters: {self.loaded}."}}
        if self._named(body.get("rid")) is not None:
            return {"error": {"message": f"Duplicate request ID detected: {body['rid']}"}}
        if body.get("return_routed_experts") and not 0 <= body.get("routed_experts_start_len", 0) <= len(ids):
            return {"error": {"message": "routed_experts_start_len is higher than the number of input tokens"}}
        if len(ids) >= self.context - 6 or len(ids) + params.get("max_new_tokens", 128) > self.context:
            return {"error": {"message": f"{len(ids)} tokens and max_new_tokens exceed the context {self.context}"}}
        if params.get("min_new_tokens", 0) > params.get("max_new_tokens", 128) or params.get("max_new_tokens", 0) < 0:
            return {"error": {"message": "min_new_tokens must be in [0, max_new_tokens]"}}
        return None

    def _failure(self, run: FakeSglangRun) -> web.Response | None:
        status = run.finish.get("status_code")
        return web.json_response({"detail": run.finish["message"]}, status=status) if status else None

    def _said(self, run: FakeSglangRun) -> str:
        due = run.fault is not None and run.flushed >= run.fault.after_tokens
        aborted = run.finish is not None and run.finish["type"] == "abort"
        kind = run.fault.kind if run.fault is not None and due else None
        if kind in (RequestFault.REPEATED_LAST, RequestFault.UNCOUNTED_LAST) and not aborted:
            kind = None
        said = answer(
            run, label=self.label, incremental=self.incremental, spans=self.spans, fault=kind,
            vocab_size=self.vocab_size,
        )  # fmt: skip
        if self.experts is not None and run.rows_from is not None and said["meta_info"]["finish_reason"] is not None:
            rows = self.experts.rows(run.prompt + run.ids, run.made_under) if run.started and run.ids else None
            rows = None if rows is None or run.queue_abort else self.rows_said(run, rows[run.rows_from :])
            if rows is not None:
                raw = rows if isinstance(rows, str) else base64.b64encode(np.asarray(rows, "<i4").tobytes()).decode()
                said["meta_info"]["routed_experts"] = raw
        text = json.dumps(said)
        if due and run.hit(RequestFault.TRUNCATED):
            return text[: len(text) // 2].rstrip("}")
        return text

    def _named(self, rid: str | None) -> FakeSglangRun | None:
        return next((run for run in self._live if run.name == rid), None)

    # ---------------------------------------------------------------- control

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.aborts.append(body)
        if body.get("abort_all"):
            self._abort_matching("")
            return web.Response()
        run = self._named(body.get("rid"))
        if run is None or run.abort_seen:
            return web.Response()
        if run.hit(RequestFault.ABORT_UNSEEN):
            run.fault = None
            return web.Response()
        run.abort_seen = True
        self._abort_matching(run.name)
        return web.Response()

    async def _pause(self, request: web.Request) -> web.Response:
        mode = (await request.json()).get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            said = f"Input should be 'abort', 'retract' or 'in_place', got {mode!r}"
            return web.json_response({"object": "error", "message": said}, status=400)
        if mode == "abort":
            self._abort_matching("")
        self.pause_mode = mode
        while mode == "abort" and self._answering:
            self._abort_matching("")
            await asyncio.sleep(0)
        if mode == "retract":
            for run in self.running:
                run.running = False
                self._queue.appendleft(run)
        return web.json_response({"status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        if not await request.read():
            return web.json_response({"object": "error", "message": "a body is required"}, status=400)
        self.pause_mode = None
        for run in list(self._live):
            if run.running and run.finish is not None:
                self._end(run, run.finish)
        self._changed.set()
        return web.json_response({"status": "ok"})

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body.get("abort_all_requests"):
            self._abort_matching("")
        if self.pause_mode is None:
            while self._live:
                await self._wait()
        name = PurePath(body["model_path"]).name
        if name.startswith("missing"):
            return _said_of(False, f"Failed to get weights iterator: {body['model_path']} is not there")
        self.weights, self.stale_cache = name, True
        if self.kept_caches:
            self.kept_caches -= 1
            return _said_of(False, KEPT_CACHE)
        if self.relabels:
            self.label = str(body.get("weight_version") or self.label)
        self.updates.append(body)
        if body.get("flush_cache", True):
            if self.pause_mode == "in_place" and self._live:
                return _said_of(False, "Flush cache failed after updating weights")
            self.stale_cache = False
        paused = len(self._live)
        return web.json_response({"success": True, "message": "Succeeded.", "num_paused_requests": paused})

    # ---------------------------------------------------------------- weights over a group

    async def _join(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.groups[body["group_name"]] = body
        return _said_of(True, "Succeeded to initialize custom process group.")

    async def _part(self, request: web.Request) -> web.Response:
        known = self.groups.pop((await request.json())["group_name"], None) is not None
        return _said_of(known, "Succeeded." if known else "The group to be destroyed does not exist.")

    async def _begin(self, request: web.Request) -> web.Response:
        if self.session:
            return _said_of(False, "a weight-update session is already open; call end_weight_update() first")
        self.session = True
        return _said_of(True, "Success")

    async def _receive(self, request: web.Request) -> web.Response:
        body = await request.json()
        if not self.session or body["group_name"] not in self.groups:
            return _said_of(False, f"Failed to receive weights: Group {body['group_name']}, session {self.session}")
        if self.pause_mode is None:
            self.violations.append("it takes a bucket while requests of others may run")
        self.buckets.append(body)
        self.weights, self.stale_cache = self.coming if body["flush_cache"] else f"part of {self.coming}", True
        if self.relabels:
            self.label = str(body.get("weight_version") or self.label)
        if body["flush_cache"]:
            if self._scheduled() and self.pause_mode != "retract":
                return _said_of(False, KEPT_CACHE)
            self.stale_cache = False
        return _said_of(True, "Succeeded to update parameter online.")

    async def _end_transfer(self, request: web.Request) -> web.Response:
        if not self.session:
            return _said_of(False, "no weight-update session is open; call begin_weight_update() first")
        self.session = False
        return _said_of(True, "Success")

    async def _load_adapter(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert self.loras is not None
        if body["lora_name"] in self.loras.ever:
            self.violations.append(f"the name {body['lora_name']} is given to a second adapter")
        return self._told(self.loras.load(body["lora_name"], body["lora_path"]))

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        """It waits for the requests of the adapter."""
        assert self.loras is not None
        name = (await request.json())["lora_name"]
        while any(run.params.get("lora_path") == name for run in self._live):
            await self._wait()
        return self._told("" if self.loras.unload(name) else f"LoRA adapter {name} is not loaded")

    def _told(self, wrong: str) -> web.Response:
        assert self.loras is not None
        said = {"success": not wrong, "error_message": wrong, "loaded_adapters": self.loras.present}
        return web.json_response(said, status=400 if wrong else 200)

    async def _relabel(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body.get("abort_all_requests", True):
            self._abort_matching("")
        self.label = body["new_version"]
        return web.json_response({"success": True, "new_version": self.label})

    async def _flush(self, request: web.Request) -> web.Response:
        if self._scheduled() and self.pause_mode != "retract":
            return web.Response(status=400, text="Flush cache failed: requests are running or waiting")
        self.stale_cache = False
        return web.Response(text="Cache flushed.")

    async def _model_info(self, request: web.Request) -> web.Response:
        said = {
            "model_path": self.model_path, "tokenizer_path": self.tokenizer_path, "is_generation": True,
            "has_image_understanding": self.images is not None,
        }  # fmt: skip
        return web.json_response({**said, "weight_version": self.label})

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response({
            "version": "0.5.23", "context_length": self.context, "page_size": self.page_size,
            "device": self.device, **self.sizes,
            "max_req_input_len": min(self.context, self.memory) - 6,
            "max_running_requests": self.max_running, "max_total_num_tokens": self.memory,
            "incremental_streaming_output": self.incremental, "enable_deterministic_inference": False,
            "enable_return_routed_experts": self.experts is not None, "startup_time": {"total": self.starts},
             "speculative_algorithm": self.speculation, "skip_tokenizer_init": self.decode is None,
            **({} if self.loras is None else {
                "enable_lora": True, "max_lora_rank": self.loras.max_rank, "max_loras_per_batch": self.loras.slots,
            }),
        })  # fmt: skip

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": "fake/model", "owned_by": "sglang", "root": "fake/model", "parent": None}
        adapters = [card | {"id": a, "root": f"adapters/{a}", "parent": "fake/model"} for a in self.loaded]
        return web.json_response({"data": [card | {"max_model_len": self.context}, *adapters]})

    async def _openapi(self, request: web.Request) -> web.Response:
        return web.json_response({"paths": {}, "mm_hashes": {}} if self.names_images else {"paths": {}})

    async def _ready(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.pause_mode is None else 503)

    async def _v1_loads(self, request: web.Request) -> web.Response:
        used = sum(len(run.prompt) + len(run.ids) for run in self.running)
        running = len(self.running)
        load = {"num_running_reqs": running, "num_waiting_reqs": len(self._queue), "token_usage": used / 65536}
        return web.json_response({"loads": [load]})


def _said_of(success: bool, message: str) -> web.Response:
    return web.json_response({"success": success, "message": message}, status=200 if success else 400)


class FakeSglangRouter(RecordingProxy):
    """Passes ``/generate`` on as it comes; a worker that cannot be reached is left out, and the next one asked.

    Args:
        workers: addresses of fake servers.
        late: how many times ``/workers`` is answered with none, as a router does that has just started.
        key: header by whose value the worker is chosen; requests without it take turns.
    """

    def __init__(self, workers: Sequence[str], *, late: int = 0, key: str = "") -> None:
        super().__init__(workers[0])
        self.workers, self.late, self.key = list(workers), late, key
        self.ready = True
        self._turn = count()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/readiness":
            return web.Response(status=200 if self.ready else 503)
        if request.path == "/workers":
            workers = [{"url": url, "is_healthy": True, "worker_type": "regular", "load": 0} for url in self.workers]
            if self.late:
                self.late, workers = self.late - 1, []
            return web.json_response({"workers": workers, "total": len(workers)})
        return await super()._pass_on(request)

    def _servers(self, request: web.Request) -> list[str]:
        key = request.headers.get(self.key)
        first = next(self._turn) if key is None else int(hashlib.sha256(key.encode()).hexdigest(), 16)
        first %= len(self.workers)
        return self.workers[first:] + self.workers[:first]
