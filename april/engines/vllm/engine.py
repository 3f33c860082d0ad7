"""Engine for vLLM servers: generates over HTTP, aborts requests by id, and loads weights from disk.

april gives the weights of a server a label, which names their policy version. Invariants: april never aborts a request
by closing its HTTP call, because the server would drop tokens; and april uses a response only after the server has
confirmed the label.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from april.config.engines import THIS_MACHINE, VllmEngineConfig
from april.core.versions import FIRST_VERSION, PolicyVersion
from april.engines.gloo_group import local_address
from april.engines.http.http_client import (
    HttpClient,
    Reply,
    control,
    has_value,
    json_value,
    refuses_probe,
    require_confirmation,
    weight_version,
)
from april.engines.http.loaded_adapters import LOAD_S, LoadedAdapter, unload_adapter
from april.engines.http.response_reader import ResponseReader
from april.engines.http.response_stream import GenerateRoute, ResponseStream
from april.engines.http.sent_attachments import SentAttachments, Urls
from april.engines.http.server_probe import connect_all, is_listed
from april.engines.http.server_process import (
    PAUSE_CHECK_S,
    Confirmation,
    read_metrics,
    require_left_paused,
    while_paused,
)
from april.engines.http.weight_directories import LOAD_WEIGHTS_S, is_adapter
from april.engines.http.weight_labels import (
    is_another_process,
    mark_process,
    require_base,
    require_first_weights,
    start_is_known,
)
from april.engines.http.wire import error_text, positive
from april.engines.openai.engine import OpenAIEngine
from april.engines.protocol import Engine, Health, OnWeightUpdate, Request
from april.engines.vllm.probe import LOAD_ADAPTER, VllmFacts, probe_vllm
from april.engines.vllm.transfer import CONFIRMATIONS, FINISH, Transfers
from april.engines.vllm.wire import TOKEN_ROUTE, TokenParser, engine_id, misses_attachment, request_body
from april.errors import EngineBusy, EngineError
from april.text.server_text import quoted

RESET_TRIES = 20
RESET_WAIT_S = 0.1
"""Seconds between tries to empty the cache; the server may refuse the first ones, right after its last request."""
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt")


class VllmEngine(Transfers):
    """Engine for one vLLM server, made by :func:`connect_vllm`; implements :class:`april.engines.protocol.Engine`.

    With ``stream``, all requests are streamed; otherwise only requests that ask for it, and requests that upload an
    image. The first event of an upload shows that the server has the image; other requests with the same image wait
    until then. The server stores images by digest, also across weight updates, so each image is sent once, and again
    if the server reports it missing.
    """

    def __init__(self, client: HttpClient, facts: VllmFacts, *, stream: bool = False) -> None:
        super().__init__(client.name, facts.capabilities)
        self._client, self._servers, self._configured_model = client, (client,), facts.asked
        self.facts, self._stream = facts, stream
        self.attachments = SentAttachments(misses_attachment if facts.keeps_attachments else None)
        known = start_is_known(facts.label)  # if so, a restarted server again has the weights of the first version
        self._endpoint = GenerateRoute(
            client=client, route=TOKEN_ROUTE, admission=self._admission, labels=self._labels, prepare=self._prepare,
            abort_means=facts.capabilities.abort_means, marks_end=True, attachments=self.attachments,
            routing_key=facts.routing_key,
            confirmation=Confirmation(
                self._has_weights, self.name, lambda: not known or self._version != FIRST_VERSION
            ),
        )  # fmt: skip
        self._pause_policy: OnWeightUpdate | None = None
        """How requests continue after the present pause (KEEP or RECOMPUTE); None if no pause was asked for that keeps
        the requests. A failed call counts as asked for, since the server may be paused all the same."""
        self._pausing = False
        """True while this engine has paused the requests of other clients for a weight update."""
        self._paused_as: str | None = None
        """Label that the server showed when this engine was paused; None if the server was not asked or did not answer.
        Another label later means that the server was restarted."""

    # ---------------------------------------------------------------- requests

    def generate(self, request: Request) -> ResponseStream:
        """Start one call of the token route. Raises RequestRefused for a request that the server must not get."""
        return ResponseStream(self._endpoint, request, streamed=self._stream or request.stream)

    def _prepare(self, request: Request, streamed: bool, urls: Urls) -> tuple[ResponseReader, bytes]:
        self._check(request)
        facts, capabilities = self.facts, self._capabilities
        parser = TokenParser(request, facts.routing)
        reader = ResponseReader(parser, self._version, self._labels, self._adapters.adapted_version)
        model = self._adapters.note_request(request.attempt_id) or facts.model
        body = request_body(
            model, request, stream=streamed, priority=facts.priorities, bans=capabilities.bans,
            seeds=capabilities.honours_seeds,
            # the salt is unique to this run and these weights, so the prefix cache returns only entries made with them
            salt=self._labels.salt(self._version), urls=urls,
        )  # fmt: skip
        return reader, body

    # ---------------------------------------------------------------- aborts

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        """Abort all these requests in one call. The reply confirms nothing; only the end of each response does."""
        if ids := self._to_abort(attempt_ids):
            body = {"request_ids": list(map(engine_id, ids))}
            await control(self._client, "/abort_requests", has_value("status", "aborted"), body=body)

    # ---------------------------------------------------------------- weights

    async def pause(self) -> None:
        """Pause like :class:`ServerEngine`, and note the label that the server shows.

        If an earlier :meth:`pause_in_flight` has failed, the server is resumed first.
        """
        if self._pause_policy is not None:  # from a pause that failed; the server may be paused with a full cache
            self._admission.close()
            await control(self._client, "/resume", has_value("status", "resumed"))
            self._pause_policy = None
        await super().pause()
        await self._note_label()

    async def pause_in_flight(self, in_flight: OnWeightUpdate) -> None:
        """Pause the server together with its requests. With RECOMPUTE it also drops all cached keys and values."""
        self._admission.close()
        self._pause_policy = in_flight
        clear = "true" if in_flight is OnWeightUpdate.RECOMPUTE else "false"
        if in_flight is OnWeightUpdate.RECOMPUTE:
            self.attachments.forget()  # the server drops its attachments as well, and would refuse their digests
        await control(
            self._client, "/pause", has_value("status", "paused"), params={"mode": "keep", "clear_cache": clear}
        )
        await self._note_label()

    def require_idle(self) -> None:
        """Raise EngineError while requests are running, unless the server itself is paused with them."""
        if self._pause_policy is None:
            super().require_idle()

    async def resume(self) -> None:
        """Admit requests again, and resume the server if it was paused with its requests."""
        if self._pause_policy is not None:
            # set before the resume, because the requests that the server has kept continue at once
            self._endpoint.set_version(self._version)
            await control(self._client, "/resume", has_value("status", "resumed"))
            self._pause_policy = None
        await super().resume()

    async def _note_label(self) -> None:
        self._paused_as = None
        with suppress(EngineError, TimeoutError):  # a server that does not answer fails in the update
            async with asyncio.timeout(PAUSE_CHECK_S):
                self._paused_as = await mark_process(self, self._labels, self.facts.label)

    @property
    def sender_address(self) -> str:
        """Return this machine's address on the route to the server."""
        return local_address(*self._client.address)

    async def ranks(self) -> int:
        said = await self._client.json("GET", "/get_world_size", params={"include_dp": "true"}, retry=True)
        size = positive(said, "world_size") if isinstance(said, dict) else None
        if size is None:
            raise EngineError(f"{self._client.url}/get_world_size does not report how many workers there are")
        return size

    async def _transfer(self, call: str, arguments: dict[str, Any] | None = None) -> None:
        body = {} if call == FINISH else arguments
        reply = await self._client.call("POST", call, body, timeout_s=None)
        require_confirmation(self._client, reply, call, CONFIRMATIONS[call])

    async def _load_whole(self, version: PolicyVersion, path: str | None) -> None:
        """Load the weights, empty the cache, set the label, and check that the server shows it."""
        self.require_idle()
        await self._require_model()
        if path is None:
            await require_first_weights(self, self._labels, self.facts.label, version)
        async with self._pause_of_others or self._other_clients_paused():
            process = (await read_metrics(self._client)).started_s
            mark = await (self._check_weights_written(version) if path is None else self._load(path, version))
            if self._pause_policy is None:
                await self._empty_cache()
            else:  # RECOMPUTE emptied the prefix cache at the pause; under KEEP, salts tell old entries apart
                await self._empty_encoder_cache()
            if await self.label() != mark:
                raise EngineError(self._restarted_while_loading(version))
            await self.set_label(self._labels.of(version))
            # if the server restarted just before set_label, the label is new but the weights are those of its start
            if (await read_metrics(self._client)).started_s not in (None, process):
                raise EngineError(self._restarted_while_loading(version))

    async def _load_adapter(self, adapter: LoadedAdapter, version: PolicyVersion) -> None:
        """Load an adapter. The prefix cache is not emptied, because its keys contain the adapter's name."""
        await require_base(self, self._labels, self.facts.label, self._adapters.base)
        body = {"lora_name": adapter.name, "lora_path": adapter.path}
        reply = await self._client.call("POST", LOAD_ADAPTER, body, timeout_s=LOAD_S)
        said = (
            f"{self._client.url} could not load the adapter in {adapter.path}: it answered {reply.status}, "
            f"{error_text(reply.body)}"
        )
        if reply.status in (429, 503):
            raise EngineBusy(said, reply.retry_after_s)
        if not reply.ok:
            raise EngineError(f"{said}; it keeps its old adapter")
        if await is_listed(self._client, adapter.name) is not True:
            raise EngineError(f"{said}, and does not list the adapter; it keeps its old one")
        if await self.label() != self._labels.of(self._adapters.base):
            raise EngineError(
                f"{self._client.url} was restarted while it loaded {adapter.path}; update its weights again"
            )

    async def _unload(self, adapter: LoadedAdapter) -> bool:
        async def is_gone(reply: Reply) -> bool:
            return reply.ok or reply.status == 404  # unloaded, or never loaded

        return await unload_adapter(self._client, "/v1/unload_lora_adapter", adapter, is_gone)

    def _restarted_while_loading(self, version: PolicyVersion) -> str:
        self._why_incomplete = (
            f"{self._client.url} was restarted during the update to {version}, and may have the weights of its start; "
            "update its weights again"
        )
        return self._why_incomplete

    def _require_loadable(self, path: str) -> None:
        """Raise EngineError if the directory contains no weights, because vLLM would crash.

        A directory that does not exist here is accepted if the server runs on another machine, which may have it.
        """
        super()._require_loadable(path)
        if is_adapter(path):
            return
        directory = Path(path)
        if any(True for kind in WEIGHT_FILES for _ in directory.glob(kind)):
            return
        if directory.exists() or urlsplit(self._client.url).hostname in THIS_MACHINE:
            raise EngineError(
                f"engine {self.name} was not asked to load {path}: the directory contains no weights "
                f"({', '.join(WEIGHT_FILES)}), and vLLM would crash; save the model there first"
            )

    async def _load(self, path: str, version: PolicyVersion) -> str:
        """Load weights from ``path``; return the label that identifies the server's process during the load."""
        mark = await mark_process(self, self._labels, self.facts.label, version)
        await self.forget_transfers()
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        self._why_incomplete = f"engine {self.name} has no weights until an update to {version} succeeds"
        reply = await self._client.call("POST", "/collective_rpc", body, timeout_s=LOAD_WEIGHTS_S)
        if not (reply.ok and _reloaded(json_value(reply))):
            self._why_incomplete = (
                f"{self._client.url} could not load {path} as {version}: it answered {reply.status}, "
                f"{error_text(reply.body)}; it may have no weights now, with which it crashes: update its weights "
                "again, or restart it"
            )
            raise EngineError(self._why_incomplete)
        return mark

    async def _check_weights_written(self, version: PolicyVersion) -> str:
        """Return the server's label; raises if it was restarted since the pause in which the trainer wrote weights."""
        self._why_incomplete = f"engine {self.name} is between two versions until an update to {version} succeeds"
        shown = await self.label()
        if not self._admission.is_open and is_another_process(
            shown, self._paused_as, self._labels, self.facts.label
        ):  # fmt: skip
            raise EngineError(self._restarted_while_loading(version))
        return shown

    async def _empty_cache(self) -> None:
        """Empty the prefix cache and the encoder cache, which hold values computed with old weights."""
        route, done, said = "/reset_prefix_cache", has_value("success", True), b""
        for _ in range(RESET_TRIES):
            reply = await self._client.call("POST", route, params={"reset_running_requests": "true"}, retry=True)
            self._client.require_ok(reply, route)
            if done(json_value(reply)):
                await self._empty_encoder_cache()
                return
            said = reply.body
            await asyncio.sleep(RESET_WAIT_S)
        raise EngineError(
            f"{self._client.url} did not empty its cache; do other clients send it requests? It said: "
            f"{error_text(said)}"
        )

    async def _empty_encoder_cache(self) -> None:
        """Empty the encoder cache of vLLM's scheduler.

        Loading weights empties only the workers' cache. The scheduler would then rely on image features that the
        workers no longer have, which crashes the server.
        """
        route = "/reset_encoder_cache"
        self._client.require_ok(await self._client.call("POST", route, retry=True), route)

    async def set_label(self, label: str) -> None:
        """Set the label of the present weights. Raises EngineError unless the server then shows the label."""
        await control(self._client, "/update_weight_version", has_value("success", True), body={"new_version": label})
        now = await self.label()
        if now != label:
            raise EngineError(f"{self._client.url} labels its weights {quoted(now)} after april set {label}")

    async def label(self) -> str:
        """Return the label (version name) that the server shows for its present weights."""
        return await weight_version(self._client, "/weight_info")

    @asynccontextmanager
    async def _other_clients_paused(self) -> AsyncIterator[None]:
        """Pause the server if it has requests of other clients, so that these do not run while weights are loaded.

        Without such requests the server is not paused: if april died, it would stay paused and serve nobody.
        """
        if self._pause_policy is not None:
            yield
            return
        load = (await read_metrics(self._client)).load
        if load is not None and not load.running and not load.waiting:
            yield
            return
        params = {"mode": "keep", "clear_cache": "false"}
        self._pausing = True
        try:
            async with while_paused(
                lambda: control(self._client, "/pause", has_value("status", "paused"), params=params),
                lambda: control(self._client, "/resume", has_value("status", "resumed")),
            ):
                yield
        finally:
            self._pausing = False

    # ---------------------------------------------------------------- the rest

    async def health(self) -> Health:
        """Check ``/health`` and the label of the weights; the load comes from ``/metrics``."""
        try:
            if wrong := await refuses_probe(self._client, "/health"):
                return Health(ok=False, detail=wrong)
            label = await self.label()
            paused = await self._is_paused()
            problem, lost = await self._why_version_gone()
        except EngineError as error:
            return Health(ok=False, detail=str(error))
        current = self._labels.is_of(label, self._adapters.base) and not lost
        load = (await read_metrics(self._client)).load
        findings = (
            self._why_incomplete, problem, "" if current else "the server was restarted, or has other weights",
            "somebody has paused the server; resume it (POST /resume)" if paused else "",
        )  # fmt: skip
        detail = "; ".join(filter(None, findings))
        whole = not self._why_incomplete
        return Health(ok=whole and not problem, detail=detail, current=current and whole, load=load)

    async def _has_weights(self) -> bool | None:
        try:
            return self._labels.is_of(await self.label(), self._adapters.base)
        except EngineError:
            return None

    async def _is_paused(self) -> bool:
        if self._pausing or self._pause_policy is not None:
            return False
        reply = await self._client.call("GET", "/is_paused", retry=True)
        return reply.ok and has_value("is_paused", True)(json_value(reply)) and not self._pausing

    async def close(self) -> None:
        """Unload april's adapters and close the connections; calls in progress fail."""
        await self._unload_all()
        await self._client.close()


def _reloaded(said: object) -> bool:
    """Return whether all workers have reloaded their weights; each confirms this by returning None."""
    results = said.get("results") if isinstance(said, dict) else None
    return isinstance(results, list) and bool(results) and all(result is None for result in results)


async def connect_vllm(config: VllmEngineConfig) -> list[VllmEngine | OpenAIEngine]:
    """Make one engine per server. A server with closed developer routes is used as an OpenAI-compatible server."""

    async def connect(client: HttpClient) -> Engine:
        facts = await probe_vllm(client, config)
        if facts.paused:
            load = (await read_metrics(client)).load
            require_left_paused(client.url, facts.label, load, "resume it (POST /resume)")
            await control(client, "/resume", has_value("status", "resumed"))
            facts = await probe_vllm(client, config)
        if not isinstance(facts, VllmFacts):
            return OpenAIEngine(client, facts)
        engine = VllmEngine(client, facts, stream=config.max_token_loss is not None)
        if name := engine.set_up_labels([facts.label], present=config.first_weights == "present"):
            await engine.set_label(name)
        return engine

    return [e for e in await connect_all(config, connect) if isinstance(e, (VllmEngine, OpenAIEngine))]
