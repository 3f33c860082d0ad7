"""What one vLLM server can do: asked by GET calls, by calls that it must refuse, and by requests of one token."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from april.config.engines import VllmEngineConfig
from april.core.sampling import LogprobKind
from april.engines.http.http_client import HttpClient, Reply
from april.engines.http.metrics_page import ServerMetrics, read_metrics
from april.engines.http.server_json import read_json
from april.engines.http.server_probe import (
    NARROW,
    NO_EOS,
    NO_TOKEN,
    PROBE_S,
    UNKNOWN_KIND,
    eos_of,
    get_json,
    has_route,
    kind_seen,
    least,
    model_files,
    probe_id,
)
from april.engines.http.wire_errors import error_text
from april.engines.protocol import AbortMeans, Capabilities
from april.engines.vllm.wire import COMPLETIONS_ROUTE, TOKEN_ROUTE
from april.errors import ConfigError, EngineError
from april.server_text import said
from april.server_text import said as shown

_MODES = {
    "raw_logprobs": LogprobKind.RAW,
    "processed_logprobs": LogprobKind.PROCESSED,
}


@dataclass(frozen=True, slots=True)
class VllmOffer:
    """What a server offers; ``april doctor`` prints it."""

    url: str
    version: str
    model: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    token_route: bool
    """``/inference/v1/generate``: token ids in and out, with version spans."""
    developer_routes: bool
    abort_route: str
    """Where requests are aborted by id; empty: nowhere."""
    processes: int
    """API processes behind the port, as far as can be told; an abort reaches one of them."""
    label: str | None
    """Of the present weights; None: the server has no labels."""
    spans: bool
    """Replies say which weights made which token."""
    updates_from_disk: bool
    logprob_kind: LogprobKind
    seeds: bool
    """Requests may have seeds."""
    priorities: bool
    """Requests are scheduled by priority."""
    max_running: int | None
    """Requests decoded at the same time, if the server says."""
    paused: bool
    started_s: float | None
    """When its process began, seconds since 1970, if it says."""
    missing: tuple[str, ...]
    """What is not as it should be, what that means, and what to do; one sentence each."""

    @property
    def route(self) -> str:
        """Where requests go."""
        return TOKEN_ROUTE if self.token_route else COMPLETIONS_ROUTE

    @property
    def abort_means(self) -> AbortMeans:
        """The surest that this server has."""
        if self.processes > 1:
            return AbortMeans.PAUSE if self.developer_routes else AbortMeans.CLOSE
        return AbortMeans.BY_ID if self.abort_route else AbortMeans.CLOSE

    def capabilities(self, config: VllmEngineConfig) -> Capabilities:
        """For the layers above."""
        return Capabilities(
            self.logprob_kind,
            self.vocab_size,
            self.max_model_len,
            self.eos_token_ids,
            least(self.max_running, config.max_in_flight),
            updates_from_disk=self.updates_from_disk,
            abort_means=self.abort_means,
            version_spans=self.spans,
            remote=True,
            verifies_weights=self.label is not None,
            honours_seeds=self.seeds,
            streams=config.max_token_loss is not None or self.abort_means is AbortMeans.CLOSE,
            notes=self.missing,
        )


async def probe_vllm(client: HttpClient, config: VllmEngineConfig) -> VllmOffer:
    """Ask a server what it can do; nothing that runs there is disturbed.

    Raises:
        ConfigError: it is no vLLM server, or does not say what april must know and the configuration does not either.
        EngineError: it could not be asked.
    """
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
    card = _model_card(client, models, config.model)
    token_route, scale_out_abort, developer_abort, rpc = await asyncio.gather(
        _offers(client, TOKEN_ROUTE), _offers(client, "/inference/v1/abort_requests"),
        has_route(client, "/abort_requests"), has_route(client, "/collective_rpc"),
    )  # fmt: skip
    settings = _settings(info)
    is_paused = bool(isinstance(paused, dict) and paused.get("is_paused"))
    files = await asyncio.to_thread(model_files, card.get("root"))
    vocab = await _vocab_size(client, config, str(card["id"]), files)
    kind = await _logprob_kind(client, config, str(card["id"]), settings, is_paused)
    eos = config.eos_token_ids if config.eos_token_ids is not None else eos_of(files)
    name = label.get("weight_version") if isinstance(label, dict) else None
    developer = developer_abort and rpc
    on_cpu = _on_cpu(settings, str(version.get("version", "")))
    processes = _processes(settings, metrics)
    copies, running = _count(settings, "data_parallel_size") or 1, _count(settings, "max_num_seqs")
    # seeds are dropped where they would kill the server
    chunks = bool(on_cpu) and settings.get("enable_chunked_prefill") is True
    tied = developer and on_cpu is not False and _tied(files)
    spans = token_route and name is not None
    abort_route = (
        # answers when it is done; the other one at once, and does it later
        "/abort_requests" if developer_abort
        else "/inference/v1/abort_requests" if scale_out_abort and token_route else ""
    )  # fmt: skip
    return VllmOffer(
        url=client.url,
        version=str(version.get("version", "unknown")),
        model=str(card["id"]),
        max_model_len=_context(client, config, card),
        vocab_size=vocab,
        eos_token_ids=eos or (),
        token_route=token_route,
        developer_routes=developer,
        abort_route=abort_route,
        processes=processes,
        label=name,
        spans=spans,
        updates_from_disk=developer and name is not None and not (tied and on_cpu),
        logprob_kind=kind,
        seeds=not chunks,
        priorities=settings.get("policy") == "priority",
        max_running=None if running is None else running * copies,
        paused=is_paused,
        started_s=metrics.started_s,
        missing=_missing(
            client.url, token_route=token_route, developer=developer, abort=bool(abort_route), processes=processes,
            kind=kind, eos=eos, paused=is_paused, spans=spans, tied=tied, on_cpu=bool(on_cpu), chunks=chunks,
            copies=copies, speculation=settings.get("speculation", ""),
        ),
    )  # fmt: skip


async def _offers(client: HttpClient, route: str) -> bool:
    """Whether a scale-out route is there and open: a request without content tells."""
    if not await has_route(client, route):
        return False
    reply = await client.call("POST", route, b"{}", timeout_s=PROBE_S)
    if reply.status == 401:
        client.require_ok(reply, route)
    return reply.status not in (403, 404)


def _model_card(client: HttpClient, models: dict[str, Any], name: str | None) -> dict[str, Any]:
    cards = [c for c in models["data"] if isinstance(c, dict) and "id" in c]
    # adapters name the model that they belong to
    found = [c for c in cards if (c["id"] == name if name is not None else not c.get("parent"))]
    if not found or (name is None and len({c.get("root") for c in found}) > 1):
        names = said(", ".join(str(c["id"]) for c in cards[:20])) or "none"
        wrong = f"has no model {name!r}" if name is not None else "has several models"
        raise ConfigError(f"{client.url} {wrong}; it serves: {names}; set engine.model to one of them")
    return dict(found[0])


def _context(client: HttpClient, config: VllmEngineConfig, card: dict[str, Any]) -> int:
    limits = [n for n in (card.get("max_model_len"), config.max_len) if isinstance(n, int)]
    if not limits:
        raise ConfigError(f"{client.url} does not say how long a request may be; set engine.max_len")
    return min(limits)


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
    speculative = config.get("speculative_config") if isinstance(config, dict) else None
    if speculative:
        method = speculative.get("method") if isinstance(speculative, dict) else None
        found["speculation"] = method if isinstance(method, str) else "of some kind"
    return found


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
    """Whether the model's output layer is its embedding, as far as its configuration is on this machine and says so."""
    return any(file.get("tie_word_embeddings") is True for file in files)


