"""TensorRT-LLM's ``trtllm-serve`` on loopback, as far as april's ``openai`` engine meets it.

Payloads, errors and ends are those that its sources have; no line of it is theirs. What differs from other servers:
an unknown key is an error, with a string for its message; ids come only with ``detokenize: false``; seeds hold for a
request that runs alone; min_tokens holds back the tokenizer's EOS alone; a paused engine answers 400; an error inside
of a stream is followed by [DONE] twice; ``/metrics`` is a queue of records that a look empties, after a wait of 2 s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from april.engines.openai.wire import TokenShape
from april.testing.servers.openai.server import MODEL, CompletionRecord, Connection, FakeOpenAIServer

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

