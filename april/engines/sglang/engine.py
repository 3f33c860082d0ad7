"""SGLang servers as engines: one HTTP call per attempt, ended by rid, weights loaded from disk or by the trainer.

The control calls, and whether a load has succeeded, are in ``worker``; those of a transfer of weights in ``transfer``.

Invariant: no call for an attempt is closed in order to end it, because the server would drop its tokens; and no token
is handed over under a label that the server does not confirm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress

from april.config.engines import SglangEngineConfig
from april.core.sampling import attempt_seed
from april.core.versions import PolicyVersion
from april.engines.groups.gloo import towards
from april.engines.http.http_client import HttpClient
from april.engines.http.response_reader import ResponseReader
from april.engines.http.response_stream import Endpoint, ResponseStream
from april.engines.http.sent_attachments import SentAttachments, Urls
from april.engines.http.server_engine import ServerEngine
from april.engines.http.server_probe import client_of, connect_all, is_listed, why_not_served
from april.engines.http.weight_directories import is_adapter
from april.engines.http.weight_labels import START_LABEL, require_first_weights
from april.engines.protocol import Engine, EngineLoad, Health, Request
from april.engines.sglang.probe import SglangFacts, probe_sglang, workers_of
from april.engines.sglang.router import common_facts, require_same_workers
from april.engines.sglang.transfer import WeightTransfer, all_or_first_error
from april.engines.sglang.wire import ReplyParser, request_body, rid_of
from april.engines.sglang.worker import HalfUpdated, SglangWorker
from april.engines.weight_routes import Handshake, Meeting, TensorSpec
from april.errors import EngineError, EngineUnreachable
from april.server_text import quoted

ABORTS_AT_ONCE = 32
"""Abort calls on their way to one server; hundreds at the same time have killed servers."""
FORGET_S = 5.0
"""Longest wait at the end for the servers to forget adapters."""
HEALTH_S = 5.0
"""Longest wait for the answers that a health probe needs."""
STREAM_INTERVAL = 16
"""Tokens per event where nothing else is asked for. A request that the server has put back for want of memory loses
fewer than this at an abort, all others lose nothing. Client CPU per 1,000 tokens, measured: 37 ms at 1, 6.8 ms at 8,
3.5 ms at 16, 2.0 ms at 50, 0.9 ms without streaming (there up to 49 tokens are lost)."""
STOP_STRING_INTERVAL = 2
"""Tokens per event for a request that april may end by what it reads."""


class SglangEngine(ServerEngine):
    """An SGLang server, or several behind one router; implements :class:`april.engines.protocol.Engine`.

    The bytes of an image go along with every request: SGLang has no way to leave out what it was sent before.

    Args:
        requests: where requests go: the server itself, or the router.
        workers: the servers; control calls go to each of them.
        facts: what the probe has found of all of them.
        max_token_loss: most tokens of a response that may be lost when a server dies.
    """

    def __init__(
        self, requests: HttpClient, workers: Sequence[SglangWorker], facts: SglangFacts,
        max_token_loss: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(requests.name, facts.capabilities)
        self._requests = requests
        self.workers = tuple(workers)
        self.facts = facts
        self._max_token_loss = max_token_loss
        self.attachments = SentAttachments()
        self._endpoint = Endpoint(
            client=requests, route="/generate", admission=self._admission, labels=self._labels, prepare=self._prepare,
            abort_means=facts.capabilities.abort_means, marks_end=False, stands_still=self._stands_still,
            attachments=self.attachments,
        )  # fmt: skip
        self.on_foreign_pause: Callable[[], None] | None = None
        """Called when requests end because somebody else has paused the servers, to change their weights. Nothing is
        sent from then until :meth:`resume`, so a weight update must follow. None: such ends are like all others."""
        self.is_paused_by_others = False
        """True from such a call until :meth:`resume`."""
        self._look: asyncio.Task[None] | None = None
        """At whether the servers are paused; one for all requests that end meanwhile."""
        self._paused_as: tuple[str | None, ...] = (None,) * len(self.workers)
        """Label of each worker's process that was paused for an update; None: it did not say."""
        self._transfers = tuple(WeightTransfer(worker) for worker in self.workers)
        self._mark = ""
        """Label of weights that are partly written, in the present transfer."""

    # ---------------------------------------------------------------- requests

    def generate(self, request: Request) -> ResponseStream:
        """Make one call of ``/generate``; raises RequestRefused for what the server must not be asked."""
        return ResponseStream(self._endpoint, request, streamed=self._interval(request) > 0)

    def _prepare(self, request: Request, streamed: bool, urls: Urls) -> tuple[ResponseReader, bytes]:
        self._check(request)
        facts = self.facts
        parser = ReplyParser(
            request.attempt_id, incremental=streamed and facts.incremental,
            routing=facts.routing if request.extras else None, extras_from=request.extras_from,
            prompt=request.token_ids if request.attached else None,
        )  # fmt: skip
        labels = self._adapters.reading_labels if facts.label is not None else None
        adapter = self._adapters.send(request.attempt_id) or facts.adapter
        reader = ResponseReader(parser, self._version, labels, len(request.token_ids), request)
        interval = self._interval(request) if streamed and facts.stream_interval else None
        body = request_body(
            request, stream=streamed, stream_interval=interval, seed=self._seed(request), adapter=adapter, urls=urls,
            label=self._labels.of(self._adapters.base),
        )  # fmt: skip
        return reader, body

    def _interval(self, request: Request) -> int:
        """Tokens per event; 0: one answer at the end."""
        if self._max_token_loss is not None:
            interval = max(1, self._max_token_loss)
        elif self._capabilities.streams:
            interval = STREAM_INTERVAL
        else:
            interval = STOP_STRING_INTERVAL if request.stream else 0
        return min(interval, STOP_STRING_INTERVAL) if request.stream else interval

    def _seed(self, request: Request) -> int | None:
        """With deterministic inference a request without a seed would get the same one as all others."""
        if not self._capabilities.honours_seeds:
            return None
        if request.sampling.seed is not None:
            return request.sampling.seed
        group, index = request.sample_key or (0, 0)
        return attempt_seed(0, group, index, len(request.token_ids))

    # ---------------------------------------------------------------- aborts

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        """Ask every worker by rid: nobody says which of them has a request, and others may use the server."""
        asked = self._to_abort(attempt_ids)
        self._endpoint.abort(asked)
        rids = [rid_of(i) for i in asked]
        if rids:
            await _all(worker.abort(rids, ABORTS_AT_ONCE) for worker in self.workers)

    async def _stands_still(self) -> bool:
        """Return whether the servers' owner has paused them; the gate is closed then.

        A paused server begins requests under whatever weights it has later, so those without a token are taken back.
        """
        if self.on_foreign_pause is None:
            return False
        if self._admission.is_open:
            if self._look is None:
                self._look = asyncio.create_task(self._look_for_pause(self.on_foreign_pause))
            await asyncio.shield(self._look)
        return not self._admission.is_open

    async def _look_for_pause(self, tell: Callable[[], None]) -> None:
        label = self._labels.of(self._adapters.base)
        looks = await asyncio.gather(*(w.is_foreign(label) for w in self.workers), return_exceptions=True)
        self._look = None
        if self._admission.is_open and any(look is True for look in looks):
            self._admission.close()
            self.is_paused_by_others = True
            self._endpoint.recall()
            tell()

    # ---------------------------------------------------------------- weights

    async def pause(self) -> None:
        """Pause as :class:`ServerEngine` does, and remember the processes, for the trainer may write weights there."""
        await super().pause()
        marks = await asyncio.gather(*(w.mark(self._labels) for w in self.workers), return_exceptions=True)
        # if one does not answer, the update will say so
        self._paused_as = tuple(None if isinstance(mark, BaseException) else mark for mark in marks)

    async def resume(self) -> None:
        """Let requests in again, and those of others where a transfer has paused a worker."""
        self.is_paused_by_others = False
        await _all(transfer.resume() for transfer in self._transfers)
        await super().resume()

    async def update_weights(self, version: PolicyVersion, path: str | None = None) -> None:
        """Update every worker; the version counts when all of them have it.

        An adapter is loaded under a new name, beside what requests run under.

        Raises EngineError for a worker that could not load it, and WeightsGone for one that has lost the weights of
        others.
        """
        if path is not None:
            self._require_loadable(path)
            if is_adapter(path):
                await self._take_adapter(version, path)
                return
        if why := await self._why_not_served():
            raise EngineError(why)
        if path is None:
            await _all(require_first_weights(w, self._labels, w.facts.label, version) for w in self.workers)
        before, self._not_whole = self._not_whole, (
            f"engine {self.name} is between two versions, since an update to {version} has not reached all of its "
            "weights; update them again"
        )  # which holds where this call is cancelled, too
        results = await asyncio.gather(
            *(
                worker.update(
                    self._labels, version, path, transfer.mark or mark, paused=not self._admission.is_open,
                    stands_still=transfer.paused,
                )
                for worker, mark, transfer in zip(self.workers, self._paused_as, self._transfers, strict=True)
            ),
            return_exceptions=True,
        )
        errors = [r for r in results if isinstance(r, BaseException)]
        if errors:
            if len(errors) == len(results) and not any(isinstance(e, HalfUpdated) for e in errors):
                self._not_whole = before
            raise errors[0]
        self._adapters.take(None, version)
        self._labels.present, self._not_whole = version, ""
        for transfer in self._transfers:
            transfer.touched, transfer.mark = False, None
        await self._unload_idle()

    # ---------------------------------------------------------------- weights that the trainer's process sends

    handshake = Handshake.TORCH

    @property
    def sender_address(self) -> str:
        """Address of this machine as the first worker reaches it."""
        return towards(*self.workers[0].client.address)

    async def ranks(self) -> int:
        """Count of the processes that hold a part of the weights, over all workers."""
        return sum(await self._ranks())

    async def _ranks(self) -> list[int]:
        return await asyncio.gather(*(workers_of(worker.client) for worker in self.workers))

    async def join(self, meeting: Meeting) -> None:
        """Have all workers meet the sender, one behind the other."""
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
        """Have all workers take these tensors."""
        self._not_whole = (
            f"engine {self.name} is between two versions, since a transfer of weights has not come to its end; update "
            "them again"
        )
        await all_or_first_error([transfer.receive(bucket, last, self._mark) for transfer in self._transfers])

    async def finish(self) -> None:
        """Put the weights into use; :meth:`update_weights` names them."""
        await all_or_first_error([transfer.finish() for transfer in self._transfers])

    async def leave(self) -> bool:
        """Give the group up on all workers; True: all of them have the weights from before."""
        return all(await asyncio.gather(*(transfer.leave() for transfer in self._transfers)))

    # ---------------------------------------------------------------- adapters

    async def _take_adapter(self, version: PolicyVersion, path: str) -> None:
        """Have every worker load it, under one name; if one fails, requests go on under what they have."""
        adapter = self._adapters.fresh(version, path)
        await _all(w.load_adapter(self._labels, self._adapters.base, adapter) for w in self.workers)
        self._adapters.take(adapter, version)
        self._labels.present = version
        await self._unload_idle()

    async def _unload_idle(self) -> None:
        """Unload adapters of no version that anybody uses; what fails now is tried again at the next update."""
        for adapter in self._adapters.idle(self._admission.inside):
            if all(await asyncio.gather(*(w.unload_adapter(adapter) for w in self.workers))):
                self._adapters.gone(adapter)

    async def _amiss(self) -> tuple[str, bool]:
        """Return why requests would not be answered by the present version, and whether its adapter has gone."""
        present = self._adapters.present
        if present is None:
            return await self._why_not_served(), False
        listed = await asyncio.gather(*(is_listed(w.client, present.name) for w in self.workers))
        lost = any(there is False for there in listed)
        return (f"a server has no adapter {present.name} any more" if lost else ""), lost

    async def _why_not_served(self) -> str:
        """Return why a worker would not answer by the model that is trained; empty: nothing says so."""
        found = await asyncio.gather(*(why_not_served(w.client, self.facts.asked) for w in self.workers))
        return next(filter(None, found), "")

    # ---------------------------------------------------------------- the rest

    async def health(self) -> Health:
        """Ask every worker for load and label, and whether the router lives; no token is generated for it.

        A router sends requests past a dead worker, so one that lives is enough; when that one is back, its label tells.
        """
        label = self._labels.of(self._adapters.base)
        (router,), results, (amiss, lost) = await asyncio.gather(
            asyncio.gather(self._look_at_router(), return_exceptions=True),
            asyncio.gather(*map(_look_at, self.workers), return_exceptions=True),
            self._amiss(),
        )
        sick = [r for r in (router, *results) if isinstance(r, BaseException)]
        for error in sick:
            if not isinstance(error, EngineError):
                raise error
        well = [r for r in results if not isinstance(r, BaseException)]
        loads = [load for _, load in well if load is not None]
        other = next((name for name, _ in well if name not in (None, label)), None)
        if other not in (None, START_LABEL) and await self._stands_still() and self.is_paused_by_others:
            # whoever has paused it gives it weights: they are new, and not lost
            return Health(ok=False, detail="others are changing its weights", current=not self._not_whole)
        named = "" if other is None else f"its weights are named {quoted(other)}, and april named them {label!r}"
        problem = self._not_whole or amiss or (str(sick[0]) if sick else named)
        total = EngineLoad(
            sum(load.running for load in loads),
            sum(load.waiting for load in loads),
            max((load.kv_usage for load in loads), default=0.0),
        )
        return Health(
            ok=bool(well) and not self._not_whole and not amiss and not isinstance(router, BaseException),
            detail=problem,
            counters={
                "running": float(total.running), "waiting": float(total.waiting), "kv_usage": total.kv_usage,
                **self.attachments.counters,
            },
            current=not self._not_whole and other is None and not lost,
            load=total if loads else None,
        )

    async def _look_at_router(self) -> None:
        """Raises EngineError if requests go through a router that takes none."""
        if all(worker.client is not self._requests for worker in self.workers):
            reply = await self._requests.call("GET", "/readiness", timeout_s=HEALTH_S, retry=True)
            if not reply.ok:
                raise EngineError(f"the router {self._requests.url} is not ready: /readiness answers {reply.status}")

    async def close(self) -> None:
        """Calls in flight break, adapters are forgotten, and a worker that stands still for a transfer goes on."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FORGET_S):
                for adapter in self._adapters.all():
                    await asyncio.gather(*(w.unload_adapter(adapter) for w in self.workers))
        await asyncio.gather(*(transfer.resume() for transfer in self._transfers), return_exceptions=True)
        await self._requests.close()
        for worker in self.workers:
            await worker.client.close()

    async def adopt(self) -> None:
        """Tell every worker what april calls the weights that it has."""
        await _all(worker.set_label(self._labels.of(self._version)) for worker in self.workers)


async def connect_sglang(config: SglangEngineConfig) -> list[Engine]:
    """Make one engine per server, or one for all of a router; raises ConfigError and EngineError."""

    async def connect(client: HttpClient) -> SglangEngine:
        facts = await probe_sglang(client, config)
        if facts.paused:
            raise EngineError(
                f"{client.url} is paused; continue it (POST /continue_generation with the body {{}}) and start again"
            )
        return SglangEngine(client, [SglangWorker(client, facts)], facts, config.max_token_loss)

    engines = await connect_all(config, connect)
    try:
        if config.router is not None:
            engines = [await _behind_router(config, config.router, engines)]
        for engine in engines:
            await engine.adopt()
    except BaseException:
        for engine in engines:
            await engine.close()
        raise
    return list(engines)


async def _behind_router(config: SglangEngineConfig, url: str, engines: Sequence[SglangEngine]) -> SglangEngine:
    """Make one engine out of those of the workers; closes nothing but the router's client."""
    router = client_of(url, config)
    try:
        await require_same_workers(router, config)
        workers = [worker for engine in engines for worker in engine.workers]
        facts = common_facts([worker.facts for worker in workers])
    except BaseException:
        await router.close()
        raise
    return SglangEngine(router, workers, facts, config.max_token_loss)


async def _look_at(worker: SglangWorker) -> tuple[str | None, EngineLoad | None]:
    try:
        async with asyncio.timeout(HEALTH_S):
            label, load = await asyncio.gather(worker.label(), worker.load())
    except TimeoutError:
        raise EngineUnreachable(
            f"{worker.client.url} has not said its load and label in {HEALTH_S:g} s; is it overloaded or hung?"
        ) from None
    return label, load


async def _all(calls: Iterable[Awaitable[None]]) -> None:
    """Await all of them, then raise the first error."""
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
