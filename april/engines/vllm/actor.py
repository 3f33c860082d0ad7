"""Connects april to a vLLM engine in a Ray actor, with one class on each side of the actor's boundary.

:class:`EngineActor` runs in the actor and wraps :class:`~april.engines.vllm.in_process.VllmInProcessEngine`;
:class:`ActorEngine` runs in the scheduler's process. Only bytes pass between them, because Ray wraps exceptions, which
hides their type. The trainer itself puts new weights into the actor.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from msgspec import structs

from april.concurrency.worker_threads import run_in_thread
from april.core.attachments import Placed
from april.core.versions import PolicyVersion
from april.engines.attachments import attachment_bytes
from april.engines.http.server_engine import ServerEngine
from april.engines.http.wire import empty_chunk
from april.engines.protocol import Capabilities, Chunk, EngineFinish, Health, Request
from april.engines.served.wire import CallReply, ChunkMessage, Failure, joined
from april.engines.vllm.in_process import VllmInProcessEngine
from april.errors import EngineError, LinkError
from april.serialization.own_values import pack, unpack
from april.text.server_text import clean

HEALTH_DEADLINE_S = 10.0
ACTOR_CALLS = 100_000
"""Maximum number of concurrent calls of an actor. If requests reached this limit, aborts would wait behind them."""
Answer = TypeVar("Answer", ChunkMessage, CallReply)


class EngineActor:
    """Serves april's calls inside the actor that owns ``llm``. All methods run on the actor's event loop."""

    def __init__(self, llm: Any) -> None:
        self._engine = VllmInProcessEngine(llm, loop=asyncio.get_running_loop())
        self._process_id = secrets.token_hex(8)

    def capabilities(self) -> bytes:
        """Return the encoded capabilities; :func:`capabilities_of` decodes them."""
        return pack(self._engine.capabilities)

    def require_idle(self) -> None:
        """Raise EngineError while april's requests are running, because the trainer must not write weights then."""
        self._engine.require_idle()

    async def generate(self, ask: bytes) -> bytes:
        """Run one request to its end, and return an encoded :class:`ChunkMessage`."""
        request = unpack(ask, Request)
        try:
            chunks = [chunk async for chunk in self._engine.generate(request)]
        except EngineError as error:
            return pack(ChunkMessage(request.attempt_id, [], True, Failure.of(error)))
        return pack(ChunkMessage(request.attempt_id, joined(chunks), True))

    async def abort(self, attempt_ids: Sequence[str]) -> None:
        await self._engine.abort(attempt_ids)

    async def update_weights(self, version: Sequence[int], process_id: str = "") -> bytes:
        """Record that the trainer has put the weights ``version`` into the actor's process ``process_id``.

        The reply has an error if that is not this process. An empty ``process_id`` means that it is unknown.
        """
        answer = CallReply(session=self._process_id)
        try:
            if process_id not in ("", self._process_id):
                raise EngineError("its actor was restarted while weights were handed over; hand them over again")
            await self._engine.update_weights(PolicyVersion(*version))
        except EngineError as error:
            answer.failure = Failure.of(error)
        return pack(answer)

    async def health(self) -> bytes:
        """Return an encoded :class:`CallReply` with health, policy version, and the id of this process as session."""
        return pack(CallReply(
            session=self._process_id, version=self._engine._version, health=await self._engine.health()
        ))  # fmt: skip


async def _with_content(request: Request) -> Request:
    """Return the request with the bytes of all attachments; the actor may run on a machine without their files."""
    if not any(placed.attachment.data is None for placed in request.attached):
        return request

    def read() -> tuple[Placed, ...]:
        attachments = [replace(p.attachment, data=attachment_bytes(p.attachment)) for p in request.attached]
        return tuple(replace(p, attachment=a) for p, a in zip(request.attached, attachments, strict=True))

    return structs.replace(request, attached=await run_in_thread(read))


def capabilities_of(content: bytes) -> Capabilities:
    """Decode the result of :meth:`EngineActor.capabilities`, less the abilities that do not work through an actor."""
    return replace(
        unpack(content, Capabilities), streams=False, updates_from_disk=False, collective=(), takes_tensors=False
    )


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
        self._process_id = ""
        """Id of the actor's process when this engine was paused; empty outside a pause or if the actor did not answer.
        Another id later means that the actor was restarted."""

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Run one request, and yield its tokens at the end. Raises RequestRefused, EngineBusy and EngineError."""
        async with self._admission.request(request.attempt_id) as admitted:
            version = self._version
            if not admitted:
                yield empty_chunk(version, EngineFinish.ABORT)
                return
            self._check(request)
            answer = None
            try:
                sent = pack(await _with_content(request))
                answer = await self._ask(ChunkMessage, "april_generate", sent)
            finally:
                if answer is None:  # this call was cancelled, so nobody would read the result
                    with suppress(Exception):
                        self._actor.april_abort.remote([request.attempt_id])
            for chunk in answer.chunks:
                if chunk.version != version:
                    raise EngineError(
                        f"engine {self.name} generated attempt {request.attempt_id} under weights {chunk.version} "
                        f"instead of {version}; was its actor restarted?"
                    )
                yield chunk

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        """Abort these attempts (None means all); vLLM ends each with the tokens that it has generated."""
        ids = self._to_abort(attempt_ids)
        if ids:
            await self._call("april_abort", ids)

    async def pause(self) -> None:
        """Pause like :class:`ServerEngine`, and note the id of the actor's process, to notice a restart."""
        await super().pause()
        self._process_id = ""
        with suppress(EngineError, TimeoutError):  # an actor that does not answer fails in the update
            async with asyncio.timeout(HEALTH_DEADLINE_S):
                self._process_id = (await self._ask(CallReply, "april_health")).session

    async def resume(self) -> None:
        self._process_id = ""
        await super().resume()

    async def update_weights(self, version: PolicyVersion, path: str | None = None) -> None:
        """Record that the trainer has put the weights ``version`` into the actor, during a pause.

        Raises EngineError if ``path`` is given, requests are running, or vLLM could not clear the old KV cache.
        """
        if path is not None:
            raise EngineError(f"engine {self.name}: only the trainer itself loads weights into its engines")
        self.require_idle()
        await self._ask(CallReply, "april_update_weights", list(version), self._process_id)
        self._labels.present = version

    async def health(self) -> Health:
        """Return whether the actor answers and its vLLM is alive."""
        try:
            async with asyncio.timeout(HEALTH_DEADLINE_S):
                now = await self._ask(CallReply, "april_health")
        except TimeoutError:
            return Health(ok=False, detail=f"its actor has not answered within {HEALTH_DEADLINE_S:g} s")
        except EngineError as error:
            return Health(ok=False, detail=str(error))
        assert now.health is not None
        current = now.version == self._version
        detail = now.health.detail if current else "its actor was restarted, with the weights of its start"
        return Health(ok=now.health.ok, detail=detail, current=current)

    async def close(self) -> None:
        """Abort all requests. The actor keeps running until the trainer shuts it down."""
        if self._admission.inside:
            with suppress(EngineError):
                await self.abort()

    async def _ask(self, kind: type[Answer], method: str, *arguments: Any) -> Answer:
        """Call the actor and return its decoded answer, or raise the error that it reports."""
        content = await self._call(method, *arguments)
        try:
            answer = unpack(content, kind)
        except LinkError as error:
            raise EngineError(f"engine {self.name}: {error}") from None
        if answer.failure is not None:
            raise answer.failure.error()
        return answer

    async def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return await getattr(self._actor, method).remote(*arguments)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            raise EngineError(f"engine {self.name}: {type(error).__name__}: {clean(error)}") from error
