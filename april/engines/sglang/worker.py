"""Makes the control calls to one SGLang server: for aborts, weights and their labels, adapters, and the load."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import msgspec

from april.core.versions import PolicyVersion
from april.engines.http.http_client import (
    CONTROL_TIMEOUT_S,
    HttpClient,
    Reply,
    control,
    has_value,
    is_empty,
    json_value,
    require_confirmation,
    weight_version,
)
from april.engines.http.loaded_adapters import LOAD_S, LoadedAdapter, unload_adapter
from april.engines.http.server_probe import is_listed
from april.engines.http.server_process import PAUSE_CHECK_S, while_paused
from april.engines.http.weight_directories import LOAD_WEIGHTS_S
from april.engines.http.weight_labels import WeightLabels, is_another_process, mark_process, require_base
from april.engines.http.wire import NotJson, error_text, read_json
from april.engines.protocol import EngineLoad
from april.engines.sglang.probe import SglangFacts
from april.errors import EngineError, EngineUnreachable, WireError
from april.text.server_text import clean

log = logging.getLogger("april")

FLUSH_S = 30.0
"""Seconds for which the server may wait until it can empty its cache."""
_FLUSHED = b"Cache flushed."
"""Beginning of the server's answer when its cache has been emptied."""
_KEPT_CACHE = "Weights were updated, but the cache was not flushed"
"""Beginning of the server's answer if it has the new weights, but could not empty its cache."""


class PartlyUpdated(EngineError):
    """Raised if a server has, or may have, new weights, but emptying its cache or labelling the weights has failed."""


class PartlyUpdatedAndGone(PartlyUpdated, EngineUnreachable):
    """Raised for a partly updated server that no longer answers; the other servers can continue without it."""


class _Load(msgspec.Struct):
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    token_usage: float = 0.0


class _Loads(msgspec.Struct):
    loads: list[_Load]


