"""The abilities of one SGLang server, asked without disturbing it: a few GET calls and two requests of one token.

Those of several behind an sglang-router are what all have; its list of workers must be the configured one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from april.config.engines import SglangEngineConfig
from april.core.sampling import LogprobKind
from april.engine_limits import UNKNOWN_LOGPROBS, Limit, LimitCode, no_experts, raw_logprobs, unknown_eos
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
from april.engines.http.server_process import while_paused
from april.engines.http.token_rows import NO_EXPERTS, Routing, WrongRows, experts_of_numbers, routing_of
from april.engines.http.wire import NotJson, error_text, read_json
from april.engines.protocol import ROUTED_EXPERTS, AdapterSite, Capabilities
from april.engines.sglang.wire import FIELDS
from april.engines.sglang.wire import Reply as GenerateReply
from april.engines.weight_routes import GLOO, NCCL
from april.errors import ConfigError, EngineError, WireError

ENDS_OF_TURNS = ("<|eom_id|>", "<|content_model_end_sampling|>", "<|ifm|im_end|>")
"""Added tokens at which SGLang stops though no file of the model says so (0.5.19: the first two; 0.5.23: all)."""
TRANSFER_ROUTES = ("/init_weights_update_group", "/update_weights_from_distributed", "/begin_weight_update")
"""The routes by which weights can be sent from the trainer's process; the last one is newer (0.5.23)."""
ADAPTERS_NEED = (
    "start the server with --enable-lora, --max-lora-rank of at least the adapter's rank, and --lora-target-modules"
)
EXPERTS_NEED = "start the server with --enable-return-routed-experts"
PAUSE_S = 3.0
"""Longest wait for the answer to a pause that a server must refuse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangFacts(ServerFacts):
    """The facts about an SGLang server."""

    incremental: bool
    """Events of a stream have the new tokens only."""
    stream_interval: bool
    """A request can say after how many tokens it wants an event."""
    pause_modes: tuple[str, ...]
    loads: bool
    """True if the server tells its load."""
    adapter: str | None = None
    """That which is trained."""
    routing: Routing | None = None
    """The shape of the experts that it gives with tokens; None: it gives none."""


async def workers_of(client: HttpClient) -> int:
    """Ask a server how many processes hold a part of its weights; raises EngineError if it does not answer."""
    info = await client.json("GET", "/server_info", retry=True)
    return (_number(info, "tp_size") if isinstance(info, dict) else None) or 1


async def probe_sglang(client: HttpClient, config: SglangEngineConfig) -> SglangFacts:
    """Ask a server (a worker, not the router) what it can do; raises ConfigError or EngineError."""
    model, server, models, loads, ready = await asyncio.gather(
        get_json(client, "/model_info", "/get_model_info"),
        get_json(client, "/server_info", "/get_server_info"),
        get_json(client, "/v1/models"),
        get_json(client, "/v1/loads?include=core"),
        client.call("GET", "/ready", timeout_s=PROBE_S, retry=True),
    )
    if not isinstance(model, dict) or "model_path" not in model or not isinstance(server, dict):
        raise ConfigError(
            f"{client.url} is no SGLang server (it has no /model_info); engine.urls must name SGLang servers, "
            "not a router and not another engine"
        )
    served = None if models is None and config.model is None else choose_model(client.url, models, config.model)
    adapter = None if served is None or served.base is None else served.name
    paused = ready.status == 503
    vocab, disk, labels = await asyncio.gather(
        _vocab_size(client, config),
        has_route(client, "/update_weights_from_disk"),
        has_route(client, "/update_weight_version"),
    )
    transfers = await asyncio.gather(*(has_route(client, route) for route in TRANSFER_ROUTES))
    # by itself: nothing else that fails may leave it behind in the middle
    modes = await _pause_modes(client, loads is not None, paused=paused)
    files = await asyncio.to_thread(model_files, model["model_path"], model.get("tokenizer_path"), ENDS_OF_TURNS)
    probe = _Replies() if paused else await _one_token(client, vocab)
    routing, experts_need = await _routing(client, config, server, files, vocab, paused=paused)
    kind = probe.kind if config.logprobs is None else LogprobKind(config.logprobs)
    label = model.get("weight_version")
    eos = config.eos_token_ids if config.eos_token_ids is not None else eos_of(files)
    incremental = bool(server.get("incremental_streaming_output", server.get("stream_output", False)))
    deterministic = bool(server.get("enable_deterministic_inference"))
    copies = int(server.get("dp_size") or 1)
    stages = int(server.get("pp_size") or 1)
    sent = all(transfers) and "retract" in modes and copies == 1 and stages == 1 and adapter is None
    sees = bool(model.get("has_image_understanding", any("vision_config" in file for file in files)))
    named = sees and await _names_attachments(client)
    site, need = await _adapter_site(client, server, model["model_path"], copies)
    limits = (
        (paused, _PAUSED),
        (not probe.spans and not paused, _NO_VERSION_SPANS),
        (not labels, _NO_LABELS),
        (not incremental, _CUMULATIVE_STREAMS),
        (not probe.stream_interval and not paused, _NO_STREAM_INTERVAL),
        ("retract" not in modes, _UPDATES_WAIT),
        (not disk, _NO_DISK_UPDATES),
        (kind is LogprobKind.RAW, _RAW_LOGPROBS),
        (kind is LogprobKind.UNKNOWN, UNKNOWN_LOGPROBS),
        (not deterministic, _NO_SEEDS),
        (routing is None and routing_of(files) is not None and not paused, _NO_EXPERTS),
        (loads is None, _NO_LOAD),
        (eos is None, unknown_eos()),
        (sees and not named, _NO_ATTACHMENTS),
        (bool(server.get("speculative_algorithm")), _SPECULATION),
        (copies > 1, _several_copies(copies)),
        *((True, limit) for limit in (() if served is None else served.limits(takes_adapters=site is not None))),
    )
    return SglangFacts(
        url=client.url,
        model=adapter or str(model["model_path"]),
        asked=config.model,
        adapter=adapter,
        base=None if served is None else served.base,
        software=str(server.get("version", "unknown")),
        label=str(label) if label is not None and labels else None,
        paused=paused,
        incremental=incremental,
        stream_interval=probe.stream_interval,
        pause_modes=modes,
        loads=loads is not None,
        routing=routing,
        capabilities=Capabilities(
            logprob_kind=kind,
            vocab_size=vocab,
            max_context=longest_request(client.url, _context(server, models), config.max_len),
            eos_token_ids=eos or (),
            max_in_flight=least(_number(server, "max_running_requests"), config.max_in_flight),
            updates_from_disk=disk and adapter is None,
            collective=_backends(server) if sent else (),
            adapters=site,
            adapters_need=need,
            extras=() if routing is None else (ROUTED_EXPERTS,),
            extras_need=experts_need,
            version_spans=probe.spans and labels,
            remote=True,
            # events that repeat everything cost more than what they save
            streams=incremental or config.max_token_loss is not None,
            verifies_weights=label is not None and labels,
            honours_seeds=deterministic,
            attachments=tuple(FIELDS) if named else (),
            attachments_need=_NO_ATTACHMENTS.remedy if sees and not named else "",
            bans=True,
            limits=tuple(limit for amiss, limit in limits if amiss),
        ),
    )


def _backends(server: dict[str, Any]) -> tuple[str, ...]:
    """Those over which its workers can be in a group: what torch has for their devices."""
    device = str(server.get("device") or "cuda")
    return (GLOO,) if device == "cpu" else (NCCL, GLOO) if device == "cuda" else ()


async def _routing(
    client: HttpClient, config: SglangEngineConfig, server: dict[str, Any], files: list[dict[str, Any]], vocab: int, *,
    paused: bool,
) -> tuple[Routing | None, str]:  # fmt: skip
    """The shape of the experts of a token, if the server gives them as the model's files, or the settings, say."""
    said = routing_of(files)
    if said is None and files and config.expert_shape is None:
        return None, NO_EXPERTS
    if not server.get("enable_return_routed_experts"):
        return None, EXPERTS_NEED
    if config.expert_shape is not None:
        said = Routing(*config.expert_shape, None if said is None else said.experts)
    if said is None:
        return None, (
            "set engine.expert_shape to its model's layers and experts per token (num_hidden_layers and "
            "num_experts_per_tok of its config.json, which is not on this machine)"
        )
    if paused:
        return None, "continue the server, as only a reply shows them"
    prompt = [i % vocab for i in (3, 4, 5)]
    answer = await _token(client, prompt, {"temperature": 0.0}, return_routed_experts=True)
    if isinstance(answer, Reply):
        raise EngineError(f"{client.url}/generate answered {answer.status}: {error_text(answer.body)}")
    try:
        rows = experts_of_numbers(answer.meta_info.routed_experts or "", said)
    except WrongRows as wrong:
        raise WireError(f"{client.url}/generate answers with {wrong}; is engine.expert_shape right?") from None
    if len(rows) != len(prompt):
        raise WireError(
            f"{client.url}/generate was asked for the experts of {len(prompt)} tokens and answered with {len(rows)} "
            f"rows of {said.layers} layers with {said.top_k} experts per token; is engine.expert_shape right?"
        )
    return said, ""


