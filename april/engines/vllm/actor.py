"""Connects april to a vLLM engine in an actor (of Ray), with one class on each side of the actor boundary.

:class:`EngineActor` runs in the actor and wraps :class:`~april.engines.vllm.in_process.VllmInProcessEngine`;
:class:`ActorEngine` runs beside the scheduler. Only plain values pass between them. The trainer updates the weights.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np
from msgspec import structs

from april.concurrency.worker_threads import run_in_thread
from april.core.attachments import Attachment, Placed
from april.core.engine_limits import Limit, LimitCode
from april.core.sampling import LogprobKind, SamplingParams
from april.core.versions import PolicyVersion
from april.engines.attachments import attachment_bytes
from april.engines.http.server_engine import ServerEngine
from april.engines.http.wire import chunk_of, empty_chunk
from april.engines.protocol import AbortMeans, Capabilities, Chunk, EngineFinish, Health, Request
from april.engines.vllm.in_process import VllmInProcessEngine
from april.errors import EngineBusy, EngineError, RequestRefused
from april.text.server_text import clean

HEALTH_DEADLINE_S = 10.0
ACTOR_CALLS = 100_000
"""Concurrency limit for an actor; must exceed the requests in flight, or aborts wait behind them."""

Result = tuple[str, Any]
"""("ok", value), or (a key of :data:`_FAILURES`, message): Ray wraps exceptions, which hides their type."""
_FAILURES = {"refused": RequestRefused, "busy": EngineBusy, "error": EngineError}


def _failed(error: EngineError) -> Result:
    return next(kind for kind, error_type in _FAILURES.items() if isinstance(error, error_type)), str(error)


class EngineActor:
    """Serves april's calls inside the actor that owns ``llm``. All methods run on the actor's event loop."""

    def __init__(self, llm: Any) -> None:
        self._engine = VllmInProcessEngine(llm, loop=asyncio.get_running_loop())
        self._life = secrets.token_hex(8)

    def capabilities(self) -> dict[str, Any]:
        """Return the capabilities as plain values, for :func:`capabilities_of`."""
        return asdict(self._engine.capabilities)

    def require_idle(self) -> None:
        """Raise EngineError while april's requests are running, because the trainer must not write weights then."""
        self._engine.require_idle()

    async def generate(self, ask: dict[str, Any]) -> Result:
        """Run one request to its end; returns tokens, log-probabilities, finish reason, stop match and version."""
        request = request_of(ask)
        try:
            chunks = [chunk async for chunk in self._engine.generate(request)]
        except EngineError as error:
            return _failed(error)
        tokens = np.concatenate([chunk.tokens for chunk in chunks])
        logprobs = np.concatenate([chunk.logprobs for chunk in chunks])
        end = chunks[-1]
        return "ok", (tokens, logprobs, str(end.finish), end.stopped_at, list(end.version))

    async def abort(self, attempt_ids: Sequence[str]) -> None:
        """Abort these attempts."""
        await self._engine.abort(attempt_ids)

    async def update_weights(self, version: Sequence[int], life: str | None = None) -> Result:
        """Record that the trainer has put ``version`` into the actor process ``life`` (None if that is unknown)."""
        if life not in (None, self._life):
            return "error", "its actor was restarted while weights were handed over; hand them over again"
        try:
            await self._engine.update_weights(PolicyVersion(*version))
        except EngineError as error:
            return _failed(error)
        return "ok", None

    async def health(self) -> tuple[bool, str, list[int], str]:
        """Return whether vLLM is alive, what is wrong, its policy version, and the id of this actor process."""
        health = await self._engine.health()
        return health.ok, health.detail, list(self._engine._version), self._life


def request_of(plain: dict[str, Any]) -> Request:
    """Convert plain values back to a request."""
    attached = tuple(Placed(**{**one, "attachment": Attachment(**one["attachment"])}) for one in plain["attached"])
    return Request(**{**plain, "sampling": SamplingParams(**plain["sampling"]), "attached": attached})


async def _with_content(request: Request) -> Request:
    """Load the bytes of all attachments into the request; the actor may run on a machine without their files."""
    if not any(placed.attachment.data is None for placed in request.attached):
        return request

    def read() -> tuple[Placed, ...]:
        attachments = [replace(p.attachment, data=attachment_bytes(p.attachment)) for p in request.attached]
        return tuple(replace(p, attachment=a) for p, a in zip(request.attached, attachments, strict=True))

    return structs.replace(request, attached=await run_in_thread(read))