@dataclass(frozen=True, slots=True)
class SglangWorker:
    """Control client of one server; ``facts`` are the results of its probe."""

    client: HttpClient
    facts: SglangFacts

    async def abort(self, rids: Sequence[str], at_once: int) -> None:
        """Abort these requests, with ``at_once`` calls in parallel; raise the first EngineError after all calls."""
        left = deque(rids)
        errors: list[EngineError] = []

        async def ask() -> None:
            while left:
                body = {"rid": left.popleft()}
                try:
                    reply = await self.client.call("POST", "/abort_request", body, timeout_s=None, retry=True)
                    require_confirmation(self.client, reply, "/abort_request", is_empty)
                except EngineError as error:
                    errors.append(error)

        try:
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                await asyncio.gather(*(ask() for _ in range(min(at_once, len(left)))))
        except TimeoutError:
            raise EngineUnreachable(
                f"{self.client.url} has not answered {len(rids)} aborts within {CONTROL_TIMEOUT_S:g} s; is it "
                "overloaded or hung?"
            ) from None
        if errors:
            raise errors[0]

    async def label(self) -> str:
        return await weight_version(self.client, "/model_info")

    async def is_foreign(self, labels: WeightLabels, version: PolicyVersion) -> bool:
        """Return whether another client has paused the server, or given it other weights than ``version``."""
        ready = await self.client.call("GET", "/ready", timeout_s=PAUSE_CHECK_S, retry=True)
        return ready.status == 503 or not labels.is_of(await self.label(), version)

    async def go_on(self) -> None:
        """Resume the server if it is paused."""
        await control(self.client, "/continue_generation", has_value("status", "ok"), body={})  # needs a body

    async def set_label(self, label: str) -> None:
        """Give the present weights a label; running requests go on. Raises EngineError unless the server shows it."""
        # by default, the server would abort all its requests
        body = {"new_version": label, "abort_all_requests": False}
        await control(self.client, "/update_weight_version", has_value("success", True), body=body)
        now = await self.label()
        if now != label:
            raise PartlyUpdated(f"{self.client.url} labels its weights {clean(now)} after april set {label}")

    async def mark(self, labels: WeightLabels) -> str:
        """Return a label that identifies the server's process; see :func:`mark_process`. Raises TimeoutError."""
        async with asyncio.timeout(PAUSE_CHECK_S):
            return await mark_process(self, labels, self.facts.label)

    async def update(
        self, labels: WeightLabels, version: PolicyVersion, path: str | None, paused_as: str | None = None, *,
        paused: bool = False, server_paused: bool = False,
    ) -> None:  # fmt: skip
        """Load weights from ``path`` (None if the server already has them), empty the cache, and label the weights.

        Args:
            paused_as: Result of :meth:`mark` when the engine was paused for the update; None if there is none.
            paused: True if the engine was paused for the update, so that april sends no requests.
            server_paused: True if the server itself is already paused.

        Raises:
            PartlyUpdated: The server has, or may have, the new weights, but a later step of the update failed.
            EngineError: The server has its old weights.
        """
        label, loaded = labels.of(version), path is None
        try:
            async with nullcontext() if server_paused else self._other_clients_paused():
                process = await self._process()
                if path is None:
                    shown = await self.label()
                    if paused and is_another_process(shown, paused_as, labels, self.facts.label):
                        raise PartlyUpdated(self._started_anew(label))
                    await self._flush(label)
                else:
                    known = paused_as if paused and paused_as != label else None
                    shown = known or await mark_process(self, labels, self.facts.label, version)
                    flushed = await self._load(label, path, shown)
                    loaded = True
                    if not flushed:
                        log.warning("%s loaded new weights but kept its cache; april empties it", self.client.url)
                        await self._flush(label)
                now = await self.label()
                if now not in (label, shown):
                    raise PartlyUpdated(self._started_anew(label))
                if now != label:
                    await self.set_label(label)
                # if the server restarted just before set_label, the label is new but the weights are those of its start
                if await self._process() not in (None, process):
                    raise PartlyUpdated(self._started_anew(label))
        except PartlyUpdated:
            raise
        except EngineError as error:
            if not loaded:
                raise
            kind = PartlyUpdatedAndGone if isinstance(error, EngineUnreachable) else PartlyUpdated
            what = f"{self.client.url} has the weights {label}, but not everything that belongs to them: {error}"
            raise kind(what) from error

    async def load_adapter(self, labels: WeightLabels, base: PolicyVersion, adapter: LoadedAdapter) -> None:
        """Load an adapter for the base model of version ``base``; nothing else on the server changes.

        Raises EngineError unless the server confirms and lists the adapter.
        """
        await require_base(self, labels, self.facts.label, base)
        body = {"lora_name": adapter.name, "lora_path": adapter.path}
        reply = await self.client.call("POST", "/load_lora_adapter", body, timeout_s=LOAD_S)
        answer = json_value(reply)
        text = f"{self.client.url} could not load the adapter in {adapter.path}"
        if not (reply.ok and has_value("success", True)(answer)) or await is_listed(self.client, adapter.name) is False:
            said = answer.get("error_message") if isinstance(answer, dict) else None
            why = clean(said) if said else error_text(reply.body)
            raise EngineError(f"{text}: it answered {reply.status}, {why}; it keeps its old adapter")
        if await self.label() != labels.of(base):
            raise EngineError(f"{text}: it was restarted during the call; update its weights again")

    async def unload_adapter(self, adapter: LoadedAdapter) -> bool:
        """Unload an adapter; if the server may still have it, log a warning and return False."""

        async def is_gone(reply: Reply) -> bool:
            done = reply.ok and has_value("success", True)(json_value(reply))
            return done or await is_listed(self.client, adapter.name) is False

        return await unload_adapter(self.client, "/unload_lora_adapter", adapter, is_gone)

    async def _process(self) -> Any:
        """Return the measured times of the server's start, which no two processes share; None if not shown."""
        reply = await self.client.call("GET", "/server_info", retry=True)
        answer = json_value(reply) if reply.ok else None
        return answer.get("startup_time") if isinstance(answer, dict) else None

    def _started_anew(self, label: str) -> str:
        return (
            f"{self.client.url} was restarted during the update to {label}, and may have the weights of its start; "
            "update its weights again"
        )

    async def load(self) -> EngineLoad:
        """Return the load, summed over data-parallel copies."""
        reply = await self.client.call("GET", "/v1/loads", params={"include": "core"}, retry=True)
        self.client.require_ok(reply, "/v1/loads")
        try:
            loads = read_json(reply.body, _Loads).loads
        except NotJson as error:
            raise WireError(f"{self.client.url}/v1/loads answered something that april cannot read: {error}") from None
        return EngineLoad(
            sum(load.num_running_reqs for load in loads),
            sum(load.num_waiting_reqs for load in loads),
            max((load.token_usage for load in loads), default=0.0),
        )

    async def _load(self, label: str, path: str, before: str | None) -> bool:
        """Load new weights in place of those labelled ``before``; return False if the server has not emptied its cache.

        Raises PartlyUpdated if it is unknown whether the server has loaded the weights, EngineError if it has not.
        """
        body: dict[str, Any] = {
            "model_path": path, "weight_version": label, "flush_cache": True, "abort_all_requests": False,
        }  # fmt: skip
        reply = await self.client.call("POST", "/update_weights_from_disk", body, timeout_s=LOAD_WEIGHTS_S)
        answer = json_value(reply)
        if reply.ok and has_value("success", True)(answer):
            return True
        text = f"{self.client.url} could not load {path} as {label}: {error_text(reply.body)}"
        if reply.status == 404:
            raise EngineError(f"{text}; this server has no /update_weights_from_disk")
        refused = reply.status == 400 and has_value("success", False)(answer)
        if refused and (str(answer.get("message")).startswith(_KEPT_CACHE) or await self.label() == label):
            return False
        if refused or reply.status == 422:
            if before is not None and before != label and await self.label() != before:
                raise PartlyUpdated(f"{text}; it has other weights than before")
            raise EngineError(f"{text}; it keeps its old weights")
        raise PartlyUpdated(f"{text} (status {reply.status}); april does not know which weights it has now")

    async def _flush(self, label: str) -> None:
        """Empty the cache, which holds keys and values computed with old weights."""
        reply = await self.client.call(
            "POST", "/flush_cache", params={"timeout": f"{FLUSH_S:g}"}, timeout_s=FLUSH_S + 30, retry=True
        )
        if not (reply.ok and reply.body.startswith(_FLUSHED)):
            raise PartlyUpdated(
                f"{self.client.url} did not empty its cache for the weights {label}: {error_text(reply.body)}"
            )

    @asynccontextmanager
    async def _other_clients_paused(self) -> AsyncIterator[None]:
        """Pause the server while it has requests of other clients, so that these do not delay the update.

        Without such requests the server is not paused: if april died, it would stay paused and serve nobody.
        """
        load = await self.load()
        if not load.running and not load.waiting:
            yield
            return
        async with while_paused(
            lambda: control(self.client, "/pause_generation", has_value("status", "ok"), body={"mode": "retract"}),
            self.go_on,
        ):
            yield
