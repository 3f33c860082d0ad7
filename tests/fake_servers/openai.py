"""A server with the OpenAI completions route on loopback, in the ways of vLLM and TensorRT-LLM, with faults on demand.

A token is a hash of the weights and of everything before it, so that a greedy response which is cut and continued
equals the uncut one; its log-probability is a function of token and weights, so that one under a wrong version shows.
Nothing waits for wall time: streams go as fast as they are read, or up to a gate.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web

from april.core.sampling import LogprobKind
from april.engines.openai.wire import ROUTE, TokenShape

from .base import ControlFault, PlannedFault, RequestFault, wrong_answer

MODEL = "fake"
KEEP_ALIVE_S = 0.01
"""Between two signs of life without tokens."""
_TENSORRT_KEYS = frozenset(
    {
        "model", "prompt", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed",
        "stream", "stream_options", "logprobs", "logit_bias", "repetition_penalty", "presence_penalty",
        "frequency_penalty", "stop_token_ids", "detokenize", "include_stop_str_in_output",
    }
)  # fmt: skip
"""It refuses all others; those of them that april has use for."""


@dataclass(slots=True, kw_only=True)
class CompletionRecord:
    """One request, as the server saw it."""

    body: dict[str, Any]
    made: list[int] = field(default_factory=list)
    """Tokens that it generated, [made]; those that it made ahead of the stream are among them."""
    sent: int = 0
    """Tokens that it wrote to the connection."""
    end: str = ""
    """stop, length, closed (by the client), or the fault."""
    weights: int = 0


class FakeOpenAIServer:
    """Args:
    shape: how token ids come; None: not at all.
    kind: of which distribution the log-probabilities are.
    eos: id that ends a response; one token in ``mean_len`` is it.
    max_context: prompt plus response; told in the list of models only by the way of vLLM.
    tokens_ahead: how many tokens it has made and not sent, at any time.
    strips: ids that it keeps back when they end a response.
    honours_seeds: the same seed gives the same tokens.
    faults: what goes wrong.
    """

    def __init__(
        self,
        shape: TokenShape | None = TokenShape.RETURN_TOKEN_IDS,
        *,
        kind: LogprobKind = LogprobKind.RAW,
        vocab_size: int = 512,
        eos: int = 2,
        mean_len: int = 40,
        max_context: int = 4096,
        tokens_ahead: int = 0,
        strips: frozenset[int] = frozenset(),
        honours_seeds: bool = True,
        metrics: bool = True,
        faults: tuple[PlannedFault, ...] = (),
    ) -> None:
        self.shape, self.kind, self.vocab_size, self.eos = shape, kind, vocab_size, eos
        self.mean_len, self.max_context, self.tokens_ahead = mean_len, max_context, tokens_ahead
        self.strips, self.honours_seeds, self.metrics = strips, honours_seeds, metrics
        self.faults = list(faults)
        self.metrics_fault: ControlFault | None = None
        """What the metrics page answers in place of itself."""
        self.weights = 0
        """Which weights generate; change it between requests."""
        self.records: list[CompletionRecord] = []
        self.adapters: list[str] = []
        """Names of the adapters (LoRA) that it lists besides its model."""
        self.owner: str | None = None
        """``owned_by`` of its models."""
        self.open = 0
        """Requests that are being answered."""
        self.well = True
        self.started_s = 1000.0
        """What the metrics page says of the start of the process."""
        self._gate: int | None = None
        self._picks: Callable[[list[int]], bool] = lambda prompt: True
        self._held = 0
        self._changed = asyncio.Event()

    def restart_at_once(self) -> None:
        """Another process behind the same port, with the weights of the start."""
        self.weights = 0
        self.started_s += 60

    @property
    def unread_tokens(self) -> int:
        """Made for requests whose client closed the stream, and never sent."""
        return sum(len(r.made) - r.sent for r in self.records if r.end == "closed")

    def hold(self, after: int, which: Callable[[list[int]], bool] = lambda prompt: True) -> None:
        """Let each stream, of the prompts that ``which`` picks, go on up to ``after`` tokens."""
        self._gate, self._picks = after, which
        self._tell()

    def release(self) -> None:
        """Let all streams go on to their ends."""
        self._gate = None
        self._tell()

    async def until_sent(self, tokens: int, requests: int) -> None:
        """Until that many open requests have had so many tokens."""
        while sum(r.sent >= tokens and not r.end for r in self.records) < requests:
            await self._wait()

    async def until_held(self, requests: int) -> None:
        """Until so many requests stand at the gate."""
        while self._held < requests:
            await self._wait()

    async def until_closed(self) -> None:
        """Until no request is open any more."""
        while self.open:
            await self._wait()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()

    # ---------------------------------------------------------------- tokens

    def token(self, prefix: list[int], seed: int | None = None) -> int:
        """What comes after ``prefix``; ``seed`` None: greedy."""
        text = f"{self.weights}/{seed}".encode() + np.array(prefix, np.int32).tobytes()
        number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
        if number % self.mean_len == 0:
            return self.eos
        token = (number >> 16) % self.vocab_size
        return token if token != self.eos else self.eos + 1

    def logprob(self, token: int, weights: int, body: dict[str, Any]) -> float:
        """Of a token under some weights, with the sampling of a request."""
        if self.kind is LogprobKind.PROCESSED and body.get("top_k") == 1:
            return 0.0
        scale = body.get("temperature", 1.0) if self.kind is LogprobKind.TEMPERATURE else 1.0
        return -((token * 31 + weights * 7) % 97 + 10) / 50 / (scale or 1.0)

    def _generate(self, record: CompletionRecord) -> tuple[str, int]:
        """The finish reason, and how many of ``record.made`` are handed over."""
        body, ids = record.body, list(record.body["prompt"])
        seed = None if body["temperature"] == 0 or body["top_k"] == 1 else body.get("seed")
        if seed is not None and not self.honours_seeds:
            seed = seed + 1_000_003 * len(self.records)
        stops = {self.eos, *body.get("stop_token_ids", ())}
        room = min(body["max_tokens"], self.max_context - len(ids))
        forced = {int(token) for token, bias in (body.get("logit_bias") or {}).items() if bias > 50}
        while len(record.made) < room:
            token = next(iter(forced)) if forced else self.token(ids, seed)
            if token == self.eos and len(record.made) < body.get("min_tokens", 0):
                token = self.eos + 1
            ids.append(token)
            record.made.append(token)
            if token in stops:
                return "stop", len(record.made) - (token in self.strips)
        return "length", len(record.made)

    # ---------------------------------------------------------------- routes

    def routes(self) -> list[tuple[str, str, Callable[[web.Request], Awaitable[web.StreamResponse]]]]:
        """Method, path and handler of each."""
        return [
            ("POST", ROUTE, self.completions),
            ("GET", "/v1/models", self.models),
            ("GET", "/health", self.health),
            ("GET", "/metrics", self.metrics_page),
        ]

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        body = await request.json()
        number = len(self.records)
        record = CompletionRecord(body=body, weights=self.weights)
        unknown = sorted(set(body) - _TENSORRT_KEYS) if self.shape is TokenShape.DETOKENIZE else []
        if unknown:
            return _error(400, f"Extra inputs are not permitted: {unknown}")
        if len(body["prompt"]) >= self.max_context or max(body["prompt"]) >= self.vocab_size:
            return _error(400, "the prompt is too long, or has ids outside the vocabulary")
        self.records.append(record)
        if self._hits(RequestFault.REDIRECT, number):
            return web.Response(status=307, headers={"Location": "/elsewhere"})
        if self._hits(RequestFault.LIMITED, number):
            return web.Response(status=429, headers={"Retry-After": "3"}, text="too many requests")
        if self._hits(RequestFault.FAILS, number):
            return _error(500, "the engine has failed")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        self.open += 1
        try:
            await response.prepare(request)
            record.end = await self._stream(Connection(request, response, self._hits, number), record, number)
        except ConnectionError:
            record.end = "closed"
        except asyncio.CancelledError:
            record.end = "closed"
            raise
        finally:
            self.open -= 1
            self._tell()
        return response

    async def _stream(self, out: Connection, record: CompletionRecord, number: int) -> str:
        """Send one response; returns how it ended."""
        finish, count = self._generate(record)
        made, record.made = record.made, []
        while record.sent < count:
            await self._pass_gate(record)
            if self._hits(RequestFault.BREAK_OFF, number, record.sent):
                out.reset()
                return "break_off"
            if self._hits(RequestFault.ENGINE_DIES, number, record.sent):
                await self.break_off(out, "the engine is dead")
                return "engine_dies"
            if self._hits(RequestFault.TRUNCATED, number, record.sent):
                await out.raw(b'data: {"choices":[{"index":0,"token_ids":[4\n\n')
                return "truncated"
            if self._hits(RequestFault.SILENCE, number, record.sent):
                await asyncio.get_running_loop().create_future()
            if self._hits(RequestFault.COMMENTS, number, record.sent):
                while True:
                    await out.raw(b": ping\n\n")
                    await out.event({"choices": [{"index": 0, "token_ids": [], "finish_reason": None}]})
                    await out.event({"choices": [], "usage": {"completion_tokens": record.sent}})
                    await asyncio.sleep(KEEP_ALIVE_S)
            clipped = record.sent and self._hits(RequestFault.EARLY_LENGTH, number, record.sent)
            stopped = record.sent and self._hits(RequestFault.EARLY_STOP, number, record.sent)
            last = record.sent + 1 == count or bool(clipped or stopped)
            record.made = made[: record.sent + 1 + (0 if last else self.tokens_ahead)]
            without = last and self._hits(RequestFault.NO_FINISH, number)
            reason = None if not last or without else "length" if clipped else "stop" if stopped else finish
            event = self.token_event(record, made[record.sent], reason, number)
            await out.event(event)
            if self._hits(RequestFault.DOUBLED_EVENT, number, record.sent):
                await out.event(event)
            if last and self._hits(RequestFault.ENDS_TWICE, number):
                await out.event({"choices": [{"index": 0, "text": "", "token_ids": [], "finish_reason": "length"}]})
            record.sent += 1
            self._tell()
            if clipped or stopped:
                made = made[: record.sent]
                break
        if not count:
            await out.event({"choices": [{"index": 0, "text": "", "finish_reason": finish}]})
        record.made = made
        said = len(record.made) + bool(self._hits(RequestFault.WRONG_COUNT, number))
        if record.body.get("stream_options", {}).get("include_usage"):
            await out.event(self.usage_event(record, said))
        if not self._hits(RequestFault.NO_DONE, number):
            await out.raw(b"data: [DONE]\n\n")
        return finish

    async def break_off(self, out: Connection, message: str) -> None:
        """An error inside of a stream."""
        await out.event({"error": {"message": message, "type": "InternalServerError"}})
        await out.raw(b"data: [DONE]\n\n")

    async def _pass_gate(self, record: CompletionRecord) -> None:
        def closed() -> bool:
            return self._gate is not None and record.sent >= self._gate and self._picks(record.body["prompt"])

        if not closed():
            return
        self._held += 1
        self._tell()
        try:
            while closed():
                await self._wait()
        finally:
            self._held -= 1

    def token_event(self, record: CompletionRecord, token: int, reason: str | None, number: int) -> dict[str, Any]:
        """What is sent of one token; ``reason``: why it is the last one."""
        body = record.body
        choice: dict[str, Any] = {"index": 0, "text": "?", "finish_reason": reason, "stop_reason": None}
        logprobs: list[float | None] = [self.logprob(token, record.weights, body)]
        if self._hits(RequestFault.NAN_LOGPROB, number, record.sent):
            logprobs = [float("nan")]
        if self._hits(RequestFault.CLAMPED_LOGPROB, number, record.sent):
            logprobs = [-9999.0]
        if self._hits(RequestFault.NULL_LOGPROB, number, record.sent):
            logprobs = [None]
        if self._hits(RequestFault.EXTRA_LOGPROBS, number, record.sent):
            logprobs.append(-1.0)
        name = "?"
        if self.shape is TokenShape.RETURN_TOKEN_IDS and body.get("return_token_ids"):
            choice["token_ids"] = [token]
            wrong = self._hits(RequestFault.OTHER_PROMPT, number)
            choice["prompt_token_ids"] = [*body["prompt"][wrong:]] if record.sent == 0 else None
        if self.shape is TokenShape.DETOKENIZE and body.get("detokenize") is False:
            choice["token_ids"] = [token]
        if self.shape is TokenShape.STRINGS and body.get("return_tokens_as_token_ids"):
            name = f"token_id:{token}"
        asked = body.get("logprobs") is not None and not (self.shape is TokenShape.DETOKENIZE and not body["logprobs"])
        if asked:
            choice["logprobs"] = {"token_logprobs": logprobs, "tokens": [name], "text_offset": [0]}
        return {"id": "cmpl-1", "object": "text_completion", "model": MODEL, "choices": [choice]}

    def usage_event(self, record: CompletionRecord, said: int) -> dict[str, Any]:
        """What ends a stream: how many tokens were made."""
        return {"choices": [], "usage": {"completion_tokens": said}}

    def _hits(self, kind: RequestFault, number: int, sent: int | None = None) -> bool:
        for fault in self.faults:
            due = fault.kind is kind and fault.times and fault.request in (None, number)
            if due and (sent is None or sent == fault.after_tokens):
                fault.times -= 1
                return True
        return False

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models."""
        card: dict[str, Any] = {"id": MODEL, "object": "model", "owned_by": self.owner}
        if self.shape is not TokenShape.DETOKENIZE:
            card["max_model_len"] = self.max_context
        adapters = [card | {"id": a, "parent": MODEL} for a in self.adapters]
        return web.json_response({"object": "list", "data": [card, *adapters]})

    async def health(self, request: web.Request) -> web.Response:
        """GET /health."""
        return web.Response(status=200 if self.well else 503)

    async def metrics_page(self, request: web.Request) -> web.Response:
        """GET /metrics."""
        if not self.metrics:
            return web.Response(status=404)
        if self.metrics_fault is not None:
            return await wrong_answer(self.metrics_fault, request)
        return web.Response(
            text=f"# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds {self.started_s}\n"
            f'vllm:num_requests_running{{engine="0"}} {self.open}.0\nvllm:num_requests_waiting{{engine="0"}} 0.0\n'
            'vllm:kv_cache_usage_perc{engine="0"} 0.25\nvllm:num_preemptions_total{engine="0"} 3.0\n'
        )


