"""The abilities of an OpenAI-compatible server, found out by a few short requests before it is used."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from april.config.engines import OpenAIEngineConfig
from april.core.sampling import LogprobKind, SamplingParams
from april.core.versions import FIRST_VERSION
from april.engine_limits import IT, UNKNOWN_LOGPROBS, Limit, LimitCode, raw_logprobs, unknown_eos
from april.engines.http.http_client import HttpClient
from april.engines.http.response_reader import ResponseReader
from april.engines.http.response_stream import Endpoint, ResponseStream
from april.engines.http.server_engine import Admission
from april.engines.http.server_probe import ROUTE as ROUTE_OF_MODELS
from april.engines.http.server_probe import ServerFacts, choose_model, get_json
from april.engines.http.server_process import has_metrics, read_metrics
from april.engines.http.weight_labels import WeightLabels
from april.engines.http.wire import NotJson, read_json
from april.engines.openai.wire import ROUTE, CompletionParser, TokenShape, completion_body
from april.engines.protocol import AbortMeans, Capabilities, EngineFinish, Request
from april.errors import ConfigError, EngineError, RequestRefused, WireError
from april.server_text import clean


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownServer:
    """The way in which a kind of server differs from what its answers to single short requests show."""

    name: str
    """A name for people; empty for a server of no special kind."""
    shapes: tuple[TokenShape, ...] = tuple(TokenShape)
    """Ways of token ids to try, the likeliest first."""
    load_route: str = "/metrics"
    """The route of its Prometheus page."""
    load_route_always: bool = True
    """That page costs nothing where it is not there; if not, it is asked once, and again only if it was there."""
    adapter_name: str = "{adapter}"
    """The way in which a request names an adapter; by another name the base of the adapter answers."""
    honours_seeds: bool = True
    """True if requests that run together keep their seeds; alone is asked."""
    limits: tuple[Limit, ...] = ()


ANY = KnownServer(name="")
TENSORRT_LLM = KnownServer(
    name="TensorRT-LLM",
    shapes=(TokenShape.DETOKENIZE,),
    # /metrics is no Prometheus page there: it waits 2 s for records of iterations, and takes them away from others
    load_route="/prometheus/metrics",
    load_route_always=False,
    honours_seeds=False,
    limits=(
        Limit(
            LimitCode.NO_SEEDS,
            "runs TensorRT-LLM, which honours the seed of a request only while it runs alone: runs cannot be repeated "
            "exactly. Start it without speculative decoding: there, samples of a group may come out equal",
            server=IT,
        ),
        Limit(
            LimitCode.LATE_STREAM_END,
            "looks once a second whether a client is gone: a request goes on for up to 1 s after april has closed its "
            "stream, also while the trainer begins to use a GPU that it shares with it",
            server=IT,
        ),
        Limit(
            LimitCode.EARLY_STOP,
            "holds back only its tokenizer's EOS before min_tokens: a response that ends earlier by another id is "
            "refused, and generated again",
            server=IT,
        ),
        Limit(
            LimitCode.NO_START_TIME,
            "does not say when its process began: one that is started anew with other weights is noticed only if its "
            "port was found closed meanwhile",
            server=IT,
        ),
    ),
)
SGLANG = KnownServer(name="SGLang", adapter_name="{base}:{adapter}")
_BY_OWNER = {"tensorrt_llm": TENSORRT_LLM, "sglang": SGLANG}


def known_server(owner: str | None) -> KnownServer:
    """Find a server by ``owned_by`` of its models; ANY for one that is not known."""
    return _BY_OWNER.get(owner or "", ANY)


# ids that every vocabulary has; which ones does not matter
_PROMPTS = ((1, 4, 7), (3, 1, 9), (5, 8, 6), (11, 2, 10))
_SEED_TOKENS = 16
_CERTAIN = 0.05
"""A most likely token whose log-probability is nearer to 0 than this tells no kinds apart."""
_SAME = 0.02
"""Log-probabilities of one token, twice computed in bfloat16, differ by less."""
_EOS_BIAS = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIFacts(ServerFacts):
    """The facts about an OpenAI-compatible server; one that keeps stop ids back is refused."""

    token_shape: TokenShape
    keeps_eos: bool | None
    """EOS is in the ids of the answer. None: it could not be asked, and each answer is checked when it comes."""
    load_route: str | None = "/metrics"
    """The route of its Prometheus page; None: it has none that may be asked."""


async def probe_openai(client: HttpClient, config: OpenAIEngineConfig) -> OpenAIFacts:
    """Ask one server, by its list of models and up to 15 requests of 1 to 16 tokens.

    Raises ConfigError for one that cannot do what april needs or does not tell what must be set; EngineError.
    """
    served = choose_model(client.url, await _models(client), config.model)
    said_len, owner = served.card.get("max_model_len"), served.card.get("owned_by")
    said_len = said_len if isinstance(said_len, int) else None
    server = known_server(owner if isinstance(owner, str) else None)
    model = served.name if served.base is None else server.adapter_name.format(base=served.base, adapter=served.name)
    if config.vocab_size is None:
        raise ConfigError(
            f"engine.vocab_size: {client.url} does not tell the size of its vocabulary; set it to vocab_size of the "
            "model's config.json"
        )
    max_context = config.max_len or said_len
    if max_context is None:
        raise ConfigError(
            f"engine.max_len: {client.url} does not tell its context; set it to what the server was started with "
            "(TensorRT-LLM: --max_seq_len)"
        )
    if said_len is not None and max_context > said_len:
        raise ConfigError(f"engine.max_len={max_context} is more than the context of {client.url}, {said_len} tokens")
    probe = _Probe(client, model, await _token_shape(client, model, server.shapes))
    await _refuse_without_stop_ids(probe)
    eos = config.eos_token_ids or ()
    keeps_eos = await _keeps_eos(probe, eos[0]) if eos else None
    kind = LogprobKind(config.logprobs) if config.logprobs is not None else await _logprob_kind(probe)
    seeds = server.honours_seeds and await _honours_seeds(probe)
    load_route = await _load_route(client, server)
    return OpenAIFacts(
        url=client.url,
        model=model,
        asked=config.model,
        software=await software_of(client, server),
        started_s=(await read_metrics(client, load_route)).started_s,
        token_shape=probe.shape,
        keeps_eos=keeps_eos,
        load_route=load_route,
        capabilities=Capabilities(
            logprob_kind=kind,
            vocab_size=config.vocab_size,
            max_context=max_context,
            eos_token_ids=tuple(eos),
            max_in_flight=config.max_in_flight,
            abort_means=AbortMeans.CLOSE,
            version_spans=False,
            remote=True,
            verifies_weights=False,
            honours_seeds=seeds,
            limits=_limits(client.url, kind, server, seeds, keeps_eos, knows_eos=bool(eos)) + served.limits(),
        ),
    )


async def software_of(client: HttpClient, server: KnownServer) -> str:
    """Name and version of a server that is known by its name."""
    if not server.name:
        return ""
    answer = await get_json(client, "/version")
    version = answer.get("version") if isinstance(answer, dict) else None
    return f"{server.name} {clean(version, 64)}" if isinstance(version, str) else server.name


async def _load_route(client: HttpClient, server: KnownServer) -> str | None:
    return server.load_route if server.load_route_always or await has_metrics(client, server.load_route) else None


async def _models(client: HttpClient) -> Any:
    """Return what the server says of its models."""
    reply = await client.call("GET", ROUTE_OF_MODELS, retry=True)
    client.require_ok(reply, ROUTE_OF_MODELS)
    try:
        answer = read_json(reply.body)
    except NotJson as error:
        raise ConfigError(
            f"{client.url}{ROUTE_OF_MODELS} is no list of models: {error}; is it such a server?"
        ) from None
    if not isinstance(answer, dict) or not isinstance(answer.get("data"), list):
        raise ConfigError(f"{client.url}{ROUTE_OF_MODELS} is no list of models; is it such a server?")
    return answer


SEVERAL = 4
"""Tokens of a request that shows whether events repeat them."""


@dataclass(frozen=True, slots=True)
class _Generated:
    tokens: list[int]
    logprobs: list[float]
    finish: EngineFinish | None


@dataclass(frozen=True, slots=True)
class _Probe:
    """Asks one server in one shape."""

    client: HttpClient
    model: str
    shape: TokenShape

    async def ask(self, sampling: SamplingParams, prompt: int = 0, **changes: Any) -> _Generated:
        """The whole answer to one short request."""
        request = Request(attempt_id="probe", token_ids=np.array(_PROMPTS[prompt], np.int32), sampling=sampling)
        reader = ResponseReader(CompletionParser(self.shape, request), FIRST_VERSION, None, len(request.token_ids))
        endpoint = Endpoint(
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
    """The first of these ways in which the server hands over ids with log-probabilities."""
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
        f"{client.url} gives no token ids with log-probabilities, which april cannot do without, in any way that it "
        f"knows ({'; '.join(said)}); use a server that does, such as vLLM or trtllm-serve"
    )


async def _refuse_repeated_tokens(probe: _Probe) -> None:
    """Each event must have its own tokens only: of a stream that is cut off, nobody else would notice."""
    try:
        count = len((await probe.ask(SamplingParams(SEVERAL, temperature=0.0))).tokens)
        wrong = f"{count} token ids for max_tokens={SEVERAL}" if count > SEVERAL else ""
    except WireError as error:
        wrong = str(error)
    if wrong:
        raise ConfigError(
            f"{probe.client.url} does not hand over each token once ({wrong}); do its events repeat the tokens before "
            "them? april cannot use such a server"
        )


async def _refuse_without_stop_ids(probe: _Probe) -> None:
    greedy = SamplingParams(1, temperature=0.0)
    token = (await probe.ask(greedy)).tokens[0]
    try:
        answer = await probe.ask(replace(greedy, max_tokens=2, stop_token_ids=(token,)))
    except WireError:  # it counts a token that it did not hand over
        answer = _Generated([], [], EngineFinish.STOP)
    if answer.tokens != [token] or answer.finish is not EngineFinish.STOP:
        what = "keeps the stop token back" if not answer.tokens else "does not stop at the ids in stop_token_ids"
        raise ConfigError(
            f"{probe.client.url} {what}; a response without the token that ended it would be trained on as if it had "
            "not ended, so april cannot use this server"
        )


async def _keeps_eos(probe: _Probe, eos: int) -> bool | None:
    """Make EOS all but certain; a server that cannot do that leaves it open."""
    sampling = SamplingParams(2, temperature=0.0)
    try:
        answer = await probe.ask(sampling, logit_bias={str(eos): _EOS_BIAS})
    except WireError:
        answer = _Generated([], [], EngineFinish.STOP)
    except EngineError:
        return None
    if answer.finish is not EngineFinish.STOP:
        return None  # the bias was ignored, or this id ends nothing here
    if answer.tokens != [eos]:
        raise ConfigError(
            f"{probe.client.url} keeps EOS ({eos}) back; a response without the token that ended it would be trained "
            "on as if it had not ended, so april cannot use this server"
        )
    return True


async def _logprob_kind(probe: _Probe) -> LogprobKind:
    """Compare the most likely token of one prompt, forced by top_k=1, under three samplings.

    Of the distribution sampled from it has log-probability 0; otherwise it changes with the temperature or does not.
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
    """Return whether the same seed twice gives the same tokens, and another seed gives others."""
    sampling = SamplingParams(_SEED_TOKENS, _SEED_TOKENS, temperature=1.0, seed=7)
    first, again = await probe.ask(sampling), await probe.ask(sampling)
    other = await probe.ask(replace(sampling, seed=8))
    return first.tokens == again.tokens != other.tokens