async def _names_attachments(client: HttpClient) -> bool:
    """Return whether a request can name its images: its description of itself has the field."""
    reply = await client.call("GET", "/openapi.json", timeout_s=PROBE_S, retry=True)
    return reply.ok and b'"mm_hashes"' in reply.body


async def _adapter_site(
    client: HttpClient, server: dict[str, Any], root: Any, copies: int
) -> tuple[AdapterSite | None, str]:
    """Where adapters go, as the server says; else what it needs for that."""
    if not server.get("enable_lora") or not await has_route(client, "/load_lora_adapter"):
        return None, ADAPTERS_NEED
    if copies > 1:
        return None, "start one server per copy, each with --dp-size 1, as copies share no adapters"
    rank, slots = _number(server, "max_lora_rank"), _number(server, "max_loras_per_batch")
    base = await asyncio.to_thread(base_shapes, root)
    return AdapterSite(max_rank=rank, slots=slots, scales=False, base=base), ""


async def _pause_modes(client: HttpClient, recent: bool, *, paused: bool) -> tuple[str, ...]:
    """Return the modes that the server names when it is asked for one that does not exist.

    Unless it refuses that, it may have paused after all, and is continued; one that somebody else has ``paused`` is
    not.
    """
    if not recent or not await has_route(client, "/pause_generation"):
        return ()  # a server so old that it might not look at the mode is not asked
    said: list[str] = []

    async def ask() -> None:
        reply = await client.call("POST", "/pause_generation", {"mode": "?"}, timeout_s=PAUSE_S)
        if reply.status in (400, 422):
            said.append(reply.body.decode("utf-8", "replace"))

    async def undo() -> None:
        if not said and not paused:
            await client.call("POST", "/continue_generation", {}, timeout_s=PROBE_S, retry=True)

    async with while_paused(ask, undo):
        pass
    return tuple(mode for mode in ("abort", "retract", "in_place") if any(f"'{mode}'" in text for text in said))


