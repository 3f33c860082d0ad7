"""Finds out what one vLLM server can do, by GET calls, calls that it must refuse, and requests for one token."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, replace
from typing import Any

from april.config.engines import VllmEngineConfig
from april.core.engine_limits import LimitCode, no_experts, raw_logprobs, tied_embeddings
from april.core.sampling import LogprobKind
from april.engines.http.adapter_files import base_shapes
from april.engines.http.http_client import HttpClient
from april.engines.http.server_probe import NO_TOKEN, ServedModel, ServerFacts, ServerProbe, model_files
from april.engines.http.server_process import read_metrics, require_left_paused
from april.engines.http.token_rows import NO_EXPERTS, InvalidRows, Routing, experts_of_npy, routing_of
from april.engines.http.wire import NotJson, error_text, positive, read_json
from april.engines.openai.probe import OpenAIFacts, completions_facts
from april.engines.openai.wire import ROUTE as COMPLETIONS_ROUTE
from april.engines.protocol import ROUTED_EXPERTS, AdapterSite, OnWeightUpdate
from april.engines.vllm.kv_connectors import connector_names, refuse_hidden_connector, require_salts_kept_apart
from april.engines.vllm.plugin import BACKEND, BACKENDS
from april.engines.vllm.wire import PARTS, TOKEN_ROUTE, TokenReply, misses_attachment
from april.errors import ConfigError, RequestRefused, WireError
from april.text.server_text import clean

LOGPROBS_MODES = {"raw_logprobs": LogprobKind.RAW, "processed_logprobs": LogprobKind.PROCESSED}
EXPERTS_SETTING = "enable_return_routed_experts"
_DEVELOPER = "VLLM_SERVER_DEV_MODE=1"
_MODE = "--logprobs-mode processed_logprobs"
_OPEN = f"with --enable-scale-out and {_DEVELOPER}"
_RESUME = "resume it (POST /resume)"
_EXPERTS_NEED = f"start the server with --enable-return-routed-experts, --enable-scale-out and {_DEVELOPER}"
_ADAPTERS_NEED = (
    "start the server with VLLM_SERVER_DEV_MODE=1, VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, --enable-scale-out, "
    "--enable-lora and a --max-lora-rank of at least the adapter's rank"
)
LOAD_ADAPTER = "/v1/load_lora_adapter"
DEVELOPER_ROUTES = ("/abort_requests", "/collective_rpc")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmFacts(ServerFacts):
    """Results of probing a vLLM server."""

    priorities: bool
    """True if requests are scheduled by priority."""
    routing: Routing | None = None
    """Shape of the routed experts that the server returns; None if it returns none."""
    keeps_attachments: bool = False
    """True if the server keeps attachments and finds them by digest."""


async def probe_vllm(client: HttpClient, config: VllmEngineConfig) -> VllmFacts | OpenAIFacts:
    """Find out what a server can do. Returns VllmFacts if all routes that april uses are open, else OpenAIFacts.

    Raises EngineError, or ConfigError if the server is unusable.
    """
    probe = _VllmProbe(client, config)
    await probe.read()
    return await (probe.facts() if probe.is_open else probe.closed_facts())


class _VllmProbe(ServerProbe):
    """Probes one server. Only a server in developer mode shows its settings."""

    config: VllmEngineConfig
    served: ServedModel

    async def facts(self) -> VllmFacts:
        attachments, keeps_attachments = await self._attachments()
        vocab_size = await self._vocab_size()
        seen = LOGPROBS_MODES.get(str(self.settings.get("logprobs_mode")), LogprobKind.UNKNOWN)
        kind = self.logprobs(seen, raw_logprobs(f"start the server with {_MODE}", _MODE))
        eos, loads, seeds = self.ends(), self._loads(), self._seeds()
        site, routing = await self._adapter_site(), await self._routing()
        copies, running = self._copies(), positive(self.settings, "max_num_seqs")
        self.lacks(
            "speculation" in self.settings, LimitCode.SPECULATION,
            f"The server uses speculative decoding ({clean(self.settings.get('speculation'))}): on a CPU, vLLM 0.32 "
            "then samples wrong tokens at temperatures above 0, some with log-probabilities of -9999, as it never "
            "fills the temperatures of drafted tokens; with that function repaired, n-gram speculation was exact on a "
            "CPU, and nothing else was tested",
            "start the server without --speculative-config",
        )  # fmt: skip
        return VllmFacts(
            **self.common(),
            model=self.served.name, software=self.software,
            priorities=self.settings.get("policy") == "priority", routing=routing, keeps_attachments=keeps_attachments,
            capabilities=self.capabilities(
                logprob_kind=kind, vocab_size=vocab_size, context=positive(self.card, "max_model_len"),
                places=None if running is None else running * copies, eos_token_ids=eos,
                collective=self._collective(loads), updates_from_disk=loads, adapters=site,
                extras=() if routing is None else (ROUTED_EXPERTS,), in_flight_updates=self._in_flight_updates(),
                honours_seeds=seeds, streams=self.config.max_token_loss is not None, attachments=attachments,
                bans="speculation" not in self.settings,  # with speculation, vLLM refuses logit_bias
                stop_strings=self.settings.get("skip_tokenizer_init") is False,
            ),
        )  # fmt: skip

    async def closed_facts(self) -> OpenAIFacts:
        """Find out what a server with closed routes can do as an OpenAI-compatible server."""
        if self.paused:
            require_left_paused(self.client.url, None, None, _RESUME)
        several = not self.one_process
        one = ", and --api-server-count 1" if several else ""
        self.needs |= {"adapters": _ADAPTERS_NEED + one, "extras": _EXPERTS_NEED + one}
        if any("vision_config" in file for file in self.files):
            self.needs["attachments"] = f"start the server {_OPEN}{one}"
        facts = await completions_facts(
            self, await self._vocab_size(),
            "start the server with --api-server-count 1, or one server per engine, because april's calls reach only "
            "one of its API processes" if several else (
                f"start the server {_OPEN}, bound to a private address, because its key does not protect those routes"
            ),
            *(("--api-server-count 1",) if several else (_DEVELOPER, "--enable-scale-out")),
        )  # fmt: skip
        # read after the requests above: only metrics of requests show that the server asks a KV connector
        if not self.shown and (await read_metrics(self.client)).asks_kv_connector:
            refuse_hidden_connector(self.client.url, self.config.salted_kv_connectors)
        return replace(facts, software=self.software)

    async def read(self) -> None:
        """Read the server's descriptions of itself, and find out which routes it has."""
        client = self.client
        version, models, info, label, paused = await asyncio.gather(
            self.get_json("/version", has="version"),
            self.get_json("/v1/models", has="data"),
            self.get_json("/server_info?config_format=json", has="vllm_config"),
            self.get_json("/weight_info", has="weight_version"),
            self.get_json("/is_paused", has="is_paused"),
        )
        if not isinstance(version, dict) or not isinstance(models, dict) or "data" not in models:
            raise ConfigError(
                f"{client.url} is not a vLLM server (it has no /version or no /v1/models); engine.urls must list "
                "servers that were started with `vllm serve`"
            )
        self.software = str(version.get("version", "unknown"))
        shown = info.get("vllm_config") if isinstance(info, dict) else None
        self.shown = shown if isinstance(shown, dict) else {}
        require_salts_kept_apart(client.url, self.shown, self.config.salted_kv_connectors)
        self.choose_model(models)
        self.card, self.settings = self.served.card, _settings(self.shown)
        routes = await asyncio.gather(self._offers_tokens(), *map(self.has_route, DEVELOPER_ROUTES))
        self.one_process = (positive(self.settings, "_api_process_count") or 1) == 1
        label = label.get("weight_version") if isinstance(label, dict) else None
        self.is_open = all(routes) and self.one_process and bool(self.shown) and isinstance(label, str)
        self.label = label if self.is_open else None
        self.paused = bool(isinstance(paused, dict) and paused.get("is_paused"))
        self.files = await asyncio.to_thread(model_files, self.card.get("root"))
        self.lacks(
            self.paused, LimitCode.PAUSED, f"is paused: no request runs until somebody resumes it; {_RESUME}",
            server=client.url,
        )  # fmt: skip

    async def _offers_tokens(self) -> bool:
        """Return whether the route with token ids exists and is open, by the answer to an empty request."""
        if not await self.has_route(TOKEN_ROUTE):
            return False
        reply = await self.answer_of("POST", TOKEN_ROUTE, lambda r: r.status in (400, 401, 403, 404, 422), b"{}")
        if reply.status == 401:
            self.client.require_ok(reply, TOKEN_ROUTE)
        return reply.status not in (403, 404)

    def _copies(self) -> int:
        copies = positive(self.settings, "data_parallel_size") or 1
        self.lacks(
            copies > 1, LimitCode.SEVERAL_COPIES,
            f"The server runs {copies} data-parallel copies: aborts and weights were right with two of them behind one "
            "API process on a CPU, but nothing else was tested",
            "start one server per copy, and list all of them in engine.urls",
        )  # fmt: skip
        return copies

    def _loads(self) -> bool:
        """Return whether whole weights can be loaded from a directory."""
        tied = self._on_cpu and any(file.get("tie_word_embeddings") is True for file in self.files)
        self.note(tied_embeddings(), tied)
        return not tied and self.served.base is None

    @property
    def _on_cpu(self) -> bool:
        device = str(self.settings.get("device_type") or self.settings.get("device"))
        return device.partition(":")[0] == "cpu"

    def _collective(self, loads: bool) -> tuple[str, ...]:
        """Return the back-end for sending weights with which the server was started; empty if april cannot use it."""
        backend = BACKENDS.get(str(self.settings.get("transfers"))) if loads else None
        self.lacks(
            loads and backend is None, LimitCode.NO_TRANSFERS,
            "Weights cannot be sent to the server from the trainer's process (weight_update(weights=...))",
            f"""start it with --weight-transfer-config '{{"backend": "nccl"}}', or, with april installed beside """
            f"""vLLM, '{{"backend": "{BACKEND}"}}', which needs no GPU""",
            "--weight-transfer-config",
        )  # fmt: skip
        return () if backend is None else (backend,)

    def _seeds(self) -> bool:
        """Return whether requests may have seeds; False if a seed may crash the server."""
        return not self.lacks(
            self._on_cpu and self.settings.get("enable_chunked_prefill") is not False, LimitCode.CHUNKED_PREFILL,
            "The server runs on a CPU with chunked prefill, where it crashes when it reads the prompt of a request "
            "with a seed in chunks, so april sends no seeds, and runs cannot be repeated",
            "start the server with --no-enable-chunked-prefill, and with --max-num-batched-tokens of at least its "
            "context",
            "--no-enable-chunked-prefill",
        )  # fmt: skip

    def _in_flight_updates(self) -> tuple[OnWeightUpdate, ...]:
        """Return the ways in which requests can continue after a weight update.

        There are none with several data-parallel copies, because a pause must reach every process behind the port.
        """
        if (positive(self.settings, "data_parallel_size") or 1) > 1:
            return ()
        if connector_names(self.shown.get("kv_transfer_config")):
            # a prompt that is recomputed keeps its old salt, so the connector would return the old keys and values
            return (OnWeightUpdate.KEEP,)
        return (OnWeightUpdate.KEEP, OnWeightUpdate.RECOMPUTE)

    async def _attachments(self) -> tuple[tuple[str, ...], bool]:
        """Return the accepted kinds of attachments, and whether the server keeps them.

        The request names an unknown image; a server that accepts images answers that the image's bytes are missing.
        """
        name = self.new_id()
        reply = await self.ask(TOKEN_ROUTE, {
            "request_id": name, "token_ids": [0], "model": self.served.name,
            "sampling_params": {"max_tokens": 1, "temperature": 0.0},
            "content_parts": [{"type": part, "url": None, "uuid": name} for part in PARTS.values()],
        })  # fmt: skip
        said = error_text(reply.body)
        if not reply.ok and misses_attachment(RequestRefused(said)):
            return tuple(PARTS), True
        if reply.status == 400 and _NOT_KEPT.search(said):
            return tuple(PARTS), False
        is_text_model = reply.status == 400 and re.search(r"\bnot a multimodal model\b", said)
        if not is_text_model and any("vision_config" in file for file in self.files):
            need = "start the server without --language-model-only, and with --limit-mm-per-prompt above 0"
            self.needs["attachments"] = need
            why = "it does not look at content_parts" if reply.ok else f"it says {said!r}"
            consequence = f"The model accepts images, but april cannot send any to this server: {why}"
            self.lacks(True, LimitCode.NO_ATTACHMENTS, consequence, need)
        return (), False

    async def _routing(self) -> Routing | None:
        """Return the shape of routed experts; if the server returns none, note how to get them, and return None."""
        said = routing_of(self.files)
        limit = no_experts(_EXPERTS_NEED, "--enable-return-routed-experts", "--enable-scale-out", _DEVELOPER)
        return self.experts(said, await self._routing_seen(said), limit)

    async def _routing_seen(self, said: Routing | None) -> Routing | str:
        """Return the shape of the experts in a reply for one token, or a sentence that says how to get experts."""
        if self.files and said is None and self.config.expert_shape is None:
            return NO_EXPERTS
        if not self.settings[ROUTED_EXPERTS]:
            return _EXPERTS_NEED
        if self.paused:
            return "resume the server, because only a reply shows them"
        prompt = [3, 4, 5]
        reply = await self.ask(TOKEN_ROUTE, {
            "model": self.served.name, "token_ids": prompt, "request_id": self.new_id(),
            "sampling_params": {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True},
        })  # fmt: skip
        where = f"{self.client.url}{TOKEN_ROUTE}"
        self.client.require_ok(reply, TOKEN_ROUTE)
        try:
            choices = read_json(reply.body, TokenReply).choices or []
            text = choices[0].routed_experts if choices else None
            rows = None if text is None else experts_of_npy(text)
        except (NotJson, InvalidRows) as error:
            raise WireError(f"{where} answers with {error}") from None
        if rows is None:
            return _EXPERTS_NEED
        shape = Routing(rows.shape[1], rows.shape[2], None if said is None else said.experts)
        if len(rows) != len(prompt) or self.config.expert_shape not in (None, (shape.layers, shape.top_k)):
            raise WireError(
                f"{where} was asked for 3 rows of experts, but answered with {len(rows)}, of {shape.layers} layers "
                f"with {shape.top_k} experts per token; is engine.expert_shape right?"
            )
        return shape

    async def _adapter_site(self) -> AdapterSite | None:
        """Return which adapters the server accepts; if it accepts none, note how to change that, and return None."""
        lora = self.shown.get("lora_config")
        if not isinstance(lora, dict) or not await self.has_route(LOAD_ADAPTER):
            self.needs["adapters"] = _ADAPTERS_NEED
            return None
        base = await asyncio.to_thread(base_shapes, self.card.get("root"))
        return AdapterSite(max_rank=positive(lora, "max_lora_rank"), slots=positive(lora, "max_loras"), base=base)

    async def _vocab_size(self) -> int:
        """Return the vocabulary's size, from settings, the server's refusal of an id, or files. Raises ConfigError."""
        if self.config.vocab_size is not None:
            return self.config.vocab_size
        body = {"model": self.served.name, "prompt": [0], "max_tokens": 1, "logit_bias": {str(NO_TOKEN): 1.0}}
        found = await self.vocabulary_in_refusal(COMPLETIONS_ROUTE, body, r"[Vv]ocabulary size: (\d+)")
        return self.size_of_vocabulary(found, *(file.get("vocab_size") for file in self.files))