class Connection:
    """What a handler writes to."""

    def __init__(self, request: web.Request, response: web.StreamResponse, hits: Any, number: int) -> None:
        self._request, self._response = request, response
        self._by_byte = hits(RequestFault.TRICKLE, number)

    async def event(self, value: dict[str, Any]) -> None:
        await self.raw(f"data: {json.dumps(value)}\n\n".encode())

    async def raw(self, data: bytes) -> None:
        for piece in [data[i : i + 1] for i in range(len(data))] if self._by_byte else [data]:
            await self._response.write(piece)
            await asyncio.sleep(0)

    def reset(self) -> None:
        assert self._request.transport is not None
        self._request.transport.abort()


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"object": "error", "message": message, "code": status}, status=status)


@asynccontextmanager
async def serving_openai(server: FakeOpenAIServer) -> AsyncIterator[str]:
    """Serve on a free port of 127.0.0.1; gives the URL. Requests that are open at the end are cut."""
    app = web.Application()
    for method, path, handler in server.routes():
        app.router.add_route(method, path, handler)
    # a handler hears of a client that has gone even while it waits
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


VERSION = "1.3.0rc15"
PAUSED = "AsyncLLM is paused. Call resume_generation() before submitting new requests."
_KEYS = frozenset(
    {
        "detokenize", "frequency_penalty", "ignore_eos", "include_stop_str_in_output", "logit_bias", "logprobs",
        "max_tokens", "min_p", "min_tokens", "model", "n", "presence_penalty", "priority", "prompt",
        "repetition_penalty", "seed", "stop", "stop_token_ids", "stream", "stream_options", "temperature", "top_k",
        "top_p", "truncate_prompt_tokens",
    }
)  # fmt: skip
"""Of a completion, as far as april has use for them; every other is refused."""