async def _vocab_size(client: HttpClient, config: SglangEngineConfig) -> int:
    """Take it from the configuration, or out of the refusal of a request that can never be run."""
    if config.vocab_size is not None:
        return config.vocab_size
    params = {
        "max_new_tokens": 1,
        "logit_bias": {str(NO_TOKEN): 1.0},
        # two grammars are refused in any case, should the server not look at the bias
        "json_schema": "{}",
        "regex": "a",
    }
    body = {"rid": probe_id(), "input_ids": [0], "sampling_params": params}
    found = await vocabulary_in_refusal(client, "/generate", body, r"in \[0, (\d+)\]")
    if found is None:
        raise ConfigError(
            f"{client.url} does not say how large its vocabulary is, and an id outside of it would kill the server; "
            "set engine.vocab_size (vocab_size of the model's config.json)"
        )
    return found + 1


def _context(server: dict[str, Any], models: Any) -> int | None:
    """The server refuses inputs a few tokens short of its context, and stops two tokens short of it without a word.

    So it does short of its memory, by a page for what the input leaves of its last one, and by one more.
    """
    longest, memory = _number(server, "max_req_input_len"), _number(server, "max_total_num_tokens")
    if longest is not None and memory is not None and longest < memory:  # if not, memory is that of one shard
        longest = min(longest, memory - 2 * (_number(server, "page_size") or 1))
    if longest is None:
        try:
            longest = int(server.get("context_length") or models["data"][0]["max_model_len"]) - 6
        except (KeyError, IndexError, TypeError, ValueError):
            return None
    return longest


def _number(values: dict[str, Any], key: str) -> int | None:
    value = values.get(key)
    return value if isinstance(value, int) and value > 0 else None


# ---------------------------------------------------------------- requests of one token


@dataclass(slots=True)
class _Replies:
    """The facts that only a reply shows; a paused server gives none."""

    spans: bool = False
    stream_interval: bool = False
    kind: LogprobKind = LogprobKind.UNKNOWN


async def _one_token(client: HttpClient, vocab: int) -> _Replies:
    """Spans, the stream interval, and of which distribution the log-probabilities are."""
    found = _Replies(stream_interval=True)

    async def ask(prompt: list[int], params: dict[str, float]) -> tuple[int, float]:
        ids = [i % vocab for i in prompt]
        answer = await _token(client, ids, params | ({"stream_interval": 1} if found.stream_interval else {}))
        if isinstance(answer, Reply) and found.stream_interval:
            found.stream_interval = False  # an unknown setting is refused
            answer = await _token(client, ids, params)
        if isinstance(answer, Reply):
            raise EngineError(f"{client.url}/generate answered {answer.status}: {error_text(answer.body)}")
        meta = answer.meta_info
        assert meta is not None
        found.spans = bool(meta.weight_versions)
        (only,) = meta.output_token_logprobs
        return only.token, only.logprob

    found.kind = await kind_of_logprobs(ask)
    return found