async def _vocab_size(client: HttpClient, config: VllmEngineConfig, model: str, files: list[dict[str, Any]]) -> int:
    """From the configuration, out of the refusal of a request that can never run, or from the model's files."""
    if config.vocab_size is not None:
        return config.vocab_size
    body = {"model": model, "prompt": [0], "max_tokens": 1, "logit_bias": {str(NO_TOKEN): 1.0}}
    reply = await client.call("POST", COMPLETIONS_ROUTE, body, timeout_s=PROBE_S)
    found = re.search(r"[Vv]ocabulary size: (\d+)", error_text(reply.body)) if not reply.ok else None
    if found is not None:
        return int(found[1])
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
    for start in range(3):
        prompt = [start * 7 + i for i in (3, 4, 5)]
        greedy = await _one_token(client, model, prompt, {"temperature": 0.0})
        kind = kind_seen(greedy, await _one_token(client, model, prompt, NARROW))
        if kind is not LogprobKind.UNKNOWN:
            return kind
    return LogprobKind.UNKNOWN


async def _one_token(client: HttpClient, model: str, prompt: list[int], params: dict[str, Any]) -> tuple[int, float]:
    """The token and its log-probability."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": 1, "logprobs": 0, "return_token_ids": True, "top_k": 0,
        "request_id": probe_id(), **params,
    }  # fmt: skip
    reply: Reply = await client.call("POST", COMPLETIONS_ROUTE, body, timeout_s=PROBE_S)
    client.require_ok(reply, COMPLETIONS_ROUTE)
    try:
        (choice,) = read_json(reply.body, _OneToken).choices
        (logprob,), (token,) = choice.logprobs.token_logprobs, choice.token_ids
    except ValueError as error:
        raise EngineError(
            f"{client.url}{COMPLETIONS_ROUTE} was asked for one token with its id and log-probability and answered "
            f"otherwise: {said(error)}; april needs a vLLM that knows return_token_ids (0.11 or later)"
        ) from None
    return token, logprob


def _missing(
    url: str, *, token_route: bool, developer: bool, abort: bool, processes: int, kind: LogprobKind,
    eos: tuple[int, ...] | None, paused: bool, spans: bool, tied: bool, on_cpu: bool, chunks: bool, copies: int,
    speculation: str,
) -> tuple[str, ...]:  # fmt: skip
    """What is not as it should be, in plain sentences."""
    said = []
    if paused:
        said.append(f"{url} is paused: no request runs until somebody resumes it (POST /resume).")
    if not token_route:
        said.append(
            "The route with token ids and version spans is closed: april uses /v1/completions, where every token gets "
            "the version at submission and no request lives through a weight update; start the server with "
            "--enable-scale-out."
        )
    elif not spans:
        said.append(
            "The server's weights have no label: every token gets the version at submission, new weights are "
            "unverified, and a restart of the server is seen only by the time at which its process began; set "
            "VLLM_SERVER_DEV_MODE=1 at the server."
        )
    if not developer:
        said.append(
            "Weights cannot be loaded from a directory, and the cache cannot be emptied, through april: the trainer "
            "has to do both; set VLLM_SERVER_DEV_MODE=1 at the server, and bind it to a private address, as its key "
            "does not guard those routes."
        )
    if not abort:
        said.append(
            "Requests cannot be aborted by id: april streams every token and closes the stream, and tokens that were "
            "made and not sent yet are lost; start the server with --enable-scale-out, or set VLLM_SERVER_DEV_MODE=1."
        )
    if processes > 1:
        how = (
            "by pausing the whole server, which ends the requests of others too" if developer
            else "by closing streams, which loses tokens that were not sent yet"
        )  # fmt: skip
        said.append(
            f"There are {processes} or more API processes behind the port, and an abort by id reaches only one of "
            f"them: april ends requests {how}; start the server with --api-server-count 1, or one server per engine."
        )
    if kind is LogprobKind.RAW:
        said.append(
            "Log-probabilities are those of temperature 1, whatever the temperature: right at temperature 1 only; "
            "start the server with --logprobs-mode processed_logprobs."
        )
    elif kind is LogprobKind.UNKNOWN:
        said.append(UNKNOWN_KIND)
    if eos is None:
        said.append(NO_EOS + "to be sure that no response is continued behind its end.")
    if copies > 1:
        said.append(
            f"The server runs {copies} data-parallel copies: aborts and weights were right with two of them behind one "
            "API process on a CPU, nothing else was tried; start one server per copy, and name all of them."
        )
    if chunks:
        said.append(
            "The server runs on a CPU with chunked prefill: it dies of a request with a seed whose prompt it reads in "
            "chunks, so april sends no seeds, and runs do not repeat; start it with --no-enable-chunked-prefill and "
            "with --max-num-batched-tokens of at least its context."
        )
    if speculation:
        said.append(
            f"The server speculates ({shown(speculation)}): on a CPU n-gram speculation gave wrong tokens at "
            "temperatures above 0, with log-probabilities of -9999, and nothing else was tried; start it without "
            "--speculative-config."
        )
    if tied:
        said.append(
            f"{'The server runs on a CPU' if on_cpu else 'If the server runs on a CPU, mind'}: vLLM does not reload a "
            "model with tied embeddings rightly there (log-probabilities were wrong by 0.35 to 1.2 nats after an "
            "update of its weights); save the model with tie_word_embeddings false, or do not update its weights."
        )
    return tuple(said)
