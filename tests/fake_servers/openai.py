"""Servers with the OpenAI completions route and no more, TensorRT-LLM's too.

Greedy tokens are those of every fake server; others follow from the seed too, where it is honoured.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

from aiohttp import web

from april.core.sampling import LogprobKind

from .base import events
from .vllm import COMPLETIONS, FakeVllmRun, FakeVllmServer

MODEL = "fake"
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
"""Of a completion by TensorRT-LLM, as far as april has use for them; it refuses every other."""


@dataclass(slots=True, eq=False)
class CompletionRun(FakeVllmRun):
    """One request; ``ahead`` tokens of it are made and not sent, at any time."""

    ahead: int = 0

    def flush(self) -> None:
        """All that was made leaves at the end only."""
        FakeVllmRun.flush(self)
        if self.finish is None:
            self.flushed = max(self.sent, len(self.ids) - self.ahead)


class TrtllmRun(CompletionRun):
    EOS_ALONE = True


class FakeOpenAIServer(FakeVllmServer):
    """Args:
    gives_ids: it returns the ids of tokens.
    kind: of which distribution the log-probabilities are.
    tokens_ahead: how many tokens it has made and not sent, at any time.
    strips: it keeps the token back that ends a response.
    honours_seeds: another seed gives other tokens; if not, none is looked at.
    owner: ``owned_by`` of its models.
    common: of :class:`FakeVllmServer`.
    """

    RUN: ClassVar[type[FakeVllmRun]] = CompletionRun
    SAYS_CONTEXT = True
    """Its list of models has the length of its context."""

    def __init__(
        self, *, gives_ids: bool = True, kind: LogprobKind = LogprobKind.RAW, tokens_ahead: int = 0,
        strips: bool = False, honours_seeds: bool = True, owner: str | None = None,
        without: tuple[str, ...] = ("/version",), **common: Any,
    ) -> None:  # fmt: skip
        super().__init__(developer=False, scale_out=False, logprobs=kind.value, without=without, **common)
        self.gives_ids, self.tokens_ahead, self.strips = gives_ids, tokens_ahead, strips
        self.owner, self.honours_seeds = owner, honours_seeds

    @property
    def unread_tokens(self) -> int:
        """Made for requests whose client closed the stream, and never sent."""
        return sum(len(run.ids) - run.sent for run in self.runs if run.finish is None)

    def _run_of(self, body: dict[str, Any], token_route: bool, header: str | None) -> FakeVllmRun:
        run = super()._run_of(body, token_route, header)
        assert isinstance(run, CompletionRun)
        run.ahead = self.tokens_ahead
        drawn = body["temperature"] and body["top_k"] != 1 and body.get("seed") is not None
        run.salt = f"/{body['seed']}" if drawn and self.honours_seeds else ""
        return run

    def _kept_back(self, run: FakeVllmRun) -> bool:
        """Whether the token that ended the request is not in its answer."""
        return self.strips

    def _gives_ids(self, body: dict[str, Any]) -> bool:
        """Whether the answer to this request has the ids of its tokens."""
        return self.gives_ids and bool(body.get("return_token_ids"))

    def _gives_logprobs(self, body: dict[str, Any]) -> bool:
        return body.get("logprobs") is not None

    def _shaped(self, run: FakeVllmRun, said: dict[str, Any]) -> dict[str, Any]:
        (choice,) = said["choices"]
        body, ids, scored = run.params, choice.pop("token_ids"), choice.pop("logprobs")
        if choice["finish_reason"] == "stop" and ids and self._kept_back(run):
            ids, scored = ids[:-1], {name: values[:-1] for name, values in scored.items()}
        if self._gives_ids(body):
            choice["token_ids"] = ids
        if self._gives_logprobs(body):
            choice["logprobs"] = scored
        return said

    async def _models(self, request: web.Request) -> web.Response:
        card: dict[str, Any] = {"id": self.model, "object": "model", "owned_by": self.owner}
        if self.SAYS_CONTEXT:
            card["max_model_len"] = self.context
        adapters = [card | {"id": a, "parent": self.model} for a in self.loaded]
        return web.json_response({"object": "list", "data": [card, *adapters]})

    def _refusal(self, body: dict[str, Any], token_route: bool) -> web.Response | None:
        model = body["model"].rpartition(":")[2]  # SGLang has adapters under "base:adapter"
        return super()._refusal(body | {"model": model}, token_route)


class FakeTrtllmServer(FakeOpenAIServer):
    """Args:
    prometheus: it was started with ``return_perf_metrics``, and has a Prometheus page.
    seeds_alone: it honours the seed of a request that runs alone; older ones honour none.
    common: of :class:`FakeOpenAIServer`.
    """

    RUN, SAYS_CONTEXT = TrtllmRun, False

    def __init__(self, *, prometheus: bool = False, seeds_alone: bool = True, **common: Any) -> None:
        without = () if prometheus else ("/prometheus/metrics",)
        super().__init__(owner="tensorrt_llm", without=without, **common)
        self.seeds_alone = seeds_alone
        self.paused = False
        """Somebody has called pause_generation() of its engine."""
        self.resumes_after: int | None = None
        """So many requests are answered so, and then somebody resumes it."""
        self.asked: Counter[str] = Counter()
        """Requests by route."""
        self.refused: list[str] = []
        """What was wrong with requests that were refused."""

    def _routes(self) -> list[web.RouteDef]:
        return [*super()._routes(), web.get("/prometheus/metrics", self._prometheus)]

    async def _early(self, request: web.Request) -> web.StreamResponse | None:
        self.asked[request.path] += 1
        if request.path != COMPLETIONS:
            return await super()._early(request)
        body = await request.json()
        if unknown := sorted(set(body) - _KEYS):
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
        room, most = self.context - len(body["prompt"]), max(body["prompt"])
        if room > 0 and most < self.vocab_size:
            return None
        wrong = f"`default_max_tokens` ({room}) must be greater than 0" if room <= 0 else "Token ID out of range"
        self.refused.append(wrong)
        # the engine is in a process of its own: the stream has begun when it is heard of
        return await events(request, _error(wrong), "[DONE]", "[DONE]")

    # ---------------------------------------------------------------- generation

    def _run_of(self, body: dict[str, Any], token_route: bool, header: str | None) -> FakeVllmRun:
        # requests that run together are drawn by one seed, that of the first of them
        self.honours_seeds = self.seeds_alone and not self.open_requests
        return super()._run_of(body, token_route, header)

    def _gives_ids(self, body: dict[str, Any]) -> bool:
        return body.get("detokenize") is False

    def _gives_logprobs(self, body: dict[str, Any]) -> bool:
        return bool(body.get("logprobs"))

    def _kept_back(self, run: FakeVllmRun) -> bool:
        return run.ids[-1] != self.eos and not run.params.get("include_stop_str_in_output")

    def _shaped(self, run: FakeVllmRun, said: dict[str, Any]) -> dict[str, Any]:
        said = super()._shaped(run, said)
        (choice,) = said["choices"]
        if choice["finish_reason"] == "stop" and run.ids[-1] != self.eos:
            choice["stop_reason"] = run.ids[-1]
        return said | {"choices": [choice | {"avg_decoded_tokens_per_iter": None}], "created": 1795342166}

    def _said(self, run: FakeVllmRun) -> str:
        return _error("the engine is dead") + "\n\ndata: [DONE]" if run.failed else super()._said(run)

    # ---------------------------------------------------------------- what it says of itself

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": VERSION})

    async def _metrics(self, request: web.Request) -> web.Response:
        """Whoever asks is counted, and not kept waiting here."""
        running = len(self.running)
        return web.json_response([{"iter": 1, "numActiveRequests": running, "numQueuedRequests": 0}])

    async def _prometheus(self, request: web.Request) -> web.Response:
        return web.Response(
            text=f'trtllm_num_requests_running{{model_name="{MODEL}"}} {len(self.running)}.0\n'
            f'trtllm_num_requests_waiting{{model_name="{MODEL}"}} 1.0\n'
            f'trtllm_kv_cache_utilization{{model_name="{MODEL}"}} 0.5\n'
        )


def _error(message: str) -> str:
    return json.dumps({"error": {"message": message, "type": "server_error", "code": None, "param": None}})


def _bad_request(message: str) -> web.Response:
    said = {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": 400}
    return web.json_response(said, status=400)