_NOT_KEPT = re.compile(r"\bFailed to apply\b.*\[None\]")
"""Answer to an image without its bytes, if the server caches no processed images (--mm-processor-cache-gb 0)."""
_SETTINGS = (
    "logprobs_mode", "policy", "max_num_seqs", "enable_chunked_prefill", "data_parallel_size", "_api_process_count",
    "device", "device_type", "skip_tokenizer_init",
)  # fmt: skip


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the relevant settings from the server's ``vllm_config`` as a flat mapping."""
    found: dict[str, Any] = {}
    for part in ("model_config", "scheduler_config", "parallel_config", "device_config"):
        if isinstance(values := config.get(part), dict):
            found |= {name: values[name] for name in _SETTINGS if name in values}
    parts = (config.get("model_config"), config.get("aux_output_config"))  # vLLM 0.33 has moved this setting
    found[ROUTED_EXPERTS] = any(isinstance(p, dict) and bool(p.get(EXPERTS_SETTING)) for p in parts)
    if isinstance(transfers := config.get("weight_transfer_config"), dict):
        found["transfers"] = transfers.get("backend")
    speculative = config.get("speculative_config")
    if speculative:
        method = speculative.get("method") if isinstance(speculative, dict) else None
        found["speculation"] = method if isinstance(method, str) else "of some kind"
    return found
