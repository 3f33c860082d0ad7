"""vLLM servers as engines: one HTTP call per attempt, ended by its id or by a pause, weights loaded from disk.

Invariant: no call for an attempt is closed in order to end it, because the server would drop its tokens; and no token
is handed over under a label that the server does not confirm where it can.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path
from urllib.parse import urlsplit

from april.config.engines import THIS_MACHINE, VllmEngineConfig
from april.core.versions import FIRST_VERSION, PolicyVersion
from april.engines.http.http_client import HttpClient, control, nothing, says, text_under, words_of
from april.engines.http.response_reader import ResponseReader
from april.engines.http.response_stream import ResponseStream
from april.engines.http.sent_attachments import SentAttachments, Urls
from april.engines.http.server_probe import ServerFacts, connect_all
from april.engines.http.server_process import (
    PAUSE_CHECK_S,
    UNSAID,
    read_metrics,
    while_paused,
)
from april.engines.http.weight_directories import is_adapter
from april.engines.http.weight_labels import is_another_process, mark_process, require_base, require_first_weights
from april.engines.http.wire import error_text
from april.engines.openai.engine import OpenAIEngine
from april.engines.openai.probe import OpenAIFacts
from april.engines.openai.wire import TokenShape
from april.engines.protocol import AbortMeans, Engine, Health, OnWeightUpdate, Request
from april.engines.vllm.adapters import load_adapter, unload_adapter
from april.engines.vllm.probe import VllmFacts, probe_vllm
from april.engines.vllm.transfer import TransferEngine
from april.engines.vllm.wire import engine_id, misses_attachment, parser_of, request_body
from april.errors import EngineError
from april.server_text import quoted

LOAD_WEIGHTS_S = 3600.0
"""Longest wait for a server to read its weights."""
FORGET_S = 5.0
"""Longest wait at the end for a server to forget adapters."""
RESET_TRIES = 20
RESET_WAIT_S = 0.1
"""The cache cannot be emptied for a moment after the last request has gone."""
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt")


class VllmEngine(TransferEngine):
    """A vLLM server, made by :func:`connect_vllm`; implements :class:`april.engines.protocol.Engine`.

    With ``stream`` tokens are handed over as they come, always; otherwise only where a request asks for it, or brings
    the bytes of an image that others of its prompt wait for. The server keeps images by their digests, over weight
    updates too, so that each is sent once, and again when the server says that it has it no more.
    """

    def __init__(self, client: HttpClient, facts: VllmFacts, *, stream: bool = False) -> None:
        sent = SentAttachments(misses_attachment if facts.keeps_attachments else None)
        super().__init__(client, facts, facts.route, "/metrics", sent)
        self.attachments = sent
        self.facts, self._stream = facts, stream
        self._keeps: OnWeightUpdate | None = None
        """The server is paused, or may be, with its requests; what becomes of them. None: it is not."""
        self._paused_as: str | None = None
        """Label of the process that was paused for an update; None: it was not asked, or did not say."""

    # ---------------------------------------------------------------- requests

    def generate(self, request: Request) -> ResponseStream:
        """Make one call; raises RequestRefused for what the server must not be asked."""
        return ResponseStream(self._endpoint, request, streamed=self._stream or request.stream)

    def _prepare(self, request: Request, streamed: bool, urls: Urls) -> tuple[ResponseReader, bytes]:
        self._check(request)
        facts, capabilities = self.facts, self._capabilities
        spans = capabilities.version_spans
        parser = parser_of(facts.route, request, spans=spans, routing=facts.routing)
        labels = self._adapters.reading_labels if spans else None
        reader = ResponseReader(parser, self._version, labels, len(request.token_ids), request)
        model = self._adapters.send(request.attempt_id) or facts.model
        body = request_body(
            facts.route, model, request, stream=streamed, priority=facts.priorities,
            seeds=capabilities.honours_seeds, spans=spans,
            # the label says the version and is this engine's own: nobody else's blocks have it
            salt=self._labels.of(self._version) if request.in_flight is OnWeightUpdate.KEEP else "", urls=urls,
        )  # fmt: skip
        return reader, body

    # ---------------------------------------------------------------- aborts

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        """Abort by id, all in one call: the reply is no receipt, only the end of each request is.

        Behind several API processes, where a call reaches only one: by pausing the server and resuming it.
        """
        ids = self._to_abort(attempt_ids)
        if not ids:
            return
        if self._capabilities.abort_means is AbortMeans.PAUSE:
            self._endpoint.abort(ids)  # the server's pause ends others along with them
            async with self._paused_server("abort"):
                return
        route = self.facts.abort_route
        body = {"request_ids": [engine_id(self.facts.route, i) for i in ids]}
        await control(self._client, route, says("status", "aborted"), nothing, body=body)

    # ---------------------------------------------------------------- weights

    async def pause(self) -> None:
        """Pause as :class:`CompletionsEngine` does, and remember the label of the process."""
        if self._keeps is not None:  # from a pause that failed: the server may be paused, or have emptied nothing
            self._admission.close()
            await control(self._client, "/resume", says("status", "resumed"))
            self._keeps = None
        await super().pause()
        await self._remember()

    async def pause_in_flight(self, in_flight: OnWeightUpdate) -> None:
        """Pause the server with its requests; with RECOMPUTE it forgets all keys and values at that."""
        self._admission.close()
        self._keeps = in_flight
        clear = "true" if in_flight is OnWeightUpdate.RECOMPUTE else "false"
        if in_flight is OnWeightUpdate.RECOMPUTE:
            self.attachments.forget()  # the server does, and would refuse names
        await control(
            self._client, "/pause", says("status", "paused"), params={"mode": "keep", "clear_cache": clear}
        )
        await self._process.pause()
        await self._remember()

    def require_idle(self) -> None:
        """As :meth:`ServerEngine.require_idle`, unless the server itself is paused with its requests."""
        if self._keeps is None:
            super().require_idle()

    async def resume(self) -> None:
        """Let requests in again, and those go on that were kept."""
        if self._keeps is not None:
            self._endpoint.goes_on(self._version)  # before any of their tokens can come
            await control(self._client, "/resume", says("status", "resumed"))
            self._keeps = None
        await super().resume()

    async def _remember(self) -> None:
        """Remember the label of the process that is paused."""
        self._paused_as = None
        with suppress(EngineError, TimeoutError):  # if it does not answer, the update will say so
            async with asyncio.timeout(PAUSE_CHECK_S):
                self._paused_as = await mark_process(self, self._labels, self.facts.label)

    async def update_weights(self, version: PolicyVersion, path: str | None = None) -> None:
        """Load, empty the cache, name the weights, and look whether the name is there.

        An adapter is loaded under a new name, beside what requests run under, and nothing is emptied: the name is part
        of what the cache goes by.

        Raises:
            EngineError: requests run, or the server cannot load from a directory, has failed, does not say that it has
                done what it was asked, or was started anew; between two versions it gets no requests before an update
                succeeds.
            WeightsGone: it had weights of others at the connection, and has lost them.
        """
        try:
            await self._update_weights(version, path)
        finally:
            await self.let_others_go_on()

    async def _update_weights(self, version: PolicyVersion, path: str | None) -> None:
        if path is not None:
            self._require_loadable(path)
            if is_adapter(path):
                await self._take_adapter(version, path)
                return
        self.require_idle()
        await self._require_model()
        if path is None:
            await require_first_weights(self, self._labels, self.facts.label, version)
        else:
            await self._process.pause()  # the one that loads, were it another than before
        # without developer routes the trainer has loaded the weights and emptied the cache; nothing here can do it
        if self.facts.developer_routes:
            async with self._stands_still or self._frozen():
                mark = await self._load(path, version) if path is not None else await self._handed_over(version)
                if self._keeps is None:
                    await self._empty_cache()
                else:  # it is empty, or salts keep old keys and new ones apart
                    await self._empty_encoder_cache()
                await self._label_as(version, mark)
        # a server that was started anew and has these weights now is the present one
        await self._process.take(version)
        self._adapters.take(None, version)
        self._labels.present, self._not_whole = version, ""
        await self._unload_idle()

    async def _take_adapter(self, version: PolicyVersion, path: str) -> None:
        """Load it; if anything fails, requests go on under what they have."""
        await require_base(self, self._labels, self.facts.label, self._adapters.base)
        await self._process.pause()
        adapter = self._adapters.fresh(version, path)
        await load_adapter(self._client, adapter)
        if await self.label() not in (None, self._labels.of(self._adapters.base)):
            raise EngineError(f"{self._client.url} was started anew while it loaded {path}; update its weights again")
        await self._process.take(version)
        self._adapters.take(adapter, version)
        self._labels.present = version
        await self._unload_idle()

    async def _unload_idle(self) -> None:
        """Unload adapters of no version that anybody uses; what fails now is tried again at the next update."""
        for adapter in self._adapters.idle(self._admission.inside):
            if await unload_adapter(self._client, adapter):
                self._adapters.gone(adapter)

    def _torn_by_a_restart(self, version: PolicyVersion) -> str:
        self._not_whole = (
            f"{self._client.url} was started anew in the middle of the update to {version}, and may have the weights "
            "of its start; update its weights again"
        )
        return self._not_whole

    def _require_loadable(self, path: str) -> None:
        """vLLM dies of a directory without weights; one that cannot be seen from here may be there for the server."""
        super()._require_loadable(path)
        if is_adapter(path):
            return
        directory = Path(path)
        if any(True for kind in WEIGHT_FILES for _ in directory.glob(kind)):
            return
        if directory.exists() or urlsplit(self._client.url).hostname in THIS_MACHINE:
            raise EngineError(
                f"engine {self.name} was not asked to load {path}: there are no weights in it "
                f"({', '.join(WEIGHT_FILES)}), and vLLM would die of that; save the model there first"
            )

    async def _load(self, path: str, version: PolicyVersion) -> str | None:
        """New weights; returns the label of the process that has loaded them."""
        mark = await mark_process(self, self._labels, self.facts.label, version)
        await self.forget_transfers()
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        self._not_whole = f"engine {self.name} is without weights until an update to {version} has succeeded"
        reply = await self._client.call("POST", "/collective_rpc", body, timeout_s=LOAD_WEIGHTS_S)
        if not (reply.ok and _reloaded(words_of(reply))):
            self._not_whole = (
                f"{self._client.url} could not load {path} as {version}: it answered {reply.status}, "
                f"{error_text(reply.body)}; it may be without weights now, and dies of that: update its weights again, "
                "or start it anew"
            )
            raise EngineError(self._not_whole)
        return mark

    async def _handed_over(self, version: PolicyVersion) -> str | None:
        """The trainer has put the weights into the process that was paused; returns its label."""
        self._not_whole = f"engine {self.name} is between two versions until an update to {version} has succeeded"
        shown = await self.label()
        if not self._admission.is_open and shown is not None and is_another_process(
            shown, self._paused_as, self._labels, self.facts.label
        ):  # fmt: skip
            raise EngineError(self._torn_by_a_restart(version))
        return shown

    async def _empty_cache(self) -> None:
        """Keys and values of old weights must not serve new ones, nor what they have made of images."""
        route, done, said = "/reset_prefix_cache", says("success", True), b""
        for _ in range(RESET_TRIES):
            reply = await self._client.call("POST", route, params={"reset_running_requests": "true"}, retry=True)
            self._client.require_ok(reply, route)
            if done(words_of(reply)):
                await self._empty_encoder_cache()
                return
            said = reply.body
            await asyncio.sleep(RESET_WAIT_S)
        raise EngineError(
            f"{self._client.url} did not empty its cache; does somebody else keep it busy? It said: {error_text(said)}"
        )

    async def _empty_encoder_cache(self) -> None:
        """A load empties the worker's and not the scheduler's: the next request with a known image would kill both."""
        route = "/reset_encoder_cache"
        reply = await self._client.call("POST", route, retry=True)
        if reply.status != 404:  # servers from before there were encoders
            self._client.require_ok(reply, route)

    async def _label_as(self, version: PolicyVersion, mark: str | None) -> None:
        """Name the weights of the process with this label, and of no other."""
        if mark is None:
            return
        if await self.label() != mark:
            raise EngineError(self._torn_by_a_restart(version))
        await self.set_label(self._labels.of(version))

    async def set_label(self, label: str) -> None:
        """Name the present weights; raises EngineError when the server does not show the name afterwards."""
        if self.facts.label is None:
            return
        await control(self._client, "/update_weight_version", says("success", True), body={"new_version": label})
        now = await self.label()
        if now != label:
            raise EngineError(f"{self._client.url} says its weights are {quoted(now)} after april called them {label}")

    async def label(self) -> str | None:
        """Return the label of the present weights; None means that the server has no labels."""
        if self.facts.label is None:
            return None
        info = await self._client.json("GET", "/weight_info", retry=True)
        return text_under(self._client, info, "weight_version", "/weight_info")

    @asynccontextmanager
    async def _frozen(self) -> AsyncIterator[None]:
        """Requests of other clients stand still meanwhile.

        Only while there are any: a server that is left paused, should april die here, serves nobody.
        """
        if self._keeps is not None:
            yield
            return
        load = (await read_metrics(self._client)).load
        if load is not None and not load.running and not load.waiting:
            yield
            return
        async with self._paused_server("keep"):
            yield

    @asynccontextmanager
    async def _paused_server(self, mode: str) -> AsyncIterator[None]:
        params = {"mode": mode, "clear_cache": "false"}
        async with self._pauses.one(), while_paused(
            lambda: control(self._client, "/pause", says("status", "paused"), params=params),
            lambda: control(self._client, "/resume", says("status", "resumed")),
        ):
            yield

    # ---------------------------------------------------------------- the rest

    async def health(self) -> Health:
        """``/health``, the label of the weights (or the start of the process), and the load of ``/metrics``."""
        try:
            if wrong := await self._refuses_probe("/health"):
                return Health(ok=False, detail=wrong)
            label = await self.label()
            paused = await self._is_paused()
            amiss, lost = await self._amiss()
        except EngineError as error:
            return Health(ok=False, detail=str(error))
        same, metrics = await self._process.check()
        current = same is not False and label in (None, self._labels.of(self._adapters.base)) and not lost
        known = same is not None or label is not None
        load = metrics.load
        counters = {} if load is None else {"running": float(load.running), "waiting": float(load.waiting)}
        counters |= self.attachments.counters
        told = (
            self._not_whole, amiss, "" if current else "the server was started anew, or has other weights",
            "" if known else UNSAID,
            "somebody has paused the server; resume it (POST /resume)" if paused else "",
        )  # fmt: skip
        detail = "; ".join(filter(None, told))
        whole = not self._not_whole
        ok = known and whole and not amiss
        return Health(ok=ok, detail=detail, counters=counters, current=current and whole, load=load)

    async def _has_weights(self) -> bool | None:
        """Return whether the server has the present weights; None means that it does not say."""
        if self.facts.label is None:
            return await super()._has_weights()
        try:
            return await self.label() == self._labels.of(self._adapters.base)
        except EngineError:
            return None

    async def _is_paused(self) -> bool:
        """Return whether somebody else has paused the server."""
        if not self.facts.developer_routes or self._pauses.now or self._keeps is not None:
            return False
        reply = await self._client.call("GET", "/is_paused", retry=True)
        return reply.ok and says("is_paused", True)(words_of(reply)) and not self._pauses.now

    async def close(self) -> None:
        """Calls in flight break, and the server forgets april's adapters."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FORGET_S):
                for adapter in self._adapters.all():
                    await unload_adapter(self._client, adapter)
        await self._client.close()