def capabilities_of(plain: dict[str, Any]) -> Capabilities:
    """Convert :meth:`EngineActor.capabilities` back, without the abilities that do not work through an actor."""
    known = {field.name for field in fields(Capabilities)}
    values = {name: value for name, value in plain.items() if name in known}
    values |= {"logprob_kind": LogprobKind(values["logprob_kind"]), "abort_means": AbortMeans(values["abort_means"])}
    values |= {"attachments": tuple(values.get("attachments", ())), "extras": tuple(values.get("extras", ()))}
    values["limits"] = tuple(Limit(**one | {"code": LimitCode(one["code"])}) for one in values.get("limits", ()))
    values |= {"streams": False, "updates_from_disk": False, "collective": (), "takes_tensors": False}
    return Capabilities(**values)


class ActorEngine(ServerEngine):
    """Engine that forwards requests to one engine actor; implements :class:`april.engines.protocol.Engine`.

    Args:
        actor: Handle with the methods of :class:`EngineActor`, each named ``april_<name>``;
            ``actor.april_x.remote(...)`` must be awaitable.
        name: Short unique label.
        capabilities: Capabilities that the actor reported.
    """

    def __init__(self, actor: Any, name: str, capabilities: Capabilities) -> None:
        super().__init__(name, capabilities)
        self._actor = actor
        self._life: str | None = None
        """Id of the actor process that was paused for an update; None if it was not asked or did not answer.
        Another id later means that the actor was restarted."""

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Run one request and yield one chunk. Raises RequestRefused, EngineBusy and EngineError like any engine."""
        async with self._admission.request(request.attempt_id) as admitted:
            version = self._version
            if not admitted:
                yield empty_chunk(version, EngineFinish.ABORT)
                return
            self._check(request)
            ended = False
            try:
                sent = await _with_content(request)
                ask = structs.asdict(sent) | {
                    "sampling": structs.asdict(sent.sampling), "attached": tuple(map(asdict, sent.attached))
                }  # fmt: skip
                tokens, logprobs, finish, stopped_at, under = await self._ask("april_generate", ask)
                ended = True
            finally:
                if not ended:  # this call was cancelled, so nobody would read the result
                    with suppress(Exception):
                        self._actor.april_abort.remote([request.attempt_id])
            if tuple(under) != tuple(version):
                raise EngineError(
                    f"engine {self.name} generated attempt {request.attempt_id} under weights {PolicyVersion(*under)} "
                    f"instead of {version}; was its actor restarted?"
                )
            yield replace(chunk_of(tokens, logprobs, version, EngineFinish(finish)), stopped_at=stopped_at)

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        """Abort these attempts (None means all); vLLM ends them with the tokens they have."""
        ids = self._to_abort(attempt_ids)
        if ids:
            await self._call("april_abort", ids)

    async def pause(self) -> None:
        """Pause like :class:`ServerEngine`, and note the id of the actor process.

        So a restart before the trainer has written its weights is noticed.
        """
        await super().pause()
        self._life = None
        with suppress(EngineError, TimeoutError):  # if it does not answer, the update will report that
            async with asyncio.timeout(HEALTH_DEADLINE_S):
                self._life = (await self._call("april_health"))[3]

    async def resume(self) -> None:
        """Admit requests again."""
        self._life = None
        await super().resume()

    async def update_weights(self, version: PolicyVersion, path: str | None = None) -> None:
        """Record that the trainer has put the weights ``version`` into the actor, during a pause.

        Raises EngineError if ``path`` is given, requests are running, or vLLM could not clear the old KV cache.
        """
        if path is not None:
            raise EngineError(f"engine {self.name}: only the trainer itself loads weights into its engines")
        self.require_idle()
        await self._ask("april_update_weights", list(version), self._life)
        self._labels.present = version

    async def health(self) -> Health:
        """Return whether the actor answers and its vLLM is alive."""
        try:
            async with asyncio.timeout(HEALTH_DEADLINE_S):
                ok, detail, version, _ = await self._call("april_health")
        except TimeoutError:
            return Health(ok=False, detail=f"its actor has not answered within {HEALTH_DEADLINE_S:g} s")
        except EngineError as error:
            return Health(ok=False, detail=str(error))
        current = tuple(version) == tuple(self._version)
        told = detail if current else "its actor was restarted, with the weights of its start"
        return Health(
            ok=ok, detail=told, counters={"open_requests": float(len(self._admission.inside))}, current=current
        )

    async def close(self) -> None:
        """Abort all requests. The trainer shuts down the actor."""
        if self._admission.inside:
            with suppress(EngineError):
                await self.abort()

    async def _ask(self, method: str, *arguments: Any) -> Any:
        """Call the actor and return the value of its :data:`Result`, or raise the error in it."""
        outcome, value = await self._call(method, *arguments)
        if outcome != "ok":
            raise _FAILURES.get(outcome, EngineError)(value)
        return value

    async def _call(self, method: str, *arguments: Any) -> Any:
        """Call the actor once; any failure is raised as EngineError."""
        try:
            return await getattr(self._actor, method).remote(*arguments)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            raise EngineError(f"engine {self.name}: {type(error).__name__}: {clean(error)}") from error
