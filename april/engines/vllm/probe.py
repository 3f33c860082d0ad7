"""The abilities of one vLLM server: asked by GET calls, by calls that it must refuse, and by requests of one token."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from april.config.engines import VllmEngineConfig
from april.core.sampling import LogprobKind
from april.engine_limits import UNKNOWN_LOGPROBS, tied_embeddings, unknown_eos
from april.engines.http.adapter_files import base_shapes
from april.engines.http.http_client import HttpClient, Reply
from april.engines.http.server_probe import (
    NO_TOKEN,
    PROBE_S,
    ServerFacts,
    choose_model,
    eos_of,
    get_json,
    has_route,
    kind_of_logprobs,
    least,
    longest_request,
    model_files,
    probe_id,
    vocabulary_in_refusal,
)
from april.engines.http.server_process import ServerMetrics, read_metrics
from april.engines.http.token_rows import (
    NO_EXPERTS,
    Routing,
    WrongRows,
    experts_of_npy,
    routing_of,
)
from april.engines.http.weight_labels import Span
from april.engines.http.wire import NotJson, error_text, read_json
from april.engines.openai.wire import ASK_SPANS
from april.engines.protocol import ROUTED_EXPERTS, AbortMeans, AdapterSite, Capabilities, OnWeightUpdate
from april.engines.vllm import limits
from april.engines.vllm.adapters import LOAD, NEEDED
from april.engines.vllm.plugin import BACKENDS
from april.engines.vllm.wire import COMPLETIONS_ROUTE, PARTS, TOKEN_ROUTE, TokenReply, misses_attachment
from april.errors import ConfigError, EngineError, RequestRefused, WireError
from april.server_text import clean

_MODES = {
    "raw_logprobs": LogprobKind.RAW,
    "processed_logprobs": LogprobKind.PROCESSED,
}


EXPERTS_SETTING = "enable_return_routed_experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmFacts(ServerFacts):
    """The facts about a vLLM server."""

    route: str
    """The place where requests go: that with token ids in and out and version spans, or that of completions."""
    developer_routes: bool
    abort_route: str
    """The place where requests are aborted by id; empty: nowhere."""
    priorities: bool
    """Requests are scheduled by priority."""
    routing: Routing | None = None
    """The shape of the experts that it gives with tokens; None: it gives none."""
    keeps_attachments: bool = False
    """What was attached to a request is found again by its name."""


async def probe_vllm(client: HttpClient, config: VllmEngineConfig) -> VllmFacts:
    """Ask a server what it can do, disturbing nothing; raises ConfigError if april cannot use it, and EngineError."""
    version, models, info, label, paused, metrics = await asyncio.gather(
        get_json(client, "/version"),
        get_json(client, "/v1/models"),
        get_json(client, "/server_info?config_format=json"),
        get_json(client, "/weight_info"),
        get_json(client, "/is_paused"),
        read_metrics(client),
    )
    if not isinstance(version, dict) or not isinstance(models, dict) or "data" not in models:
        raise ConfigError(
            f"{client.url} is no vLLM server (it has no /version or no /v1/models); engine.urls must name servers that "
            "were started with `vllm serve`"
        )
    served = choose_model(client.url, models, config.model)
    card = served.card
    token_route, scale_out_abort, developer_abort, rpc = await asyncio.gather(
        _offers(client, TOKEN_ROUTE), _offers(client, "/inference/v1/abort_requests"),
        has_route(client, "/abort_requests"), has_route(client, "/collective_rpc"),
    )  # fmt: skip
    settings = _settings(info)
    model, context = served.name, card.get("max_model_len")
    label = label.get("weight_version") if isinstance(label, dict) else None
    is_paused = bool(isinstance(paused, dict) and paused.get("is_paused"))
    files = await asyncio.to_thread(model_files, card.get("root"))
    attachments, no_attachments, keeps_attachments = await _attachments(client, model, files, token_route)
    vocab = await _vocab_size(client, config, model, files)
    spans = label is not None and (token_route or (not is_paused and await _gives_spans(client, model)))
    kind = await _logprob_kind(client, config, model, settings, is_paused)
    eos = config.eos_token_ids if config.eos_token_ids is not None else eos_of(files)
    developer = developer_abort and rpc
    on_cpu = _on_cpu(settings, str(version.get("version", "")))
    processes = _processes(settings, metrics)
    copies, running = _count(settings, "data_parallel_size") or 1, _count(settings, "max_num_seqs")
    # seeds are dropped where they would kill the server
    chunks = bool(on_cpu) and settings.get("enable_chunked_prefill") is True
    tied = developer and on_cpu is not False and _tied(files)
    loads = developer and not (tied and on_cpu) and served.base is None
    abort_route = (
        # answers when it is done; the other one at once, and does it later
        "/abort_requests" if developer_abort
        else "/inference/v1/abort_requests" if scale_out_abort and token_route else ""
    )  # fmt: skip
    means = AbortMeans.BY_ID if abort_route else AbortMeans.CLOSE
    if processes > 1:
        means = AbortMeans.PAUSE if developer else AbortMeans.CLOSE
    if attachments and means is AbortMeans.CLOSE:
        attachments, no_attachments = (), "requests that cannot be aborted by id go to its completions route"
    open_route = token_route and means is not AbortMeans.CLOSE
    # a pause must reach all that serve the port, and the end of a response name the weights of its tokens
    one = processes == 1 and copies == 1
    keeps = (OnWeightUpdate.KEEP, OnWeightUpdate.RECOMPUTE) if one and developer and abort_route and spans else ()
    site, need = await _adapter_site(client, info, processes)
    if site is not None:
        site = replace(site, base=await asyncio.to_thread(base_shapes, card.get("root")))
    routing, experts_need = None, limits.EXPERTS_NEED
    if files and routing_of(files) is None and config.expert_shape is None:
        experts_need = NO_EXPERTS
    elif token_route and means is not AbortMeans.CLOSE and settings.get(ROUTED_EXPERTS) is not False:
        routing, experts_need = await _routing(client, config, model, files, paused=is_paused)
    found = (
        (is_paused, limits.paused(client.url)),
        (not (token_route or spans), limits.TOKEN_ROUTE_CLOSED),
        (label is None, limits.NO_LABELS),
        (not developer, limits.NO_DISK_UPDATES),
        (loads and label is not None and not _collective(settings), limits.NO_TRANSFERS),
        (not abort_route, limits.NO_ABORT_BY_ID),
        (processes > 1, limits.several_processes(processes, means)),
        (bool(no_attachments), limits.no_attachments(no_attachments, open_route)),
        (kind is LogprobKind.RAW, limits.RAW_LOGPROBS),
        (kind is LogprobKind.UNKNOWN, UNKNOWN_LOGPROBS),
        (eos is None, unknown_eos()),
        (routing is None and routing_of(files) is not None and not is_paused, limits.NO_EXPERTS),
        (copies > 1, limits.several_copies(copies)),
        (chunks, limits.CHUNKED_PREFILL),
        ("speculation" in settings, limits.speculation(settings.get("speculation"))),
        (tied, tied_embeddings() if on_cpu else tied_embeddings("If the server runs on a CPU, mind:")),
        *((True, limit) for limit in served.limits(takes_adapters=site is not None)),
    )
    return VllmFacts(
        url=client.url,
        model=model,
        asked=config.model,
        base=served.base,
        software=str(version.get("version", "unknown")),
        label=label,
        paused=is_paused,
        started_s=metrics.started_s,
        route=TOKEN_ROUTE if token_route else COMPLETIONS_ROUTE,
        developer_routes=developer,
        abort_route=abort_route,
        priorities=settings.get("policy") == "priority",
        routing=routing,
        keeps_attachments=keeps_attachments,
        capabilities=Capabilities(
            logprob_kind=kind,
            vocab_size=vocab,
            max_context=longest_request(client.url, context if isinstance(context, int) else None, config.max_len),
            eos_token_ids=eos or (),
            max_in_flight=least(None if running is None else running * copies, config.max_in_flight),
            collective=_collective(settings) if loads and label is not None else (),
            updates_from_disk=loads and label is not None,
            adapters=site,
            adapters_need="" if site is not None else need,
            extras=() if routing is None else (ROUTED_EXPERTS,),
            extras_need=experts_need,
            abort_means=means,
            version_spans=spans,
            in_flight_updates=keeps,
            remote=True,
            verifies_weights=label is not None,
            honours_seeds=not chunks,
            streams=config.max_token_loss is not None or means is AbortMeans.CLOSE,
            attachments=attachments,
            attachments_need=limits.no_attachments(no_attachments, open_route).remedy if no_attachments else "",
            bans=True,
            limits=tuple(limit for amiss, limit in found if amiss),
        ),
    )


def _collective(settings: dict[str, Any]) -> tuple[str, ...]:
    """The back-ends over which weights can be sent to the server: the one that it was started with, if april has it."""
    backend = BACKENDS.get(str(settings.get("transfers")))
    return () if backend is None else (backend,)


async def _offers(client: HttpClient, route: str) -> bool:
    """Return whether a scale-out route is there and open: a request without content tells."""
    if not await has_route(client, route):
        return False
    reply = await client.call("POST", route, b"{}", timeout_s=PROBE_S)
    if reply.status == 401:
        client.require_ok(reply, route)
    return reply.status not in (403, 404)


_NOT_KEPT = re.compile(r"\bFailed to apply\b.*\[None\]")
"""How a server without a cache of what its processor has made (--mm-processor-cache-gb 0) refuses a name."""


async def _attachments(
    client: HttpClient, model: str, files: list[dict[str, Any]], token_route: bool
) -> tuple[tuple[str, ...], str, bool]:
    """Kinds of attachments that the server takes; where its model takes some and it none, why; whether it keeps them.

    A name that it cannot know is refused: for its bytes, or because no image is taken. Routes without token ids leave
    images out without a word.
    """
    sees = any("vision_config" in file for file in files)
    if not token_route:
        return (), "it has no open route with token ids" if sees else "", False
    name = probe_id()
    body = {
        "request_id": name, "token_ids": [0], "model": model, "sampling_params": {"max_tokens": 1, "temperature": 0.0},
        "content_parts": [{"type": part, "url": None, "uuid": name} for part in PARTS.values()],
    }  # fmt: skip
    reply = await client.call("POST", TOKEN_ROUTE, body, timeout_s=PROBE_S)
    said = error_text(reply.body)
    if not reply.ok and misses_attachment(RequestRefused(said)):
        return tuple(PARTS), "", True
    if reply.status == 400 and _NOT_KEPT.search(said):
        return tuple(PARTS), "", False
    if reply.status == 400 and re.search(r"\bnot a multimodal model\b", said):
        return (), "", False
    why = "it does not look at content_parts" if reply.ok else f"it says {said!r}"
    return (), why if sees else "", False


_SETTINGS = (
    "logprobs_mode", "policy", "max_num_seqs", "enable_chunked_prefill", "data_parallel_size", "_api_process_count",
    "device", "device_type",
)  # fmt: skip


def _settings(info: Any) -> dict[str, Any]:
    """The settings of interest of ``/server_info``, flat; empty where the server has no such route."""
    found: dict[str, Any] = {}
    config = info.get("vllm_config") if isinstance(info, dict) else None
    for part in ("model_config", "scheduler_config", "parallel_config", "device_config"):
        values = config.get(part) if isinstance(config, dict) else None
        if isinstance(values, dict):
            found |= {name: values[name] for name in _SETTINGS if name in values}
    if isinstance(config, dict):  # where it stands has changed with 0.33
        parts = (config.get("model_config"), config.get("aux_output_config"))
        found[ROUTED_EXPERTS] = any(isinstance(p, dict) and bool(p.get(EXPERTS_SETTING)) for p in parts)
    transfers = config.get("weight_transfer_config") if isinstance(config, dict) else None
    if isinstance(transfers, dict):
        found["transfers"] = transfers.get("backend")
    speculative = config.get("speculative_config") if isinstance(config, dict) else None
    if speculative:
        method = speculative.get("method") if isinstance(speculative, dict) else None
        found["speculation"] = method if isinstance(method, str) else "of some kind"
    return found


async def _routing(
    client: HttpClient, config: VllmEngineConfig, model: str, files: list[dict[str, Any]], *, paused: bool
) -> tuple[Routing | None, str]:
    """The shape of the experts of a token, as a reply of one token has them; else what it needs for that."""
    said = routing_of(files)
    if paused:
        return None, "resume the server, as only a reply shows them"
    body = {
        "model": model, "token_ids": [3, 4, 5], "request_id": probe_id(),
        "sampling_params": {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True},
    }  # fmt: skip
    reply = await client.call("POST", TOKEN_ROUTE, body, timeout_s=PROBE_S)
    client.require_ok(reply, TOKEN_ROUTE)
    try:
        choices = read_json(reply.body, TokenReply).choices or []
        text = choices[0].routed_experts if choices else None
        rows = None if text is None else experts_of_npy(text)
    except (NotJson, WrongRows) as error:
        raise WireError(f"{client.url}{TOKEN_ROUTE} answers with {error}") from None
    if rows is None:
        return None, limits.EXPERTS_NEED
    shape = Routing(rows.shape[1], rows.shape[2], None if said is None else said.experts)
    if len(rows) != len(body["token_ids"]) or config.expert_shape not in (None, (shape.layers, shape.top_k)):
        raise WireError(
            f"{client.url}{TOKEN_ROUTE} was asked for 3 rows of experts and answered with {len(rows)}, of "
            f"{shape.layers} layers with {shape.top_k} experts per token; is engine.expert_shape right?"
        )
    return shape, ""


async def _adapter_site(client: HttpClient, info: Any, processes: int) -> tuple[AdapterSite | None, str]:
    """Where adapters go, by the settings or by a load that must fail; else what it needs for that."""
    if not await has_route(client, LOAD):
        return None, NEEDED
    if processes > 1:
        return None, "start the server with --api-server-count 1, as only one of its processes would have the adapter"
    config = info.get("vllm_config") if isinstance(info, dict) else None
    if isinstance(config, dict) and "lora_config" in config:
        lora = config["lora_config"]
        if not isinstance(lora, dict):
            return None, NEEDED
        return AdapterSite(max_rank=_count(lora, "max_lora_rank"), slots=_count(lora, "max_loras")), ""
    # no such directory: 404 where adapters are taken, 500 where they are not
    body = {"lora_name": probe_id(), "lora_path": f"/{probe_id()}"}
    reply = await client.call("POST", LOAD, body, timeout_s=PROBE_S)
    return (AdapterSite(), "") if reply.status == 404 else (None, NEEDED)


def _processes(settings: dict[str, Any], metrics: ServerMetrics) -> int:
    """API processes: said, or seen from metrics that are collected over several processes and know no start."""
    said = settings.get("_api_process_count")
    if isinstance(said, int) and said > 0:
        return said
    if metrics.load is not None and metrics.started_s is None:
        return max(2, int(settings.get("data_parallel_size") or 2))
    return 1


def _count(settings: dict[str, Any], name: str) -> int | None:
    value = settings.get(name)
    return value if isinstance(value, int) and value > 0 else None


def _on_cpu(settings: dict[str, Any], version: str) -> bool | None:
    """None: the server does not say, as its settings are not shown."""
    for name in ("device_type", "device"):
        if isinstance(settings.get(name), str):
            return bool(settings[name].partition(":")[0] == "cpu")
    return True if "cpu" in version else None


def _tied(files: list[dict[str, Any]]) -> bool:
    """Return whether the output layer is the embedding, as far as the model's configuration is here and says so."""
    return any(file.get("tie_word_embeddings") is True for file in files)