def _reloaded(said: object) -> bool:
    """Return how a server says that its workers have reloaded their weights: each of them returned nothing."""
    results = said.get("results") if isinstance(said, dict) else None
    return isinstance(results, list) and bool(results) and all(result is None for result in results)


async def connect_vllm(config: VllmEngineConfig) -> list[VllmEngine | OpenAIEngine]:
    """Make one engine per server; one without any abort is driven like an OpenAI server."""

    async def connect(client: HttpClient) -> Engine:
        facts = await probe_vllm(client, config)
        if facts.paused:
            raise EngineError(f"{client.url} is paused; resume it (POST /resume) and start again")
        if facts.capabilities.abort_means is AbortMeans.CLOSE:
            return _closing_streams(client, facts)
        engine = VllmEngine(client, facts, stream=config.max_token_loss is not None)
        await engine.set_label(engine._labels.of(FIRST_VERSION))
        return engine

    return [e for e in await connect_all(config, connect) if isinstance(e, (VllmEngine, OpenAIEngine))]


def _closing_streams(client: HttpClient, facts: VllmFacts) -> OpenAIEngine:
    common = {f.name: getattr(facts, f.name) for f in fields(ServerFacts)}
    common["capabilities"] = replace(
        facts.capabilities, updates_from_disk=False, version_spans=False, verifies_weights=False, extras=()
    )
    common["label"] = None  # april neither sets nor asks it there
    return OpenAIEngine(client, OpenAIFacts(token_shape=TokenShape.RETURN_TOKEN_IDS, keeps_eos=None, **common))
