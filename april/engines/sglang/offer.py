"""What one SGLang server can do, asked without disturbing it: a few GET calls and two requests of one token."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Any

from april.config.engines import SglangEngineConfig
from april.core.sampling import LogprobKind
from april.engines.http.http_client import HttpClient, Reply
from april.engines.http.server_json import NotJson, read_json
from april.engines.http.server_pause import while_paused
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
from april.engines.protocol import Capabilities
from april.engines.sglang.wire import Reply as GenerateReply
from april.errors import ConfigError, EngineError, WireError

ENDS_OF_TURNS = ("<|eom_id|>", "<|content_model_end_sampling|>", "<|ifm|im_end|>")
"""Added tokens at which SGLang stops though no file of the model says so (0.5.19: the first two; 0.5.23: all)."""
PAUSE_S = 3.0
"""Longest wait for the answer to a pause that a server must refuse."""


@dataclass(frozen=True, slots=True)
class SglangOffer:
    """What a server offers; ``april doctor`` prints it."""

    url: str
    version: str
    model: str
    context_length: int
    """Longest prompt plus response whose budget the server keeps to the token."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    weight_version: str | None
    """Label of the present weights; None: the server has no labels."""
    spans: bool
    """Replies say which weights made which token."""
    incremental: bool
    """Events of a stream have the new tokens only."""
    stream_interval: bool
    """A request can say after how many tokens it wants an event."""
    pause_modes: tuple[str, ...]
    updates_from_disk: bool
    logprob_kind: LogprobKind
    deterministic: bool
    """Seeds are honoured."""
    loads: bool
    """It tells its load."""
    max_running: int | None
    """Requests decoded at the same time."""
    max_total_tokens: int | None
    """Tokens of key-value memory."""
    data_parallel: int
    paused: bool
    missing: tuple[str, ...]
    """What is not as it should be, what that means, and what to do; one sentence each."""

    def capabilities(self, config: SglangEngineConfig) -> Capabilities:
        """For the layers above."""
        return Capabilities(
            self.logprob_kind,
            self.vocab_size,
            self.context_length,
            self.eos_token_ids,
            least(self.max_running, config.max_in_flight),
            updates_from_disk=self.updates_from_disk,
            version_spans=self.spans,
            remote=True,
            # events that repeat everything cost more than what they save
            streams=self.incremental or config.max_token_loss is not None,
            verifies_weights=self.weight_version is not None,
            honours_seeds=self.deterministic,
            notes=self.missing,
        )


async def probe_sglang(client: HttpClient, config: SglangEngineConfig) -> SglangOffer:
    """Ask a server (a worker, not the router) what it can do.

    Raises:
        ConfigError: it is no SGLang server, or does not say what april must know and the configuration does not either.
        EngineError: it could not be asked.
    """
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
    paused = ready.status == 503
    vocab, disk, labels = await asyncio.gather(
        _vocab_size(client, config),
        has_route(client, "/update_weights_from_disk"),
        has_route(client, "/update_weight_version"),
    )
    # by itself: nothing else that fails may leave it behind in the middle
    modes = await _pause_modes(client, loads is not None, paused=paused)
    files = await asyncio.to_thread(model_files, model["model_path"], model.get("tokenizer_path"), ENDS_OF_TURNS)
    context = _context(client, config, server, models)
    probe = await _one_token(client, config, vocab) if not paused else _unasked(config)
    version = str(server.get("version", "unknown"))
    label = model.get("weight_version")
    eos = config.eos_token_ids if config.eos_token_ids is not None else eos_of(files)
    incremental = bool(server.get("incremental_streaming_output", server.get("stream_output", False)))
    deterministic = bool(server.get("enable_deterministic_inference"))
    missing = _missing(
        spans=probe.spans, labels=labels, incremental=incremental, interval=probe.stream_interval, modes=modes,
        disk=disk, kind=probe.kind, deterministic=deterministic, loads=loads is not None, eos=eos, paused=paused,
        data_parallel=int(server.get("dp_size") or 1), speculation=bool(server.get("speculative_algorithm")),
    )  # fmt: skip
    return SglangOffer(
        url=client.url,
        version=version,
        model=str(model["model_path"]),
        context_length=context,
        vocab_size=vocab,
        eos_token_ids=eos or (),
        weight_version=str(label) if label is not None and labels else None,
        spans=probe.spans and labels,
        incremental=incremental,
        stream_interval=probe.stream_interval,
        pause_modes=modes,
        updates_from_disk=disk,
        logprob_kind=probe.kind,
        deterministic=deterministic,
        loads=loads is not None,
        max_running=_number(server, "max_running_requests"),
        max_total_tokens=_number(server, "max_total_num_tokens"),
        data_parallel=int(server.get("dp_size") or 1),
        paused=paused,
        missing=missing,
    )


