"""Finds out what an OpenAI-compatible server can do, by sending it a few short requests before it is used."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import replace

from april.config.engines import OpenAIEngineConfig
from april.core.engine_limits import LimitCode, raw_logprobs
from april.core.sampling import LogprobKind, SamplingParams
from april.core.versions import FIRST_VERSION
from april.engines.http.http_client import HttpClient
from april.engines.http.response_reader import ResponseReader
from april.engines.http.response_stream import GenerateRoute, ResponseStream
from april.engines.http.server_engine import Admission
from april.engines.http.server_probe import REFUSES, ServerFacts, ServerProbe, model_files
from april.engines.http.server_probe import ROUTE as ROUTE_OF_MODELS
from april.engines.http.server_process import read_metrics
from april.engines.http.weight_labels import WeightLabels
from april.engines.http.wire import positive
from april.engines.openai.wire import ROUTE, CompletionParser, completion_body
from april.engines.protocol import AbortMeans, EngineFinish, Request
from april.errors import ConfigError, EngineError, RequestRefused, WireError
from april.text.server_text import clean

# any ids that exist in every vocabulary
_PROMPT = (1, 4, 7)
_SEED_TOKENS = 16
_LACKS = (
    (
        LimitCode.NO_ABORT_BY_ID,
        "has no route for aborts: april ends a request by closing its stream, which loses tokens that the server has "
        "made but not sent; with engine.kind sglang, or vllm and all its routes open, none are lost",
    ),
    (
        LimitCode.NO_LABELS,
        "does not report which weights made which token: tokens get the version at the request's submission, and a "
        "weight update aborts all requests",
    ),
    (
        LimitCode.NO_DISK_UPDATES,
        "does not load weights from disk for april: hand them over yourself, with weight_update(transfer=...), and "
        "make it forget the cached keys and values of the old weights",
    ),
)
"""Limits of all OpenAI-compatible servers: the code and the consequence of each."""
_SEEDS_DIFFER = (
    (LimitCode.NO_SEEDS, "does not repeat a response for the same seed, so runs cannot be repeated exactly"),
)
_VLLM_LACKS = (
    (
        LimitCode.NO_SEEDS,
        "runs vLLM, which crashes on a CPU with chunked prefill when a request has a seed, so april sends no seeds, "
        "and runs cannot be repeated. With all routes open, engine.kind vllm detects whether that is needed",
    ),
)
_TRTLLM_LACKS = (
    (
        LimitCode.NO_SEEDS,
        "runs TensorRT-LLM, which obeys the seed of a request only while no other request runs, so runs cannot be "
        "repeated exactly. Start it without speculative decoding, with which samples of a group may be equal",
    ),
    (
        LimitCode.LATE_STREAM_END,
        "checks once a second whether a client has disconnected, so a request runs for up to 1 s after april has "
        "closed its stream, even while the trainer begins to use a GPU that they share",
    ),
    (
        LimitCode.EARLY_STOP,
        "only prevents its tokenizer's EOS before min_tokens: april refuses a response that ends earlier with another "
        "id, and generates it again",
    ),
    (
        LimitCode.NO_START_TIME,
        "does not report when its process began, so april notices a restart with other weights only if the port was "
        "found closed in between",
    ),
)
_TRTLLM = "tensorrt_llm"
_TRTLLM_METRICS = "/prometheus/metrics"
_LACKS_BY_OWNER = {"vllm": _VLLM_LACKS, _TRTLLM: _TRTLLM_LACKS}
"""Limits that short requests do not reveal, indexed by the owner that the server names for its models."""
SOFTWARE = {"sglang": "SGLang", _TRTLLM: "TensorRT-LLM", "vllm": "vLLM"}
"""Names of servers' software, indexed by the owner that the server names for its models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIFacts(ServerFacts):
    """Results of probing an OpenAI-compatible server."""

    is_trtllm: bool
    """True if the server runs TensorRT-LLM, which needs other keys in a request to return token ids."""
    metrics_route: str | None
    """Route of the Prometheus metrics; None if april must not read them."""


async def probe_openai(client: HttpClient, config: OpenAIEngineConfig) -> OpenAIFacts:
    """Probe one server, with its list of models and up to 15 requests for 1 to 16 tokens.

    Raises ConfigError if the server lacks something that april needs or a setting is missing, and EngineError if the
    server cannot be reached or answers with an error.
    """
    found = ServerProbe(client, config)
    models = await found.get_json(ROUTE_OF_MODELS, has="data")
    if models is None:
        raise ConfigError(f"{client.url} has no {ROUTE_OF_MODELS}; is it an OpenAI-compatible server?")
    card = found.choose_model(models).card
    found.files = await asyncio.to_thread(model_files, card.get("root"))
    return await completions_facts(
        found, found.size_of_vocabulary(config.vocab_size, *(file.get("vocab_size") for file in found.files))
    )


