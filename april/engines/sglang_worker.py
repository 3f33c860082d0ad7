"""The control calls of one SGLang server: aborts, weights and their label, load."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import msgspec

from april.engines.http_client import CONTROL_TIMEOUT_S, HttpClient, Reply, error_text
from april.engines.protocol import EngineLoad
from april.engines.server_pause import standing_still
from april.engines.sglang_offer import SglangOffer
from april.errors import EngineError, EngineUnreachable, WireError

log = logging.getLogger("april")

LOAD_WEIGHTS_S = 3600.0
"""Longest wait for a server to read its weights."""
FLUSH_S = 30.0
"""Longest wait of the server for the moment in which its cache can be emptied."""


class HalfUpdated(EngineError):
    """The weights may be new, and something that belongs to them is old."""


class HalfUpdatedAndGone(HalfUpdated, EngineUnreachable):
    """The same of a server that does not answer any more: the others can go on without it."""


class _Load(msgspec.Struct):
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    token_usage: float = 0.0


class _Loads(msgspec.Struct):
    loads: list[_Load]


@dataclass(frozen=True, slots=True)
class SglangWorker:
    """One server; ``offer`` says what it can do."""

    client: HttpClient
    offer: SglangOffer

    async def abort(self, rids: Sequence[str], at_once: int) -> None:
        """Ask for the end of these requests, ``at_once`` calls at a time; unknown ones are ignored by the server.

        Raises:
            EngineError: the first thing that went wrong, after all were asked for.
        """
        left = deque(rids)
        errors: list[EngineError] = []

        async def ask() -> None:
            while left:
                body = {"rid": left.popleft()}
                try:
                    self.client.require_ok(
                        await self.client.call("POST", "/abort_request", body, timeout_s=None, retry=True),
                        "/abort_request",
                    )
                except EngineError as error:
                    errors.append(error)

        try:
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                await asyncio.gather(*(ask() for _ in range(min(at_once, len(left)))))
        except TimeoutError:
            raise EngineUnreachable(
                f"{self.client.url} has not answered {len(rids)} aborts in {CONTROL_TIMEOUT_S:g} s; is it overloaded "
                "or hung?"
            ) from None
        if errors:
            raise errors[0]

    async def label(self) -> str | None:
        """Of the present weights; None: the server has no labels."""
        if self.offer.weight_version is None:
            return None
        info = await self.client.json("GET", "/model_info", retry=True)
        return str(info.get("weight_version")) if isinstance(info, dict) else None

    async def set_label(self, label: str) -> None:
        """Name the present weights; requests that run go on under the new name.

        Raises:
            EngineError: the server does not show the label afterwards.
        """
        if self.offer.weight_version is None:
            return
        # without the flag the server would abort every request it has
        await self.client.json(
            "POST", "/update_weight_version", {"new_version": label, "abort_all_requests": False}, retry=True
        )
        await self._require_label(label)

    async def update(self, label: str, path: str | None) -> None:
        """New weights from a directory of the server (None: they are there already), an empty cache, a label.

        Raises:
            HalfUpdated: the weights are new, or may be, and the rest did not follow.
            EngineError: the server has its old weights.
        """
        loaded = path is None
        try:
            async with self._undisturbed():
                if path is None:
                    await self._flush(label)
                    await self.set_label(label)
                    return
                flushed = await self._load(label, path)
                loaded = True
                if not flushed:
                    log.warning("%s loaded new weights and kept its cache; april empties it", self.client.url)
                    await self._flush(label)
                if await self.label() not in (None, label):
                    await self.set_label(label)
        except HalfUpdated:
            raise
        except EngineError as error:
            if not loaded:
                raise
            kind = HalfUpdatedAndGone if isinstance(error, EngineUnreachable) else HalfUpdated
            said = f"{self.client.url} has the weights {label}, and not all that belongs to them: {error}"
            raise kind(said) from error

    async def load(self) -> EngineLoad | None:
        """Summed over data-parallel copies; None: the server does not say."""
        if not self.offer.loads:
            return None
        reply = await self.client.call("GET", "/v1/loads", params={"include": "core"}, retry=True)
        self.client.require_ok(reply, "/v1/loads")
        try:
            loads = msgspec.json.decode(reply.body, type=_Loads).loads
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise WireError(f"{self.client.url}/v1/loads answered what april cannot read: {error}") from None
        return EngineLoad(
            sum(load.num_running_reqs for load in loads),
            sum(load.num_waiting_reqs for load in loads),
            max((load.token_usage for load in loads), default=0.0),
        )

    async def _load(self, label: str, path: str) -> bool:
        """New weights; False: the cache was kept. An update that failed may have changed the weights all the same."""
        body: dict[str, Any] = {
            "model_path": path, "weight_version": label, "flush_cache": True, "abort_all_requests": False,
        }  # fmt: skip
        reply = await self.client.call("POST", "/update_weights_from_disk", body, timeout_s=LOAD_WEIGHTS_S)
        if _succeeded(reply):
            return True
        said = f"{self.client.url} could not load {path} as {label}: {error_text(reply.body)}"
        if reply.status == 404:
            raise EngineError(f"{said}; this server has no /update_weights_from_disk")
        if "flush" in error_text(reply.body).lower():
            return False
        if self.offer.weight_version is not None and await self.label() == label:
            raise HalfUpdated(said)
        raise EngineError(f"{said}; it keeps the weights it had")

    async def _flush(self, label: str) -> None:
        """Empty the cache: keys and values of old weights must not serve new ones."""
        reply = await self.client.call(
            "POST", "/flush_cache", params={"timeout": f"{FLUSH_S:g}"}, timeout_s=FLUSH_S + 30, retry=True
        )
        if not reply.ok:
            raise HalfUpdated(
                f"{self.client.url} did not empty its cache for the weights {label}: {error_text(reply.body)}"
            )

    async def _require_label(self, label: str) -> None:
        now = await self.label()
        if now != label:
            raise HalfUpdated(f"{self.client.url} says its weights are {now} after april called them {label}")

    def _undisturbed(self) -> AbstractAsyncContextManager[None]:
        return self._retracted() if "retract" in self.offer.pause_modes else nullcontext()

    @asynccontextmanager
    async def _retracted(self) -> AsyncIterator[None]:
        """Requests of other clients wait in the queue meanwhile, or the server would wait for their end.

        Only while there are any: a server that is left paused, should april die here, serves nobody.
        """
        load = await self.load()
        if load is not None and not load.running and not load.waiting:
            yield
            return
        # the body may be empty but must be there
        async with standing_still(
            lambda: self.client.json("POST", "/pause_generation", {"mode": "retract"}, retry=True),
            lambda: self.client.json("POST", "/continue_generation", {}, retry=True),
        ):
            yield


def _succeeded(reply: Reply) -> bool:
    if not reply.ok:
        return False
    try:
        said = msgspec.json.decode(reply.body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return isinstance(said, dict) and said.get("success") is True