async def _pause_modes(client: HttpClient, recent: bool, *, paused: bool) -> tuple[str, ...]:
    """The modes that the server names when it is asked for one that does not exist.

    Unless it refuses that, it may have paused after all, whatever became of the call: it is continued then. One that
    somebody else has ``paused`` is not.
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
    """From the configuration, or out of the refusal of a request that can never be run."""
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
    reply = await client.call("POST", "/generate", body, timeout_s=PROBE_S)
    found = re.search(r"in \[0, (\d+)\]", error_text(reply.body)) if not reply.ok else None
    if found is None:
        raise ConfigError(
            f"{client.url} does not say how large its vocabulary is, and an id outside of it would kill the server; "
            "set engine.vocab_size (vocab_size of the model's config.json)"
        )
    return int(found[1]) + 1


def _context(client: HttpClient, config: SglangEngineConfig, server: dict[str, Any], models: Any) -> int:
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
            longest = None
    if longest is None and config.max_len is None:
        raise ConfigError(f"{client.url} does not say how long a request may be; set engine.max_len")
    return min(n for n in (longest, config.max_len) if n is not None)


def _number(values: dict[str, Any], key: str) -> int | None:
    value = values.get(key)
    return value if isinstance(value, int) and value > 0 else None


# ---------------------------------------------------------------- requests of one token


@dataclass(frozen=True, slots=True)
class _Probed:
    spans: bool
    stream_interval: bool
    kind: LogprobKind


def _unasked(config: SglangEngineConfig) -> _Probed:
    """A paused server answers no request."""
    return _Probed(False, False, LogprobKind(config.logprobs) if config.logprobs else LogprobKind.UNKNOWN)


async def _one_token(client: HttpClient, config: SglangEngineConfig, vocab: int) -> _Probed:
    """Spans, the stream interval, and of which distribution the log-probabilities are."""
    kind, interval, spans = LogprobKind.UNKNOWN, True, False
    for start in range(3):
        prompt = [(start * 7 + i) % vocab for i in (3, 4, 5)]
        greedy = {"temperature": 0.0}
        first = await _token(client, prompt, greedy | ({"stream_interval": 1} if interval else {}))
        if isinstance(first, Reply):
            if not interval:
                raise EngineError(f"{client.url}/generate answered {first.status}: {error_text(first.body)}")
            interval = False  # an unknown setting is refused
            first = await _token(client, prompt, greedy)
        second = await _token(client, prompt, NARROW)
        for reply in (first, second):
            if isinstance(reply, Reply):
                raise EngineError(f"{client.url}/generate answered {reply.status}: {error_text(reply.body)}")
        spans = _spans(first)
        kind = kind_seen(_scored(first), _scored(second))
        if kind is not LogprobKind.UNKNOWN:
            break
    return _Probed(spans, interval, LogprobKind(config.logprobs) if config.logprobs else kind)


async def _token(client: HttpClient, prompt: list[int], params: dict[str, Any]) -> Any:
    """The answer to a request of one token; a :class:`Reply` if it was refused."""
    body = {
        "rid": probe_id(),
        "input_ids": prompt,
        "return_logprob": True,
        "sampling_params": {"max_new_tokens": 1, "top_k": -1, "ignore_eos": True, **params},
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


def _spans(answer: GenerateReply) -> bool:
    return answer.meta_info is not None and bool(answer.meta_info.weight_versions)


def _scored(answer: GenerateReply) -> tuple[int, float]:
    """The token and its log-probability."""
    assert answer.meta_info is not None
    (only,) = answer.meta_info.output_token_logprobs
    return only.token, only.logprob


def _missing(
    *, spans: bool, labels: bool, incremental: bool, interval: bool, modes: tuple[str, ...], disk: bool,
    kind: LogprobKind, deterministic: bool, loads: bool, eos: tuple[int, ...] | None, paused: bool, data_parallel: int,
    speculation: bool,
) -> tuple[str, ...]:  # fmt: skip
    """What is not as it should be, in plain sentences."""
    said = []
    if paused:
        said.append(
            "The server is paused: no request runs until somebody continues it (POST /continue_generation with the "
            "body {}); what can only be learned from a reply is unknown."
        )
    if not spans and not paused:
        said.append(
            "Replies do not say which weights made which token (SGLang below 0.5.20): every token gets the version at "
            "submission, and no request lives through a weight update; upgrade to 0.5.20 or later."
        )
    if not labels:
        said.append(
            "Versions cannot be set (/update_weight_version is missing): new weights are unverified, and april cannot "
            "see that the server was restarted with other weights; upgrade SGLang."
        )
    if not incremental:
        said.append(
            "Streams repeat the whole response in every event, which costs time that grows with the square of its "
            "length: april asks for one answer at the end instead, and a request that is put back for want of memory "
            "loses up to 49 tokens at an abort; start the server with --incremental-streaming-output."
        )
    if not interval and not paused:
        said.append(
            "A request cannot say how often it wants tokens (sampling_params.stream_interval is refused); set "
            "--stream-interval at the server instead."
        )
    if "retract" not in modes:
        said.append(
            "The server has no pause mode retract: a weight update waits for the requests of other clients to end."
        )
    if not disk:
        said.append(
            "Weights cannot be loaded from a directory (/update_weights_from_disk is missing); the trainer has to "
            "transfer them itself."
        )
    if kind is LogprobKind.RAW:
        said.append(
            "Log-probabilities are of temperature 1 whatever the temperature (SGLANG_RETURN_ORIGINAL_LOGPROB is set): "
            "train with temperature 1, or start the server without that variable."
        )
    elif kind is LogprobKind.UNKNOWN:
        said.append(UNKNOWN_KIND)
    if not deterministic:
        said.append(
            "Seeds do nothing: two requests with the same seed differ; start the server with "
            "--enable-deterministic-inference if runs must repeat."
        )
    if not loads:
        said.append("The server does not tell its load (/v1/loads is missing, SGLang below 0.5.9).")
    if eos is None:
        said.append(NO_EOS + "if budgets of thinking or stop ids depend on them.")
    if speculation:
        said.append(
            "The server speculates (speculative_algorithm): whether its log-probabilities are those of the tokens then "
            "was not tried; start it without."
        )
    if data_parallel > 1:
        said.append(f"The server runs {data_parallel} data-parallel copies, with which april was not tried.")
    return tuple(said)
