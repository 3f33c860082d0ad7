"""Finds out what an OpenAI-compatible server can do, by sending it a few short requests before it is used."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import replace

from april.config.engines import OpenAIEngineConfig
from april.core.engine_limits import IT, Limit, LimitCode, raw_logprobs, unknown_eos
from april.core.sampling import LogprobKind, SamplingParams
from april.core.versions import FIRST_VERSION
from april.engines.http.http_client import HttpClient
from april.engines.http.response_reader import ResponseReader
from april.engines.http.response_stream import GenerateRoute, ResponseStream
from april.engines.http.server_engine import Admission
from april.engines.http.server_probe import ROUTE as ROUTE_OF_MODELS
from april.engines.http.server_probe import ServerFacts, ServerProbe
from april.engines.http.server_process import read_metrics
from april.engines.http.weight_labels import WeightLabels
from april.engines.http.wire import NotJson, read_json
from april.engines.openai.wire import ROUTE, CompletionParser, TokenShape, completion_body
from april.engines.protocol import AbortMeans, Capabilities, EngineFinish, Request
from april.errors import ConfigError, EngineError, RequestRefused, WireError
from april.text.server_text import clean


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownServer:
    """Properties of a kind of server that single short requests do not reveal."""

    name: str
    """Name for messages; empty for an unknown kind of server."""
    shapes: tuple[TokenShape, ...] = tuple(TokenShape)
    """Ways to get token ids, in the order in which they are tried."""
    load_route: str = "/metrics"
    """Route of the Prometheus metrics page."""
    load_route_always: bool = True
    """False if requests for a metrics page that does not exist may do harm. The page is then requested once, and later
    only if it existed."""
    adapter_name: str = "{adapter}"
    """Format of an adapter's name in requests; under other names the base model would answer."""
    honours_seeds: bool = True
    """True if seeds also work for concurrent requests; the probe only tests a request that runs alone."""
    takes_seeds: bool = True
    """False if a seed may crash the server."""
    limits: tuple[Limit, ...] = ()


ANY = KnownServer(name="")
TENSORRT_LLM = KnownServer(
    name="TensorRT-LLM",
    shapes=(TokenShape.DETOKENIZE,),
    # on TensorRT-LLM, /metrics waits 2 s for iteration records and takes them away from other readers
    load_route="/prometheus/metrics",
    load_route_always=False,
    honours_seeds=False,
    limits=(
        Limit(
            LimitCode.NO_SEEDS,
            "runs TensorRT-LLM, which obeys the seed of a request only while no other request runs, so runs cannot be "
            "repeated exactly. Start it without speculative decoding, with which samples of a group may be equal",
            server=IT,
        ),
        Limit(
            LimitCode.LATE_STREAM_END,
            "checks once a second whether a client has disconnected, so a request runs for up to 1 s after april has "
            "closed its stream, even while the trainer begins to use a GPU that they share",
            server=IT,
        ),
        Limit(
            LimitCode.EARLY_STOP,
            "only prevents its tokenizer's EOS before min_tokens: april refuses a response that ends earlier with "
            "another id, and generates it again",
            server=IT,
        ),
        Limit(
            LimitCode.NO_START_TIME,
            "does not report when its process began, so april notices a restart with other weights only if the port "
            "was found closed in between",
            server=IT,
        ),
    ),
)
SGLANG = KnownServer(name="SGLang", adapter_name="{base}:{adapter}")
VLLM = KnownServer(
    name="vLLM",
    shapes=(TokenShape.RETURN_TOKEN_IDS, TokenShape.STRINGS),
    honours_seeds=False,
    takes_seeds=False,
    limits=(
        Limit(
            LimitCode.NO_SEEDS,
            "runs vLLM, which crashes on a CPU with chunked prefill when a request has a seed, so april sends no "
            "seeds, and runs cannot be repeated. Use engine.kind vllm, which detects whether that is needed",
            server=IT,
        ),
    ),
)
_BY_OWNER = {"tensorrt_llm": TENSORRT_LLM, "sglang": SGLANG, "vllm": VLLM}


def known_server(owner: str | None) -> KnownServer:
    """Return the kind of server for the ``owned_by`` of its models; ANY if it is unknown."""
    return _BY_OWNER.get(owner or "", ANY)