_NO_ABORT_BY_ID = Limit(
    LimitCode.NO_ABORT_BY_ID,
    "has no route for aborts: a request is ended by closing its stream, and tokens that the server had made and not "
    "sent by then are lost; a vLLM or SGLang server under its own engine kind loses none",
    server=IT,
)
_NO_LABELS = Limit(
    LimitCode.NO_LABELS,
    "does not say which weights made which token: the version is that of the request's submission, and no request "
    "lives through a weight update",
    server=IT,
)
_NO_DISK_UPDATES = Limit(
    LimitCode.NO_DISK_UPDATES,
    "does not load weights from disk for april: hand them over yourself, with weight_update(transfer=...), and have it "
    "forget the cached keys and values of the old weights there",
    server=IT,
)
_NO_SEEDS = Limit(
    LimitCode.NO_SEEDS, "does not repeat a response for the same seed: runs cannot be repeated exactly", server=IT
)
_UNSEEN_EOS = Limit(
    LimitCode.UNSEEN_EOS,
    "could not be made to end a response at the start: whether EOS is among its ids is checked with every response, "
    "and one without it fails",
    server=IT,
)
_UNKNOWN_EOS = unknown_eos(
    "engine.eos_token_ids is not set, and the server does not tell: a response that is cut right behind its EOS, "
    "before the server says that it ended, would be continued"
)


def _limits(
    url: str, kind: LogprobKind, server: KnownServer, seeds: bool, keeps_eos: bool | None, *, knows_eos: bool
) -> tuple[Limit, ...]:
    limits = (
        (True, _NO_ABORT_BY_ID),
        (True, _NO_LABELS),
        (True, _NO_DISK_UPDATES),
        (kind is LogprobKind.RAW, raw_logprobs("set engine.logprobs if you know them better")),
        (kind is LogprobKind.UNKNOWN, UNKNOWN_LOGPROBS),
        *((True, limit) for limit in server.limits),
        (not seeds and server.honours_seeds, _NO_SEEDS),
        (not knows_eos, _UNKNOWN_EOS),
        (knows_eos and keeps_eos is None, _UNSEEN_EOS),
    )
    return tuple(limit.of(url) for amiss, limit in limits if amiss)