async def _vocab_size(client: HttpClient, config: VllmEngineConfig, model: str, files: list[dict[str, Any]]) -> int:
    """Take it from the configuration, out of the refusal of a request that can never run, or from the model's files."""
    if config.vocab_size is not None:
        return config.vocab_size
    body = {"model": model, "prompt": [0], "max_tokens": 1, "logit_bias": {str(NO_TOKEN): 1.0}}
    found = await vocabulary_in_refusal(client, COMPLETIONS_ROUTE, body, r"[Vv]ocabulary size: (\d+)")
    if found is not None:
        return found
    for file in files:
        size = file.get("vocab_size")
        if isinstance(size, int):
            return size
    raise ConfigError(
        f"{client.url} does not say how large its vocabulary is; set engine.vocab_size (vocab_size of the model's "
        "config.json)"
    )


# ---------------------------------------------------------------- of which distribution the log-probabilities are


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float]


class _Choice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _Logprobs
    weight_versions: list[Span] | None = None


class _OneToken(msgspec.Struct):
    choices: list[_Choice]


async def _logprob_kind(
    client: HttpClient, config: VllmEngineConfig, model: str, settings: dict[str, Any], paused: bool
) -> LogprobKind:
    """As configured, as the server's settings say, or seen from requests of one token."""
    if config.logprobs is not None:
        return LogprobKind(config.logprobs)
    if settings.get("logprobs_mode") in _MODES:
        return _MODES[settings["logprobs_mode"]]
    if paused:
        return LogprobKind.UNKNOWN  # a paused server answers no request

    async def ask(prompt: list[int], params: dict[str, Any]) -> tuple[int, float]:
        choice = await _one_token(client, model, prompt, params)
        return choice.token_ids[0], choice.logprobs.token_logprobs[0]

    return await kind_of_logprobs(ask)


async def _gives_spans(client: HttpClient, model: str) -> bool:
    """Return whether the completions route says which weights made which token (vLLM from 0.33 on)."""
    return bool((await _one_token(client, model, [3, 4, 5], {"temperature": 0.0, **ASK_SPANS})).weight_versions)


async def _one_token(client: HttpClient, model: str, prompt: list[int], params: dict[str, Any]) -> _Choice:
    """A response of one token with its log-probability."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": 1, "logprobs": 0, "return_token_ids": True, "top_k": 0,
        "request_id": probe_id(), **params,
    }  # fmt: skip
    reply: Reply = await client.call("POST", COMPLETIONS_ROUTE, body, timeout_s=PROBE_S)
    client.require_ok(reply, COMPLETIONS_ROUTE)
    try:
        choice: _Choice
        (choice,) = read_json(reply.body, _OneToken).choices
        (_,), (_,) = choice.logprobs.token_logprobs, choice.token_ids
    except ValueError as error:
        raise EngineError(
            f"{client.url}{COMPLETIONS_ROUTE} was asked for one token with its id and log-probability and answered "
            f"otherwise: {clean(error)}; april needs a vLLM that knows return_token_ids (0.11 or later)"
        ) from None
    return choice
