"""Engine for SGLang servers: generates over HTTP, aborts requests by id, loads weights from disk or from the trainer.

The module ``worker`` makes the control calls to one server; ``transfer`` sends weights.

april gives the weights of a server a label, which names their policy version. Invariants: april never aborts a request
by closing its HTTP call, because the server would drop tokens; and april uses a response only after the server has
confirmed the label.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

from april.config.engines import SglangEngineConfig
from april.core.sampling import attempt_seed
from april.core.versions import PolicyVersion
from april.engines.gloo_group import local_address
from april.engines.http.http_client import HttpClient
from april.engines.http.loaded_adapters import LoadedAdapter
from april.engines.http.response_reader import ResponseReader
from april.engines.http.response_stream import GenerateRoute, ResponseStream
from april.engines.http.sent_attachments import SentAttachments, Urls
from april.engines.http.server_engine import ServerEngine
from april.engines.http.server_probe import client_of, connect_all
from april.engines.http.server_process import require_left_paused
from april.engines.http.weight_labels import START_LABEL, require_first_weights
from april.engines.protocol import Engine, EngineLoad, Health, Request
from april.engines.sglang.probe import SglangFacts, probe_sglang, workers_of
from april.engines.sglang.router import common_facts, require_same_workers
from april.engines.sglang.transfer import WeightTransfer, all_or_first_error
from april.engines.sglang.wire import ReplyParser, request_body, rid_of
from april.engines.sglang.worker import PartlyUpdated, SglangWorker
from april.engines.weight_transfer import GroupInvitation, Handshake, TensorSpec
from april.errors import EngineError, EngineUnreachable
from april.text.server_text import quoted

ABORTS_AT_ONCE = 32
"""Maximum number of abort calls in progress to one server; hundreds at a time have crashed servers."""
HEALTH_S = 5.0
"""Maximum seconds to wait for each answer that a health check needs."""
ROUTER_PATIENCE_S = 15.0
"""Maximum seconds to wait for workers that the router does not know yet."""
STREAM_INTERVAL = 16
"""Default number of tokens per stream event. An abort loses tokens only if the server has preempted the request for
lack of memory, and then fewer than this number. Client CPU measured per 1,000 tokens: 37 ms at 1 token per event,
6.8 ms at 8, 3.5 ms at 16, 2.0 ms at 50, 0.9 ms without streaming (which may lose up to 49 tokens)."""
STOP_STRING_INTERVAL = 2
"""Tokens per stream event for a request whose stop strings april finds itself, so that few surplus tokens are made."""


class SglangEngine(ServerEngine):
    """Engine for one SGLang server, or for several behind one router.

    Implements :class:`april.engines.protocol.Engine`. Every request carries the bytes of its images, because SGLang
    cannot be sent a digest instead.

    Args:
        requests: Client for requests, connected to the server itself or to the router.
        workers: The servers; control calls go to each of them.
        facts: Results of the probe that hold for all servers.
        max_token_loss: Maximum tokens of a response that may be lost when a server dies; None means no limit.
    """

    def __init__(
        self, requests: HttpClient, workers: Sequence[SglangWorker], facts: SglangFacts,
        max_token_loss: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(requests.name, facts.capabilities)
        self._requests = requests
        self.workers = tuple(workers)
        self._servers, self._configured_model = tuple(worker.client for worker in workers), facts.asked
        self.facts = facts
        self._max_token_loss = max_token_loss
        self.attachments = SentAttachments()
        self._endpoint = GenerateRoute(
            client=requests, route="/generate", admission=self._admission, labels=self._labels, prepare=self._prepare,
            abort_means=facts.capabilities.abort_means, marks_end=False, paused_by_others=self._others_paused_servers,
            attachments=self.attachments, routing_key=facts.routing_key,
        )  # fmt: skip
        self.on_foreign_pause: Callable[[], None] | None = None
        """Callback for requests that end because another client has paused the servers to change their weights. april
        sends no requests from then until :meth:`resume`, so a weight update must follow. None disables the check."""
        self.is_paused_by_others = False
        """True from a call of ``on_foreign_pause`` until :meth:`resume`."""
        self._pause_check: asyncio.Task[None] | None = None
        """Running check for a pause by others, shared by all requests that end meanwhile; None if there is none."""
        self._paused_as: tuple[str | None, ...] = (None,) * len(self.workers)
        """Label that each worker showed when this engine was paused; None if the worker did not answer. Another label
        later means that the worker was restarted."""
        self._transfers = tuple(WeightTransfer(worker) for worker in self.workers)
        self._mark = ""
        """Label for partly written weights in the present transfer."""

    # ---------------------------------------------------------------- requests

    def generate(self, request: Request) -> ResponseStream:
        """Start one call of ``/generate``. Raises RequestRefused for a request that the server must not get."""
        return ResponseStream(self._endpoint, request, streamed=self._interval(request) > 0)

    def _prepare(self, request: Request, streamed: bool, urls: Urls) -> tuple[ResponseReader, bytes]:
        self._check(request)
        facts = self.facts
        parser = ReplyParser(request, incremental=streamed and facts.incremental, routing=facts.routing)
        adapter = self._adapters.note_request(request.attempt_id) or facts.adapter
        reader = ResponseReader(parser, self._version, self._labels, self._adapters.adapted_version)
        interval = self._interval(request) if streamed else None
        body = request_body(
            request, stream=streamed, stream_interval=interval, seed=self._seed(request), adapter=adapter, urls=urls,
            label=self._labels.of(self._adapters.base), salt=self._labels.salt(self._version),
        )  # fmt: skip
        return reader, body

    def _interval(self, request: Request) -> int:
        """Return the tokens per stream event; 0 means one response at the end."""
        if self._max_token_loss is not None:
            interval = max(1, self._max_token_loss)
        elif self._capabilities.streams:
            interval = STREAM_INTERVAL
        else:
            interval = STOP_STRING_INTERVAL if request.stream else 0
        return min(interval, STOP_STRING_INTERVAL) if request.stream else interval

    def _seed(self, request: Request) -> int | None:
        """Return the request's seed, or one made from its sample; None if the server ignores seeds.

        The server gives the same seed to all requests that have none.
        """
        if not self._capabilities.honours_seeds:
            return None
        if request.sampling.seed is not None:
            return request.sampling.seed
        group, index = request.sample_key or (0, 0)
        return attempt_seed(0, group, index, len(request.token_ids))

    # ---------------------------------------------------------------- aborts

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        """Abort these attempts (None means all) at every worker, since it is unknown which worker has a request."""
        asked = self._to_abort(attempt_ids)
        self._endpoint.abort(asked)
        rids = [rid_of(i) for i in asked]
        if rids:
            await _all(worker.abort(rids, ABORTS_AT_ONCE) for worker in self.workers)

    async def _others_paused_servers(self) -> bool:
        """Return whether another client has paused the servers; if so, close admission.

        Requests that have no token yet then wait for admission again; the servers would run them under unknown weights.
        """
        if self.on_foreign_pause is None:
            return False
        if self._admission.is_open:
            if self._pause_check is None:
                self._pause_check = asyncio.create_task(self._check_for_pause(self.on_foreign_pause))
            await asyncio.shield(self._pause_check)
        return not self._admission.is_open

    async def _check_for_pause(self, callback: Callable[[], None]) -> None:
        labels, base = self._labels, self._adapters.base
        foreign = await asyncio.gather(*(w.is_foreign(labels, base) for w in self.workers), return_exceptions=True)
        self._pause_check = None
        if self._admission.is_open and any(answer is True for answer in foreign):
            self._admission.close()
            self.is_paused_by_others = True
            self._endpoint.recall_unstarted()
            callback()

    # ---------------------------------------------------------------- weights

    async def pause(self) -> None:
        """Pause like :class:`ServerEngine`, and note each worker's label, by which the update notices a restart."""
        await super().pause()
        marks = await asyncio.gather(*(w.mark(self._labels) for w in self.workers), return_exceptions=True)
        # a worker that does not answer fails in the update
        self._paused_as = tuple(None if isinstance(mark, BaseException) else mark for mark in marks)

    async def resume(self) -> None:
        """Admit requests again, and resume workers that a transfer has paused."""
        self.is_paused_by_others = False
        await _all(transfer.resume() for transfer in self._transfers)
        await super().resume()

    async def _load_whole(self, version: PolicyVersion, path: str | None) -> None:
        """Update every worker; until all workers have the new version, the engine refuses requests."""
        await self._require_model()
        if path is None:
            await _all(require_first_weights(w, self._labels, w.facts.label, version) for w in self.workers)
        before, self._why_incomplete = self._why_incomplete, (
            f"engine {self.name} is between two versions, because an update to {version} has not reached all of its "
            "weights; update them again"
        )  # set before the calls, so that it also holds if they are cancelled
        results = await asyncio.gather(
            *(
                worker.update(
                    self._labels, version, path, transfer.mark or mark, paused=not self._admission.is_open,
                    server_paused=transfer.paused,
                )
                for worker, mark, transfer in zip(self.workers, self._paused_as, self._transfers, strict=True)
            ),
            return_exceptions=True,
        )
        errors = [r for r in results if isinstance(r, BaseException)]
        if errors:
            if len(errors) == len(results) and not any(isinstance(e, PartlyUpdated) for e in errors):
                self._why_incomplete = before
            raise errors[0]
        for transfer in self._transfers:
            transfer.touched, transfer.mark = False, None

    # ---------------------------------------------------------------- weights that the trainer's process sends

    handshake = Handshake.TORCH

    @property
    def sender_address(self) -> str:
        """Return this machine's address on the route to the first worker."""
        return local_address(*self.workers[0].client.address)

    async def ranks(self) -> int:
        return sum(await self._ranks())

    async def _ranks(self) -> list[int]:
        return await asyncio.gather(*(workers_of(worker.client) for worker in self.workers))

    async def join(self, meeting: GroupInvitation) -> None:
        offset, joins = meeting.rank_offset, []
        for transfer, count in zip(self._transfers, await self._ranks(), strict=True):
            joins.append(transfer.join(meeting, offset))
            offset += count
        await all_or_first_error(joins)

    async def begin(self) -> None:
        """Pause all workers and make their weights writable."""
        self._mark = self._labels.mark()
        await all_or_first_error([transfer.begin() for transfer in self._transfers])

    async def receive(self, bucket: Sequence[TensorSpec], last: bool) -> None:
        self._why_incomplete = (
            f"engine {self.name} is between two versions, because a transfer of weights was not completed; update them "
            "again"
        )
        await all_or_first_error([transfer.receive(bucket, last, self._mark) for transfer in self._transfers])

    async def finish(self) -> None:
        """Put the received weights into use. Afterwards :meth:`update_weights` sets their label."""
        await all_or_first_error([transfer.finish() for transfer in self._transfers])

    async def leave(self) -> bool:
        """Leave the group on all workers; returns True if all still have the weights from before the transfer."""
        return all(await asyncio.gather(*(transfer.leave() for transfer in self._transfers)))

    # ---------------------------------------------------------------- adapters

    async def _load_adapter(self, adapter: LoadedAdapter, version: PolicyVersion) -> None:
        await _all(w.load_adapter(self._labels, self._adapters.base, adapter) for w in self.workers)

    async def _unload(self, adapter: LoadedAdapter) -> bool:
        return all(await asyncio.gather(*(w.unload_adapter(adapter) for w in self.workers)))

    # ---------------------------------------------------------------- the rest

    async def health(self) -> Health:
        """Check the load and label of every worker and the readiness of the router, without generating a token.

        A router bypasses dead workers, so one live worker is enough. A restarted worker shows another label.
        """
        label = self._labels.of(self._adapters.base)
        (router,), results, (amiss, lost) = await asyncio.gather(
            asyncio.gather(self._require_router_ready(), return_exceptions=True),
            asyncio.gather(*map(_label_and_load, self.workers), return_exceptions=True),
            self._why_version_gone(),
        )
        sick = [r for r in (router, *results) if isinstance(r, BaseException)]
        for error in sick:
            if not isinstance(error, EngineError):
                raise error
        well = [r for r in results if not isinstance(r, BaseException)]
        loads = [load for _, load in well]
        other = next((name for name, _ in well if not self._labels.is_of(name, self._adapters.base)), None)
        if other not in (None, START_LABEL) and await self._others_paused_servers() and self.is_paused_by_others:
            # another client has paused the servers to give them new weights, so other labels do not mean lost weights
            return Health(ok=False, detail="another client is changing its weights", current=not self._why_incomplete)
        named = "" if other is None else f"its weights are labelled {quoted(other)}, but april set {label!r}"
        problem = self._why_incomplete or amiss or (str(sick[0]) if sick else named)
        total = EngineLoad(
            sum(load.running for load in loads),
            sum(load.waiting for load in loads),
            max((load.kv_usage for load in loads), default=0.0),
        )
        return Health(
            ok=bool(well) and not self._why_incomplete and not amiss and not isinstance(router, BaseException),
            detail=problem,
            current=not self._why_incomplete and other is None and not lost,
            load=total if loads else None,
        )

    async def _require_router_ready(self) -> None:
        if all(worker.client is not self._requests for worker in self.workers):
            reply = await self._requests.call("GET", "/readiness", timeout_s=HEALTH_S, retry=True)
            if not reply.ok:
                raise EngineError(f"the router {self._requests.url} is not ready: /readiness answers {reply.status}")

    async def close(self) -> None:
        """Unload adapters, resume workers paused for a transfer, and close the connections; calls in progress fail."""
        await self._unload_all()
        await asyncio.gather(*(transfer.resume() for transfer in self._transfers), return_exceptions=True)
        await self._requests.close()
        for worker in self.workers:
            await worker.client.close()

    async def adopt(self, *, present: bool) -> None:
        """Label every worker's weights as the first version, unless they belong to another run of april.

        ``present`` means that the settings let the run begin with any weights that the workers have now.
        """
        if name := self.set_up_labels([worker.facts.label for worker in self.workers], present=present):
            await _all(worker.set_label(name) for worker in self.workers)


