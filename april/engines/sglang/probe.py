"""Finds out what one SGLang server can do, without disturbing it: by GET calls and a few requests for one token.

The workers behind an sglang-router are probed one by one; the module ``router`` combines the results.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from april.config.engines import SglangEngineConfig
from april.core.engine_limits import LimitCode, no_experts, raw_logprobs
from april.core.sampling import LogprobKind
from april.engines.http.adapter_files import base_shapes
from april.engines.http.http_client import HttpClient
from april.engines.http.server_probe import NO_TOKEN, REFUSES, ServerFacts, ServerProbe, model_files
from april.engines.http.token_rows import NO_EXPERTS, InvalidRows, Routing, experts_of_numbers, routing_of
from april.engines.http.wire import NotJson, positive, read_json
from april.engines.protocol import ROUTED_EXPERTS, AdapterSite
from april.engines.sglang.wire import FIELDS, Meta
from april.engines.sglang.wire import Reply as GenerateReply
from april.engines.weight_transfer import GLOO, NCCL
from april.errors import ConfigError, WireError

ENDS_OF_TURNS = ("<|eom_id|>", "<|content_model_end_sampling|>", "<|ifm|im_end|>")
"""Special tokens at which SGLang stops although no model file says so (0.5.19: the first two; 0.5.23: all)."""
NEEDED_ROUTES = ("/update_weights_from_disk", "/update_weight_version", "/pause_generation")
TRANSFER_ROUTES = ("/init_weights_update_group", "/update_weights_from_distributed", "/begin_weight_update")
"""Routes for sending weights from the trainer's process; the last one came later, with SGLang 0.5.23."""
ADAPTERS_NEED = (
    "start the server with --enable-lora, --max-lora-rank of at least the adapter's rank, and --lora-target-modules"
)
EXPERTS_NEED = "start the server with --enable-return-routed-experts"
_RAW_LOGPROBS = raw_logprobs("start the server without SGLANG_RETURN_ORIGINAL_LOGPROB")


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangFacts(ServerFacts):
    """Results of probing an SGLang server."""

    incremental: bool
    """True if stream events contain only the new tokens."""
    adapter: str | None = None
    """Name of the trained adapter; None if the model itself is trained."""
    routing: Routing | None = None
    """Shape of the routed experts that the server returns; None if it returns none."""


async def workers_of(client: HttpClient) -> int:
    """Return how many processes of a server hold a part of its weights. Raises EngineError if it does not answer."""
    info = await client.json("GET", "/server_info", retry=True)
    return (positive(info, "tp_size") if isinstance(info, dict) else None) or 1


async def probe_sglang(client: HttpClient, config: SglangEngineConfig) -> SglangFacts:
    """Find out what a server can do; it must not be a router. Raises ConfigError or EngineError."""
    return await _SglangProbe(client, config).facts()


