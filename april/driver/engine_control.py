"""Pauses and resumes engines, has them load weights, and probes them, as the core commands; reports each result.

``april.core.weight_updates`` and ``april.core.engine_recovery`` decide what follows from the outcome.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from msgspec.structs import replace

from april.concurrency.worker_threads import can_be_woken
from april.core import commands as do
from april.core import events as ev
from april.core.types import OnWeightUpdate
from april.driver.attempt_streams import AttemptStreams
from april.driver.user_calls import WorkerThreads
from april.driver.user_code import describe, own_cancellation
from april.engines.http.weight_directories import content_of
from april.engines.protocol import Engine, KeepsAdapters, KeepsRequests, ReadsPaths
from april.errors import EngineBusy, EngineError, EngineUnreachable, WeightsGone

log = logging.getLogger("april")

READING_S = 60.0
"""Maximum number of seconds for hashing the content of a directory of weights."""
PROBE_TIMEOUT_S = 10.0
"""Seconds after which a probe without an answer counts as failed."""


@dataclass(slots=True, eq=False, repr=False)
class EngineControl:
    """Calls engines to pause, load weights, resume, report their health and close.

    ``_post`` passes events to the core, ``_spawn`` starts background tasks, ``_failed`` is called with the number and
    error of a failed call, and ``_streams`` holds the engines' requests.
    """

    _engines: Mapping[str, Engine]
    _post: Callable[[ev.Event], None]
    _spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    _failed: Callable[[int, BaseException], None]
    _threads: WorkerThreads
    _streams: AttemptStreams
    _running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _probes: set[asyncio.Task[None]] = field(default_factory=set)

    def pause(self, command: do.PauseEngine) -> None:
        """Pause an engine, so that it admits no requests."""
        engine, in_flight = self._engines[command.engine], command.in_flight
        self._streams.paused(command.engine)
        if in_flight is OnWeightUpdate.RESUBMIT:
            self._call(command, "pause", engine.pause)
        else:
            self._call(command, "pause", lambda: _pause_in_flight(engine, in_flight))

    def load(self, command: do.LoadEngine) -> None:
        """Load weights into an engine."""
        self._call(command, "update_weights", lambda: self._load(command))

    async def _load(self, command: do.LoadEngine) -> str:
        """Load weights and return the hash of their directory, which must not change during the load.

        Raises WeightsGone if the directory does not hold the weights of the version, or if the engine does not have
        the full weights to which the adapter belongs.
        """
        engine, path = self._engines[command.engine], command.path
        if path is None:
            await engine.update_weights(command.version)
            return ""
        if command.base is not None and isinstance(engine, KeepsAdapters) and engine.whole_version != command.base:
            raise WeightsGone(
                f"engine {command.engine} has the full weights of version {engine.whole_version}, but the adapter of "
                f"version {command.version} belongs to those of version {command.base}; update this engine with full "
                "weights"
            )
        before = await self._content_of(engine, path)
        if command.contents and before not in command.contents:
            has = "holds weights other than those of" if before else (
                "cannot be read from here, so april does not know whether it holds"
            )
            raise WeightsGone(f"{path} {has} version {command.version}")
        await engine.update_weights(command.version, path)
        if before and await self._content_of(engine, path) != before:
            raise EngineUnreachable(
                f"{path} was written while engine {command.engine} loaded it, so april does not know which weights the "
                "engine has; write into a directory again only after the weight update, or use a fresh one"
            )
        return before

    async def content_of(self, path: str) -> str:
        """Return the hash of a directory's content; empty if this process cannot read the directory in time."""
        if not can_be_woken(asyncio.get_running_loop()):
            return content_of(path)
        try:
            async with asyncio.timeout(READING_S):
                content: str = await self._threads.call(content_of, path)
        except Exception:  # unreadable, or too slow
            return ""
        return content

    async def _content_of(self, engine: Engine, path: str) -> str:
        if not isinstance(engine, ReadsPaths):
            return await self.content_of(path)
        said = await engine.content_of(path)
        return said and hashlib.blake2b(said.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()

    def resume(self, command: do.ResumeEngine) -> None:
        """Resume an engine, so that it accepts requests again."""
        self._call(command, "resume", self._engines[command.engine].resume)

    def _call(
        self,
        command: do.PauseEngine | do.LoadEngine | do.ResumeEngine,
        what: str,
        method: Callable[[], Coroutine[Any, Any, str | None]],
    ) -> None:
        name, before = command.engine, self._running.get(command.engine)
        error: Exception | None = None
        content = ""

        async def made() -> None:
            nonlocal content
            content = await method() or ""

        async def call() -> None:
            nonlocal error
            if before is not None and not before.done():
                before.cancel()
                await asyncio.wait([before])
            error = await self._in_time(name, what, made, command.within_s)

        def report(task: asyncio.Task[None]) -> None:
            if not task.cancelled():
                if error is not None:
                    self._failed(command.call, error)
                why = "" if error is None else describe(error)
                keeps = isinstance(command, do.PauseEngine) and command.in_flight is OnWeightUpdate.KEEP
                silent = self._streams.without_tokens(name) if keeps and error is None else ()
                if isinstance(command, do.ResumeEngine):
                    self._streams.resumed(name)
                self._post(ev.EngineCallEnded(name, command.call, _result(error), why, "" if why else content, silent))

        # a done callback, as only after the task's end is it known whether the call was cancelled
        self._running[name] = self._spawn(call())
        self._running[name].add_done_callback(report)

    async def _in_time(
        self, name: str, what: str, method: Callable[[], Coroutine[Any, Any, None]], seconds: float
    ) -> Exception | None:
        """Await a method and return its error or None; after ``seconds``, the error is EngineUnreachable."""
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                await method()
        except TimeoutError as error:
            late = EngineUnreachable(f"engine {name} has not answered {what} in {seconds:g} s")
            return late if limit.expired() else error
        except Exception as error:
            return error
        except asyncio.CancelledError as error:
            return own_cancellation(error)
        return None

    def probe(self, command: do.ProbeEngine) -> None:
        """Start a health probe of an engine; its result is posted as an event."""
        task = self._spawn(self._probe(command))
        self._probes.add(task)
        task.add_done_callback(self._probes.discard)

    async def _probe(self, command: do.ProbeEngine) -> None:
        name = command.engine
        answer = ev.EngineProbed(engine=name, probe=command.probe, answered=False)
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                health = await self._engines[name].health()
        except Exception as error:
            answer = replace(answer, detail=describe(error))
        except asyncio.CancelledError as error:
            answer = replace(answer, detail=str(own_cancellation(error)))
        else:
            load = None if health.load is None else ev.LoadReported(engine=name, **asdict(health.load))
            answer = replace(
                answer, answered=True, ok=health.ok, current=health.current, detail=health.detail, load=load
            )
        self._post(answer)

    async def probe_all(self) -> None:
        """Have the core probe the servers, and wait until all probes have ended."""
        self._post(ev.EnginesAsked())
        if self._probes:
            await asyncio.wait(set(self._probes))

    async def close(self, within_s: float) -> None:
        """Close all engines concurrently; if an engine fails or hangs, this is only logged."""
        engines = self._engines
        closing = (self._in_time(name, "close", engine.close, within_s) for name, engine in engines.items())
        for name, error in zip(engines, await asyncio.gather(*closing), strict=True):
            if error is not None:
                log.error("engine %s could not be closed", name, exc_info=error)


async def _pause_in_flight(engine: Engine, in_flight: OnWeightUpdate) -> None:
    if not isinstance(engine, KeepsRequests):
        raise EngineError(f"engine {engine.name} cannot keep requests over a weight update")
    await engine.pause_in_flight(in_flight)


def _result(error: Exception | None) -> ev.CallResult:
    if error is None:
        return ev.CallResult.DONE
    if isinstance(error, WeightsGone):
        return ev.CallResult.OTHER_CONTENT
    if isinstance(error, EngineUnreachable):
        return ev.CallResult.UNREACHABLE
    return ev.CallResult.BUSY if isinstance(error, EngineBusy) else ev.CallResult.REFUSED