# these ids exist in every vocabulary; their choice does not matter
_PROMPTS = ((1, 4, 7), (3, 1, 9), (5, 8, 6), (11, 2, 10))
_SEED_TOKENS = 16
_CERTAIN = 0.05
"""Minimum distance from 0 of a log-probability that can tell a server's LogprobKind; that of a more certain token is
nearly the same for every kind."""
_SAME = 0.02
"""Maximum difference between two log-probabilities of one token that were computed in bfloat16."""
_EOS_BIAS = 100.0
_LIMITS = (
    Limit(
        LimitCode.NO_ABORT_BY_ID,
        "has no route for aborts: april ends a request by closing its stream, which loses tokens that the server has "
        "made but not sent; vLLM and SGLang servers under their own engine kinds lose none", server=IT,
    ),
    Limit(
        LimitCode.NO_LABELS,
        "does not report which weights made which token: tokens get the version at the request's submission, and a "
        "weight update aborts all requests", server=IT,
    ),
    Limit(
        LimitCode.NO_DISK_UPDATES,
        "does not load weights from disk for april: hand them over yourself, with weight_update(transfer=...), and "
        "make it forget the cached keys and values of the old weights", server=IT,
    ),
)  # fmt: skip
_UNKNOWN_EOS = unknown_eos(
    "engine.eos_token_ids is not set, and the server does not report the ids: april would continue a response that is "
    "aborted after its EOS but before the server reports its end"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIFacts(ServerFacts):
    """Results of probing an OpenAI-compatible server. Servers that omit stop ids are refused."""

    token_shape: TokenShape
    keeps_eos: bool | None
    """True if responses include the EOS id; None if that is unknown, so that each response is checked."""
    load_route: str | None = "/metrics"
    """Route of the Prometheus metrics page; None if there is none that may be used."""
    takes_seeds: bool = True
    """False if requests must have no seed: a vLLM server on a CPU can crash on one."""


async def probe_openai(client: HttpClient, config: OpenAIEngineConfig) -> OpenAIFacts:
    """Probe one server, with its list of models and up to 15 requests for 1 to 16 tokens.

    Raises ConfigError if the server lacks something that april needs or a setting is missing, and EngineError if the
    server cannot be reached or answers with an error.
    """
    found = ServerProbe(client, config)
    served = found.choose_model(await _models(client))
    said_len, owner = served.card.get("max_model_len"), served.card.get("owned_by")
    said_len = said_len if isinstance(said_len, int) else None
    server = known_server(owner if isinstance(owner, str) else None)
    model = served.name if served.base is None else server.adapter_name.format(base=served.base, adapter=served.name)
    if config.vocab_size is None:
        raise ConfigError(
            f"engine.vocab_size: {client.url} does not report the size of its vocabulary; set it to vocab_size of the "
            "model's config.json"
        )
    max_context = config.max_len or said_len
    if max_context is None:
        raise ConfigError(
            f"engine.max_len: {client.url} does not report its context; set it to the value with which the server was "
            "started (TensorRT-LLM: --max_seq_len)"
        )
    if said_len is not None and max_context > said_len:
        raise ConfigError(f"engine.max_len={max_context} is more than the context of {client.url}, {said_len} tokens")
    probe = _Probe(client, model, await _token_shape(client, model, server.shapes))
    await _refuse_without_stop_ids(probe)
    eos = config.eos_token_ids or ()
    keeps_eos = await _keeps_eos(probe, eos[0]) if eos else None
    for limit in _LIMITS:
        found.note(limit.of(client.url))
    seen = LogprobKind.UNKNOWN if config.logprobs is not None else await _logprob_kind(probe)
    kind = found.logprobs(seen, raw_logprobs("set engine.logprobs if you know the right kind"))
    for limit in server.limits:
        found.note(limit.of(client.url))
    seeds = server.honours_seeds and await _honours_seeds(probe)
    found.lacks(
        not seeds and server.honours_seeds, LimitCode.NO_SEEDS,
        "does not repeat a response for the same seed, so runs cannot be repeated exactly", server=client.url,
    )  # fmt: skip
    found.lacks(
        eos and keeps_eos is None, LimitCode.UNSEEN_EOS,
        "could not be made to end a response at the start, so april checks with every response whether EOS is among "
        "its ids, and a response without it fails",
        server=client.url,
    )  # fmt: skip
    found.note(_UNKNOWN_EOS, not eos)
    has_load = server.load_route_always or await found.has_page(server.load_route)
    load_route = server.load_route if has_load else None
    return OpenAIFacts(
        **found.common() | {"base": None},
        model=model, software=await software_of(found, server),
        started_s=(await read_metrics(client, load_route)).started_s,
        token_shape=probe.shape, keeps_eos=keeps_eos, load_route=load_route, takes_seeds=server.takes_seeds,
        capabilities=Capabilities(
            logprob_kind=kind, vocab_size=config.vocab_size, max_context=max_context, eos_token_ids=tuple(eos),
            max_in_flight=config.max_in_flight, abort_means=AbortMeans.CLOSE, version_spans=False, remote=True,
            verifies_weights=False, honours_seeds=seeds, limits=found.limits(),
        ),
    )  # fmt: skip


async def software_of(probe: ServerProbe, server: KnownServer) -> str:
    """Return the name and version of the server's software; empty for an unknown kind of server."""
    if not server.name:
        return ""
    answer = await probe.get_json("/version", has="version")
    version = answer.get("version") if isinstance(answer, dict) else None
    return f"{server.name} {clean(version, 64)}" if isinstance(version, str) else server.name


async def _models(client: HttpClient) -> Any:
    """Return the server's list of models. Raises ConfigError if the answer is not one."""
    reply = await client.call("GET", ROUTE_OF_MODELS, retry=True)
    client.require_ok(reply, ROUTE_OF_MODELS)
    try:
        answer = read_json(reply.body)
    except NotJson as error:
        raise ConfigError(
            f"{client.url}{ROUTE_OF_MODELS} does not return a list of models: {error}; is it an OpenAI-compatible "
            "server?"
        ) from None
    if not isinstance(answer, dict) or not isinstance(answer.get("data"), list):
        raise ConfigError(
            f"{client.url}{ROUTE_OF_MODELS} does not return a list of models; is it an OpenAI-compatible server?"
        )
    return answer


SEVERAL = 4
"""Number of tokens in the response that shows whether stream events repeat tokens of earlier events."""


@dataclass(frozen=True, slots=True)
class _Generated:
    tokens: list[int]
    logprobs: list[float]
    finish: EngineFinish | None


@dataclass(frozen=True, slots=True)
class _Probe:
    """Sends short requests to one server, in one token shape."""

    client: HttpClient
    model: str
    shape: TokenShape

    async def ask(self, sampling: SamplingParams, prompt: int = 0, **changes: Any) -> _Generated:
        """Send one short request and return its whole response."""
        request = Request(attempt_id="probe", token_ids=np.array(_PROMPTS[prompt], np.int32), sampling=sampling)
        reader = ResponseReader(CompletionParser(self.shape, request), FIRST_VERSION, None, len(request.token_ids))
        endpoint = GenerateRoute(
            client=self.client, route=ROUTE, admission=Admission(), labels=WeightLabels(),
            prepare=lambda *_: (reader, completion_body(self.model, self.shape, request, **changes)),
            abort_means=AbortMeans.CLOSE, marks_end=False,
        )  # fmt: skip
        async with aclosing(ResponseStream(endpoint, request, streamed=True)) as stream:
            chunks = [chunk async for chunk in stream]
        return _Generated(
            [token for chunk in chunks for token in chunk.tokens.tolist()],
            [logprob for chunk in chunks for logprob in chunk.logprobs.tolist()],
            reader.finish,
        )


async def _token_shape(client: HttpClient, model: str, shapes: Iterable[TokenShape]) -> TokenShape:
    """Return the first of ``shapes`` in which the server returns token ids with log-probabilities."""
    said = []
    for shape in shapes:
        try:
            answer = await _Probe(client, model, shape).ask(SamplingParams(1, temperature=0.0))
        except (RequestRefused, WireError) as error:
            said.append(f"{shape}: {error}")
            continue
        if len(answer.tokens) == 1:
            await _refuse_repeated_tokens(_Probe(client, model, shape))
            return shape
        said.append(f"{shape}: {len(answer.tokens)} token ids for max_tokens=1")
    raise ConfigError(
        f"{client.url} returns no token ids with log-probabilities in any way that april knows ({'; '.join(said)}), "
        "and april needs them; use a server that returns them, such as vLLM or trtllm-serve"
    )


async def _refuse_repeated_tokens(probe: _Probe) -> None:
    """Raise ConfigError if stream events repeat the tokens of earlier events.

    In a complete response the server's token count reveals that; a stream that is cut off has no count.
    """
    try:
        count = len((await probe.ask(SamplingParams(SEVERAL, temperature=0.0))).tokens)
        wrong = f"{count} token ids for max_tokens={SEVERAL}" if count > SEVERAL else ""
    except WireError as error:
        wrong = str(error)
    if wrong:
        raise ConfigError(
            f"{probe.client.url} does not return each token once ({wrong}); do its events repeat earlier tokens? april "
            "cannot use such a server"
        )


async def _refuse_without_stop_ids(probe: _Probe) -> None:
    greedy = SamplingParams(1, temperature=0.0)
    token = (await probe.ask(greedy)).tokens[0]
    try:
        answer = await probe.ask(replace(greedy, max_tokens=2, stop_token_ids=(token,)))
    except WireError:  # the server has counted the stop token but not returned it
        answer = _Generated([], [], EngineFinish.STOP)
    if answer.tokens != [token] or answer.finish is not EngineFinish.STOP:
        what = "leaves the stop token out" if not answer.tokens else "does not stop at the ids in stop_token_ids"
        raise ConfigError(
            f"{probe.client.url} {what}; a response without the token that ended it would be trained as if it had not "
            "ended, so april cannot use this server"
        )


async def _keeps_eos(probe: _Probe, eos: int) -> bool | None:
    """Make EOS almost certain and return True if the response includes it; None if that cannot be found out.

    Raises ConfigError if the server omits EOS.
    """
    sampling = SamplingParams(2, temperature=0.0)
    try:
        answer = await probe.ask(sampling, logit_bias={str(eos): _EOS_BIAS})
    except WireError:
        answer = _Generated([], [], EngineFinish.STOP)
    except EngineError:
        return None
    if answer.finish is not EngineFinish.STOP:
        return None  # the bias was ignored, or this id does not end responses here
    if answer.tokens != [eos]:
        raise ConfigError(
            f"{probe.client.url} leaves EOS ({eos}) out; a response without the token that ended it would be trained "
            "as if it had not ended, so april cannot use this server"
        )
    return True


async def _logprob_kind(probe: _Probe) -> LogprobKind:
    """Find out which log-probabilities the server returns, from two requests with top_k=1 and one without.

    With top_k=1 only one token can be sampled, so its log-probability in the distribution that is sampled from is 0
    (PROCESSED). Any other value is RAW if it is the same at two temperatures, and TEMPERATURE if it differs. The
    request without top_k shows that the token is not nearly certain anyway.
    """
    for prompt in range(len(_PROMPTS)):
        try:
            free = await probe.ask(SamplingParams(1, seed=prompt), prompt)
            neutral = await probe.ask(SamplingParams(1, seed=1), prompt, top_k=1)
            hot = await probe.ask(SamplingParams(1, temperature=2.0, seed=1), prompt, top_k=1)
        except EngineError:
            return LogprobKind.UNKNOWN
        if not len(free.tokens) == len(neutral.tokens) == len(hot.tokens) == 1 or neutral.tokens != hot.tokens:
            continue
        at_1, at_2 = neutral.logprobs[0], hot.logprobs[0]
        if at_1 > -1e-6 and at_2 > -1e-6 and free.logprobs[0] < -_CERTAIN:
            return LogprobKind.PROCESSED
        if at_1 > -_CERTAIN:
            continue
        return LogprobKind.RAW if abs(at_2 - at_1) < _SAME else LogprobKind.TEMPERATURE
    return LogprobKind.UNKNOWN


async def _honours_seeds(probe: _Probe) -> bool:
    """Return whether the same seed gives the same tokens twice, and another seed gives others."""
    sampling = SamplingParams(_SEED_TOKENS, _SEED_TOKENS, temperature=1.0, seed=7)
    first, again = await probe.ask(sampling), await probe.ask(sampling)
    other = await probe.ask(replace(sampling, seed=8))
    return first.tokens == again.tokens != other.tokens