class _SglangProbe(ServerProbe):
    """Probes one server by its descriptions of itself, and by requests for one token unless the server is paused."""

    config: SglangEngineConfig

    async def facts(self) -> SglangFacts:
        await self._read()
        model, server = self.model, self.server
        vocab_size, *transfers = await asyncio.gather(self._vocab_size(), *map(self.has_route, TRANSFER_ROUTES))
        self.files = await asyncio.to_thread(
            model_files, model["model_path"], model.get("tokenizer_path"), ENDS_OF_TURNS
        )
        seen = LogprobKind.UNKNOWN if self.paused else await self._logprob_kind(vocab_size)
        routing = await self._routing(vocab_size)
        adapter = None if self.served is None or self.served.base is None else self.served.name
        copies, stages = positive(server, "dp_size") or 1, positive(server, "pp_size") or 1
        self.lacks(
            copies > 1, LimitCode.SEVERAL_COPIES,
            f"The server runs {copies} data-parallel copies, with which april was not tested",
            "start one server per copy, each with --dp-size 1, and list all of them in engine.urls", "--dp-size 1",
        )  # fmt: skip
        sent = all(transfers) and copies == 1 and stages == 1 and adapter is None
        incremental = bool(server.get("incremental_streaming_output"))
        self.lacks(
            not incremental, LimitCode.CUMULATIVE_STREAMS,
            "Streams repeat the whole response in every event, which costs time quadratic in its length, so april asks "
            "for one answer at the end instead; an aborted request that the server had put back for lack of memory "
            "loses up to 49 tokens",
            "start the server with --incremental-streaming-output", "--incremental-streaming-output",
        )  # fmt: skip
        seeds = not self.lacks(
            not server.get("enable_deterministic_inference"), LimitCode.NO_SEEDS,
            "Seeds have no effect: two requests with the same seed differ",
            "start the server with --enable-deterministic-inference if runs must repeat",
            "--enable-deterministic-inference",
        )  # fmt: skip
        self.lacks(
            server.get("speculative_algorithm"), LimitCode.SPECULATION,
            "The server uses speculative decoding (speculative_algorithm); whether its log-probabilities then belong "
            "to its tokens was not tested",
            "start the server without --speculative-algorithm",
        )  # fmt: skip
        attachments, site = await self._attachments(), await self._adapter_site(copies)
        return SglangFacts(
            **self.common(),
            model=adapter or str(model["model_path"]), adapter=adapter, software=str(server.get("version", "unknown")),
            incremental=incremental, routing=routing,
            capabilities=self.capabilities(
                logprob_kind=self.logprobs(seen, _RAW_LOGPROBS), vocab_size=vocab_size,
                context=_context(server), places=positive(server, "max_running_requests"),
                eos_token_ids=self.ends(), updates_from_disk=adapter is None,
                collective=_backends(server) if sent else (), adapters=site,
                extras=() if routing is None else (ROUTED_EXPERTS,),
                # with cumulative events, streaming costs more than it gains
                streams=incremental or self.config.max_token_loss is not None,
                stop_strings=server.get("skip_tokenizer_init") is False,
                honours_seeds=seeds, attachments=attachments,
                constrains=not server.get("skip_tokenizer_init") and server.get("grammar_backend") != "none",
            ),
        )  # fmt: skip

    async def _read(self) -> None:
        client = self.client
        self.model, self.server, models, ready, *needed = await asyncio.gather(
            self.get_json("/model_info", has="model_path"), self.get_json("/server_info", has="version"),
            self.get_json("/v1/models", has="data"), client.call("GET", "/ready", timeout_s=None, retry=True),
            *map(self.has_route, NEEDED_ROUTES),
        )  # fmt: skip
        if not isinstance(self.model, dict) or "model_path" not in self.model or not isinstance(self.server, dict):
            raise ConfigError(
                f"{client.url} is not an SGLang server (it has no /model_info); engine.urls must list SGLang servers, "
                "not a router or another engine"
            )
        if missing := [route for route, found in zip(NEEDED_ROUTES, needed, strict=True) if not found]:
            raise self._too_old(f"has no {missing[0]}")
        self.label = str(self.model.get("weight_version"))
        if models is not None or self.config.model is not None:
            self.choose_model(models)
        self.paused = ready.status == 503
        self.lacks(
            self.paused, LimitCode.PAUSED,
            "The server is paused: no request runs until somebody resumes it (POST /continue_generation with the body "
            "{}); whatever only a reply can show is unknown",
        )  # fmt: skip

    def _too_old(self, why: str) -> ConfigError:
        return ConfigError(f"{self.client.url} {why}; upgrade it to SGLang 0.5.20 or later")

    async def _routing(self, vocab_size: int) -> Routing | None:
        """Return the shape of routed experts; if the server returns none, note how to get them, and return None."""
        said, limit = routing_of(self.files), no_experts(EXPERTS_NEED, "--enable-return-routed-experts")
        return self.experts(said, await self._routing_seen(said, vocab_size), limit)

    async def _routing_seen(self, said: Routing | None, vocab_size: int) -> Routing | str:
        """Check the experts in one reply against the shape from the model's files or the settings.

        Returns the shape, or a sentence that says how to get experts.
        """
        if said is None and self.files and self.config.expert_shape is None:
            return NO_EXPERTS
        if not self.server.get("enable_return_routed_experts"):
            return EXPERTS_NEED
        if self.config.expert_shape is not None:
            said = Routing(*self.config.expert_shape, None if said is None else said.experts)
        if said is None:
            return (
                "set engine.expert_shape to the layers and experts per token of its model (num_hidden_layers and "
                "num_experts_per_tok in config.json, which is not on this machine)"
            )
        if self.paused:
            return "resume the server, because only a reply shows them"
        prompt, where = [i % vocab_size for i in (3, 4, 5)], f"{self.client.url}/generate"
        meta = await self._token(prompt, {"temperature": 0.0}, return_routed_experts=True)
        try:
            rows = experts_of_numbers(meta.routed_experts or "", said)
        except InvalidRows as wrong:
            raise WireError(f"{where} answers with {wrong}; is engine.expert_shape right?") from None
        if len(rows) != len(prompt):
            raise WireError(
                f"{where} was asked for the experts of {len(prompt)} tokens, but answered with {len(rows)} rows of "
                f"{said.layers} layers with {said.top_k} experts per token; is engine.expert_shape right?"
            )
        return said

    async def _attachments(self) -> tuple[str, ...]:
        sees = any("vision_config" in file for file in self.files)
        if not self.model.get("has_image_understanding", sees):
            return ()
        reply = await self.answer_of("GET", "/openapi.json", lambda r: r.status in REFUSES or b'"paths"' in r.body)
        named = reply.ok and b'"mm_hashes"' in reply.body
        if self.lacks(
            not named, LimitCode.NO_ATTACHMENTS,
            "The model accepts images, but april cannot send any to this server: its requests cannot name them "
            "(/openapi.json has no mm_hashes), so after a weight update it would reuse what the old weights saw in "
            "them",
            "upgrade SGLang",
        ):  # fmt: skip
            self.needs["attachments"] = "upgrade SGLang"
        return tuple(FIELDS) if named else ()

    async def _adapter_site(self, copies: int) -> AdapterSite | None:
        """Return which adapters the server accepts; if it accepts none, note how to change that, and return None."""
        if not self.server.get("enable_lora") or not await self.has_route("/load_lora_adapter"):
            self.needs["adapters"] = ADAPTERS_NEED
            return None
        if copies > 1:
            self.needs["adapters"] = (
                "start one server per copy, each with --dp-size 1, because copies share no adapters"
            )
            return None
        rank, slots = positive(self.server, "max_lora_rank"), positive(self.server, "max_loras_per_batch")
        base = await asyncio.to_thread(base_shapes, self.model["model_path"])
        return AdapterSite(max_rank=rank, slots=slots, scales=False, base=base)

    async def _vocab_size(self) -> int:
        """Return the vocabulary's size, from the settings or the refusal of an invalid request. Raises ConfigError."""
        if self.config.vocab_size is not None:
            return self.config.vocab_size
        # SGLang refuses every request with two grammars, so nothing is generated even if the id goes unchecked
        params = {"max_new_tokens": 1, "logit_bias": {str(NO_TOKEN): 1.0}, "json_schema": "{}", "regex": "a"}
        body = {"rid": self.new_id(), "input_ids": [0], "sampling_params": params}
        found = await self.vocabulary_in_refusal("/generate", body, r"in \[0, (\d+)\]")
        danger = ", and an id outside of it would crash the server"
        return self.size_of_vocabulary(None if found is None else found + 1, danger=danger)

    async def _logprob_kind(self, vocab_size: int) -> LogprobKind:
        """Find out the kind of log-probabilities. Raises ConfigError if responses lack the versions of their tokens."""

        async def ask(prompt: list[int], params: dict[str, float]) -> tuple[int, float]:
            meta = await self._token([i % vocab_size for i in prompt], params)
            if not meta.weight_versions:
                raise self._too_old("does not say which weights made which token")
            (only,) = meta.output_token_logprobs
            return only.token, only.logprob

        return await self.kind_of_logprobs(ask)

    async def _token(self, prompt: list[int], params: dict[str, Any], **asked: Any) -> Meta:
        body = {
            "rid": self.new_id(),
            "input_ids": prompt,
            "return_logprob": True,
            "sampling_params": {"max_new_tokens": 1, "top_k": -1, "ignore_eos": True, **params},
            **asked,
        }
        reply = await self.ask("/generate", body)
        self.client.require_ok(reply, "/generate")
        try:
            answer: GenerateReply = read_json(reply.body, GenerateReply)
        except NotJson as error:
            raise WireError(f"{self.client.url}/generate answered something that april cannot read: {error}") from None
        if answer.meta_info is None or len(answer.output_ids) != 1 or len(answer.meta_info.output_token_logprobs) != 1:
            raise WireError(
                f"{self.client.url}/generate was asked for one token with its log-probability, but answered with "
                f"{len(answer.output_ids)} tokens; april needs return_logprob"
            )
        return answer.meta_info


def _backends(server: dict[str, Any]) -> tuple[str, ...]:
    """Return the back-ends over which the server's workers can join a process group, which depend on their device."""
    device = str(server.get("device") or "cuda")
    return (GLOO,) if device == "cpu" else (NCCL, GLOO) if device == "cuda" else ()


def _context(server: dict[str, Any]) -> int | None:
    """Return the maximum tokens of a request, response included; None if unknown.

    SGLang accepts only inputs that are a few tokens shorter than its context, and silently ends responses two tokens
    before the end of the context. Its memory is a limit, too, minus two pages; the input's last page may be half empty.
    """
    longest, memory = positive(server, "max_req_input_len"), positive(server, "max_total_num_tokens")
    if longest is not None and memory is not None and longest < memory:  # otherwise it is the memory of one shard
        longest = min(longest, memory - 2 * (positive(server, "page_size") or 1))
    return longest
