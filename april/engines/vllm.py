"""vLLM servers as engines: one HTTP call per attempt, ended by its id or by a pause, weights loaded from disk.

Invariant: no call for an attempt is closed in order to end it, because the server would drop its tokens; and no token
is handed over under a label that the server does not confirm where it can.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

from april.config_engines import VllmEngineConfig
from april.core.versions import FIRST_VERSION, PolicyVersion
from april.engines.http_client import HttpClient, error_text
from april.engines.openai import OpenAIEngine
from april.engines.openai_metrics import read_metrics
from april.engines.openai_probe import OpenAIOffer
from april.engines.openai_wire import TokenShape
from april.engines.protocol import AbortMeans, Capabilities, Engine, EngineFinish, Health, Request
from april.engines.server_engine import ServerEngine
from april.engines.server_pause import standing_still
from april.engines.server_pool import connect_all
from april.engines.server_stream import ServerStream
from april.engines.vllm_offer import VllmOffer, probe_vllm
from april.engines.vllm_wire import ReplyReader, engine_id, request_body
from april.errors import EngineError

LOAD_WEIGHTS_S = 3600.0
"""Longest wait for a server to read its weights."""
RESET_TRIES = 20
RESET_WAIT_S = 0.1
"""The cache cannot be emptied for a moment after the last request has gone."""
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt")
THIS_MACHINE = ("localhost", "127.0.0.1", "::1")


class VllmEngine(ServerEngine):
    """One vLLM server; implements :class:`april.engines.protocol.Engine`. Made by :func:`connect_vllm`.

    Args:
        offer: what it can do; its ``abort_means`` must not be CLOSE.
        capabilities: the same in the words of the layers above.
        stream: hand tokens over as they come, always; otherwise only where a request asks for it.
    """

    def __init__(
        self, client: HttpClient, offer: VllmOffer, capabilities: Capabilities, *, stream: bool = False
    ) -> None:
        super().__init__(client.name, capabilities)
        self._client = client
        self.offer = offer
        self._stream = stream
        self._started_s = offer.started_s
        # aborts that somebody asked for; the server's pause ends others along with them
        self._unwanted: set[str] = set()
        self._pausing = asyncio.Lock()

    # ---------------------------------------------------------------- requests

    def generate(self, request: Request) -> ServerStream:
        """One call; raises RequestRefused for what the server must not be asked."""
        return _VllmStream(self, request, stream=self._stream or request.stream)

    # ---------------------------------------------------------------- aborts

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        """By id, all in one call: the reply is no receipt, only the end of each request is.

        Behind several API processes, where a call reaches only one: by pausing the server and resuming it.
        """
        ids = self._to_abort(attempt_ids)
        if not ids:
            return
        if self._capabilities.abort_means is AbortMeans.PAUSE:
            self._unwanted.update(ids)
            async with self._standing_still("abort"):
                return
        route = self.offer.abort_route
        await self._call(route, {"request_ids": [engine_id(self.offer.route, i) for i in ids]})

    # ---------------------------------------------------------------- weights

    async def update_weights(self, version: PolicyVersion, path: str | None = None) -> None:
        """Load, empty the cache, name the weights, and look whether the name is there.

        Raises:
            EngineError: requests are running, the server cannot load from a directory, or it has failed; if it is
                between two versions then, it gets no requests before an update succeeds.
        """
        self.require_idle()
        if path is not None:
            self._require_loadable(path)
        # without developer routes the trainer has loaded the weights and emptied the cache; nothing here can do it
        if self.offer.developer_routes:
            async with self._frozen():
                if path is not None:
                    await self._load(path, version)
                await self._empty_cache()
                await self.set_label(version)
        self._labels.present, self._torn = version, ""
        # a server that was started anew and has these weights now is the present one
        self._started_s = (await read_metrics(self._client)).started_s or self._started_s

    def _require_loadable(self, path: str) -> None:
        """vLLM dies of a directory without weights; one that cannot be seen from here may be there for the server."""
        if not self.offer.updates_from_disk:
            raise EngineError(
                f"engine {self.name} cannot load weights from {path}: set VLLM_SERVER_DEV_MODE=1 at the server, or "
                "transfer them with weight_update(transfer=...)"
            )
        directory = Path(path)
        if any(True for kind in WEIGHT_FILES for _ in directory.glob(kind)):
            return
        if directory.exists() or urlsplit(self._client.url).hostname in THIS_MACHINE:
            raise EngineError(
                f"engine {self.name} was not asked to load {path}: there are no weights in it "
                f"({', '.join(WEIGHT_FILES)}), and vLLM would die of that; save the model there first"
            )

    async def _load(self, path: str, version: PolicyVersion) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        self._torn = f"engine {self.name} is without weights until an update to {version} has succeeded"
        reply = await self._client.call("POST", "/collective_rpc", body, timeout_s=LOAD_WEIGHTS_S)
        if not reply.ok:
            self._torn = (
                f"{self._client.url} could not load {path} as {version}: {error_text(reply.body)}; it may be without "
                "weights now, and dies of that: update its weights again, or start it anew"
            )
            raise EngineError(self._torn)

    async def _empty_cache(self) -> None:
        """Keys and values of old weights must not serve new ones."""
        for _ in range(RESET_TRIES):
            said = await self._client.json(
                "POST", "/reset_prefix_cache", params={"reset_running_requests": "true"}, retry=True
            )
            if isinstance(said, dict) and said.get("success", True):
                return
            await asyncio.sleep(RESET_WAIT_S)
        raise EngineError(f"{self._client.url} did not empty its cache; does somebody else keep it busy?")

    async def set_label(self, version: PolicyVersion) -> None:
        """Name the present weights; raises EngineError when the server does not show the name afterwards."""
        if self.offer.label is None:
            return
        label = self._labels.of(version)
        await self._client.json("POST", "/update_weight_version", {"new_version": label}, retry=True)
        now = await self._label()
        if now != label:
            raise EngineError(f"{self._client.url} says its weights are {now} after april called them {label}")

    async def _label(self) -> str | None:
        info = await self._client.json("GET", "/weight_info", retry=True)
        return str(info.get("weight_version")) if isinstance(info, dict) else None

    @asynccontextmanager
    async def _frozen(self) -> AsyncIterator[None]:
        """Requests of other clients stand still meanwhile.

        Only while there are any: a server that is left paused, should april die here, serves nobody.
        """
        load = (await read_metrics(self._client)).load
        if load is not None and not load.running and not load.waiting:
            yield
            return
        async with self._standing_still("keep"):
            yield

    @asynccontextmanager
    async def _standing_still(self, mode: str) -> AsyncIterator[None]:
        """One pause at a time: the end of another would end this one."""
        params = {"mode": mode, "clear_cache": "false"}
        async with self._pausing, standing_still(
            lambda: self._call("/pause", params=params), lambda: self._call("/resume")
        ):
            yield

    # ---------------------------------------------------------------- the rest

    async def health(self) -> Health:
        """``/health``, the label of the weights (or the start of the process), and the load of ``/metrics``."""
        try:
            reply = await self._client.call("GET", "/health", retry=True)
            if not reply.ok:
                return Health(False, f"{self._client.url} answers {reply.status} to a health probe")
            label = await self._label() if self.offer.label is not None else None
            paused = await self._is_paused()
        except EngineError as error:
            return Health(False, str(error))
        metrics = await read_metrics(self._client)
        known = None not in (self._started_s, metrics.started_s)
        same_process = not known or metrics.started_s == self._started_s
        current = same_process and label in (None, self._labels.of(self._version))
        load = metrics.load
        counters = {} if load is None else {"running": float(load.running), "waiting": float(load.waiting)}
        told = (
            self._torn, "" if current else "the server was started anew, or has other weights",
            "somebody has paused the server; resume it (POST /resume)" if paused else "",
        )  # fmt: skip
        detail = "; ".join(filter(None, told))
        return Health(not self._torn, detail, counters, current and not self._torn, load)

    async def _is_paused(self) -> bool:
        """By somebody else."""
        if not self.offer.developer_routes or self._pausing.locked():
            return False
        reply = await self._client.call("GET", "/is_paused", retry=True)
        return reply.ok and b"true" in reply.body and not self._pausing.locked()

    async def close(self) -> None:
        """Calls in flight break."""
        await self._client.close()

    async def _call(
        self, route: str, body: object = None, params: dict[str, str] | None = None
    ) -> None:
        """A control call that may be made twice."""
        reply = await self._client.call("POST", route, body, params=params, retry=True)
        self._client.require_ok(reply, route)


class _VllmStream(ServerStream):
    """One request."""

    __slots__ = ("_engine", "_replies")

    def __init__(self, engine: VllmEngine, request: Request, *, stream: bool) -> None:
        super().__init__(
            engine._client, engine._admission, request, engine.offer.route, stream=stream, needs_done=True
        )
        self._engine = engine

    def _prepare(self) -> tuple[ReplyReader, bytes]:
        engine, request, offer = self._engine, self._request, self._engine.offer
        engine._check(request)
        self._replies = ReplyReader(
            offer.route, request.attempt_id, engine._version, labels=engine._labels if offer.spans else None
        )
        body = request_body(offer.route, offer.model, request, stream=self._stream, priority=offer.priorities)
        return self._replies, body

    def _again(self) -> bool:
        """A pause has ended this request before its first token, and nobody wanted that."""
        engine, replies = self._engine, self._replies
        return (
            replies.finish is EngineFinish.ABORT
            and replies.count == 0
            and engine._capabilities.abort_means is AbortMeans.PAUSE
            and self._request.attempt_id not in engine._unwanted
        )

    def _left(self) -> None:
        self._engine._unwanted.discard(self._request.attempt_id)

    def _weights(self) -> PolicyVersion:
        return self._engine._version


async def connect_vllm(config: VllmEngineConfig) -> list[VllmEngine | OpenAIEngine]:
    """One engine per server; a server without any abort is driven like an OpenAI-compatible one.

    Raises:
        ConfigError: a server is no vLLM server, or lacks what april needs.
        EngineError: a server could not be asked, or is paused.
    """

    async def connect(client: HttpClient) -> Engine:
        offer = await probe_vllm(client, config)
        if offer.paused:
            raise EngineError(f"{client.url} is paused; resume it (POST /resume) and start again")
        if offer.abort_means is AbortMeans.CLOSE:
            return _closing_streams(client, offer, config)
        engine = VllmEngine(
            client, offer, offer.capabilities(config), stream=config.max_token_loss is not None
        )
        await engine.set_label(FIRST_VERSION)
        return engine

    return [e for e in await connect_all(config, connect) if isinstance(e, (VllmEngine, OpenAIEngine))]


def _closing_streams(client: HttpClient, offer: VllmOffer, config: VllmEngineConfig) -> OpenAIEngine:
    same = OpenAIOffer(
        offer.model, TokenShape.RETURN_TOKEN_IDS, offer.logprob_kind, True, True, None, offer.max_model_len,
        offer.vocab_size, offer.eos_token_ids, offer.missing,
    )  # fmt: skip
    return OpenAIEngine(client, same, max_in_flight=config.max_in_flight, started_s=offer.started_s)