async def completions_facts(found: ServerProbe, vocab_size: int, remedy: str = "", *flags: str) -> OpenAIFacts:
    """Probe the completions route with the chosen model.

    ``remedy`` and ``flags`` say how the user can open other routes of the server, which can do more; both may be empty.
    """
    client, config, served = found.client, found.config, found.served
    assert served is not None
    owner = str(served.card.get("owned_by"))
    is_trtllm = owner == _TRTLLM
    # under the name of the adapter alone, SGLang would answer with the base model
    model = f"{served.base}:{served.name}" if served.base is not None and owner == "sglang" else served.name
    probe = _Probe(client, model, is_trtllm)
    await _refuse_without_token_ids(probe)
    await _refuse_without_stop_ids(probe)
    for code, consequence in _LACKS:
        found.lacks(True, code, consequence, remedy, *flags, server=client.url)
    seen = LogprobKind.UNKNOWN if config.logprobs is not None else await _logprob_kind(found, probe)
    kind = found.logprobs(seen, raw_logprobs("set engine.logprobs if you know the right kind"))
    lacks = _LACKS_BY_OWNER.get(owner) or (() if await _honours_seeds(probe) else _SEEDS_DIFFER)
    for code, consequence in lacks:
        found.lacks(True, code, consequence, server=client.url)
    metrics_route: str | None = "/metrics"
    if is_trtllm:  # reading /metrics takes 2 s there, and takes records of iterations away from other readers
        page = await found.answer_of("GET", _TRTLLM_METRICS, lambda reply: reply.ok or reply.status in REFUSES)
        metrics_route = _TRTLLM_METRICS if page.ok else None
    return OpenAIFacts(
        **found.common(),
        model=model, software=await _software(found, owner), is_trtllm=is_trtllm, metrics_route=metrics_route,
        started_s=(await read_metrics(client, metrics_route)).started_s,
        capabilities=found.capabilities(
            logprob_kind=kind, vocab_size=vocab_size, context=positive(served.card, "max_model_len"), places=None,
            bans=owner == "vllm", constrains=owner == "vllm", adapters=None, eos_token_ids=found.ends(),
            abort_means=AbortMeans.CLOSE, version_spans=False, honours_seeds=not lacks,
        ),
    )  # fmt: skip


async def _software(probe: ServerProbe, owner: str) -> str:
    name = SOFTWARE.get(owner, "")
    answer = await probe.get_json("/version", has="version") if name else None
    version = answer.get("version") if isinstance(answer, dict) else None
    return f"{name} {clean(version, 64)}" if isinstance(version, str) else name


SEVERAL = 4
"""Number of tokens in the response that shows whether stream events repeat tokens of earlier events."""


@dataclass(frozen=True, slots=True)
class _Generated:
    tokens: list[int]
    logprobs: list[float]
    finish: EngineFinish | None


@dataclass(frozen=True, slots=True)
class _Probe:
    client: HttpClient
    model: str
    is_trtllm: bool

    async def ask(self, sampling: SamplingParams, prompt: Sequence[int] = _PROMPT) -> _Generated:
        """Send one short request and return its whole response."""
        request = Request(attempt_id="probe", token_ids=np.array(prompt, np.int32), sampling=sampling)
        reader = ResponseReader(CompletionParser(request), FIRST_VERSION)
        endpoint = GenerateRoute(
            client=self.client, route=ROUTE, admission=Admission(), labels=WeightLabels(),
            prepare=lambda *_: (reader, completion_body(self.model, request, is_trtllm=self.is_trtllm)),
            abort_means=AbortMeans.CLOSE, marks_end=False,
        )  # fmt: skip
        async with aclosing(ResponseStream(endpoint, request, streamed=True)) as stream:
            chunks = [chunk async for chunk in stream]
        return _Generated(
            [token for chunk in chunks for token in chunk.tokens.tolist()],
            [logprob for chunk in chunks for logprob in chunk.logprobs.tolist()],
            reader.finish,
        )


async def _refuse_without_token_ids(probe: _Probe) -> None:
    """Raise ConfigError unless the server returns each token once, by its id and with its log-probability.

    Events that repeat earlier tokens are noticed by the server's token count at the end of a response. This is checked
    here because streams that april aborts later have no such count.
    """
    try:
        count = len((await probe.ask(SamplingParams(SEVERAL, temperature=0.0))).tokens)
        wrong = "" if 0 < count <= SEVERAL else f"{count} token ids for max_tokens={SEVERAL}"
    except (RequestRefused, WireError) as error:
        wrong = str(error)
    if wrong:
        raise ConfigError(
            f"{probe.client.url} does not return the id of each token once, with its log-probability "
            f"({'detokenize: false' if probe.is_trtllm else 'return_token_ids: true'}): {wrong}; april needs them, so "
            "use a server that returns them, such as vLLM or trtllm-serve"
        )


async def _refuse_without_stop_ids(probe: _Probe) -> None:
    greedy = SamplingParams(1, temperature=0.0)
    token = (await probe.ask(greedy)).tokens[0]
    try:
        answer = await probe.ask(replace(greedy, max_tokens=2, stop_token_ids=(token,)))
    except WireError:  # the server has counted the stop token, but has not returned it
        answer = _Generated([], [], EngineFinish.STOP)
    if answer.tokens != [token] or answer.finish is not EngineFinish.STOP:
        what = "leaves the stop token out" if not answer.tokens else "does not stop at the ids in stop_token_ids"
        raise ConfigError(
            f"{probe.client.url} {what}; a response without the token that ended it would be trained as if it had not "
            "ended, so april cannot use this server"
        )


async def _logprob_kind(found: ServerProbe, probe: _Probe) -> LogprobKind:
    async def one_token(prompt: list[int], params: dict[str, Any]) -> tuple[int, float]:
        answer = await probe.ask(SamplingParams(1, **params), prompt)
        return answer.tokens[0], answer.logprobs[0]

    try:
        return await found.kind_of_logprobs(one_token)
    except (EngineError, IndexError):
        return LogprobKind.UNKNOWN


async def _honours_seeds(probe: _Probe) -> bool:
    """Return whether the same seed gives the same tokens twice, and another seed gives other tokens."""
    sampling = SamplingParams(_SEED_TOKENS, _SEED_TOKENS, temperature=1.0, seed=7)
    first, again = await probe.ask(sampling), await probe.ask(sampling)
    other = await probe.ask(replace(sampling, seed=8))
    return first.tokens == again.tokens != other.tokens