class FakeTrtllmServer(FakeOpenAIServer):
    """Args:
    prometheus: it was started with ``return_perf_metrics``, and has a Prometheus page.
    seeds_alone: it honours the seed of a request that runs alone; older ones honour none.
    more: as of :class:`FakeOpenAIServer`.
    """

    def __init__(self, *, prometheus: bool = False, seeds_alone: bool = True, **more: Any) -> None:
        super().__init__(TokenShape.DETOKENIZE, **more)
        self.prometheus, self.seeds_alone = prometheus, seeds_alone
        self.paused = False
        """Somebody has called pause_generation() of its engine."""
        self.resumes_after: int | None = None
        """So many requests are answered so, and then somebody resumes it."""
        self.starting = False
        """The engine is still being loaded."""
        self.asked: Counter[str] = Counter()
        """Requests by route."""
        self.refused: list[str] = []
        """What was wrong with requests that were refused."""

    def routes(self) -> list[tuple[str, str, Callable[[web.Request], Awaitable[web.StreamResponse]]]]:
        """Method, path and handler of each; all are counted."""
        own = [("GET", "/version", self.version), ("GET", "/prometheus/metrics", self.prometheus_page)]
        return [(method, path, self._counted(path, handler)) for method, path, handler in [*super().routes(), *own]]

    def _counted(
        self, path: str, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def counted(request: web.Request) -> web.StreamResponse:
            self.asked[path] += 1
            if self.starting:
                headers = {"x-trtllm-server-state": "starting", "Retry-After": "1"}
                return web.json_response({"error": "the server is starting"}, status=503, headers=headers)
            return await handler(request)

        return counted

    # ---------------------------------------------------------------- generation

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        body = await request.json()
        unknown = sorted(set(body) - _KEYS)
        if unknown:
            self.refused.append(f"extra_forbidden: {unknown}")
            text = f"1 validation error: {{'type': 'extra_forbidden', 'loc': ('body', '{unknown[0]}')}}"
            return web.json_response({"error": text}, status=400)
        if self.paused:
            if self.resumes_after is not None:
                self.resumes_after -= 1
                self.paused = self.resumes_after > 0
            return _bad_request(PAUSED)
        if not body["prompt"]:
            self.refused.append("an empty prompt")
            return _bad_request("prompt is empty")
        room, most = self.max_context - len(body["prompt"]), max(body["prompt"])
        if room <= 0 or most >= self.vocab_size:
            wrong = f"`default_max_tokens` ({room}) must be greater than 0" if room <= 0 else "Token ID out of range"
            self.refused.append(wrong)
            # the engine is in a process of its own: the stream has begun when it is heard of
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await self.break_off(Connection(request, response, lambda *_: False, 0), wrong)
            return response
        return await super().completions(request)

    def _generate(self, record: CompletionRecord) -> tuple[str, int]:
        # requests that run together are drawn by one seed, that of the first of them
        self.honours_seeds = self.seeds_alone and self.open <= 1
        finish, count = super()._generate(record)
        if finish == "stop" and record.made[-1] != self.eos and not record.body.get("include_stop_str_in_output"):
            count -= 1
        return finish, count

    def token_event(self, record: CompletionRecord, token: int, reason: str | None, number: int) -> dict[str, Any]:
        """What is sent of one token; ``reason``: why it is the last one."""
        event = super().token_event(record, token, reason, number)
        (choice,) = event["choices"]
        choice["text"] = "" if record.body.get("detokenize") is False else f"<{token}>"
        if reason == "stop" and token != self.eos:
            choice["stop_reason"] = token
        choice["avg_decoded_tokens_per_iter"] = None
        if "logprobs" in choice:
            (value, *more) = choice["logprobs"]["token_logprobs"]
            names = [f"<{token}>"]
            choice["logprobs"] |= {
                "token_logprobs": [value, *more], "tokens": names, "top_logprobs": [{names[0]: value}],
            }  # fmt: skip
        return {"id": f"cmpl-{number}", "object": "text_completion", "created": 1795342166, "model": MODEL} | {
            "choices": [choice], "usage": None,
        }  # fmt: skip

    def usage_event(self, record: CompletionRecord, said: int) -> dict[str, Any]:
        """What ends a stream: how many tokens were made."""
        prompt = len(record.body["prompt"])
        usage = {"prompt_tokens": prompt, "total_tokens": prompt + said, "completion_tokens": said}
        return {"id": "cmpl-1", "object": "text_completion", "model": MODEL, "choices": []} | {
            "usage": usage | {"prompt_tokens_details": {"cached_tokens": 0}}
        }

    async def break_off(self, out: Connection, message: str) -> None:
        """An error inside of a stream."""
        error = {"message": message, "type": "server_error", "code": None, "param": None}
        await out.event({"error": error})
        await out.raw(b"data: [DONE]\n\ndata: [DONE]\n\n")

    # ---------------------------------------------------------------- what it says of itself

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models."""
        card = {"id": MODEL, "object": "model", "created": 1795342166, "owned_by": "tensorrt_llm"}
        return web.json_response({"object": "list", "data": [card]})

    async def version(self, request: web.Request) -> web.Response:
        """GET /version."""
        return web.json_response({"version": VERSION})

    async def metrics_page(self, request: web.Request) -> web.Response:
        """GET /metrics; whoever asks is counted, and not kept waiting here."""
        return web.json_response([{"iter": 1, "numActiveRequests": self.open, "numQueuedRequests": 0}])

    async def prometheus_page(self, request: web.Request) -> web.Response:
        """GET /prometheus/metrics."""
        if not self.prometheus:
            return web.Response(status=404)
        return web.Response(
            text=f'trtllm_num_requests_running{{model_name="{MODEL}"}} {self.open}.0\n'
            f'trtllm_num_requests_waiting{{model_name="{MODEL}"}} 1.0\n'
            f'trtllm_kv_cache_utilization{{model_name="{MODEL}"}} 0.5\n'
        )


def _bad_request(message: str) -> web.Response:
    said = {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": 400}
    return web.json_response(said, status=400)