async def connect_sglang(config: SglangEngineConfig) -> list[Engine]:
    """Make one engine per server, or one for all servers of a router. Raises ConfigError and EngineError."""

    async def connect(client: HttpClient) -> SglangEngine:
        facts = await probe_sglang(client, config)
        if facts.paused:
            worker = SglangWorker(client, facts)
            remedy = "resume it (POST /continue_generation with the body {})"
            require_left_paused(client.url, facts.label, await worker.load(), remedy)
            await worker.go_on()
            facts = await probe_sglang(client, config)
        return SglangEngine(client, [SglangWorker(client, facts)], facts, config.max_token_loss)

    engines = await connect_all(config, connect)
    try:
        if config.router is not None:
            engines = [await _behind_router(config, config.router, engines)]
        for engine in engines:
            await engine.adopt(present=config.first_weights == "present")
    except BaseException:
        for engine in engines:
            await engine.close()
        raise
    return list(engines)


async def _behind_router(config: SglangEngineConfig, url: str, engines: Sequence[SglangEngine]) -> SglangEngine:
    """Make one engine for the router from the engines of its workers; on failure, close only the router's client."""
    router = client_of(url, config)
    try:
        # a router that has just started lists no workers at first
        await require_same_workers(router, config, min(ROUTER_PATIENCE_S, config.probe_timeout_s / 2))
        workers = [worker for engine in engines for worker in engine.workers]
        facts = common_facts([worker.facts for worker in workers])
    except BaseException:
        await router.close()
        raise
    return SglangEngine(router, workers, facts, config.max_token_loss)


async def _label_and_load(worker: SglangWorker) -> tuple[str, EngineLoad]:
    try:
        async with asyncio.timeout(HEALTH_S):
            label, load = await asyncio.gather(worker.label(), worker.load())
    except TimeoutError:
        raise EngineUnreachable(
            f"{worker.client.url} has not reported its load and label within {HEALTH_S:g} s; is it overloaded or hung?"
        ) from None
    return label, load


async def _all(calls: Iterable[Awaitable[None]]) -> None:
    """Await all calls, then raise the first error, if any."""
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