async def _token(client: HttpClient, prompt: list[int], params: dict[str, Any], **asked: Any) -> Any:
    """The answer to a request of one token; a :class:`Reply` if it was refused."""
    body = {
        "rid": probe_id(),
        "input_ids": prompt,
        "return_logprob": True,
        "sampling_params": {"max_new_tokens": 1, "top_k": -1, "ignore_eos": True, **params},
        **asked,
    }
    reply = await client.call("POST", "/generate", body, timeout_s=PROBE_S)
    if reply.status == 400:
        return reply
    client.require_ok(reply, "/generate")
    try:
        answer = read_json(reply.body, GenerateReply)
    except NotJson as error:
        raise WireError(f"{client.url}/generate answered what april cannot read: {error}") from None
    if answer.meta_info is None or len(answer.output_ids) != 1 or len(answer.meta_info.output_token_logprobs) != 1:
        raise WireError(
            f"{client.url}/generate was asked for one token with its log-probability and answered otherwise: "
            f"{len(answer.output_ids)} tokens; april needs return_logprob"
        )
    return answer


# ---------------------------------------------------------------- what it cannot do

_PAUSED = Limit(
    LimitCode.PAUSED,
    "The server is paused: no request runs until somebody continues it (POST /continue_generation with the body {}); "
    "what can only be learned from a reply is unknown",
)
_NO_VERSION_SPANS = Limit(
    LimitCode.NO_VERSION_SPANS,
    "Replies do not say which weights made which token (SGLang below 0.5.20): every token gets the version at "
    "submission, and no request lives through a weight update",
    "upgrade to 0.5.20 or later",
)
_NO_LABELS = Limit(
    LimitCode.NO_LABELS,
    "Versions cannot be set (/update_weight_version is missing): new weights are unverified, and april cannot see that "
    "the server was restarted with other weights",
    "upgrade SGLang",
)
_CUMULATIVE_STREAMS = Limit(
    LimitCode.CUMULATIVE_STREAMS,
    "Streams repeat the whole response in every event, which costs time that grows with the square of its length: "
    "april asks for one answer at the end instead, and a request that is put back for want of memory loses up to 49 "
    "tokens at an abort",
    "start the server with --incremental-streaming-output",
    ("--incremental-streaming-output",),
)
_NO_STREAM_INTERVAL = Limit(
    LimitCode.NO_STREAM_INTERVAL,
    "A request cannot say how often it wants tokens (sampling_params.stream_interval is refused)",
    "set --stream-interval at the server instead",
    ("--stream-interval",),
)
_UPDATES_WAIT = Limit(
    LimitCode.UPDATES_WAIT,
    "The server has no pause mode retract: a weight update waits for the requests of other clients to end",
)
_NO_DISK_UPDATES = Limit(
    LimitCode.NO_DISK_UPDATES,
    "Weights cannot be loaded from a directory (/update_weights_from_disk is missing): the trainer has to transfer "
    "them itself",
    "upgrade SGLang",
)
_RAW_LOGPROBS = raw_logprobs("start the server without SGLANG_RETURN_ORIGINAL_LOGPROB")
_NO_SEEDS = Limit(
    LimitCode.NO_SEEDS,
    "Seeds do nothing: two requests with the same seed differ",
    "start the server with --enable-deterministic-inference if runs must repeat",
    ("--enable-deterministic-inference",),
)
_NO_LOAD = Limit(
    LimitCode.NO_LOAD, "The server does not tell its load (/v1/loads is missing, SGLang below 0.5.9)", "upgrade SGLang"
)
_NO_EXPERTS = no_experts(EXPERTS_NEED, "--enable-return-routed-experts")
_NO_ATTACHMENTS = Limit(
    LimitCode.NO_ATTACHMENTS,
    "The model takes images, and the server none from april: its requests cannot name them (/openapi.json has no "
    "mm_hashes), and after a weight update it would answer with what the old weights have seen in them",
    "upgrade SGLang",
)
_SPECULATION = Limit(
    LimitCode.SPECULATION,
    "The server speculates (speculative_algorithm): whether its log-probabilities are those of the tokens then was not "
    "tried",
    "start the server without --speculative-algorithm",
)


def _several_copies(copies: int) -> Limit:
    return Limit(
        LimitCode.SEVERAL_COPIES,
        f"The server runs {copies} data-parallel copies, with which april was not tried",
        "start one server per copy, each with --dp-size 1, and name all of them",
        ("--dp-size 1",),
    )
